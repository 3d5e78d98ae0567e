//! The counts of `ashlar run --report` for programs whose calls are known.
//!
//! The user of the programs must notice nothing of the report.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use ashlar_tests::command::{ashlar, is_alive, run, signal, wait, was_killed};
use ashlar_tests::harness::{Test, Verdict, passed, when_mountable};
use ashlar_tests::mount::{Medium, TestArena};
use ashlar_tests::{Outcome, ensure, tried};
use rustix::process::Signal;
use serde_json::Value;

/// The tests of this group.
pub const TESTS: &[Test] = &[
    Test { name: "run/report_counts_served_and_unserved_calls", run: || when_mountable(counted) },
    Test { name: "run/o_path_and_statfs_leave_files_to_libfs", run: || when_mountable(alone) },
    Test { name: "run/paths_from_kernel_directories_are_served", run: || when_mountable(kernels_directories) },
    Test { name: "run/paths_from_beside_the_mount_are_served", run: || when_mountable(beside) },
    Test { name: "run/long_program_is_served_from_its_first_call", run: || when_mountable(program_profile) },
    Test { name: "run/file_made_by_several_programs_is_served", run: || when_mountable(at_once) },
    Test { name: "run/copying_programs_leave_files_to_libfs", run: || when_mountable(copies) },
    Test { name: "run/report_counts_sockets_with_path_on_the_mount", run: || when_mountable(sockets) },
    Test { name: "run/report_counts_calls_past_the_library", run: || when_mountable(missed) },
    Test { name: "run/report_has_counts_of_killed_processes", run: || when_mountable(killed) },
    Test { name: "run/report_passes_on_signals_and_exit_status", run: || when_mountable(ends) },
    Test { name: "run/programs_miss_less_than_one_call_in_a_hundred", run: || when_mountable(programs) },
];

const SOON: Duration = Duration::from_secs(60);
/// Makes 10 writes, 7 calls of `stat` on a missing name, and a few others; its exit status is 3.
const STATIC_PROGRAM: &str = r#"
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
int main(int count, char **words) {
    struct stat found;
    int file = open(words[1], O_CREAT | O_RDWR, 0644);
    for (int i = 0; i < 10; i++)
        if (write(file, "x", 1) != 1) return 1;
    for (int i = 0; i < 7; i++)
        if (stat(words[2], &found) == 0) return 1;
    close(file);
    return 3;
}
"#;

/// A mount, and a place for reports.
struct ReportedMount {
    site: TestArena,
    report: PathBuf,
}

impl ReportedMount {
    fn new() -> Outcome<Self> {
        let site = TestArena::mounted(Medium::Memory, "64M")?;
        let report = site.outside().join("report.json");
        Ok(Self { site, report })
    }

    /// A shell's script in the mount's directory, with a report; not yet run.
    fn command(&self, script: &str) -> Command {
        let report = self.report.display().to_string();
        let mut command = ashlar(&["run", "--report-json", "--report-to", &report, "--", "bash", "-ec", script]);
        // The report shows each call, and not only those after the first ones.
        command.env(ashlar_wire::DEFER_VARIABLE, "0").env("OUTSIDE", self.site.outside());
        command.current_dir(self.site.point(0));
        command
    }

    /// The report on a script that ends with `code`.
    fn report_of(&self, script: &str, code: i32) -> Outcome<Value> {
        let done = run(&mut self.command(script))?;
        ensure!(done.status.code() == Some(code), "exit status {code} expected: {}", done.describe());
        self.take_report()
    }

    /// Reads and removes the written report.
    fn take_report(&self) -> Outcome<Value> {
        let text = fs::read_to_string(&self.report).map_err(tried("reading the report"))?;
        fs::remove_file(&self.report).map_err(tried("removing the report"))?;
        serde_json::from_str(&text).map_err(tried(format!("the report is no JSON:\n{text}")))
    }

    fn finish(self) -> Outcome<Verdict> {
        let files = fs::read_dir("/dev/shm").map_err(tried("listing /dev/shm"))?.flatten();
        let names = files.filter_map(|file| file.file_name().into_string().ok());
        let mut makers = names.filter_map(|name| name.strip_prefix("ashlar-report-")?.parse().ok());
        ensure!(makers.all(is_alive), "the counts of a run that is over are left in /dev/shm");
        self.site.check()?;
        self.site.umount(0)?;
        passed()
    }
}

