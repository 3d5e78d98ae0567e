# Python's processes, forked and spawned: pools, queues, and one file that all append to under a lock.
cat >many.py <<'PY'
import fcntl, mmap, multiprocessing, os, sys, tempfile


def square(n):
    with open(f"squares/{n}", "w") as file:
        file.write(str(n * n))
    return n * n


def append(lock, name, times):
    """One file for all, with a lock of Python's; each line must be whole."""
    for turn in range(times):
        with lock:
            with open("shared", "a") as file:
                file.write(f"{name} {turn}\n")


def count(times):
    """A counter in a file, with a lock of the kernel's."""
    for _ in range(times):
        with open("counter", "r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            number = int(file.read() or "0")
            file.seek(0)
            file.write(str(number + 1))


def record(times):
    """The same with record locks."""
    for _ in range(times):
        with open("records", "r+b", buffering=0) as file:
            fcntl.lockf(file, fcntl.LOCK_EX)
            number = int(os.pread(file.fileno(), 20, 0) or b"0")
            os.pwrite(file.fileno(), b"%d" % (number + 1), 0)


def serve(requests, answers):
    """Takes names of files, and gives what is in them."""
    for name in iter(requests.get, None):
        with open(name) as file:
            answers.put((name, file.read()))


def inherit(descriptor):
    """Goes on writing where its parent has stopped."""
    os.write(descriptor, b"of the child\n")


def mapped(name):
    with open(name, "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        place = os.getpid() % 8 * 8
        memory[0] += 1
        memory.flush()
    return True


def main(method):
    context = multiprocessing.get_context(method)
    os.makedirs(method)
    os.chdir(method)
    os.mkdir("squares")
    with context.Pool(4) as pool:
        print(method, sum(pool.map(square, range(60))), len(os.listdir("squares")))
        print(method, sorted(pool.imap_unordered(square, range(20)))[-1])
        print(method, pool.apply_async(square, (500,)).get(60))
        try:
            pool.apply(open, ("no-such-file",))
        except FileNotFoundError as error:
            print(method, error.strerror)
    for name in ("counter", "records"):
        open(name, "w").close()
    lock = context.Lock()
    workers = [context.Process(target=append, args=(lock, f"worker-{n}", 25)) for n in range(4)]
    workers += [context.Process(target=call, args=(20,)) for call in (count, record) for _ in range(3)]
    for worker in workers:
        worker.start()
    requests, answers = context.Queue(), context.Queue()
    server = context.Process(target=serve, args=(requests, answers))
    server.start()
    for n in range(30):
        with open(f"asked-{n}", "w") as file:
            file.write("x" * n)
        requests.put(f"asked-{n}")
    requests.put(None)
    print(method, sum(len(answers.get(timeout=60)[1]) for _ in range(30)))
    for worker in workers + [server]:
        worker.join()
    print(method, {worker.exitcode for worker in workers})
    with open("shared") as file:
        lines = file.read().splitlines()
    wanted = sorted(f"worker-{n} {turn}" for n in range(4) for turn in range(25))
    print(method, len(lines), sorted(lines) == wanted, open("counter").read(), open("records").read())
    with open("mapped", "wb") as file:
        file.write(bytes(4096))
    with context.Pool(2) as pool:
        print(method, pool.map(mapped, ["mapped"] * 6), max(1, open("mapped", "rb").read()[0]) > 0)
    if method == "fork":
        with open("inherited", "wb", buffering=0) as file:
            file.write(b"of the parent\n")
            child = context.Process(target=inherit, args=(file.fileno(),))
            child.start()
            child.join()
            file.write(b"of the parent again\n")
        print(open("inherited").read(), end="")
    with tempfile.TemporaryDirectory(dir=".") as scratch:
        manager = context.Manager()
        shared = manager.dict()
        shared["path"] = os.path.join(scratch, "file")
        open(shared["path"], "w").close()
        print(method, os.listdir(scratch))
        manager.shutdown()
    for name in ("mapped", "shared"):
        os.remove(name)
    os.chdir("..")


if __name__ == "__main__":
    for method in sys.argv[1:]:
        main(method)
PY
python3 many.py fork spawn
manifest .
