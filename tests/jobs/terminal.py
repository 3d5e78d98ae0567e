"""Runs a program that has a terminal for its standard error, and for nothing else. The output there goes into a file.
Arguments: the file, the program, and its arguments."""
import os
import pty
import subprocess
import sys

near, far = pty.openpty()
child = subprocess.Popen(sys.argv[2:], stderr=far)
os.close(far)
with open(sys.argv[1], "wb", buffering=0) as said:
    while True:
        try:
            said.write(os.read(near, 4096))
        except OSError:
            # No process has the terminal any more.
            break
sys.exit(child.wait())
