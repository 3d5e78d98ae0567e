# Data in a shared mapping that the kernel has not written back is data for all others: for programs that look for
# holes, that copy all but holes, and that ask how many blocks a file has.
cat >mapped.py <<'EOF'
import errno, mmap, os, subprocess

SIZE, AT = 1 << 20, 65536
kept = []


def mapped(name):
    """A file that is a hole, and a mapping through which it can be written. Both stay."""
    file = os.open(name, os.O_CREAT | os.O_RDWR | os.O_TRUNC, 0o644)
    os.ftruncate(file, SIZE)
    memory = mmap.mmap(file, SIZE)
    kept.append((file, memory))
    return file, memory


def seek(file, what, *offsets):
    def one(offset):
        try:
            return os.lseek(file, offset, what)
        except OSError as error:
            return errno.errorcode[error.errno]
    return [one(offset) for offset in offsets]


def begin(*words):
    """Commands that run when they are told. They begin before a file is mapped: its pages are written back when somebody closes it."""
    return subprocess.Popen(["sh", "-c", "read go; " + " ".join(words)], stdin=subprocess.PIPE)


def end(program):
    program.communicate(b"go\n")
    return program.returncode


def content(name):
    file = os.open(name, os.O_RDONLY)
    try:
        return os.pread(file, SIZE, 0)
    finally:
        os.close(file)


file, memory = mapped("data")
print("a new hole has", os.fstat(file).st_blocks, os.stat("data").st_blocks, "blocks")
memory[AT : AT + 100] = b"d" * 100
print("a dirty one has some:", os.stat("data").st_blocks > 0, os.fstat(file).st_blocks > 0)
print("data at", seek(file, os.SEEK_DATA, 0, AT, AT + 4096, SIZE))
memory[AT * 2] = 1
print("data at", seek(file, os.SEEK_DATA, AT + 4096), "holes at", seek(file, os.SEEK_HOLE, 0, AT, AT * 2, SIZE - 1))

file, memory = mapped("holes")
for at in (8192, 20480):
    os.pwrite(file, b"x" * 4096, at)
for at in (0, 4096, 12288, 16384, 24576):
    memory[at] = 1
print("one hole after the other is none:", seek(file, os.SEEK_HOLE, 0), seek(file, os.SEEK_DATA, 28672))

for number, words in enumerate([
    "cp --reflink=never FROM TO", "cp --sparse=always FROM TO", "rsync -S FROM TO", "tar -cSf - FROM 2>/dev/null | tar -xSf - --transform=s/FROM/TO/"
]):
    name, copy = "from%d" % number, "to%d" % number
    program = begin(words.replace("FROM", name).replace("TO", copy))
    file, memory = mapped(name)
    memory[AT : AT + 4] = memory[SIZE - 4 :] = b"data"
    print(words, end(program), content(copy) == memory[:])

for number, copies in enumerate([
    lambda source, target, at: os.copy_file_range(source, target, SIZE - at, at, at),
    lambda source, target, at: os.sendfile(target, source, at, SIZE - at),
]):
    file, memory = mapped("source%d" % number)
    memory[AT : AT + 4] = memory[SIZE - 4 :] = b"data"
    target = os.open("target%d" % number, os.O_CREAT | os.O_RDWR)
    at = 0
    while at < SIZE:
        at += copies(file, target, at)
    print("copied", content("target%d" % number) == memory[:])

# The page that becomes dirty was filled for a program that only reads.
with open("read", "wb") as new:
    new.truncate(SIZE)
reader = os.open("read", os.O_RDONLY)
seen = mmap.mmap(reader, SIZE, prot=mmap.PROT_READ)
print("read", seen[AT], os.stat("read").st_blocks)
writer = os.open("read", os.O_RDWR)
memory = mmap.mmap(writer, SIZE)
memory[AT] = 1
listed = [entry.stat().st_blocks > 0 for entry in os.scandir(".") if entry.name == "read"]
print("written", os.stat("read").st_blocks > 0, listed, seek(reader, os.SEEK_DATA, 0), seen[AT])
memory.close()
os.close(writer)
print("closed", seek(reader, os.SEEK_DATA, 0), os.stat("read").st_blocks > 0)
EOF
python3 mapped.py
# Many programs write, read, truncate and stat mapped files at once: each gets its answer.
cat >busy.py <<'EOF'
import mmap, os, random, time

SIZE = 1 << 20


def work(seed, ends):
    chance = random.Random(seed)
    while time.monotonic() < ends:
        file = os.open("busy%d" % chance.randrange(2), os.O_CREAT | os.O_RDWR)
        os.ftruncate(file, SIZE)
        memory = mmap.mmap(file, SIZE)
        for _ in range(20):
            at = chance.randrange(SIZE // 4096) * 4096
            memory[at] = 1
            if os.lseek(file, at, os.SEEK_DATA) != at:
                print("no data where some were written")
            os.pread(file, 8192, chance.randrange(SIZE))
            os.lseek(file, 0, os.SEEK_HOLE)
            os.fstat(file)
            if chance.random() < 0.1:
                direct = os.open("busy%d" % chance.randrange(2), os.O_WRONLY)
                os.pwrite(direct, b"x" * 5000, chance.randrange(SIZE // 2))
                os.close(direct)
        os.close(file)


for name in ("busy0", "busy1"):
    open(name, "w").close()
ends = time.monotonic() + 3
children = []
for seed in range(6):
    children.append(os.fork())
    if children[-1] == 0:
        work(seed, ends)
        os._exit(0)
print("all end:", [os.waitpid(child, 0)[1] for child in children])
EOF
python3 busy.py
rm -f busy0 busy1
