//! The load of a cluster: writers of ledgers, each in a directory of its own.

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ashlar_tests::cluster::{ClusterOptions, PATIENCE, TestCluster};
use ashlar_tests::command::{eventually, was_killed};
use ashlar_tests::harness::Verdict;
use ashlar_tests::ledger::checker::{Bound, check};
use ashlar_tests::mount::Front;
use ashlar_tests::random::Random;
use ashlar_tests::tree::Tree;
use ashlar_tests::{Outcome, ensure, number, tried};

use crate::crashes::kill_loops::{Writer, forget_failure};

/// Writers whose updates are all in the mount's session: a prefix of that session has a prefix of each ledger.
pub const ONE_SESSION: [Front; 2] = [Front::Mount, Front::Mount];
/// One writer through the mount, one under `ashlar run`. The latter has updates in two sessions, as the kernel serves
/// some of its calls. So its ledger is no prefix if the ends of both sessions are lost.
pub const MIXED: [Front; 2] = [Front::Mount, Front::RunAtOnce];
/// A writer whose journal is this long is at work.
const BYTES_AT_WORK: u64 = 2000;
/// Writers that have not gone on for this long are held up: their next calls take microseconds.
const HELD: Duration = Duration::from_millis(300);
/// Rounds on one cluster.
const CLUSTER_ROUNDS: u64 = 10;

/// Writers of ledgers on one mount of a cluster.
pub struct LedgerLoad {
    writers: Vec<Writer>,
    place: PathBuf,
}

/// The sum of what was checked.
#[derive(Clone, Copy, Debug, Default)]
pub struct LedgerTotals {
    /// Calls that had returned.
    pub acknowledged: u64,
    /// Calls whose effects are there.
    pub survived: u64,
}

impl LedgerLoad {
    /// Starts writers in new directories of mount `number`, and waits until they are at work.
    pub fn start(cluster: &TestCluster, number: usize, fronts: [Front; 2], seed: u64) -> Outcome<Self> {
        Self::start_in(&cluster.point(number), cluster.outside(), fronts, seed)
    }

    /// Starts writers in new directories of a mount, and waits until they are at work. `outside` takes their journals.
    pub fn start_in(mount: &Path, outside: &Path, fronts: [Front; 2], seed: u64) -> Outcome<Self> {
        let mut load = Self { writers: Vec::new(), place: mount.to_owned() };
        for (index, front) in fronts.into_iter().enumerate() {
            let directory = load.place.join(name_of(index));
            fs::create_dir(&directory).map_err(tried("making a directory"))?;
            // The directories themselves are not part of the ledgers.
            fs::File::open(&load.place).and_then(|root| root.sync_all()).map_err(tried("syncing"))?;
            let journal = outside.join(format!("journal-{index}-{seed}"));
            load.writers.push(Writer::start(front, &directory, &journal, seed.wrapping_add(index as u64))?);
        }
        load.wait("the writers are at work", |load| load.sizes().iter().all(|size| *size > BYTES_AT_WORK))?;
        Ok(load)
    }

    /// Waits until each writer has synced again.
    pub fn wait_for_syncs(&self) -> Outcome {
        let before = self.syncs();
        self.wait("each writer syncs", |load| load.syncs().iter().zip(&before).all(|(now, before)| now > before))
    }

    /// Waits until each writer waits in an fsync.
    pub fn wait_until_held(&self) -> Outcome {
        let (mut sizes, mut since) = (self.sizes(), Instant::now());
        self.wait("each writer waits in an fsync", |load| {
            let now = load.sizes();
            if now != sizes {
                (sizes, since) = (now, Instant::now());
            }
            since.elapsed() > HELD && load.journals().iter().all(|journal| is_in_sync_call(journal))
        })
    }

    /// Fails if a writer has ended: none of its calls may fail.
    pub fn expect_at_work(&mut self) -> Outcome {
        for writer in &mut self.writers {
            let ended = writer.child.try_wait().map_err(tried("looking at a writer"))?;
            ensure!(ended.is_none(), "a writer ended with {ended:?}: {}", last_line(&writer.journal));
        }
        Ok(())
    }

    /// Kills the writers, all of which must be at work.
    pub fn kill(&mut self) -> Outcome {
        for writer in &mut self.writers {
            writer.child.kill().map_err(tried("killing a writer"))?;
            let status = writer.child.wait().map_err(tried("ending a writer"))?;
            let last = last_line(&writer.journal);
            ensure!(was_killed(status), "a writer ended before it was killed, with {status}: {last}");
        }
        Ok(())
    }

    /// Ends the writers of a node that was killed. Their last calls may have failed.
    pub fn end_after_kill(&mut self) -> Outcome {
        for writer in &mut self.writers {
            // It may have ended by itself.
            let _ = writer.child.kill();
            writer.child.wait().map_err(tried("ending a writer"))?;
            forget_failure(&writer.journal)?;
        }
        Ok(())
    }

