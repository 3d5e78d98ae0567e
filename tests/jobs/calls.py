# Calls with arguments that the kernel reads, requests that it refuses, and the state of the files afterwards. The calls
# use descriptors of files and directories, and O_PATH descriptors. Each line shows the kernel's answer. Argument: the
# directory beside the mount.
import ctypes, errno, fcntl, mmap, os, select, shutil, socket, stat, struct, sys

libc = ctypes.CDLL(None, use_errno=True)
outside = sys.argv[1]
PLACE_MAX = (1 << 63) - 1

def word(value):
    return ctypes.c_long(value if isinstance(value, int) else ctypes.cast(value, ctypes.c_void_p).value)

def call(number, *arguments):
    ctypes.set_errno(0)
    return libc.syscall(ctypes.c_long(number), *[word(one) if isinstance(one, (int, ctypes.Array)) else one for one in arguments])

def say(what, result):
    print(what, errno.errorcode.get(ctypes.get_errno(), ctypes.get_errno()) if result < 0 else result)

def tried(what, do):
    try:
        print(what, do())
    except OSError as error:
        print(what, errno.errorcode[error.errno])

READ, WRITE, LSEEK, IOCTL, PREAD, PWRITE, READV, SENDFILE = 0, 1, 8, 16, 17, 18, 19, 40
FCNTL, FTRUNCATE, FADVISE, READAHEAD = 72, 77, 221, 187
OPEN, ACCESS, FCHDIR, FACCESSAT2, COPY, SPLICE = 2, 21, 81, 439, 326, 275
SETXATTR, FSETXATTR, FGETXATTR = 188, 190, 193
LINKAT, UTIMENSAT, SYNC_RANGE, FALLOCATE, PREADV, PWRITEV = 265, 280, 277, 285, 295, 296
PREADV2, PWRITEV2, NAME_TO_HANDLE, KCMP, STATFS, RENAMEAT2, PIDFD_GETFD = 327, 328, 303, 312, 137, 316, 438

libc.mmap.restype, libc.syscall.restype = ctypes.c_void_p, ctypes.c_long
closed = libc.mmap(None, ctypes.c_size_t(4096), 0, 0x22, -1, ctypes.c_long(0))
fixed = libc.mmap(None, ctypes.c_size_t(4096), 1, 0x22, -1, ctypes.c_long(0))
room = ctypes.create_string_buffer(8192)
offset = (ctypes.c_long * 2)()
part = (ctypes.c_ulong * 2)(ctypes.addressof(room), 3)
nothing = (ctypes.c_ulong * 2)(ctypes.addressof(room), 0)

with open("file", "wb") as file:
    file.write(b"0123456789")
os.mkdir("directory")
os.symlink("target", "dangling")
os.symlink("directory", "to_directory")
os.symlink("file", "to_file")
os.symlink("loop", "loop")
# If it is to have a session, it has one by now.
for _ in range(100):
    os.stat("file")

files = {
    "both": os.open("file", os.O_RDWR),
    "reads": os.open("file", os.O_RDONLY),
    "writes": os.open("file", os.O_WRONLY),
    "appends": os.open("file", os.O_RDWR | os.O_APPEND),
    "directory": os.open("directory", os.O_RDONLY),
    "directory it says": os.open("directory", os.O_RDONLY | os.O_DIRECTORY),
    "path": os.open("file", os.O_PATH),
    "made": os.open("made", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644),
    "unnamed": os.open(".", os.O_RDWR | os.O_TMPFILE, 0o600),
    "outside": os.open(os.path.join(outside, "file"), os.O_RDWR | os.O_CREAT, 0o644),
    "none": 900,
}

