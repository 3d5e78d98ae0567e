# Prints the events of inotify for a script of operations. The first argument is a role:
#   compare DIR WATCHER ACTOR   runs both as processes, prints all events; each is `plain` or `run`, ACTOR also `same`
#   serve DIR [INSTANCE]        the processes themselves, which get orders by lines; with an open inotify instance
# Names that change from run to run (cookies, inode numbers) are printed by the order in which they come.
import ctypes, os, struct, subprocess, sys

libc = ctypes.CDLL(None, use_errno=True)
NAMES = {
    0x1: "access", 0x2: "modify", 0x4: "attrib", 0x8: "close_write", 0x10: "close_nowrite", 0x20: "open",
    0x40: "moved_from", 0x80: "moved_to", 0x100: "create", 0x200: "delete", 0x400: "delete_self",
    0x800: "move_self", 0x2000: "unmount", 0x4000: "overflow", 0x8000: "ignored", 0x40000000: "isdir",
}
ALL, ONLYDIR, DONT_FOLLOW, EXCL_UNLINK, MASK_ADD, ONESHOT = 0xfff, 1 << 24, 1 << 25, 1 << 26, 1 << 29, 1 << 31


class Watcher:
    def __init__(self, directory, instance=None):
        self.directory, self.watches, self.cookies = directory, {}, []
        self.instance = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC) if instance is None else int(instance)

    def add(self, label, name, mask):
        path = os.path.join(self.directory, name)
        number = libc.inotify_add_watch(self.instance, os.fsencode(path), ctypes.c_uint32(mask))
        if number < 0:
            return "%s: error %d" % (label, ctypes.get_errno())
        self.watches[number] = label
        return "%s: watched" % label

    def remove(self, label):
        for number, known in list(self.watches.items()):
            if known == label:
                libc.inotify_rm_watch(self.instance, number)

    def events(self):
        told = []
        while True:
            try:
                data = os.read(self.instance, 1 << 16)
            except BlockingIOError:
                return told
            at = 0
            while at < len(data):
                number, mask, cookie, length = struct.unpack_from("iIII", data, at)
                name = data[at + 16 : at + 16 + length].rstrip(b"\0").decode()
                at += 16 + length
                if cookie and cookie not in self.cookies:
                    self.cookies.append(cookie)
                kinds = "+".join(text for bit, text in NAMES.items() if mask & bit)
                pair = " #%d" % self.cookies.index(cookie) if cookie else ""
                told.append("%s %s %s%s" % (self.watches.get(number, "?"), kinds, name or "-", pair))

    def obey(self, words):
        if words[0] == "add":
            return [self.add(words[1], words[2], int(words[3]))]
        if words[0] == "remove":
            self.remove(words[1])
        if words[0] == "fork" and os.fork():
            os._exit(0)
        if words[0] == "exec":
            os.set_inheritable(self.instance, True)
            script = os.environ["WATCHED_SCRIPT"]
            os.execvp("python3", ["python3", "-c", script, "serve", self.directory, str(self.instance)])
        return self.events()


class Actor:
    """Holds files open by their labels, and follows one order at a time."""

    def __init__(self, directory):
        self.directory, self.files = directory, {}

    def obey(self, words):
        try:
            result = getattr(self, words[0])(*words[1:])
            return [] if result is None else [str(result)]
        except OSError as error:
            return ["errno %d" % error.errno]

    def at(self, name):
        return os.path.join(self.directory, name)

    def open(self, label, name, flags="r"):
        kinds = {"r": os.O_RDONLY, "w": os.O_WRONLY, "rw": os.O_RDWR, "c": os.O_RDWR | os.O_CREAT,
                 "t": os.O_WRONLY | os.O_CREAT | os.O_TRUNC, "a": os.O_WRONLY | os.O_APPEND,
                 "x": os.O_RDWR | os.O_CREAT | os.O_EXCL, "d": os.O_RDONLY | os.O_DIRECTORY}
        self.files[label] = os.open(self.at(name), kinds[flags], 0o644)

    def number(self, label):
        return self.files[label]

    def chdir(self, name):
        os.chdir(self.at(name))

    def close(self, label):
        os.close(self.files.pop(label))

    def write(self, label, text="text"):
        return os.write(self.files[label], text.encode())

    def pwrite(self, label, at, text="text"):
        return os.pwrite(self.files[label], text.encode(), int(at))

    def writev(self, label):
        return os.writev(self.files[label], [b"one", b"two"])

    def read(self, label):
        return len(os.read(self.files[label], 4096))

    def pread(self, label):
        return len(os.pread(self.files[label], 4096, 0))

    def seek(self, label, to):
        return os.lseek(self.files[label], int(to), os.SEEK_SET)

    def fsync(self, label):
        os.fsync(self.files[label])

    def fstat(self, label):
        return os.fstat(self.files[label]).st_size

    def ftruncate(self, label, size):
        os.ftruncate(self.files[label], int(size))

    def fchmod(self, label, mode):
        os.fchmod(self.files[label], int(mode, 8))

    def fallocate(self, label, size):
        os.posix_fallocate(self.files[label], 0, int(size))

    def copy(self, source, target):
        return os.copy_file_range(self.files[source], self.files[target], 4, 0, 0)

    def sendfile(self, source, target):
        return os.sendfile(self.files[target], self.files[source], 0, 4)

    def stat(self, name):
        return os.stat(self.at(name)).st_size

    def truncate(self, name, size):
        os.truncate(self.at(name), int(size))

    def chmod(self, name, mode):
        os.chmod(self.at(name), int(mode, 8))

    def chown(self, name):
        os.chown(self.at(name), os.getuid(), os.getgid())

    def utime(self, name):
        os.utime(self.at(name), (1, 2))

    def setxattr(self, name):
        os.setxattr(self.at(name), "user.a", b"value")

    def removexattr(self, name):
        os.removexattr(self.at(name), "user.a")

    def mkdir(self, name):
        os.mkdir(self.at(name))

    def rmdir(self, name):
        os.rmdir(self.at(name))

    def mkfifo(self, name):
        os.mkfifo(self.at(name))

    def rename(self, source, target):
        os.rename(self.at(source), self.at(target))

    def exchange(self, source, target):
        source, target = os.fsencode(self.at(source)), os.fsencode(self.at(target))
        if libc.renameat2(-100, source, -100, target, 2):
            raise OSError(ctypes.get_errno(), "renameat2")

    def link(self, source, target):
        os.link(self.at(source), self.at(target))

    def symlink(self, text, name):
        os.symlink(text, self.at(name))

    def readlink(self, name):
        return os.readlink(self.at(name))

    def unlink(self, name):
        os.unlink(self.at(name))

    def listdir(self, name):
        return len(os.listdir(self.at(name)))

    def dup(self, label, other):
        self.files[other] = os.dup(self.files[label])

    def warm(self, name):
        """Makes enough calls for a session to begin, so that the library serves the next ones."""
        for _ in range(200):
            os.stat(self.at(name))


