//! Which tests there are, which are run, and what is said of them.

use std::time::Instant;

use crate::Outcome;

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

/// Runs the tests whose names contain one of `filters` (all where there are none). Says whether all is well.
pub fn run(tests: &[Test], filters: &[String]) -> bool {
    let wanted = |test: &&Test| filters.is_empty() || filters.iter().any(|filter| test.name.contains(filter.as_str()));
    let strict = std::env::var_os("CI").is_some_and(|value| !value.is_empty());
    let (mut passed, mut failed, mut skipped) = (0, Vec::new(), 0);
    for test in tests.iter().filter(wanted) {
        let start = Instant::now();
        let outcome = (test.run)();
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
    failed.is_empty() && passed + skipped > 0
}