def arguments():
    for name, fd in files.items():
        for at, length, flags in [(-1, 1, 1), (0, -1, 2), (0, 1, 8), (0, 1, 7), (PLACE_MAX, 1, 1), (PLACE_MAX, 0, 1), (5, 0, 0)]:
            say(f"sync_file_range {name} {at} {length} {flags}", call(SYNC_RANGE, fd, at, length, flags))
        for length, advice in [(1, 0), (1, 5), (1, 6), (1, 77), (1, -1), (-1, 3), (0, 4)]:
            say(f"fadvise {name} {length} {advice}", call(FADVISE, fd, 0, length, advice))
        for at, length in [(0, 4096), (-1, 1), (0, -1)]:
            say(f"readahead {name} {at} {length}", call(READAHEAD, fd, at, length))
        for at in [-1, 0, PLACE_MAX - 1, PLACE_MAX]:
            for length in [0, 1, 2, 3, -1]:
                say(f"pread {name} {at} {length}", call(PREAD, fd, room, length, at))
                if length != 1 or at != PLACE_MAX - 1:
                    say(f"pwrite {name} {at} {length}", call(PWRITE, fd, closed, length, at))
            say(f"preadv {name} {at}", call(PREADV, fd, part, 1, at, 0))
            say(f"preadv of nothing {name} {at}", call(PREADV, fd, nothing, 1, at, 0))
            say(f"preadv of too many {name} {at}", call(PREADV, fd, part, 1025, at, 0))
            say(f"pwritev of nothing {name} {at}", call(PWRITEV, fd, nothing, 1, at, 0))
            say(f"seek {name} {at}", call(LSEEK, fd, at, os.SEEK_SET))
            say(f"seek on {name} {at}", call(LSEEK, fd, at, os.SEEK_CUR))
            say(f"read {name} there", call(READ, fd, room, 2))
            say(f"readv {name} there", call(READV, fd, part, 1))
            say(f"write {name} there", call(WRITE, fd, closed, 2))
            say(f"back {name} {at}", call(LSEEK, fd, 0, os.SEEK_SET))
        for whence in [5, 6, -1]:
            say(f"seek {name} whence {whence}", call(LSEEK, fd, 0, whence))
        for size in [-1, PLACE_MAX + 1 - (1 << 64)]:
            say(f"truncate {name} {size}", call(FTRUNCATE, fd, size))
        for mode in [0, 1, 2, 3, 4, 8, 0x10, 0x11, 0x20, 0x21, 0x40, 0x41, 0x80, 0x100, 0x18, 0x1000, -1]:
            for at, length in [(-1, 1), (0, 0), (0, -1), (PLACE_MAX, PLACE_MAX)]:
                say(f"fallocate {name} {mode} {at} {length}", call(FALLOCATE, fd, mode, at, length))
            if mode not in (0, 1, 0x10, 0x11, 3):
                say(f"fallocate {name} {mode}", call(FALLOCATE, fd, mode, 0, 4096))
        for flags in [0x100, -1, 0x400, 0x1000]:
            say(f"utimensat of nothing {name} {flags}", call(UTIMENSAT, fd, 0, 0, flags))
        omitted = (ctypes.c_long * 4)(0, (1 << 30) - 2, 0, (1 << 30) - 2)
        say(f"utimensat that omits {name}", call(UTIMENSAT, fd, 0, omitted, 77))
        say(f"utimensat that omits a missing one {name}", call(UTIMENSAT, fd, b"missing/and/more", omitted, 0))
        wrong = (ctypes.c_long * 4)(0, 1 << 40, 0, 0)
        say(f"utimensat that is wrong {name}", call(UTIMENSAT, fd, 0, wrong, 0))
        for flags in [1, 2, 8, 0x10, 0x20, 0x30, 0x200, -1]:
            if flags != 0x10 and flags != 0x20:
                say(f"pwritev2 {name} {flags}", call(PWRITEV2, fd, nothing, 1, 0, 0, flags))
                say(f"preadv2 {name} {flags}", call(PREADV2, fd, nothing, 1, 0, 0, flags))
            say(f"pwritev2 of nothing {name} {flags}", call(PWRITEV2, fd, nothing, 1, -2, 0, flags))
    say("utimensat without times", call(UTIMENSAT, -100, b"missing", closed, 0))
    say("utimensat without a path", call(UTIMENSAT, -100, 0, 0, 0))
    for name, fd in files.items():
        for other_name, other in files.items():
            offset[0] = 2
            say(f"sendfile {name} {other_name} at a place that stays", call(SENDFILE, fd, other, fixed, 1))
            for at in [-1, PLACE_MAX]:
                offset[0] = at
                say(f"sendfile {name} {other_name} {at}", call(SENDFILE, fd, other, offset, 3))
    print(os.stat("file").st_size, open("file", "rb").read()[:20])

