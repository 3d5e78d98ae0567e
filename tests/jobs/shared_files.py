"""Processes use open files that they share, one after the other, in an order that a seed decides. Prints all results.
Arguments: a seed, the number of steps. The files are in the working directory."""
import fcntl
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time

MEMBERS = 7
SECONDS = 60
NAMES = ["a", "b", "c"]


def is_dead(process):
    """A killed process's files are closed some time later, before its parent sees that it is dead."""
    try:
        with open("/proc/%d/stat" % process) as file:
            return file.read().rpartition(") ")[2][0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def told(work):
    try:
        return work()
    except (OSError, ValueError) as error:
        return error.strerror if isinstance(error, OSError) else str(error)


class Member:
    """A process of the family. It follows orders, and answers with the results."""

    def __init__(self, number, pipes, files):
        self.number, self.pipes, self.files = number, pipes, files
        self.told, self.says = pipes[number]

    def serve(self):
        # A member that gets no more orders must not wait for ever.
        signal.alarm(SECONDS)
        with os.fdopen(os.dup(self.told), "r") as commands:
            for line in commands:
                word, *rest = json.loads(line)
                answer = told(lambda: getattr(self, word)(*rest))
                os.write(self.says, (json.dumps(answer) + "\n").encode())

    def open(self, key, name, flags, stays):
        self.files[key] = os.open(name, flags, 0o644)
        os.set_inheritable(self.files[key], stays)
        return "open"

    def write(self, key, length, letter):
        return os.write(self.files[key], letter.encode() * length)

    def read(self, key, length):
        return os.read(self.files[key], length).decode()

    def pwrite(self, key, at, letter):
        return os.pwrite(self.files[key], letter.encode() * 9, at)

    def pread(self, key, at):
        return os.pread(self.files[key], 20, at).decode()

    def place(self, key):
        return os.lseek(self.files[key], 0, os.SEEK_CUR)

    def seek(self, key, to):
        return os.lseek(self.files[key], to, os.SEEK_SET)

    def end(self, key):
        return os.lseek(self.files[key], -3, os.SEEK_END)

    def size(self, key):
        return os.fstat(self.files[key]).st_size

    def cut(self, key, size):
        return os.ftruncate(self.files[key], size)

    def flags(self, key):
        return fcntl.fcntl(self.files[key], fcntl.F_GETFL) & (os.O_ACCMODE | os.O_APPEND | os.O_NONBLOCK)

    def append(self, key, appends):
        flags = fcntl.fcntl(self.files[key], fcntl.F_GETFL)
        flags = flags | os.O_APPEND if appends else flags & ~os.O_APPEND
        return fcntl.fcntl(self.files[key], fcntl.F_SETFL, flags)

    def dup(self, key, new):
        self.files[new] = os.dup(self.files[key])
        return "dup"

    def dup2(self, key, new):
        os.dup2(self.files[key], self.files[new], inheritable=False)
        return "dup2"

    def close(self, key):
        os.close(self.files.pop(key))
        return "closed"

    def lock(self, key, length):
        return fcntl.lockf(self.files[key], fcntl.LOCK_EX | fcntl.LOCK_NB, length, 0)

    def copy(self, key, new):
        return os.sendfile(self.files[new], self.files[key], None, 7)

    def map(self, key):
        import mmap
        with mmap.mmap(self.files[key], 0, mmap.MAP_PRIVATE, mmap.PROT_READ) as mapping:
            return mapping[:10].decode()

    def spawn(self, key, words):
        return subprocess.run(["/bin/echo", words], stdout=self.files[key]).returncode

    def shell(self, key, words):
        # It is forked, and has the inheritable descriptors.
        return subprocess.run(["/bin/sh", "-c", "echo %s; echo more" % words], stdout=self.files[key], close_fds=False,
                              preexec_fn=lambda: None).returncode

    def posix(self, key, words):
        actions = [(os.POSIX_SPAWN_DUP2, self.files[key], 1)]
        return os.waitpid(os.posix_spawn("/bin/echo", ["echo", words], os.environ, file_actions=actions), 0)[1]

    def fork(self, number):
        made = os.fork()
        if made == 0:
            Member(number, self.pipes, dict(self.files)).serve()
            os._exit(0)
        return made

    def execute(self):
        files = {key: number for key, number in self.files.items() if os.get_inheritable(number)}
        # Commands that came together would be lost with the buffer that the member read; they come one by one.
        arguments = [json.dumps(what) for what in (self.number, self.pipes, files)]
        os.execv(sys.executable, [sys.executable, __file__, "member"] + arguments)


def steps(choose, count):
    """A family's story: which member makes which call on which of its open files."""
    alive, born, made = {0: {}}, 1, 0
    for step in range(count):
        number = choose.choice(sorted(alive))
        files = alive[number]
        kind = choose.randrange(100)
        if not files or kind < 8 and len(files) < 8:
            key, made = "f%d" % made, made + 1
            flags = choose.choice([os.O_RDWR, os.O_RDWR, os.O_RDWR | os.O_APPEND, os.O_WRONLY, os.O_RDONLY])
            stays = choose.random() < 0.5
            files[key] = stays
            yield number, ["open", key, choose.choice(NAMES), flags | os.O_CREAT, stays]
            continue
        key = choose.choice(sorted(files))
        if kind < 14 and born < MEMBERS:
            yield number, ["fork", born]
            alive[born], born = dict(files), born + 1
        elif kind < 17:
            alive[number] = {key: stays for key, stays in files.items() if stays}
            yield number, ["execute"]
        elif kind < 19 and len(alive) > 1:
            del alive[number]
            yield number, None
        elif kind < 22 and len(files) < 8:
            new, made = "f%d" % made, made + 1
            files[new] = False
            yield number, ["dup", key, new]
        elif kind < 24:
            new = choose.choice(sorted(files))
            files[new] = files[new] and new == key
            yield number, ["dup2", key, new]
        elif kind < 27:
            del files[key]
            yield number, ["close", key]
        elif kind < 30:
            yield number, [choose.choice(["spawn", "shell", "posix"]), key, "said-%d" % step]
        else:
            letter = chr(ord("a") + step % 26)
            yield number, choose.choice([
                ["write", key, choose.randrange(1, 30), letter],
                ["write", key, choose.choice([1, 5000]), letter],
                ["write", key, 7, letter],
                ["read", key, choose.randrange(1, 40)],
                ["read", key, 3],
                ["pwrite", key, choose.randrange(200), letter],
                ["pread", key, choose.randrange(200)],
                ["place", key],
                ["seek", key, choose.randrange(300)],
                ["end", key],
                ["size", key],
                ["cut", key, choose.randrange(200)],
                ["flags", key],
                ["append", key, choose.random() < 0.5],
                ["lock", key, 10],
                ["copy", key, choose.choice(sorted(files))],
                ["map", key],
            ])


def begin():
    """The first member, with pipes for the orders to all members and for their answers."""
    pipes, ways = [], []
    for _ in range(MEMBERS):
        (told, tell), (hear, says) = os.pipe(), os.pipe()
        # They survive the execution of another program.
        os.set_inheritable(told, True)
        os.set_inheritable(says, True)
        pipes.append((told, says))
        ways.append((tell, os.fdopen(hear, "r")))
    first = os.fork()
    if first == 0:
        Member(0, pipes, {}).serve()
        os._exit(0)
    return first, ways


def main(seed, count):
    first, ways = begin()
    processes, alive = {0: first}, {0}
    for number, command in steps(random.Random(seed), count):
        if command is None:
            os.kill(processes[number], signal.SIGKILL)
            while not is_dead(processes[number]):
                time.sleep(0.001)
            alive.remove(number)
            print(number, "is killed")
            continue
        tell, hear = ways[number]
        os.write(tell, (json.dumps(command) + "\n").encode())
        answer = json.loads(hear.readline())
        if command[0] == "fork":
            alive.add(command[1])
            processes[command[1]], answer = answer, "forked"
        print(number, *command, "->", answer)
    for number in alive:
        os.kill(processes[number], signal.SIGKILL)
    for name in NAMES:
        content = open(name, "rb").read() if os.path.exists(name) else b""
        print(name, len(content), hashlib.sha256(content).hexdigest()[:12])


if sys.argv[1] == "member":
    member = Member(*(json.loads(word) for word in sys.argv[2:]))
    os.write(member.says, b'"there"\n')
    member.serve()
else:
    main(int(sys.argv[1]), int(sys.argv[2]))
