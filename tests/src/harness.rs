//! Lists tests, runs them, and reports their results.

use std::io::Read;
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use ashlar_types::RING_SWITCH;

use crate::cluster::clear_clusters_behind;
use crate::mirrors::MIRRORS;
use crate::mount::{clear_behind, obstacle, take_complaints};
use crate::shadows::{Comparisons, SHADOWS, take_comparisons};
use crate::{Outcome, command, number, tried};

/// A test: its name, what it may take, and its function.
#[derive(Clone, Copy, Debug)]
pub struct Test {
    /// Its name: group first (`kill/…`), then subject, condition and result.
    pub name: &'static str,
    /// The test.
    pub run: fn() -> Outcome<Verdict>,
}

/// The result of a test that did not fail.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It passed; with a measurement or count, if that is worth a word.
    Passed(String),
    /// It can't run here, and why.
    Skipped(String),
}

/// The verdict of a test that has nothing to add.
pub fn passed() -> Outcome<Verdict> {
    Ok(Verdict::Passed(String::new()))
}

/// Runs a test, or says why nothing can be mounted here.
pub fn when_mountable(test: fn() -> Outcome<Verdict>) -> Outcome<Verdict> {
    obstacle().map_or_else(test, |why| Ok(Verdict::Skipped(why)))
}

/// The longest time of a test, on two slow cores; longer loops set their own number.
const LIMIT_SECONDS: u64 = 1200;
/// The argument that makes this program run one test in its own process.
const ONE_TEST: &str = "--one-test";
/// The exit status of a test that can't run here, as in automake.
const SKIPPED: i32 = 77;

/// The arguments that give each arena a copy, with which it is compared at the end of a test, and their variables.
const COPIES: [(&str, &str); 2] = [("--shadow", SHADOWS), ("--mirror", MIRRORS)];
/// The groups whose tests choose their copies themselves.
const OWN_COPIES: [&str; 2] = ["shadow/", "mirror/"];

/// The main function of a program of tests: `[--list] [--shadow|--mirror] [WORD…]`.
///
/// Runs the tests whose names contain one of the words. If the kernel has FUSE over io_uring, tests whose names begin
/// with one of `io_uring_groups` run with that, too.
pub fn main(tests: &[Test], io_uring_groups: &[&str]) -> ExitCode {
    let words: Vec<_> = std::env::args().skip(1).collect();
    match words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["--list"] => {
            tests.iter().for_each(|test| println!("{}", test.name));
            ExitCode::SUCCESS
        }
        [ONE_TEST, name] => tests.iter().find(|test| test.name == name).map_or(ExitCode::from(2), run_here),
        [first, ..] if let Some((_, variable)) = COPIES.iter().find(|(argument, _)| *argument == first) => {
            run(tests, io_uring_groups, &words[1..], Some(variable))
        }
        _ => run(tests, io_uring_groups, &words, None),
    }
}

/// Runs one test in this process. Its words go to standard output; its verdict is the exit status.
fn run_here(test: &Test) -> ExitCode {
    let result = (test.run)();
    let Comparisons { equal, problems } = take_comparisons();
    match result {
        Ok(Verdict::Passed(_)) if !problems.is_empty() => {
            print!("{}", problems.join("\n"));
            ExitCode::FAILURE
        }
        Ok(Verdict::Passed(words)) => {
            print!("{words}");
            if equal > 0 {
                print!("{}{equal} equal copies", if words.is_empty() { "" } else { "; " });
            }
            ExitCode::SUCCESS
        }
        Ok(Verdict::Skipped(why)) => {
            print!("{why}");
            ExitCode::from(SKIPPED as u8)
        }
        Err(words) => {
            print!("{words}");
            let complaints = take_complaints();
            if !complaints.is_empty() {
                print!("\nthe daemons' log:\n{complaints}");
            }
            ExitCode::FAILURE
        }
    }
}