def requests():
    known = {
        "FS_IOC_GETFLAGS": 0x80086601, "FS_IOC_SETFLAGS": 0x40086602, "FS_IOC_GETVERSION": 0x80087601, "FIEMAP": 0xC020660B,
        "FITRIM": 0xC0185879, "FSGETXATTR": 0x801C581F, "FSSETXATTR": 0x401C5820, "FIBMAP": 1, "FIGETBSZ": 2, "FIOQSIZE": 0x5460,
        "FICLONERANGE": 0x4020940D, "FIDEDUPERANGE": 0xC0189436, "LOOP_SET_FD": 0x4C00, "LOOP_CONFIGURE": 0x4C0A,
        "EXT4_IOC_MOVE_EXT": 0xC028660F, "XFS_IOC_EXCHANGE_RANGE": 0x40285881, "BTRFS_IOC_SEND": 0x40489426, "FIOASYNC": 0x5452,
        "TCGETS": 0x5401, "TIOCGPGRP": 0x540F, "SIOCGIFCONF": 0x8912, "BLKGETSIZE": 0x1260, "unknown": 0x12345678,
        "ENABLE_VERITY": 0x40806685, "RESVSP": 0x40305828,
    }
    for name, fd in files.items():
        for request_name, request in known.items():
            ctypes.memset(room, 0, 4096)
            if not (name == "outside" and request_name in ("FIEMAP", "FSGETXATTR", "FS_IOC_GETFLAGS", "FITRIM", "FIBMAP", "FS_IOC_GETVERSION", "FS_IOC_SETFLAGS", "FSSETXATTR", "EXT4_IOC_MOVE_EXT", "FIDEDUPERANGE", "FICLONERANGE", "ENABLE_VERITY", "FIGETBSZ", "RESVSP", "FIOQSIZE")):
                say(f"{request_name} {name}", call(IOCTL, fd, request, room))
            say(f"{request_name} {name} nowhere", call(IOCTL, fd, request, closed)) if name not in ("outside",) else None
        if name not in ("outside", "directory", "directory it says"):
            say(f"FIONREAD {name}", call(IOCTL, fd, 0x541B, offset))
            print(offset[0] & 0xFFFFFFFF if name not in ("none", "path") else "")
        ctypes.memset(room, 1, 4)
        say(f"FIONBIO {name}", call(IOCTL, fd, 0x5421, room))
        say(f"F_GETFL {name}", call(FCNTL, fd, fcntl.F_GETFL, 0))
        ctypes.memset(room, 0, 4)
        say(f"FIONBIO off {name}", call(IOCTL, fd, 0x5421, room))
        for other_name, other in files.items():
            struct.pack_into("qQQQ", room, 0, other, 0, 0, 0)
            if name == "outside" or other_name == "outside":
                continue
            say(f"FICLONERANGE {name} {other_name}", call(IOCTL, fd, 0x4020940D, room))
            struct.pack_into("QQHHIqQQiI", room, 0, 0, 1, 1, 0, 0, other, 0, 0, 0, 0)
            say(f"FIDEDUPERANGE {name} {other_name}", call(IOCTL, fd, 0xC0189436, room))
            say(f"F_DUPFD_QUERY {name} {other_name}", call(FCNTL, fd, 1027, other))
        for command in [8 + 1, 11, 16, 17, 1031, 1032, 1033, 1034, 1029, 9999, 1037, 1025]:
            say(f"fcntl {name} {command}", call(FCNTL, fd, command, room))
        for lease in [2, 3, 77]:
            say(f"F_SETLEASE {name} {lease}", call(FCNTL, fd, 1024, lease))
        if name not in ("directory", "directory it says"):
            say(f"F_NOTIFY {name}", call(FCNTL, fd, 1026, 0x80000000 + 2))
        say(f"F_CREATED_QUERY {name}", call(FCNTL, fd, 1028, 0))
        for number, what in [(41 + 2, "accept"), (44, "sendto"), (45, "recvfrom"), (46, "sendmsg"), (47, "recvmsg"), (48, "shutdown"), (49, "bind"), (42, "connect"), (50, "listen"), (51, "getsockname"), (52, "getpeername"), (54, "setsockopt"), (55, "getsockopt"), (232, "epoll_wait"), (254, "inotify_add_watch"), (255, "inotify_rm_watch"), (286, "timerfd_settime"), (287, "timerfd_gettime"), (289, "signalfd4"), (278, "vmsplice"), (443, "quotactl_fd")]:
            ctypes.memset(room, 0, 256)
            second = room if number in (44, 45, 46, 47, 49, 42, 43, 51, 52, 232, 254, 289, 278) else 1
            say(f"{what} {name}", call(number, fd, second, 8, 0, room, room))
        for flags in [0, 0x1000]:
            ctypes.memset(room, 0, 256)
            say(f"name_to_handle_at {name} {flags}", call(NAME_TO_HANDLE, fd, b"", room, offset, flags))
        ctypes.memset(room, 0, 256)
        if name != "none":
            say(f"statfs {name}", call(STATFS, b"/proc/self/fd/%d" % fd, room))
            print(room.raw[:8])
    for name in ("directory", "file"):
        fd = os.open(name, os.O_PATH)
        tried(f"chdir by number {name}", lambda: os.chdir(f"/proc/self/fd/{fd}"))
        os.chdir(os.path.dirname(os.getcwd())) if name == "directory" else None
        os.close(fd)

