"""A server becomes each of its users in turn, and itself again. Files that it makes belong to the user, calls beyond the
user's rights are refused, and open files stay open. Also with threads, of which one may be another user than the rest.
Argument: a directory beside the mount; works in one on it, as the super-user."""

import ctypes
import functools
import os
import subprocess
import threading

print = functools.partial(print, flush=True)
libc = ctypes.CDLL(None, use_errno=True)
SETRESUID, SETRESGID = 117, 119
ROUNDS, USERS = 300, 40


def become(user):
    if user:
        os.setgroups([user + 1])
        os.setegid(user)
        os.seteuid(user)
    else:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups([])


def attempt(what):
    try:
        return what()
    except OSError as error:
        return error.strerror


def write(path, text):
    with open(path, "a") as file:
        file.write(text)


def owner(path):
    found = os.stat(path)
    return found.st_uid, found.st_gid


def burden():
    """Descriptors, and gigabytes of address space."""
    size = next(line for line in open("/proc/self/status") if line.startswith("VmSize"))
    return len(os.listdir("/proc/self/fd")), int(size.split()[1]) >> 20


os.mkdir("all")
os.chmod("all", 0o1777)
os.mkdir("mine", 0o700)

# One after the other.
before = burden()
wrong = 0
for turn in range(ROUNDS):
    user = 2000 + turn % USERS
    become(user)
    write(f"all/{user}", "x")
    wrong += owner(f"all/{user}") != (user, user)
    wrong += attempt(lambda: write("mine/file", "x")) != "Permission denied"
    wrong += attempt(lambda: os.listdir("mine")) != "Permission denied"
    become(0)
    write("mine/file", "y")
    wrong += owner("mine/file") != (0, 0)
after = burden()
print("in turn, wrong:", wrong, os.stat("mine/file").st_size, sum(os.stat(f"all/{2000 + n}").st_size for n in range(USERS)))
print("a user costs nothing that stays:", after[0] - before[0] < 64, after[1] - before[1] < 8)

# Open files stay usable, with the rights of the user that opened them.
file = os.open("mine/open", os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
for user in (2001, 2002, 0, 2001):
    become(user)
    os.write(file, b"%d " % user)
    print("open:", os.pread(file, 100, 0), attempt(lambda: os.open("mine/open", os.O_RDONLY)) != "Permission denied")
    become(0)
os.close(file)
become(2003)
file = os.open("all/2003-too", os.O_RDWR | os.O_CREAT, 0o600)
become(0)
os.write(file, b"by the super-user")
os.fchmod(file, 0o640)
print("open:", owner("all/2003-too"), oct(os.fstat(file).st_mode), os.fstat(file).st_size)
os.close(file)

# Files that are made meanwhile.
for user in (2004, 2005):
    become(user)
    child = os.fork()
    if child == 0:
        write(f"all/{user}-child", "c")
        become(0)
        write("mine/child", "c")
        os._exit(0)
    print("child:", os.waitpid(child, 0)[1], owner(f"all/{user}-child"))
    said = subprocess.run(["sh", "-c", f"id -u >all/{user}-shell; cat mine/file"], capture_output=True, text=True)
    become(0)
    print("program:", open(f"all/{user}-shell").read().strip(), owner(f"all/{user}-shell"), "denied" in said.stderr)
print("children:", os.stat("mine/child").st_size, owner("mine/child"))

# A single thread, as in servers that have one for each client.
turns = threading.Barrier(2)


def other():
    libc.syscall(SETRESGID, -1, 2006, -1)
    libc.syscall(SETRESUID, -1, 2006, -1)
    turns.wait()
    turns.wait()
    write("all/thread", "t")
    print("thread:", owner("all/thread"), attempt(lambda: write("mine/thread", "t")), attempt(lambda: os.listdir("mine")))
    turns.wait()
    turns.wait()
    libc.syscall(SETRESUID, -1, 0, -1)
    libc.syscall(SETRESGID, -1, 0, -1)


thread = threading.Thread(target=other)
thread.start()
turns.wait()
write("all/others", "o")
print("others:", owner("all/others"))
turns.wait()
turns.wait()
write("mine/others", "o")
print("others:", owner("mine/others"))
turns.wait()
thread.join()

# In a process of its own, as the kernel may serve the one before by now: threads work on while the user changes, at
# last for good.
if os.fork() == 0:
    ended, troubles = threading.Event(), []

    def works(number):
        try:
            file = os.open(f"all/works-{number}", os.O_RDWR | os.O_CREAT, 0o666)
            count = 0
            while not ended.is_set():
                text = b"%08d" % count
                os.pwrite(file, text, 0)
                if os.pread(file, 8, 0) != text:
                    troubles.append("another content")
                os.stat("all")
                count += 1
        except OSError as error:
            troubles.append(str(error))

    workers = [threading.Thread(target=works, args=(number,)) for number in range(2)]
    for worker in workers:
        worker.start()
    for turn in range(40):
        become(2007)
        write("all/2007", "x")
        become(0)
        write("mine/threads", "x")
    print("threads:", owner("all/2007"), owner("mine/threads"), os.stat("mine/threads").st_size)
    ended.set()
    for worker in workers:
        worker.join()
    os.setresgid(2008, 2008, 2008)
    os.setresuid(2008, 2008, 2008)
    write("all/2008", "x")
    print("threads:", troubles, owner("all/2008"), attempt(lambda: write("mine/threads", "x")))
    os._exit(0)
print("threads:", os.wait()[1])
