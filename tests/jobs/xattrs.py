"""Prints the answers of the calls for extended attributes, a line each. In the current directory."""
import ctypes
import errno
import os
import stat

libc = ctypes.CDLL(None, use_errno=True)


def tell(what, does):
    try:
        answer = does()
    except OSError as error:
        answer = errno.errorcode[error.errno]
    print(what, answer)


def raw(what, name, *arguments):
    answer = getattr(libc, name)(*arguments)
    print(what, answer if answer >= 0 else errno.errorcode[ctypes.get_errno()])


os.mkdir("directory")
open("file", "w").write("text")
os.symlink("file", "link")
os.mkfifo("pipe")
file = os.open("file", os.O_RDWR)
read = os.open("file", os.O_RDONLY)
directory = os.open("directory", os.O_RDONLY)
path = os.open("file", os.O_PATH)
names = ["user.a", "user.", "user", "trusted.a", "security.a", "security.capability", "security.selinux", "system.posix_acl_access",
         "system.posix_acl_default", "system.a", "other.a", "user." + "n" * 250, "user." + "n" * 251, "", "ashlar.quota"]
# An access list: owner rw, user 1 r, group r, mask r, others r.
access = b"\2\0\0\0" + b"".join(a.to_bytes(2, "little") + b.to_bytes(2, "little") + c.to_bytes(4, "little") for a, b, c in
                                [(1, 6, 2**32 - 1), (2, 4, 1), (4, 4, 2**32 - 1), (16, 4, 2**32 - 1), (32, 4, 2**32 - 1)])
for target in ["file", "directory", "link", "pipe", "none", "file/none", file, read, directory, path, 77]:
    for follows in [True, False] if isinstance(target, str) else [True]:
        for name in names:
            where = (target if isinstance(target, str) else ["file", "read", "directory", "path", "closed"][
                [file, read, directory, path, 77].index(target)], follows, name[:30])
            tell(("get",) + where, lambda: os.getxattr(target, name, follow_symlinks=follows))
            value = access if name.startswith("system.posix_acl") else b"a value"
            for flags in [os.XATTR_REPLACE, os.XATTR_CREATE, os.XATTR_CREATE, 0, 4]:
                tell(("set", flags) + where, lambda: os.setxattr(target, name, value, flags, follow_symlinks=follows))
            tell(("get again",) + where, lambda: os.getxattr(target, name, follow_symlinks=follows))
            tell(("list",) + where, lambda: sorted(os.listxattr(target, follow_symlinks=follows)))
            tell(("remove",) + where, lambda: os.removexattr(target, name, follow_symlinks=follows))
            tell(("remove again",) + where, lambda: os.removexattr(target, name, follow_symlinks=follows))
            tell(("list again",) + where, lambda: sorted(os.listxattr(target, follow_symlinks=follows)))
print(os.stat("file").st_mode, os.stat("directory").st_mode)
for size in [0, 1, 65535, 65536, 65537]:
    tell(("size", size), lambda: os.setxattr("file", "user.size", b"x" * size))
    tell(("size", size), lambda: len(os.getxattr("file", "user.size")))
os.removexattr("file", "user.size")
os.setxattr("file", "user.one", b"1234567")
os.setxattr(file, "user.two", b"")
room = ctypes.create_string_buffer(100)
for size in [0, 1, 6, 7, 8, 100]:
    raw(("room", size), "getxattr", b"file", b"user.one", room, size)
    raw(("room for none", size), "lgetxattr", b"file", b"user.two", room, size)
    raw(("room in the list", size), "listxattr", b"file", room, 17 + size % 3)
    raw(("room in the list", size), "flistxattr", read, room, size)
bad = ctypes.c_void_p(4096)
raw("a name that is nowhere", "getxattr", b"file", bad, room, 100)
raw("a value that is nowhere", "getxattr", b"file", b"user.one", bad, 100)
raw("a value that is nowhere", "fsetxattr", file, b"user.one", bad, 10, 0)
raw("nothing that is nowhere", "fsetxattr", file, b"user.three", bad, 0, 0)
raw("a list that is nowhere", "listxattr", b"file", bad, 100)
raw("no path", "getxattr", bad, b"user.one", room, 100)
raw("no flags", "setxattr", b"file", b"user.one", b"x", 1, 8)
before = os.stat("file")
os.setxattr("file", "user.one", b"changed")
after = os.stat("file")
print(after.st_ctime_ns > before.st_ctime_ns, after.st_mtime_ns == before.st_mtime_ns)
os.write(file, b"more")
print(os.getxattr(file, "user.one"), os.pread(read, 9, 0))


# Access lists that say no more than the permission bits, and some that nearly do.
def acl(*entries, version=2):
    return version.to_bytes(4, "little") + b"".join(
        a.to_bytes(2, "little") + b.to_bytes(2, "little") + c.to_bytes(4, "little") for a, b, c in entries)


