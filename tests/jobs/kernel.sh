# The corners of the kernel's interface, one by one, with their results and errors.
cat >corners.py <<'END'
import ctypes, errno, fcntl, mmap, os, resource, signal, socket, stat, struct, subprocess, sys, time

libc = ctypes.CDLL(None, use_errno=True)

def show(name, call):
    try:
        print(name, call())
    except OSError as error:
        print(name, errno.errorcode.get(error.errno, error.errno))

def check(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), "")
    return result

def write(path, data=b"0123456789", mode="wb"):
    with open(path, mode) as file:
        file.write(data)

# Names.
show("name of 255", lambda: os.mkdir("x" * 255))
show("name of 256", lambda: os.mkdir("x" * 256))
show("name of odd bytes", lambda: os.mkdir(b"\xff\x01 \n\t*"))
show("listed", lambda: sorted(os.listdir(b".")) == sorted([b"corners.py", b"x" * 255, b"\xff\x01 \n\t*"]))
os.makedirs("full/of")
show("not empty", lambda: os.rmdir("full"))
os.rmdir("x" * 255)

# Open flags.
write("f")
show("O_EXCL", lambda: os.open("f", os.O_CREAT | os.O_EXCL | os.O_RDWR))
show("O_DIRECTORY", lambda: os.open("f", os.O_DIRECTORY))
os.symlink("f", "link")
show("O_NOFOLLOW", lambda: os.open("link", os.O_NOFOLLOW))
show("O_TRUNC", lambda: os.fstat(os.open("f", os.O_TRUNC | os.O_RDWR)).st_size)
os.symlink("loop", "loop")
show("loop", lambda: os.open("loop", os.O_RDONLY))
fd = os.open(".", os.O_TMPFILE | os.O_RDWR, 0o640)
os.write(fd, b"unnamed")
show("O_TMPFILE links", lambda: os.fstat(fd).st_nlink)
show("O_TMPFILE named", lambda: check(libc.linkat(-100, f"/proc/self/fd/{fd}".encode(), -100, b"named", 0x400)))
show("O_TMPFILE content", lambda: open("named").read())
os.close(fd)

