//! `ashlar-bench applications [WORD…]`: times whole programs in four places.
//!
//! The places are a disk's file system, memory, a mount of Ashlar, and one under `ashlar run`, all in one run. Only
//! jobs whose names contain one of the words run.
//!
//! Each job runs in all places, one after the other, for several rounds; each round begins with another place. A job's
//! inputs are made before, in memory, and are the same for all. Its findings (files, rows, operations) must be the same
//! in all places, so that no failure is measured. The method and the last figures stand in `docs/benchmarks.md`.

mod job;
mod jobs;
mod places;
mod program;
mod size;
mod table;

use std::path::PathBuf;

use ashlar_tests::mount::{Medium, obstacle};
use ashlar_tests::{Outcome, tried};
use tempfile::TempDir;

use job::{Job, Turn};
use jobs::JOBS;
use places::JobPlaces;
use size::Size;
use table::Table;

/// Rounds without `--repeat`: odd, so that a median is one of the measured times.
const ROUNDS: u64 = 3;
const USAGE: &str =
    "usage: ashlar-bench applications [WORD…] [--repeat N] [--medium memory|disk] [--disk DIR] [--smallest] [--json]";

/// The command line.
#[derive(Debug, PartialEq, Eq)]
struct Options {
    words: Vec<String>,
    rounds: u64,
    medium: Medium,
    /// A directory on the disk's file system.
    disk: PathBuf,
    size: Size,
    json: bool,
}

impl Options {
    fn parse(arguments: &mut dyn Iterator<Item = String>) -> Outcome<Self> {
        let mut options = Self {
            words: Vec::new(),
            rounds: ROUNDS,
            medium: Medium::Memory,
            disk: "/var/tmp".into(),
            size: Size::Usual,
            json: false,
        };
        while let Some(argument) = arguments.next() {
            let mut value = || arguments.next().ok_or_else(|| format!("{argument} takes a value\n{USAGE}"));
            match argument.as_str() {
                "--repeat" => {
                    let rounds = value()?.parse().ok().filter(|rounds| *rounds > 0);
                    options.rounds = rounds.ok_or_else(|| format!("--repeat takes a number from 1 on\n{USAGE}"))?;
                }
                "--medium" => {
                    options.medium = match value()?.as_str() {
                        "memory" => Medium::Memory,
                        "disk" => Medium::Disk,
                        other => return Err(format!("there is no medium '{other}'\n{USAGE}")),
                    };
                }
                "--disk" => options.disk = value()?.into(),
                "--smallest" => options.size = Size::Smallest,
                "--json" => options.json = true,
                option if option.starts_with('-') => return Err(format!("there is no option '{option}'\n{USAGE}")),
                _ => options.words.push(argument),
            }
        }
        Ok(options)
    }

    fn jobs(&self) -> Outcome<Vec<&'static Job>> {
        let known = || JOBS.iter().map(|job| job.name).collect::<Vec<_>>().join(", ");
        if let Some(word) = self.words.iter().find(|word| !JOBS.iter().any(|job| job.name.contains(word.as_str()))) {
            return Err(format!("no job's name contains '{word}'; there are {}", known()));
        }
        let is_chosen = |job: &&Job| self.words.is_empty() || self.words.iter().any(|word| job.name.contains(word));
        Ok(JOBS.iter().filter(is_chosen).collect())
    }
}

/// Measures, and returns the text to print.
pub fn main(arguments: &mut dyn Iterator<Item = String>) -> Outcome<String> {
    let options = Options::parse(arguments)?;
    let jobs = options.jobs()?;
    if let Some(reason) = obstacle() {
        return Err(format!("nothing can be mounted here: {reason}"));
    }
    let places = JobPlaces::mounted(options.medium, &options.disk, options.size)?;
    let mut table = Table::new(&places, options.rounds);
    for job in jobs {
        // In memory for every place: reading the inputs costs the same for all.
        let inputs = TempDir::with_prefix_in("ashlar-bench-", "/dev/shm").map_err(tried("making a directory"))?;
        if let Err(reason) = job.prepare(inputs.path(), options.size) {
            eprintln!("{} can't be measured: {reason}", job.name);
            table.leave_out(job.name, reason);
            continue;
        }
        for round in 0..options.rounds {
            for place in places.in_turn(round) {
                eprintln!("round {} of {}: {} on {}", round + 1, options.rounds, job.name, place.name);
                let measured = Turn::new(job, place, &places, inputs.path(), options.size)?.run()?;
                for one in measured {
                    table.add(place.name, one)?;
                }
            }
        }
    }
    if table.is_empty() {
        return Err("nothing could be measured".into());
    }
    Ok(if options.json { format!("{}\n", table.json()) } else { table.text() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(words: &[&str]) -> Outcome<Options> {
        Options::parse(&mut words.iter().map(|word| (*word).to_owned()))
    }

    #[test]
    fn words_and_options_stand_in_any_order() {
        let options = parse(&["git", "--repeat", "5", "--medium", "disk", "sqlite", "--json"]).unwrap();
        assert_eq!((options.rounds, options.medium, options.json), (5, Medium::Disk, true));
        let names: Vec<_> = options.jobs().unwrap().iter().map(|job| job.name).collect();
        assert_eq!(names, ["git", "sqlite"]);
        assert_eq!(parse(&[]).unwrap().jobs().unwrap().len(), JOBS.len());
    }

    #[test]
    fn what_is_not_known_is_refused_by_name() {
        for words in [&["--repeat", "0"][..], &["--repeat"], &["--medium", "tape"], &["--fast"]] {
            assert!(parse(words).unwrap_err().contains("usage"), "{words:?}");
        }
        let complaint = parse(&["nothing"]).unwrap().jobs().unwrap_err();
        assert!(complaint.contains("'nothing'") && complaint.contains("varmail"), "{complaint}");
    }
}
