//! Faults and their messages to a program under `ashlar run` and to its user.
//!
//! The table in `docs/interception.md` lists them.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use ashlar_tests::command::{Done, ashlar, eventually, is_alive, kill, parent, program, run, signal, wait};
use ashlar_tests::harness::{Test, Verdict, passed, when_mountable};
use ashlar_tests::mount::{Front, Medium, TestArena};
use ashlar_tests::{Outcome, ensure, tried};
use ashlar_types::VersionRange;
use ashlar_wire::{
    Acceptor, Connection, DEFER_VARIABLE, Listener, PATIENCE_VARIABLE, Reply, Request, SessionKind, socket_of,
};
use rustix::process::Signal;

/// The tests of this group.
pub const TESTS: &[Test] = &[
    Test { name: "run/program_without_mount_runs_unchanged", run: || when_mountable(nothing_mounted) },
    Test { name: "run/missing_or_unreadable_library_is_named", run: || when_mountable(no_library) },
    Test { name: "run/daemon_of_other_version_leaves_programs_to_the_kernel", run: || when_mountable(other_version) },
    Test { name: "run/program_gets_errors_in_time_if_sharedfs_is_gone", run: || when_mountable(gone) },
    Test { name: "run/program_gets_errors_in_time_if_sharedfs_is_stopped", run: || when_mountable(stopped) },
    Test { name: "run/closing_all_numbers_keeps_the_librarys", run: || when_mountable(closed) },
    Test { name: "run/mount_within_stopped_mount_delays_no_program", run: || when_mountable(within_stopped) },
    Test { name: "run/full_arena_gives_enospc_and_program_continues", run: || when_mountable(full) },
    Test { name: "run/program_continues_without_its_mount", run: || when_mountable(unmounted) },
    Test { name: "run/program_beside_dead_mount_gets_kernel_errors", run: || when_mountable(dead) },
    Test { name: "programs/flock_survives_close_of_earlier_file", run: || when_mountable(flock) },
];

/// How long calls wait for SharedFS here, in seconds, instead of two minutes.
const PATIENCE: u64 = 3;
/// Extra time that a call may take on a machine with much other work.
const SLACK: Duration = Duration::from_secs(4);
const SOON: Duration = Duration::from_secs(30);
/// The block size of `ordered_calls.py`.
const BLOCK_BYTES: usize = 1 << 16;
/// The user `nobody`.
const USER: &str = "65534";
/// Blocks that a program writes beforehand: then its log has room, and some to spare.
const BEFORE: usize = 40;
const TERMINAL: &str = include_str!("../../../../jobs/terminal.py");

/// A command whose standard error is a terminal, as if a person were watching; its messages go to `said`. If it hangs,
/// it is killed.
fn on_terminal(command: &Command, said: &Path) -> Command {
    let mut outer = Command::new("timeout");
    outer.args(["--kill-after=1", "100", "python3", "-c", TERMINAL]).arg(said).arg(command.get_program());
    outer.args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => outer.env(name, value),
            None => outer.env_remove(name),
        };
    }
    if let Some(directory) = command.get_current_dir() {
        outer.current_dir(directory);
    }
    outer
}

fn messages(said: &Path) -> String {
    fs::read_to_string(said).unwrap_or_default().replace('\r', "")
}

/// A test arena whose mount has little patience.
fn mount_with_little_patience() -> Outcome<TestArena> {
    let site = TestArena::new(Medium::Memory, "64M")?;
    fs::create_dir(site.point(0)).map_err(tried("making a directory"))?;
    let mut mount = ashlar(&["mount", "--size", "64M", "--arena"]);
    mount.arg(site.arena()).arg(site.point(0)).env(PATIENCE_VARIABLE, PATIENCE.to_string());
    run(&mut mount)?.success()?;
    Ok(site)
}

/// `ordered_calls.py` under `ashlar run`, at a terminal.
struct ObedientProgram {
    child: Child,
    input: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
    said: PathBuf,
}

