//! The result of the benchmark, for people and in JSON.

use std::collections::BTreeMap;

use serde::Serialize;

use super::breakdown::{Share, shares};
use super::case::{Case, Contender, Figure, Measurement};
use super::timing::{Summary, median};
use super::worker::{ONE_PROCESS, TWO_PROCESSES};
use crate::output::table::{grouped, table};

/// The conditions of the measurement.
#[derive(Clone, Debug, Serialize)]
pub struct Setting {
    /// The version of this program.
    pub version: &'static str,
    /// The directory on Ashlar.
    pub directory: String,
    /// Its arena.
    pub arena: String,
    /// Its medium.
    pub medium: String,
    /// The length of an update log.
    pub log_bytes: u64,
    /// The directory to compare with.
    pub compared: String,
    /// The type of file system that it is in.
    pub compared_kind: String,
    /// How often everything was measured.
    pub rounds: u64,
    /// Cores that this process may use.
    pub processors: usize,
    /// Whether FUSE over io_uring is switched on; `None` if the kernel has none.
    pub rings: Option<bool>,
    /// The time of one reading of the clock, which is part of each time of a single operation.
    pub clock_ns: f64,
}

/// A line: the operation, and each contender's times in each round.
#[derive(Debug)]
struct ReportLine {
    case: Case,
    what: String,
    figure: Figure,
    rounds: BTreeMap<Contender, Vec<Summary>>,
}

impl ReportLine {
    /// Returns a contender's shown number in each round.
    fn times(&self, contender: Contender) -> Vec<f64> {
        let time = |summary: &Summary| match self.figure {
            Figure::Median => summary.p50_ns,
            Figure::Mean | Figure::Rate => summary.mean_ns,
        };
        self.rounds.get(&contender).into_iter().flatten().map(time).collect()
    }

    fn time(&self, contender: Contender) -> Option<f64> {
        median(self.times(contender).into_iter())
    }

    /// Returns how much longer one takes than another: the median of the rounds' ratios.
    fn ratio(&self, one: Contender, other: Contender) -> Option<f64> {
        let (ours, theirs) = (self.times(one), self.times(other));
        median(ours.iter().zip(&theirs).map(|(ours, theirs)| ours / theirs))
    }

    /// Returns all numbers, for JSON.
    fn numbers(&self) -> LineNumbers<'_> {
        let of = |contender| Some((contender, self.over_rounds(contender)?));
        LineNumbers {
            case: self.case,
            what: self.what.as_str(),
            figure: self.figure,
            unit: if self.figure == Figure::Rate { "1/s" } else { "ns" },
            contenders: Contender::ALL.into_iter().filter_map(of).collect(),
            run_to_floor: self.ratio(Contender::Run, Contender::Floor),
            compared_to_run: self.ratio(Contender::Compared, Contender::Run),
            fuse_to_run: self.ratio(Contender::Fuse, Contender::Run),
        }
    }

    /// Returns medians over the rounds; for the longest time, the longest of all.
    fn over_rounds(&self, contender: Contender) -> Option<Numbers> {
        let rounds = self.rounds.get(&contender)?;
        let of = |number: fn(&Summary) -> f64| median(rounds.iter().map(number));
        Some(Numbers {
            value: self.time(contender).map(|time| if self.figure == Figure::Rate { 1e9 / time } else { time })?,
            p50_ns: of(|summary| summary.p50_ns)?,
            p99_ns: of(|summary| summary.p99_ns)?,
            max_ns: rounds.iter().map(|summary| summary.max_ns).fold(0.0, f64::max),
            mean_ns: of(|summary| summary.mean_ns)?,
            batch: rounds.iter().map(|summary| summary.batch).max()?,
            rounds: rounds.clone(),
        })
    }
}

/// The numbers of a contender in a line.
#[derive(Debug, Serialize)]
struct Numbers {
    /// The table's figure: nanoseconds, or operations a second.
    value: f64,
    p50_ns: f64,
    p99_ns: f64,
    max_ns: f64,
    mean_ns: f64,
    batch: u64,
    rounds: Vec<Summary>,
}