# Direct, appending and positioned I/O.
fd = os.open("direct", os.O_CREAT | os.O_RDWR | os.O_DIRECT)
memory = mmap.mmap(-1, 8192)
memory[:] = b"d" * 8192
show("O_DIRECT write", lambda: os.writev(fd, [memory]))
show("O_DIRECT read", lambda: (os.preadv(fd, [memory], 4096), bytes(memory[:4])))
os.close(fd)
fd = os.open("append", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
other = os.open("append", os.O_WRONLY | os.O_APPEND)
for n in range(100):
    os.write((fd, other)[n % 2], b"%03d\n" % n)
show("O_APPEND by two", lambda: open("append").read() == "".join(f"{n:03}\n" for n in range(100)))
show("far write", lambda: os.pwrite(os.open("far", os.O_CREAT | os.O_RDWR), b"x", 1 << 40))
show("far size", lambda: os.stat("far").st_size)
show("far blocks are few", lambda: os.stat("far").st_blocks <= 16)
# A checksum of a terabyte of zeros would take the rest of the day.
os.unlink("far")

# Holes and reservations.
fd = os.open("holes", os.O_CREAT | os.O_RDWR)
os.ftruncate(fd, 1 << 20)
os.pwrite(fd, b"x" * 4096, 512 << 10)
show("SEEK_DATA", lambda: os.lseek(fd, 0, os.SEEK_DATA))
show("SEEK_HOLE", lambda: os.lseek(fd, 512 << 10, os.SEEK_HOLE))
show("SEEK_DATA behind", lambda: os.lseek(fd, 600 << 10, os.SEEK_DATA))
show("SEEK_DATA outside", lambda: os.lseek(fd, 1 << 20, os.SEEK_DATA))
libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
KEEP, PUNCH, COLLAPSE, ZERO, INSERT = 1, 2, 8, 16, 32
show("reserve", lambda: (check(libc.fallocate(fd, 0, 0, 2 << 20)), os.fstat(fd).st_size))
show("reserve and keep size", lambda: (check(libc.fallocate(fd, KEEP, 4 << 20, 4096)), os.fstat(fd).st_size))
show("punch", lambda: (check(libc.fallocate(fd, PUNCH | KEEP, 512 << 10, 4096)), os.pread(fd, 4, 512 << 10)))
os.pwrite(fd, b"y" * 8192, 0)
show("zero", lambda: (check(libc.fallocate(fd, ZERO, 4000, 200)), os.pread(fd, 4, 3998), os.pread(fd, 4, 4198)))
show("bad mode", lambda: check(libc.fallocate(fd, 1 << 20, 0, 4096)))
show("no length", lambda: check(libc.fallocate(fd, 0, 0, 0)))
os.close(fd)

# Copies inside the kernel.
write("source", bytes(range(256)) * 64)
a, b = os.open("source", os.O_RDONLY), os.open("target", os.O_CREAT | os.O_RDWR)
show("copy_file_range", lambda: os.copy_file_range(a, b, 10000, 100, 5000))
show("copied", lambda: os.pread(b, 10000, 5000) == (bytes(range(256)) * 64)[100:10100])
show("sendfile", lambda: os.sendfile(b, a, 0, 3000))

# Shared memory.
write("mapped", b"\0" * 8192)
fd = os.open("mapped", os.O_RDWR)
shared, private = mmap.mmap(fd, 8192), mmap.mmap(fd, 8192, mmap.MAP_PRIVATE)
child = os.fork()
if child == 0:
    shared[100:105] = b"child"
    private[200:205] = b"child"
    os._exit(0)
os.waitpid(child, 0)
show("shared by fork", lambda: (shared[100:105], private[200:205] == b"child"))
shared.flush()
show("seen by read", lambda: os.pread(fd, 5, 100))

# Private memory of a file that is only read.
write("only read", bytes(range(256)) * 200)
fd = os.open("only read", os.O_RDONLY)
private = mmap.mmap(fd, 0, mmap.MAP_PRIVATE)
os.close(fd)
show("mapped privately", lambda: private[:] == bytes(range(256)) * 200)
private[100:105] = b"child"
show("written privately", lambda: (private[98:107], open("only read", "rb").read()[98:107]))
private.madvise(mmap.MADV_DONTNEED)
show("dropped, and there again", lambda: private[98:107])

def map_unable_to_write():
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        mapped = mmap.mmap(os.open("only read", os.O_RDONLY), 0, mmap.MAP_PRIVATE, mmap.PROT_READ)
        os._exit(mapped[50001])
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

show("mapped by one who may write nothing", map_unable_to_write)
os.unlink("only read")
show("mapped without a name", lambda: private[50000:50005])
private.close()

write("script", b"#!/bin/sh\necho executed $1\n")
os.chmod("script", 0o755)
show("execve", lambda: subprocess.run(["./script", "it"], capture_output=True).stdout)
subprocess.run(["cp", "/bin/true", "true"])
show("execve of a program", lambda: subprocess.run(["./true"]).returncode)
running = subprocess.Popen(["cp", "/bin/sleep", "sleep"]).wait() or subprocess.Popen(["./sleep", "30"])
time.sleep(0.2)
show("text busy", lambda: os.open("sleep", os.O_WRONLY))
running.kill()
running.wait()

# Unlinked and still open.
fd = os.open("doomed", os.O_CREAT | os.O_RDWR)
os.write(fd, b"still here")
os.unlink("doomed")
show("unlinked", lambda: (os.pread(fd, 20, 0), os.fstat(fd).st_nlink))
os.close(fd)
os.mkdir("doomed")
fd = os.open("doomed", os.O_RDONLY)
os.rmdir("doomed")
show("removed directory is empty", lambda: os.listdir(fd))
show("create in removed", lambda: os.open("x", os.O_CREAT | os.O_RDWR, dir_fd=fd))
os.close(fd)

# Renames.
os.makedirs("r/a/b")
write("r/f1", b"1")
write("r/f2", b"2")
libc.renameat2.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
show("into itself", lambda: os.rename("r/a", "r/a/b/c"))
show("no replace", lambda: check(libc.renameat2(-100, b"r/f1", -100, b"r/f2", 1)))
show("exchange", lambda: (check(libc.renameat2(-100, b"r/f1", -100, b"r/a", 2)), os.path.isdir("r/f1"), open("r/a").read()))
show("directory over file", lambda: os.rename("r/f1", "r/f2"))
show("file over directory", lambda: os.rename("r/f2", "r/f1"))
os.mkdir("r/empty")
show("directory over empty", lambda: os.rename("r/f1", "r/empty"))
show("listed", lambda: sorted(os.listdir("r")))

# Modes, owners and their effects.
write("mode")
os.chmod("mode", 0o6755)
show("set-id kept", lambda: oct(os.stat("mode").st_mode))
os.chown("mode", 1000, 1000)
show("set-id after chown", lambda: oct(os.stat("mode").st_mode))
os.mkdir("sgid")
os.chown("sgid", 0, 1234)
os.chmod("sgid", 0o2775)
os.mkdir("sgid/below")
write("sgid/file")
show("set-group-id inherited", lambda: (oct(os.stat("sgid/below").st_mode), os.stat("sgid/below").st_gid, os.stat("sgid/file").st_gid))
def as_user(call):
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.setgroups([])
        os.setresgid(1000, 1000, 1000)
        os.setresuid(1000, 1000, 1000)
        try:
            os.write(writer, repr(call()).encode())
        except OSError as error:
            os.write(writer, errno.errorcode[error.errno].encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    return os.read(reader, 4096).decode()
os.chmod(".", 0o755)
write("secret")
os.chmod("secret", 0o600)
os.mkdir("sticky")
os.chmod("sticky", 0o1777)
write("sticky/root")
os.chmod("mode", 0o4755)
show("user reads secret", lambda: as_user(lambda: open("secret").read()))
show("user creates", lambda: as_user(lambda: open("x", "w")))
show("user unlinks in sticky", lambda: as_user(lambda: os.unlink("sticky/root")))
show("user creates in sticky", lambda: as_user(lambda: (os.close(os.open("sticky/own", os.O_CREAT | os.O_RDWR)), os.stat("sticky/own").st_uid)[1]))
show("user changes owner", lambda: as_user(lambda: os.chown("sticky/own", 0, 0)))
show("write strips set-id", lambda: as_user(lambda: (os.write(os.open("mode", os.O_WRONLY), b"x"), oct(os.stat("mode").st_mode))))
show("user makes a device", lambda: as_user(lambda: os.mknod("sticky/dev", stat.S_IFCHR | 0o600, os.makedev(1, 3))))

# Whiteouts, which renames leave for the upper layer of an overlay, and which any user may make.
def about(path):
    found = os.lstat(path)
    return (oct(found.st_mode), found.st_rdev, found.st_uid, found.st_gid, found.st_nlink, found.st_size)
def leave(old, new, flags=4):
    return check(libc.renameat2(-100, old.encode(), -100, new.encode(), flags))
os.makedirs("w/below/e")
for name in "abcdef":
    write("w/" + name, name.encode())
show("whiteout", lambda: (leave("w/a", "w/a2"), about("w/a"), open("w/a2").read()))
fd = os.open("w/b", os.O_RDONLY)
show("whiteout over an open file", lambda: (leave("w/a2", "w/b"), about("w/a2"), open("w/b").read(), os.read(fd, 9), os.fstat(fd).st_nlink))
os.close(fd)
show("whiteout in another directory", lambda: (leave("w/b", "w/below/b"), about("w/b"), sorted(os.listdir("w/below"))))
show("whiteout over a whiteout", lambda: (leave("w/c", "w/b"), about("w/c"), open("w/b").read()))
show("whiteout of a whiteout", lambda: (leave("w/c", "w/c2"), about("w/c"), about("w/c2")))
show("whiteout of a directory", lambda: (leave("w/below/e", "w/e2"), about("w/below/e"), os.stat("w").st_nlink, os.stat("w/below").st_nlink))
show("whiteout over a directory", lambda: leave("w/d", "w/below"))
show("whiteout and exchange", lambda: leave("w/d", "w/e", 6))
show("whiteout and no replace", lambda: leave("w/d", "w/e", 5))
show("whiteout and nothing to replace", lambda: (leave("w/d", "w/new", 5), about("w/d")))
show("whiteout of nothing", lambda: leave("w/nothing", "w/x"))
show("whiteout into itself", lambda: leave("w/e2", "w/e2/x"))
os.link("w/e", "w/same")
show("whiteout of one name of two", lambda: (leave("w/e", "w/same"), open("w/e").read()))
show("whiteout is no file", lambda: open("w/a"))
show("whiteout listed", lambda: sorted((entry.name, entry.is_file(), entry.is_dir()) for entry in os.scandir("w")))
os.unlink("w/a")
show("whiteout removed", lambda: (write("w/a"), open("w/a").read()))
show("made by hand", lambda: (os.mknod("w/made", stat.S_IFCHR), about("w/made")))
os.mkdir("w/listed")
os.chown("w/listed", 0, 1234)
os.chmod("w/listed", 0o2775)
entry = lambda tag, permissions, number=0xffffffff: struct.pack("<HHI", tag, permissions, number)
os.setxattr("w/listed", "system.posix_acl_default",
            struct.pack("<I", 2) + entry(1, 7) + entry(2, 6, 1001) + entry(4, 5) + entry(16, 7) + entry(32, 5))
write("w/listed/f")
show("whiteout where a list is inherited", lambda: (leave("w/listed/f", "w/listed/g"), about("w/listed/f")))
show("inherited", lambda: os.getxattr("w/listed/f", "system.posix_acl_access").hex())
show("user leaves a whiteout", lambda: as_user(lambda: (leave("sticky/own", "sticky/moved"), about("sticky/own"))))
show("user leaves it elsewhere", lambda: as_user(lambda: leave("sticky/moved", "w/moved")))
show("user leaves it for another's", lambda: as_user(lambda: leave("sticky/root", "sticky/moved")))
show("user makes a whiteout", lambda: as_user(lambda: (os.mknod("sticky/made", stat.S_IFCHR | 0o640), about("sticky/made"))))
show("user makes a block device", lambda: as_user(lambda: os.mknod("sticky/block", stat.S_IFBLK | 0o600)))

# Extended attributes.
write("xattr")
os.setxattr("xattr", "user.a", b"1")
os.setxattr("xattr", "user.b", b"x" * 3000)
show("xattr", lambda: (os.getxattr("xattr", "user.a"), len(os.getxattr("xattr", "user.b")), sorted(os.listxattr("xattr"))))
show("xattr create", lambda: os.setxattr("xattr", "user.a", b"2", os.XATTR_CREATE))
show("xattr replace", lambda: os.setxattr("xattr", "user.c", b"2", os.XATTR_REPLACE))
show("xattr missing", lambda: os.getxattr("xattr", "user.c"))
show("xattr removed", lambda: (os.removexattr("xattr", "user.a"), os.listxattr("xattr")))
show("xattr of an unknown class", lambda: os.setxattr("xattr", "odd.a", b"1"))
os.symlink("xattr", "xattr-link")
show("xattr of a link", lambda: os.setxattr("xattr-link", "user.a", b"1", follow_symlinks=False))

# Special files.
os.mkfifo("fifo")
child = os.fork()
if child == 0:
    write("fifo", b"through the fifo")
    os._exit(0)
show("fifo", lambda: open("fifo").read())
os.waitpid(child, 0)
server = socket.socket(socket.AF_UNIX)
server.bind("socket")
server.listen()
client = socket.socket(socket.AF_UNIX)
show("socket", lambda: client.connect("socket"))
show("socket kind", lambda: stat.S_ISSOCK(os.stat("socket").st_mode))
os.mknod("zero", stat.S_IFCHR | 0o666, os.makedev(1, 5))
show("device", lambda: os.read(os.open("zero", os.O_RDONLY), 4))

# Locks.
write("locked")
fd, other = os.open("locked", os.O_RDWR), os.open("locked", os.O_RDWR)
fcntl.flock(fd, fcntl.LOCK_EX)
show("flock held", lambda: fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB))
fcntl.flock(fd, fcntl.LOCK_UN)
show("flock free", lambda: fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB))
show("flock shared", lambda: fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB))
fcntl.flock(fd, fcntl.LOCK_UN)
fcntl.flock(other, fcntl.LOCK_UN)
fcntl.lockf(fd, fcntl.LOCK_EX, 10, 5)
def query(start, length):
    lock = struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, start, length, 0)
    kind, _, start, length, pid = struct.unpack("hhqqi4x", fcntl.fcntl(os.open("locked", os.O_RDWR), fcntl.F_GETLK, lock))
    return (kind, start, length, pid == os.getppid()) if kind != fcntl.F_UNLCK else "free"