impl ObedientProgram {
    fn start(site: &TestArena) -> Outcome<Self> {
        let said = site.outside().join("said");
        let mut command = Front::RunAtOnce.command("python3");
        command.args(["-c", include_str!("../../../../jobs/ordered_calls.py")]).arg(site.point(0));
        command.env(PATIENCE_VARIABLE, PATIENCE.to_string());
        let mut command = on_terminal(&command, &said);
        let mut child =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().map_err(tried("starting a program"))?;
        let (input, output) = (child.stdin.take(), child.stdout.take().ok_or("it has no output")?);
        let mut program = Self { child, input, answers: BufReader::new(output), said };
        let line = program.line()?;
        ensure!(line == "ready", "it begins with '{line}'");
        Ok(program)
    }

    fn line(&mut self) -> Outcome<String> {
        let mut line = String::new();
        self.answers.read_line(&mut line).map_err(tried("waiting for the program"))?;
        ensure!(!line.is_empty(), "the program has ended: {}", messages(&self.said));
        Ok(line.trim_end().to_owned())
    }

    /// Gives it an order; returns its answer, and how long it took.
    fn ask(&mut self, what: &str) -> Outcome<(String, Duration)> {
        let input = self.input.as_mut().ok_or("it has no input any more")?;
        writeln!(input, "{what}").map_err(tried("telling the program what to do"))?;
        let line = self.line()?;
        let (seconds, answer) = line.split_once(' ').ok_or_else(|| format!("it answers '{line}'"))?;
        let seconds: f64 = seconds.parse().map_err(tried("a time"))?;
        Ok((answer.to_owned(), Duration::from_secs_f64(seconds)))
    }

    fn expect(&mut self, what: &str, answer: &str) -> Outcome {
        let (found, _) = self.ask(what)?;
        ensure!(found == answer, "'{what}' gives '{found}', not '{answer}': {}", messages(&self.said));
        Ok(())
    }

    /// Makes it append `more` blocks to its log, which then has `all`.
    fn write(&mut self, more: usize, all: usize) -> Outcome {
        self.expect(&format!("write {more}"), &format!("{all} written"))
    }

    /// Its messages to a person, once they contain all of these words.
    fn says(&self, words: &[&str]) -> Outcome {
        let has_all = || words.iter().all(|word| messages(&self.said).contains(word));
        eventually("it says why", SOON, has_all)
            .map_err(|error| format!("{error}: {words:?} in {}", messages(&self.said)))
    }

    fn end(&mut self) -> Outcome {
        drop(self.input.take());
        let status = wait(&mut self.child, SOON)?;
        ensure!(status.success(), "the program ended with {status}: {}", messages(&self.said));
        Ok(())
    }
}

impl Drop for ObedientProgram {
    fn drop(&mut self) {
        // The program ends with its input.
        drop(self.input.take());
        let _ = wait(&mut self.child, SOON);
    }
}

/// Checks the log of `ordered_calls.py` as a mount shows it: so many blocks, in their order.
fn check_log(path: &Path, blocks: usize) -> Outcome {
    let bytes = fs::read(path).map_err(tried("reading the log"))?;
    ensure!(bytes.len() == blocks * BLOCK_BYTES, "the log has {} bytes, not {blocks} blocks", bytes.len());
    for (number, block) in bytes.chunks(BLOCK_BYTES).enumerate() {
        let word = format!("{number:8}");
        let fits = block.chunks(word.len()).all(|found| found == word.as_bytes());
        ensure!(fits, "block {number} is not what was written");
    }
    Ok(())
}

/// The number of blocks in an answer to `write`.
fn parse_blocks(answer: &str) -> Outcome<usize> {
    let number = answer.split(' ').next().unwrap_or_default();
    number.parse().map_err(tried(format!("a number in '{answer}'")))
}

