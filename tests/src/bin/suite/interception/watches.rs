//! Programs that watch files (inotify, fanotify), and programs that change those under `ashlar run`.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use ashlar_tests::command::{eventually, program, run, wait};
use ashlar_tests::harness::{Test, Verdict, passed, when_mountable};
use ashlar_tests::mount::{Front, Medium, TestArena};
use ashlar_tests::{Outcome, ensure, tried};

/// The tests of this group.
pub const TESTS: &[Test] = &[
    Test { name: "watched/events_are_those_of_a_local_directory", run: || when_mountable(compared) },
    Test { name: "watched/watch_without_look_up_is_found_soon", run: || when_mountable(found_soon) },
    Test { name: "watched/watch_that_ends_gives_files_back", run: || when_mountable(ends) },
    Test { name: "watched/restarted_sharedfs_knows_watches", run: || when_mountable(killed) },
    Test { name: "watched/watch_lives_on_in_child_and_program", run: || when_mountable(inherited) },
    Test { name: "watched/marked_file_system_is_left_to_the_kernel", run: || when_mountable(marked) },
    Test { name: "watched/inotifywait_sees_changes", run: || when_mountable(inotifywait) },
    Test { name: "watched/java_sees_changes", run: || when_mountable(java) },
    Test { name: "watched/node_sees_changes", run: || when_mountable(node) },
    Test { name: "watched/watchdog_sees_changes", run: || when_mountable(watchdog) },
    Test { name: "watched/tail_follows_a_rotated_file", run: || when_mountable(tail) },
];

const SCRIPT: &str = include_str!("../../../../jobs/watched.py");
/// All events of inotify.
const ALL: &str = "4095";
const SOON: Duration = Duration::from_secs(20);

/// A program that watches and changes files by order.
struct WatchProgram {
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

impl WatchProgram {
    fn start(front: Front, directory: &Path) -> Outcome<Self> {
        let mut command = front.command("python3");
        command.args(["-c", SCRIPT, "serve"]).arg(directory).env("WATCHED_SCRIPT", SCRIPT);
        let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let mut child = child.map_err(tried("starting python3"))?;
        let (to, from) = (child.stdin.take(), child.stdout.take());
        Ok(Self { child, to: to.ok_or("no input")?, from: BufReader::new(from.ok_or("no output")?) })
    }

    /// A program whose files LibFS serves, with an open `file`.
    fn served(directory: &Path) -> Outcome<Self> {
        let mut served = Self::start(Front::RunAtOnce, directory)?;
        served.order("open file file c")?;
        served.order("warm file")?;
        Ok(served)
    }

    fn order(&mut self, order: &str) -> Outcome<String> {
        writeln!(self.to, "{order}").map_err(tried(format!("ordering '{order}'")))?;
        let mut line = String::new();
        self.from.read_line(&mut line).map_err(tried("reading an answer"))?;
        ensure!(!line.is_empty(), "it ended with '{order}'");
        Ok(line.trim_end().to_owned())
    }

    /// Opens a file anew, and returns whether LibFS serves it.
    fn is_served(&mut self, name: &str) -> Outcome<bool> {
        self.order(&format!("open again {name}"))?;
        let number = self.order("number again")?;
        let link = format!("/proc/{}/fd/{}", self.child.id(), number.trim_matches(['[', ']', '\'']));
        let link = fs::read_link(link).map_err(tried("looking at a descriptor"))?;
        self.order("close again")?;
        // A placeholder stands in no tree; the kernel knows its own files by their names here.
        Ok(!link.ends_with(name))
    }

