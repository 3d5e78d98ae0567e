# Looks names up again and again, by paths that the process knows, and prints each answer. Meanwhile this process and
# another one, which goes through the kernel, change the targets. Argument: a directory elsewhere.
import ctypes, errno, os, random, subprocess, sys

random.seed(20261126)
libc = ctypes.CDLL(None, use_errno=True)
FILES = ['a', 'b', 'dir/x', 'dir/y', 'dir/in/z', 'other/x', 'link']
DIRECTORIES = ['dir', 'dir/in', 'other']
NAMES = FILES + DIRECTORIES
FLAGS = {'r': os.O_RDONLY, 'w': os.O_WRONLY, 'rw': os.O_RDWR, 'a': os.O_WRONLY | os.O_APPEND, 'd': os.O_RDONLY | os.O_DIRECTORY, 'n': os.O_RDONLY | os.O_NOFOLLOW}
ROUNDS = 250


def make(name, length):
    with open(name, 'w') as file:
        file.write('x' * length)


def grow(name, length):
    with open(name, 'a') as file:
        file.write('y' * length)


CHANGES = {
    'make': make, 'grow': grow, 'cut': os.truncate, 'mode': os.chmod, 'remove': lambda name, _: os.unlink(name),
    'mkdir': os.mkdir, 'rmdir': lambda name, _: os.rmdir(name), 'move': os.rename, 'link': os.link,
    'symlink': lambda name, target: os.symlink(target, name), 'time': lambda name, at: os.utime(name, (at, at)),
}


def result(call, *arguments):
    try:
        return call(*arguments)
    except OSError as error:
        return errno.errorcode[error.errno]


def change(what, name, more):
    return str(result(CHANGES[what], name, more))


def serve():
    for line in sys.stdin:
        print(change(*eval(line)), flush=True)


def drawn():
    """A change: its kind, the name, and further arguments."""
    what = random.choice(list(CHANGES))
    # As a rule a directory stays one.
    kind = random.choice([FILES, FILES, DIRECTORIES, NAMES])
    name = random.choice({'make': FILES, 'grow': FILES, 'remove': FILES, 'symlink': FILES, 'link': FILES, 'mkdir': DIRECTORIES}.get(what, kind))
    more = {
        'make': random.randrange(3000), 'grow': random.randrange(3000), 'cut': random.randrange(3000), 'time': random.randrange(1, 10**9),
        'mode': random.choice([0o644, 0o755, 0o600, 0o000, 0o444, 0o700, 0o666]), 'mkdir': 0o755, 'move': random.choice(kind),
        'link': random.choice(FILES), 'symlink': random.choice(['a', 'dir/x', 'dir', 'dir/../b', 'nowhere', 'link']),
    }
    return what, name, more.get(what, 0)


def shown(found):
    # The size of a directory is the file system's choice.
    return oct(found.st_mode), found.st_nlink, found.st_uid, found.st_size if found.st_mode & 0o100000 else 0, found.st_mtime_ns % 10**9 == 0


def open_and_look(path, flags, directory=None):
    descriptor = os.open(path, flags, dir_fd=directory)
    try:
        text = result(os.read, descriptor, 3) if flags & os.O_ACCMODE == os.O_RDONLY else ''
        return shown(os.fstat(descriptor)), text, result(os.lseek, descriptor, 1, os.SEEK_SET), result(os.lseek, descriptor, 0, os.SEEK_CUR)
    finally:
        os.close(descriptor)


def statx(path, flags):
    buffer = (ctypes.c_uint8 * 256)()
    if libc.statx(-100, path.encode(), flags, 0xfff, buffer):
        return errno.errorcode[ctypes.get_errno()]
    word = lambda at, size: int.from_bytes(bytes(buffer[at:at + size]), 'little')
    mode = word(28, 2)
    return oct(mode), word(16, 4), word(20, 4), word(40, 8) if mode & 0o100000 else 0


def look(path, directory):
    yield 'stat', result(lambda: shown(os.stat(path)))
    yield 'lstat', result(lambda: shown(os.lstat(path)))
    yield 'statx', [statx(path, flags) for flags in (0, 0x100, 0x2000, 0x6000, 0x200000)]
    yield 'access', [result(os.access, path, mode) for mode in (os.F_OK, os.R_OK, os.W_OK, os.X_OK, os.R_OK | os.W_OK)]
    yield 'open', [(name, result(open_and_look, path, flags)) for name, flags in FLAGS.items()]
    if not path.startswith('/'):
        yield 'at', [result(lambda: shown(os.stat(path, dir_fd=directory))), result(open_and_look, path, os.O_RDONLY, directory)]


if sys.argv[1] == 'serve':
    serve()
else:
    bare = {name: value for name, value in os.environ.items() if name not in ('LD_PRELOAD', 'ASHLAR_RUN', 'ASHLAR_DEFER')}
    source = open('/proc/self/cmdline', 'rb').read().split(b'\0')[2].decode()
    other = subprocess.Popen(['python3', '-c', source, 'serve'], env=bare, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    here = os.open('.', os.O_RDONLY | os.O_DIRECTORY)
    for number in range(ROUNDS):
        what = drawn()
        if random.random() < 0.5:
            print(number, 'I', what, change(*what))
        else:
            print(what, file=other.stdin, flush=True)
            print(number, 'the other', what, other.stdout.readline().strip())
        for name in random.sample(NAMES, 4):
            for path in name, os.path.join(os.getcwd(), name), name + '/', './' + name:
                looks = [list(look(path, here)) for _ in range(3)]
                place = path.replace(os.getcwd(), '')
                for call, found in looks[0]:
                    print(number, place, call, found)
                if looks[1:] != looks[:2]:
                    print(number, place, 'is not the same again:', looks)
    other.stdin.close()
    other.wait()
