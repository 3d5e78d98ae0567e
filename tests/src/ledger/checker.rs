//! Compares the content of a directory with the journal.

use std::fs;
use std::path::Path;

use super::model::{Model, Operation};
use super::writer::{BEGIN, END, FAILED};
use crate::random::Random;
use crate::tree::{self, Tree};
use crate::{Outcome, ensure, tried};

/// The first state that is accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    /// After kills: the state after everything that was acknowledged.
    Acknowledged,
    /// After a power cut: the state after the last fsync that was acknowledged while the journal was no longer than
    /// this, its length when the cut began. The cut takes time while the machine runs on. An fsync that returns
    /// meanwhile has no meaning: a machine without power would have stopped before it could return.
    FsyncWithin {
        /// Length of the journal in bytes.
        journal_bytes: usize,
    },
}

/// The result of a check.
#[derive(Clone, Debug)]
pub struct Verdict {
    /// The number of calls that had returned.
    pub acknowledged: u64,
    /// The number of calls whose effects are there: a prefix.
    pub survived: u64,
    /// The tree there now, for the next round.
    pub tree: Tree,
}

/// Checks that `root` holds the state after a prefix of a workload. `seed` names the workload, which began on `before`.
/// The prefix must contain everything that `bound` requires.
pub fn check(root: &Path, journal: &Path, before: &Tree, seed: u64, bound: Bound) -> Outcome<Verdict> {
    let text = fs::read_to_string(journal).map_err(tried("reading the journal"))?;
    let (begun, acknowledged) = read_journal(&text)?;
    let found = tree::read(root)?;
    let start = Model::from_tree(before).ok_or("the workload began on what no workload makes")?;
    let operations = draw(&start, seed, &begun)?;
    let least = match bound {
        Bound::Acknowledged => acknowledged,
        Bound::FsyncWithin { journal_bytes } => {
            let acknowledged = &operations[..acknowledged_within(&text, journal_bytes)];
            acknowledged.iter().rposition(|operation| matches!(operation, Operation::Fsync(_))).map_or(0, |at| at + 1)
        }
    };
    // The latest state that fits: operations that change nothing, such as fsync, repeat a state. The kernel may have
    // split the last operation, a write, into several by pages.
    let last = fitting_counts(&start, &operations, least, &found).last().copied();
    match last.or_else(|| find_partial_write(&start, &operations, least, &found)).as_ref() {
        Some(&survived) => Ok(Verdict { acknowledged: acknowledged as u64, survived: survived as u64, tree: found }),
        None => Err(explain(&start, &operations, &found, least, acknowledged)),
    }
}

/// The operations in the journal, drawn anew.
fn draw(start: &Model, seed: u64, begun: &[String]) -> Outcome<Vec<Operation>> {
    let (mut model, mut random) = (start.clone(), Random::new(seed));
    let mut operations = Vec::with_capacity(begun.len());
    for (number, words) in begun.iter().enumerate() {
        let operation = model.draw(&mut random);
        ensure!(
            format!("{operation:?}") == *words,
            "the journal says {words} for operation {number}, not {operation:?}"
        );
        model.apply(&operation);
        operations.push(operation);
    }
    Ok(operations)
}

/// The numbers of operations, `least` or more, after which the state equals the found one.
fn fitting_counts(start: &Model, operations: &[Operation], least: usize, found: &Tree) -> Vec<usize> {
    let mut model = start.clone();
    let mut fitting = Vec::new();
    for count in 0..=operations.len() {
        if count >= least && model.tree() == *found {
            fitting.push(count);
        }
        if let Some(operation) = operations.get(count) {
            model.apply(operation);
        }
    }
    fitting
}

/// The number of operations, `least` or more, after which the state equals the found one except for the next operation:
/// a write that was not acknowledged (or not synced). Through FUSE, the kernel makes one request of it for each run of
/// pages that it has, so the write may be done up to the end of a page.
fn find_partial_write(start: &Model, operations: &[Operation], least: usize, found: &Tree) -> Option<usize> {
    let mut model = start.clone();
    for (count, operation) in operations.iter().enumerate() {
        if count >= least && model.pieces(operation).iter().any(|piece| piece.tree() == *found) {
            return Some(count);
        }
        model.apply(operation);
    }
    None
}

fn explain(start: &Model, operations: &[Operation], found: &Tree, least: usize, acknowledged: usize) -> String {
    if let Some(&count) = fitting_counts(start, &operations[..least], 0, found).last() {
        let lost = &operations[count];
        return format!(
            "lost updates: {count} survived, {acknowledged} were acknowledged, {least} must be there; first lost: {lost:?}"
        );
    }
    let mut model = start.clone();
    operations[..acknowledged].iter().for_each(|operation| model.apply(operation));
    let difference = tree::difference(&model.tree(), found).unwrap_or_default();
    let last = &operations[acknowledged.saturating_sub(3)..];
    format!(
        "no prefix: against the {acknowledged} acknowledged updates, {difference}; the last ones were {last:?}; {}",
        describe_nearest(start, operations, found)
    )
}

