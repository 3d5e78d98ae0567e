# Asks for leases on files that LibFS and the kernel have open, and prints the answers.
import errno, fcntl, os

with open("file", "wb") as file:
    file.write(b"x")
for _ in range(100):
    os.stat("file")

def ask(what, fd):
    for lease in (fcntl.F_WRLCK, fcntl.F_RDLCK):
        try:
            print(what, fcntl.fcntl(fd, fcntl.F_SETLEASE, lease))
        except OSError as error:
            print(what, errno.errorcode[error.errno])
    print(what, fcntl.fcntl(fd, fcntl.F_GETLEASE) == fcntl.F_UNLCK)

reads, both = os.open("file", os.O_RDONLY), os.open("file", os.O_RDWR)
ask("open to read", reads)
ask("open to write", both)
fcntl.flock(both, fcntl.LOCK_SH)
ask("the kernel's", both)
