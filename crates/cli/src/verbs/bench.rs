//! `ashlar bench`: the cost of operations, beside their floor and other contenders.
//!
//! Contenders take turns in each round, each round beginning with another, so that other work of the machine affects
//! all alike. A turn is a process of its own (`worker`), started plainly or under `ashlar run`, in a new directory.
//! Before the next turn the benchmark waits for the digest: Ashlar's work *during* a turn counts, and later work
//! burdens no other contender.
//!
//! Method, cases and figures: `docs/benchmarks.md`, section "One file system in parts: `ashlar bench`".

mod breakdown;
mod case;
mod digest_wait;
mod directories;
mod fabric;
mod floor_log;
mod interrupt;
mod report;
mod timing;
mod turn_page;
mod worker;
mod worker_processes;

use std::fs;
use std::process::ExitCode;

use indicatif::ProgressBar;

use crate::arguments::{BenchArguments, BenchVerb};
use crate::error::CliError;
use crate::output::progress;
use case::{Case, Contender, Measurement, Step, together};
use directories::BenchDirectories;
use interrupt::Interrupt;
use report::{BenchReport, Setting};
use turn_page::TurnPage;
use worker::WorkerTask;

pub use fabric::run_peer;
pub use worker::run as run_worker;

/// How often sustained cases fill the update log, by default and with `--long`.
const LAPS: u64 = 3;
const LAPS_LONG: u64 = 10;

/// Measures, and prints the results.
pub fn run(arguments: &BenchArguments) -> Result<ExitCode, CliError> {
    if worker_processes::is_under_run() {
        return Err(CliError::BenchUnderRun);
    }
    if let Some(BenchVerb::Fabric(arguments)) = &arguments.other {
        return fabric::run(arguments);
    }
    let cases = chosen_cases(arguments)?;
    let laps = if arguments.long { LAPS_LONG } else { LAPS };
    let interrupt = Interrupt::catch()?;
    let directories = BenchDirectories::prepare(arguments, laps)?;
    let mut report = BenchReport::new(bench_setting(&directories, arguments));
    let turns = |case: Case| case.contenders().count() as u64;
    let bar = progress::bar("", cases.iter().copied().map(turns).sum::<u64>() * arguments.rounds);
    for round in 0..arguments.rounds {
        for case in &cases {
            let mut contenders: Vec<_> = case.contenders().collect();
            let first = round as usize % contenders.len();
            contenders.rotate_left(first);
            for contender in contenders {
                interrupt.check()?;
                bar.set_message(format!("{} on {}, round {}", case.name(), contender.name(), round + 1));
                let turn =
                    ContenderTurn { directories: &directories, case: *case, contender, laps, is_long: arguments.long };
                turn.run_turn(&interrupt, &mut report)?;
                bar.inc(1);
            }
        }
    }
    remove_directories(&bar, directories);
    if arguments.json {
        println!("{}", report.json().map_err(CliError::system("writing JSON"))?);
    } else {
        print!("{}", report.text());
    }
    Ok(ExitCode::SUCCESS)
}

/// Removes everything before the result is printed.
fn remove_directories(bar: &ProgressBar, directories: BenchDirectories) {
    bar.finish_and_clear();
    drop(directories);
}

/// Returns the cases that the user asked for.
fn chosen_cases(arguments: &BenchArguments) -> Result<Vec<Case>, CliError> {
    let mut cases = Case::ALL.to_vec();
    cases.retain(|case| arguments.long || !case.is_long());
    let is_named = |case: &Case, word: &String| case.name().contains(word.as_str());
    if let Some(word) = arguments.cases.iter().find(|word| !cases.iter().any(|case| is_named(case, word))) {
        let names: Vec<_> = cases.iter().map(|case| case.name()).collect();
        return Err(CliError::NoSuchCase { word: word.clone(), cases: names.join(", ") });
    }
    if !arguments.cases.is_empty() {
        cases.retain(|case| arguments.cases.iter().any(|word| is_named(case, word)));
    }
    Ok(cases)
}

fn bench_setting(directories: &BenchDirectories, arguments: &BenchArguments) -> Setting {
    let parent = |scratch: &directories::Scratch| {
        scratch.path().parent().map_or_else(String::new, |it| it.display().to_string())
    };
    Setting {
        version: env!("CARGO_PKG_VERSION"),
        directory: parent(&directories.ashlar),
        arena: directories.place.directory().display().to_string(),
        medium: directories.medium.clone(),
        log_bytes: directories.log_bytes,
        compared: parent(&directories.compared),
        compared_kind: directories.kind.clone(),
        rounds: arguments.rounds,
        processors: std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
        rings: ashlar_fuse::rings_are_on(),
        clock_ns: timing::clock_ns(),
    }
}

/// Lets workers do the tasks. Tasks that two processes did at once are one line.
fn measure(tasks: &[WorkerTask], interrupt: &Interrupt) -> Result<Vec<Measurement>, CliError> {
    let mut outcomes = worker_processes::run_workers(tasks, interrupt)?.into_iter();
    let first = outcomes.next().unwrap_or_default();
    let second = outcomes.next().unwrap_or_default();
    let other = |what: &str| second.iter().find(|measured| measured.what == what);
    let both = |measured: Measurement| match other(&measured.what) {
        Some(other) => together(measured, other),
        None => measured,
    };
    Ok(first.into_iter().map(both).collect())
}

/// A contender's turn in a case.
struct ContenderTurn<'a> {
    directories: &'a BenchDirectories,
    case: Case,
    contender: Contender,
    laps: u64,
    is_long: bool,
}

impl ContenderTurn<'_> {
    fn run_turn(&self, interrupt: &Interrupt, report: &mut BenchReport) -> Result<(), CliError> {
        let root = if self.contender.is_ashlar() { &self.directories.ashlar } else { &self.directories.compared };
        let (directory, aside) = (root.path().join("turn"), self.directories.compared.path().join("aside"));
        for path in [&directory, &aside] {
            fs::create_dir(path).map_err(CliError::system(format!("making {}", path.display())))?;
        }
        for step in self.case.steps(self.contender) {
            let task = |worker| WorkerTask {
                case: self.case,
                contender: self.contender,
                step: *step,
                worker,
                directory: directory.clone(),
                aside: aside.clone(),
                arena: self.contender.is_ashlar().then(|| self.directories.place.directory().to_owned()),
                medium: self.directories.medium.clone(),
                log_bytes: self.directories.log_bytes,
                laps: self.laps,
                is_long: self.is_long,
            };
            let mut tasks = vec![task(0)];
            if *step == Step::Pair {
                tasks.push(task(1));
                let page = aside.join(turn_page::PAGE);
                TurnPage::make(&page).map_err(CliError::system(format!("making {}", page.display())))?;
            }
            for measured in measure(&tasks, interrupt)? {
                report.add(self.case, self.contender, measured);
            }
        }
        for path in [&directory, &aside] {
            fs::remove_dir_all(path).map_err(CliError::system(format!("removing {}", path.display())))?;
        }
        if self.contender.is_ashlar() { self.directories.wait_for_digest() } else { Ok(()) }
    }
}