# `+` orders the watcher, all other lines the actor. Files that are open before the watch begins are written before it.
SCRIPT = """
mkdir in
mkdir out
mkdir in/sub
mkdir in/deep
open early in/early c
write early before
pwrite early 100
open reader in/early r
read reader
open outside out/outside c
write outside
warm in/early
+add dir in {all}
+add excl in/sub {excl}
+add file out/outside {all}
+add none in/nothing {all}
pwrite early 4
write early
pread reader
close reader
fchmod early 600
ftruncate early 3
fsync early
close early
write outside
close outside
open a in/a x
write a
writev a
close a
open a in/a r
read a
close a
open a in/a t
write a
close a
open a in/a t
close a
open a in/a a
write a
dup a b
close a
write b
close b
stat in/a
chmod in/a 640
chown in/a
utime in/a
setxattr in/a
removexattr in/a
truncate in/a 2
open a in/a rw
fallocate a 100
fstat a
seek a 0
open c in/c c
write a enough-text
seek a 0
copy a c
sendfile a c
close a
close c
rename in/a in/b
rename in/b out/b
rename out/b in/b
rename in/b in/c
exchange in/c in/early
mkdir in/made
rename in/made in/sub2
rename in/sub2 out/sub2
rename out/sub2 in/sub2
chmod in/sub2 700
chmod in 750
open d in d
close d
listdir in
listdir in/sub2
open n in/sub2/nested c
write n
close n
unlink in/sub2/nested
rmdir in/sub2
link in/c in/linked
link in/c out/linked
open l out/linked a
write l
close l
open l in/linked a
write l
close l
unlink in/linked
unlink out/linked
symlink text in/symlink
readlink in/symlink
unlink in/symlink
mkfifo in/fifo
unlink in/fifo
open held in/held c
write held
unlink in/held
write held
close held
open held in/sub/held c
write held
chmod in/sub/held 600
unlink in/sub/held
write held
close held
rename out/outside out/moved
chmod out/moved 600
open o out/moved a
write o
unlink out/moved
write o
close o
+add once in/c {once}
chmod in/c 600
chmod in/c 644
+add added in/early 4
chmod in/early 600
+add added in/early {add}
open e in/early a
write e
close e
+add notdir in/early {onlydir}
+remove dir
open e in/early a
write e
close e
unlink in/c
rename in/sub out/sub
rmdir out/sub
+add dir in {all}
unlink in/early
rmdir in/deep
rename in out/in
rmdir out/in
rmdir out
+end
""".format(all=ALL, excl=ALL | EXCL_UNLINK, once=4 | ONESHOT, add=2 | MASK_ADD, onlydir=ALL | ONLYDIR)


class Process:
    def __init__(self, directory, how):
        prefix = sys.argv[5:] if how == "run" else []
        command = prefix + ["python3", "-c", os.environ["WATCHED_SCRIPT"], "serve", directory]
        self.child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def order(self, line):
        self.child.stdin.write(line + "\n")
        self.child.stdin.flush()
        answer = self.child.stdout.readline()
        assert answer, "a process has ended"
        return eval(answer)

    def end(self):
        self.child.stdin.close()
        assert self.child.wait() == 0


def serve(directory, roles, is_exec):
    if is_exec:
        print([], flush=True)
    for line in sys.stdin:
        words = line.split()
        role = roles["+" if words[0].startswith("+") else "-"]
        print(repr(role.obey([words[0].lstrip("+")] + words[1:])), flush=True)


def compare(directory, watcher, actor):
    lines = [line for line in SCRIPT.split("\n") if line]
    if actor == "same":
        watches = acts = Process(directory, watcher)
    else:
        watches, acts = Process(directory, watcher), Process(directory, actor)
    for line in lines:
        if line.startswith("+"):
            print(line, watches.order(line))
        else:
            result = acts.order(line)
            print(line, result, watches.order("+events"))
    for process in {watches, acts}:
        process.end()


role, directory = sys.argv[1:3]
if role == "compare":
    compare(directory, *sys.argv[3:5])
else:
    serve(directory, {"+": Watcher(directory, *sys.argv[3:]), "-": Actor(directory)}, len(sys.argv) > 3)
