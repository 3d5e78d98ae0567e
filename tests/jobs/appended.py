# Writes to an appending open file, at an offset and with flags that say otherwise, here and in the directory beside the
# mount: "alike" each time.
import ctypes, errno, os, sys

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
text = ctypes.create_string_buffer(b"XY")
part = (ctypes.c_ulong * 2)(ctypes.addressof(text), 2)
for _ in range(100):
    os.stat(".")

def story(directory):
    path = os.path.join(directory, "appended")
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(fd, b"0123456789")
    os.lseek(fd, 4, os.SEEK_SET)
    for flags, at in [(0x20, 2), (0x20, -1), (0x30, 0), (0x22, 8), (0x10, 0), (0, 0)]:
        ctypes.set_errno(0)
        done = libc.syscall(ctypes.c_long(328), ctypes.c_long(fd), part, ctypes.c_long(1), ctypes.c_long(at), ctypes.c_long(0), ctypes.c_long(flags))
        yield flags, at, done, ctypes.get_errno(), open(path, "rb").read(), os.lseek(fd, 0, os.SEEK_CUR)

for here, there in zip(story("."), story(sys.argv[1])):
    print("alike" if here == there else f"here {here}, there {there}")
