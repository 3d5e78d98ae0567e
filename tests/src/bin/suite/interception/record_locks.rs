//! Record locks of programs: LibFS serves some files, the kernel others.
//!
//! `locker.c` locks by order, with LibFS in its process or through a mount. Its answers must not depend on that.

use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use ashlar_tests::command::{call, run, signal};
use ashlar_tests::harness::{Test, Verdict, passed};
use ashlar_tests::mount::{Front, Medium, TestArena, obstacle};
use ashlar_tests::random::Random;
use ashlar_tests::reference::Reference;
use ashlar_tests::{Outcome, ensure, number, tried};
use ashlar_wire::{LOCK_SLOTS, PATIENCE_VARIABLE};
use rustix::process::Signal;

/// The tests of this group.
pub const TESTS: &[Test] = &[
    Test { name: "run/record_locks_answer_as_the_kernel", run: || when_mountable(same) },
    Test { name: "run/record_locks_exclude_in_every_pairing", run: || when_mountable(exclude) },
    Test { name: "run/uncontended_record_locks_cost_no_message", run: || when_mountable(cheap) },
    Test { name: "run/record_locks_hold_in_many_files_and_ranges", run: || when_mountable(many) },
    Test { name: "run/record_locks_end_with_their_process", run: || when_mountable(dead) },
    Test { name: "run/record_locks_of_stopped_process_delay_only_waiters", run: || when_mountable(stopped) },
    Test { name: "run/record_locks_end_at_any_close", run: || when_mountable(closes) },
    Test { name: "run/record_locks_keep_access_modes_of_files", run: || when_mountable(opened) },
    Test { name: "run/record_locks_survive_exec", run: || when_mountable(executes) },
    Test { name: "run/record_locks_can_be_waited_for", run: || when_mountable(waits) },
    Test { name: "run/record_lock_wait_continues_in_the_kernel", run: || when_mountable(moves) },
    Test { name: "run/record_lock_wait_needs_no_slot", run: || when_mountable(crowded) },
    Test { name: "run/abandoned_record_lock_ends_with_the_file", run: || when_mountable(gives_up) },
    Test { name: "run/abandoned_record_lock_ends_with_a_later_close", run: || when_mountable(gives_up_twice) },
    Test { name: "run/record_locks_outlive_sharedfs", run: || when_mountable(restarts) },
    Test { name: "run/record_locks_keep_a_counter_right", run: || when_mountable(counts) },
    Test { name: "run/sqlite_writers_work_in_both_ways", run: || when_mountable(databases) },
    Test { name: "run/record_locks_are_counted_in_reports", run: || when_mountable(reported) },
];

/// The two ways to the files: that of the first process, and that of the second.
const WAYS: [(Front, Front); 3] =
    [(Front::RunAtOnce, Front::RunAtOnce), (Front::RunAtOnce, Front::Mount), (Front::Mount, Front::RunAtOnce)];
/// Longer than a file must be quiet before its locks are delegated again.
const QUIET: Duration = Duration::from_millis(150);
/// The limit for calls that need no stopped process.
const AT_ONCE: Duration = Duration::from_secs(2);

fn when_mountable(test: fn(&TestArena, &Path) -> Outcome<Verdict>) -> Outcome<Verdict> {
    if let Some(why) = obstacle() {
        return Ok(Verdict::Skipped(why));
    }
    let site = TestArena::mounted(Medium::Memory, "64M")?;
    let source = site.outside().join("locker.c");
    let program = site.outside().join("locker");
    std::fs::write(&source, include_str!("../../../../jobs/locker.c")).map_err(tried("writing a program"))?;
    let compiled = Command::new("gcc").args(["-O2", "-pthread", "-o"]).arg(&program).arg(&source).output();
    match compiled {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            return Ok(Verdict::Skipped("there is no gcc".into()));
        }
        Err(error) => return Err(format!("gcc: {error}")),
        Ok(done) => ensure!(done.status.success(), "gcc: {}", String::from_utf8_lossy(&done.stderr)),
    }
    let verdict = test(&site, &program)?;
    site.check()?;
    site.umount(0)?;
    Ok(verdict)
}

/// The program `locker.c`, at work in a directory.
struct Locker {
    child: Child,
    input: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
    front: Front,
}

impl Locker {
    fn start(program: &Path, front: Front, directory: &Path) -> Outcome<Self> {
        Self::start_with(program, front, directory, Stdio::null())
    }

    /// Starts it with standard error of the caller's choice.
    fn start_with(program: &Path, front: Front, directory: &Path, errors: Stdio) -> Outcome<Self> {
        Self::start_as(program, (front, &[]), directory, errors)
    }

    /// Starts it with variables in its environment.
    fn start_as(
        program: &Path,
        (front, variables): (Front, &[(&str, &str)]),
        directory: &Path,
        errors: Stdio,
    ) -> Outcome<Self> {
        let mut command = front.command(program);
        command.envs(variables.iter().copied());
        command.current_dir(directory).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(errors);
        let mut child = command.spawn().map_err(tried("starting a program"))?;
        let (input, output) = (child.stdin.take(), child.stdout.take().ok_or("it has no output")?);
        let mut locker = Self { child, input, answers: BufReader::new(output), front };
        locker.expect_line("ready 1")?;
        Ok(locker)
    }

