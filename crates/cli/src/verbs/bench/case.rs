//! The cases of the benchmark, and its contenders.

use serde::{Deserialize, Serialize};

use super::timing::Summary;

/// A contender.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Contender {
    /// The least that an operation must do: its bytes moved, and nothing else.
    Floor,
    /// Ashlar, by LibFS in the process itself (`ashlar run`).
    Run,
    /// Ashlar, through the kernel and the mount.
    Fuse,
    /// The directory to compare with.
    Compared,
}

impl Contender {
    /// All of them, in the order of the table's columns.
    pub const ALL: [Self; 4] = [Self::Floor, Self::Run, Self::Fuse, Self::Compared];

    /// Returns its name, for people and in JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Floor => "floor",
            Self::Run => "run",
            Self::Fuse => "fuse",
            Self::Compared => "compared",
        }
    }

    /// Whether it works on Ashlar's files.
    pub const fn is_ashlar(self) -> bool {
        matches!(self, Self::Run | Self::Fuse)
    }
}

/// Operations that are measured together: `--cases` chooses by these names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Case {
    /// Writing after the end of a file.
    Append,
    /// Overwriting a file.
    Overwrite,
    /// Writing after the end, in a process that has run a command.
    Processes,
    /// Both, filling the update log several times.
    Sustained,
    /// Reading.
    Read,
    /// Mapping files, and reading them.
    Map,
    /// Making files, by one process and by two.
    Create,
    /// Making files until the update log was filled ten times.
    CreateSustained,
    /// Attributes by name.
    Stat,
    /// Opening and closing.
    Open,
    /// Listing a directory.
    Readdir,
    /// Two processes that append to one file in turn.
    Turns,
    /// Starting a program.
    Start,
    /// A shell script of short commands.
    Script,
    /// The parts of one operation's time.
    Breakdown,
}

impl Case {
    /// All of them, in the order of the table's lines.
    pub const ALL: [Self; 15] = [
        Self::Append,
        Self::Overwrite,
        Self::Processes,
        Self::Sustained,
        Self::Read,
        Self::Map,
        Self::Create,
        Self::CreateSustained,
        Self::Stat,
        Self::Open,
        Self::Readdir,
        Self::Turns,
        Self::Start,
        Self::Script,
        Self::Breakdown,
    ];

    /// Returns its name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Append => "append",
            Self::Overwrite => "overwrite",
            Self::Processes => "processes",
            Self::Sustained => "sustained",
            Self::Read => "read",
            Self::Map => "map",
            Self::Create => "create",
            Self::CreateSustained => "create-sustained",
            Self::Stat => "stat",
            Self::Open => "open",
            Self::Readdir => "readdir",
            Self::Turns => "turns",
            Self::Start => "start",
            Self::Script => "script",
            Self::Breakdown => "breakdown",
        }
    }

    /// Whether it takes minutes, and runs only with `--long`.
    pub const fn is_long(self) -> bool {
        matches!(self, Self::CreateSustained)
    }

    /// Returns the contenders that it measures.
    pub fn contenders(self) -> impl Iterator<Item = Contender> {
        let has_floor = matches!(
            self,
            Self::Append
                | Self::Overwrite
                | Self::Processes
                | Self::Sustained
                | Self::Read
                | Self::Create
                | Self::CreateSustained
                | Self::Turns
        );
        Contender::ALL.into_iter().filter(move |contender| has_floor || *contender != Contender::Floor)
    }

    /// Whether it measures started programs, rather than calls of its own.
    pub const fn starts_programs(self) -> bool {
        matches!(self, Self::Start | Self::Script)
    }

    /// Returns the steps of the contender's processes, one after the other.
    pub const fn steps(self, contender: Contender) -> &'static [Step] {
        match (self, contender) {
            (Self::Read, Contender::Floor) => &[Step::Alone],
            // Data counts as foreign only if another process has written it.
            (Self::Read | Self::Map, _) => &[Step::Before, Step::Alone],
            (Self::Create, Contender::Floor) => &[Step::Alone],
            (Self::Create, _) => &[Step::Alone, Step::Pair],
            (Self::Turns, _) => &[Step::Pair],
            _ => &[Step::Alone],
        }
    }
}

/// The number of processes of a step, and its purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Step {
    /// One, to prepare for the next step.
    Before,
    /// One.
    Alone,
    /// Two at once.
    Pair,
}

/// The number of a summary that the report shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Figure {
    /// The median: the time of one operation.
    Median,
    /// The mean: the share of each in the whole time, waiting included.
    Mean,
    /// The mean, as operations a second.
    Rate,
}

/// A line of the report, of one contender in one round.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Measurement {
    /// The operation.
    pub what: String,
    /// The shown number.
    pub figure: Figure,
    /// Its times.
    pub summary: Summary,
}

impl Measurement {
    /// Makes a line for the time of one operation.
    pub fn median(what: impl Into<String>, summary: Summary) -> Self {
        Self { what: what.into(), figure: Figure::Median, summary }
    }

    /// Makes a line for the mean time of many operations.
    pub fn mean(what: impl Into<String>, summary: Summary) -> Self {
        Self { what: what.into(), figure: Figure::Mean, summary }
    }

    /// Makes a line for the operations in a second.
    pub fn rate(what: impl Into<String>, summary: Summary) -> Self {
        Self { what: what.into(), figure: Figure::Rate, summary }
    }
}

/// Returns the line of two processes that did the same at once: as many operations as both, in the time of the slower
/// one. A percentile is the greater of the two.
pub fn together(mut one: Measurement, other: &Measurement) -> Measurement {
    let (a, b) = (&mut one.summary, &other.summary);
    let elapsed = (a.mean_ns * a.count as f64).max(b.mean_ns * b.count as f64);
    a.count += b.count;
    a.batch = a.batch.max(b.batch);
    a.mean_ns = elapsed / a.count as f64;
    a.p50_ns = a.p50_ns.max(b.p50_ns);
    a.p99_ns = a.p99_ns.max(b.p99_ns);
    a.max_ns = a.max_ns.max(b.max_ns);
    one
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_processes_count_as_both_in_the_slower_one_s_time() {
        let summary = |mean_ns, p99_ns| Summary { count: 100, batch: 1, p50_ns: 5.0, p99_ns, max_ns: 90.0, mean_ns };
        let both = together(Measurement::rate("x", summary(10.0, 50.0)), &Measurement::rate("x", summary(30.0, 40.0)));
        assert_eq!((both.summary.count, both.summary.mean_ns, both.summary.p99_ns), (200, 15.0, 50.0));
    }

    #[test]
    fn cases_have_names_of_their_own_which_json_has_too() {
        for case in Case::ALL {
            assert_eq!(serde_json::to_string(&case).expect("JSON"), format!("\"{}\"", case.name()));
            assert_eq!(Case::ALL.iter().filter(|other| other.name() == case.name()).count(), 1);
        }
    }
}
