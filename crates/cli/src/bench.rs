//! `ashlar bench`: the cost of operations, beside their floor and another file system.
//!
//! Contenders take turns in each round, each round beginning with another, so that other work of the machine affects
//! all alike. A turn is a process of its own (`worker`), started plainly or under `ashlar run`, in a new directory.
//! Before the next turn the benchmark waits for the digest: Ashlar's work *during* a turn counts, and later work
//! burdens no other contender.
//!
//! Method, cases and figures: `docs/benchmarks.md`, section "One file system in parts: `ashlar bench`".

mod breakdown;
mod case;
mod interrupt;
mod page;
mod report;
mod ring;
mod settle;
mod site;
mod staff;
mod timing;
mod worker;

use std::fs;
use std::process::ExitCode;

use indicatif::ProgressBar;

use crate::arguments::BenchArguments;
use crate::error::CliError;
use crate::progress;
use case::{Case, Contender, Measured, Step, Task, together};
use interrupt::Interrupt;
use page::Page;
use report::{Report, Setting};
use site::Site;

pub use worker::run as run_worker;

/// How often sustained cases fill the update log, by default and with `--long`.
const LAPS: u64 = 3;
const LAPS_LONG: u64 = 10;

/// Measures, and prints the results.
pub fn run(arguments: &BenchArguments) -> Result<ExitCode, CliError> {
    if staff::is_under_run() {
        return Err(CliError::BenchUnderRun);
    }
    let cases = chosen(arguments)?;
    let laps = if arguments.long { LAPS_LONG } else { LAPS };
    let interrupt = Interrupt::catch()?;
    let site = Site::prepare(arguments, laps)?;
    let mut report = Report::new(setting(&site, arguments));
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
                let turn = Turn { site: &site, case: *case, contender, laps, is_long: arguments.long };
                turn.take(&interrupt, &mut report)?;
                bar.inc(1);
            }
        }
    }
    finish(&bar, site);
    if arguments.json {
        println!("{}", report.json().map_err(CliError::system("writing JSON"))?);
    } else {
        print!("{}", report.text());
    }
    Ok(ExitCode::SUCCESS)
}

/// Removes everything before the result is printed.
fn finish(bar: &ProgressBar, site: Site) {
    bar.finish_and_clear();
    drop(site);
}

/// Returns the cases that the user asked for.
fn chosen(arguments: &BenchArguments) -> Result<Vec<Case>, CliError> {
    let mut cases = Case::ALL.to_vec();
    cases.retain(|case| arguments.long || !case.is_long());
    let is_meant = |case: &Case, word: &String| case.name().contains(word.as_str());
    if let Some(word) = arguments.cases.iter().find(|word| !cases.iter().any(|case| is_meant(case, word))) {
        let names: Vec<_> = cases.iter().map(|case| case.name()).collect();
        return Err(CliError::NoSuchCase { word: word.clone(), cases: names.join(", ") });
    }
    if !arguments.cases.is_empty() {
        cases.retain(|case| arguments.cases.iter().any(|word| is_meant(case, word)));
    }
    Ok(cases)
}

fn setting(site: &Site, arguments: &BenchArguments) -> Setting {
    let parent =
        |scratch: &site::Scratch| scratch.path().parent().map_or_else(String::new, |it| it.display().to_string());
    Setting {
        version: env!("CARGO_PKG_VERSION"),
        directory: parent(&site.ashlar),
        arena: site.place.directory().display().to_string(),
        medium: site.medium.clone(),
        log_bytes: site.log_bytes,
        compared: parent(&site.compared),
        compared_kind: site.kind.clone(),
        rounds: arguments.rounds,
        processors: std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
        rings: ashlar_fuse::rings_are_on(),
        clock_ns: timing::clock_ns(),
    }
}

/// Lets workers do the tasks. Tasks that two processes did at once are one line.
fn employ(tasks: &[Task], interrupt: &Interrupt) -> Result<Vec<Measured>, CliError> {
    let mut outcomes = staff::employ(tasks, interrupt)?.into_iter();
    let first = outcomes.next().unwrap_or_default();
    let second = outcomes.next().unwrap_or_default();
    let other = |what: &str| second.iter().find(|measured| measured.what == what);
    let both = |measured: Measured| match other(&measured.what) {
        Some(other) => together(measured, other),
        None => measured,
    };
    Ok(first.into_iter().map(both).collect())
}

/// A contender's turn in a case.
struct Turn<'a> {
    site: &'a Site,
    case: Case,
    contender: Contender,
    laps: u64,
    is_long: bool,
}

impl Turn<'_> {
    fn take(&self, interrupt: &Interrupt, report: &mut Report) -> Result<(), CliError> {
        let root = if self.contender.is_ashlar() { &self.site.ashlar } else { &self.site.compared };
        let (directory, aside) = (root.path().join("turn"), self.site.compared.path().join("aside"));
        for path in [&directory, &aside] {
            fs::create_dir(path).map_err(CliError::system(format!("making {}", path.display())))?;
        }
        for step in self.case.steps(self.contender) {
            let task = |worker| Task {
                case: self.case,
                contender: self.contender,
                step: *step,
                worker,
                directory: directory.clone(),
                aside: aside.clone(),
                arena: self.contender.is_ashlar().then(|| self.site.place.directory().to_owned()),
                medium: self.site.medium.clone(),
                log_bytes: self.site.log_bytes,
                laps: self.laps,
                is_long: self.is_long,
            };
            let mut tasks = vec![task(0)];
            if *step == Step::Pair {
                tasks.push(task(1));
                let page = aside.join(worker::PAGE);
                Page::make(&page).map_err(CliError::system(format!("making {}", page.display())))?;
            }
            for measured in employ(&tasks, interrupt)? {
                report.add(self.case, self.contender, measured);
            }
        }
        for path in [&directory, &aside] {
            fs::remove_dir_all(path).map_err(CliError::system(format!("removing {}", path.display())))?;
        }
        if self.contender.is_ashlar() { self.site.settle() } else { Ok(()) }
    }
}
