"""Two users in one directory: root makes a tree, and another user tries everything on it.

usage: two_users.py make|attempt DIRECTORY

`attempt` prints one line for each file with the outcome of each call, so two file systems can be compared.
"""

import errno
import os
import sys

USER, GROUP = 65534, 60
DIRECTORY_MODES = (0o755, 0o700, 0o711, 0o750, 0o1777, 0o2775, 0o744)
FILE_MODES = (0o644, 0o600, 0o640, 0o622, 0o4755, 0o2755, 0o000)


def make():
    os.umask(0)
    owners = ((0, 0), (USER, GROUP), (0, GROUP))
    for number, (owner, mode) in enumerate((owner, mode) for owner in owners for mode in DIRECTORY_MODES):
        directory = f"directory{number:02}"
        os.mkdir(directory)
        for file_mode in FILE_MODES:
            path = f"{directory}/{file_mode:o}"
            with open(path, "w") as file:
                file.write("secret\n")
            os.setxattr(path, "user.note", b"secret")
            os.chmod(path, file_mode)
        os.symlink("644", f"{directory}/link")
        os.mkdir(f"{directory}/below")
        with open(f"{directory}/below/file", "w") as file:
            file.write("deep")
        os.chown(directory, *owner)
        os.chmod(directory, mode)
    os.mkdir("own")
    os.chown("own", USER, GROUP)
    for path in ("writable", "appended"):
        open(path, "w").close()
        os.chmod(path, 0o6777)


def outcome(call):
    try:
        return call()
    except OSError as error:
        return errno.errorcode[error.errno]


def read(path):
    with open(path, "rb") as file:
        return file.read()


def write(path, flags=0):
    file = os.open(path, os.O_WRONLY | flags)
    try:
        return os.write(file, b"y")
    finally:
        os.close(file)


def reserve(path):
    file = os.open(path, os.O_RDWR)
    try:
        return os.posix_fallocate(file, 0, 100)
    finally:
        os.close(file)


def create(path):
    os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o666))


def mode(path):
    return oct(os.stat(path).st_mode)


def attempt_on_file(path, directory):
    calls = [
        lambda: mode(path),
        lambda: read(path),
        lambda: os.readlink(path),
        lambda: os.getxattr(path, "user.note"),
        lambda: os.listxattr(path),
        lambda: os.setxattr(path, "user.other", b"1"),
        lambda: os.removexattr(path, "user.note"),
        lambda: os.chmod(path, 0o666),
        lambda: os.utime(path),
        lambda: os.utime(path, (1, 1)),
        lambda: os.chown(path, -1, -1),
        lambda: os.chown(path, USER, GROUP),
        lambda: mode(path),
        lambda: write(path),
        lambda: os.truncate(path, 3),
        lambda: mode(path),
        lambda: os.access(path, os.R_OK),
        lambda: os.access(path, os.W_OK),
        lambda: os.link(path, f"{directory}/linked"),
        lambda: os.link(path, "own/linked"),
        lambda: os.unlink("own/linked"),
        lambda: os.rename(path, f"{path}.moved"),
        lambda: os.rename(f"{path}.moved", path),
        lambda: os.unlink(path),
    ]
    print(path, [outcome(call) for call in calls])


def attempt_in_directory(directory):
    made = f"{directory}/made"
    calls = [
        lambda: sorted(os.listdir(directory)),
        lambda: mode(directory),
        lambda: os.mkdir(f"{directory}/new"),
        lambda: create(made),
        lambda: mode(made),
        lambda: os.stat(made).st_gid,
        lambda: os.rmdir(f"{directory}/below"),
        lambda: os.rename(f"{directory}/below", f"{directory}/above"),
    ]
    print(directory, [outcome(call) for call in calls])


def attempt():
    os.setgroups([GROUP])
    os.setgid(GROUP)
    os.setuid(USER)
    # So many calls begin a session under `ashlar run`.
    for _ in range(100):
        os.stat(".")
    names = [*(f"{mode:o}" for mode in FILE_MODES), "link", "below/file", "missing"]
    for directory in sorted(name for name in os.listdir(".") if name.startswith("directory")):
        for name in names:
            attempt_on_file(f"{directory}/{name}", directory)
        attempt_in_directory(directory)
    # A file open for writing is written, whatever its mode has become since.
    print("writable", outcome(lambda: reserve("writable")), mode("writable"))
    print("appended", outcome(lambda: write("appended", os.O_APPEND)), mode("appended"))


os.chdir(sys.argv[2])
{"make": make, "attempt": attempt}[sys.argv[1]]()
