//! Random system calls whose answers are compared between places.
//!
//! The program of `tests/differ` draws calls from the number of a sequence, makes them in a directory, and prints each
//! answer and the tree in the end. Here it runs in two places, and what it printed is compared line by line. The first
//! difference of a sequence counts alone: after it, the two trees may differ. A difference is made smaller by leaving
//! out steps while it stays.

use std::collections::BTreeMap;
use std::fs::{self, File, Permissions};
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::command::{ashlar, wait};
use crate::{Outcome, ensure, tried};

mod exceptions;

/// The longest that one run of the program may take.
const RUN_LIMIT: Duration = Duration::from_secs(3600);
/// The length of the name of each place, so that the lengths that calls return are the same in all places.
const PLACE_NAME_BYTES: usize = 150;
/// Runs that it may take to make a difference smaller.
const SHRINK_RUNS_MAX: usize = 200;

/// Which calls are drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DrawnCalls {
    /// All system calls, with offsets that ext4 can have.
    All,
    /// Calls on data, with offsets of up to 2^63 − 1.
    HugeOffsets,
    /// Those that `ashlar.h` has.
    OfLibrary,
}

impl DrawnCalls {
    fn word(self) -> &'static str {
        match self {
            Self::All => "kernel",
            Self::HugeOffsets => "huge",
            Self::OfLibrary => "capi",
        }
    }
}

/// The server of a place's calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ServedBy {
    /// The kernel's own file system: the reference.
    Reference,
    /// The kernel, by way of a mount.
    Mount,
    /// LibFS in the program's process.
    Run,
    /// LibFS, by way of `libashlar`.
    Library,
}

/// A place where sequences are run.
#[derive(Clone, Debug)]
pub struct DifferPlace {
    served_by: ServedBy,
    /// A mount, in whose root the place has a directory of its own.
    mount: PathBuf,
    /// The program, as it is for this place.
    program: PathBuf,
}

/// The sequences of a run.
#[derive(Clone, Copy, Debug)]
pub struct Drawn {
    /// The calls.
    pub calls: DrawnCalls,
    /// The user that makes them.
    pub user: u32,
    /// The number of the first sequence.
    pub first: u64,
    /// How many sequences there are.
    pub sequences: u64,
    /// Calls of a sequence.
    pub steps: u64,
}

/// The program's output, by sequence.
#[derive(Debug, Default)]
pub struct Answers {
    sequences: BTreeMap<u64, Vec<String>>,
    /// The program's error if it ended early.
    complaint: Option<String>,
    /// The part of calls that LibFS served in the process, where that was asked for.
    pub accelerated_share: Option<f64>,
}

impl Answers {
    /// How many calls were made.
    #[must_use]
    pub fn calls(&self) -> u64 {
        let lines = self.sequences.values().flatten();
        lines
            .filter(|line| line.starts_with(|first: char| first.is_ascii_digit()) && !line.contains("left out:"))
            .count() as u64
    }
}

/// The first line of a sequence in which two places differ.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// The sequence.
    pub sequence: u64,
    /// The reference's answer.
    pub expected: String,
    /// The other place's answer.
    pub found: String,
}

impl Difference {
    /// The number of the step whose answer differs; none where it's the tree that does.
    fn step(&self) -> Option<u64> {
        let number = self.expected.strip_prefix(&format!("{}.", self.sequence))?;
        number.split(' ').next()?.parse().ok()
    }

    /// The kind of the difference, without drawn values: the same for differences that look alike.
    fn kind(&self) -> String {
        let call = self.expected.split(['(', ' ']).nth(1).unwrap_or_default();
        let result = |line: &str| line.rsplit_once(") = ").map(|(_, result)| first_word(result).to_owned());
        match (result(&self.expected), result(&self.found)) {
            (Some(expected), Some(found)) if self.step().is_some() => format!("{call} {expected} {found}"),
            _ => self.step().map_or_else(|| "tree".to_owned(), |_| call.to_owned()),
        }
    }
}

fn first_word(text: &str) -> &str {
    text.split(' ').next().unwrap_or_default()
}

impl DifferPlace {
    /// A place in the root of `mount`, for a program.
    #[must_use]
    pub fn new(served_by: ServedBy, mount: &Path, program: &Path) -> Self {
        Self { served_by, mount: mount.to_owned(), program: program.to_owned() }
    }

    /// The place's directory in the mount's root. Paths with many ".." lead into the place, too.
    fn top(&self) -> PathBuf {
        self.mount.join(format!("{:?}", self.served_by).to_lowercase())
    }

    fn path(&self) -> PathBuf {
        let above = self.top().join("inner");
        let used = above.as_os_str().len() + 1;
        above.join("_".repeat(PLACE_NAME_BYTES.saturating_sub(used).max(1)))
    }

