"""Prints what an ordinary user may do in a tree that the super-user made, call by call.

It works in a directory that the user could not reach by a path, and has a file of it open as descriptor 5.
"""

import errno
import os
import sys

top = sys.argv[1]
os.setgroups([])
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)


def say(name, call, *arguments, **named):
    try:
        found = call(*arguments, **named)
    except OSError as error:
        found = errno.errorcode[error.errno]
    print(name, found, flush=True)


def opened(path, flags):
    file = os.open(path, flags)
    try:
        if flags & os.O_DIRECTORY:
            return sorted(os.listdir(file))
        shown = b''
        if flags & os.O_ACCMODE != os.O_WRONLY:
            shown = os.pread(file, 99, 0)
        if flags & os.O_ACCMODE != os.O_RDONLY:
            shown += b' %d' % os.pwrite(file, b'X', 2)
        return shown
    finally:
        os.close(file)


def shown(path, **named):
    found = os.stat(path, **named)
    return oct(found.st_mode), found.st_uid, found.st_size, found.st_nlink


# By the descriptor, and in the working directory.
say('inherited', os.pread, 5, 99, 0)
say('inherited', os.pwrite, 5, b'in', 0)
say('its size', lambda: os.fstat(5).st_size)
say('reopened', opened, '/proc/self/fd/5', os.O_RDONLY)
say('here', lambda: sorted(os.listdir('.')))
say('here', opened, 'file', os.O_RDWR)
say('here', shown, '.')
say('here', shown, 'file')
say('here', os.mkdir, 'new')

paths = ['private', 'private/file', 'private/missing', 'search', 'search/file', 'search/missing', 'drop', 'drop/roots',
         'drop/missing', 'list', 'list/file', 'tmp/roots', 'open/shown', 'secret', 'written', 'both', 'read', 'long',
         'missing']
for round in range(2):
    for path in paths:
        whole = os.path.join(top, path)
        say(path, shown, whole)
        for flags in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR, os.O_RDONLY | os.O_DIRECTORY):
            say(f'{path} {flags:o}', opened, whole, flags)
        say(f'{path} list', lambda: sorted(os.listdir(whole)))
        say(f'{path} names', lambda: sorted(os.listxattr(whole)))
        say(f'{path} value', os.getxattr, whole, 'user.a')
        say(f'{path} set', os.setxattr, whole, 'user.b', b'w')
        say(f'{path} mode', os.chmod, whole, 0o777)
        say(f'{path} owner', os.chown, whole, 65534, 65534)
        say(f'{path} no owner', os.chown, whole, -1, -1)
        say(f'{path} now', os.utime, whole)
        say(f'{path} times', os.utime, whole, (1, 1))
        say(f'{path} cut', os.truncate, whole, 6)
        say(f'{path} access', lambda: [os.access(whole, mode) for mode in (os.R_OK, os.W_OK, os.X_OK)])
        say(f'{path} mkdir', os.mkdir, whole)
        say(f'{path} rmdir', os.rmdir, whole)
        say(f'{path} unlink', os.unlink, whole)
        say(f'{path} below', os.mkdir, os.path.join(whole, 'below'))
        say(f'{path} below', os.rmdir, os.path.join(whole, 'below'))
        say(f'{path} move', os.rename, whole, os.path.join(top, 'drop', 'moved'))
        say(f'{path} over', os.rename, os.path.join(top, 'drop', 'missing'), whole)
print('done')
