"""Reads and writes a file through shared mappings: a line in, a line out. Each mapping lasts for one line, and the file
is open from one `open` to the next."""

import mmap
import os
import sys

file = os.open(sys.argv[1], os.O_RDWR)
for line in sys.stdin:
    if line == "open\n":
        os.close(file)
        file = os.open(sys.argv[1], os.O_RDWR)
        print("done", flush=True)
        continue
    what, offset, rest = line.split()
    start = int(offset)
    with mmap.mmap(file, 0) as mapping:
        if what == "read":
            print(mapping[start : start + int(rest)].hex(), flush=True)
        else:
            new = bytes.fromhex(rest)
            mapping[start : start + len(new)] = new
            mapping.flush()
            print("done", flush=True)
