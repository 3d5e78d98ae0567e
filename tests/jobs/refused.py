# Makes the kernel refuse every refusable call on a file, and then uses the file.
import ctypes, fcntl, os

libc = ctypes.CDLL(None, use_errno=True)
room = ctypes.create_string_buffer(8192)
fd = os.open("file", os.O_RDWR | os.O_CREAT, 0o644)
duplicate = os.dup(fd)
os.write(fd, bytes(65536))
for mode in (0x40, 0x08, 0x20, 0x100, 0x02, 0x18):
    assert libc.fallocate(fd, mode, ctypes.c_long(0), ctypes.c_long(4096)) == -1
for request in (0x80086601, 0x40086602, 0xC020660B, 0xC0185879, 0x801C581F, 0x4020940D, 0xC0189436, 0x40049409, 0x40285881, 0x540F, 0x12345678):
    assert libc.ioctl(fd, ctypes.c_ulong(request), room) == -1
for command in (1031, 1032, 1034, 9999):
    assert libc.fcntl(fd, command, 0) == -1
for call in (libc.getsockname, libc.getpeername, libc.recv):
    assert call(fd, room, room, 0) == -1
assert libc.sync_file_range(fd, ctypes.c_long(-1), ctypes.c_long(1), 0) == -1 and libc.readahead(fd, ctypes.c_long(0), ctypes.c_long(-1)) == -1
assert libc.posix_fadvise(fd, ctypes.c_long(0), ctypes.c_long(1), 77) != 0
for at in range(1000):
    os.pwrite(fd, b"0123456789", at)
    assert os.pread(duplicate, 10, at) == b"0123456789"
    os.fstat(fd)