/// In a mount namespace of its own, without records of mounts.
fn nothing_mounted() -> Outcome<Verdict> {
    let directory = tempfile::tempdir().map_err(tried("making a directory"))?;
    let without = |words: &str| {
        let script = format!("mount -t tmpfs none /run && exec {} run {words}", program().display());
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", &script]).current_dir(directory.path());
        command
    };
    let words = "sh -c 'echo ran; echo x > file; exit 5'";
    let done = run(&mut without(words))?;
    ensure!(done.status.code() == Some(5) && done.output == "ran\n", "it does not run: {}", done.describe());
    ensure!(done.errors.is_empty(), "it prints a message without a terminal: {}", done.describe());
    let said = directory.path().join("said");
    let done = run(&mut on_terminal(&without(words), &said))?;
    ensure!(done.status.code() == Some(5) && done.output == "ran\n", "it does not run: {}", done.describe());
    let lines = messages(&said);
    ensure!(lines.lines().count() == 1, "a person gets more than one line:\n{lines}");
    for word in ["no Ashlar file system is mounted", "sh runs as it is", "ashlar mount DIR"] {
        ensure!(lines.contains(word), "a person gets no '{word}':\n{lines}");
    }
    let done = run(&mut without("--report-json -- sh -c 'exit 6'"))?;
    let report: serde_json::Value = serde_json::from_str(&done.errors).map_err(tried("reading the report"))?;
    ensure!(done.status.code() == Some(6) && report["accelerated"] == 0, "the report is wrong: {}", done.describe());
    passed()
}

fn no_library() -> Outcome<Verdict> {
    let directory = tempfile::tempdir().map_err(tried("making a directory"))?;
    let readable = fs::Permissions::from_mode(0o755);
    fs::set_permissions(directory.path(), readable).map_err(tried("opening the directory"))?;
    let copy = directory.path().join("ashlar");
    for file in ["ashlar", "ashlar-main"] {
        fs::copy(program().with_file_name(file), directory.path().join(file)).map_err(tried("copying the command"))?;
    }
    let as_nobody = || {
        let mut command = Command::new("setpriv");
        command.arg(format!("--reuid={USER}")).arg(format!("--regid={USER}")).arg("--clear-groups");
        run(command.arg(&copy).args(["run", "echo", "it ran"]))
    };
    as_nobody()?.failure(1, &["there is no library", "libashlar_preload.so", "make build"])?;
    let library = directory.path().join("libashlar_preload.so");
    fs::copy(program().with_file_name("libashlar_preload.so"), &library).map_err(tried("copying the library"))?;
    let hidden = fs::Permissions::from_mode(0o700);
    fs::set_permissions(&library, hidden).map_err(tried("hiding the library"))?;
    let done = as_nobody()?.failure(1, &["libashlar_preload.so", "can't be read", "Permission denied", "chmod a+r"])?;
    ensure!(done.output.is_empty(), "the program ran all the same: {}", done.describe());
    let shown = fs::Permissions::from_mode(0o644);
    fs::set_permissions(&library, shown).map_err(tried("showing the library"))?;
    let done = as_nobody()?.success()?;
    ensure!(done.output == "it ran\n" && done.errors.is_empty(), "{}", done.describe());
    passed()
}

/// Relays between programs and SharedFS with the version number of a later release; all other bytes pass unchanged.
fn relay(acceptor: Acceptor, daemon: PathBuf) {
    while let Ok(mut near) = acceptor.accept() {
        let daemon = daemon.clone();
        std::thread::spawn(move || -> Result<(), ashlar_wire::WireError> {
            let mut far = Connection::connect(&daemon)?;
            loop {
                let (mut request, descriptors) = near.receive::<Request>()?;
                if let Request::Hello(hello) = &mut request {
                    let later = hello.versions.current + u32::from(hello.kind == SessionKind::Process);
                    hello.versions = VersionRange::new(later, later);
                }
                let descriptors: Vec<_> = descriptors.iter().map(std::os::fd::AsFd::as_fd).collect();
                let (reply, descriptors) = far.call::<_, Reply>(&request, &descriptors)?;
                let descriptors: Vec<_> = descriptors.iter().map(std::os::fd::AsFd::as_fd).collect();
                near.send(&reply, &descriptors)?;
            }
        });
    }
}