/// A line in JSON.
#[derive(Debug, Serialize)]
struct LineNumbers<'a> {
    case: Case,
    what: &'a str,
    figure: Figure,
    unit: &'static str,
    contenders: BTreeMap<Contender, Numbers>,
    run_to_floor: Option<f64>,
    compared_to_run: Option<f64>,
    fuse_to_run: Option<f64>,
}

/// How many times faster two processes are than one.
#[derive(Debug, Serialize)]
struct Scaling {
    what: &'static str,
    times: BTreeMap<Contender, f64>,
}

/// The whole document.
#[derive(Debug, Serialize)]
struct Document<'a> {
    setting: &'a Setting,
    lines: Vec<LineNumbers<'a>>,
    scaling: Option<Scaling>,
    breakdown: Vec<Share>,
}

/// All results.
#[derive(Debug)]
pub struct BenchReport {
    setting: Setting,
    lines: Vec<ReportLine>,
}

/// The columns, except the compared file system's, which is named by its type.
const SHOWN: [Contender; 3] = [Contender::Run, Contender::Fuse, Contender::Compared];

impl BenchReport {
    /// Makes an empty report.
    pub fn new(setting: Setting) -> Self {
        Self { setting, lines: Vec::new() }
    }

    /// Adds a contender's line of a round. Within a round each contender has its turn, so the rounds of all line up.
    pub fn add(&mut self, case: Case, contender: Contender, measured: Measurement) {
        let Measurement { what, figure, summary } = measured;
        let at = self.lines.iter().position(|line| line.case == case && line.what == what).unwrap_or_else(|| {
            // Rounds begin with different contenders, and some have lines that others lack: each case's lines stay
            // together.
            let behind = self.lines.iter().rposition(|line| line.case == case);
            let at = behind.map_or(self.lines.len(), |last| last + 1);
            self.lines.insert(at, ReportLine { case, what, figure, rounds: BTreeMap::new() });
            at
        });
        self.lines[at].rounds.entry(contender).or_default().push(summary);
    }

    fn lines(&self) -> impl Iterator<Item = &ReportLine> {
        self.lines.iter().filter(|line| line.case != Case::Breakdown)
    }

    fn breakdown(&self) -> Vec<Share> {
        shares(&|operation, part, contender| {
            let what = format!("{operation}: {}", part.name());
            self.lines.iter().find(|line| line.case == Case::Breakdown && line.what == what)?.time(contender)
        })
    }

    fn scaling(&self) -> Option<Scaling> {
        let line = |what: &str| self.lines.iter().find(|line| line.case == Case::Create && line.what == what);
        let (one, two) = (line(ONE_PROCESS)?, line(TWO_PROCESSES)?);
        let times = SHOWN.into_iter().filter_map(|contender| {
            let (one, two) = (one.times(contender), two.times(contender));
            Some((contender, median(one.iter().zip(&two).map(|(one, two)| one / two))?))
        });
        Some(Scaling { what: "2 processes, times as fast as 1", times: times.collect() })
    }

    /// Returns the report in JSON.
    pub fn json(&self) -> Result<String, serde_json::Error> {
        let document = Document {
            setting: &self.setting,
            lines: self.lines().map(ReportLine::numbers).collect(),
            scaling: self.scaling(),
            breakdown: self.breakdown(),
        };
        serde_json::to_string_pretty(&document)
    }

