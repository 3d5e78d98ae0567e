//! Open files that forked processes share.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use ashlar_tests::command::{ashlar, run};
use ashlar_tests::harness::{Test, Verdict, passed, when_mountable};
use ashlar_tests::mount::{Front, Medium, TestArena};
use ashlar_tests::{Outcome, ensure, tried};
use ashlar_wire::DEFER_VARIABLE;
use serde_json::Value;

/// The tests of this group.
pub const TESTS: &[Test] = &[
    Test { name: "run/shared_open_files_answer_as_the_kernel", run: || when_mountable(same) },
    Test { name: "run/forking_process_keeps_its_files_served", run: || when_mountable(goes_on) },
    Test { name: "run/forked_process_keeps_its_parents_files", run: || when_mountable(inherits) },
    Test { name: "run/killed_process_leaves_offset_to_the_others", run: || when_mountable(killed) },
    Test { name: "run/stopped_process_keeps_no_sharer_waiting", run: || when_mountable(stopped) },
    Test { name: "run/forked_process_maps_file_that_parent_extends", run: || when_mountable(grown) },
    Test { name: "run/record_lock_survives_exec_with_two_descriptors", run: || when_mountable(locked) },
    Test { name: "run/calls_past_the_library_fail_on_shared_files", run: || when_mountable(past) },
];

/// A script's output on a mount, by each of these ways.
fn outputs_on(size: &'static str, fronts: &[Front], script: &str) -> Outcome<Vec<String>> {
    let site = TestArena::mounted(Medium::Memory, size)?;
    let mut outputs = Vec::new();
    for front in fronts {
        let done = run(front.command("python3").args(["-c", script]).current_dir(site.point(0)))?;
        let done = done.success().map_err(|error| format!("{front:?}: {error}"))?;
        outputs.push(done.output.trim().to_owned());
    }
    site.check()?;
    site.umount(0)?;
    Ok(outputs)
}

/// Processes make random calls on open files, one after the other. They find the same as in memory without Ashlar.
fn same() -> Outcome<Verdict> {
    const SEEDS: u32 = 3;
    const STEPS: u32 = 250;
    let site = TestArena::mounted(Medium::Memory, "64M")?;
    let script = site.outside().join("shared_files.py");
    fs::write(&script, include_str!("../../../../jobs/shared_files.py")).map_err(tried("writing a script"))?;
    let memory = tempfile::Builder::new().prefix("ashlar-family-").tempdir_in("/dev/shm");
    let memory = memory.map_err(tried("making a directory in memory"))?;
    let mut steps = 0;
    for seed in 0..SEEDS {
        let run_script = |front: Front, root: &Path, calls: &str| -> Outcome<String> {
            let directory = root.join(format!("{front:?}-{seed}-{calls}"));
            fs::create_dir(&directory).map_err(tried("making a directory"))?;
            let mut command = front.command("python3");
            command.arg(&script).args([seed.to_string(), STEPS.to_string()]).current_dir(&directory);
            Ok(run(command.env(DEFER_VARIABLE, calls).stdin(Stdio::null()))?.success()?.output)
        };
        let expected = run_script(Front::Mount, memory.path(), "64")?;
        steps += expected.lines().count();
        for (front, calls) in [(Front::Mount, "64"), (Front::Run, "20"), (Front::Run, "0")] {
            let found = run_script(front, &site.point(0), calls)?;
            let differs = expected.lines().zip(found.lines()).find(|(expected, found)| expected != found);
            ensure!(differs.is_none(), "{front:?} after {calls} calls, seed {seed}: in memory, and here: {differs:#?}");
            ensure!(expected == found, "{front:?}, seed {seed}: the outputs differ");
        }
    }
    site.check()?;
    site.umount(0)?;
    Ok(Verdict::Passed(format!("{steps} steps")))
}

/// How often a script's call was accelerated and delegated, if all its processes have sessions after so many calls.
fn count_calls(site: &TestArena, script: &str, calls: u32, call: &str) -> Outcome<[u64; 2]> {
    let report = site.outside().join("report.json");
    let file = report.display().to_string();
    let mut command = ashlar(&["run", "--report-json", "--report-to", &file, "--", "python3", "-c", script]);
    command.env(DEFER_VARIABLE, calls.to_string()).current_dir(site.point(0));
    run(&mut command)?.success()?;
    let text = fs::read_to_string(&report).map_err(tried("reading the report"))?;
    let report: Value = serde_json::from_str(&text).map_err(tried(format!("the report is no JSON:\n{text}")))?;
    let lines = report["calls"].as_array().ok_or("there are no calls")?;
    let line = lines.iter().find(|line| line["call"] == call).ok_or(format!("there is no {call}:\n{text}"))?;
    Ok(["accelerated", "delegated"].map(|what| line[what].as_u64().unwrap_or(0)))
}