fn other_version() -> Outcome<Verdict> {
    let site = TestArena::mounted(Medium::Memory, "64M")?;
    let (socket, aside) = (socket_of(site.arena()), site.arena().join("socket.aside"));
    fs::rename(&socket, &aside).map_err(tried("moving the socket aside"))?;
    let listener = Listener::bind(&socket).map_err(tried("listening in the daemon's place"))?;
    let acceptor = listener.acceptor();
    let daemon = aside.clone();
    std::thread::spawn(move || relay(acceptor, daemon));
    let script = "for n in 1 2 3; do echo $n >> file; done; cat file; mkdir directory; mv file directory";
    let run_at = |said: Option<&Path>| {
        let mut command = Front::RunAtOnce.command("sh");
        command.args(["-euc", script]).current_dir(site.point(0));
        match said {
            Some(said) => run(&mut on_terminal(&command, said)),
            None => run(&mut command),
        }
    };
    let said = site.outside().join("said");
    let outcome = run_at(Some(&said)).and_then(Done::success);
    fs::remove_dir_all(site.point(0).join("directory")).map_err(tried("removing what it made"))?;
    let quiet = run_at(None).and_then(Done::success);
    // Also if the session begins only after some calls.
    let said_later = site.outside().join("said.later");
    let mut later = Front::Run.command("head");
    later.args(["-c0"]).arg(site.point(0).join("directory/file")).env(DEFER_VARIABLE, "1");
    let later = run(&mut on_terminal(&later, &said_later)).and_then(Done::success);
    fs::rename(&aside, &socket).map_err(tried("moving the socket back"))?;
    let lines = messages(&said);
    ensure!(outcome?.output == "1\n2\n3\n", "the program does not work: {lines}");
    let point = site.point(0).display().to_string();
    for word in [&point, "is served by the kernel", "protocol version", "use the same release on both sides"] {
        ensure!(lines.contains(word), "a person gets no '{word}':\n{lines}");
    }
    later?;
    let times = messages(&said_later).matches("is served by the kernel").count();
    ensure!(times == 1, "a person gets the message {times} times:\n{}", messages(&said_later));
    let quiet = quiet?;
    ensure!(quiet.errors.is_empty(), "it prints a message without a terminal: {}", quiet.describe());
    let text = fs::read_to_string(site.point(0).join("directory/file")).map_err(tried("reading what it wrote"))?;
    ensure!(text == "1\n2\n3\n", "it wrote '{text}'");
    // With the daemon of its own version it is served again.
    let again = run(Front::RunAtOnce.command("cat").arg(site.point(0).join("directory/file")))?.success()?;
    ensure!(again.output == text, "{}", again.describe());
    site.check()?;
    site.umount(0)?;
    passed()
}

/// Files that no session but the mount's knows.
fn make_unknown(site: &TestArena, names: &[&str]) -> Outcome {
    names.iter().try_for_each(|name| {
        fs::write(site.point(0).join(name), format!("content of {name}")).map_err(tried(format!("making {name}")))
    })
}

/// A call that needs SharedFS while it is away.
fn check_refused(program: &mut ObedientProgram, what: &str) -> Outcome<Duration> {
    let (answer, took) = program.ask(what)?;
    ensure!(answer.ends_with("Input/output error"), "'{what}' gives '{answer}'");
    let most = Duration::from_secs(PATIENCE) + SLACK;
    ensure!(took < most, "'{what}' was refused only after {took:?}");
    Ok(took)
}

/// A new program while SharedFS is away: it has no session, and the mount does what it can. Every answer comes in time.
fn check_new_program(site: &TestArena) -> Outcome<String> {
    let said = site.outside().join("said.new");
    let mut command = Front::RunAtOnce.command("cat");
    command.arg(site.point(0).join("third")).env(PATIENCE_VARIABLE, PATIENCE.to_string());
    let began = Instant::now();
    let done = run(&mut on_terminal(&command, &said))?;
    let most = Duration::from_secs(2 * PATIENCE) + SLACK;
    ensure!(began.elapsed() < most, "a new program took {:?}: {}", began.elapsed(), done.describe());
    let lines = messages(&said);
    let is_served = done.status.success() && done.output == "content of third";
    ensure!(is_served || lines.contains("Input/output error"), "a new program: {lines}{}", done.describe());
    ensure!(lines.contains("is served by the kernel"), "the message does not say that the kernel serves it: {lines}");
    Ok(lines)
}

