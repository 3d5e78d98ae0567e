# Asynchronous writes past the page cache, while other processes read the same file through it. Once a write is reported
# done, no process reads the earlier bytes.
cat > asynchronous.py <<'END'
import ctypes, mmap, os, struct, time

IO_SETUP, IO_GETEVENTS, IO_SUBMIT = 206, 208, 209
BYTES = 160 * 4096
libc = ctypes.CDLL(None, use_errno=True)


def call(number, *arguments):
    result = libc.syscall(number, *arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), "system call %d" % number)
    return result


def write(context, descriptor, memory):
    """One `io_submit` and the wait for its end."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    # struct iocb: data, key and flags, operation (1: PWRITE), priority, descriptor, buffer, bytes, offset, ...
    block = ctypes.create_string_buffer(struct.pack("<QIIHhIQQqQII", 0, 0, 0, 1, 0, descriptor, address, BYTES, 0, 0, 0, 0))
    call(IO_SUBMIT, context, ctypes.c_long(1), ctypes.byref(ctypes.c_void_p(ctypes.addressof(block))))
    event = ctypes.create_string_buffer(32)
    call(IO_GETEVENTS, context, ctypes.c_long(1), ctypes.c_long(1), event, None)
    if struct.unpack("<QQqq", event.raw)[2] != BYTES:
        raise OSError("a short write")


def read():
    descriptor = os.open("f", os.O_RDONLY)
    data = os.pread(descriptor, BYTES, 0)
    os.close(descriptor)
    return data


def readers(count):
    children = []
    for _ in range(count):
        child = os.fork()
        if child == 0:
            while not os.path.exists("stop"):
                read()
            os._exit(0)
        children.append(child)
    return children


def rounds(name, flags, seconds):
    patterns = []
    for letter in b"ab":
        memory = mmap.mmap(-1, BYTES)
        memory[:] = bytes([letter]) * BYTES
        patterns.append(memory)
    context = ctypes.c_ulong(0)
    call(IO_SETUP, ctypes.c_long(1), ctypes.byref(context))
    end, done = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        memory = patterns[done % 2]
        descriptor = os.open("f", flags)
        write(context, descriptor, memory)
        os.close(descriptor)
        data = read()
        if data != memory[:]:
            stale = sum(data[at] != memory[at] for at in range(0, BYTES, 4096))
            print("%s: %d of 160 pages are stale" % (name, stale))
            return
        done += 1
    print("%s: %s" % (name, "nothing is stale" if done > 20 else "too few writes"))


with open("f", "wb") as file:
    file.write(b"b" * BYTES)
children = readers(3)
try:
    rounds("O_RDWR|O_DIRECT", os.O_RDWR | os.O_DIRECT, 6)
    rounds("O_WRONLY", os.O_WRONLY, 6)
finally:
    open("stop", "w").close()
    for child in children:
        os.waitpid(child, 0)
os.remove("stop")
END
python3 asynchronous.py
rm f