/// Names the prefix from which the found tree differs least, with all differences.
fn describe_nearest(start: &Model, operations: &[Operation], found: &Tree) -> String {
    let mut model = start.clone();
    let (mut nearest, mut at) = (tree::differences(&model.tree(), found), 0);
    for (number, operation) in operations.iter().enumerate() {
        model.apply(operation);
        let differences = tree::differences(&model.tree(), found);
        if differences.len() <= nearest.len() {
            (nearest, at) = (differences, number + 1);
        }
    }
    let around = &operations[at.saturating_sub(4)..operations.len().min(at + 4)];
    format!("nearest are the first {at} updates: {nearest:?}; around that: {around:?}")
}

/// How many operations the first bytes of a journal acknowledge.
fn acknowledged_within(text: &str, bytes: usize) -> usize {
    let whole_lines = text.get(..bytes).unwrap_or(text).rsplit_once('\n').map_or("", |(lines, _)| lines);
    whole_lines.lines().filter(|line| line.split(' ').next() == Some(END)).count()
}

/// The words of the operations that began, and how many of them were acknowledged.
fn read_journal(text: &str) -> Outcome<(Vec<String>, usize)> {
    let (mut begun, mut acknowledged) = (Vec::new(), 0);
    // A writer may be in the middle of its last line.
    let whole_lines = text.rsplit_once('\n').map_or("", |(lines, _)| lines);
    for line in whole_lines.lines() {
        let mut words = line.splitn(3, ' ');
        match (words.next(), words.next(), words.next()) {
            (Some(BEGIN), Some(number), Some(operation)) => {
                ensure!(number == begun.len().to_string(), "the journal's line is out of order: {line}");
                begun.push(operation.to_owned());
            }
            (Some(END), Some(_), None) => acknowledged += 1,
            (Some(FAILED), ..) => return Err(format!("a call of the workload failed: {line}")),
            _ => return Err(format!("the journal has a line that is no entry: {line}")),
        }
    }
    ensure!(
        begun.len() == acknowledged || begun.len() == acknowledged + 1,
        "the journal has {acknowledged} ends of {} begun calls",
        begun.len()
    );
    Ok((begun, acknowledged))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::writer;

    /// The checker finds a planted loss, a planted change of order and a planted partial write.
    #[test]
    fn checker_finds_lost_reordered_partial_updates() {
        rustix::process::umask(rustix::fs::Mode::empty());
        // Other temporary directories may lie on an overlay, which does not allow whiteouts.
        let directory = tempfile::tempdir_in("/dev/shm").expect("a directory");
        let journal = directory.path().join("journal");
        let (mut model, mut random) = (Model::default(), Random::new(11));
        let operations: Vec<_> = (0..400)
            .map(|_| {
                let operation = model.draw(&mut random);
                model.apply(&operation);
                operation
            })
            .collect();
        let lines =
            operations.iter().enumerate().map(|(n, operation)| format!("{BEGIN} {n} {operation:?}\n{END} {n}\n"));
        fs::write(&journal, lines.collect::<String>()).expect("written");
        let run = |skipped: Option<usize>, count: usize| {
            let root = directory.path().join(format!("root-{skipped:?}-{count}"));
            fs::create_dir(&root).expect("made");
            for operation in operations[..count].iter().enumerate().filter(|(n, _)| Some(*n) != skipped).map(|it| it.1)
            {
                // Operations after the omitted one may fail; only the state counts.
                let _ = writer::perform(&root, operation);
            }
            root
        };
        let verdict = |root: &Path, bound| check(root, &journal, &Tree::new(), 11, bound);
        assert_eq!(verdict(&run(None, 400), Bound::Acknowledged).expect("all there").survived, 400);

        let fsync =
            operations.iter().rposition(|operation| matches!(operation, Operation::Fsync(_))).expect("an fsync");
        let change = operations[..fsync].iter().rposition(|it| !matches!(it, Operation::Fsync(_))).expect("a change");
        let cut = run(None, change);
        assert!(verdict(&cut, Bound::Acknowledged).expect_err("seen").contains("lost updates"));
        let whole_journal = Bound::FsyncWithin { journal_bytes: usize::MAX };
        assert!(verdict(&cut, whole_journal).expect_err("seen").contains("lost updates"));
        let text = fs::read_to_string(&journal).expect("read");
        let before_fsync = text.find(&format!("{END} {fsync}\n")).expect("acknowledged");
        assert!(verdict(&cut, Bound::FsyncWithin { journal_bytes: before_fsync }).is_ok());

        // An operation whose loss no later operation covers up.
        let whole = tree::read(&directory.path().join("root-None-400")).expect("read");
        let gap =
            (0..operations.len()).rev().filter(|&n| matches!(operations[n], Operation::Append(..))).find_map(|n| {
                let root = run(Some(n), 400);
                (tree::read(&root).expect("read") != whole).then_some(root)
            });
        assert!(verdict(&gap.expect("a gap that shows"), whole_journal).is_err(), "an update left out of the middle");

        let torn = directory.path().join("root-None-400");
        let found = tree::read(&torn).expect("read");
        let name = found.iter().find_map(|(name, node)| match node {
            tree::Node::File { content, .. } if content.len() > 4096 => Some(name),
            _ => None,
        });
        fs::write(torn.join(name.expect("a file")), vec![0; 4097]).expect("torn");
        assert!(verdict(&torn, whole_journal).expect_err("seen").contains("no prefix"));
    }
}
