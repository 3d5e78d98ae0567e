"""Files of an Ashlar file system, served in this process by libashlar, without the kernel.

    import ashlar

    with ashlar.FileSystem("/srv/files") as files:
        with files.open("notes/today", "w") as file:
            file.write("...")
        print(files.listdir("notes"))

Paths are those of the file system: "/" is its root, wherever it's mounted. Errors are OSError, as those of the os module. The calls are
described in ashlar.h. ctypes lets other threads run while a call lasts.

The library is looked for where the system has it, or is the one that ASHLAR_LIBRARY names. The structures are those of Linux on
machines of 64 bits.
"""

import ctypes
import io
import os

_int, _size, _offset = ctypes.c_int, ctypes.c_size_t, ctypes.c_int64
_pointer, _text = ctypes.c_void_p, ctypes.c_char_p

_MESSAGE_BYTES = 512


class _Dirent(ctypes.Structure):
    _fields_ = [("inode", ctypes.c_uint64), ("next", ctypes.c_int64), ("kind", ctypes.c_ubyte), ("name", ctypes.c_char * 256)]


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_int64), ("nanoseconds", ctypes.c_int64)]


# struct stat differs between machines; what follows differs in the first part only.
if os.uname().machine == "x86_64":
    _BEFORE = [("dev", ctypes.c_uint64), ("ino", ctypes.c_uint64), ("nlink", ctypes.c_uint64), ("mode", ctypes.c_uint32),
               ("uid", ctypes.c_uint32), ("gid", ctypes.c_uint32), ("_pad", ctypes.c_uint32), ("rdev", ctypes.c_uint64),
               ("size", ctypes.c_int64), ("blksize", ctypes.c_int64), ("blocks", ctypes.c_int64)]
else:
    _BEFORE = [("dev", ctypes.c_uint64), ("ino", ctypes.c_uint64), ("mode", ctypes.c_uint32), ("nlink", ctypes.c_uint32),
               ("uid", ctypes.c_uint32), ("gid", ctypes.c_uint32), ("rdev", ctypes.c_uint64), ("_pad", ctypes.c_uint64),
               ("size", ctypes.c_int64), ("blksize", ctypes.c_int32), ("_pad2", ctypes.c_int32), ("blocks", ctypes.c_int64)]


class Stat(ctypes.Structure):
    """struct stat, without the st_ before the names; times are in nanoseconds since 1970."""

    _fields_ = _BEFORE + [("_atime", _Timespec), ("_mtime", _Timespec), ("_ctime", _Timespec), ("_end", ctypes.c_int64 * 3)]

    atime_ns = property(lambda self: self._atime.seconds * 10**9 + self._atime.nanoseconds)
    mtime_ns = property(lambda self: self._mtime.seconds * 10**9 + self._mtime.nanoseconds)
    ctime_ns = property(lambda self: self._ctime.seconds * 10**9 + self._ctime.nanoseconds)


def _library():
    library = ctypes.CDLL(os.environ.get("ASHLAR_LIBRARY", "libashlar.so.0"))
    for name, result, *arguments in [
        ("open_fs", _int, ctypes.POINTER(_pointer), _text, ctypes.c_uint, _text, _size),
        ("close_fs", _int, _pointer),
        ("strerror", _text, _int),
        ("open", _int, _pointer, _text, _int, ctypes.c_uint),
        ("close", _int, _pointer, _int),
        ("read", ctypes.c_ssize_t, _pointer, _int, _pointer, _size),
        ("write", ctypes.c_ssize_t, _pointer, _int, _pointer, _size),
        ("lseek", _offset, _pointer, _int, _offset, _int),
        ("fsync", _int, _pointer, _int),
        ("ftruncate", _int, _pointer, _int, _offset),
        ("stat", _int, _pointer, _text, ctypes.POINTER(Stat)),
        ("lstat", _int, _pointer, _text, ctypes.POINTER(Stat)),
        ("fstat", _int, _pointer, _int, ctypes.POINTER(Stat)),
        ("mkdir", _int, _pointer, _text, ctypes.c_uint),
        ("rmdir", _int, _pointer, _text),
        ("unlink", _int, _pointer, _text),
        ("rename", _int, _pointer, _text, _text, ctypes.c_uint),
        ("link", _int, _pointer, _text, _text),
        ("symlink", _int, _pointer, _text, _text),
        ("readlink", ctypes.c_ssize_t, _pointer, _text, _text, _size),
        ("chmod", _int, _pointer, _text, ctypes.c_uint),
        ("opendir", _int, _pointer, _text, ctypes.POINTER(_pointer)),
        ("readdir", _int, _pointer, ctypes.POINTER(_Dirent)),
        ("closedir", _int, _pointer),
    ]:
        function = getattr(library, "ashlar_" + name)
        function.restype, function.argtypes = result, arguments
    return library


_ashlar = _library()


def _check(result, path=None):
    if result < 0:
        raise OSError(-result, _ashlar.ashlar_strerror(result).decode(), path)
    return result


