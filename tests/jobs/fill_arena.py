"""Fills the file system of its working directory, until a call fails for lack of space. Continues after a file was
removed. Prints the error, and the results after it."""
import os

CHUNK_BYTES = 1 << 20


def chunk(name):
    return name.encode().ljust(16) * (CHUNK_BYTES // 16)


def make(name):
    """Makes a file of one chunk; if there is no room for all, nothing of it stays."""
    file = os.open(name, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o644)
    try:
        done = 0
        while done < CHUNK_BYTES:
            done += os.write(file, chunk(name)[done:])
    except OSError:
        os.unlink(name)
        raise
    finally:
        os.close(file)


def fill(prefix):
    made = []
    try:
        while len(made) < 10_000:
            make(f"{prefix}-{len(made)}")
            made.append(f"{prefix}-{len(made)}")
    except OSError as error:
        return made, error.strerror
    return made, "never full"


first, error = fill("first")
print(error)
assert len(first) > 20, f"{len(first)} files fit"
for name in first[::2]:
    os.unlink(name)
second, error = fill("second")
print(error)
assert len(second) >= len(first) // 2 - 2, f"{len(second)} files fit where {len(first)} had been, and every other one went"
for name in first[1::2] + second:
    with open(name, "rb") as file:
        assert file.read() == chunk(name), f"{name} is not what it was"
# Existing data can be overwritten.
with open(second[0], "r+b") as file:
    file.write(b"over")
    os.fsync(file.fileno())
for name in second:
    os.unlink(name)
make("at the end")
print("goes on")