/// Runs a test in a process of its own, so that one that hangs in the kernel does not delay the others.
fn run_in_process(test: &Test, copies: Option<&str>) -> Outcome<Verdict> {
    let program = std::env::current_exe().map_err(tried("finding this program"))?;
    let mut command = Command::new(program);
    if let Some(copies) = copies.filter(|_| !OWN_COPIES.iter().any(|group| test.name.starts_with(group))) {
        command.env(copies, "1");
    }
    let child = command.args([ONE_TEST, test.name]).stdin(Stdio::null()).stdout(Stdio::piped()).spawn();
    let mut child = child.map_err(tried("starting the test"))?;
    let words = child.stdout.take().map(|mut output| {
        std::thread::spawn(move || {
            let mut words = String::new();
            // Output before an error is reported.
            let _ = output.read_to_string(&mut words);
            words
        })
    });
    let limit = Duration::from_secs(number("ASHLAR_TEST_SECONDS", LIMIT_SECONDS));
    let Some(status) = command::wait_for(&mut child, limit)? else {
        // A process in a call on a mount can't even be killed before that mount's process is dead.
        clear_clusters_behind(child.id());
        clear_behind(child.id());
        // Only its end matters here, not its status.
        let _ = command::wait(&mut child, Duration::ZERO);
        return Err(format!("not done after {} s, so it was killed", limit.as_secs()));
    };
    let words = words.and_then(|thread| thread.join().ok()).unwrap_or_default();
    match status.code() {
        Some(0) => Ok(Verdict::Passed(words)),
        Some(SKIPPED) => Ok(Verdict::Skipped(words)),
        Some(1) => Err(words),
        _ => Err(format!("{words}\nthe test itself ended with {status}")),
    }
}

/// The kernel's switch for FUSE over io_uring, if it has one. A drop restores the earlier setting.
struct RingSwitch(Vec<u8>);

impl RingSwitch {
    fn find() -> Option<Self> {
        let before = std::fs::read(RING_SWITCH).ok()?;
        // A user that may not switch it may not mount either. The drop writes the old value back.
        std::fs::write(RING_SWITCH, "N").ok()?;
        Some(Self(before))
    }

    fn turn_on(&self) -> bool {
        std::fs::write(RING_SWITCH, "Y").is_ok()
    }
}

impl Drop for RingSwitch {
    fn drop(&mut self) {
        if let Err(error) = std::fs::write(RING_SWITCH, &self.0) {
            eprintln!("{} was not put back: {error}", RING_SWITCH);
        }
    }
}

/// The results of all tests.
#[derive(Default)]
struct Results {
    passed: usize,
    skipped: usize,
    failed: Vec<String>,
}

impl Results {
    /// Runs a test, and prints its result. `how` names the way that requests take, if there are several.
    fn add(&mut self, test: &Test, how: &str, copies: Option<&str>) {
        let strict = std::env::var_os("CI").is_some_and(|value| !value.is_empty());
        let name = format!("{}{how}", test.name);
        let start = Instant::now();
        let outcome = run_in_process(test, copies);
        let seconds = start.elapsed().as_secs_f64();
        match outcome {
            Ok(Verdict::Passed(words)) => {
                self.passed += 1;
                println!("test {name} ... ok ({seconds:.1} s){}{words}", if words.is_empty() { "" } else { ": " });
                return;
            }
            Ok(Verdict::Skipped(why)) if !strict => {
                self.skipped += 1;
                println!("test {name} ... skipped: {why}");
                return;
            }
            Ok(Verdict::Skipped(why)) => {
                println!("test {name} ... FAILED: skipped ({why}), and CI skips nothing");
            }
            Err(words) => println!("test {name} ... FAILED ({seconds:.1} s)\n{words}\n"),
        }
        self.failed.push(name);
    }
}

/// Runs the selected tests with requests from the device. If the kernel has FUSE over io_uring, then runs those tests
/// with that whose names begin with one of `io_uring_groups`.
fn run(tests: &[Test], io_uring_groups: &[&str], filters: &[String], copies: Option<&str>) -> ExitCode {
    let wanted = |test: &&Test| filters.is_empty() || filters.iter().any(|filter| test.name.contains(filter.as_str()));
    let mut results = Results::default();
    let switch = RingSwitch::find();
    tests.iter().filter(wanted).for_each(|test| results.add(test, "", copies));
    if switch.as_ref().is_some_and(RingSwitch::turn_on) {
        let is_selected = |test: &&Test| io_uring_groups.iter().any(|begin| test.name.starts_with(begin));
        tests.iter().filter(wanted).filter(is_selected).for_each(|test| results.add(test, " (over io_uring)", copies));
    }
    let Results { passed, skipped, failed } = results;
    if !failed.is_empty() {
        println!("\nfailed:\n  {}", failed.join("\n  "));
    }
    println!("\n{passed} passed, {} failed, {skipped} skipped", failed.len());
    // A filter that matches nothing is a mistake, so an empty run is no success.
    if failed.is_empty() && passed + skipped > 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
