//! Programs that link libashlar.
//!
//! They are the examples, every function beside the kernel's, and a writer that is killed.

use std::ffi::OsStr;
use std::fs::{self, Permissions};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ashlar_tests::command::{Done, call, eventually, finish, run, signal};
use ashlar_tests::harness::{Test, Verdict, passed, when_mountable};
use ashlar_tests::mount::{Medium, TestArena};
use ashlar_tests::{Outcome, ensure, number, tried};
use ashlar_wire::PATIENCE_VARIABLE;
use rustix::process::Signal;

/// The tests of this group.
pub const TESTS: &[Test] = &[
    Test { name: "capi/header_matches_library", run: || when_mountable(header) },
    Test { name: "capi/every_call_answers_as_the_kernel", run: || when_mountable(every_call) },
    Test { name: "capi/examples_and_mount_see_each_other", run: || when_mountable(examples) },
    Test { name: "capi/refused_session_says_why", run: || when_mountable(refusals) },
    Test { name: "capi/hung_daemon_gives_error_within_patience", run: || when_mountable(hangs) },
    Test { name: "capi/killed_writer_keeps_acknowledged_data", run: || when_mountable(kills) },
];

/// The tree that these tests were built from: examples, sources and the script that installs.
const TREE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");
/// The user `nobody`.
const USER: u32 = 65534;
const SOON: Duration = Duration::from_secs(60);
/// Lines that a writer prints before it is killed, at least.
const SAID_MIN: u64 = 200;

fn in_tree(path: &str) -> PathBuf {
    Path::new(TREE).join(path)
}

/// The files of `make install`, in a directory of a test's own.
pub struct Installed {
    prefix: PathBuf,
}

impl Installed {
    /// Installs them beside a mount.
    pub fn new(site: &TestArena) -> Outcome<Self> {
        let prefix = site.outside().join("prefix");
        let program = std::env::current_exe().map_err(tried("finding this program"))?;
        let built = program.parent().and_then(Path::parent).ok_or("this program stands nowhere")?;
        run(Command::new(in_tree("scripts/install.sh")).env("PREFIX", &prefix).env("CARGO_TARGET_DIR", built))?
            .success()?;
        Ok(Self { prefix })
    }

    fn library(&self) -> PathBuf {
        self.prefix.join("lib/libashlar.so.0")
    }

    /// The compiler's flags, as pkg-config prints them.
    fn flags(&self) -> Outcome<Vec<String>> {
        let mut command = Command::new("pkg-config");
        command.args(["--cflags", "--libs", "ashlar"]).env("PKG_CONFIG_PATH", self.prefix.join("lib/pkgconfig"));
        let flags = run(&mut command)?.success()?.output;
        Ok(flags.split_whitespace().map(str::to_owned).collect())
    }

    /// Compiles a program of the tree; returns its path.
    fn compile(&self, source: &str) -> Outcome<PathBuf> {
        let name = Path::new(source).file_stem().and_then(OsStr::to_str).ok_or("a source without a name")?;
        self.compile_as(name, &[source], true)
    }

    /// Compiles a program of several sources, which links the library (`WITH_LIBRARY`) or does not; returns its path.
    pub fn compile_as(&self, name: &str, sources: &[&str], with_library: bool) -> Outcome<PathBuf> {
        let program = self.prefix.join("bin").join(name);
        let mut command = Command::new("cc");
        // Some calls are tested with null pointers and impossible lengths.
        command.args(["-O1", "-g", "-Wall", "-Wextra", "-Werror", "-Wno-nonnull", "-Wno-stringop-overflow"]);
        command.args(["-Wno-stringop-overread", "-pthread", "-o"]).arg(&program);
        command.args(sources.iter().map(|source| in_tree(source)));
        if with_library {
            command.arg("-DWITH_LIBRARY").args(self.flags()?);
            command.arg(format!("-Wl,-rpath,{}", self.prefix.join("lib").display()));
        }
        run(&mut command)?.success()?;
        Ok(program)
    }

    /// The example in Python, not yet run.
    fn notes_command(&self, site: &TestArena, words: &[&str]) -> Command {
        let mut command = Command::new("python3");
        command.arg(in_tree("examples/python/notes.py")).arg(site.point(0)).args(words);
        command.env("ASHLAR_LIBRARY", self.library()).env("PYTHONDONTWRITEBYTECODE", "1");
        command
    }
}

