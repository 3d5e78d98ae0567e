# LevelDB: batches, synchronous writes, compaction, iterators over snapshots, and a writer that is killed.
cat >job.py <<'PY'
import hashlib, os, plyvel, random, signal, sys, time

def content(db):
    digest = hashlib.sha256()
    for key, value in db:
        digest.update(key + b"=" + value + b"\n")
    return digest.hexdigest()

draw = random.Random(7)
options = dict(create_if_missing=True, write_buffer_size=65536, max_open_files=20, compression=None)
db = plyvel.DB("db", **options)
for n in range(300):
    with db.write_batch(sync=n % 50 == 0) as batch:
        for _ in range(50):
            batch.put(b"%08d" % draw.randrange(10000), draw.randbytes(100))
        batch.delete(b"%08d" % draw.randrange(10000))
print(content(db))
snapshot = db.snapshot()
with db.write_batch() as batch:
    for key, _ in db.iterator(stop=b"00005000"):
        batch.delete(key)
print(content(snapshot), content(db))
snapshot.close()
db.compact_range()
print(content(db), sum(1 for _ in db.iterator(reverse=True, include_value=False)))
try:
    plyvel.DB("db")
except plyvel.IOError:
    print("a second one is kept out")
db.close()

# A child writes synchronously and prints the acknowledged keys; it is killed in the middle.
reader, writer = os.pipe()
child = os.fork()
if child == 0:
    db = plyvel.DB("killed", **options)
    for n in range(1_000_000):
        db.put(b"%08d" % n, b"%d" % n * 50, sync=True)
        os.write(writer, b".")
os.close(writer)
acknowledged = 0
while acknowledged < 500:
    acknowledged += len(os.read(reader, 4096))
os.kill(child, signal.SIGKILL)
os.waitpid(child, 0)
while more := os.read(reader, 4096):
    acknowledged += len(more)
db = plyvel.DB("killed")
keys = [int(key) for key, value in db if value == b"%d" % int(key) * 50]
print(keys == list(range(len(keys))), acknowledged <= len(keys) <= acknowledged + 1)
db.close()
plyvel.repair_db("db")
db = plyvel.DB("db")
print(content(db))
db.close()
PY
/usr/bin/python3 job.py
rm -f */LOG*
