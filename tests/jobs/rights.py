"""Has files open to write, and writes to them by order, while others narrow the rights to them. Begins as the
super-user. Arguments: what it keeps of that ('keeps': the right to become it again), and the files."""

import os
import subprocess
import sys

USER, GROUP = 2000, 4242


def attempt(what):
    try:
        what()
        return ""
    except OSError as error:
        return error.strerror


def write(text):
    """Writes to all of them, and prints which writes fail."""
    failures = []
    for name, file in files.items():
        def at_once():
            os.pwrite(file, text, 0)
            os.fsync(file)
            assert os.pread(file, len(text), 0) == text, name
        failure = attempt(at_once)
        failures += [f"{name}: {failure}"] if failure else []
    return ", ".join(failures) or "written"


def in_child(text):
    there, here = os.pipe()
    child = os.fork()
    if child == 0:
        # Enough calls for LibFS to serve the program.
        for _ in range(100):
            os.stat(".")
        os.write(here, write(text).encode())
        os._exit(0)
    os.close(here)
    said = os.read(there, 1000).decode()
    os.close(there)
    os.waitpid(child, 0)
    return said


def in_program(text):
    # The offset is at the file's beginning: all other writes name their position.
    script = " && ".join(f"printf %s {text.decode()} >&{file}" for file in files.values())
    done = subprocess.run(["/bin/sh", "-c", script], pass_fds=files.values(), stderr=subprocess.PIPE, text=True)
    return done.stderr.strip() or "written"


def without_group(text):
    os.seteuid(0)
    os.setgroups([])
    os.seteuid(USER)
    return write(text)


os.setgroups([GROUP])
if sys.argv[1] == "keeps":
    os.setegid(USER)
    os.seteuid(USER)
else:
    os.setgid(USER)
    os.setuid(USER)
files = {name: os.open(name, os.O_RDWR) for name in sys.argv[2:]}
print("ready", flush=True)
for line in sys.stdin:
    how, text = line.split()
    does = {"write": write, "child": in_child, "program": in_program, "without_group": without_group}[how]
    for _ in range(100):
        os.stat(".")
    print(does(text.encode()), flush=True)