LINKS = [("target", "dangling"), ("directory", "to_directory"), ("file", "to_file"), ("loop", "loop"), ("named/", "slashed")]

def furnish():
    open("file", "w").close()
    os.mkdir("directory")
    for to, link in LINKS:
        os.symlink(to, link)

def slashes():
    one = lambda do, *arguments: tried(f"{do.__name__} {arguments}", lambda: do(*arguments))
    furnish()
    for name in ["dangling/", "to_directory/", "to_file/", "file/", "directory/", "missing/", "file/more", "dangling/more", "missing/more", "directory/.", "directory/..", "./", "dangling//", "loop/", "slashed", "slashed/"]:
        one(os.mkdir, name)
        one(os.mknod, name, 0o644 | stat.S_IFREG)
        one(os.symlink, "x", name)
        one(os.link, "file", name)
        one(os.unlink, name)
        for flags in [os.O_CREAT | os.O_WRONLY, os.O_CREAT | os.O_EXCL | os.O_RDWR, os.O_CREAT | os.O_RDONLY | os.O_NOFOLLOW, os.O_RDONLY, os.O_RDONLY | os.O_NOFOLLOW, os.O_CREAT | os.O_DIRECTORY, os.O_PATH | os.O_NOFOLLOW | os.O_CREAT, os.O_TMPFILE | os.O_RDONLY]:
            tried(f"open {name} {flags}", lambda: os.close(os.open(name, flags, 0o644)))
        one(os.rename, name, "elsewhere")
        one(os.rename, "file", name)
        one(os.rename, "directory", name)
        one(os.rename, name, name)
        for flags in (1, 2):
            say(f"renameat2 {name} {flags}", call(RENAMEAT2, -100, b"directory", -100, name.encode(), flags))
            say(f"renameat2 of {name} {flags}", call(RENAMEAT2, -100, name.encode(), -100, b"file", flags))
        one(os.readlink, name)
        tried(f"lstat {name}", lambda: stat.S_IFMT(os.lstat(name).st_mode))
        one(os.rmdir, name) if name != "directory/" else None
        print(sorted(os.listdir(".")), os.listdir("directory") if os.path.isdir("directory") else None)
        # Restores the initial state.
        for path in os.listdir("."):
            shutil.rmtree(path) if os.path.isdir(path) and not os.path.islink(path) else os.unlink(path)
        furnish()

