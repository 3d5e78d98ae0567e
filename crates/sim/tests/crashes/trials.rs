//! Crashes at one moment after the other, each on a machine of its own.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ashlar_pmem::MediumKind;
use ashlar_sim::machine::{CrashKind, Machine, MachineObserver};
use ashlar_sim::random::SimRandom;
use ashlar_sim::tree_picture::PicturedTree;

use crate::script::{LoggedRecord, replay};

/// Persist points of a recovery among which its cuts are drawn.
const CUT_POINTS: u64 = 40;
/// When machines are started again, in microseconds.
pub const STARTED_US: u64 = 1_000_000;

/// How one enumeration goes.
#[derive(Clone, Copy)]
pub struct CrashSetup {
    pub medium: MediumKind,
    pub seed: u64,
    /// Steps in one life.
    pub steps: u64,
    pub lives: u64,
    /// Power losses tried at each persist point while a commit is under way.
    pub images: u64,
    /// Elsewhere one power loss is tried at one in so many points.
    ///
    /// `crates/log` tries those of appends.
    pub thinness: u64,
}

/// The numbers of what was tried.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tally {
    pub points: u64,
    pub images: u64,
    pub torn_commits: u64,
    pub kills: u64,
    pub cuts: u64,
    pub repeats: u64,
    pub commits: u64,
    pub laps: u64,
    pub updates: u64,
    pub coalesced: u64,
}

impl Tally {
    pub fn add(&mut self, other: &Self) {
        let Self { points, images, torn_commits, kills, cuts, repeats, commits, laps, updates, coalesced } = *other;
        self.points += points;
        self.images += images;
        self.torn_commits += torn_commits;
        self.kills += kills;
        self.cuts += cuts;
        self.repeats += repeats;
        self.commits += commits;
        self.laps += laps;
        self.updates += updates;
        self.coalesced += coalesced;
    }

    /// Returns whether each kind of trial was made.
    pub fn has_all(&self) -> bool {
        let Self { torn_commits, kills, cuts, repeats, commits, laps, coalesced, .. } = *self;
        [torn_commits, kills, cuts, repeats, commits, laps, coalesced].iter().all(|&count| count > 2)
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} crash images recovered at {} persist points ({} in the middle of a commit, {} of killed processes); {} of \
             them twice, {} of a recovery that was cut; {} updates, {} of them coalesced, {} commits, {} laps of the log",
            self.images,
            self.points,
            self.torn_commits,
            self.kills,
            self.repeats,
            self.cuts,
            self.updates,
            self.coalesced,
            self.commits,
            self.laps,
        )
    }
}

/// The history of one life, as far as crashes are concerned.
#[derive(Default)]
pub struct Story {
    /// The tree after each update, and before the first.
    ///
    /// The last update may be under way.
    pub trees: Vec<PicturedTree>,
    /// How many updates' calls have returned.
    pub returned: usize,
    /// How many of them the loss of power must not take.
    pub durable: usize,
    /// How many of them are in the batch whose commit began last.
    pub frozen: usize,
    /// A commit is under way: begun and not finished.
    pub is_committing: bool,
}

impl Story {
    /// Begins with the tree that was recovered after these updates.
    pub fn after(records: &[LoggedRecord]) -> Self {
        Self { trees: vec![PicturedTree::of_model(&replay(records), &PicturedTree::default())], ..Self::default() }
    }

    /// Returns how many updates have survived: a prefix that holds all that had to.
    fn survived(&self, tree: &PicturedTree, crash: CrashKind) -> Result<usize, String> {
        let least = if crash == CrashKind::PowerLoss { self.durable } else { self.returned };
        let found = (least..self.trees.len()).find(|&count| self.trees[count] == *tree);
        found.ok_or_else(|| match self.trees[..least].iter().rposition(|before| before == tree) {
            Some(count) => format!("{count} of {least} durable updates have survived"),
            None => {
                let nearest = (0..self.trees.len()).min_by_key(|&count| tree.distance(&self.trees[count])).unwrap_or(0);
                let difference = tree.difference(&self.trees[nearest]).unwrap_or_default();
                let all = self.trees.len() - 1;
                format!(
                    "no prefix of the {all} updates, of which {least} must be there; in the nearest, {nearest}, {difference}"
                )
            }
        })
    }
}

/// The crashes of one life.
pub struct Trials {
    setup: CrashSetup,
    /// The media of the machine at work.
    machine: Machine,
    story: Arc<Mutex<Story>>,
    random: SimRandom,
    pub tally: Tally,
    /// The first violation.
    pub violation: Option<String>,
}

impl Trials {
    pub fn new(setup: CrashSetup, machine: Machine, story: Arc<Mutex<Story>>, seed: u64) -> Self {
        let random = SimRandom::new(seed, 2);
        Self { setup, machine, story, random, tally: Tally::default(), violation: None }
    }

    /// Handles a persist point, or the middle of a commit.
    pub fn see(&mut self) {
        if self.violation.is_some() {
            return;
        }
        self.tally.points += 1;
        let is_committing = lock(&self.story).is_committing;
        let losses = if is_committing { self.setup.images } else { u64::from(self.random.one_in(self.setup.thinness)) };
        for _ in 0..losses {
            self.tally.torn_commits += u64::from(self.machine.arena.database().is_committing());
            self.crash(CrashKind::PowerLoss);
        }
        match self.random.below(if is_committing { 8 } else { 8 * self.setup.thinness }) {
            0 => self.crash(CrashKind::SharedFsDeath),
            1 => self.crash(CrashKind::AllProcessesDeath),
            _ => {}
        }
    }

