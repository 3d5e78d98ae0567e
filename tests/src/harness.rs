//! Which tests there are, which are run, and what is said of them.

use std::io::Read;
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use crate::mount::clear_behind;
use crate::{Outcome, command, number, tried};

/// A test: its name, what it takes, and what it does.
#[derive(Clone, Copy, Debug)]
pub struct Test {
    /// Its name: the story in a few words, group first (`kill/…`).
    pub name: &'static str,
    /// What it does.
    pub run: fn() -> Outcome<Verdict>,
}

/// How a test that did not fail ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It passed; with what it measured or counted, where that is worth a word.
    Passed(String),
    /// It can't run here, and why.
    Skipped(String),
}

/// The verdict of a test that has nothing to add.
pub fn passed() -> Outcome<Verdict> {
    Ok(Verdict::Passed(String::new()))
}

/// No test takes longer, on two slow cores; loops that are made longer bring their own number.
const LIMIT_SECONDS: u64 = 1200;
/// The word that makes this program run one test, in the process that is asked.
const ALONE: &str = "--alone";
/// The exit status of a test that can't run here, as automake has it.
const SKIPPED: i32 = 77;

/// The main function of a program of tests: `[--list] [WORD…]`. Runs those whose names contain one of the words.
pub fn main(tests: &[Test]) -> ExitCode {
    let words: Vec<_> = std::env::args().skip(1).collect();
    match words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["--list"] => {
            tests.iter().for_each(|test| println!("{}", test.name));
            ExitCode::SUCCESS
        }
        [ALONE, name] => tests.iter().find(|test| test.name == name).map_or(ExitCode::from(2), alone),
        _ => run(tests, &words),
    }
}

/// Runs one test here. Its words go to standard output, its verdict is the exit status.
fn alone(test: &Test) -> ExitCode {
    match (test.run)() {
        Ok(Verdict::Passed(words)) => {
            print!("{words}");
            ExitCode::SUCCESS
        }
        Ok(Verdict::Skipped(why)) => {
            print!("{why}");
            ExitCode::from(SKIPPED as u8)
        }
        Err(words) => {
            print!("{words}");
            ExitCode::FAILURE
        }
    }
}

/// Runs a test in a process of its own: one that hangs in the kernel can't hold up the others.
fn outcome(test: &Test) -> Outcome<Verdict> {
    let program = std::env::current_exe().map_err(tried("finding this program"))?;
    let mut command = Command::new(program);
    let child = command.args([ALONE, test.name]).stdin(Stdio::null()).stdout(Stdio::piped()).spawn();
    let mut child = child.map_err(tried("starting the test"))?;
    let words = child.stdout.take().map(|mut output| {
        std::thread::spawn(move || {
            let mut words = String::new();
            // What could be read is what there is to tell.
            let _ = output.read_to_string(&mut words);
            words
        })
    });
    let limit = Duration::from_secs(number("ASHLAR_TEST_SECONDS", LIMIT_SECONDS));
    let Some(status) = command::wait_for(&mut child, limit)? else {
        // What hangs in a call on a mount can't even be killed before that mount's process is dead.
        clear_behind(child.id());
        // Its end is what is waited for, however it ends.
        let _ = command::wait(&mut child, Duration::ZERO);
        return Err(format!("not done after {} s, so it was ended", limit.as_secs()));
    };
    let words = words.and_then(|thread| thread.join().ok()).unwrap_or_default();
    match status.code() {
        Some(0) => Ok(Verdict::Passed(words)),
        Some(SKIPPED) => Ok(Verdict::Skipped(words)),
        Some(1) => Err(words),
        _ => Err(format!("{words}\nthe test itself ended with {status}")),
    }
}

fn run(tests: &[Test], filters: &[String]) -> ExitCode {
    let wanted = |test: &&Test| filters.is_empty() || filters.iter().any(|filter| test.name.contains(filter.as_str()));
    let strict = std::env::var_os("CI").is_some_and(|value| !value.is_empty());
    let (mut passed, mut failed, mut skipped) = (0, Vec::new(), 0);
    for test in tests.iter().filter(wanted) {
        let start = Instant::now();
        let outcome = outcome(test);
        let seconds = start.elapsed().as_secs_f64();
        match outcome {
            Ok(Verdict::Passed(words)) => {
                passed += 1;
                println!(
                    "test {} ... ok ({seconds:.1} s){}{words}",
                    test.name,
                    if words.is_empty() { "" } else { ": " }
                );
            }
            Ok(Verdict::Skipped(why)) if !strict => {
                skipped += 1;
                println!("test {} ... skipped: {why}", test.name);
            }
            Ok(Verdict::Skipped(why)) => {
                failed.push(test.name);
                println!("test {} ... FAILED: skipped ({why}), and CI skips nothing", test.name);
            }
            Err(words) => {
                failed.push(test.name);
                println!("test {} ... FAILED ({seconds:.1} s)\n{words}\n", test.name);
            }
        }
    }
    if !failed.is_empty() {
        println!("\nfailed:\n  {}", failed.join("\n  "));
    }
    println!("\n{passed} passed, {} failed, {skipped} skipped", failed.len());
    // Nothing run is no success: a filter that matches nothing is a mistake.
    if failed.is_empty() && passed + skipped > 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