/// A number from a call's row.
pub(crate) fn count(report: &Value, call: &str, what: &str) -> u64 {
    let calls = report["calls"].as_array().map(Vec::as_slice).unwrap_or_default();
    calls.iter().find(|line| line["call"] == call).and_then(|line| line[what].as_u64()).unwrap_or(0)
}

fn counted() -> Outcome<Verdict> {
    let place = ReportedMount::new()?;
    // LibFS serves files that a program opens, or that the shell opens for it alone. The kernel serves those that it
    // shares with the shell.
    let script = "dd if=/dev/zero of=one bs=100 count=30 2>/dev/null; dd if=/dev/zero bs=10 count=7 >two 2>/dev/null
        exec 5>three; dd if=/dev/zero bs=10 count=5 >&5 2>/dev/null; exit 7";
    let report = place.report_of(script, 7)?;
    let found = ["accelerated", "delegated", "missed"].map(|what| count(&report, "write", what));
    ensure!(found == [37, 5, 0], "37 accelerated, 5 delegated and no missed writes expected:\n{report:#}");
    for what in ["accelerated_ns", "delegated_ns"] {
        let time = Duration::from_nanos(count(&report, "write", what));
        ensure!(Duration::ZERO < time && time < SOON, "{what} is {time:?}");
    }
    ensure!(report["missed"] == 0 && report["missed_percent"] == 0.0, "something was missed:\n{report:#}");
    // The shell, which forks, and three programs.
    ensure!(report["programs"] == 4, "4 programs expected:\n{report:#}");
    let sum: u64 = ["accelerated", "delegated"].iter().filter_map(|what| report[what].as_u64()).sum();
    let lines = report["calls"].as_array().ok_or("there are no calls")?;
    let of_lines = |what: &str| lines.iter().filter_map(|line| line[what].as_u64()).sum::<u64>();
    ensure!(sum == of_lines("accelerated") + of_lines("delegated") && sum > 42, "the sum is wrong:\n{report:#}");
    let text = run(ashlar(&["run", "--report", "true"]).current_dir(place.site.point(0)))?.success()?.errors;
    for word in ["calls on Ashlar by true", "ACCELERATED", "DELEGATED", "MISSED", "missed 0 %"] {
        ensure!(text.contains(word), "the report does not say '{word}':\n{text}");
    }
    run(&mut ashlar(&["run", "--report", "no-such-program"]))?.failure(127, &["can't be run"])?;
    place.finish()
}

