//! `ashlar-bench [--json] [WORD…]`: measures the file system through FUSE.
//!
//! It compares Ashlar with pass-through FUSE file systems over tmpfs, in one run. Only cases whose names contain one of
//! the words run.
//!
//! Every case runs on every contender, one after the other, for several rounds, so that other work of the machine
//! affects all alike. A figure is the median over the rounds; a ratio is the median of the rounds' ratios. The method
//! and the last figures stand in `docs/benchmarks.md`.
//!
//! `ashlar-bench applications` is another benchmark: whole programs, beside a disk's file system and tmpfs.
#![forbid(unsafe_code)]

mod applications;
mod cases;
mod contenders;
mod memory;
mod personality;
mod report;
mod settle;

use std::process::ExitCode;

use ashlar_tests::mount::obstacle;
use ashlar_tests::{Outcome, number};

use cases::{CASES, Fixture};
use contenders::Contenders;
use report::Report;

/// Rounds without `ASHLAR_BENCH_ROUNDS`: odd, so that a median is one of the measured times.
const ROUNDS: u64 = 5;

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1).peekable();
    let result = match arguments.peek().map(String::as_str) {
        Some("applications") => applications::main(&mut arguments.skip(1)),
        Some("personality") => personality::main(&mut arguments.skip(1)),
        _ => pass_throughs(&mut arguments),
    };
    match result {
        Ok(text) => print!("{text}"),
        Err(error) => {
            eprintln!("ashlar-bench: {error}");
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}

fn pass_throughs(arguments: &mut dyn Iterator<Item = String>) -> Outcome<String> {
    let (options, words): (Vec<_>, Vec<_>) = arguments.partition(|word| word.starts_with("--"));
    if let Some(reason) = obstacle() {
        return Err(format!("nothing can be mounted here: {reason}"));
    }
    let report = run(&words)?;
    let is_json = options.iter().any(|option| option == "--json");
    Ok(if is_json { format!("{}\n", report.json()) } else { report.table() })
}

fn run(words: &[String]) -> Outcome<Report> {
    let fixture = Fixture::new(contenders::allow_open_files()?)?;
    eprintln!("the tree has {} files", fixture.files);
    let contenders = Contenders::mounted()?;
    let mut report = Report::new(&contenders);
    report.record_memory("idle, just mounted", &memory::private_bytes(contenders.ashlar())?);
    let rounds = number("ASHLAR_BENCH_ROUNDS", ROUNDS);
    let chosen = |name: &str| words.is_empty() || words.iter().any(|word| name.contains(word.as_str()));
    for round in 0..rounds {
        for (name, case) in CASES.iter().filter(|(name, _)| chosen(name)) {
            for contender in contenders.in_turn(round) {
                eprintln!("round {} of {rounds}: {name} on {}", round + 1, contender.name);
                let directory = contender.root.join("bench");
                let action = |error| format!("{name} on {}: {error}", contender.name);
                std::fs::create_dir(&directory).map_err(|error| action(error.to_string()))?;
                let times = case(&directory, &fixture).map_err(action)?;
                std::fs::remove_dir_all(&directory).map_err(|error| action(error.to_string()))?;
                contenders.settle()?;
                for time in times {
                    report.add(contender.name, round, time);
                }
            }
        }
    }
    report.record_memory("idle, after the cases", &memory::private_bytes(contenders.ashlar())?);
    Ok(report)
}