/// SharedFS and its supervisor are killed, so that no process starts SharedFS again.
fn gone() -> Outcome<Verdict> {
    let site = mount_with_little_patience()?;
    make_unknown(&site, &["first", "second", "third", "fourth"])?;
    let mut program = ObedientProgram::start(&site)?;
    program.write(BEFORE, BEFORE)?;
    let daemon = site.daemon()?;
    for process in parent(daemon).into_iter().chain([daemon]) {
        kill(process)?;
        eventually("it is dead", SOON, || !is_alive(process))?;
    }
    // The fast path needs no other process.
    program.write(2, BEFORE + 2)?;
    let first = check_refused(&mut program, "read first")?;
    ensure!(first >= Duration::from_secs(PATIENCE), "SharedFS was waited for only {first:?}");
    program.says(&["does not answer", "for 3 seconds", "I/O error", "ashlar status", "ashlar daemon"])?;
    let second = check_refused(&mut program, "read second")?;
    ensure!(second < Duration::from_secs(PATIENCE), "a SharedFS that is known to be gone was waited for: {second:?}");
    program.write(1, BEFORE + 3)?;
    let lines = check_new_program(&site)?;
    ensure!(lines.contains("no ashlar daemon answers"), "the message does not say why: {lines}");
    // Another mount starts SharedFS again.
    site.mount(1)?;
    eventually("the program is served again", SOON, || {
        program.ask("read first").is_ok_and(|(answer, _)| answer == "content of first")
    })?;
    program.says(&["answers again"])?;
    program.write(1, BEFORE + 4)?;
    let again = run(Front::RunAtOnce.command("cat").arg(site.point(1).join("second")))?.success()?;
    ensure!(again.output == "content of second", "a new program reads {}", again.describe());
    let lines = messages(&program.said);
    ensure!(
        lines.lines().count() == 3,
        "a person gets other messages than that it waits, fails, and is over:\n{lines}"
    );
    program.end()?;
    check_log(&site.point(0).join("log"), BEFORE + 4)?;
    site.check()?;
    site.umount(1)?;
    site.umount(0)?;
    Ok(Verdict::Passed(format!("refused after {:.1} s, then after {:.1} s", first.as_secs_f64(), second.as_secs_f64())))
}

/// A program closes all possible numbers. Before, its session has opened a data segment after its begin, and has
/// resumed with another SharedFS.
fn closed() -> Outcome<Verdict> {
    const LENGTH: usize = 80 << 20;
    let site = mount_with_little_patience()?;
    make_unknown(&site, &["first", "second", "third"])?;
    let mut program = ObedientProgram::start(&site)?;
    program.expect("read first", "content of first")?;
    let (at_first, _) = program.ask("numbers 900")?;
    // More than fits into the first segment.
    site.ashlar(&["arena", "resize", "192M"])?.success()?;
    fs::write(site.point(0).join("long"), vec![1; LENGTH]).map_err(tried("writing a long file"))?;
    kill(site.daemon()?)?;
    program.expect("length long", &format!("{LENGTH} bytes"))?;
    let (before, _) = program.ask("numbers 900")?;
    ensure!(before != at_first, "no segment was opened: there are still {before}");
    program.expect("close 3", "closed")?;
    program.expect("numbers 900", &before)?;
    program.expect("read third", "content of third")?;
    program.expect("make fourth", "made")?;
    program.expect("length long", &format!("{LENGTH} bytes"))?;
    program.expect("numbers 900", &before)?;
    program.end()?;
    site.check()?;
    site.umount(0)?;
    Ok(Verdict::Passed(format!("{at_first} at first, {before} when all were closed")))
}

/// SharedFS is stopped while a program writes as much as its log holds, and more.
fn stopped() -> Outcome<Verdict> {
    let site = mount_with_little_patience()?;
    make_unknown(&site, &["first", "second", "third"])?;
    let mut program = ObedientProgram::start(&site)?;
    program.write(BEFORE, BEFORE)?;
    let daemon = site.daemon()?;
    signal(daemon, Signal::STOP)?;
    let outcome = while_stopped(&site, &mut program);
    signal(daemon, Signal::CONT)?;
    let acknowledged = outcome?;
    eventually("the program is served again", SOON, || {
        program.ask("read first").is_ok_and(|(answer, _)| answer == "content of first")
    })?;
    program.write(4, acknowledged + 4)?;
    program.says(&["answers again"])?;
    program.end()?;
    check_log(&site.point(0).join("log"), acknowledged + 4)?;
    site.mount(1)?;
    check_log(&site.point(1).join("log"), acknowledged + 4)?;
    site.check()?;
    site.umount(1)?;
    site.umount(0)?;
    Ok(Verdict::Passed(format!("{} KiB were written meanwhile", ((acknowledged - BEFORE) * BLOCK_BYTES) >> 10)))
}

