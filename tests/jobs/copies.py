# Copies by the calls that copy between descriptors, of all kinds of files in all modes; prints the result of each.
# Argument: a directory elsewhere.
import ctypes, errno, fcntl, os, sys, zlib

outside = sys.argv[1]
FICLONE = 0x40049409
TEXT = bytes(range(256)) * 40
libc = ctypes.CDLL(None, use_errno=True)
for place in '.', outside:
    os.makedirs(place + '/dir', exist_ok=True)
    open(place + '/from', 'wb').write(TEXT)

KINDS = {
    'file': lambda mode, name: os.open(name, mode),
    'outside': lambda mode, name: os.open(outside + '/' + name, mode),
    'dir': lambda mode, name: os.open('dir', os.O_RDONLY),
    'outdir': lambda mode, name: os.open(outside + '/dir', os.O_RDONLY),
    'pipe': lambda mode, name: os.pipe()[1 if mode & os.O_WRONLY else 0],
    'none': lambda mode, name: 1000,
}
MODES = {'r': os.O_RDONLY, 'w': os.O_WRONLY, 'rw': os.O_RDWR, 'a': os.O_WRONLY | os.O_APPEND, 'p': os.O_PATH, 's': os.O_RDWR | os.O_SYNC}


def clone(source, target, offsets):
    fcntl.ioctl(target, FICLONE, source)
    return 0


def copy(source, target, offsets, flags=0):
    given = [None if offset is None else ctypes.byref(ctypes.c_int64(offset)) for offset in offsets]
    done = libc.copy_file_range(source, given[0], target, given[1], ctypes.c_size_t(5000), flags)
    if done < 0:
        raise OSError(ctypes.get_errno(), '')
    return done, *(offset and offset._obj.value for offset in given)


def send(source, target, offsets):
    given = None if offsets[0] is None else ctypes.byref(ctypes.c_int64(offsets[0]))
    done = libc.sendfile(target, source, given, ctypes.c_size_t(5000))
    if done < 0:
        raise OSError(ctypes.get_errno(), '')
    return done, given and given._obj.value


CALLS = {'clone': clone, 'copy': copy, 'copy with flags': lambda *a: copy(*a, flags=1), 'send': send}
OFFSETS = [(None, None), (9000, 100), (0, None), (None, 20000), (50000, 0), (-1, 0), (0, -1)]


def stands(descriptor):
    try:
        return os.lseek(descriptor, 0, os.SEEK_CUR)
    except OSError as error:
        return errno.errorcode[error.errno]


def attempt(call, source_kind, source_mode, target_kind, target_mode, offsets):
    for place in '.', outside:
        if os.path.exists(place + '/to'):
            os.unlink(place + '/to')
        open(place + '/to', 'w').close()
    source = KINDS[source_kind](MODES[source_mode], 'from')
    target = KINDS[target_kind](MODES[target_mode], 'to')
    for descriptor in source, target:
        try:
            os.lseek(descriptor, 3, os.SEEK_SET)
        except OSError:
            pass
    try:
        told = CALLS[call](source, target, offsets)
    except OSError as error:
        told = errno.errorcode[error.errno]
    found = {'file': 'to', 'outside': outside + '/to'}.get(target_kind)
    content = zlib.crc32(open(found, 'rb').read()) if found else None
    print(call, source_kind, source_mode, target_kind, target_mode, offsets, told, stands(source), stands(target), content)
    for descriptor in source, target:
        if descriptor != 1000:
            os.close(descriptor)


for call in CALLS:
    for source_kind in KINDS:
        for target_kind in KINDS:
            if 'pipe' in (source_kind, target_kind) and call == 'send' and target_kind == 'pipe':
                continue
            if source_kind == 'pipe' and call == 'send':
                continue
            for source_mode in MODES if source_kind in ('file', 'outside') else 'r':
                for target_mode in MODES if target_kind in ('file', 'outside') else 'w':
                    plain = (source_kind in ('file', 'outside') and target_kind in ('file', 'outside')
                             and source_mode == 'r' and target_mode == 'w' and call != 'clone')
                    for offsets in OFFSETS if plain else OFFSETS[:1]:
                        attempt(call, source_kind, source_mode, target_kind, target_mode, offsets)
# Within one file.
for offsets in (0, 20000), (0, 5000), (0, 4999), (6000, 0), (None, 0):
    descriptor = os.open('from', os.O_RDWR)
    try:
        told = copy(descriptor, descriptor, offsets)
    except OSError as error:
        told = errno.errorcode[error.errno]
    print('itself', offsets, told, os.lseek(descriptor, 0, os.SEEK_CUR), zlib.crc32(os.pread(descriptor, 1 << 20, 0)))
