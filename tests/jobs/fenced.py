"""Makes all kinds of calls, often, and once more by order; then it prints the result of each.
Argument: a directory to work in."""

import fcntl
import os
import sys

os.chdir(sys.argv[1])
for name in ("file", "other", "gone"):
    with open(name, "w") as made:
        made.write("content")
os.symlink("file", "link")
os.mkdir("directory")
file, ending = os.open("file", os.O_RDWR), os.open("file", os.O_WRONLY | os.O_APPEND)
other = os.open("other", os.O_RDWR)
whole = os.open(".", os.O_RDONLY)

LOOKS = {
    "read": lambda: os.pread(file, 4, 0),
    "readv": lambda: os.preadv(file, [bytearray(4)], 0),
    "fstat": lambda: os.fstat(file),
    "stat": lambda: os.stat("file"),
    "lstat": lambda: os.lstat("link"),
    "access": lambda: os.access("file", os.R_OK) or os.stat("file"),
    "open": lambda: os.close(os.open("file", os.O_RDONLY)),
    "open directory": lambda: os.close(os.open("directory", os.O_RDONLY)),
    "readlink": lambda: os.readlink("link"),
    "list": lambda: os.listdir("."),
    "list open": lambda: os.listdir(whole),
    "end": lambda: os.lseek(file, 0, os.SEEK_END),
    "listxattr": lambda: os.listxattr("file"),
}
CHANGES = {
    "write": lambda: os.pwrite(file, b"x", 0),
    "writev": lambda: os.pwritev(file, [b"x", b"y"], 0),
    "append": lambda: os.write(ending, b"x"),
    "fsync": lambda: os.fsync(file),
    "fdatasync": lambda: os.fdatasync(ending),
    "fsync directory": lambda: os.fsync(whole),
    "ftruncate": lambda: os.ftruncate(file, 9),
    "truncate": lambda: os.truncate("file", 8),
    "fallocate": lambda: os.posix_fallocate(file, 0, 9),
    "copy": lambda: os.copy_file_range(file, other, 4, 0, 0),
    "chmod": lambda: os.chmod("file", 0o640),
    "fchmod": lambda: os.fchmod(file, 0o644),
    "chown": lambda: os.chown("file", -1, -1),
    "utime": lambda: os.utime("file"),
    "setxattr": lambda: os.setxattr("file", "user.x", b"y"),
    "make": lambda: os.close(os.open("made", os.O_RDWR | os.O_CREAT)),
    "mkdir": lambda: os.mkdir("new") or os.rmdir("new"),
    "symlink": lambda: os.symlink("a", "new") or os.unlink("new"),
    "link": lambda: os.link("file", "new") or os.unlink("new"),
    "rename": lambda: os.rename("gone", "went") or os.rename("went", "gone"),
    "lock": lambda: fcntl.lockf(file, fcntl.LOCK_EX) or fcntl.lockf(file, fcntl.LOCK_UN),
    "unlink": lambda: os.unlink("gone"),
}


def attempt(what):
    try:
        what()
        return "done"
    except OSError as error:
        return error.strerror


for name, call in (LOOKS | CHANGES).items():
    for _ in range(1 if name == "unlink" else 20):
        call()
print("ready", flush=True)
sys.stdin.readline()
for name, call in (LOOKS | CHANGES).items():
    print(f"{'look' if name in LOOKS else 'change'}, {name}: {attempt(call)}")