    /// Tries one crash at this moment, and keeps the first violation.
    fn crash(&mut self, crash: CrashKind) {
        if self.violation.is_some() {
            return;
        }
        let left = self.machine.after_crash(crash, &mut chooser(&mut self.random));
        if let Err(violation) = examine(self, left, crash) {
            let (seed, point) = (self.setup.seed, self.tally.points);
            self.violation = Some(format!("seed {seed}, persist point {point}, {crash:?}: {violation}"));
        }
    }
}

/// Recovers a machine that a crash has left; returns it with the number of updates that have survived.
pub fn examine(trials: &mut Trials, mut left: Machine, crash: CrashKind) -> Result<(usize, Machine), String> {
    let Trials { setup, story, random, tally, .. } = trials;
    tally.images += 1;
    tally.kills += u64::from(crash != CrashKind::PowerLoss);
    let cut_at: Vec<u64> =
        if random.one_in(6) { (0..2).map(|_| random.between(1, CUT_POINTS)).collect() } else { Vec::new() };
    let (tree, cuts) = recover_with_cuts(*setup, &mut left, crash, &cut_at, random)?;
    let survived = lock(story).survived(&tree, crash)?;
    if random.one_in(6) {
        tally.repeats += 1;
        left.kill_shared_fs();
        let again = recover(*setup, &mut left, crash).map_err(|error| format!("the second time, {error}"))?;
        if let Some(difference) = again.difference(&tree) {
            return Err(format!("a second recovery ends elsewhere: {difference}"));
        }
    }
    for mut cut in cuts {
        tally.cuts += 1;
        let again = recover(*setup, &mut cut, crash)
            .map_err(|error| format!("after recovery was cut at one of {cut_at:?}, {error}"))?;
        if let Some(difference) = again.difference(&tree) {
            return Err(format!("recovery that was cut at one of {cut_at:?} ends elsewhere: {difference}"));
        }
    }
    Ok((survived, left))
}

/// Recovers a machine; returns also the machines that crashes at these persist points of the recovery leave.
fn recover_with_cuts(
    setup: CrashSetup,
    left: &mut Machine,
    crash: CrashKind,
    cut_at: &[u64],
    random: &mut SimRandom,
) -> Result<(PicturedTree, Vec<Machine>), String> {
    if cut_at.is_empty() {
        return Ok((recover(setup, left, crash)?, Vec::new()));
    }
    let cuts = Arc::new(Mutex::new((0, Vec::new(), SimRandom::new(random.draw(), 3))));
    let (taken, media, cut_at) = (Arc::clone(&cuts), left.without_shared_fs(), cut_at.to_vec());
    let media = Mutex::new(media);
    let observer: MachineObserver = Arc::new(move || {
        let (point, machines, random) = &mut *lock(&taken);
        *point += 1;
        if cut_at.contains(point) {
            machines.push(lock(&media).after_crash(crash, &mut chooser(random)));
        }
    });
    left.on_persist(&observer);
    let recovered = recover(setup, left, crash);
    left.stop_observing();
    let machines = std::mem::take(&mut lock(&cuts).1);
    Ok((recovered?, machines))
}

/// Starts SharedFS on a machine that a crash has left, checks the store, and reads the tree.
fn recover(setup: CrashSetup, left: &mut Machine, crash: CrashKind) -> Result<PicturedTree, String> {
    let started = catch_unwind(AssertUnwindSafe(|| left.start(STARTED_US, None)));
    let report =
        started.map_err(|_| "recovery panics".to_owned())?.map_err(|error| format!("recovery fails: {error}"))?;
    left.end_start();
    // On a disk, a record may be there without the grant of its number: both lack a sync. Its log then ends before it.
    let may_cut = setup.medium == MediumKind::Disk && crash == CrashKind::PowerLoss;
    if !report.fenced.is_empty() || report.cut > 0 && !may_cut {
        return Err(format!("recovery fences {:?} and cuts {} logs", report.fenced, report.cut));
    }
    let node = left.node.as_mut().ok_or("SharedFS does not run")?;
    let report = node.store.check(&mut |_| {}).map_err(|error| format!("the check fails: {error}"))?;
    if !report.is_clean() {
        return Err(format!("the check is not clean: {:?}", report.problems));
    }
    PicturedTree::of_store(&node.store).map_err(|error| format!("the tree can't be read: {error}"))
}

/// Chooses how the unsettled words or pages of each memory come out.
///
/// All are new, all are old, one differs from all others, or each is drawn. If one memory is all new and another one
/// all old, an order between them shows as broken.
pub fn chooser(random: &mut SimRandom) -> impl FnMut(usize, usize) -> usize + use<> {
    let mut random = SimRandom::new(random.draw(), 4);
    let (mut current, mut shape, mut ahead) = (None, 0, 0);
    move |memory, contents| {
        if current != Some(memory) {
            (current, shape, ahead) = (Some(memory), random.below(6), random.below(40));
        }
        let is_the_one = ahead == 0;
        ahead = ahead.wrapping_sub(1);
        match shape {
            0 => 0,
            1 => contents - 1,
            2 => usize::from(is_the_one) * (contents - 1),
            3 => usize::from(!is_the_one) * (contents - 1),
            _ => random.below(contents as u64) as usize,
        }
    }
}

/// Locks. A failed test's panic is reported already.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
