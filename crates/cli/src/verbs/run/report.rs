//! The report of `ashlar run --report`: how calls on an Ashlar were served.
//!
//! It says how often each was accelerated, delegated and missed.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use ashlar_types::escape_controls;
use ashlar_wire::{
    CallCounts, MissedProgram, MissedReply, REPORT_BEGIN, REPORT_BYTES, REPORT_CALLS, REPORT_DEVICES_MAX,
    REPORT_DIRECTORY, REPORT_END, REPORT_THREADS, decode_report, encode_report_header,
};
use rustix::fs::{FallocateFlags, fallocate, getxattr};
use serde::Serialize;

use super::system_calls;
use crate::error::CliError;
use crate::output::table::{grouped, table};

/// The prefix of names of files of counts; the process number follows.
const COUNTS_PREFIX: &str = "ashlar-report-";
/// The longest value of an attribute that the kernel hands over.
const ATTRIBUTE_MAX: usize = 64 << 10;

/// The file in which the processes of a run count their calls. Dropping it removes the file.
pub struct RunCounts {
    path: PathBuf,
    file: File,
    /// The mounts, each with the reason why it does not count its requests, if it doesn't.
    mounts: Vec<(PathBuf, Option<String>)>,
}

impl RunCounts {
    /// Makes the file, and makes the mounts count.
    ///
    /// # Errors
    /// Those of making a file.
    pub fn begin_count(mounts: Vec<PathBuf>) -> Result<Self, CliError> {
        remove_stale_counts();
        let path = Path::new(REPORT_DIRECTORY).join(format!("{COUNTS_PREFIX}{}", std::process::id()));
        let failed = || CliError::system(format!("making {} for the report", path.display()));
        let file = File::options().read(true).write(true).create_new(true).mode(0o600).open(&path).map_err(failed())?;
        let mut counts = Self { path: path.clone(), file, mounts: Vec::new() };
        // The whole file is allocated now. If memory is short, that shows here, and not in the middle of a program.
        let made = fallocate(&counts.file, FallocateFlags::empty(), 0, REPORT_BYTES as u64);
        made.map_err(std::io::Error::from).map_err(failed())?;
        let device = |mount: &PathBuf| fs::metadata(mount).map_or(0, |found| found.dev());
        let devices: Vec<_> = mounts.iter().take(REPORT_DEVICES_MAX).map(device).collect();
        counts.file.write_all_at(&encode_report_header(&devices), 0).map_err(failed())?;
        let attribute = format!("{REPORT_BEGIN}{}", counts.name());
        let begin = |mount: PathBuf| {
            let answer = getxattr(&mount, &attribute, &mut [0u8; 1][..]);
            (mount, answer.err().map(mount_problem))
        };
        counts.mounts = mounts.into_iter().map(begin).collect();
        Ok(counts)
    }

    /// Returns the path that programs get.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn name(&self) -> String {
        self.path.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }

    /// Ends the count and returns it.
    ///
    /// # Errors
    /// Those of reading the file.
    pub fn end_count(mut self, command: String, refused: Vec<(PathBuf, String)>) -> Result<RunReport, CliError> {
        let mut missed = Vec::new();
        for (mount, trouble) in &mut self.mounts {
            if trouble.is_some() {
                continue;
            }
            let mut value = vec![0; ATTRIBUTE_MAX];
            match getxattr(&*mount, REPORT_END, &mut value[..]) {
                Ok(length) => match MissedReply::decode(&value[..length]) {
                    Some(reply) => missed.push(reply),
                    None => *trouble = Some("it is served by another version of ashlar".into()),
                },
                Err(error) => *trouble = Some(mount_problem(error)),
            }
        }
        let mut content = vec![0; REPORT_THREADS];
        let reading = || CliError::system(format!("reading {}", self.path.display()));
        self.file.read_exact_at(&mut content, 0).map_err(reading())?;
        let (calls, programs) = decode_report(&content).ok_or(CliError::Misunderstood)?;
        let unknown = self.mounts.iter().filter_map(|(mount, trouble)| Some((mount.clone(), trouble.clone()?)));
        Ok(RunReport { refused, ..RunReport::new(command, &calls, programs, &missed, unknown.collect()) })
    }
}

