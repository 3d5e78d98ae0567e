# Where writes through an appending open file go: to the end, or to the offset that the call names.
cat >appends.py <<'EOF'
import os, threading

APPEND, NOAPPEND = 0x10, 0x20
file = os.open("f", os.O_CREAT | os.O_RDWR | os.O_APPEND, 0o644)


def show(what):
    print(what, os.fstat(file).st_size, os.pread(file, 100, 0))


def write_at(data, offset):
    return os.pwritev(file, [data], offset, NOAPPEND)


os.write(file, b"0123456789")
print(write_at(b"XY", 2))
show("in the middle")
print(write_at(b"ZZZZ", 8))
show("over the end")
print(os.pwrite(file, b"end", 0))
show("pwrite appends")
print(write_at(b"far", 20))
show("behind the end")
print(write_at(b"at", 23))
show("at the end")
other = os.open("f", os.O_WRONLY | os.O_APPEND)
print(os.pwritev(other, [b"--"], 0, NOAPPEND), os.write(other, b"more"), os.pwritev(other, [b"!"], 0, APPEND))
show("without the kernel's pages")
large = bytes(range(256)) * 12288
print(os.write(file, large), os.fstat(file).st_size, os.pread(file, 100 + len(large), 30) == large)
os.close(other)
os.close(file)

# Threads that append, and one that writes to the beginning beside them.
file = os.open("g", os.O_CREAT | os.O_RDWR | os.O_APPEND, 0o644)
os.write(file, b"." * 8)


def append(letter):
    for _ in range(500):
        os.write(file, letter * 8)


def overwrite():
    for number in range(500):
        write_at(b"%08d" % number, 0)


threads = [threading.Thread(target=append, args=(letter,)) for letter in (b"a", b"b")] + [threading.Thread(target=overwrite)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
content = os.pread(file, 1 << 20, 0)
print(len(content), content[:8], content.count(b"a" * 8), content.count(b"b" * 8))
EOF
python3 appends.py