/// Several programs make files of the same names at the same time; those that come later open the existing file.
fn at_once() -> Outcome<Verdict> {
    const SCRIPT: &str = "for number in 1 2 3 4; do python3 -c \"
import os
while not os.path.exists(os.environ['OUTSIDE'] + '/go'): pass
for number in range(300):
    file = os.open('shared%d' % number, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
    os.write(file, b'x')
    os.close(file)
\" & done; sleep 0.5; touch $OUTSIDE/go; wait; cat shared* | wc -c >$OUTSIDE/bytes";
    let place = ReportedMount::new()?;
    let report = place.report_of(SCRIPT, 0)?;
    let written = fs::read_to_string(place.site.outside().join("bytes")).map_err(tried("reading what was counted"))?;
    ensure!(written.trim() == "1200", "{written} bytes were written by four to 300 files");
    let [accelerated, delegated] = ["accelerated", "delegated"].map(|what| count(&report, "write", what));
    ensure!(accelerated == 1200 && delegated == 0, "{accelerated} writes were served, {delegated} were not");
    place.finish()
}

/// The kernel makes and finds sockets, through the mount.
fn sockets() -> Outcome<Verdict> {
    const SCRIPT: &str = "python3 -c \"
import os, socket
one, two, three = (socket.socket(socket.AF_UNIX) for _ in range(3))
one.bind('socket'); one.listen()
two.connect(os.getcwd() + '/socket')
three.bind('\\0ashlar-test-' + str(os.getpid()))
try: socket.socket(socket.AF_UNIX).connect(os.environ['OUTSIDE'] + '/none')
except FileNotFoundError: pass
\"";
    let place = ReportedMount::new()?;
    let report = place.report_of(SCRIPT, 0)?;
    for (call, count_wanted) in [("bind", 1), ("connect", 1)] {
        let found = ["accelerated", "delegated", "missed"].map(|what| count(&report, call, what));
        ensure!(found == [0, count_wanted, 0], "{count_wanted} delegated {call} expected:\n{report:#}");
    }
    ensure!(report["missed"] == 0, "something was missed:\n{report:#}");
    place.finish()
}

/// `tar -C` opens a directory as an `O_PATH` descriptor; RocksDB asks for the file system of each of its logs.
fn alone() -> Outcome<Verdict> {
    const SCRIPT: &str = "python3 -c \"
import errno, fcntl, os
log = os.open('log', os.O_CREAT | os.O_WRONLY)
assert os.fstatvfs(log) == os.statvfs('.')
for n in range(100): os.write(log, b'x')
for n in range(20): os.setxattr(log, 'user.n', b'%d' % n); os.getxattr('log', 'user.n')
place = os.open('.', os.O_PATH | os.O_DIRECTORY)
for n in range(50): os.close(os.open('made-%d' % n, os.O_CREAT | os.O_WRONLY, 0o600, dir_fd=place))
assert os.stat('made-7', dir_fd=place).st_ino == os.stat('made-7').st_ino
for does in (lambda: os.listdir(place), lambda: os.fchmod(place, 0o700), lambda: os.fsync(place)):
    try:
        does()
        raise SystemExit('a path alone was used as a file')
    except OSError as error:
        assert error.errno == errno.EBADF, error
file = os.open('made-7', os.O_PATH)
for does in (lambda: os.stat('x', dir_fd=file), lambda: os.open('x', os.O_RDONLY, dir_fd=file)):
    try:
        does()
        raise SystemExit('a path began from a file')
    except NotADirectoryError: pass
assert os.fstat(file).st_mode == os.stat('made-7').st_mode
for does in (lambda: os.read(file, 1), lambda: os.utime(file), lambda: os.ftruncate(file, 0), lambda: os.lseek(file, 0, 0)):
    try:
        does()
        raise SystemExit('a path alone was used as a file')
    except OSError as error:
        assert error.errno == errno.EBADF, error
flags = os.O_PATH | os.O_DIRECTORY
assert fcntl.fcntl(place, fcntl.F_GETFL) & ~os.O_NOFOLLOW == flags, fcntl.fcntl(place, fcntl.F_GETFL)
os.chmod('/proc/self/fd/%d' % file, 0o640)
assert os.fstat(os.dup(file)).st_mode & 0o777 == 0o640
import ctypes
call = ctypes.CDLL(None, use_errno=True).syscall
if call(452, file, b'', 0o604, 0x1000) == 0:
    assert os.stat('made-7').st_mode & 0o777 == 0o604
    assert call(452, place, b'made-7', 0o640, 0x100) == 0
else: assert ctypes.get_errno() == errno.ENOSYS
assert os.fstat(file).st_mode & 0o777 == 0o640 and os.stat('/dev/null').st_mode & 0o777 == 0o666
held = os.fork()
if held == 0:
    os.fchdir(place)
    assert os.stat('made-7').st_ino == os.fstat(file).st_ino
    os._exit(0)
assert os.waitpid(held, 0)[1] == 0
os.symlink('made-7', 'link')
link = os.open('link', os.O_PATH | os.O_NOFOLLOW)
assert os.fstat(link) == os.lstat('link') and os.readlink('', dir_fd=link) == 'made-7'
assert os.fstat(os.open('link', os.O_PATH)).st_ino == os.fstat(file).st_ino
again = os.open('/proc/self/fd/%d' % file, os.O_RDWR)
assert os.write(again, b'text') == 4 and os.stat('made-7').st_size == 4
os.close(place)
again = os.open('/', os.O_RDONLY)
assert again == place and 'etc' in os.listdir(again)
os.stat('etc', dir_fd=again)
os.mkdir('deeper')
os.rename('made-8', 'deeper/made-8', src_dir_fd=os.open('.', os.O_PATH), dst_dir_fd=os.open('.', os.O_PATH))
assert os.listdir('deeper') == ['made-8']\"";
    let place = ReportedMount::new()?;
    let report = place.report_of(SCRIPT, 0)?;
    let calls = [("write", 100), ("openat", 50), ("fsetxattr", 20), ("getxattr", 20)];
    for (call, least) in calls {
        let served = count(&report, call, "accelerated");
        ensure!(served >= least, "{served} calls of {call} are accelerated, not {least}:\n{report:#}");
    }
    place.finish()
}

/// `cp` asks for a clone of each file before it copies it. That used to hand the copy over to the kernel, and took
/// thirty times as long. A copy between a file of the mount and one beside it asks for what the kernel can't do, and
/// continues.
fn copies() -> Outcome<Verdict> {
    const SCRIPT: &str = "
        mkdir tree
        for n in {1..40}; do head -c $((n * 1000)) /dev/urandom > tree/$n; done
        cp -r tree copy
        cp -r tree \"$OUTSIDE/copy\"
        cp -r \"$OUTSIDE/copy\" back
        install -m 644 tree/7 installed
        python3 -c '
import os, shutil
outside = os.environ[\"OUTSIDE\"]
for source, target in (\"tree/9\", \"here\"), (\"tree/9\", outside + \"/there\"), (outside + \"/there\", \"here again\"):
    shutil.copyfile(source, target)
'
        diff -r tree copy && diff -r tree \"$OUTSIDE/copy\" && diff -r tree back
        cmp tree/7 installed && cmp tree/9 here && cmp tree/9 \"here again\"";
    let place = ReportedMount::new()?;
    let report = place.report_of(SCRIPT, 0)?;
    for (call, least) in [("ioctl", 80), ("copy_file_range", 80), ("sendfile", 3)] {
        let served = count(&report, call, "accelerated");
        ensure!(served >= least, "{served} calls of {call} are accelerated, not {least}:\n{report:#}");
    }
    for call in ["ioctl", "copy_file_range", "sendfile", "read", "write"] {
        ensure!(count(&report, call, "delegated") <= 80, "{call} is delegated:\n{report:#}");
    }
    place.finish()
}

/// `rm -r` duplicates the descriptors of directories before it has a session, and a forking program then has none of
/// its own left.
fn kernels_directories() -> Outcome<Verdict> {
    const SCRIPT: &str = "python3 -c \"
import os
os.mkdir('directory')
place = os.open('directory', os.O_RDONLY | os.O_DIRECTORY)
if os.fork() == 0: os._exit(0)
os.wait()
again = os.dup(place)
for at in (place, again):
    for n in range(100): os.close(os.open('%d-%d' % (at, n), os.O_CREAT | os.O_WRONLY, 0o600, dir_fd=at))
assert len(os.listdir(place)) == 200
os.mkdir('file-%d' % place)
log = os.open('log', os.O_CREAT | os.O_WRONLY)
if os.fork() == 0: os._exit(0)
os.wait()
copy = os.dup(log)
try:
    os.open('x', os.O_RDONLY, dir_fd=copy)
    raise SystemExit('a path began from a file')
except NotADirectoryError: pass
os.close(place); os.close(again)
other = os.open('/', os.O_RDONLY)
assert other == place and 'etc' in os.listdir(other) and os.stat('etc', dir_fd=other)\"";
    let place = ReportedMount::new()?;
    let report = place.report_of(SCRIPT, 0)?;
    let opened = count(&report, "openat", "accelerated");
    ensure!(opened >= 200, "only {opened} openings are accelerated:\n{report:#}");
    let removes = ["run", "--report-json", "--report-to", &place.report.display().to_string(), "rm", "-r", "directory"]
        .map(str::to_owned);
    run(ashlar(&removes.each_ref().map(String::as_str)).current_dir(place.site.point(0)))?.success()?;
    let report = place.take_report()?;
    let removed = count(&report, "unlinkat", "accelerated");
    ensure!(removed >= 120, "only {removed} removals are accelerated:\n{report:#}");
    place.finish()
}

/// A working directory above the mount or beside it, and paths with redundant parts. The kernel serves a path that
/// leads there over a link.
fn beside() -> Outcome<Verdict> {
    const SCRIPT: &str = "mkdir ../beside; ln -s \"$PWD\" ../link; export NAME=$(basename \"$PWD\"); python3 -c \"
import os
name, real = os.environ['NAME'], os.getcwd()
def visit(at, path):
    os.chdir(at)
    for n in range(100):
        with open(path + '/file', 'a') as file: file.write('x')
    os.rename(path + '/file', path + '/renamed')
    os.rename(path + '/renamed', path + '/file')
    assert os.stat(path).st_ino == os.stat(real).st_ino
visit(real + '/..', name)
visit(real + '/..', './/' + name + '/.')
visit(real + '/../beside', '../' + name)
visit('/', '.' + real)
visit('/', real[1:])
visit('/', '/' + real.replace('/', '//'))
visit('/', real.replace('/', '/./'))
visit(real, '.')
for path in (name + 'x/file', 'file', '../' + name + '/file'):
    os.chdir(real + '/..')
    assert not os.path.exists(path) or path[0] == '.', path
os.chdir(real + '/../beside')
assert not os.path.exists(name + '/file') and not os.path.exists('../file') and os.listdir('.') == []
os.mkdir('away'); os.chdir('away')
assert not os.path.exists('../' + name) and len(os.listdir('../../' + name)) == 1
assert os.path.getsize('../../link/file') == 800
os.chdir(real + '/../beside'); os.mkdir('far'); os.mkdir(name); open(name + '/file', 'w').write('another'); os.chdir('away')
assert os.path.getsize('../../' + name + '/file') == 800
os.rename('../away', '../far/away')
assert open('../../' + name + '/file').read() == 'another' and os.path.getsize('../../../' + name + '/file') == 800
os.chdir(real); os.makedirs('.' + real)
for path in (real[1:] + '//inner', './/' + real[1:] + '/./inner'):
    open(path, 'w').write(path)
    assert not os.path.exists('inner') and os.path.exists('.' + real + '/inner'), path
    os.unlink(path)\"";
    let place = ReportedMount::new()?;
    let report = place.report_of(SCRIPT, 0)?;
    for (call, least) in [("openat", 800), ("write", 800), ("rename", 16)] {
        let served = count(&report, call, "accelerated");
        ensure!(served >= least, "only {served} of {call} are accelerated:\n{report:#}");
    }
    place.finish()
}

/// The program has an unknown name: this machine remembers what programs with known names did.
fn program_profile() -> Outcome<Verdict> {
    const FILES: usize = 100;
    let place = ReportedMount::new()?;
    // Another name may have its place there.
    let _ = fs::remove_file(crate::interception::short_programs::PROFILE);
    let name = format!("look-{}", std::process::id());
    let program = place.site.outside().join(name);
    fs::copy("/usr/bin/stat", &program).map_err(tried("copying a program"))?;
    let names: Vec<_> = (0..FILES).map(|number| number.to_string()).collect();
    for name in &names {
        fs::write(place.site.point(0).join(name), name).map_err(tried("writing a file"))?;
    }
    let delegated = |names: &[String]| -> Outcome<u64> {
        let mut command = ashlar(&["run", "--report-json", "--report-to", &place.report.display().to_string(), "--"]);
        run(command.arg(&program).args(names).current_dir(place.site.point(0)))?.success()?;
        Ok(count(&place.take_report()?, "statx", "delegated"))
    };
    let served = [&names[..5], &names, &names, &names[1..6]].map(delegated);
    let served = served.into_iter().collect::<Outcome<Vec<_>>>()?;
    let is_as_expected = matches!(served[..], [5, 60..=64, 0, 5]);
    ensure!(is_as_expected, "the kernel served {served:?} calls");
    place.finish()
}

fn missed() -> Outcome<Verdict> {
    let place = ReportedMount::new()?;
    let (source, program) = (place.site.outside().join("static.c"), place.site.outside().join("past"));
    fs::write(&source, STATIC_PROGRAM).map_err(tried("writing a program"))?;
    let made = Command::new("gcc").args(["-static", "-o"]).arg(&program).arg(&source).status();
    if !made.is_ok_and(|status| status.success()) {
        return Ok(Verdict::Skipped("there is no gcc that makes static programs".into()));
    }
    let program = program.display().to_string();
    let report = place.report_of(&format!("exec {program} file none"), 3)?;
    ensure!(count(&report, "write", "missed") == 10, "10 missed writes expected:\n{report:#}");
    let by = &report["missed_by"][0];
    ensure!(by["program"] == "past" && by["has_library"] == false, "missed by {by}");
    ensure!(count(&report, "write", "accelerated") == 0, "a static program's writes were accelerated:\n{report:#}");
    ensure!(report["missed_percent"].as_f64() > Some(50.0), "most of it was missed:\n{report:#}");
    // If the starting process left a program behind, it belongs to the run too.
    let outside = place.site.outside().display().to_string();
    let script = format!(
        "(({program} file none || true; : > {outside}/done) &); until [ -e {outside}/done ]; do sleep 0.01; done; echo x > y"
    );
    let report = place.report_of(&script, 0)?;
    let found = ["accelerated", "missed"].map(|what| count(&report, "write", what));
    ensure!(found == [1, 10], "one accelerated and 10 missed writes expected:\n{report:#}");
    // Programs of others do not.
    let mut command = place.command("echo ready; read -r; echo x > y");
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().map_err(tried("starting"))?;
    let mut line = String::new();
    let output = child.stdout.take().ok_or("it has no output")?;
    BufReader::new(output).read_line(&mut line).map_err(tried("waiting for it"))?;
    let other = run(Command::new(&program).args(["file", "none"]).current_dir(place.site.point(0)))?;
    ensure!(other.status.code() == Some(3), "{}", other.describe());
    drop(child.stdin.take());
    ensure!(wait(&mut child, SOON)?.code() == Some(1), "a shell whose input ends fails");
    let report = place.take_report()?;
    ensure!(report["missed"] == 0, "what another program did was counted:\n{report:#}");
    place.finish()
}

fn killed() -> Outcome<Verdict> {
    let place = ReportedMount::new()?;
    let script = "(for n in 1 2 3 4; do echo $n >> file; done; kill -KILL $BASHPID) || true; cat file";
    let report = place.report_of(script, 0)?;
    let writes = count(&report, "write", "accelerated");
    ensure!(writes == 4, "4 writes of a killed process expected:\n{report:#}");
    place.finish()
}

fn ends() -> Outcome<Verdict> {
    let place = ReportedMount::new()?;
    for (script, expected) in [("kill -KILL $$", Signal::KILL), ("kill -TERM $$", Signal::TERM)] {
        let done = run(&mut place.command(&format!("echo x > file; {script}")))?;
        ensure!(done.status.signal() == Some(expected.as_raw()), "{expected:?} expected: {}", done.describe());
        ensure!(was_killed(done.status) == (expected == Signal::KILL), "{}", done.describe());
        ensure!(count(&place.take_report()?, "write", "accelerated") == 1, "the report is not whole");
    }
    for (sent, code) in [(Signal::USR1, 9), (Signal::USR2, 8), (Signal::TERM, 7)] {
        let script =
            "trap 'exit 9' USR1; trap 'exit 8' USR2; trap 'exit 7' TERM; echo ready; while :; do sleep 0.01; done";
        let mut child = place.command(script).stdout(Stdio::piped()).spawn().map_err(tried("starting"))?;
        let mut line = String::new();
        let output = child.stdout.take().ok_or("it has no output")?;
        BufReader::new(output).read_line(&mut line).map_err(tried("waiting for it"))?;
        // From a process of another group, as a shell signals its jobs.
        let killer = format!("kill -{} {}", sent.as_raw(), child.id());
        let sender = run(Command::new("setsid").args(["--wait", "sh", "-c", &killer]))?;
        sender.success()?;
        let status = wait(&mut child, SOON)?;
        ensure!(status.code() == Some(code), "exit status {code} expected after {sent:?}: {status}");
        place.take_report()?;
    }
    // The program ignores the signals that this process ignores.
    let mut nohup = Command::new("nohup");
    let report = place.report.display().to_string();
    nohup.arg(ashlar_tests::command::program()).args([
        "run",
        "--report-to",
        &report,
        "--",
        "sh",
        "-c",
        "kill -HUP $$; exit 5",
    ]);
    let done = run(&mut nohup)?;
    ensure!(done.status.code() == Some(5), "exit status 5 expected: {}", done.describe());
    // If a program is signalled itself, and not through the report, the run ends as well.
    let mut child =
        place.command("echo $$; exec sleep 100").stdout(Stdio::piped()).spawn().map_err(tried("starting"))?;
    let mut line = String::new();
    let output = child.stdout.take().ok_or("it has no output")?;
    BufReader::new(output).read_line(&mut line).map_err(tried("waiting for it"))?;
    signal(line.trim().parse().map_err(tried("its number"))?, Signal::USR1)?;
    let status = wait(&mut child, SOON)?;
    ensure!(status.signal() == Some(Signal::USR1.as_raw()), "SIGUSR1 expected: {status}");
    place.finish()
}

/// Unmodified programs miss next to nothing.
fn programs() -> Outcome<Verdict> {
    const JOBS: [(&str, &str); 10] = [
        (
            "git",
            "git init -q r; cd r; git config user.email a@b; git config user.name a; for n in 1 2 3 4 5; do echo $n > $n; git add .; \
             git commit -qm $n; done; git gc -q; git log --oneline > log; git status --short; git fsck --no-progress",
        ),
        (
            "sqlite3",
            "for n in $(seq 20); do sqlite3 db \"create table if not exists t(a); insert into t values($n); select sum(a) from t\"; done",
        ),
        (
            "make",
            "printf 'all: x y\\nx:\\n\\ttouch x\\ny: x\\n\\tcp x y\\n' > Makefile; make -s; make -s; make -sj2 -B",
        ),
        (
            "python3",
            "python3 -c \"import os\nfor n in range(200): open(f'p{n}', 'w').write('x' * n)\nos.listdir('.')\nos.remove('p7')\"",
        ),
        (
            "bash",
            "printf 'echo in > from-profile\n' > .bash_profile; HOME=$PWD bash -l -c 'set -m; for n in $(seq 9); do (echo $n >> jobs) & done; \
             wait; sort jobs | tee sorted | wc -l > count; cat <<< here > here; mv here there; kill %1 2>/dev/null; cat sorted there'",
        ),
        (
            "tmux",
            "t() { tmux -S ./socket -f /dev/null \"$@\"; }; t new-session -d -s s 'for n in $(seq 50); do echo $n >> w; done; \
             echo end > done.new; mv done.new done; sleep 100'; until [ -e done ]; do sleep 0.02; done; t kill-server; cat w",
        ),
        (
            "python3",
            "printf '%s\n' 'import multiprocessing as m' 'def f(n): return open(f\"m{n}\", \"w\").write(\"x\" * n)' \
             'if __name__ == \"__main__\":' ' for w in \"fork\", \"spawn\":' \
             '  with m.get_context(w).Pool(2) as p: print(sum(p.map(f, range(60))))' > many.py; python3 many.py",
        ),
        (
            "python3",
            "printf '%s\n' 'import os, time' 'if os.fork(): os._exit(0)' 'os.setsid()' 'if os.fork(): os._exit(0)' 'os.closerange(0, 1024)' \
             'log = os.open(\"log\", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)' 'for n in range(90): os.write(log, b\"line\\n\")' \
             'os.rename(\"log\", \"over\")' > leave.py; python3 leave.py; until [ -e over ]; do sleep 0.02; done; wc -l over",
        ),
        (
            "node",
            "printf '%s\n' 'const fs = require(\"fs\")' 'for (let n = 0; n < 50; n++) fs.writeFileSync(\"n\" + n, \"x\")' \
             'fs.promises.readdir(\".\").then((all) => Promise.all(all.map((name) => fs.promises.stat(name))))' \
             'fs.createReadStream(\"n7\").pipe(fs.createWriteStream(\"n.copy\"))' > job.js; node job.js",
        ),
        (
            "java",
            "printf '%s\n' 'import java.nio.file.*;' 'class J { public static void main(String[] w) throws Exception {' \
             'for (int n = 0; n < 50; n++) Files.writeString(Path.of(\"j\" + n), \"x\");' \
             'try (var all = Files.list(Path.of(\".\"))) { System.out.println(all.count()); } } }' > J.java; \
             java -XX:-UsePerfData -XX:TieredStopAtLevel=1 J.java",
        ),
    ];
    let place = ReportedMount::new()?;
    for (program, script) in JOBS {
        if run(Command::new("which").arg(program))?.status.code() != Some(0) {
            return Ok(Verdict::Skipped(format!("there is no {program}")));
        }
        let report = place.report_of(script, 0)?;
        let (percent, served) = (report["missed_percent"].as_f64(), report["accelerated"].as_u64());
        ensure!(percent.is_some_and(|percent| percent < 1.0), "{program} missed {percent:?} %:\n{report:#}");
        ensure!(served > Some(50), "{program} had {served:?} calls accelerated:\n{report:#}");
        ensure!(
            report["unknown"].as_array().is_some_and(|unknown| {
                let point = place.site.point(0).display().to_string();
                unknown.iter().all(|mount| mount[0] != point.as_str())
            }),
            "the mount did not count:\n{report:#}"
        );
    }
    place.finish()
}