    /// Checks that mount `number` of the cluster shows a prefix of each ledger, with all that `bound` requires.
    pub fn check(&self, cluster: &TestCluster, number: usize, bound: Bound) -> Outcome<LedgerTotals> {
        self.check_at(&cluster.point(number), bound)
    }

    /// Does the same at any mount.
    pub fn check_at(&self, mount: &Path, bound: Bound) -> Outcome<LedgerTotals> {
        let mut totals = LedgerTotals::default();
        for (index, writer) in self.writers.iter().enumerate() {
            let root = mount.join(name_of(index));
            let verdict = check(&root, &writer.journal, &Tree::new(), writer.seed, bound);
            let verdict = verdict.map_err(|error| format!("writer {index}, seed {}: {error}", writer.seed))?;
            totals.acknowledged += verdict.acknowledged;
            totals.survived += verdict.survived;
        }
        ensure!(totals.acknowledged > 20, "only {} updates: nothing was tried", totals.acknowledged);
        Ok(totals)
    }

    fn wait(&self, what: &str, mut condition: impl FnMut(&Self) -> bool) -> Outcome {
        eventually(what, PATIENCE, || condition(self)).map_err(|error| {
            let last: Vec<_> = self.writers.iter().map(|writer| last_line(&writer.journal)).collect();
            format!("{error}: {}", last.join("; "))
        })
    }

    fn journals(&self) -> Vec<String> {
        self.writers.iter().map(|writer| fs::read_to_string(&writer.journal).unwrap_or_default()).collect()
    }

    fn sizes(&self) -> Vec<u64> {
        self.writers.iter().map(|writer| fs::metadata(&writer.journal).map_or(0, |journal| journal.len())).collect()
    }

    /// How many fsyncs of each writer have returned.
    fn syncs(&self) -> Vec<usize> {
        let count = |journal: &String| {
            journal.lines().filter(|line| is_sync(line)).count() - usize::from(is_in_sync_call(journal))
        };
        self.journals().iter().map(count).collect()
    }
}

impl Drop for LedgerLoad {
    fn drop(&mut self) {
        for writer in &mut self.writers {
            // A writer that has been reaped has no process any more.
            let _ = writer.child.kill();
            let _ = writer.child.wait();
        }
    }
}

/// Does something to a cluster under load in each of some rounds, none of which may fence a session or end a writer.
///
/// Afterwards both arenas must hold the same tree, with all that was acknowledged. `what` names the rounds. After some
/// rounds a new cluster takes the place of the old one, whose arenas fill up.
pub fn run_rounds(
    what: &str,
    rounds: u64,
    options: ClusterOptions,
    mut act: impl FnMut(&TestCluster, &mut LedgerLoad) -> Outcome,
) -> Outcome<Verdict> {
    let mut totals = LedgerTotals::default();
    for first in (0..rounds).step_by(CLUSTER_ROUNDS as usize) {
        let rounds = first..rounds.min(first + CLUSTER_ROUNDS);
        let LedgerTotals { acknowledged, survived } = run_on_cluster(rounds, options, &mut act)?;
        totals.acknowledged += acknowledged;
        totals.survived += survived;
    }
    let LedgerTotals { acknowledged, survived } = totals;
    Ok(Verdict::Passed(format!("{rounds} {what}, {acknowledged} acknowledged updates, {survived} in both arenas")))
}

fn run_on_cluster(
    rounds: Range<u64>,
    options: ClusterOptions,
    act: &mut impl FnMut(&TestCluster, &mut LedgerLoad) -> Outcome,
) -> Outcome<LedgerTotals> {
    let cluster = TestCluster::up(options)?;
    cluster.mount(0, 0)?;
    let seed = Random::new(number("ASHLAR_SEED", 1) + rounds.start).draw();
    let mut load = LedgerLoad::start(&cluster, 0, MIXED, seed)?;
    for round in rounds {
        act(&cluster, &mut load)
            .and_then(|()| load.expect_at_work())
            .and_then(|()| cluster.expect_no_fence(0))
            .map_err(|error| format!("round {round}, seed {seed}: {error}"))?;
    }
    load.kill()?;
    let totals = load.check(&cluster, 0, Bound::Acknowledged)?;
    cluster.umount(0)?;
    cluster.compare_at_rest(0)?;
    Ok(totals)
}

fn name_of(index: usize) -> String {
    format!("w{index}")
}

/// Whether a line says that an fsync began.
fn is_sync(line: &str) -> bool {
    line.starts_with("begin ") && line.contains(" Fsync(")
}

fn is_in_sync_call(journal: &str) -> bool {
    journal.lines().last().is_some_and(is_sync)
}

fn last_line(journal: &Path) -> String {
    fs::read_to_string(journal).unwrap_or_default().lines().last().unwrap_or("nothing").to_owned()
}