    /// Makes the place anew, with what another user has beside the tree.
    fn prepare(&self, user: u32) -> Outcome {
        match fs::remove_dir_all(self.top()) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(format!("clearing {}: {error}", self.top().display()));
            }
            _ => {}
        }
        let path = self.path();
        let strange = path.join("strange");
        fs::create_dir_all(&strange).map_err(tried("making a place"))?;
        chown(&path, Some(user), Some(user)).map_err(tried("giving the place to its user"))?;
        for (name, mode) in [("open", 0o1777), ("closed", 0o700)] {
            let directory = strange.join(name);
            fs::create_dir(&directory).map_err(tried("making a directory"))?;
            fs::set_permissions(&directory, Permissions::from_mode(mode)).map_err(tried("chmod"))?;
        }
        for (name, mode) in
            [("open/theirs", 0o644), ("readable", 0o644), ("secret", 0o600), ("shared", 0o666), ("closed/in", 0o666)]
        {
            let file = strange.join(name);
            fs::write(&file, "strange text\n".repeat(10)).map_err(tried("making a file"))?;
            fs::set_permissions(&file, Permissions::from_mode(mode)).map_err(tried("chmod"))?;
        }
        Ok(())
    }

    fn command(&self, report: &Path) -> Command {
        if self.served_by != ServedBy::Run {
            return Command::new(&self.program);
        }
        let mut command = ashlar(&["run", "--report-json", "--report-to", &report.display().to_string(), "--"]);
        command.arg(&self.program).env(ashlar_wire::DEFER_VARIABLE, "0");
        command
    }

    /// Runs sequences. `scratch` is a directory elsewhere that the user may write.
    pub fn run(&self, scratch: &Path, drawn: &Drawn, options: &[String]) -> Outcome<Answers> {
        self.prepare(drawn.user)?;
        let (output, report) = (scratch.join("answers"), scratch.join("report.json"));
        let file = File::create(&output).map_err(tried("making a file for answers"))?;
        let mut command = self.command(&report);
        command.arg(drawn.calls.word()).arg(self.path());
        command.args([drawn.first, drawn.sequences, drawn.steps].map(|number| number.to_string())).args(options);
        if self.served_by == ServedBy::Library {
            command.arg(format!("mount={}", self.mount.display()));
        }
        command.uid(drawn.user).gid(drawn.user).current_dir("/").stdin(Stdio::null()).stdout(file);
        let errors = scratch.join("errors");
        let file = File::create(&errors).map_err(tried("making a file for complaints"))?;
        let mut child = command.stderr(file).spawn().map_err(tried("starting differ"))?;
        let status = wait(&mut child, RUN_LIMIT)?;
        let said = fs::read(&errors).map_err(tried("reading complaints"))?;
        let complaint = (!status.success()).then(|| format!("{status}: {}", String::from_utf8_lossy(&said).trim()));
        let text = fs::read(&output).map_err(tried("reading the answers"))?;
        let accelerated_share = (self.served_by == ServedBy::Run).then(|| share_of(&report)).transpose()?;
        Ok(Answers { sequences: by_sequence(&String::from_utf8_lossy(&text)), complaint, accelerated_share })
    }
}

/// The part of calls that were served in the process, as a report has it.
fn share_of(report: &Path) -> Outcome<f64> {
    let text = fs::read_to_string(report).map_err(tried("reading the report"))?;
    let report: serde_json::Value = serde_json::from_str(&text).map_err(tried("reading the report's JSON"))?;
    let count = |what: &str| report[what].as_u64().ok_or_else(|| format!("the report does not say '{what}': {report}"));
    let (accelerated, delegated) = (count("accelerated")?, count("delegated")?);
    // A report counts fewer calls than 2^52.
    Ok(accelerated as f64 / (accelerated + delegated).max(1) as f64)
}

fn by_sequence(text: &str) -> BTreeMap<u64, Vec<String>> {
    let mut sequences: BTreeMap<u64, Vec<String>> = BTreeMap::new();
    let mut current = 0;
    for line in text.lines() {
        let number = line.split_once('.').and_then(|(number, _)| number.parse().ok());
        current = number.unwrap_or(current);
        sequences.entry(current).or_default().push(line.to_owned());
    }
    sequences
}

/// The first difference of each sequence.
fn differences(other: ServedBy, expected: &Answers, found: &Answers) -> Vec<Difference> {
    let none = Vec::new();
    let first_of = |(&sequence, lines): (&u64, &Vec<String>)| {
        let theirs = found.sequences.get(&sequence).unwrap_or(&none);
        let end = "(the program has ended)".to_owned();
        let pairs = (0..lines.len().max(theirs.len()))
            .map(|at| (lines.get(at).unwrap_or(&end), theirs.get(at).unwrap_or(&end)));
        let mut differing = pairs.filter(|(expected, found)| !exceptions::are_alike(other, expected, found));
        let (expected, found) = differing.next()?;
        Some(Difference { sequence, expected: expected.clone(), found: found.clone() })
    };
    expected.sequences.iter().filter_map(first_of).collect()
}

