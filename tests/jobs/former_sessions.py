"""No process keeps anything of its parent's sessions, nor of those of a user that it is no more. It works in the current
directory, on the mount, as the super-user."""

import ctypes
import functools
import mmap
import os
import threading

print = functools.partial(print, flush=True)
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
SYS_CLONE, SYS_FORK, SIGCHLD = 56, 57, 17
USER = 2000


def is_of_session(name):
    return any(part in name for part in ("/sessions/", "/segments/", "/memfd:", "socket:"))


def mapped():
    """The files of sessions that are mapped."""
    with open("/proc/self/maps") as maps:
        return sorted({line.split()[-1] for line in maps if is_of_session(line)})


def opened():
    """The files and connections of sessions that are open."""
    names = []
    for number in os.listdir("/proc/self/fd"):
        try:
            names.append(os.readlink(f"/proc/self/fd/{number}"))
        except OSError:
            pass
    return sorted(filter(is_of_session, names))


def use(name):
    """Works on a file, in a session."""
    with open(name, "a+") as file:
        file.write("x")
        file.seek(0)
        return len(file.read())


def in_child(way, make, act):
    """Acts in a child, and prints what that returns."""
    child = make()
    if child == 0:
        try:
            print(way, act())
        finally:
            os._exit(0)
    assert child > 0 and os.waitpid(child, 0)[1] == 0


def past_the_library():
    """Forks by code that the library does not see."""
    code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    code.write(b"\xb8\x39\x00\x00\x00\x0f\x05\xc3")
    at = ctypes.addressof(ctypes.c_char.from_buffer(code))
    return ctypes.CFUNCTYPE(ctypes.c_int)(at)()


def become(user):
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)


def change_user():
    """Becomes another user for good. The file system is the last thing that it uses, before and after."""
    use("all/mine")
    had = bool(mapped()) and bool(opened())
    become(USER)
    left = (mapped(), opened())
    return had, left, use("all/theirs") > 0, os.stat("all/theirs").st_uid


def with_thread():
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        return change_user()
    finally:
        done.set()
        thread.join()


def change_root():
    use("all/mine")
    os.chroot("/")
    left = (mapped(), opened())
    become(USER)
    return left, use("all/theirs") > 0


def take_turns():
    """The sessions of a process that may change back stay."""
    for _ in range(20):
        os.seteuid(USER)
        use("all/theirs")
        os.seteuid(0)
        use("all/mine")
    return bool(mapped())


os.umask(0)
os.mkdir("all")
use("all/file")
print("the process has a session:", bool(mapped()), bool(opened()))
for way, make in [
    ("fork:", os.fork),
    ("direct fork:", lambda: libc.syscall(SYS_FORK)),
    ("direct clone:", lambda: libc.syscall(SYS_CLONE, SIGCHLD, 0, 0, 0, 0)),
]:
    in_child(way, make, lambda: (mapped(), opened()))
in_child("fork past the library:", past_the_library, mapped)
in_child("fork and use:", os.fork, lambda: use("all/file"))
in_child("fork of a fork:", os.fork, lambda: in_child("inner:", os.fork, lambda: (mapped(), opened())))
in_child("another user:", os.fork, lambda: (become(USER), mapped(), opened(), use("all/theirs"))[1:])
in_child("change of user:", os.fork, change_user)
in_child("change of user beside a thread:", os.fork, with_thread)
in_child("change of the root:", os.fork, change_root)
in_child("taking turns:", os.fork, take_turns)
print("the process goes on:", use("all/file"))