impl Drop for RunCounts {
    fn drop(&mut self) {
        // A process that has the file mapped goes on counting, without a reader.
        let _ = fs::remove_file(&self.path);
    }
}

fn mount_problem(error: rustix::io::Errno) -> String {
    match error {
        rustix::io::Errno::NODATA | rustix::io::Errno::OPNOTSUPP => "it is served by another version of ashlar".into(),
        rustix::io::Errno::AGAIN => "too many reports are made there at once".into(),
        error => error.to_string(),
    }
}

/// Removes files of runs that were killed.
fn remove_stale_counts() {
    let Ok(files) = fs::read_dir(REPORT_DIRECTORY) else { return };
    for file in files.flatten() {
        let name = file.file_name();
        let pid = name.to_str().and_then(|name| name.strip_prefix(COUNTS_PREFIX)?.parse::<u32>().ok());
        if pid.is_some_and(|pid| pid == std::process::id() || !Path::new(&format!("/proc/{pid}")).exists()) {
            // It may be another user's.
            let _ = fs::remove_file(file.path());
        }
    }
}

/// One line of the table.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
struct CallLine {
    call: String,
    accelerated: u64,
    accelerated_ns: u64,
    delegated: u64,
    delegated_ns: u64,
    missed: u64,
}

impl CallLine {
    fn calls(&self) -> u64 {
        self.accelerated.saturating_add(self.delegated).saturating_add(self.missed)
    }
}

/// The result of a run.
#[derive(Debug, Serialize)]
pub struct RunReport {
    command: String,
    /// Processes that began with the library.
    programs: u64,
    calls: Vec<CallLine>,
    accelerated: u64,
    accelerated_ns: u64,
    delegated: u64,
    delegated_ns: u64,
    missed: u64,
    /// Of all calls.
    missed_percent: f64,
    /// The programs whose calls were missed.
    missed_by: Vec<MissedBy>,
    /// Mounts that did not report their requests, and why.
    unknown: Vec<(PathBuf, String)>,
    /// Mounts that have no sessions for the user, and why.
    refused: Vec<(PathBuf, String)>,
    fuse_requests: RequestCounts,
}

/// A program whose calls were missed.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
struct MissedBy {
    missed: u64,
    program: String,
    has_library: bool,
}

/// The requests that reached the mounts.
#[derive(Debug, Default, Serialize)]
struct RequestCounts {
    delegated: u64,
    missed: u64,
    memory: u64,
    read_ahead: u64,
}

impl RunReport {
    fn new(
        command: String,
        counts: &[CallCounts],
        programs: u64,
        replies: &[MissedReply],
        unknown: Vec<(PathBuf, String)>,
    ) -> Self {
        let mut lines: Vec<CallLine> =
            counts.iter().enumerate().map(|(number, counts)| call_line(number, counts)).collect();
        let mut other = CallLine { call: "not known".into(), ..CallLine::default() };
        let mut requests = RequestCounts::default();
        let mut missed_by = Vec::new();
        for reply in replies {
            for &(call, count) in &reply.calls {
                let number = usize::try_from(call).ok().filter(|number| *number < REPORT_CALLS);
                let line = number.and_then(|number| lines.get_mut(number)).unwrap_or(&mut other);
                line.missed = line.missed.saturating_add(count);
            }
            let add = |sum: &mut u64, count| *sum = sum.saturating_add(count);
            add(&mut requests.delegated, reply.counted);
            add(&mut requests.missed, reply.missed());
            add(&mut requests.memory, reply.memory);
            add(&mut requests.read_ahead, reply.behind);
            let by = |program: &MissedProgram| MissedBy {
                missed: program.requests,
                program: escape_controls(&program.name).into_owned(),
                has_library: program.has_library,
            };
            missed_by.extend(reply.programs.iter().map(by));
        }
        lines.push(other);
        lines.retain(|line| line.calls() > 0);
        lines.sort_by_key(|line| std::cmp::Reverse(line.calls()));
        missed_by.sort_by(|a, b| b.cmp(a));
        let sum = |of: fn(&CallLine) -> u64| lines.iter().map(of).fold(0, u64::saturating_add);
        let (accelerated, delegated, missed) =
            (sum(|line| line.accelerated), sum(|line| line.delegated), sum(|line| line.missed));
        let (accelerated_ns, delegated_ns) = (sum(|line| line.accelerated_ns), sum(|line| line.delegated_ns));
        let all = sum(CallLine::calls);
        let missed_percent = if all == 0 { 0.0 } else { 100.0 * missed as f64 / all as f64 };
        Self {
            command,
            programs,
            calls: lines,
            accelerated,
            accelerated_ns,
            delegated,
            delegated_ns,
            missed,
            missed_percent,
            missed_by,
            unknown,
            refused: Vec::new(),
            fuse_requests: requests,
        }
    }