    fn send(&mut self, what: &str) -> Outcome {
        let input = self.input.as_mut().ok_or("it has no input any more")?;
        writeln!(input, "{what}").map_err(tried("telling a program what to do"))
    }

    fn receive(&mut self) -> Outcome<String> {
        let mut line = String::new();
        self.answers.read_line(&mut line).map_err(tried("waiting for a program"))?;
        ensure!(!line.is_empty(), "a program ({:?}) has ended", self.front);
        Ok(line.trim_end().to_owned())
    }

    fn expect_line(&mut self, answer: &str) -> Outcome {
        let found = self.receive()?;
        ensure!(found == answer, "{:?}: '{found}', not '{answer}'", self.front);
        Ok(())
    }

    fn ask(&mut self, what: &str) -> Outcome<String> {
        self.send(what)?;
        self.receive()
    }

    fn expect(&mut self, what: &str, answer: &str) -> Outcome {
        let found = self.ask(what)?;
        ensure!(found == answer, "{:?}: '{what}' gives '{found}', not '{answer}'", self.front);
        Ok(())
    }

    /// Opens a file; returns its number.
    fn open(&mut self, flags: &str, name: &str) -> Outcome<i32> {
        let number = self.ask(&format!("open {flags} {name}"))?;
        number.parse().ok().filter(|&number| number >= 0).ok_or_else(|| format!("opening {name} gives {number}"))
    }

    fn pid(&mut self) -> Outcome<u32> {
        self.ask("pid")?.parse().map_err(tried("a process's number"))
    }

    fn signal(&mut self, signal: Signal) -> Outcome {
        ashlar_tests::command::signal(self.pid()?, signal)
    }

    /// Waits until it has ended.
    fn reap(&mut self) -> Outcome {
        self.child.wait().map(drop).map_err(tried("waiting for a program's end"))
    }
}