/// The header declares the functions that the library exports. Old C and C++ can compile it.
fn header() -> Outcome<Verdict> {
    let site = TestArena::new(Medium::Disk, "64M")?;
    let installed = Installed::new(&site)?;
    let path = installed.prefix.join("include/ashlar.h");
    let text = fs::read_to_string(&path).map_err(tried("reading the header"))?;
    let declared = |line: &str| {
        let start = line.find("ashlar_")?;
        let (name, _) = line[start..].split_once('(')?;
        let is_declaration =
            !line.starts_with([' ', '/', '#']) && name.bytes().all(|b| b.is_ascii_lowercase() || b == b'_');
        is_declaration.then(|| name.to_owned())
    };
    let mut declared: Vec<_> = text.lines().filter_map(declared).collect();
    let listed =
        call("nm", &[OsStr::new("-D"), OsStr::new("--defined-only"), installed.library().as_os_str()])?.success()?;
    let mut exported: Vec<_> =
        listed.output.lines().filter_map(|line| line.split_whitespace().nth(2)).map(str::to_owned).collect();
    declared.sort();
    exported.sort();
    ensure!(declared == exported, "declared are {declared:?}, exported {exported:?}");
    let dynamic = call("readelf", &[OsStr::new("-d"), installed.library().as_os_str()])?.success()?.output;
    ensure!(dynamic.contains("[libashlar.so.0]"), "its name is not what programs look for: {dynamic}");
    for words in [["cc", "-std=c89", "-xc"], ["g++", "-std=c++98", "-xc++"]] {
        let mut command = Command::new(words[0]);
        command.args(&words[1..]).args(["-pedantic", "-Wall", "-Wextra", "-Werror", "-fsyntax-only"]);
        run(command.arg(&path))?.success()?;
    }
    Ok(Verdict::Passed(format!("{} functions", declared.len())))
}

/// As the super-user, and as another user with fewer rights.
fn every_call() -> Outcome<Verdict> {
    let site = TestArena::mounted(Medium::Disk, "256M")?;
    let program = Installed::new(&site)?.compile("tests/capi/compare.c")?;
    fs::set_permissions(site.arena(), Permissions::from_mode(0o711)).map_err(tried("opening the arena's directory"))?;
    let mut words = Vec::new();
    for user in [0, USER] {
        let directory = format!("user{user}");
        let path = site.point(0).join(&directory);
        fs::create_dir(&path).map_err(tried("making a directory"))?;
        std::os::unix::fs::chown(&path, Some(user), Some(user)).map_err(tried("chown"))?;
        let mut command = Command::new(&program);
        let done = run(command.arg(site.point(0)).arg(&directory).uid(user).gid(user))?.success()?;
        ensure!(done.output.contains(" 0 different"), "as user {user}: {}", done.describe());
        words.push(format!("as user {user} {}", done.output.trim_end()));
    }
    site.check()?;
    site.umount(0)?;
    site.check()?;
    Ok(Verdict::Passed(words.join("; ")))
}

/// Runs a program with input.
fn run_with_input(command: &mut Command, input: &str) -> Outcome<Done> {
    let line = format!("{command:?}");
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(tried(format!("starting {line}")))?;
    // The program ends at the end of its input.
    let mut pipe = child.stdin.take().ok_or("it has no input")?;
    pipe.write_all(input.as_bytes()).map_err(tried(format!("feeding {line}")))?;
    drop(pipe);
    finish(child, line)?.success()
}

fn names(directory: &Path) -> Outcome<Vec<String>> {
    let entries = fs::read_dir(directory).map_err(tried(format!("listing {}", directory.display())))?;
    let mut names: Vec<_> = entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    Ok(names)
}