def openings():
    for name in ["file", "missing", "directory", "dangling", "to_file", "to_directory", "loop"]:
        for flags in [3, 3 | os.O_TRUNC, os.O_CREAT | os.O_DIRECTORY, os.O_TMPFILE | os.O_RDONLY, os.O_TMPFILE | os.O_CREAT | os.O_RDWR, 0o20000000 | os.O_RDWR,
                      os.O_DIRECT, os.O_DIRECTORY | os.O_NOFOLLOW, os.O_NOFOLLOW, os.O_DIRECT | os.O_DIRECTORY]:
            fd = call(OPEN, name.encode(), flags, 0o644)
            say(f"open {name} {flags}", min(fd, 0))
            if fd >= 0:
                say("has flags", call(FCNTL, fd, fcntl.F_GETFL, 0))
                say("is read", call(READ, fd, room, 1))
                say("is written", call(WRITE, fd, room, 0))
                say("is chosen from", call(FCNTL, fd, fcntl.F_SETFL, os.O_ASYNC | os.O_APPEND))
                say("has other flags", call(FCNTL, fd, fcntl.F_GETFL, 0))
                say("is worked in", call(FCHDIR, fd)) if name not in ("directory", "to_directory") else None
                os.close(fd)
        for mode in [8, 9, -1, 0]:
            say(f"access {name} {mode}", call(ACCESS, name.encode(), mode))
            say(f"faccessat2 {name} {mode}", call(FACCESSAT2, -100, name.encode(), mode, 0x200))
    path = os.open("file", os.O_PATH)
    say("a path alone is worked in", call(FCHDIR, path))
    for name, fd in files.items():
        for other_name, other in files.items():
            say(f"copy_file_range {name} {other_name} nowhere", call(COPY, fd, closed, other, 0, 1, 0))
            say(f"copy_file_range {name} {other_name} of nothing", call(COPY, fd, 0, other, 0, 0, 0))

def shared(fd):
    os.ftruncate(fd, 4096)
    mapped = mmap.mmap(fd, 4096)
    mapped[0:1] = b"x"
    mapped.close()

def forked(fd):
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)

