//! `ashlar fsck --compare` and `--dump`: the logical trees of arenas that are not in use.
//!
//! Both open arenas as the check does, and change nothing in them. An arena in use is compared with its shadow alone:
//! its SharedFS does that.

use std::cell::Cell;
use std::io::{BufWriter, ErrorKind, Write};
use std::process::ExitCode;
use std::sync::Arc;

use ashlar_daemon::{LogFindings, describe_comparison};
use ashlar_store::{DumpComparison, DumpError, DumpLines, Store, compare_dumps};
use ashlar_types::Errno;
use ashlar_wire::{ComparedTree, ComparisonReply, Reply, Request, TreeDifference};
use serde::Serialize;

use crate::error::CliError;
use crate::output::progress;
use crate::output::table::grouped;
use crate::system::arena::{ArenaChoice, ArenaLocation};
use crate::system::background::ask_patiently;

/// The exit statuses of diff(1); trouble is [`CliError::Comparison`].
const EQUAL: u8 = 0;
const DIFFERENT: u8 = 1;

/// So many differences are shown, and the others counted.
const SHOWN_MAX: usize = 100;

/// An arena whose tree is read, and which no other process can use meanwhile.
struct ArenaTree {
    place: ArenaLocation,
    store: Store,
    logs: LogFindings,
}

impl ArenaTree {
    fn open(place: ArenaLocation) -> Result<Self, CliError> {
        place.probe()?;
        if ask_patiently(&place, &Request::Status)?.is_some() {
            return Err(CliError::CompareInUse(place.directory().to_owned()));
        }
        let arena = Arc::new(place.open()?);
        let store = Store::open(Arc::clone(&arena)).map_err(|error| place.store_error(error))?;
        let logs = ashlar_daemon::check_logs(&arena, &store)?;
        Ok(Self { place, store, logs })
    }

    fn lines(&self) -> Result<DumpLines<'_>, CliError> {
        self.store.dump_lines().map_err(|error| self.place.store_error(error))
    }

    fn error(&self, error: DumpError) -> CliError {
        match error {
            DumpError::Store(error) => self.place.store_error(error),
            error => CliError::Dump { arena: self.place.directory().to_owned(), error },
        }
    }

    /// Returns sentences about the parts of its logs that its tree lacks.
    fn notes(&self, name: &str) -> Vec<String> {
        let records = self.logs.records;
        let lacking = (records > 0).then(|| {
            format!(
                "the logs of {name} hold {} updates that its tree lacks; the next mount digests them",
                grouped(records)
            )
        });
        let problems = self.logs.problems.iter().map(|problem| format!("in {name}, {problem}"));
        lacking.into_iter().chain(problems).collect()
    }
}

/// An arena in the output of a comparison.
#[derive(Debug, Serialize)]
struct ComparedArena {
    arena: String,
    #[serde(flatten)]
    tree: ComparedTree,
    /// Updates in logs that the tree lacks.
    undigested: u64,
}

impl ComparedArena {
    fn new(place: &ArenaLocation, tree: ComparedTree, undigested: u64) -> Self {
        Self { arena: place.directory().display().to_string(), tree, undigested }
    }
}

/// The output of a comparison.
#[derive(Debug, Serialize)]
struct ComparisonReport {
    a: ComparedArena,
    b: ComparedArena,
    equal: bool,
    differences_count: u64,
    /// The first differences.
    differences: Vec<TreeDifference>,
    /// Sentences about logs.
    notes: Vec<String>,
}

/// Compares two arenas.
pub fn run(first: &ArenaChoice, second: &ArenaChoice, json: bool) -> Result<ExitCode, CliError> {
    let report = compare(first, second).map_err(|error| CliError::Comparison(Box::new(error)))?;
    if json {
        let text = serde_json::to_string_pretty(&report).map_err(CliError::system("writing JSON"))?;
        println!("{text}");
    } else {
        print!("{}", text(&report));
    }
    Ok(ExitCode::from(if report.equal { EQUAL } else { DIFFERENT }))
}

fn compare(first: &ArenaChoice, second: &ArenaChoice) -> Result<ComparisonReport, CliError> {
    let (first, second) = (ArenaLocation::find(first)?, ArenaLocation::find(second)?);
    if first == second {
        return Err(CliError::SameArena(first.directory().to_owned()));
    }
    if let Some(report) = compare_in_use(&first, &second)? {
        return Ok(report);
    }
    let (a, b) = (ArenaTree::open(first)?, ArenaTree::open(second)?);
    let spinner = progress::spinner("comparing");
    let compared = compare_trees(&a, &b);
    spinner.finish_and_clear();
    let ComparisonReply { first, second, differences_count, differences } = describe_comparison(&compared?);
    Ok(ComparisonReport {
        a: ComparedArena::new(&a.place, first, a.logs.records),
        b: ComparedArena::new(&b.place, second, b.logs.records),
        equal: differences_count == 0,
        differences_count,
        differences,
        notes: a.notes("A").into_iter().chain(b.notes("B")).collect(),
    })
}