fn examples() -> Outcome<Verdict> {
    let site = TestArena::mounted(Medium::Memory, "64M")?;
    let installed = Installed::new(&site)?;
    let program = installed.compile("examples/c/maildir.c")?;
    let maildir = |words: &[&str]| {
        let mut command = Command::new(&program);
        command.arg(site.point(0)).args(words);
        command
    };
    let message = "From: ann\n\nLunch at one?\n";
    let said = run_with_input(&mut maildir(&["deliver", "box"]), message)?.output;
    ensure!(said.starts_with("delivered box/new/") && said.contains("25 bytes"), "it says {said}");
    // The kernel reads files that the library has written.
    let arrived = site.point(0).join("box/new");
    let delivered = names(&arrived)?;
    let [name] = &delivered[..] else { return Err(format!("delivered were {delivered:?}")) };
    let text = fs::read_to_string(arrived.join(name)).map_err(tried("reading the message"))?;
    ensure!(text == message, "it reads {text}");
    ensure!(names(&site.point(0).join("box/tmp"))?.is_empty(), "something is left in tmp");
    // And the other way round.
    fs::write(arrived.join("by-hand"), "Two o'clock.\n").map_err(tried("writing a message"))?;
    let said = run(&mut maildir(&["list", "box"]))?.success()?.output;
    ensure!(said.contains("13 bytes  by-hand") && said.contains(name.as_str()), "it lists {said}");
    ensure!(said.ends_with("2 messages in box\n"), "it counts {said}");
    let said = run(&mut maildir(&["read", "box", "by-hand"]))?.success()?.output;
    ensure!(said == "Two o'clock.\n", "it reads {said}");
    ensure!(names(&site.point(0).join("box/cur"))? == ["by-hand"], "the kernel does not see what was read");

    let noted = run(&mut installed.notes_command(&site, &["add", "bought", "bread"]))?.success()?.output;
    let path = noted.split([' ', ',']).nth(2).unwrap_or_default().to_owned();
    let path = site.point(0).join(path);
    let text = fs::read_to_string(&path).map_err(tried(format!("reading {} ({noted})", path.display())))?;
    ensure!(text.ends_with(" bought bread\n"), "it reads {text}");
    fs::write(&path, format!("{text}07:00 by hand\n")).map_err(tried("writing a note"))?;
    let said = run(&mut installed.notes_command(&site, &["show"]))?.success()?.output;
    ensure!(said.contains("07:00 by hand\n") && said.ends_with("2 notes\n"), "it shows {said}");
    let said = run(&mut installed.notes_command(&site, &["find", "bread"]))?.success()?.output;
    ensure!(said.ends_with("1 note\n"), "it finds {said}");
    site.check()?;
    site.umount(0)?;
    passed()
}

fn refusals() -> Outcome<Verdict> {
    let site = TestArena::mounted(Medium::Disk, "64M")?;
    let installed = Installed::new(&site)?;
    let program = installed.compile("examples/c/maildir.c")?;
    let list = |place: &Path, user: u32| {
        let mut command = Command::new(&program);
        run(command.arg(place).args(["list", "box"]).uid(user).gid(user))
    };
    let (point, outside) = (site.point(0), site.outside().to_owned());
    fs::create_dir(point.join("box")).map_err(tried("making a directory"))?;
    let place = point.display().to_string();
    list(&outside, 0)?.failure(1, &["no Ashlar is mounted on", "ashlar mount"])?;
    list(&outside.join("none"), 0)?.failure(1, &["does not exist"])?;
    list(&point.join("box"), 0)?.failure(1, &["lies in the Ashlar on", &place])?;
    // A user that may search the arena's directory may open a session. The socket may be named too.
    list(&site.arena().join("socket"), 0)?.success()?;
    fs::set_permissions(site.arena(), Permissions::from_mode(0o700)).map_err(tried("closing the arena's directory"))?;
    list(&point, USER)?.failure(1, &["may not reach the daemon's socket"])?;
    fs::set_permissions(site.arena(), Permissions::from_mode(0o711)).map_err(tried("opening the arena's directory"))?;
    list(&point, USER)?.success()?;
    fs::set_permissions(point.join("box"), Permissions::from_mode(0o700)).map_err(tried("closing the box"))?;
    list(&point, USER)?.failure(1, &["listing box/new", "Permission denied"])?;
    let mut command = installed.notes_command(&site, &["show"]);
    run(command.uid(USER).gid(USER))?.failure(1, &["notes: notes: No such file or directory"])?;
    site.umount(0)?;
    list(&point, 0)?.failure(1, &["no Ashlar is mounted on"])?;
    site.ashlar(&["mount", "--read-only", &place])?.success()?;
    list(&point, 0)?.failure(1, &["for reading only"])?;
    site.umount(0)?;
    site.ashlar(&["mount", "--sessions", "root", &place])?.success()?;
    list(&point, USER)?.failure(1, &["no sessions for this user", "ashlar status"])?;
    list(&site.arena().join("socket"), USER)?.failure(1, &["no sessions for this user"])?;
    site.umount(0)?;
    site.mount(0)?;
    site.kill_everything()?;
    // The message is about the mount or the daemon, whichever is found first.
    list(&point, 0)?.failure(1, &["maildir: ", "ashlar mount"])?;
    passed()
}