    /// Returns the report for people.
    pub fn text(&self) -> String {
        let mut text = format!("ashlar: calls on Ashlar by {}\n", self.command);
        let all = CallLine {
            call: "all".into(),
            accelerated: self.accelerated,
            accelerated_ns: self.accelerated_ns,
            delegated: self.delegated,
            delegated_ns: self.delegated_ns,
            missed: self.missed,
        };
        let rows: Vec<_> = self.calls.iter().chain([&all]).map(line_cells).collect();
        text += &table(&["CALL", "ACCELERATED", "TIME", "DELEGATED", "TIME", "MISSED"], &rows);
        let of_all = |part: u64| share(part, all.calls());
        text += &format!(
            "accelerated {}, delegated {}, missed {}\n",
            of_all(self.accelerated),
            of_all(self.delegated),
            of_all(self.missed)
        );
        let requests = &self.fuse_requests;
        let sum = requests.delegated + requests.missed + requests.memory + requests.read_ahead;
        if sum > 0 {
            text += &format!(
                "through the kernel: {} requests ({} by delegated calls, {} by missed ones, {} for programs and mapped memory, {} read \
                 ahead)\n",
                grouped(sum),
                grouped(requests.delegated),
                grouped(requests.missed),
                grouped(requests.memory),
                grouped(requests.read_ahead)
            );
        }
        for by in &self.missed_by {
            let why = if by.has_library { "past the library" } else { "without the library" };
            text += &format!("missed: {} by {}, {why}\n", grouped(by.missed), by.program);
        }
        for (mount, why) in &self.refused {
            text += &format!("{} is served by the kernel: {why}\n", mount.display());
        }
        for (mount, why) in &self.unknown {
            text += &format!("what was missed on {} is not known: {why}\n", mount.display());
        }
        text
    }

    /// Returns the report for programs.
    ///
    /// # Errors
    /// None in practice.
    pub fn json(&self) -> Result<String, CliError> {
        serde_json::to_string_pretty(self).map(|text| text + "\n").map_err(CliError::system("writing JSON"))
    }

    /// Writes the report to a file, or to standard error.
    ///
    /// # Errors
    /// Those of writing.
    pub fn write(&self, to: Option<&Path>, as_json: bool) -> Result<(), CliError> {
        let text = if as_json { self.json()? } else { self.text() };
        match to {
            Some(path) => {
                fs::write(path, text).map_err(CliError::system(format!("writing the report to {}", path.display())))
            }
            None => std::io::stderr().write_all(text.as_bytes()).map_err(CliError::system("writing the report")),
        }
    }
}

fn call_line(number: usize, counts: &CallCounts) -> CallLine {
    CallLine {
        call: system_calls::name(number),
        accelerated: counts.accelerated,
        accelerated_ns: counts.accelerated_ns,
        delegated: counts.delegated,
        delegated_ns: counts.delegated_ns,
        missed: 0,
    }
}