/// Has SharedFS compare an arena in use with its shadow; `None` if no SharedFS serves the arena.
fn compare_in_use(a: &ArenaLocation, b: &ArenaLocation) -> Result<Option<ComparisonReport>, CliError> {
    a.probe()?;
    let directory = b.directory().to_owned();
    match ask_patiently(a, &Request::CompareShadow { directory })? {
        None => Ok(None),
        Some(Reply::Compared(compared)) => {
            let ComparisonReply { first, second, differences_count, differences } = *compared;
            Ok(Some(ComparisonReport {
                a: ComparedArena::new(a, first, 0),
                b: ComparedArena::new(b, second, 0),
                equal: differences_count == 0,
                differences_count,
                differences,
                notes: Vec::new(),
            }))
        }
        Some(Reply::Error(Errno::ENXIO)) => Err(CliError::CompareInUse(a.directory().to_owned())),
        Some(Reply::Error(Errno::EPERM | Errno::EACCES)) => Err(CliError::NotRoot { what: "comparing trees" }),
        Some(Reply::Error(error)) => Err(CliError::Refused { what: "compare the trees", error, log: a.daemon_log() }),
        Some(_) => Err(CliError::Misunderstood),
    }
}

fn compare_trees(a: &ArenaTree, b: &ArenaTree) -> Result<DumpComparison, CliError> {
    let failed = Cell::new(a);
    let of_a = a.lines()?.inspect(|line| failed.set(if line.is_err() { a } else { failed.get() }));
    let of_b = b.lines()?.inspect(|line| failed.set(if line.is_err() { b } else { failed.get() }));
    compare_dumps(of_a, of_b, SHOWN_MAX).map_err(|error| failed.get().error(error))
}

fn text(report: &ComparisonReport) -> String {
    let mut text = format!("{:<12}{}\n{:<12}{}\n", "A", report.a.arena, "B", report.b.arena);
    for note in &report.notes {
        text += &format!("note: {note}\n");
    }
    if report.equal {
        for (name, count) in
            [("inodes", report.a.tree.inodes), ("entries", report.a.tree.entries), ("bytes", report.a.tree.bytes)]
        {
            text += &format!("{name:<12}{}\n", grouped(count));
        }
        return text + &format!("{:<12}{}\nequal: no difference found\n", "sha256", report.a.tree.sha256);
    }
    for difference in &report.differences {
        text += &format!("difference: {}\n", difference.text);
    }
    let hidden = report.differences_count.saturating_sub(report.differences.len() as u64);
    if hidden > 0 {
        text += &format!("and {} more; 'ashlar fsck --dump ARENA' prints all, for diff(1)\n", grouped(hidden));
    }
    text + &format!("different: {} found\n", count_differences(report.differences_count))
}

fn count_differences(count: u64) -> String {
    if count == 1 { "1 difference".to_owned() } else { format!("{} differences", grouped(count)) }
}

/// Prints the dump of an arena.
pub fn print_dump(arena: &ArenaChoice) -> Result<ExitCode, CliError> {
    let tree = ArenaTree::open(ArenaLocation::find(arena)?)?;
    for note in tree.notes("the arena") {
        // The dump alone is on standard output.
        let _ = writeln!(std::io::stderr(), "ashlar: {note}");
    }
    match tree.store.dump(&mut BufWriter::new(std::io::stdout().lock())) {
        Ok(_) => Ok(ExitCode::SUCCESS),
        // The reader has closed the pipe.
        Err(DumpError::Io(error)) if error.kind() == ErrorKind::BrokenPipe => Ok(ExitCode::SUCCESS),
        Err(error) => Err(tree.error(error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(shown: usize, count: u64) -> ComparisonReport {
        let arena = |path: &str| ComparedArena {
            arena: path.into(),
            tree: ComparedTree { inodes: 1234, entries: 1, bytes: 2, sha256: "ab".into() },
            undigested: 0,
        };
        let difference = || TreeDifference {
            subject: "inode 1".into(),
            attribute: None,
            a: None,
            b: None,
            text: "inode 1: in B only".into(),
        };
        ComparisonReport {
            a: arena("/a"),
            b: arena("/b"),
            equal: count == 0,
            differences_count: count,
            differences: std::iter::repeat_with(difference).take(shown).collect(),
            notes: vec!["the logs of A hold 3 updates".into()],
        }
    }

    #[test]
    fn equal_arenas_have_counts_and_hash() {
        let text = text(&report(0, 0));
        let expected = "A           /a\nB           /b\nnote: the logs of A hold 3 updates\ninodes      1,234\n\
            entries     1\nbytes       2\nsha256      ab\nequal: no difference found\n";
        assert_eq!(text, expected);
    }

    #[test]
    fn differences_beyond_the_bound_are_counted() {
        let text = text(&report(2, 5));
        assert_eq!(text.matches("difference: inode 1: in B only").count(), 2);
        assert!(text.contains("and 3 more") && text.ends_with("different: 5 differences found\n"), "{text}");
        assert!(!text.contains("sha256"), "{text}");
    }

    #[test]
    fn trouble_has_the_exit_status_of_diff() {
        let error =
            run(&ArenaChoice::Directory("/nowhere".into()), &ArenaChoice::Directory("/elsewhere".into()), false)
                .expect_err("there is no arena");
        assert!(matches!(&error, CliError::Comparison(inner) if matches!(**inner, CliError::NoArena(_))), "{error}");
        assert_eq!(error.exit_code(), ExitCode::from(2));
        let twice = ArenaChoice::Directory("/nowhere".into());
        assert!(run(&twice, &twice, false).expect_err("one arena").to_string().contains("/nowhere is one arena"));
    }
}