/// Returns how many blocks were written.
fn while_stopped(site: &TestArena, program: &mut ObedientProgram) -> Outcome<usize> {
    std::thread::scope(|scope| {
        // `ashlar status` does not wait either.
        let status = scope.spawn(|| site.ashlar(&["status"]));
        let (answer, took) = program.ask("write 10000")?;
        ensure!(answer.ends_with("Input/output error"), "a log without an end: '{answer}'");
        let most = Duration::from_secs(PATIENCE) + SLACK + SLACK;
        ensure!(took < most, "it took {took:?} until the log was full and a write refused");
        let acknowledged = parse_blocks(&answer)?;
        ensure!(acknowledged > BEFORE + 10, "only {acknowledged} blocks fitted into the log");
        program.says(&["does not answer", "for 3 seconds", "I/O error"])?;
        check_refused(program, "read second")?;
        let lines = check_new_program(site)?;
        ensure!(lines.contains("does not answer"), "the message does not say why: {lines}");
        // A refused write stays refused: none of it comes later.
        let (answer, _) = program.ask("write 1")?;
        ensure!(parse_blocks(&answer)? == acknowledged, "a write was taken by a log that is full: '{answer}'");
        let status = status.join().map_err(|_| "a thread has panicked".to_owned())??;
        status.failure(1, &["does not answer", "kill -CONT"])?;
        Ok(acknowledged)
    })
}

/// A program searches for mounts before it begins, and must not search a file system that does not answer.
fn within_stopped() -> Outcome<Verdict> {
    let (outer, inner) = (TestArena::mounted(Medium::Memory, "64M")?, TestArena::new(Medium::Memory, "64M")?);
    let point = outer.point(0).join("inner");
    fs::create_dir(&point).map_err(tried("making a directory"))?;
    let mut mount = ashlar(&["mount", "--size", "64M", "--arena"]);
    run(mount.arg(inner.arena()).arg(&point))?.success()?;
    let processes = outer.mount_processes()?;
    processes.iter().try_for_each(|&process| signal(process, Signal::STOP))?;
    // By then the kernel's knowledge of the path has expired.
    std::thread::sleep(Duration::from_secs(2));
    let began = Instant::now();
    let mut waiting = Command::new("timeout");
    waiting.args(["--kill-after=1", "20"]).arg(program()).args(["run", "echo", "done"]);
    let done = run(&mut waiting);
    let took = began.elapsed();
    processes.iter().try_for_each(|&process| signal(process, Signal::CONT))?;
    let done = done?.success()?;
    ensure!(done.output == "done\n" && took < SLACK, "after {took:?}: {}", done.describe());
    run(ashlar(&["umount"]).arg(&point))?.success()?;
    outer.umount(0)?;
    passed()
}

fn full() -> Outcome<Verdict> {
    let site = TestArena::mounted(Medium::Memory, "64M")?;
    let mut command = Front::RunAtOnce.command("python3");
    command.args(["-c", include_str!("../../../../jobs/fill_arena.py")]).current_dir(site.point(0));
    let done = run(&mut command)?.success()?;
    let expected = "No space left on device\nNo space left on device\ngoes on\n";
    ensure!(done.output == expected, "it says {}", done.describe());
    let names = fs::read_dir(site.point(0)).map_err(tried("listing"))?.flatten().map(|entry| entry.path());
    for path in names {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let text = fs::read(&path).map_err(tried(format!("reading {name}")))?;
        let fits = text.len() == 1 << 20 && text.chunks(16).all(|part| part == format!("{name:16}").as_bytes());
        ensure!(fits, "{name} is not what was written");
    }
    site.check()?;
    site.umount(0)?;
    site.check()?;
    passed()
}