def in_child(call):
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, repr(call()).encode())
        except OSError as error:
            os.write(writer, errno.errorcode[error.errno].encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    return os.read(reader, 4096).decode()
show("record lock held", lambda: in_child(lambda: fcntl.lockf(os.open("locked", os.O_RDWR), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 14)))
show("record lock beside", lambda: in_child(lambda: fcntl.lockf(os.open("locked", os.O_RDWR), fcntl.LOCK_EX | fcntl.LOCK_NB, 5, 15)))
show("record lock queried", lambda: in_child(lambda: query(0, 100)))
show("record lock of none", lambda: in_child(lambda: query(20, 100)))
def interrupted():
    signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(InterruptedError(errno.EINTR, "")))
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    fcntl.lockf(os.open("locked", os.O_RDWR), fcntl.LOCK_EX)
show("waiting is interrupted", lambda: in_child(interrupted))
os.close(os.open("locked", os.O_RDWR))
show("closing any descriptor drops record locks", lambda: in_child(lambda: query(0, 100)))
OFD_GETLK, OFD_SETLK, OFD_SETLKW = 36, 37, 38
def description_lock(descriptor, command):
    lock = struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 5, 10, 0)
    return struct.unpack("hhqqi4x", fcntl.fcntl(descriptor, command, lock))[0] == fcntl.F_WRLCK
