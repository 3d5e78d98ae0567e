"""Makes calls on files by the orders on its standard input, line by line. Answers with the seconds that each took, and
the result. Argument: a directory, in which it has one file open all the time."""
import os
import sys
import time

BLOCK_BYTES = 1 << 16
directory = sys.argv[1]
log = os.open(os.path.join(directory, "log"), os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
written = 0


def block(number):
    return f"{number:8}".encode() * (BLOCK_BYTES // 8)


def write(most):
    """Appends blocks with their numbers; returns how many there are in all, and whether one was refused."""
    global written
    try:
        for _ in range(int(most)):
            if os.write(log, block(written)) != BLOCK_BYTES:
                return "a short write"
            written += 1
    except OSError as error:
        return f"{written} {error.strerror}"
    return f"{written} written"


def read(name):
    with open(os.path.join(directory, name)) as file:
        return file.read()


def make(name):
    with open(os.path.join(directory, name), "x") as file:
        file.write("made")
    return "made"


def length(name):
    """Reads a file; returns its length."""
    with open(os.path.join(directory, name), "rb") as file:
        return f"{len(file.read())} bytes"


def numbers(least):
    """Counts the descriptors from a number on."""
    return f"{sum(int(name) >= int(least) for name in os.listdir('/proc/self/fd'))} numbers"


def close(least):
    """Closes all possible numbers, from one on."""
    os.closerange(int(least), 1024)
    for number in range(int(least), 1024):
        try:
            os.close(number)
        except OSError:
            pass
    return "closed"


VERBS = {"write": write, "read": read, "make": make, "length": length, "numbers": numbers, "close": close}
print("ready", flush=True)
for line in sys.stdin:
    verb, word = line.split()
    began = time.monotonic()
    try:
        answer = VERBS[verb](word)
    except OSError as error:
        answer = error.strerror
    print(f"{time.monotonic() - began:.3f} {answer}", flush=True)