fn line_cells(line: &CallLine) -> Vec<String> {
    vec![
        line.call.clone(),
        grouped(line.accelerated),
        time(line.accelerated_ns),
        grouped(line.delegated),
        time(line.delegated_ns),
        grouped(line.missed),
    ]
}

/// Formats a time in about three digits.
fn time(ns: u64) -> String {
    match ns {
        0..=999 => format!("{ns} ns"),
        1_000..=999_999 => format!("{:.1} µs", ns as f64 / 1e3),
        1_000_000..=999_999_999 => format!("{:.1} ms", ns as f64 / 1e6),
        _ => format!("{:.2} s", ns as f64 / 1e9),
    }
}

/// Formats a share of all calls. A share above 0 is never shown as 0.
fn share(part: u64, whole: u64) -> String {
    let percent = 100.0 * part as f64 / whole.max(1) as f64;
    match part {
        0 => "0 %".into(),
        _ if percent < 0.01 => "< 0.01 %".into(),
        _ => format!("{percent:.2} %"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> RunReport {
        let mut counts = vec![CallCounts::default(); REPORT_CALLS];
        counts[0] = CallCounts { accelerated: 9_990, accelerated_ns: 4_000_000, delegated: 5, delegated_ns: 90_000 };
        counts[257] = CallCounts { accelerated: 2, accelerated_ns: 900, ..CallCounts::default() };
        let program = |name: &str, has_library, requests| MissedProgram { name: name.into(), has_library, requests };
        let reply = |calls, programs| MissedReply { calls, programs, counted: 4, memory: 2, behind: 1 };
        let replies = [
            reply(vec![(257, 2)], vec![program("busybox", false, 2)]),
            reply(vec![(-1, 1)], vec![program("python3", true, 1)]),
        ];
        RunReport::new("make test".into(), &counts, 3, &replies, vec![("/mnt/b".into(), "it is busy".into())])
    }

    #[test]
    fn calls_are_counted_together_and_missed_ones_too() {
        let report = report();
        assert_eq!((report.accelerated, report.delegated, report.missed), (9_992, 5, 3));
        assert!((report.missed_percent - 0.03).abs() < 1e-9, "{}", report.missed_percent);
        let line = |call: &str| report.calls.iter().find(|line| line.call == call).expect("a line").clone();
        assert_eq!((line("openat").accelerated, line("openat").missed, line("not known").missed), (2, 2, 1));
        assert_eq!(report.calls[0].call, "read", "the most frequent comes first");
        let json: serde_json::Value = serde_json::from_str(&report.json().expect("JSON")).expect("JSON");
        assert_eq!(json["missed_by"][0]["program"], "busybox");
        assert_eq!(json["fuse_requests"]["delegated"], 8);
    }

    #[test]
    fn people_read_shares_and_reasons() {
        let text = report().text();
        for part in [
            "by make test\n",
            "read             9,990  4.0 ms          5  90.0 µs       0\n",
            "accelerated 99.92 %, delegated 0.05 %, missed 0.03 %\n",
            "17 requests (8 by delegated calls, 3 by missed ones, 4 for programs and mapped memory, 2 read ahead)",
            "missed: 2 by busybox, without the library\n",
            "missed: 1 by python3, past the library\n",
            "what was missed on /mnt/b is not known: it is busy\n",
        ] {
            assert!(text.contains(part), "{part} is missing:\n{text}");
        }
    }

    #[test]
    fn a_run_without_a_call_has_missed_none() {
        let report = RunReport::new("true".into(), &[], 1, &[], vec![]);
        assert_eq!(report.missed_percent, 0.0);
        assert!(report.text().contains("missed 0 %"), "{}", report.text());
    }

    #[test]
    fn shares_and_times_are_short() {
        assert_eq!([(0, 0), (1, 100_000), (1, 3)].map(|(part, all)| share(part, all)), ["0 %", "< 0.01 %", "33.33 %"]);
        assert_eq!([7, 1_500, 2_500_000, 3_000_000_000].map(time), ["7 ns", "1.5 µs", "2.5 ms", "3.00 s"]);
    }
}