impl Drop for Locker {
    fn drop(&mut self) {
        // If a failed test has left it waiting, nothing else ends it.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Starts two lockers.
fn start_pair(site: &TestArena, program: &Path, (first, second): (Front, Front)) -> Outcome<(Locker, Locker)> {
    let point = site.point(0);
    Ok((Locker::start(program, first, &point)?, Locker::start(program, second, &point)?))
}

/// The answers of two programs that make random lock operations without waiting.
fn random_answers(program: &Path, seed: u64, directory: &Path, fronts: (Front, Front)) -> Outcome<String> {
    const STEPS: u32 = 400;
    let mut random = Random::new(seed);
    let mut both = [Locker::start(program, fronts.0, directory)?, Locker::start(program, fronts.1, directory)?];
    let pids = [both[0].pid()?, both[1].pid()?];
    for locker in &mut both {
        for name in ["one", "two"] {
            for flags in ["bc", "b", "r", "w"] {
                locker.open(flags, name)?;
            }
        }
        locker.expect("size 3 50", "done")?;
    }
    let mut said = String::new();
    for step in 0..STEPS {
        let locker = &mut both[random.below(2) as usize];
        let file = 3 + random.below(8);
        let kind = random.pick(&["r", "w", "w", "u", "z"]).copied().unwrap_or("u");
        let from = random.pick(&["s", "s", "s", "c", "e", "q"]).copied().unwrap_or("s");
        let start = i64::try_from(random.below(60)).unwrap_or(0) - 5;
        let length = i64::try_from(random.below(30)).unwrap_or(0) - 4;
        let (start, length) = if random.one_in(40) {
            (i64::MAX - 3, i64::try_from(random.below(9)).unwrap_or(0))
        } else {
            (start, length)
        };
        let what = match random.below(40) {
            0 => format!("close {file}"),
            1 => format!("over {} {file}", 3 + random.below(8)),
            2 => format!("seek {file} {}", random.below(40)),
            // When files are handed over to the kernel, LibFS's own descriptors may take low numbers.
            3 if seed % 3 != 1 => format!(
                "open {} {}",
                random.pick(&["b", "r", "w"]).unwrap_or(&"b"),
                random.pick(&["one", "two"]).unwrap_or(&"one")
            ),
            // These operations hand files over to the kernel.
            4 if seed % 3 == 1 => format!("child {file} {kind} {from} {start} {length}"),
            5 if seed % 3 == 1 => "spawn".to_owned(),
            5 if seed % 3 == 2 => format!("map {file}"),
            6..16 => format!("get {file} {kind} {from} {start} {length}"),
            _ => format!("set {file} {kind} {from} {start} {length}"),
        };
        let mut answer = locker.ask(&what)?;
        for (number, pid) in pids.iter().enumerate() {
            if answer.ends_with(&format!(" {pid}")) {
                answer = answer.replace(&format!(" {pid}"), &format!(" process {number}"));
            }
        }
        writeln!(said, "{step}: {what}: {answer}").map_err(tried("writing to memory"))?;
    }
    Ok(said)
}

/// Two programs get the same answers about locks here as on a file system of the kernel's.
fn same(site: &TestArena, program: &Path) -> Outcome<Verdict> {
    const SEEDS: u64 = 8;
    let reference = Reference::new(64)?;
    for seed in 0..SEEDS {
        for (number, fronts) in WAYS.into_iter().enumerate() {
            let name = format!("{seed}-{number}");
            let (there, here) = (reference.path().join(&name), site.point(0).join(&name));
            for directory in [&there, &here] {
                std::fs::create_dir(directory).map_err(tried("making a directory"))?;
            }
            let expected = random_answers(program, seed, &there, (Front::Mount, Front::Mount))?;
            let found = random_answers(program, seed, &here, fronts)?;
            for (expected, found) in expected.lines().zip(found.lines()) {
                ensure!(expected == found, "{fronts:?}, seed {seed}: '{found}', on the reference '{expected}'");
            }
        }
    }
    passed()
}

/// While one process has a lock, the other can't get it, and the answer names the holder. They take turns again and
/// again.
fn exclude(site: &TestArena, program: &Path) -> Outcome<Verdict> {
    for (number, fronts) in WAYS.into_iter().enumerate() {
        let (mut one, mut two) = start_pair(site, program, fronts)?;
        let name = format!("file{number}");
        let (file, same) = (one.open("bc", &name)?, two.open("bc", &name)?);
        let pids = (one.pid()?, two.pid()?);
        for _ in 0..3 {
            for is_first in [true, false] {
                let (holder, pid, other) =
                    if is_first { (&mut one, pids.0, &mut two) } else { (&mut two, pids.1, &mut one) };
                let (file, same) = if is_first { (file, same) } else { (same, file) };
                holder.expect(&format!("set {file} w s 10 10"), "done")?;
                holder.expect(&format!("set {file} r s 30 0"), "done")?;
                holder.expect(&format!("get {file} w s 0 0"), "free")?;
                other.expect(&format!("set {same} r s 19 1"), "EAGAIN")?;
                other.expect(&format!("get {same} r s 0 0"), &format!("w 10 10 {pid}"))?;
                other.expect(&format!("get {same} w s 20 0"), &format!("r 30 0 {pid}"))?;
                other.expect(&format!("set {same} w s 0 10"), "done")?;
                other.expect(&format!("set {same} r s 40 2"), "done")?;
                holder.expect(&format!("set {file} w s 40 2"), "EAGAIN")?;
                holder.expect(&format!("set {file} u s 0 0"), "done")?;
                other.expect(&format!("set {same} w s 10 100"), "done")?;
                other.expect(&format!("set {same} u s 0 0"), "done")?;
            }
            std::thread::sleep(QUIET);
        }
    }
    passed()
}

/// A process that has a file to itself locks it in its own memory. After another process has locked the file, that
/// returns.
fn cheap(site: &TestArena, program: &Path) -> Outcome<Verdict> {
    const CALLS: u64 = 20_000;
    let (mut one, mut two) = start_pair(site, program, (Front::RunAtOnce, Front::Mount))?;
    let (file, same) = (one.open("bc", "file")?, two.open("bc", "file")?);
    let mut times = Vec::new();
    for _ in 0..2 {
        // Delegated with the first of these, if the file has been quiet.
        one.expect(&format!("set {file} w s 0 1"), "done")?;
        let before = site.counter("requests")?;
        times.push(one.ask(&format!("time {file} {CALLS}"))?);
        let asked = site.counter("requests")? - before;
        ensure!(asked < CALLS / 100, "{CALLS} calls have taken {asked} requests");
        two.expect(&format!("set {same} w s 0 1"), "EAGAIN")?;
        let before = site.counter("requests")?;
        let time = one.ask(&format!("time {file} 100"))?;
        ensure!(time.parse::<u64>().is_ok(), "100 calls give {time}");
        let asked = site.counter("requests")? - before;
        ensure!(asked >= 100, "100 calls have taken {asked} requests though another one has just asked");
        std::thread::sleep(QUIET);
    }
    Ok(Verdict::Passed(format!("{} nanoseconds a call", times.join(", "))))
}

/// More ranges and more files than there is memory for: their locks exclude others all the same.
fn many(site: &TestArena, program: &Path) -> Outcome<Verdict> {
    const FILES: usize = 40;
    let (mut one, mut two) = start_pair(site, program, (Front::RunAtOnce, Front::RunAtOnce))?;
    for ranges in [14, 20, 31, 32, 200] {
        let (file, same) = (one.open("bc", "ranges")?, two.open("b", "ranges")?);
        for round in 0..2 {
            one.expect(&format!("many {file} {ranges}"), "done")?;
            let last = (ranges - 1) * 10;
            if round == 1 {
                site.kill_daemon()?;
            }
            two.expect(&format!("set {same} r s {} 1", last + 4), "EAGAIN")?;
            two.expect(&format!("set {same} r s {} 1", last + 5), "done")?;
            two.expect(&format!("set {same} u s 0 0"), "done")?;
            one.expect(&format!("set {file} u s 12 1"), "done")?;
            two.expect(&format!("set {same} w s 12 1"), "done")?;
            two.expect(&format!("set {same} w s 13 1"), "EAGAIN")?;
            two.expect(&format!("set {same} u s 0 0"), "done")?;
            one.expect(&format!("set {file} u s 0 0"), "done")?;
            two.expect(&format!("set {same} w s 0 0"), "done")?;
            two.expect(&format!("set {same} u s 0 0"), "done")?;
            if ranges != 200 {
                break;
            }
        }
        one.expect(&format!("close {file}"), "done")?;
        two.expect(&format!("close {same}"), "done")?;
    }
    let mut opened = Vec::new();
    for number in 0..FILES {
        opened.push((one.open("bc", &format!("file{number}"))?, two.open("b", &format!("file{number}"))?));
    }
    for (file, _) in &opened {
        one.expect(&format!("set {file} w s 3 4"), "done")?;
    }
    for (_, same) in &opened {
        two.expect(&format!("set {same} w s 0 0"), "EAGAIN")?;
    }
    for (file, same) in &opened {
        one.expect(&format!("close {file}"), "done")?;
        two.expect(&format!("set {same} w s 0 0"), "done")?;
    }
    passed()
}

/// A killed process's locks are gone as soon as its parent knows that it is dead. The same holds for a process that
/// ends.
fn dead(site: &TestArena, program: &Path) -> Outcome<Verdict> {
    for (number, fronts) in WAYS.into_iter().enumerate() {
        for is_killed in [true, false] {
            let (mut one, mut two) = start_pair(site, program, fronts)?;
            let name = format!("file{number}");
            let (file, same) = (one.open("bc", &name)?, two.open("bc", &name)?);
            one.expect(&format!("set {file} w s 0 0"), "done")?;
            two.expect(&format!("set {same} w s 0 0"), "EAGAIN")?;
            std::thread::sleep(QUIET);
            // Delegated, if possible.
            one.expect(&format!("set {file} w s 7 1"), "done")?;
            if is_killed {
                one.signal(Signal::KILL)?;
            } else {
                one.send("exit")?;
            }
            one.reap()?;
            two.expect(&format!("set {same} w s 0 0"), "done")?;
        }
    }
    passed()
}

/// A stopped process delays only processes that wait for its locks.
fn stopped(site: &TestArena, program: &Path) -> Outcome<Verdict> {
    for (number, fronts) in WAYS.into_iter().enumerate() {
        let (mut one, mut two) = start_pair(site, program, fronts)?;
        let name = format!("file{number}");
        let (file, same) = (one.open("bc", &name)?, two.open("bc", &name)?);
        one.expect(&format!("set {file} w s 0 10"), "done")?;
        let pid = one.pid()?;
        one.signal(Signal::STOP)?;
        let begun = Instant::now();
        two.expect(&format!("get {same} w s 0 0"), &format!("w 0 10 {pid}"))?;
        two.expect(&format!("set {same} w s 5 1"), "EAGAIN")?;
        two.expect(&format!("set {same} w s 10 1"), "done")?;
        ensure!(begun.elapsed() < AT_ONCE, "{fronts:?}: it took {:?}", begun.elapsed());
        two.send(&format!("wait {same} w s 0 0"))?;
        signal(pid, Signal::CONT)?;
        one.expect(&format!("set {file} u s 0 0"), "done")?;
        two.expect_line("done")?;
        one.expect(&format!("set {file} w s 0 10"), "EAGAIN")?;
    }
    passed()
}

/// If a process closes any descriptor of a file, whichever part of the process has it, its locks end.
fn closes(site: &TestArena, program: &Path) -> Outcome<Verdict> {
    let point = site.point(0);
    for ends in
        ["close", "dup", "other", "over", "map", "again", "beyond", "late", "spawned", "inherited", "path", "none"]
    {
        for front in [Front::Mount, Front::RunAtOnce] {
            let mut two = Locker::start(program, Front::RunAtOnce, &point)?;
            let same = two.open("bc", "file")?;
            let inherited = std::fs::File::open(point.join("file")).map_err(tried("opening the file"))?;
            let errors = if ends == "inherited" { Stdio::from(inherited) } else { Stdio::null() };
            let mut one = Locker::start_with(program, front, &point, errors)?;
            let file = one.open("bc", "file")?;
            one.expect(&format!("size {file} 4096"), "done")?;
            let other = one.open("r", "file")?;
            let elsewhere = one.open("bc", "elsewhere")?;
            let copy: i32 = one.ask(&format!("dup {file}"))?.parse().map_err(tried("a number"))?;
            if matches!(ends, "map" | "again" | "beyond") {
                one.expect(&format!("map {file}"), "done")?;
            }
            // The path leaves the mount and comes back: the kernel opens it.
            let mount = point.file_name().and_then(|name| name.to_str()).ok_or("the mount has no name")?;
            let place = one.open("p", &format!("../{mount}/file"))?;
            let twin: i32 = one.ask(&format!("dup {place}"))?.parse().map_err(tried("a number"))?;
            one.expect(&format!("set {file} w s 0 1"), "done")?;
            two.expect(&format!("set {same} w s 0 0"), "EAGAIN")?;
            one.expect(&format!("close {elsewhere}"), "done")?;
            two.expect(&format!("set {same} w s 0 0"), "EAGAIN")?;
            let closed = match ends {
                "close" | "map" => file,
                "again" => one.open("r", "file")?,
                "beyond" => {
                    let here = one.open("r", ".")?;
                    one.open("r", &format!("/proc/self/fd/{here}/file"))?
                }
                "dup" => copy,
                "other" => other,
                "late" => {
                    // The file is handed over to the kernel while it is locked.
                    one.expect(&format!("map {copy}"), "done")?;
                    two.expect(&format!("set {same} w s 0 0"), "EAGAIN")?;
                    other
                }
                "spawned" => {
                    one.expect("spawn", "done")?;
                    one.expect(&format!("child {file} r s 0 1"), "EAGAIN")?;
                    one.expect(&format!("set {other} r s 2 1"), "done")?;
                    two.expect(&format!("set {same} w s 0 1"), "EAGAIN")?;
                    copy
                }
                "inherited" => 2,
                // The descriptor names the file, and has not opened it.
                "path" => {
                    one.expect(&format!("close {place}"), "done")?;
                    two.expect(&format!("set {same} w s 0 0"), "EAGAIN")?;
                    twin
                }
                _ => -1,
            };
            if ends == "over" {
                let elsewhere = one.open("b", "elsewhere")?;
                one.expect(&format!("over {elsewhere} {other}"), &other.to_string())?;
            } else if closed >= 0 {
                one.expect(&format!("close {closed}"), "done")?;
            }
            let expected = if matches!(ends, "path" | "none") { "EAGAIN" } else { "done" };
            let found = two.ask(&format!("set {same} w s 0 0"))?;
            ensure!(found == expected, "{front:?}, closed '{ends}': another one gets '{found}', not '{expected}'");
        }
    }
    passed()
}

/// The kernel has a file's locks, and a read-only descriptor locked it. Another descriptor maps and writes it.
fn opened(site: &TestArena, program: &Path) -> Outcome<Verdict> {
    for front in [Front::Mount, Front::RunAtOnce] {
        let mut one = Locker::start(program, front, &site.point(0))?;
        let file = one.open("bc", "file")?;
        one.expect(&format!("size {file} 4096"), "done")?;
        one.expect(&format!("set {file} w s 0 1"), "done")?;
        one.expect(&format!("child {file} r s 0 1"), "EAGAIN")?;
        let reader = one.open("r", "file")?;
        one.expect(&format!("set {reader} r s 50 1"), "done")?;
        let writer = one.open("b", "file")?;
        one.expect(&format!("map {writer}"), "done")?;
        one.expect(&format!("size {writer} 8192"), "done")?;
        // The descriptor can only read, so it can't be mapped for writing.
        one.expect(&format!("map {reader}"), "EAGAIN")?;
    }
    passed()
}

/// A program that `execve` starts has the locks of the one before, unless that closes one of its descriptors. A child
/// has none.
fn executes(site: &TestArena, program: &Path) -> Outcome<Verdict> {
    for (number, fronts) in WAYS.into_iter().enumerate() {
        for (closes, maps, unlocks) in
            [(false, false, false), (true, false, false), (false, true, false), (false, false, true)]
        {
            let (mut one, mut two) = start_pair(site, program, fronts)?;
            let name = format!("file{number}");
            let (file, same) = (one.open("bc", &name)?, two.open("bc", &name)?);
            let pid = one.pid()?;
            if maps {
                one.expect(&format!("map {file}"), "done")?;
            }
            one.expect(&format!("set {file} w s 0 10"), "done")?;
            one.expect(&format!("set {file} r s 20 10"), "done")?;
            one.expect(&format!("child {file} w s 0 1"), "EAGAIN")?;
            one.expect("noexec", "done")?;
            two.expect(&format!("get {same} w s 0 0"), &format!("w 0 10 {pid}"))?;
            if closes {
                one.open("rx", &name)?;
            }
            // Another process that tries all the time finds no moment in between.
            one.send("exec")?;
            let begun = Instant::now();
            while !closes && begun.elapsed() < Duration::from_millis(200) {
                two.expect(&format!("set {same} w s 5 1"), "EAGAIN")?;
                two.expect(&format!("set {same} w s 25 1"), "EAGAIN")?;
            }
            one.expect_line("ready 2")?;
            if closes {
                two.expect(&format!("set {same} w s 0 0"), "done")?;
                continue;
            }
            two.expect(&format!("get {same} w s 0 0"), &format!("w 0 10 {pid}"))?;
            if unlocks {
                // A descriptor that the new program does not know ends them too.
                let more = one.open("b", &name)?;
                one.expect(&format!("set {more} u s 0 0"), "done")?;
                two.expect(&format!("set {same} w s 0 0"), "done")?;
                continue;
            }
            one.expect(&format!("get {file} w s 0 0"), "free")?;
            // The new program opens the file once more, and is the same process to it.
            let more = one.open("b", &name)?;
            one.expect(&format!("set {more} w s 0 15"), "done")?;
            two.expect(&format!("set {same} w s 14 1"), "EAGAIN")?;
            one.expect(&format!("set {file} u s 0 0"), "done")?;
            two.expect(&format!("set {same} w s 0 0"), "done")?;
            two.expect(&format!("set {same} u s 0 0"), "done")?;
            one.expect(&format!("set {file} w s 0 0"), "done")?;
            one.expect(&format!("close {more}"), "done")?;
            two.expect(&format!("set {same} w s 0 0"), "done")?;
        }
    }
    passed()
}

/// A waiting process gets the lock when it is free. Signals interrupt it, or it continues after them; and it is not let
/// into a circle.
fn waits(site: &TestArena, program: &Path) -> Outcome<Verdict> {
    for (number, fronts) in WAYS.into_iter().enumerate() {
        let (mut one, mut two) = start_pair(site, program, fronts)?;
        let (name, next) = (format!("file{number}"), format!("next{number}"));
        let (file, same) = (one.open("bc", &name)?, two.open("bc", &name)?);
        let (other, others) = (one.open("bc", &next)?, two.open("bc", &next)?);
        one.expect(&format!("set {file} w s 0 0"), "done")?;
        two.expect("alarm 300 0", "done")?;
        let begun = Instant::now();
        two.expect(&format!("wait {same} w s 5 1"), "EINTR")?;
        let took = begun.elapsed();
        ensure!(Duration::from_millis(200) < took && took < AT_ONCE, "{fronts:?}: interrupted after {took:?}");
        two.expect("alarms", "1")?;
        // An abandoned lock does not come later.
        one.expect(&format!("set {file} u s 0 0"), "done")?;
        one.expect(&format!("set {file} w s 0 0"), "done")?;
        two.expect("alarm 100 1", "done")?;
        two.send(&format!("wait {same} w s 5 1"))?;
        std::thread::sleep(Duration::from_millis(400));
        one.expect(&format!("set {file} u s 0 0"), "done")?;
        two.expect_line("done")?;
        two.expect("alarms", "2")?;
        one.expect(&format!("set {file} w s 5 1"), "EAGAIN")?;
        // A circle over two files.
        one.expect(&format!("set {other} w s 0 1"), "done")?;
        two.send(&format!("wait {others} w s 0 1"))?;
        one.expect("alarm 3000 0", "done")?;
        if one.ask(&format!("wait {file} w s 5 1"))? != "EDEADLK" {
            // The other process begins to wait only now, so it closes the circle.
            two.expect_line("EDEADLK")?;
            continue;
        }
        one.expect(&format!("set {other} u s 0 0"), "done")?;
        two.expect_line("done")?;
    }
    passed()
}

/// A thread waits for a lock, while another thread hands the file, and with it the process's locks, over to the kernel:
/// the wait continues there.
fn moves(site: &TestArena, program: &Path) -> Outcome<Verdict> {
    for (number, other) in [Front::RunAtOnce, Front::Mount].into_iter().enumerate() {
        let (mut one, mut two) = start_pair(site, program, (Front::RunAtOnce, other))?;
        let name = format!("file{number}");
        let (file, same) = (one.open("bc", &name)?, two.open("bc", &name)?);
        let pid = one.pid()?;
        one.expect(&format!("size {file} 4096"), "done")?;
        one.expect(&format!("set {file} r s 20 10"), "done")?;
        two.expect(&format!("set {same} w s 0 10"), "done")?;
        one.expect(&format!("later {file} w s 0 40"), "done")?;
        // By now it waits, or is about to: both must work.
        std::thread::sleep(QUIET);
        one.expect(&format!("map {file}"), "done")?;
        two.expect(&format!("get {same} w s 10 0"), &format!("r 20 10 {pid}"))?;
        two.expect(&format!("set {same} u s 0 0"), "done")?;
        one.expect("joined 5000", "done")?;
        two.expect(&format!("get {same} r s 0 0"), &format!("w 0 40 {pid}"))?;
    }
    passed()
}

/// A thread waits for a lock, while another one locks as many files as there is memory for. The first still gets the
/// lock, and does not block itself.
fn crowded(site: &TestArena, program: &Path) -> Outcome<Verdict> {
    for (number, other) in [Front::RunAtOnce, Front::Mount].into_iter().enumerate() {
        let (mut one, mut two) = start_pair(site, program, (Front::RunAtOnce, other))?;
        let name = format!("file{number}");
        let (file, same) = (one.open("bc", &name)?, two.open("bc", &name)?);
        let pid = one.pid()?;
        two.expect(&format!("set {same} w s 0 10"), "done")?;
        one.expect(&format!("later {file} w s 0 40"), "done")?;
        std::thread::sleep(QUIET);
        for more in 0..LOCK_SLOTS {
            let more = one.open("bc", &format!("more{more}"))?;
            one.expect(&format!("set {more} w s 0 1"), "done")?;
        }
        two.expect(&format!("set {same} u s 0 0"), "done")?;
        one.expect("joined 5000", "done")?;
        two.expect(&format!("get {same} r s 0 0"), &format!("w 0 40 {pid}"))?;
        one.expect(&format!("set {file} u s 10 5"), "done")?;
        two.expect(&format!("set {same} w s 10 5"), "done")?;
        one.expect(&format!("close {file}"), "done")?;
        two.expect(&format!("set {same} w s 0 0"), "done")?;
    }
    passed()
}

/// A process abandons a wait for a lock because SharedFS does not answer. When SharedFS runs again, the process does
/// not keep the lock for ever.
fn gives_up(site: &TestArena, program: &Path) -> Outcome<Verdict> {
    given_up(site, program, false)
}

/// The same holds if the process then closes the file without an answer, while it has one more descriptor of it.
fn gives_up_twice(site: &TestArena, program: &Path) -> Outcome<Verdict> {
    given_up(site, program, true)
}

fn given_up(site: &TestArena, program: &Path, closes_early: bool) -> Outcome<Verdict> {
    let (point, errors) = (site.point(0), Stdio::null());
    let (mut one, mut two) = start_pair(site, program, (Front::RunAtOnce, Front::Mount))?;
    let mut hasty = Locker::start_as(program, (Front::RunAtOnce, &[(PATIENCE_VARIABLE, "1")]), &point, errors)?;
    let (held, same) = (one.open("bc", "file")?, two.open("bc", "file")?);
    let (file, early) = (hasty.open("b", "file")?, hasty.open("r", "file")?);
    one.expect(&format!("set {held} w s 0 10"), "done")?;
    hasty.send(&format!("wait {file} w s 5 10"))?;
    // SharedFS knows that it waits.
    std::thread::sleep(QUIET);
    let daemon = site.daemon()?;
    signal(daemon, Signal::STOP)?;
    let mut given_up = hasty.expect_line("EIO");
    if closes_early && given_up.is_ok() {
        given_up = hasty.expect(&format!("close {early}"), "done");
    }
    // The lock is free before SharedFS can see that no process waits for it any more.
    one.send(&format!("set {held} u s 0 0"))?;
    std::thread::sleep(QUIET);
    signal(daemon, Signal::CONT)?;
    given_up?;
    one.expect_line("done")?;
    hasty.expect(&format!("close {file}"), "done")?;
    two.expect(&format!("set {same} w s 0 0"), "done")?;
    passed()
}

/// A killed SharedFS finds the locks again: those in its table, and those that a stopped process has in its own memory.
fn restarts(site: &TestArena, program: &Path) -> Outcome<Verdict> {
    /// Longer than a new SharedFS waits for sessions that have locks.
    const GRACE: Duration = Duration::from_secs(6);
    for (number, fronts) in WAYS.into_iter().enumerate() {
        let (mut one, mut two) = start_pair(site, program, fronts)?;
        let (name, next) = (format!("file{number}"), format!("next{number}"));
        let (file, same) = (one.open("bc", &name)?, two.open("bc", &name)?);
        let (other, others) = (one.open("bc", &next)?, two.open("bc", &next)?);
        // One lock without contention, and one with it.
        one.expect(&format!("set {file} w s 0 10"), "done")?;
        one.expect(&format!("set {other} w s 0 10"), "done")?;
        two.expect(&format!("set {others} w s 0 10"), "EAGAIN")?;
        one.expect(&format!("set {other} w s 20 10"), "done")?;
        one.signal(Signal::STOP)?;
        let stopped = one.child.id();
        site.kill_daemon()?;
        let begun = Instant::now();
        // It may take until all living sessions have resumed.
        two.expect(&format!("set {others} w s 25 1"), "EAGAIN")?;
        ensure!(begun.elapsed() < GRACE, "{fronts:?}: it took {:?}", begun.elapsed());
        std::thread::sleep(GRACE.saturating_sub(begun.elapsed()));
        two.expect(&format!("set {same} w s 5 1"), "EAGAIN")?;
        two.expect(&format!("set {others} w s 5 1"), "EAGAIN")?;
        two.expect(&format!("set {others} w s 15 1"), "done")?;
        signal(stopped, Signal::CONT)?;
        one.expect(&format!("set {other} w s 0 30"), "EAGAIN")?;
        one.expect(&format!("set {other} u s 0 0"), "done")?;
        one.expect(&format!("set {file} u s 0 0"), "done")?;
        two.expect(&format!("set {others} w s 0 0"), "done")?;
        two.expect(&format!("set {same} w s 0 0"), "done")?;
    }
    passed()
}

/// Four processes count in one file under its lock, and lose nothing while SharedFS is killed. The next SharedFS is
/// killed before all have resumed with their locks.
fn counts(site: &TestArena, program: &Path) -> Outcome<Verdict> {
    const TURNS: u64 = 6000;
    const ROUNDS: u64 = 3;
    const KILLS: u32 = 3;
    /// The longest pause between two kills, in milliseconds.
    const PAUSE: u64 = 150;
    let seed = number("ASHLAR_SEED", 1);
    let mut random = Random::new(seed);
    let fronts = [Front::RunAtOnce, Front::Mount, Front::RunAtOnce, Front::Run];
    let mut lockers = Vec::new();
    for front in fronts {
        let mut locker = Locker::start(program, front, &site.point(0))?;
        let file = locker.open("bc", "counter")?;
        lockers.push((locker, file));
    }
    for round in 1..=ROUNDS {
        site.let_daemon_run()?;
        for (locker, file) in &mut lockers {
            locker.send(&format!("add {file} {TURNS}"))?;
        }
        for _ in 0..KILLS {
            std::thread::sleep(Duration::from_millis(random.below(PAUSE)));
            site.kill_daemon_at_once()?;
        }
        for (locker, _) in &mut lockers {
            locker.expect_line("done").map_err(|error| format!("seed {seed}, round {round}: {error}"))?;
        }
        let bytes = std::fs::read(site.point(0).join("counter")).map_err(tried("reading the counter"))?;
        let counted = bytes.try_into().map(u64::from_ne_bytes).map_err(|bytes| format!("the counter is {bytes:?}"))?;
        ensure!(
            counted == TURNS * round * fronts.len() as u64,
            "seed {seed}, round {round}: {counted} turns were counted"
        );
    }
    passed()
}

/// SQLite's own writers, some with LibFS in their processes and some through the mount.
fn databases(site: &TestArena, _: &Path) -> Outcome<Verdict> {
    const WRITER: &str = "import sqlite3, sys
database = sqlite3.connect(sys.argv[1], timeout=120, isolation_level=None)
for step in range(int(sys.argv[3])):
    database.execute('BEGIN IMMEDIATE')
    database.execute('UPDATE sum SET value = value + 1')
    database.execute('INSERT INTO entry VALUES (?, ?)', (sys.argv[2], step))
    database.execute('COMMIT')
";
    const STEPS: usize = 60;
    let fronts = [Front::RunAtOnce, Front::Mount, Front::RunAtOnce, Front::Run];
    let python = |front: Front, script: &str, words: &[String]| {
        let mut command = front.command("python3");
        command.args(["-c", script]).args(words).current_dir(site.point(0)).stdin(Stdio::null());
        command
    };
    if call("python3", &["-c", "import sqlite3"]).is_err() {
        return Ok(Verdict::Skipped("there is no python3 with sqlite3".into()));
    }
    for mode in ["delete", "persist", "wal"] {
        let name = format!("{mode}.db");
        let make = "import sqlite3, sys
database = sqlite3.connect(sys.argv[1], isolation_level=None)
database.execute('PRAGMA journal_mode=' + sys.argv[2])
database.executescript('CREATE TABLE sum(value); INSERT INTO sum VALUES (0); CREATE TABLE entry(writer, step)')";
        run(&mut python(Front::RunAtOnce, make, &[name.clone(), mode.to_owned()]))?.success()?;
        let mut writers = Vec::new();
        for (number, front) in fronts.into_iter().enumerate() {
            let words = [name.clone(), number.to_string(), STEPS.to_string()];
            writers.push(python(front, WRITER, &words).spawn().map_err(tried("starting a writer"))?);
        }
        for writer in &mut writers {
            let status = writer.wait().map_err(tried("waiting for a writer"))?;
            ensure!(status.success(), "{mode}: a writer ended with {status}");
        }
        let look = "import sqlite3, sys
database = sqlite3.connect(sys.argv[1])
print(*(database.execute(words).fetchone()[0] for words in
    ('SELECT value FROM sum', 'SELECT count(*) FROM entry', 'PRAGMA integrity_check')))";
        let expected = format!("{0} {0} ok\n", STEPS * fronts.len());
        for front in [Front::Mount, Front::RunAtOnce] {
            let found = run(&mut python(front, look, std::slice::from_ref(&name)))?.success()?.output;
            ensure!(found == expected, "{mode}: '{found}', not '{expected}'");
        }
    }
    passed()
}

/// A report counts LibFS's locks as accelerated, and those that it leaves to the kernel as delegated.
fn reported(site: &TestArena, program: &Path) -> Outcome<Verdict> {
    let report: PathBuf = site.outside().join("report.json");
    let script = "printf 'open bc file\\nset 3 w s 0 1\\nset 3 w s 5 1\\nget 3 w s 0 0\\nclose 3\\n' | \"$0\"
        printf 'open bc file\\nmap 3\\nset 3 w s 0 1\\nset 3 u s 0 0\\nget 3 w s 0 0\\nset 3 w s 0 1\\nexit\\n' | \"$0\"";
    let report_path = report.display().to_string();
    let mut command = ashlar_tests::command::ashlar(&[
        "run",
        "--report-json",
        "--report-to",
        &report_path,
        "--",
        "bash",
        "-ec",
        script,
    ]);
    command.arg(program).env(ashlar_wire::DEFER_VARIABLE, "0").current_dir(site.point(0));
    run(&mut command)?.success()?;
    let text = std::fs::read_to_string(&report).map_err(tried("reading the report"))?;
    let report: serde_json::Value = serde_json::from_str(&text).map_err(tried("reading the report's JSON"))?;
    let calls = report["calls"].as_array().map(Vec::as_slice).unwrap_or_default();
    let line = calls.iter().find(|line| line["call"] == "fcntl").ok_or_else(|| format!("no fcntl in {text}"))?;
    let found = ["accelerated", "delegated", "missed"].map(|what| line[what].as_u64());
    // The mapping makes the kernel serve the descriptor, whose locks LibFS sets until another process asks.
    ensure!(found == [Some(5), Some(2), Some(0)], "5 accelerated and 2 delegated calls expected: {line}");
    passed()
}