/// The kernel still shows the mount, but no process serves it. A session would work only until an open file must be
/// handed over to the kernel. So the program gets no session, and keeps all descriptors for itself.
fn dead() -> Outcome<Verdict> {
    const SCRIPT: &str = "import os, resource, subprocess, sys\n\
        for process in sys.argv[2:]: os.kill(int(process), 9)\n\
        cat = lambda: subprocess.run(['cat', sys.argv[1]], capture_output=True, text=True)\n\
        while not (done := cat()).stderr: pass\n\
        assert not os.path.exists(sys.argv[1])\n\
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n\
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))\n\
        all = [os.open('/dev/null', os.O_RDONLY) for _ in range(1100)]\n\
        for number in all: os.close(number)\n\
        print(done.stderr.strip(), done.stdout)";
    let site = TestArena::mounted(Medium::Memory, "64M")?;
    let file = site.point(0).join("file");
    fs::write(&file, "what was there").map_err(tried("writing"))?;
    let mut command = Front::RunAtOnce.command("python3");
    command.args(["-c", SCRIPT]).arg(&file);
    command.args(site.mount_processes()?.iter().map(ToString::to_string));
    let done = run(&mut command)?.success()?;
    ensure!(done.output.trim().ends_with("Transport endpoint is not connected"), "it says {}", done.describe());
    site.mount(0)?;
    let text = run(Front::RunAtOnce.command("cat").arg(&file))?.success()?.output;
    ensure!(text == "what was there", "it is mounted again, and the file reads {text}");
    site.umount(0)?;
    passed()
}

fn unmounted() -> Outcome<Verdict> {
    let site = TestArena::mounted(Medium::Memory, "64M")?;
    let mut program = ObedientProgram::start(&site)?;
    program.expect("write 2", "2 written")?;
    // A mount in use stays.
    let refused = run(ashlar(&["umount"]).arg(site.point(0)))?;
    refused.failure(1, &["busy", "python3", "--lazy"])?;
    program.expect("make there", "made")?;
    // The process behind it is killed: calls that bypass the kernel continue.
    site.kill_mounts()?;
    program.expect("write 2", "4 written")?;
    program.expect("make meanwhile", "made")?;
    site.mount(0)?;
    check_log(&site.point(0).join("log"), 4)?;
    let names = |path: PathBuf| {
        let mut names: Vec<_> =
            fs::read_dir(path)?.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect();
        names.sort();
        Ok::<_, std::io::Error>(names)
    };
    let found = names(site.point(0)).map_err(tried("listing"))?;
    ensure!(found == ["log", "meanwhile", "there"], "the new mount shows {found:?}");
    program.expect("write 1", "5 written")?;
    program.expect("make again", "made")?;
    // The mount leaves the tree: its path leads elsewhere now, and open files stay open.
    run(ashlar(&["umount", "--lazy"]).arg(site.point(0)))?.success()?;
    program.expect("write 1", "6 written")?;
    let mut turn = 0;
    eventually("the path leads to what lies beneath", SOON, || {
        turn += 1;
        program.ask(&format!("make outside-{turn}")).is_ok_and(|(answer, _)| answer == "made")
            && site.point(0).join(format!("outside-{turn}")).exists()
    })?;
    program.expect("write 1", "7 written")?;
    program.expect("read log", "No such file or directory")?;
    program.end()?;
    eventually("the mount has ended", SOON, || {
        site.mount_processes().is_ok_and(|processes| processes.is_empty()) || site.daemon().is_err()
    })?;
    for turn in 1..=turn {
        // Files from before the program noticed are in the arena.
        let _ = fs::remove_file(site.point(0).join(format!("outside-{turn}")));
    }
    site.mount(0)?;
    check_log(&site.point(0).join("log"), 7)?;
    site.check()?;
    site.umount(0)?;
    passed()
}

/// The kernel names the owner of a flock by the address of the open file, and reports a file's end only afterwards. By
/// then the next file may have the same address, and its lock ended with the other's.
fn flock() -> Outcome<Verdict> {
    let site = TestArena::mounted(Medium::Memory, "64M")?;
    let script = include_str!("../../../../jobs/flock_holders.py");
    let done = run(Command::new("python3").args(["-c", script, "4", "1000"]).current_dir(site.point(0)))?.success()?;
    ensure!(done.output == "0 met another\n", "under the lock {}", done.output);
    File::open(site.point(0).join("locked")).map_err(tried("opening the file"))?;
    site.umount(0)?;
    passed()
}