    fn finish(mut self) -> Outcome {
        drop((self.to, self.from));
        let status = wait(&mut self.child, SOON)?;
        ensure!(status.success(), "it ended with {status}");
        Ok(())
    }
}

fn mounted_arena() -> Outcome<TestArena> {
    TestArena::mounted(Medium::Memory, "128M")
}

/// The events of a script of operations, by watcher and actor.
fn events_of(directory: &Path, watcher: &str, actor: &str) -> Outcome<Vec<String>> {
    fs::create_dir(directory).map_err(tried("making a directory"))?;
    let mut command = Command::new("python3");
    command.args(["-c", SCRIPT, "compare"]).arg(directory).args([watcher, actor]).arg(program()).args(["run", "--"]);
    let done = run(command.env("WATCHED_SCRIPT", SCRIPT))?.success()?;
    Ok(done.output.lines().map(str::to_owned).collect())
}

/// The events without the extra opening. Files that another process had open under `ashlar run` before the watch began
/// show one opening more, when they are handed over to the kernel.
fn without_opening(line: &str) -> String {
    ["dir open early", "file open -"]
        .iter()
        .fold(line.to_owned(), |line, event| line.replace(&format!("'{event}', "), ""))
}

/// Each combination of watcher and actor, through the kernel and under `ashlar run`, sees the events of a local
/// directory.
fn compared() -> Outcome<Verdict> {
    let site = mounted_arena()?;
    let expected = events_of(&site.outside().join("local"), "plain", "plain")?;
    ensure!(expected.len() > 100, "the script has {} steps", expected.len());
    let ways = [("plain", "plain"), ("run", "same"), ("run", "run"), ("plain", "run"), ("run", "plain")];
    for (watcher, actor) in ways {
        let events = events_of(&site.point(0).join(format!("{watcher}-{actor}")), watcher, actor)?;
        ensure!(events.len() == expected.len(), "{watcher}, {actor}: {} steps, not {}", events.len(), expected.len());
        for (line, local) in events.iter().zip(&expected) {
            let is_same = line == local || actor == "run" && without_opening(line) == *local;
            ensure!(is_same, "{watcher} watches, {actor} acts:\n{line}\nin a local directory:\n{local}");
        }
    }
    site.check()?;
    site.umount(0)?;
    passed()
}

/// A watch by a program without the library is found in a moment, even if the kernel need not look its path up.
fn found_soon() -> Outcome<Verdict> {
    let site = mounted_arena()?;
    let mut actor = WatchProgram::served(&site.point(0))?;
    let mut longest = Duration::ZERO;
    for path in [".", "/proc/self/cwd"] {
        let mut watcher = WatchProgram::start(Front::Mount, &site.point(0))?;
        watcher.order("chdir .")?;
        watcher.order(&format!("+add dir {path} {ALL}"))?;
        let began = Instant::now();
        let mut is_seen = false;
        eventually("an event of the watch", SOON, || {
            let events = actor.order("write file").and_then(|_| watcher.order("+events"));
            is_seen |= events.is_ok_and(|events| events.contains("dir modify file"));
            is_seen
        })?;
        longest = longest.max(began.elapsed());
        watcher.finish()?;
        eventually("the end of the watch", SOON, || actor.is_served("file").unwrap_or(true))?;
    }
    actor.finish()?;
    site.umount(0)?;
    Ok(Verdict::Passed(format!("after {} ms at most", longest.as_millis())))
}

/// However a watch ends, LibFS serves the watched files again.
fn ends() -> Outcome<Verdict> {
    let site = mounted_arena()?;
    let mut actor = WatchProgram::served(&site.point(0))?;
    ensure!(actor.is_served("file")?, "LibFS does not serve an unwatched file");
    for way in ["remove", "end", "kill", "once"] {
        let mut watcher = WatchProgram::start(Front::Mount, &site.point(0))?;
        // `IN_ATTRIB` once, or all.
        let mask = if way == "once" { (4_u32 | 1 << 31).to_string() } else { ALL.to_owned() };
        watcher.order(&format!("+add file file {mask}"))?;
        ensure!(!actor.is_served("file")?, "LibFS serves what is watched");
        let left = match way {
            "remove" => watcher.order("+remove file").map(|_| Some(watcher))?,
            "once" => {
                actor.order("chmod file 600")?;
                ensure!(watcher.order("+events")?.contains("attrib"), "no event");
                Some(watcher)
            }
            "end" => watcher.finish().map(|()| None)?,
            _ => {
                watcher.child.kill().map_err(tried("killing"))?;
                wait(&mut watcher.child, SOON)?;
                None
            }
        };
        eventually(&format!("LibFS serving the file again ({way})"), SOON, || actor.is_served("file").unwrap_or(true))?;
        left.map_or(Ok(()), WatchProgram::finish)?;
    }
    actor.finish()?;
    site.check()?;
    site.umount(0)?;
    passed()
}

/// Makes some changes in the directory `sub`, and checks that a watcher of it sees all of them.
fn check_events(actor: &mut WatchProgram, watcher: &mut WatchProgram, name: &str) -> Outcome {
    for order in ["open made sub/NAME x", "write made", "close made", "rename sub/NAME sub/other", "unlink sub/other"] {
        actor.order(&order.replace("NAME", name))?;
    }
    let events = watcher.order("+events")?;
    let expected = ["create NAME", "open NAME", "modify NAME", "close_write NAME", "moved_from NAME", "moved_to other"];
    let expected = expected.map(|event| event.replace("NAME", name));
    let missing: Vec<_> = expected.iter().filter(|event| !events.contains(*event)).collect();
    ensure!(missing.is_empty(), "{missing:?} are not among {events}");
    Ok(())
}

/// A test arena with a directory `sub`, a program that works there with LibFS, and one that watches it.
fn watched_directory() -> Outcome<(TestArena, WatchProgram, WatchProgram)> {
    let site = mounted_arena()?;
    fs::create_dir(site.point(0).join("sub")).map_err(tried("making a directory"))?;
    let mut actor = WatchProgram::served(&site.point(0))?;
    actor.order("open warm sub/warm c")?;
    actor.order("warm sub/warm")?;
    let mut watcher = WatchProgram::start(Front::Mount, &site.point(0))?;
    watcher.order(&format!("+add dir sub {ALL}"))?;
    Ok((site, actor, watcher))
}

/// A restarted SharedFS knows the watches before it serves any session.
fn killed() -> Outcome<Verdict> {
    let (site, mut actor, mut watcher) = watched_directory()?;
    for round in 0..4 {
        check_events(&mut actor, &mut watcher, &format!("name{round}"))?;
        site.kill_daemon()?;
    }
    check_events(&mut actor, &mut watcher, "last")?;
    actor.finish()?;
    watcher.finish()?;
    site.check()?;
    site.umount(0)?;
    passed()
}

/// A watch lives as long as any process has its descriptor: a child of the watcher's, and the program that it becomes.
fn inherited() -> Outcome<Verdict> {
    let (site, mut actor, mut watcher) = watched_directory()?;
    check_events(&mut actor, &mut watcher, "parent")?;
    for way in ["+fork", "+exec"] {
        watcher.order(way)?;
        // Longer than an announced watch is kept without being found.
        std::thread::sleep(Duration::from_secs(4));
        check_events(&mut actor, &mut watcher, &way[1..])?;
    }
    actor.finish()?;
    drop((watcher.to, watcher.from));
    wait(&mut watcher.child, SOON)?;
    site.umount(0)?;
    passed()
}

/// The kernel serves operations that fanotify reports for a whole file system.
fn marked() -> Outcome<Verdict> {
    let site = mounted_arena()?;
    let mut actor = WatchProgram::served(&site.point(0))?;
    let script = "
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
group = libc.fanotify_init(0, os.O_RDONLY)
# FAN_MARK_ADD | FAN_MARK_FILESYSTEM, FAN_MODIFY | FAN_CLOSE_WRITE
if group < 0 or libc.fanotify_mark(group, 0x101, ctypes.c_uint64(0xa), -100, os.fsencode(sys.argv[1])):
    print('errno', ctypes.get_errno(), flush=True)
    sys.exit()
print('ready', flush=True)
os.read(group, 4096)
print('seen', flush=True)
";
    let watcher = Command::new("python3").args(["-c", script]).arg(site.point(0)).stdout(Stdio::piped()).spawn();
    let mut watcher = watcher.map_err(tried("starting python3"))?;
    let mut lines = BufReader::new(watcher.stdout.take().ok_or("no output")?).lines().map_while(Result::ok);
    let ready = lines.next().unwrap_or_default();
    if ready != "ready" {
        return Ok(Verdict::Skipped(format!("the kernel marks no file system: {ready}")));
    }
    eventually("the kernel serving all files", SOON, || !actor.is_served("file").unwrap_or(true))?;
    actor.order("open other other c")?;
    actor.order("write other")?;
    ensure!(lines.next().as_deref() == Some("seen"), "the watcher saw nothing");
    wait(&mut watcher, SOON)?;
    eventually("LibFS serving files again", SOON, || actor.is_served("file").unwrap_or(true))?;
    actor.finish()?;
    site.umount(0)?;
    passed()
}

/// A program prints `ready` (or such) when it watches the directory `sub`, and then the names in its events. It sees
/// the files that another program makes under `ashlar run`.
fn sees_changes(program: &str, arguments: &[&str], ready: &str) -> Outcome<Verdict> {
    if run(Command::new("sh").args(["-c", &format!("command -v {program}")]))?.success().is_err() {
        return Ok(Verdict::Skipped(format!("there is no {program}")));
    }
    let site = mounted_arena()?;
    fs::create_dir(site.point(0).join("sub")).map_err(tried("making a directory"))?;
    let mut actor = WatchProgram::served(&site.point(0))?;
    for front in [Front::Mount, Front::Run] {
        actor.order("open warm sub/warm c")?;
        actor.order("warm sub/warm")?;
        let mut command = front.command("sh");
        command.args(["-c", "exec \"$@\" 2>&1", "sh", program]).args(arguments).current_dir(site.point(0));
        let watcher = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let mut watcher = watcher.map_err(tried(format!("starting {program}")))?;
        let mut lines = BufReader::new(watcher.stdout.take().ok_or("no output")?).lines().map_while(Result::ok);
        let mut until =
            |text: &str| lines.find(|line| line.contains(text)).ok_or(format!("{program} never says '{text}'"));
        until(ready)?;
        let name = format!("made-{front:?}");
        actor.order(&format!("open made sub/{name} x"))?;
        let events = until(&name);
        actor.order("close made")?;
        watcher.kill().map_err(tried("killing"))?;
        wait(&mut watcher, SOON)?;
        events?;
    }
    actor.finish()?;
    site.umount(0)?;
    passed()
}

fn inotifywait() -> Outcome<Verdict> {
    sees_changes("inotifywait", &["-m", "sub"], "established")
}

fn java() -> Outcome<Verdict> {
    let source = "
import java.nio.file.*;
import static java.nio.file.StandardWatchEventKinds.*;
class Watch {
    public static void main(String[] words) throws Exception {
        WatchService service = FileSystems.getDefault().newWatchService();
        Path.of(\"sub\").register(service, ENTRY_CREATE, ENTRY_MODIFY, ENTRY_DELETE);
        System.out.println(\"ready\");
        while (true) {
            WatchKey key = service.take();
            key.pollEvents().forEach(event -> System.out.println(event.context()));
            key.reset();
        }
    }
}";
    let directory = tempfile::tempdir().map_err(tried("making a directory"))?;
    let file = directory.path().join("Watch.java");
    fs::write(&file, source).map_err(tried("writing a program"))?;
    sees_changes("java", &["-XX:-UsePerfData", "-XX:TieredStopAtLevel=1", &file.to_string_lossy()], "ready")
}

fn node() -> Outcome<Verdict> {
    let script = "require('fs').watch('sub', (kind, name) => console.log(kind, name)); console.log('ready')";
    sees_changes("node", &["-e", script], "ready")
}

/// Python's watchdog, of the distribution: the system's interpreter has it.
fn watchdog() -> Outcome<Verdict> {
    let python = "/usr/bin/python3";
    if run(Command::new(python).args(["-c", "import watchdog"]))?.success().is_err() {
        return Ok(Verdict::Skipped(format!("{python} has no watchdog")));
    }
    let script = "
import time
from watchdog.events import FileSystemEventHandler
from watchdog.observers.inotify import InotifyObserver
class Printer(FileSystemEventHandler):
    def on_any_event(self, event):
        print(event.event_type, event.src_path, flush=True)
observer = InotifyObserver()
observer.schedule(Printer(), 'sub', recursive=True)
observer.start()
print('ready', flush=True)
time.sleep(60)
";
    sees_changes(python, &["-c", script], "ready")
}

/// `tail -F` prints what a program under `ashlar run` appends, also to the file that takes the place of a rotated one.
fn tail() -> Outcome<Verdict> {
    let site = mounted_arena()?;
    let mut actor = WatchProgram::served(&site.point(0))?;
    for front in [Front::Mount, Front::Run] {
        actor.order("open log log t")?;
        actor.order("write log before#")?;
        let mut command = front.command("tail");
        command.args(["-F", "-s", "0.1", "log"]).current_dir(site.point(0)).stderr(Stdio::null());
        let mut tail = command.stdout(Stdio::piped()).spawn().map_err(tried("starting tail"))?;
        let mut lines = BufReader::new(tail.stdout.take().ok_or("no output")?).split(b'#').map_while(Result::ok);
        let mut until = |text: &str| {
            let found = lines.find(|line| String::from_utf8_lossy(line).contains(text));
            found.ok_or(format!("tail never prints '{text}'"))
        };
        until("before")?;
        actor.order("write log appended#")?;
        until("appended")?;
        actor.order("rename log log.1")?;
        actor.order("close log")?;
        actor.order("open log log x")?;
        actor.order("write log rotated#")?;
        until("rotated")?;
        actor.order("close log")?;
        tail.kill().map_err(tried("killing"))?;
        wait(&mut tail, SOON)?;
    }
    actor.finish()?;
    site.umount(0)?;
    passed()
}
