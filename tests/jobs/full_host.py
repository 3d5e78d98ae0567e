"""Writes while the file system that the arena is on becomes full, and when it has room again. Arguments: a directory on the mount, a
file to fill that file system with."""
import os
import subprocess
import sys

directory, filler = sys.argv[1:]
file = os.open(directory + "/file", os.O_CREAT | os.O_RDWR)
model = os.urandom(100_000)
assert os.write(file, model) == len(model)
with open(filler, "wb", buffering=0) as full:
    try:
        while True:
            full.write(bytes(4096))
    except OSError:
        pass
try:
    while len(model) < 4 << 20:
        data = os.urandom(4096)
        os.write(file, data)
        model += data
    print("nothing was refused")
except OSError as error:
    print(error.strerror)
assert os.pread(file, 8 << 20, 0) == model
# A program that begins now has no session, and goes through the mount.
assert subprocess.run(["cat", directory + "/file"], capture_output=True, check=True).stdout == model
os.unlink(filler)
while len(model) < 8 << 20:
    data = os.urandom(65536)
    assert os.write(file, data) == len(data)
    model += data
os.close(file)
assert open(directory + "/file", "rb").read() == model