def named():
    before = {
        "nothing": lambda fd: None, "flock": lambda fd: fcntl.flock(fd, fcntl.LOCK_EX), "a mapping": shared,
        "select": lambda fd: select.select([fd], [], [], 0), "readlink": lambda fd: os.readlink(f"/proc/self/fd/{fd}"), "a fork": forked,
        "a duplicate": lambda fd: os.dup(fd), "a lock": lambda fd: fcntl.lockf(fd, fcntl.LOCK_EX), "its owner": lambda fd: fcntl.fcntl(fd, 8, os.getpid()),
    }
    link = lambda fd, path, name, flags: call(LINKAT, fd, path, -100, name.encode(), flags)
    for what, do in before.items():
        for way in ("empty", "number", "kept", "exclusive", "removed", "child", "other"):
            name = f"{what} {way}"
            if way == "removed":
                fd = os.open(name, os.O_CREAT | os.O_RDWR)
                os.unlink(name)
            else:
                fd = os.open(".", os.O_TMPFILE | os.O_RDWR | (os.O_EXCL if way == "exclusive" else 0), 0o600)
            os.write(fd, b"body")
            do(fd)
            number = b"/proc/self/fd/%d" % fd
            if way == "child":
                child = os.fork()
                if child == 0:
                    os._exit(0 if link(fd, b"", name, 0x1000) == 0 else ctypes.get_errno())
                say(f"{name} in a child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            elif way == "number":
                say(name, link(-100, number, name, 0x400))
            elif way == "kept":
                say(name, link(-100, number, name, 0))
            else:
                say(name, link(fd, b"", name, 0x1000))
            say(f"{name} again", link(fd, b"", name + " again", 0x1000))
            say(f"{name} with a flag", link(fd, b"", name, 0x1))
            say(f"{name} without one", link(fd, b"", name, 0))
            tried(f"{name} is", lambda: (os.stat(name).st_nlink, os.fstat(fd).st_nlink, open(name, "rb").read()[:4]))
            os.close(fd)
    for name, fd in files.items():
        say(f"{name} gets a name", link(fd, b"", f"name of {name}", 0x1000))
        say(f"{name} gets one by its number", link(-100, b"/proc/self/fd/%d" % fd, f"another of {name}", 0x400))
    print(sorted(os.listdir(".")))

def sockets():
    os.mkdir("with sockets")
    fd = os.open("with sockets", os.O_PATH | os.O_DIRECTORY)
    server, client = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
    tried("bind by a number", lambda: server.bind(f"/proc/self/fd/{fd}/socket"))
    server.listen(1)
    tried("connect by a number", lambda: client.connect(f"/proc/self/fd/{fd}/socket"))

def passed():
    with open("passed", "wb") as file:
        file.write(b"what is passed")
    fd, process = os.open("passed", os.O_RDWR), os.pidfd_open(os.getpid())
    got = call(PIDFD_GETFD, process, fd, 0)
    print("by a process's descriptor", os.read(got, 8), os.lseek(fd, 0, os.SEEK_CUR))
    here, there = socket.socketpair(socket.AF_UNIX)
    socket.send_fds(here, [b"one"], [os.open("passed", os.O_RDONLY)])
    print("by a message", os.read(socket.recv_fds(there, 3, 1)[1][0], 8))

def compared():
    for name, fd in files.items():
        for other_name, other in [*files.items(), ("duplicate", os.dup(fd) if name != "none" else 900)]:
            say(f"kcmp {name} {other_name}", min(1, call(KCMP, os.getpid(), os.getpid(), 0, fd, other)))

def closed_numbers():
    # The lowest number that is closed: a file that the library opens beside the program's would get it.
    fresh = {
        "both": os.open("file", os.O_RDWR),
        "writes": os.open("file", os.O_WRONLY),
        "directory": os.open("directory", os.O_RDONLY),
        "path": os.open("file", os.O_PATH),
    }
    free = os.dup(0)
    os.close(free)
    for name, fd in fresh.items():
        say(f"copy {name} to a closed one", call(COPY, fd, 0, free, 0, 10, 0))
        say(f"copy a closed one to {name}", call(COPY, free, 0, fd, 0, 10, 0))
        say(f"copy {name} to a closed one with flags", call(COPY, fd, 0, free, 0, 10, 1))
        say(f"copy {name} beyond all offsets", call(COPY, fd, 0, fresh["writes"], 0, -1, 0))
        say(f"clone a closed one to {name}", call(IOCTL, fd, 0x40049409, free))
        say(f"send {name} to a closed one", call(SENDFILE, free, fd, 0, 10))
        say(f"send a closed one to {name}", call(SENDFILE, fd, free, 0, 10))
        say(f"send {name} beyond all offsets", call(SENDFILE, fresh["writes"], fd, 0, -1))
        for length in [0, 10]:
            say(f"splice {name} to a closed one {length}", call(SPLICE, fd, 0, free, 0, length, 0))
            say(f"splice a closed one to {name} {length}", call(SPLICE, free, 0, fd, 0, length, 0))
        for flags in [0x10, 0x20, 0x30, 0x8000]:
            say(f"preadv2 {name} {flags:#x}", call(PREADV2, fd, part, 1, 0, 0, flags))

def wrong_first():
    for bad in [1, closed]:
        for flags in [os.O_CREAT | os.O_DIRECTORY, os.O_TMPFILE, os.O_TMPFILE | os.O_CREAT]:
            say(f"open a bad path {flags:#o}", call(OPEN, bad, flags, 0o644))
        say("setxattr of nothing", call(SETXATTR, b"none", b"user.name", bad, 3, 0))
        say("setxattr below a file", call(SETXATTR, b"file/none", b"user.name", bad, 3, 0))
        say("fsetxattr of a path alone", call(FSETXATTR, files["path"], b"user.name", bad, 3, 0))
    say("fgetxattr of a path alone, without a name", call(FGETXATTR, files["path"], 1, room, 10))
    say("F_SETFL O_DIRECT of a directory", call(FCNTL, files["directory"], fcntl.F_SETFL, os.O_DIRECT))
    for make in [lambda: os.rmdir("file"), lambda: os.unlink("directory"), lambda: os.unlink("directory/"), lambda: os.rename("file", "x" * 256)]:
        tried("names", make)

def handed_over():
    one, other = os.open("file", os.O_RDONLY), os.open("sent", os.O_WRONLY | os.O_CREAT, 0o644)
    fcntl.flock(one, fcntl.LOCK_SH)
    os.lseek(one, 10, os.SEEK_SET)
    for length in [-1, PLACE_MAX, PLACE_MAX - 10, 5]:
        say(f"send {length} of a locked file", call(SENDFILE, other, one, 0, length))
    os.close(os.open("handed", os.O_WRONLY | os.O_CREAT, 0o644))
    os.mkdir("handed directory")
    for number, flags in enumerate([0, os.O_NOFOLLOW, os.O_ASYNC, os.O_APPEND | os.O_NOFOLLOW]):
        fd = os.open("handed", os.O_RDWR | flags)
        fcntl.flock(fd, fcntl.LOCK_SH)
        say(f"F_GETFL of a locked file {number}", call(FCNTL, fd, fcntl.F_GETFL, 0))
        os.close(fd)
    for flags in [0, os.O_DIRECTORY]:
        fd = os.open("handed directory", flags)
        fcntl.flock(fd, fcntl.LOCK_SH)
        say(f"F_GETFL of a locked directory {flags:#o}", call(FCNTL, fd, fcntl.F_GETFL, 0))
        os.close(fd)

def grown():
    for number in range(50):
        one = os.open(f"grown{number}", os.O_WRONLY | os.O_CREAT, 0o644)
        other = os.open(f"grown{number}", os.O_RDWR)
        if number % 2:
            os.ftruncate(one, 1000)
        else:
            os.pwrite(one, bytes(100000), 0)
        # Behind the end that the kernel knew, it ended with a signal.
        print("mapped", mmap.mmap(other, 1000, mmap.MAP_SHARED, mmap.PROT_READ)[999])

def nameless():
    with open("nameless", "wb") as file:
        file.write(bytes(5000))
    fd = os.open("nameless", os.O_RDWR)
    os.unlink("nameless")
    for _ in range(3):
        # The kernel sets it, by a file of its own that it closes again.
        tried("attribute of a file without a name", lambda: os.setxattr(fd, b"trusted.one", b"1"))
    print("mapped", mmap.mmap(fd, 5000, mmap.MAP_SHARED, mmap.PROT_READ)[4999])

for name, fd in files.items():
    say(f"F_GETFL {name}", call(FCNTL, fd, fcntl.F_GETFL, 0))
sys.stdout.flush()
closed_numbers()
wrong_first()
handed_over()
grown()
nameless()
requests()
arguments()
openings()
named()
sockets()
passed()
compared()
os.mkdir("slashes")
os.chdir("slashes")
slashes()