    /// Returns the report for people.
    pub fn text(&self) -> String {
        let Setting { directory, arena, medium, log_bytes, compared, compared_kind, .. } = &self.setting;
        let Setting { rounds, processors, rings, clock_ns, .. } = &self.setting;
        let log = crate::output::size::Size(*log_bytes);
        let mut text = format!("ashlar    {directory} (arena {arena}, {medium}; update logs of {log})\n");
        text += &format!("compared  {compared} ({compared_kind})\n");
        let plural = if *rounds == 1 { "round" } else { "rounds" };
        text += &format!(
            "method    {rounds} {plural} in turn, medians; {processors} cores; the clock takes {clock_ns:.0} ns\n"
        );
        let requests = if *rings == Some(true) { "over io_uring" } else { "from /dev/fuse" };
        text += &format!("requests  {requests} (of mounts that are made now)\n");
        let name = compared_kind.to_uppercase();
        if self.lines().next().is_some() {
            text += "\n";
            text += &self.comparison(&name);
            text += "\n";
            text += &self.percentiles(&name);
        }
        let shares = self.breakdown();
        if !shares.is_empty() {
            let cell = |share: &Share, contender| share.ns.get(&contender).map_or(NONE.to_owned(), |ns| time(*ns));
            let row = |share: &Share| {
                let mut cells = vec![share.operation.to_owned(), share.part.to_owned()];
                cells.extend(SHOWN.map(|contender| cell(share, contender)));
                cells.push(if share.is_difference { "by difference" } else { "" }.to_owned());
                cells
            };
            let rows: Vec<_> = shares.iter().map(row).collect();
            text += "\n";
            text += &table(&["WHERE THE TIME GOES", "PART", "RUN", "FUSE", &name, ""], &rows);
        }
        text
    }

    /// Formats the comparison of all contenders.
    fn comparison(&self, name: &str) -> String {
        let cell = |line: &ReportLine, contender| {
            line.over_rounds(contender).map_or(NONE.to_owned(), |numbers| match line.figure {
                Figure::Rate => format!("{} /s", grouped(numbers.value.round() as u64)),
                Figure::Median | Figure::Mean => time(numbers.value),
            })
        };
        let factor = |value: Option<f64>| value.map_or(NONE.to_owned(), ratio);
        let row = |line: &ReportLine| {
            let mut cells = vec![line.what.clone()];
            cells.extend(Contender::ALL.map(|contender| cell(line, contender)));
            cells.push(factor(line.ratio(Contender::Run, Contender::Floor)));
            cells.push(factor(line.ratio(Contender::Compared, Contender::Run)));
            cells.push(factor(line.ratio(Contender::Fuse, Contender::Run)));
            cells
        };
        let mut rows: Vec<_> = self.lines().map(row).collect();
        if let Some(scaling) = self.scaling() {
            let at = self.lines().position(|line| line.what == TWO_PROCESSES).map_or(rows.len(), |at| at + 1);
            let mut cells = vec![scaling.what.to_owned(), NONE.to_owned()];
            cells.extend(SHOWN.map(|contender| factor(scaling.times.get(&contender).copied())));
            cells.extend([(); 3].map(|()| NONE.to_owned()));
            rows.insert(at, cells);
        }
        let last = format!("{name}/RUN");
        table(&["CASE", "FLOOR", "RUN", "FUSE", name, "RUN/FLOOR", &last, "FUSE/RUN"], &rows)
    }

    /// Formats how far single operations are from the median.
    fn percentiles(&self, name: &str) -> String {
        let mut batched = 0;
        let mut row = |line: &ReportLine| {
            let mut cells = vec![line.what.clone()];
            for contender in SHOWN {
                let Some(numbers) = line.over_rounds(contender) else {
                    cells.extend([(); 3].map(|()| NONE.to_owned()));
                    continue;
                };
                batched = batched.max(if numbers.batch > 1 { numbers.batch } else { 0 });
                let mark = if numbers.batch > 1 { "*" } else { "" };
                cells.extend([numbers.p50_ns, numbers.p99_ns, numbers.max_ns].map(|ns| time(ns) + mark));
            }
            cells
        };
        // Cases that run once per round have no percentiles, and the files of one process are shown as single
        // operations already.
        let is_shown = |line: &&ReportLine| {
            line.what != ONE_PROCESS && line.rounds.values().flatten().any(|summary| summary.count > 1)
        };
        let rows: Vec<_> = self.lines().filter(is_shown).map(&mut row).collect();
        let third = format!("{name} p50");
        let header = ["CASE", "RUN p50", "p99", "max", "FUSE p50", "p99", "max", &third, "p99", "max"];
        let mut text = table(&header, &rows);
        if batched > 0 {
            text += &format!(
                "* timed in batches of {batched}, since one takes a microsecond or less: of the batches' means\n"
            );
        }
        text
    }
}

