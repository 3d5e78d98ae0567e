"""Random operations on one open file and its directory, against a model in memory. Arguments: a directory, a seed."""
import os
import random
import sys

directory, seed = sys.argv[1], int(sys.argv[2])
random.seed(seed)
path = directory + "/file"
file = os.open(path, os.O_CREAT | os.O_RDWR | os.O_TRUNC, 0o644)
appended = os.open(directory + "/appended", os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_TRUNC, 0o644)
listed = os.open(directory, os.O_RDONLY)
copied = os.dup(os.open(path, os.O_RDONLY))
model, offset, lines = bytearray(), 0, 0


def write_at(place, data):
    if len(model) < place:
        model.extend(bytes(place - len(model)))
    model[place:place + len(data)] = data


for step in range(300):
    kind = random.randrange(10)
    if kind == 0:
        data = os.urandom(random.randrange(1, 5000))
        assert os.write(file, data) == len(data)
        write_at(offset, data)
        offset += len(data)
    elif kind == 1:
        offset = os.lseek(file, random.randrange(len(model) + 100), os.SEEK_SET)
    elif kind == 2:
        data = os.read(file, 1000)
        assert data == bytes(model[offset:offset + 1000]), step
        offset += len(data)
    elif kind == 3:
        assert os.fstat(file).st_size == os.stat(path).st_size == len(model), step
    elif kind == 4:
        with open(directory + "/other", "w") as other:
            other.write("step %d" % step)
        assert open(directory + "/other").read() == "step %d" % step
    elif kind == 5:
        assert sorted(os.listdir(listed)) == sorted(os.listdir(directory))
    elif kind == 6:
        name = "made-%d" % step
        made = os.open(name, os.O_CREAT | os.O_WRONLY, dir_fd=listed)
        os.write(made, b"made")
        os.close(made)
        os.unlink(name, dir_fd=listed)
    elif kind == 7:
        data, place = os.urandom(300), random.randrange(len(model) + 1)
        os.pwrite(file, data, place)
        write_at(place, data)
    elif kind == 8:
        os.write(appended, b"a line\n")
        lines += 1
        assert os.stat(directory + "/appended").st_size == 7 * lines, step
    else:
        place = random.randrange(len(model) + 1)
        assert os.pread(copied, 500, place) == bytes(model[place:place + 500]), step
os.close(file)
assert open(path, "rb").read() == bytes(model)
print("the same")
