"""Processes open a file, lock it, check that no other one has the lock, and close it, again and again.
Arguments: how many processes, how often."""
import fcntl
import mmap
import os
import sys

processes, turns = map(int, sys.argv[1:])
inside = mmap.mmap(-1, 4096)
open("locked", "w").close()
children = []
for _ in range(processes):
    child = os.fork()
    if child == 0:
        met = 0
        for _ in range(turns):
            file = os.open("locked", os.O_RDWR)
            fcntl.flock(file, fcntl.LOCK_EX)
            met += inside[0]
            inside[0] = 1
            os.sched_yield()
            inside[0] = 0
            os.close(file)
        os._exit(min(met, 100))
    children.append(child)
print(sum(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children), "met another")
