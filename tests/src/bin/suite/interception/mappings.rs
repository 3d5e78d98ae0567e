//! Files that programs map out of the data segments (DAX).

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Stdio};
use std::time::Duration;

use ashlar_tests::command::{eventually, finish, run, wait};
use ashlar_tests::harness::{Test, Verdict, passed, when_mountable};
use ashlar_tests::mount::{Front, Medium, TestArena};
use ashlar_tests::{Outcome, ensure, tried};

/// The tests of this group.
pub const TESTS: &[Test] = &[
    Test { name: "run/files_are_mapped_out_of_the_segments", run: || when_mountable(mapped) },
    Test { name: "run/shared_mapping_shows_writes_of_all_processes", run: || when_mountable(follows) },
    Test { name: "run/read_mapping_shows_stores_of_another_mapping", run: || when_mountable(written) },
    Test { name: "run/readers_see_stores_of_others_in_a_mapping", run: || when_mountable(stored) },
    Test { name: "run/mapping_of_others_shows_writes", run: || when_mountable(shown) },
    Test { name: "run/mapping_before_the_first_session_is_seen", run: || when_mountable(stored_alone) },
    Test { name: "run/file_is_served_again_after_mapping_of_others", run: || when_mountable(ours_again) },
    Test { name: "run/mapped_blocks_go_to_no_other_file", run: || when_mountable(kept) },
    Test { name: "run/arena_keeps_mapped_segments", run: || when_mountable(resized) },
    Test { name: "run/mappings_outlive_killed_daemon", run: || when_mountable(killed) },
    Test { name: "run/mappings_survive_fork_and_session_end", run: || when_mountable(forked) },
    Test { name: "run/threads_map_and_fork_at_once", run: || when_mountable(threads) },
    Test { name: "run/mappings_of_ended_sessions_show_no_foreign_data", run: || when_mountable(ending) },
];

const PATIENCE: Duration = Duration::from_secs(20);
const MIB: usize = 1 << 20;

/// The scripts' common part: mappings by libc, and the check of which party serves them.
const BEGIN: &str = "
import ctypes, hashlib, os, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = libc.mremap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]
READ, WRITE, SHARED, PRIVATE, FIXED, ANONYMOUS, MAYMOVE, PAGE = 1, 2, 1, 2, 16, 32, 1, 4096
def done(result):
    assert result not in (-1, 2**64 - 1), os.strerror(ctypes.get_errno())
    return result
def map(file, length, kind, offset=0, at=None, protection=READ):
    return done(libc.mmap(at, length, protection, kind, file, offset))
def by(address):
    for line in open('/proc/self/maps'):
        words = line.split(maxsplit=5)
        low, high = (int(word, 16) for word in words[0].split('-'))
        if low <= address < high:
            name = words[5] if len(words) == 6 else ''
            return 'segment' if '/segments/' in name else 'memory' if name.startswith('/memfd') or not name.strip() else 'kernel'
# The kernel closes unmapped files only later. While a file is open through a mount, the kernel serves its shared
# mappings.
def segment(file, length, kind, offset=0):
    stop = time.time() + 10
    while True:
        address = map(file, length, kind, offset)
        if by(address) == 'segment':
            return address
        assert time.time() < stop, by(address)
        done(libc.munmap(address, length))
        time.sleep(0.02)
def seen(address, length):
    return ctypes.string_at(address, length)
";

/// Maps files as its arguments say, and then answers requests about them.
///
/// `shared` and `private` map out of the segments, `plain` as the kernel decides. Each request is a line: `at MAPPING
/// OFFSET` for a byte, `sum MAPPING` for a checksum, and `write FILE OFFSET BYTE`.
const HOLDER: &str = "
held = []
for word in sys.argv[1:]:
    kind, name = word.split(':')
    file = os.open(name, os.O_RDONLY)
    length = os.fstat(file).st_size
    mapping = map if kind == 'plain' else segment
    held.append((mapping(file, length, SHARED if kind != 'private' else PRIVATE), length))
    os.close(file)
print('ready', flush=True)
for line in sys.stdin:
    words = line.split()
    if words[0] == 'write':
        file = os.open(words[1], os.O_WRONLY)
        os.pwrite(file, bytes([int(words[3])]), int(words[2]))
        os.close(file)
        print('written', flush=True)
        continue
    address, length = held[int(words[1])]
    if words[0] == 'at':
        print(seen(address + int(words[2]), 1)[0], flush=True)
    else:
        print(hashlib.sha256(seen(address, length)).hexdigest(), flush=True)
