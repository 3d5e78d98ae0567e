# A virtual environment that works, and a job that uses most calls of a file system.
python3 -m venv --without-pip venv
venv/bin/python -c 'import sys; print(sys.prefix.endswith("venv"))'
find venv -type l -printf '%f\n' | sort
cat >job.py <<'END'
import concurrent.futures, dbm.dumb, glob, json, mmap, os, pickle, shutil, sqlite3, tempfile, zipfile

os.makedirs("data/deep/er")
def work(n):
    path = f"data/{n}.json"
    with tempfile.NamedTemporaryFile("w", dir="data", delete=False) as file:
        json.dump(list(range(n)), file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(file.name, path)
    with open(path) as file:
        return sum(json.load(file))
with concurrent.futures.ProcessPoolExecutor(4) as pool:
    print(sum(pool.map(work, range(200))))
with concurrent.futures.ThreadPoolExecutor(8) as pool:
    print(sum(pool.map(work, range(200))))
print(len(glob.glob("data/*.json")), len(os.listdir("data")))
with open("mapped", "wb") as file:
    file.truncate(1 << 20)
with open("mapped", "r+b") as file:
    memory = mmap.mmap(file.fileno(), 0)
    memory[4090:4100] = b"0123456789"
    memory.flush()
    print(os.pread(file.fileno(), 12, 4089))
    os.pwrite(file.fileno(), b"xyz", 4092)
    print(bytes(memory[4090:4100]))
    memory.close()
connection = sqlite3.connect("job.db")
connection.execute("CREATE TABLE t(a, b)")
with connection:
    connection.executemany("INSERT INTO t VALUES (?, ?)", ((n, str(n)) for n in range(10000)))
print(connection.execute("SELECT count(*), sum(a) FROM t").fetchone())
with zipfile.ZipFile("all.zip", "w", zipfile.ZIP_DEFLATED) as archive:
    for name in sorted(glob.glob("data/*.json")):
        archive.write(name)
    print(len(archive.namelist()))
with zipfile.ZipFile("all.zip") as archive:
    print(archive.testzip())
with dbm.dumb.open("db", "c") as database:
    for n in range(100):
        database[str(n)] = pickle.dumps(n)
with dbm.dumb.open("db") as database:
    print(sum(pickle.loads(database[key]) for key in database))
shutil.copytree("data", "copy", copy_function=shutil.copy2)
print(sorted(os.listdir("data")) == sorted(os.listdir("copy")))
shutil.rmtree("data")
print(os.path.exists("data"))
END
venv/bin/python job.py
python3 -m compileall -q -d . job.py && echo compiled