/// A process's open files are served as before when it has run commands, and while a forked process lives. Examples: a
/// database that runs a program, a store that forks to save.
fn goes_on() -> Outcome<Verdict> {
    const SCRIPT: &str = "
import os, subprocess
file = os.open('file', os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
log = os.open('log', os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
os.set_inheritable(log, True)
for turn in range(3):
    subprocess.run(['/bin/true'])
    assert os.system('exit 3') == 3 << 8
    wait, go = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(go)
        os.read(wait, 1)
        os._exit(0)
    for n in range(100):
        os.write(file, b'0123456789')
        os.pwrite(file, b'ab', n)
    os.close(go)
    os.close(wait)
    assert os.waitpid(child, 0)[1] == 0
assert os.lseek(file, 0, os.SEEK_CUR) == os.fstat(file).st_size == 3000
";
    let site = TestArena::mounted(Medium::Memory, "64M")?;
    for call in ["write", "pwrite64"] {
        let found = count_calls(&site, SCRIPT, 0, call)?;
        ensure!(found == [300, 0], "300 accelerated, and no delegated {call} expected: {found:?}");
    }
    site.check()?;
    site.umount(0)?;
    passed()
}

/// Processes are forked with an open file, and continue with it after their first calls: a server that forks its
/// children beforehand, a daemon that opens its files before it leaves its parent.
fn inherits() -> Outcome<Verdict> {
    const SCRIPT: &str = "
import os
log = os.open('log', os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_TRUNC, 0o600)
file = os.open('file', os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
for n in range(100): os.write(log, b'begun\\n')
children = []
for number in range(3):
    child = os.fork()
    if child == 0:
        for n in range(500): os.write(log, b'%05d\\n' % number)
        for n in range(500): os.write(file, b'%05d\\n' % number)
        os._exit(0)
    children.append(child)
for child in children: assert os.waitpid(child, 0)[1] == 0
for n in range(100): os.write(log, b'ended\\n')
lines = open('log').read().split('\\n')
assert [lines.count(what) for what in ['begun', '00000', '00001', '00002', 'ended', '']] == [100, 500, 500, 500, 100, 1]
assert os.lseek(file, 0, os.SEEK_CUR) == 9000
lines = open('file').read().split('\\n')
assert [lines.count(what) for what in ['00000', '00001', '00002', '']] == [500, 500, 500, 1]
";
    let site = TestArena::mounted(Medium::Memory, "64M")?;
    let [accelerated, delegated] = count_calls(&site, SCRIPT, 64, "write")?;
    // The first 64 calls of each of the three, and of their parent.
    ensure!(
        accelerated + delegated == 3200 && (150..=4 * 64).contains(&delegated),
        "of 3200 writes {accelerated} were accelerated, and {delegated} delegated"
    );
    site.check()?;
    site.umount(0)?;
    passed()
}

/// Processes write lines in turn, with one offset for all, and are killed at random. Every acknowledged line is there,
/// and no line overwrites another.
fn killed() -> Outcome<Verdict> {
    const SCRIPT: &str = "
import mmap, os, random, signal, time
random.seed(7)
WRITERS, KILLS = 3, 25
done = mmap.mmap(-1, 8 * (WRITERS + KILLS))
file = os.open('file', os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
def begin(number):
    child = os.fork()
    if child == 0:
        count = 0
        while True:
            os.write(file, b'%05d %09d\\n' % (number, count))
            count += 1
            done[8 * number:8 * number + 8] = count.to_bytes(8, 'little')
    return child
alive = {number: begin(number) for number in range(WRITERS)}
for number in range(WRITERS, WRITERS + KILLS):
    time.sleep(random.random() * 0.03)
    os.write(file, b'%s\\n' % (b'parent %08d' % number))
    victim = random.choice(list(alive))
    os.kill(alive[victim], signal.SIGKILL)
    os.waitpid(alive.pop(victim), 0)
    alive[number] = begin(number)
for child in alive.values():
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
counts = [int.from_bytes(done[8 * n:8 * n + 8], 'little') for n in range(WRITERS + KILLS)]
lines = open('file').read().split('\\n')
assert lines.pop() == ''
of = {}
for line in lines:
    who, what = line.split(' ')
    of.setdefault(who, []).append(int(what))
assert of.pop('parent') == list(range(WRITERS, WRITERS + KILLS))
for number, count in enumerate(counts):
    found = of.pop('%05d' % number, [])
    # The line under way may be there, or another one may have overwritten it.
    assert found in (list(range(count)), list(range(count + 1))), (number, count, len(found), found[:3], found[-3:])
assert not of and sum(counts) > 1000, sum(counts)
print(sum(counts))
";
    let outputs = outputs_on("64M", &[Front::Mount, Front::Run, Front::RunAtOnce], SCRIPT)?;
    Ok(Verdict::Passed(format!("lines through the kernel, and here: {}", outputs.join(", "))))
}

/// A process that shares an offset with its parent is stopped again and again. Its parent continues, and no write of
/// either is lost.
fn stopped() -> Outcome<Verdict> {
    const SCRIPT: &str = "
import mmap, os, signal
done = mmap.mmap(-1, 8)
file = os.open('file', os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
child = os.fork()
if child == 0:
    count = 0
    while True:
        os.write(file, b'child\\n' * 2000)
        count += 1
        done[:8] = count.to_bytes(8, 'little')
while done[:8] == bytes(8): pass
for turn in range(100):
    os.kill(child, signal.SIGSTOP)
    assert os.WIFSTOPPED(os.waitpid(child, os.WUNTRACED)[1])
    os.write(file, b'parent\\n')
    os.kill(child, signal.SIGCONT)
# It now writes the bytes that it was about to write when it was stopped.
count = done[:8]
while done[:8] == count: pass
os.kill(child, signal.SIGKILL)
os.waitpid(child, 0)
count = int.from_bytes(done[:8], 'little')
lines = open('file', 'rb').read().split(b'\\n')
assert lines.count(b'parent') == 100, lines.count(b'parent')
# The last one may have been written in part, or not at all.
assert count * 2000 <= lines.count(b'child') <= count * 2000 + 2000, (count, lines.count(b'child'))
print(count)
";
    let outputs = outputs_on("256M", &[Front::Mount, Front::RunAtOnce], SCRIPT)?;
    Ok(Verdict::Passed(format!("writes through the kernel, and here: {}", outputs.join(", "))))
}

/// A process maps a file that it was forked with: the mapping has the file's current length, not the earlier one.
fn grown() -> Outcome<Verdict> {
    const SCRIPT: &str = "
import mmap, os, subprocess, sys
MAPS = 'import mmap, sys; assert mmap.mmap(int(sys.argv[1]), 1 << 20, %s)[1000000] == 122'
for kind in ['mmap.MAP_PRIVATE, mmap.PROT_READ', 'mmap.MAP_SHARED, mmap.PROT_READ', 'mmap.MAP_SHARED']:
    for sessions in range(2):
        file = os.open('file', os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        os.write(file, b'hello')
        wait, go = os.pipe()
        child = os.fork()
        if child == 0:
            os.read(wait, 1)
            for n in range(100 * sessions): os.stat('file')
            exec(MAPS.replace('sys.argv[1]', 'file') % kind)
            os._exit(0)
        os.pwrite(file, b'z' * (1 << 20), 0)
        os.write(go, b'g')
        status = os.waitpid(child, 0)[1]
        assert status == 0, (kind, status)
        subprocess.run([sys.executable, '-c', MAPS % kind, str(file)], pass_fds=[file], check=True)
        for number in [file, wait, go]: os.close(number)
";
    outputs_on("64M", &[Front::Mount, Front::Run, Front::RunAtOnce], SCRIPT)?;
    passed()
}

/// A program locks a file and has two descriptors of it. By `execve` it becomes another program, which inherits both.
/// The lock is there, and ends with the first descriptor that is closed.
fn locked() -> Outcome<Verdict> {
    const ASK: &str = "
import fcntl, os
try: fcntl.lockf(os.open('file', os.O_RDWR), fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError: raise SystemExit(9)
";
    const SCRIPT: &str = "
import fcntl, os, subprocess, sys
def is_locked():
    return subprocess.run([sys.executable, 'ask.py']).returncode == 9
if len(sys.argv) == 1:
    first = os.open('file', os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    os.set_inheritable(first, True)
    fcntl.lockf(first, fcntl.LOCK_EX)
    second = os.open('file', os.O_RDWR | os.O_APPEND)
    os.set_inheritable(second, True)
    os.write(first, b'one')
    os.write(second, b'two')
    os.execv(sys.executable, [sys.executable, 'script.py', str(first), str(second)])
first, second = map(int, sys.argv[1:])
assert is_locked()
os.write(first, b'2')
assert is_locked() and os.pread(second, 9, 0) == b'one2wo', os.pread(second, 9, 0)
os.fstatvfs(second)
assert is_locked()
os.close(second)
assert not is_locked()
# A child that has a session closes an inherited descriptor of a file that it has locked by another one.
wait, done = os.pipe()
child = os.fork()
if child == 0:
    third = os.open('file', os.O_RDWR)
    fcntl.lockf(third, fcntl.LOCK_EX)
    assert is_locked()
    os.close(first)
    assert not is_locked()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
";
    let site = TestArena::mounted(Medium::Memory, "64M")?;
    for (name, text) in [("ask.py", ASK), ("script.py", SCRIPT)] {
        fs::write(site.point(0).join(name), text).map_err(tried("writing a script"))?;
    }
    for front in [Front::Mount, Front::Run, Front::RunAtOnce] {
        let done = run(front.command("python3").arg("script.py").current_dir(site.point(0)))?;
        done.success().map_err(|error| format!("{front:?}: {error}"))?;
    }
    site.check()?;
    site.umount(0)?;
    passed()
}

/// Calls the kernel from memory that the library has not patched.
const PAST: &str = r#"
#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
int main(void) {
    static const unsigned char code[] = { 0x48, 0x89, 0xf8, 0x48, 0x89, 0xf7, 0x48, 0x89, 0xd6, 0x48, 0x89, 0xca, 0x0f, 0x05, 0xc3 };
    char *page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), byte;
    memcpy(page, code, sizeof code);
    assert(mprotect(page, 4096, PROT_READ | PROT_EXEC) == 0);
    long (*past)(long, long, const void *, long) = (long (*)(long, long, const void *, long))page;
    int file = open("file", O_RDWR | O_CREAT | O_TRUNC, 0600), ways[2];
    assert(write(file, "before", 6) == 6 && pipe(ways) == 0);
    pid_t child = fork();
    if (child == 0) {
        close(ways[1]);
        _exit(read(ways[0], &byte, 1) != 0);
    }
    assert(past(SYS_write, file, "past", 4) == -EINVAL && past(SYS_read, file, &byte, 1) == -EINVAL);
    assert(write(file, ", after", 7) == 7 && lseek(file, 0, SEEK_CUR) == 13);
    close(ways[1]);
    int status = 1;
    assert(waitpid(child, &status, 0) == child && status == 0);
    /* A program that gets it passed on has the kernel's open file, at its offset. */
    child = fork();
    if (child == 0) {
        dup2(file, 1);
        execlp("echo", "echo", ", echoed", NULL);
    }
    assert(waitpid(child, &status, 0) == child && status == 0);
    assert(past(SYS_write, file, "past", 4) == 4);
    char all[64] = "";
    assert(pread(file, all, sizeof all, 0) == 26 && strcmp(all, "before, after, echoed\npast") == 0);
    return 0;
}
"#;

/// A program's calls past the library on a file that it shares with others fail, and write nowhere.
fn past() -> Outcome<Verdict> {
    let site = TestArena::mounted(Medium::Memory, "64M")?;
    let (source, program) = (site.outside().join("past.c"), site.outside().join("past"));
    fs::write(&source, PAST).map_err(tried("writing a program"))?;
    match Command::new("gcc").args(["-O1", "-o"]).arg(&program).arg(&source).output() {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            return Ok(Verdict::Skipped("there is no gcc".into()));
        }
        Err(error) => return Err(format!("gcc: {error}")),
        Ok(done) => ensure!(done.status.success(), "gcc: {}", String::from_utf8_lossy(&done.stderr)),
    }
    run(Front::RunAtOnce.command(&program).current_dir(site.point(0)))?.success()?;
    site.check()?;
    site.umount(0)?;
    passed()
}