";

/// Maps a file to write it, and stores values by order: `OFFSET VALUE`. `at OFFSET` reads a byte.
const STORER: &str = "
file = os.open('file', os.O_RDWR)
address = map(file, os.fstat(file).st_size, SHARED, protection=READ | WRITE)
os.close(file)
print('ready', flush=True)
for line in sys.stdin:
    words = line.split()
    if words[0] == 'at':
        print(seen(address + int(words[1]), 1)[0], flush=True)
        continue
    ctypes.memset(address + int(words[0]), int(words[1]), 1)
    print('stored', flush=True)
";

/// Reads a byte of an open file in all ways, `pread OFFSET` and the like, and writes: `write OFFSET VALUE`.
const READER: &str = "
import shutil
file = os.open('file', os.O_RDWR)
reader = os.open('file', os.O_RDONLY)
def read(way, offset):
    if way == 'pread':
        return os.pread(file, 1, offset)
    if way == 'read':
        os.lseek(reader, offset, os.SEEK_SET)
        return os.read(reader, 1)
    if way == 'open':
        with open('file', 'rb', buffering=0) as again:
            return os.pread(again.fileno(), 1, offset)
    if way == 'copy':
        target = os.open('copy', os.O_RDWR | os.O_CREAT)
        assert os.copy_file_range(reader, target, 1, offset, 0) == 1
        data = os.pread(target, 1, 0)
        os.close(target)
        return data
    if way == 'send':
        target = os.open('sent', os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        assert os.sendfile(target, reader, offset, 1) == 1
        data = os.pread(target, 1, 0)
        os.close(target)
        return data
    if way in ('private', 'shared'):
        again = os.open('file', os.O_RDONLY)
        address = map(again, os.fstat(again).st_size, PRIVATE if way == 'private' else SHARED)
        data = seen(address + offset, 1)
        done(libc.munmap(address, os.fstat(again).st_size))
        os.close(again)
        return data
print('ready', flush=True)
for line in sys.stdin:
    words = line.split()
    if words[0] == 'write':
        assert os.pwrite(file, bytes([int(words[2])]), int(words[1])) == 1
        print('written', flush=True)
    elif words[0] == 'link':
        os.rename('file', 'renamed')
        os.rename('renamed', 'file')
        print(os.stat('file').st_size, flush=True)
    else:
        print(read(words[0], int(words[1]))[0], flush=True)
";

/// A program that has files mapped, and answers requests about them.
struct MappingHolder {
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

impl MappingHolder {
    fn new(directory: &Path, files: &[&str]) -> Outcome<Self> {
        let mut command = Front::RunAtOnce.command("python3");
        command.arg("-c").arg(format!("{BEGIN}{HOLDER}")).args(files).current_dir(directory);
        let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        Self::of(child.map_err(tried("starting python3"))?)
    }

    fn of(mut child: Child) -> Outcome<Self> {
        let (to, from) = (child.stdin.take(), child.stdout.take());
        let (to, from) = (to.ok_or("no input")?, BufReader::new(from.ok_or("no output")?));
        let mut holder = Self { child, to, from };
        let ready = holder.answer()?;
        ensure!(ready == "ready", "the holder says '{ready}'");
        Ok(holder)
    }

    fn answer(&mut self) -> Outcome<String> {
        let mut line = String::new();
        self.from.read_line(&mut line).map_err(tried("reading an answer"))?;
        Ok(line.trim_end().to_owned())
    }

    fn ask(&mut self, question: &str) -> Outcome<String> {
        writeln!(self.to, "{question}").map_err(tried("asking"))?;
        self.answer()
    }

    fn finish(self) -> Outcome {
        let Self { mut child, to, from } = self;
        drop((to, from));
        let status = wait(&mut child, PATIENCE)?;
        ensure!(status.success(), "the holder ended with {status}");
        Ok(())
    }
}

/// Bytes whose pattern never repeats.
fn pattern(length: usize, seed: u32) -> Vec<u8> {
    let words = (0..length.div_ceil(4) as u32).map(|at| at.wrapping_mul(0x9e37_79b9).wrapping_add(seed) ^ seed << 7);
    let mut bytes: Vec<u8> = words.flat_map(u32::to_le_bytes).collect();
    bytes.truncate(length);
    bytes
}

fn write_file(path: &Path, bytes: &[u8]) -> Outcome {
    fs::write(path, bytes).map_err(tried(format!("writing {}", path.display())))
}

fn finish_test(site: &TestArena) -> Outcome<Verdict> {
    site.check()?;
    site.umount(0)?;
    passed()
}

/// Checks which party serves a mapping, and how calls of the program change that.
fn mapped() -> Outcome<Verdict> {
    let script = "
length = os.stat('large').st_size
# Each has a file of its own: if the kernel has not yet closed one that it had mapped, a shared mapping hands that file
# over to the kernel for good.
for name, kind in (('large', PRIVATE), ('shared', SHARED)):
    file = os.open(name, os.O_RDONLY)
    data = os.pread(file, length, 0)
    both = os.open(name, os.O_RDWR)
    whole = segment(file, length, kind)
    assert seen(whole, length) == data
    part = segment(file, 10000, kind, 5 * PAGE)
    assert seen(part, 10000) == data[5 * PAGE:5 * PAGE + 10000]
    # Parts of it are unmapped, and the rest stays.
    done(libc.munmap(whole + 16 * PAGE, 16 * PAGE))
    assert by(whole + 16 * PAGE) is None and by(whole) == by(whole + 32 * PAGE) == 'segment'
    assert seen(whole + 32 * PAGE, PAGE) == data[32 * PAGE:33 * PAGE]
    # An existing mapping can replace it, or be replaced.
    over = map(-1, PAGE, PRIVATE | ANONYMOUS | FIXED, at=whole + 8 * PAGE)
    assert seen(over, PAGE) == bytes(PAGE) and by(whole) == 'kernel' and seen(whole, 8 * PAGE) == data[:8 * PAGE]
    assert seen(whole + 9 * PAGE, 7 * PAGE) == data[9 * PAGE:16 * PAGE]
    assert by(part) == 'segment'
    again = map(file, PAGE, kind | FIXED, PAGE, at=over)
    assert again == over and seen(again, PAGE) == data[PAGE:2 * PAGE]
    for address, size in ((whole, 16 * PAGE), (whole + 32 * PAGE, length - 32 * PAGE)):
        done(libc.munmap(address, size))
    # It grows over the following part of the file.
    moved = done(libc.mremap(part, 10000, 40000, MAYMOVE))
    assert by(moved) == 'kernel' and seen(moved, 40000) == data[5 * PAGE:5 * PAGE + 40000]
    done(libc.munmap(moved, 40000))
# A private mapping can be written, and the file does not change.
file = os.open('second', os.O_RDONLY)
both = os.open('second', os.O_RDWR)
data = os.pread(file, length, 0)
private = segment(file, length, PRIVATE)
done(libc.mprotect(private, 4 * PAGE, READ | WRITE))
ctypes.memset(private, 1, PAGE)
assert by(private) == 'kernel' and seen(private, 2 * PAGE) == b'\\1' * PAGE + data[PAGE:2 * PAGE]
assert os.pread(file, PAGE, 0) == data[:PAGE]
done(libc.munmap(private, length))
# The kernel serves a shared mapping that may be written now or later, and from then on all mappings of the file.
file = os.open('third', os.O_RDONLY)
both = os.open('third', os.O_RDWR)
reader = segment(file, length, SHARED)
writer = map(both, length, SHARED, protection=READ | WRITE)
assert by(writer) == 'kernel' and by(reader) == 'kernel'
ctypes.memset(writer, 2, PAGE)
assert seen(reader, PAGE) == b'\\2' * PAGE == os.pread(file, PAGE, 0)
# It also serves mappings of content that is no data in a segment.
hole = os.open('hole', os.O_RDWR | os.O_CREAT)
os.pwrite(hole, b'end', 1 << 20)
hole = os.open('hole', os.O_RDONLY)
there = map(hole, 1 << 20, SHARED)
assert by(there) == 'kernel' and seen(there, 1 << 20) == bytes(1 << 20)
# A mapping that is too long faults behind the file's end and not before.
tail = map(os.open('tail', os.O_RDONLY), 1 << 20, SHARED)
assert seen(tail, 5000) == open('tail', 'rb').read()[:5000]
# Mapped before the digest, and written after it.
fresh = os.open('fresh', os.O_RDWR | os.O_CREAT)
os.write(fresh, data)
read = os.open('fresh', os.O_RDONLY)
early = segment(read, length, SHARED)
assert seen(early, length) == data
for number in range(100):
    os.pwrite(fresh, bytes([number]) * 3000, number * 7000)
    assert seen(early + number * 7000, 3000) == bytes([number]) * 3000, number
os.ftruncate(fresh, 4 * PAGE + 1)
assert seen(early + 4 * PAGE, PAGE)[1:] == bytes(PAGE - 1)
done(libc.munmap(early, length))
# After unlink and close, the mapping keeps its content.
gone = os.open('gone', os.O_RDWR | os.O_CREAT)
os.write(gone, data)
last = segment(os.open('gone', os.O_RDONLY), length, PRIVATE)
os.unlink('gone')
os.closerange(gone, gone + 8)
os.sync()
open('other', 'wb').write(bytes(4 * length))
os.sync()
assert seen(last, length) == data
print('done')
";
    let site = TestArena::mounted(Medium::Memory, "64M")?;
    let root = site.point(0);
    for (name, seed) in [("large", 1), ("shared", 1), ("second", 2), ("third", 2)] {
        write_file(&root.join(name), &pattern(MIB + 300, seed))?;
    }
    write_file(&root.join("tail"), &pattern(9000, 2))?;
    let script = format!("{BEGIN}{script}");
    let done = run(Front::RunAtOnce.command("python3").args(["-c", &script]).current_dir(&root))?.success()?;
    ensure!(done.output == "done\n" && done.errors.is_empty(), "{}", done.describe());
    finish_test(&site)
}

/// A shared mapping of an idle program shows each write when the call returns: its own, those through the mount, and
/// those of other programs.
fn follows() -> Outcome<Verdict> {
    for medium in [Medium::Memory, Medium::Disk] {
        let site = TestArena::mounted(medium, "64M")?;
        let root = site.point(0);
        write_file(&root.join("file"), &pattern(MIB, 1))?;
        // On a disk, the mapping waits until the written data are committed.
        let mut holder = MappingHolder::new(&root, &["shared:file"])?;
        let through = fs::File::options().write(true).open(root.join("file")).map_err(tried("opening"))?;
        let writer = "
file = os.open('file', os.O_WRONLY)
for line in sys.stdin:
    offset, value = line.split()
    os.pwrite(file, bytes([int(value)]), int(offset))
    print('written', flush=True)
";
        let mut command = Front::RunAtOnce.command("python3");
        command.arg("-c").arg(format!("{BEGIN}{writer}")).current_dir(&root).stdin(Stdio::piped());
        let mut other = command.stdout(Stdio::piped()).spawn().map_err(tried("starting python3"))?;
        let (to, from) = (other.stdin.take().ok_or("no input")?, other.stdout.take().ok_or("no output")?);
        let (mut to, mut from) = (to, BufReader::new(from));
        for round in 0..90_u64 {
            // Some places again and again, and some for the first time.
            let (offset, value) = (round * 7919 % 13 * 4096 * 16 + round, (round % 200 + 20) as u8);
            match round % 3 {
                0 => drop(through.write_at(&[value], offset).map_err(tried("writing"))?),
                1 => drop(holder.ask(&format!("write file {offset} {value}"))?),
                _ => {
                    writeln!(to, "{offset} {value}").map_err(tried("asking"))?;
                    from.read_line(&mut String::new()).map_err(tried("waiting"))?;
                }
            }
            let seen = holder.ask(&format!("at 0 {offset}"))?;
            ensure!(seen == value.to_string(), "round {round}: {value} was written at {offset}, and {seen} is seen");
        }
        through.set_len(4097).map_err(tried("truncating"))?;
        let (kept, cut) = (holder.ask("at 0 4096")?, holder.ask("at 0 4097")?);
        ensure!(cut == "0", "behind the new end is {cut} ({kept} before it)");
        drop((to, from));
        wait(&mut other, PATIENCE)?;
        holder.finish()?;
        drop(through);
        finish_test(&site)?;
    }
    passed()
}

/// A program with this script, whose files are reached in this way.
fn start(front: Front, root: &Path, script: &str) -> Outcome<MappingHolder> {
    let mut command = front.command("python3");
    command.arg("-c").arg(format!("{BEGIN}{script}")).current_dir(root);
    let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
    MappingHolder::of(child.map_err(tried("starting python3"))?)
}

const WAYS: [&str; 7] = ["pread", "read", "open", "copy", "send", "private", "shared"];

/// Stores values in a mapping, and lets the reader read them in all ways.
fn check_stored(storer: &mut MappingHolder, reader: &mut MappingHolder) -> Outcome {
    for round in 0..5_u64 {
        for (at, way) in (0..).zip(WAYS) {
            // In the same pages again and again, and in others for the first time.
            let (offset, value) = (at * 9 * 4096 + round * 37, at * 30 + round + 1);
            ensure!(storer.ask(&format!("{offset} {value}"))? == "stored", "the storer has ended");
            let seen = reader.ask(&format!("{way} {offset}"))?;
            ensure!(seen == value.to_string(), "round {round}: {value} was stored, and {way} gives {seen}");
        }
    }
    Ok(())
}

/// Stores of a program in a shared mapping show to others at once, in whatever way they read: to processes that read
/// the file before, and to processes that begin then.
fn stored() -> Outcome<Verdict> {
    for front in [Front::Mount, Front::RunAtOnce] {
        let site = TestArena::mounted(Medium::Memory, "64M")?;
        let root = site.point(0);
        write_file(&root.join("file"), &pattern(MIB, 1))?;
        let mut before = start(Front::RunAtOnce, &root, READER)?;
        for way in WAYS {
            before.ask(&format!("{way} 5"))?;
        }
        ensure!(before.ask("write 6 7")? == "written", "the reader has ended");
        let mut storer = start(front, &root, STORER)?;
        ensure!(storer.ask("at 6")? == "7", "the mapping lacks what was written");
        check_stored(&mut storer, &mut before)?;
        let mut after = start(Front::RunAtOnce, &root, READER)?;
        check_stored(&mut storer, &mut after)?;
        ensure!(after.ask("link")? == MIB.to_string(), "the file has lost its size");
        check_stored(&mut storer, &mut before)?;
        for holder in [after, before, storer] {
            holder.finish()?;
        }
        finish_test(&site)?;
    }
    passed()
}

/// A program under `ashlar run` writes to a file that another one has mapped: the mapping shows it when the call
/// returns. That holds also if the mapping program may only read.
fn shown() -> Outcome<Verdict> {
    let site = TestArena::mounted(Medium::Memory, "64M")?;
    let root = site.point(0);
    write_file(&root.join("file"), &pattern(MIB, 1))?;
    let mut writer = start(Front::RunAtOnce, &root, READER)?;
    let mut storer = start(Front::Mount, &root, STORER)?;
    for round in 0..60_u64 {
        let (offset, value) = (round % 7 * 8 * 4096 + round, round + 1);
        ensure!(writer.ask(&format!("write {offset} {value}"))? == "written", "the writer has ended");
        let seen = storer.ask(&format!("at {offset}"))?;
        ensure!(seen == value.to_string(), "round {round}: {value} was written at {offset}, and {seen} is seen");
        ensure!(storer.ask(&format!("{} {value}", offset + 1))? == "stored", "the storer has ended");
    }
    writer.finish()?;
    storer.finish()?;
    finish_test(&site)
}

/// A process mapped the file while the mount was the sole session, and changed its pages through the mapping.
fn stored_alone() -> Outcome<Verdict> {
    let site = TestArena::mounted(Medium::Memory, "64M")?;
    let root = site.point(0);
    write_file(&root.join("file"), &pattern(MIB, 1))?;
    let mut storer = start(Front::Mount, &root, STORER)?;
    for at in 0..20_u64 {
        ensure!(storer.ask(&format!("{} {at}", at * 4096))? == "stored", "the storer has ended");
    }
    let mut reader = start(Front::RunAtOnce, &root, READER)?;
    for at in 0..20_u64 {
        let seen = reader.ask(&format!("pread {}", at * 4096))?;
        ensure!(seen == at.to_string(), "{at} was stored, and {seen} is read");
    }
    check_stored(&mut storer, &mut reader)?;
    reader.finish()?;
    storer.finish()?;
    finish_test(&site)
}

/// After the last mapping is gone, programs that open the file serve it themselves: then only their logs bring their
/// writes to the mount.
fn ours_again() -> Outcome<Verdict> {
    let site = TestArena::mounted(Medium::Memory, "64M")?;
    let root = site.point(0);
    write_file(&root.join("file"), &pattern(MIB, 1))?;
    let mut keeper = start(Front::RunAtOnce, &root, READER)?;
    let mut storer = start(Front::Mount, &root, STORER)?;
    check_stored(&mut storer, &mut keeper)?;
    storer.finish()?;
    keeper.finish()?;
    let script = "
import time
stop = time.time() + 10
while True:
    file = os.open('file', os.O_RDWR)
    assert os.pread(file, 1, 0)
    # A descriptor of LibFS's is an O_PATH one.
    flags = [line.split()[1] for line in open(f'/proc/self/fdinfo/{file}') if line.startswith('flags')][0]
    if int(flags, 8) & os.O_PATH:
        break
    assert time.time() < stop, flags
    os.close(file)
    time.sleep(0.01)
print('done')
";
    let script = format!("{BEGIN}{script}");
    let done = run(Front::RunAtOnce.command("python3").args(["-c", &script]).current_dir(&root))?.success()?;
    ensure!(done.output == "done\n" && done.errors.is_empty(), "{}", done.describe());
    finish_test(&site)
}

/// If a process has the file open through a mount, and may have mapped it for writing, all share the kernel's pages.
fn written() -> Outcome<Verdict> {
    let script = "
file = os.open('file', os.O_RDWR)
address = map(file, os.fstat(file).st_size, SHARED, protection=READ | WRITE)
os.close(file)
print('ready', flush=True)
for line in sys.stdin:
    offset, value = (int(word) for word in line.split())
    ctypes.memset(address + offset, value, 1)
    print('written', flush=True)
";
    let site = TestArena::mounted(Medium::Memory, "64M")?;
    let root = site.point(0);
    write_file(&root.join("file"), &pattern(MIB, 1))?;
    for front in [Front::Mount, Front::RunAtOnce] {
        let mut command = front.command("python3");
        command.arg("-c").arg(format!("{BEGIN}{script}")).current_dir(&root);
        let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let mut writer = MappingHolder::of(child.map_err(tried("starting python3"))?)?;
        let mut reader = MappingHolder::new(&root, &["plain:file"])?;
        for value in 1..20_u64 {
            let offset = value * 40_000;
            ensure!(writer.ask(&format!("{offset} {value}"))? == "written", "the writer has ended");
            let seen = reader.ask(&format!("at 0 {offset}"))?;
            ensure!(seen == value.to_string(), "{front:?}: {value} was stored at {offset}, and {seen} is seen");
        }
        reader.finish()?;
        writer.finish()?;
    }
    finish_test(&site)
}

fn free_bytes(root: &Path) -> Outcome<u64> {
    let found = rustix::fs::statvfs(root).map_err(tried("statfs"))?;
    Ok(found.f_bfree * found.f_frsize)
}

/// Fills the arena with other files, and removes them again.
fn fill_arena(root: &Path) -> Outcome {
    for round in 0..3_u8 {
        let mut count = 0;
        loop {
            let path = root.join(format!("filler-{count}"));
            if fs::write(&path, vec![round + 100; MIB]).is_err() {
                break;
            }
            count += 1;
        }
        ensure!(count > 8, "only {count} MiB found room");
        for number in 0..=count {
            // The last one may be missing.
            let _ = fs::remove_file(root.join(format!("filler-{number}")));
        }
        rustix::fs::sync();
    }
    Ok(())
}

/// A program's mapping stays, though others overwrite and remove the file, and fill the arena. Its blocks are free
/// after the program is killed.
fn kept() -> Outcome<Verdict> {
    let site = TestArena::mounted(Medium::Memory, "64M")?;
    let root = site.point(0);
    write_file(&root.join("kept"), &pattern(8 * MIB, 1))?;
    let mut holder = MappingHolder::new(&root, &["private:kept", "private:kept"])?;
    let before = holder.ask("sum 0")?;
    write_file(&root.join("kept"), &pattern(8 * MIB, 2))?;
    fill_arena(&root)?;
    ensure!(holder.ask("sum 0")? == before, "the mapping has changed after the file was written over");
    fs::remove_file(root.join("kept")).map_err(tried("removing"))?;
    fill_arena(&root)?;
    ensure!(holder.ask("sum 1")? == before, "the mapping has changed after the file was removed");
    let held = free_bytes(&root)?;
    holder.child.kill().map_err(tried("killing"))?;
    wait(&mut holder.child, PATIENCE)?;
    let is_free = || free_bytes(&root).is_ok_and(|free| free >= held + 8 * MIB as u64);
    eventually("what a killed program had mapped is free", PATIENCE, is_free)?;
    finish_test(&site)
}

/// A segment with blocks that a program has mapped is not taken away.
fn resized() -> Outcome<Verdict> {
    let site = TestArena::mounted(Medium::Memory, "128M")?;
    let root = site.point(0);
    site.ashlar(&["arena", "resize", "256M"])?.success()?;
    write_file(&root.join("first"), &vec![1; 150 * MIB])?;
    write_file(&root.join("mapped"), &pattern(8 * MIB, 1))?;
    let mut holder = MappingHolder::new(&root, &["shared:mapped"])?;
    let before = holder.ask("sum 0")?;
    fs::remove_file(root.join("first")).map_err(tried("removing"))?;
    let refused = || site.ashlar(&["arena", "resize", "128M"])?.failure(1, &["mapped", "128.0 MiB", "ashlar status"]);
    refused()?;
    ensure!(holder.ask("sum 0")? == before, "the mapping has changed");
    holder.finish()?;
    eventually("the arena can shrink", PATIENCE, || {
        site.ashlar(&["arena", "resize", "128M"]).is_ok_and(|done| done.status.success())
    })?;
    let found = fs::read(root.join("mapped")).map_err(tried("reading"))?;
    ensure!(found == pattern(8 * MIB, 1), "the file has changed");
    finish_test(&site)
}

/// SharedFS is killed while idle programs have files mapped.
fn killed() -> Outcome<Verdict> {
    let site = TestArena::mounted(Medium::Memory, "64M")?;
    let root = site.point(0);
    write_file(&root.join("private"), &pattern(4 * MIB, 1))?;
    write_file(&root.join("shared"), &pattern(4 * MIB, 1))?;
    let mut holder = MappingHolder::new(&root, &["private:private", "shared:shared"])?;
    let before = holder.ask("sum 0")?;
    let file = fs::File::options().write(true).open(root.join("shared")).map_err(tried("opening"))?;
    for round in 0..3_u8 {
        file.write_at(&[round + 1; 100], 5000).map_err(tried("writing"))?;
        site.kill_daemon()?;
        write_file(&root.join("private"), &pattern(4 * MIB, 2))?;
        file.write_at(&[round + 50; 9000], 40_000).map_err(tried("writing"))?;
        let seen = (holder.ask("at 1 5099")?, holder.ask("at 1 48999")?);
        ensure!(seen == ((round + 1).to_string(), (round + 50).to_string()), "round {round}: {seen:?} is seen");
        fill_arena(&root)?;
        ensure!(holder.ask("sum 0")? == before, "round {round}: the private mapping has changed");
        let (own, expected) = (holder.ask("sum 1")?, fs::read(root.join("shared")).map_err(tried("reading"))?);
        write_file(&root.join("copy"), &expected)?;
        let copy = run(Front::Mount.command("sha256sum").arg(root.join("copy")))?.success()?;
        ensure!(copy.output.starts_with(&own), "round {round}: the shared mapping differs from the file");
    }
    holder.finish()?;
    drop(file);
    finish_test(&site)
}

/// Sessions end and begin in the middle of mappings: programs fail to start, users change and processes fork. Meanwhile
/// the mapped files are replaced, and others take all free room. (This hung if one thread forked while another's
/// session began.)
fn ending() -> Outcome<Verdict> {
    let script = "
stop, failures, mapped = time.time() + 5, [], [0]
def goes_on():
    # If the room was always taken, no mapping was made out of a segment yet.
    return time.time() < stop + (0 if mapped[0] else 25) and not failures
def guarded(work, pause):
    def loop():
        while goes_on():
            try:
                work()
            except OSError:
                # A call at the moment of the session's end may fail.
                pass
            except BaseException as error:
                failures.append(repr(error))
            time.sleep(pause)
    return loop
def reads():
    file = os.open('file', os.O_RDONLY)
    length = os.fstat(file).st_size
    address = libc.mmap(None, length, READ, PRIVATE, file, 0)
    os.close(file)
    if address == 2**64 - 1:
        return
    mapped[0] += by(address) == 'segment'
    for _ in range(3):
        found = set(seen(address, length))
        assert found <= set(b'AB'), found
        time.sleep(0.002)
    done(libc.munmap(address, length))
def forks():
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
def calm():
    # A session that always ends at once rarely has the time to map a file.
    while int(time.time() * 4) % 4 == 0:
        time.sleep(0.01)
def executes():
    calm()
    os.execv('file', ['file'])
def changes_user():
    calm()
    os.setgroups([])
works = [(reads, 0), (reads, 0), (executes, 0.003), (changes_user, 0.005), (forks, 0.01)]
threads = [threading.Thread(target=guarded(*work)) for work in works]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert not failures, failures
assert mapped[0] > 0
print('done')
";
    let site = TestArena::mounted(Medium::Memory, "64M")?;
    let root = site.point(0);
    write_file(&root.join("file"), &[b'A'; 2 * MIB])?;
    let mut command = Front::RunAtOnce.command("python3");
    command.args(["-c", &format!("{BEGIN}{script}")]).current_dir(&root);
    let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let mut child = child.map_err(tried("starting python3"))?;
    let mut round = 0_u8;
    while child.try_wait().map_err(tried("waiting"))?.is_none() {
        write_file(&root.join("next"), &[b'A' + round % 2; 2 * MIB])?;
        fs::rename(root.join("next"), root.join("file")).map_err(tried("renaming"))?;
        // A write without room is cut off.
        let _ = fs::write(root.join("filler"), vec![b'F'; 50 * MIB]);
        fs::remove_file(root.join("filler")).map_err(tried("removing"))?;
        round = round.wrapping_add(1);
    }
    let done = finish(child, "a program whose sessions end".into())?.success()?;
    ensure!(done.output == "done\n", "{}", done.describe());
    finish_test(&site)
}

/// A child's memory outlives its parent's session.
fn forked() -> Outcome<Verdict> {
    let script = "
length = os.stat('file').st_size
file = os.open('file', os.O_RDONLY)
data = os.pread(file, length, 0)
private, shared = segment(file, length, PRIVATE), segment(file, length, SHARED)
from subprocess import run
run(['true'], check=True)
child = os.fork()
assert by(private) == by(shared) == 'kernel', (child, by(private), by(shared))
if child:
    os._exit(0)
while os.getppid() == parent:
    time.sleep(0.01)
time.sleep(0.5)
for number in range(20):
    open(f'other-{number}', 'wb').write(bytes([number]) * length)
os.sync()
assert seen(private, length) == seen(shared, length) == data
# In the child, files are mapped as in any other program.
again = map(os.open('file', os.O_RDONLY), length, PRIVATE)
assert seen(again, length) == data
print('done', flush=True)
";
    let site = TestArena::mounted(Medium::Memory, "64M")?;
    let root = site.point(0);
    write_file(&root.join("file"), &pattern(MIB, 1))?;
    let script = format!("{BEGIN}\nparent = os.getpid(){script}");
    let done = run(Front::RunAtOnce.command("python3").args(["-c", &script]).current_dir(&root))?.success()?;
    ensure!(done.output == "done\n" && done.errors.is_empty(), "{}", done.describe());
    finish_test(&site)
}

/// Threads map, unmap, write and fork at the same time.
fn threads() -> Outcome<Verdict> {
    let script = "
length = os.stat('file').st_size
data = open('file', 'rb').read()
stop, failures = time.time() + 4, []
def guarded(work):
    def loop():
        try:
            while time.time() < stop:
                work()
        except BaseException as error:
            failures.append(repr(error))
    return loop
def reads(kind):
    def work():
        file = os.open('file', os.O_RDONLY)
        address = map(file, length, kind)
        os.close(file)
        assert seen(address, length) == data
        done(libc.munmap(address, length // 2 // PAGE * PAGE))
        done(libc.munmap(address + length // 2 // PAGE * PAGE, length - length // 2 // PAGE * PAGE))
    return work
value = [0]
writer = os.open('written', os.O_RDWR)
reader = os.open('written', os.O_RDONLY)
watched = segment(reader, length, SHARED)
def writes():
    value[0] = (value[0] + 1) % 250
    os.pwrite(writer, bytes([value[0]]) * 5000, 7000)
    assert seen(watched + 7000, 5000) == bytes([value[0]]) * 5000
def forks():
    child = os.fork()
    if child == 0:
        os._exit(0 if seen(watched, 100) else 1)
    assert os.waitpid(child, 0)[1] == 0
    time.sleep(0.05)
works = [reads(PRIVATE), reads(SHARED), writes, forks]
threads = [threading.Thread(target=guarded(work)) for work in works]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert not failures, failures
print('done')
";
    let site = TestArena::mounted(Medium::Memory, "64M")?;
    let root = site.point(0);
    write_file(&root.join("file"), &pattern(MIB, 1))?;
    write_file(&root.join("written"), &pattern(MIB, 1))?;
    let script = format!("{BEGIN}{script}");
    let done = run(Front::RunAtOnce.command("python3").args(["-c", &script]).current_dir(&root))?.success()?;
    ensure!(done.output == "done\n" && done.errors.is_empty(), "{}", done.describe());
    finish_test(&site)
}