/// A program with less patience gets its error sooner.
fn hangs() -> Outcome<Verdict> {
    // Enough to open a session on a machine with much other work.
    const PATIENCE: &str = "3";
    const SOON: Duration = Duration::from_secs(30);
    let site = TestArena::mounted(Medium::Memory, "64M")?;
    let program = Installed::new(&site)?.compile("tests/capi/patient.c")?;
    let mut command = Command::new(&program);
    command.arg(site.point(0)).env(PATIENCE_VARIABLE, PATIENCE).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.stderr(Stdio::piped()).spawn().map_err(tried("starting a program"))?;
    let mut output = BufReader::new(child.stdout.take().ok_or("it has no output")?);
    let mut line = String::new();
    output.read_line(&mut line).map_err(tried("waiting for its session"))?;
    ensure!(line == "open\n", "it says {line}");
    let daemon = site.daemon()?;
    signal(daemon, Signal::STOP)?;
    let begun = Instant::now();
    drop(child.stdin.take());
    let ended =
        finish(child, "a call".into()).and_then(|done| done.failure(1, &["making a directory: Input/output error"]));
    let took = begun.elapsed();
    signal(daemon, Signal::CONT)?;
    ended?;
    ensure!(took < SOON, "it took {took:?}");
    site.umount(0)?;
    passed()
}

fn kills() -> Outcome<Verdict> {
    let rounds = number("ASHLAR_KILL_CAPI", 10);
    let site = TestArena::mounted(Medium::Memory, "256M")?;
    let program = Installed::new(&site)?.compile("tests/capi/writer.c")?;
    let mut all = 0;
    for round in 0..rounds {
        let directory = format!("round{round}");
        fs::create_dir(site.point(0).join(&directory)).map_err(tried("making a directory"))?;
        // Every other time the daemon is killed before, which only makes the writer pause.
        let said = kill_writer(&site, &program, &directory, round % 2 == 1).map_err(tried(&directory))?;
        check_written(&site.point(0).join(&directory), said).map_err(tried(&directory))?;
        site.check()?;
        fs::remove_dir_all(site.point(0).join(&directory)).map_err(tried("clearing up"))?;
        all += said;
    }
    site.umount(0)?;
    site.check()?;
    Ok(Verdict::Passed(format!("{rounds} kills, {all} lines and files all there")))
}

/// Starts a writer, and kills it; returns how many numbers it has printed.
fn kill_writer(site: &TestArena, program: &Path, directory: &str, kills_daemon: bool) -> Outcome<u64> {
    let mut child = Command::new(program)
        .arg(site.point(0))
        .arg(directory)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(tried("starting a writer"))?;
    let output = BufReader::new(child.stdout.take().ok_or("it has no output")?);
    let said = AtomicU64::new(0);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            for (expected, line) in (0..).zip(output.lines()) {
                let line = line.map_err(tried("reading what it says"))?;
                ensure!(line == expected.to_string(), "it says {line} in place of {expected}");
                said.store(expected + 1, Ordering::Relaxed);
            }
            Ok(())
        });
        let reaches = |wanted: u64| {
            eventually("the writer writes", SOON, || said.load(Ordering::Relaxed) >= wanted || reader.is_finished())
        };
        let mut done = reaches(SAID_MIN);
        if kills_daemon {
            done =
                done.and_then(|()| site.kill_daemon()).and_then(|()| reaches(said.load(Ordering::Relaxed) + SAID_MIN));
        }
        let ended = child.try_wait().map_err(tried("looking at the writer"));
        // It is not reaped yet, so its number is still its own. If it is gone already, an earlier check has reported
        // that.
        let _ = child.kill();
        let _ = child.wait();
        reader.join().map_err(|_| "the reader came to harm")??;
        done?;
        ensure!(ended?.is_none(), "the writer has ended by itself");
        Ok(said.load(Ordering::Relaxed))
    })
}

/// All printed numbers stand in the journal, and in their files.
fn check_written(directory: &Path, said: u64) -> Outcome {
    let journal = fs::read_to_string(directory.join("journal")).map_err(tried("reading the journal"))?;
    let whole = journal.ends_with('\n')
        && (0..).zip(journal.lines()).all(|(number, line): (u64, _)| line == number.to_string());
    ensure!(whole, "the journal is not what was appended");
    let lines = journal.lines().count() as u64;
    // One more may have been under way.
    ensure!(lines == said || lines == said + 1, "{said} lines were said, {lines} are there");
    for slot in 0..said.min(1000) {
        let text =
            fs::read_to_string(directory.join(slot.to_string())).map_err(tried(format!("reading file {slot}")))?;
        let found: u64 = text.trim_end().parse().map_err(tried(format!("file {slot} reads {text}")))?;
        let expected = (said - 1 - slot) / 1000 * 1000 + slot;
        // The one under way may have been put in place.
        ensure!(found == expected || found == said && said % 1000 == slot, "file {slot} holds {found}, not {expected}");
    }
    Ok(())
}