description_lock(fd, OFD_SETLK)
os.close(os.dup(fd))
show("lock of an open file held", lambda: description_lock(other, OFD_SETLK))
show("lock of an open file seen", lambda: description_lock(other, OFD_GETLK))
os.close(fd)
show("lock of an open file goes with it", lambda: description_lock(other, OFD_SETLKW))

# A mapping of a file that is open for O_DIRECT.
write("mapped directly", b"0" * 8192)
fd = os.open("mapped directly", os.O_RDWR | os.O_DIRECT)
with mmap.mmap(fd, 8192) as memory:
    memory[0:3] = b"abc"
    memory.flush()
    show("written back past the page cache", lambda: open("mapped directly", "rb").read(5))
    block = mmap.mmap(-1, 4096)
    block[0:3] = b"xyz"
    os.pwrite(fd, block, 0)
    show("seen by the mapping", lambda: memory[0:3])
os.close(fd)

# Times.
write("times")
os.utime("times", ns=(1, -1_500_000_000))
show("times", lambda: (os.stat("times").st_atime_ns, os.stat("times").st_mtime_ns))
before = os.stat("times").st_ctime_ns
os.chmod("times", 0o600)
show("ctime moves", lambda: os.stat("times").st_ctime_ns > before)
before = os.stat(".").st_mtime_ns
write("times2")
show("directory mtime moves", lambda: os.stat(".").st_mtime_ns > before)

# Many entries, read while they change.
os.mkdir("many")
for n in range(3000):
    os.close(os.open(f"many/{n}", os.O_CREAT | os.O_WRONLY))
show("many", lambda: len(os.listdir("many")))
kept = []
with os.scandir("many") as entries:
    for index, entry in enumerate(entries):
        kept.append(entry.name)
        if index % 3 == 0:
            os.unlink(f"many/{entry.name}")
show("all seen once while they change", lambda: len(kept) == 3000 and len(set(kept)) == 3000)
show("links of directories", lambda: (os.stat("r").st_nlink, os.stat("many").st_nlink))
show("statvfs", lambda: os.statvfs(".").f_namemax)
END
python3 corners.py