/// Two places, and a directory for what is printed there.
#[derive(Debug)]
pub struct Comparison<'a> {
    /// Where the right answers are given.
    pub reference: &'a DifferPlace,
    /// The place that is tried.
    pub other: &'a DifferPlace,
    /// A directory elsewhere that all users may write.
    pub scratch: &'a Path,
    /// Options of the program in the other place.
    pub options: Vec<String>,
}

/// The result of a comparison.
#[derive(Debug)]
pub struct Compared {
    /// How many calls were compared.
    pub calls: u64,
    /// The part of the other place's calls that LibFS served in the process, where that was asked for.
    pub accelerated_share: Option<f64>,
    /// The first difference of each sequence that has one.
    pub differences: Vec<Difference>,
}

impl Comparison<'_> {
    /// Runs sequences in both places.
    pub fn run(&self, drawn: &Drawn) -> Outcome<Compared> {
        self.run_with(drawn, &[])
    }

    fn run_with(&self, drawn: &Drawn, options: &[String]) -> Outcome<Compared> {
        let expected = self.reference.run(self.scratch, drawn, options)?;
        ensure!(expected.complaint.is_none(), "the reference: {}", expected.complaint.unwrap_or_default());
        let theirs: Vec<_> = options.iter().chain(&self.options).cloned().collect();
        let found = self.other.run(self.scratch, drawn, &theirs)?;
        let mut differences = differences(self.other.served_by, &expected, &found);
        if let Some(complaint) = &found.complaint {
            // The sequence that did not come to its end has a difference, and is reported with the reason.
            let last = found.sequences.keys().next_back().copied().unwrap_or(drawn.first);
            differences.retain(|difference| difference.sequence <= last);
            if let Some(difference) = differences.iter_mut().find(|difference| difference.sequence == last) {
                difference.found = format!("{} ({complaint})", difference.found);
            } else {
                let expected = "(the program goes on)".to_owned();
                differences.push(Difference { sequence: last, expected, found: complaint.clone() });
            }
        }
        Ok(Compared { calls: expected.calls(), accelerated_share: found.accelerated_share, differences })
    }

    /// Makes a difference smaller: leaves out steps while the sequence differs in the same way. Returns the steps that
    /// are left.
    pub fn shrink(&self, drawn: &Drawn, difference: &Difference) -> Outcome<Vec<u64>> {
        let alone = Drawn { first: difference.sequence, sequences: 1, ..*drawn };
        let mut steps: Vec<u64> = (0..difference.step().map_or(drawn.steps, |step| step + 1)).collect();
        let mut runs = 0;
        let mut chunk = steps.len().div_ceil(2);
        while chunk > 0 && runs < SHRINK_RUNS_MAX {
            let mut at = 0;
            while at < steps.len() && runs < SHRINK_RUNS_MAX {
                let rest: Vec<_> = steps
                    .iter()
                    .enumerate()
                    .filter(|(place, _)| !(at..at + chunk).contains(place))
                    .map(|(_, step)| *step)
                    .collect();
                runs += 1;
                let still = self.run_with(&alone, &[only(&rest)])?.differences;
                if still.first().is_some_and(|found| found.kind() == difference.kind()) {
                    steps = rest;
                } else {
                    at += chunk;
                }
            }
            chunk /= 2;
        }
        Ok(steps)
    }

    /// Tells of a difference: the smallest sequence of calls that has it, both answers, and how to see it again.
    pub fn tell(&self, drawn: &Drawn, difference: &Difference) -> Outcome<String> {
        let steps = self.shrink(drawn, difference)?;
        let alone = Drawn { first: difference.sequence, sequences: 1, ..*drawn };
        let options = [only(&steps), "each=1".to_owned()];
        let expected = self.reference.run(self.scratch, &alone, &options[..1])?;
        let shown = self.run_with(&alone, &options)?.differences.first().cloned().unwrap_or_else(|| difference.clone());
        let calls: Vec<_> =
            expected.sequences.values().flatten().filter(|line| !line.starts_with(' ')).cloned().collect();
        Ok(format!(
            "sequence {} of '{}' as user {}, steps {steps:?} of {}:\n  {}\nexpected: {}\nfound:    {}\n\
             again: ASHLAR_DIFFER_SEED={} ASHLAR_DIFFER_CALLS=1 ashlar-suite random_calls",
            difference.sequence,
            drawn.calls.word(),
            drawn.user,
            drawn.steps,
            calls.join("\n  "),
            shown.expected.trim(),
            shown.found.trim(),
            difference.sequence,
        ))
    }
}

fn only(steps: &[u64]) -> String {
    let steps: Vec<_> = steps.iter().map(u64::to_string).collect();
    format!("only={}", steps.join(","))
}

/// How often each kind of difference was met, with the sequences.
#[must_use]
pub fn count_kinds(differences: &[Difference]) -> BTreeMap<String, Vec<u64>> {
    let mut kinds: BTreeMap<String, Vec<u64>> = BTreeMap::new();
    for difference in differences {
        kinds.entry(difference.kind()).or_default().push(difference.sequence);
    }
    kinds
}