none = 2**32 - 1
plain = acl((1, 6, none), (4, 4, none), (32, 0, none))
lists = [plain, acl((1, 7, 5), (4, 5, 5), (32, 5, 5)), acl((4, 4, none), (1, 6, none), (32, 0, none)), acl((1, 8, none), (4, 4, none), (32, 0, none)),
         acl((1, 6, none), (4, 4, none)), acl((1, 6, none), (4, 4, none), (16, 7, none), (32, 1, none)), acl((1, 6, none), (4, 4, none), (32, 256, none)),
         acl((1, 6, none), (4, 4, none), (32, 0, none), version=1), plain + b"x", plain[:-1], b"", plain[:4], access]
os.mkdir("listed")
open("listed/file", "w").close()
os.symlink("file", "listed/link")
listed = os.open("listed/file", os.O_RDONLY)


def told(target):
    found = os.stat(target) if isinstance(target, int) else os.lstat(target)
    return oct(found.st_mode), sorted(os.listxattr(target, follow_symlinks=False) if isinstance(target, str) else os.listxattr(target))


for mode in [0o644, 0o2775, 0o6711]:
    for number, value in enumerate(lists):
        for target in ["listed", "listed/file", "listed/link", listed]:
            alone = {} if isinstance(target, int) else {"follow_symlinks": False}
            where = (oct(mode), number, target if isinstance(target, str) else "open")
            for name in ["system.posix_acl_access", "system.posix_acl_default"]:
                if isinstance(target, int) or not os.path.islink(target):
                    os.chmod(target, mode)
                for flags in [0, os.XATTR_CREATE, os.XATTR_REPLACE]:
                    tell(("acl", flags, name) + where, lambda: os.setxattr(target, name, value, flags, **alone) or told(target))
                if number % 2:
                    tell(("acl, plain", name) + where, lambda: os.setxattr(target, name, plain, **alone) or told(target))
                tell(("remove", name) + where, lambda: os.removexattr(target, name, **alone) or told(target))
                tell(("remove again", name) + where, lambda: os.removexattr(target, name, **alone) or told(target))
before = os.stat("listed/file")
os.setxattr("listed/file", "system.posix_acl_access", plain)
after = os.stat("listed/file")
print(after.st_ctime_ns > before.st_ctime_ns, after.st_mtime_ns == before.st_mtime_ns, oct(after.st_mode))
for name, owner, group, mode in [("own", 65534, 65534, 0o2750), ("strange group", 65534, 1, 0o6755), ("strange", 1, 65534, 0o2755)]:
    open("listed/" + name, "w").close()
    os.chown("listed/" + name, owner, group)
    os.chmod("listed/" + name, mode)
os.mkdir("listed/directory")
os.chown("listed/directory", 65534, 1)
os.chmod("listed/directory", 0o2755)
os.chmod("listed", 0o755)
other = os.fork()
if other == 0:
    os.setgroups([])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
    for name in ["own", "strange group", "strange"]:
        for value in [plain, access, plain]:
            tell(("acl of another", name), lambda: os.setxattr("listed/" + name, "system.posix_acl_access", value))
            print(oct(os.stat("listed/" + name).st_mode))
        tell(("remove of another", name), lambda: os.removexattr("listed/" + name, "system.posix_acl_access"))
    # If the group of a directory is not the user's, its set-group-id goes with the mode, however the mode is set.
    for does in [lambda: os.chmod("listed/directory", 0o2750), lambda: os.setxattr("listed/directory", "system.posix_acl_access", plain)]:
        tell("a strange group's directory", does)
        print(oct(os.stat("listed/directory").st_mode))
    tell("and afterwards", lambda: os.utime("listed/own"))
    os._exit(0)
os.waitpid(other, 0)

# Files of other users. All users may use the directory.
os.chmod("file", 0o640)
os.mkdir("sticky", 0o777)
os.chmod("sticky", 0o1777)
os.setxattr("directory", "user.root", b"x")
other = os.fork()
if other == 0:
    os.setgroups([])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
    for target in ["file", file, read, "directory", "sticky"]:
        where = target if isinstance(target, str) else "open"
        for name in ["user.one", "user.root", "trusted.a", "security.a", "security.capability", "system.posix_acl_access"]:
            tell((where, name), lambda: os.getxattr(target, name))
            tell((where, name), lambda: os.setxattr(target, name, b"y"))
            tell((where, name), lambda: os.removexattr(target, name))
        tell(where, lambda: sorted(os.listxattr(target)))
    open("own", "w").close() if os.access(".", os.W_OK) else None
    tell("own", lambda: os.setxattr("own", "user.mine", b"x") or os.getxattr("own", "user.mine"))
    os._exit(0)
print(os.waitpid(other, 0)[1], stat.S_IMODE(os.stat("file").st_mode))