/// The sign for a missing number.
pub const NONE: &str = "-";

/// Formats a ratio, with as many digits as are significant.
pub fn ratio(value: f64) -> String {
    match value {
        ..0.095 => format!("{value:.4}"),
        ..99.5 => format!("{value:.2}"),
        _ => format!("{value:.0}"),
    }
}

/// Formats a time in a suitable unit.
pub fn time(ns: f64) -> String {
    match ns {
        ..1e3 => format!("{ns:.0} ns"),
        ..1e6 => format!("{:.2} us", ns / 1e3),
        ..1e9 => format!("{:.2} ms", ns / 1e6),
        _ => format!("{:.2} s", ns / 1e9),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    fn report() -> BenchReport {
        let setting = Setting {
            version: "0",
            directory: "/mnt".into(),
            arena: "/arena".into(),
            medium: "memory".into(),
            log_bytes: 64 << 20,
            compared: "/dev/shm".into(),
            compared_kind: "tmpfs".into(),
            rounds: 3,
            processors: 2,
            rings: None,
            clock_ns: 20.0,
        };
        BenchReport::new(setting)
    }

    fn summary(ns: f64) -> Summary {
        Summary { count: 10, batch: 1, p50_ns: ns, p99_ns: 2.0 * ns, max_ns: 3.0 * ns, mean_ns: ns }
    }

    #[test]
    fn figure_is_median_of_rounds_ratio_is_median_of_ratios() {
        let mut report = report();
        for (run, fuse) in [(100.0, 300.0), (200.0, 2000.0), (150.0, 900.0)] {
            report.add(Case::Stat, Contender::Run, Measurement::median("stat", summary(run)));
            report.add(Case::Stat, Contender::Fuse, Measurement::median("stat", summary(fuse)));
        }
        let line = &report.lines[0];
        assert_eq!((line.time(Contender::Run), line.time(Contender::Fuse)), (Some(150.0), Some(900.0)));
        assert_eq!(line.ratio(Contender::Fuse, Contender::Run), Some(6.0));
        assert_eq!(line.ratio(Contender::Run, Contender::Floor), None);
        let json: Value = serde_json::from_str(&report.json().expect("JSON")).expect("JSON");
        let run = &json["lines"][0]["contenders"]["run"];
        assert_eq!((run["value"].as_f64(), run["max_ns"].as_f64()), (Some(150.0), Some(600.0)));
        assert_eq!(run["rounds"].as_array().map(Vec::len), Some(3));
        let text = report.text();
        assert!(text.contains("150 ns") && text.contains("6.00") && text.contains("600 ns"), "{text}");
    }

    #[test]
    fn lines_of_a_case_stay_together() {
        let mut report = report();
        report.add(Case::Create, Contender::Floor, Measurement::rate(ONE_PROCESS, summary(10.0)));
        report.add(Case::Stat, Contender::Run, Measurement::median("stat", summary(1.0)));
        report.add(Case::Create, Contender::Run, Measurement::rate(ONE_PROCESS, summary(100.0)));
        report.add(Case::Create, Contender::Run, Measurement::rate(TWO_PROCESSES, summary(60.0)));
        let cases: Vec<_> = report.lines.iter().map(|line| line.case).collect();
        assert_eq!(cases, [Case::Create, Case::Create, Case::Stat]);
        let text = report.text();
        assert!(text.contains("10,000,000 /s") && text.contains("1.67"), "{text}");
    }

    #[test]
    fn numbers_have_the_digits_and_units_that_suit_them() {
        assert_eq!([0.012_34, 0.25, 12.345, 2489.4].map(ratio), ["0.0123", "0.25", "12.35", "2489"]);
        assert_eq!([7.4, 1500.0, 2.5e6, 3e9].map(time), ["7 ns", "1.50 us", "2.50 ms", "3.00 s"]);
    }
}