class FileSystem:
    """A session with the Ashlar that is mounted on a directory."""

    def __init__(self, place):
        self._fs = _pointer()
        message = ctypes.create_string_buffer(_MESSAGE_BYTES)
        result = _ashlar.ashlar_open_fs(ctypes.byref(self._fs), os.fsencode(place), 0, message, len(message))
        if result < 0:
            raise OSError(-result, message.value.decode(errors="replace") or os.strerror(-result))

    def close(self):
        """Ends the session."""
        fs, self._fs = self._fs, None
        _ashlar.ashlar_close_fs(fs)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def open(self, path, mode="r", **how):
        """As the built-in open: a text file, or with "b" one of bytes."""
        kind = mode.replace("b", "").replace("t", "")
        flags = {"r": os.O_RDONLY, "w": os.O_WRONLY | os.O_CREAT | os.O_TRUNC, "a": os.O_WRONLY | os.O_CREAT | os.O_APPEND,
                 "x": os.O_WRONLY | os.O_CREAT | os.O_EXCL}[kind[0]]
        if "+" in kind:
            flags = flags & ~os.O_ACCMODE | os.O_RDWR
        raw = File(self, path, flags)
        buffered = io.BufferedRandom if "+" in kind else io.BufferedReader if kind == "r" else io.BufferedWriter
        return buffered(raw) if "b" in mode else io.TextIOWrapper(buffered(raw), **how)

    def listdir(self, path="/"):
        """The names in a directory."""
        stream, entry, names = _pointer(), _Dirent(), []
        _check(_ashlar.ashlar_opendir(self._fs, os.fsencode(path), ctypes.byref(stream)), path)
        try:
            while _check(_ashlar.ashlar_readdir(stream, ctypes.byref(entry)), path):
                names.append(os.fsdecode(entry.name))
        finally:
            _ashlar.ashlar_closedir(stream)
        return [name for name in names if name not in (".", "..")]

    def stat(self, path, follow_symlinks=True):
        """What there is to know of a file."""
        stat = Stat()
        look = _ashlar.ashlar_stat if follow_symlinks else _ashlar.ashlar_lstat
        _check(look(self._fs, os.fsencode(path), ctypes.byref(stat)), path)
        return stat

    def mkdir(self, path, mode=0o777):
        """Makes a directory."""
        _check(_ashlar.ashlar_mkdir(self._fs, os.fsencode(path), mode), path)

    def rmdir(self, path):
        """Removes an empty directory."""
        _check(_ashlar.ashlar_rmdir(self._fs, os.fsencode(path)), path)

    def unlink(self, path):
        """Removes a name of a file."""
        _check(_ashlar.ashlar_unlink(self._fs, os.fsencode(path)), path)

    def rename(self, old, new, flags=0):
        """Moves a name, in one step; another file that has the new name is replaced."""
        _check(_ashlar.ashlar_rename(self._fs, os.fsencode(old), os.fsencode(new), flags), old)

    def link(self, old, new):
        """Another name for a file."""
        _check(_ashlar.ashlar_link(self._fs, os.fsencode(old), os.fsencode(new)), old)

    def symlink(self, target, path):
        """Makes a symbolic link."""
        _check(_ashlar.ashlar_symlink(self._fs, os.fsencode(target), os.fsencode(path)), path)

    def readlink(self, path):
        """Where a symbolic link leads."""
        room = ctypes.create_string_buffer(4096)
        length = _check(_ashlar.ashlar_readlink(self._fs, os.fsencode(path), room, len(room)), path)
        return os.fsdecode(room.raw[:length])

    def chmod(self, path, mode):
        """Sets permission bits."""
        _check(_ashlar.ashlar_chmod(self._fs, os.fsencode(path), mode), path)


class File(io.RawIOBase):
    """An open file, unbuffered."""

    def __init__(self, files, path, flags, mode=0o666):
        super().__init__()
        self._files, self.name, self._access, self._file = files, path, flags & os.O_ACCMODE, None
        self._file = _check(_ashlar.ashlar_open(files._fs, os.fsencode(path), flags, mode), path)

    def close(self):
        file, self._file = self._file, None
        super().close()
        if file is not None:
            _check(_ashlar.ashlar_close(self._files._fs, file), self.name)

    def readable(self):
        return self._access != os.O_WRONLY

    def writable(self):
        return self._access != os.O_RDONLY

    def seekable(self):
        return True

    def readinto(self, buffer):
        room = (ctypes.c_char * len(buffer)).from_buffer(buffer)
        return _check(_ashlar.ashlar_read(self._files._fs, self._file, room, len(buffer)), self.name)

    def write(self, data):
        data = bytes(data)
        return _check(_ashlar.ashlar_write(self._files._fs, self._file, data, len(data)), self.name)

    def seek(self, offset, whence=os.SEEK_SET):
        return _check(_ashlar.ashlar_lseek(self._files._fs, self._file, offset, whence), self.name)

    def truncate(self, size=None):
        size = self.tell() if size is None else size
        _check(_ashlar.ashlar_ftruncate(self._files._fs, self._file, size), self.name)
        return size

    def fsync(self):
        """Makes all that was done before persistent."""
        _check(_ashlar.ashlar_fsync(self._files._fs, self._file), self.name)

    def stat(self):
        """What there is to know of the file."""
        stat = Stat()
        _check(_ashlar.ashlar_fstat(self._files._fs, self._file, ctypes.byref(stat)), self.name)
        return stat
