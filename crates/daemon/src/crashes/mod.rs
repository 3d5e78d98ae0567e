//! Crash enumeration of digest and recovery, on the crash-injecting twin.
//!
//! A session works (`script`) and SharedFS digests what it logs. These are the real log, the real apply and commit, and
//! the real store with LMDB, in one thread and from one seed. A twin (`mirror`) follows every store, flush, fence and
//! sync of the arena's mapped files. Crashes are tried at every persist point, and at both ends of each of LMDB's
//! transactions. Each try makes files that the crash may leave (`image`) and runs the real recovery on them. The result
//! is compared with what the session did (`ashlar_sim::tree_picture`):
//! * It must be a prefix of the updates, byte for byte, with all that was durable by then.
//! * The check must be clean, checksums and allocation included.
//! * No session is fenced. A log is cut only after a loss of power on a disk, which may lose the grant of a record.
//! * A second recovery, and one after a recovery that was itself cut by a crash, must end the same.
//!
//! At the end of a life the next one goes on with the arena that a crash has left.
//!
//! The files that a crash leaves:
//! * *Power*, persistent memory: of every unsettled 8-byte word any value that it was given. Disk: of every page that
//!   is not synced the old or the new content. In the middle of LMDB's commit, its new pages are there in part, and its
//!   head is the old one: LMDB syncs before it writes that. (On persistent memory LMDB's own files are assumed to work
//!   as on a disk.)
//! * *Processes*: everything, but SharedFS is dead, with its session or without.
//!
//! That the enumeration bites was tried by planting faults by hand, each alone. Caught on both media: rows written
//! before data; blocks that a committed row refers to taken for fresh and overwritten; the session's position committed
//! in a transaction before that of its updates; recovery that removes a session's files before it commits, or the
//! session's row before the files. Caught on persistent memory: no fence behind the flushes of data; checksums not
//! flushed; the log's head moved as a commit begins; a freed block given out before the commit that freed it. Caught on
//! disk: data segments not synced; coalescing with records behind the end of what is applied; recovery from the log's
//! own head instead of the committed position. On the other medium each of the last seven does no harm, or too seldom
//! for the few scripts that run every time.
#![allow(clippy::print_stdout, reason = "the number of images tried is part of the result")]

mod image;
mod mirror;
mod script;

use std::cell::RefCell;
use std::fmt;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use ashlar_pmem::witness::{Deed, pretend, watch};
use ashlar_pmem::{Arena, ArenaOptions, MediumKind, SegmentInfo};
use ashlar_sim::tree_picture::PicturedTree;
use ashlar_store::Store;
use ashlar_tests::random::Random;

use crate::recovery;
use image::Image;
use mirror::{Crash, Mirror};
use script::{Live, Story};

/// Blocks of the only segment: few, so that they are soon reused.
const SEGMENT_BLOCKS: u32 = 24;
/// Persist points of a recovery among which its cuts are drawn.
const CUT_POINTS: u64 = 40;

#[derive(Clone, Copy)]
struct Setup {
    kind: MediumKind,
    seed: u64,
    /// Steps in one life.
    steps: u64,
    lives: u64,
    /// Power losses tried at each persist point while a commit is under way.
    images: u64,
    /// Elsewhere one power loss is tried at one in so many points.
    ///
    /// `crates/log` tries those of appends.
    thinness: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Tally {
    points: u64,
    images: u64,
    torn_commits: u64,
    kills: u64,
    cuts: u64,
    repeats: u64,
    commits: u64,
    laps: u64,
    updates: u64,
    coalesced: u64,
}

impl Tally {
    fn add(&mut self, other: &Self) {
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
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} crash images recovered at {} persist points ({} in the middle of a commit of LMDB, {} of killed processes); {} \
             of them twice, {} of a recovery that was cut; {} updates, {} of them coalesced, {} commits, {} laps of the log",
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

/// The crashes of one life.
struct Crashes {
    setup: Setup,
    /// The directory in which images are recovered.
    place: PathBuf,
    random: Random,
    story: Rc<RefCell<Story>>,
    mirror: Rc<RefCell<Mirror>>,
    tally: Tally,
    violation: Option<String>,
}

/// The result of the recovery of an image.
struct Recovered {
    tree: PicturedTree,
    /// Images that cuts of the recovery left.
    cuts: Vec<Image>,
}

/// Runs SharedFS's recovery on an image, and the check.
///
/// `cut_at`: the persist points of the recovery at which images are taken.
fn recover(
    setup: Setup,
    place: &Path,
    image: Option<&Image>,
    crash: Crash,
    cut_at: &[u64],
    random: &mut Random,
) -> Result<Recovered, String> {
    if let Some(image) = image {
        image.write(place);
    }
    let cuts = Rc::new(RefCell::new(Vec::new()));
    let run = || recovery::recover(script::config(place));
    let shared = if cut_at.is_empty() {
        run()
    } else {
        let (cut_at, taken, mut mirror) = (cut_at.to_vec(), Rc::clone(&cuts), Mirror::new(place, setup.kind));
        let (mut point, mut random) = (0, Random::new(random.draw()));
        let witness = move |deed: &Deed<'_>| {
            if !matches!(deed, Deed::Store { .. }) {
                point += 1;
                if cut_at.contains(&point) {
                    let in_commit = *deed == Deed::TransactionEnds;
                    taken.borrow_mut().push(mirror.image(crash, in_commit, &mut random));
                }
            }
            mirror.see(deed);
        };
        watch(Box::new(witness), run)
    };
    let shared = shared.map_err(|error| format!("recovery fails: {error}"))?;
    let mut state = shared.lock();
    // On a disk, a record may be there without the grant of its number: both lack a sync. Its log then ends before it.
    let may_cut = setup.kind == MediumKind::Disk && crash == Crash::Power;
    let (fenced, cut) = (state.counters.sessions_fenced, state.counters.logs_cut);
    if fenced > 0 || cut > 0 && !may_cut || state.failure.is_some() {
        return Err(format!("recovery fences {fenced} sessions and cuts {cut} logs: {:?}", state.failure));
    }
    let report = state.store.check(&mut |_| {}).map_err(|error| format!("the check fails: {error}"))?;
    if !report.is_clean() {
        return Err(format!("the check is not clean: {:?}", report.problems));
    }
    let tree = PicturedTree::of_store(&state.store).map_err(|error| format!("the tree can't be read: {error}"))?;
    let cuts = cuts.take();
    Ok(Recovered { tree, cuts })
}

impl Crashes {
    /// Handles a persist point, or the end of a transaction.
    fn see(&mut self, deed: &Deed<'_>) {
        if !matches!(deed, Deed::Store { .. }) && self.violation.is_none() {
            self.tally.points += 1;
            let in_commit = *deed == Deed::TransactionEnds;
            let is_committing = self.story.borrow().is_committing;
            let crashes =
                if is_committing { self.setup.images } else { u64::from(self.random.one_in(self.setup.thinness)) };
            for _ in 0..crashes {
                self.tally.torn_commits += u64::from(in_commit);
                self.crash(Crash::Power, in_commit);
            }
            match self.random.below(if is_committing { 8 } else { 8 * self.setup.thinness }) {
                0 => self.crash(Crash::SharedFs, in_commit),
                1 => self.crash(Crash::Processes, in_commit),
                _ => {}
            }
        }
        self.mirror.borrow_mut().see(deed);
        if *deed == Deed::TransactionEnds && self.story.borrow().is_writing {
            let mut story = self.story.borrow_mut();
            story.durable = story.durable.max(story.frozen);
        }
    }

    /// Tries one crash at this moment, and keeps the first violation.
    fn crash(&mut self, crash: Crash, in_commit: bool) {
        if self.violation.is_some() {
            return;
        }
        let image = self.mirror.borrow().image(crash, in_commit, &mut self.random);
        if let Err(violation) = self.examine(&image, crash) {
            let (seed, point) = (self.setup.seed, self.tally.points);
            self.violation = Some(format!("seed {seed}, persist point {point}, {crash:?}: {violation}"));
        }
    }

    fn examine(&mut self, image: &Image, crash: Crash) -> Result<usize, String> {
        self.tally.images += 1;
        self.tally.kills += u64::from(crash != Crash::Power);
        let cut_at: Vec<u64> = if self.random.one_in(6) {
            vec![1 + self.random.below(CUT_POINTS), 1 + self.random.below(CUT_POINTS)]
        } else {
            Vec::new()
        };
        let recovered = recover(self.setup, &self.place, Some(image), crash, &cut_at, &mut self.random)?;
        let survived = self.survived(&recovered.tree, crash)?;
        if self.random.one_in(6) {
            self.tally.repeats += 1;
            let again = recover(self.setup, &self.place, None, crash, &[], &mut self.random)
                .map_err(|error| format!("the second time, {error}"))?;
            if let Some(difference) = again.tree.difference(&recovered.tree) {
                return Err(format!("a second recovery ends elsewhere: {difference}"));
            }
        }
        for cut in &recovered.cuts {
            self.tally.cuts += 1;
            let again = recover(self.setup, &self.place, Some(cut), crash, &[], &mut self.random)
                .map_err(|error| format!("after recovery was cut at one of {cut_at:?}, {error}"))?;
            if let Some(difference) = again.tree.difference(&recovered.tree) {
                return Err(format!("recovery that was cut at one of {cut_at:?} ends elsewhere: {difference}"));
            }
        }
        Ok(survived)
    }

    /// Returns how many updates have survived: a prefix that holds all that had to.
    fn survived(&self, tree: &PicturedTree, crash: Crash) -> Result<usize, String> {
        let story = self.story.borrow();
        let least = if crash == Crash::Power { story.durable } else { story.returned };
        let found = (least..story.trees.len()).find(|&count| story.trees[count] == *tree);
        found.ok_or_else(|| match story.trees[..least].iter().rposition(|before| before == tree) {
            Some(count) => format!("{count} of {least} durable updates have survived"),
            None => {
                let nearest = (0..story.trees.len()).min_by_key(|&count| tree.distance(&story.trees[count])).unwrap_or(0);
                let difference = tree.difference(&story.trees[nearest]).unwrap_or_default();
                let all = story.trees.len() - 1;
                format!("no prefix of the {all} updates, of which {least} must be there; in the nearest, {nearest}, {difference}")
            }
        })
    }
}

fn make_arena(place: &Path) {
    let arena =
        Arena::create(place, &ArenaOptions { emulate_pmem: true, ..ArenaOptions::new(16 << 20) }).expect("an arena");
    Store::format(&arena, ashlar_types::Timestamp::default()).expect("formatted");
    drop(arena);
    let segment = SegmentInfo { number: 0, blocks: SEGMENT_BLOCKS };
    let file = std::fs::File::create(place.join("segments/000000.data")).expect("made");
    file.set_len(segment.file_bytes()).expect("sized");
}

/// Runs one script with all its crashes, and returns the first violation.
fn enumerate(setup: Setup) -> (Tally, Option<String>) {
    let memory = Path::new("/dev/shm");
    let directory = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() }.expect("made");
    let (mut arena, mut place) = (directory.path().join("one"), directory.path().join("other"));
    let mut random = Random::new(setup.seed);
    let (mut tally, mut records) = (Tally::default(), Vec::new());
    make_arena(&arena);
    for life in 0..setup.lives {
        let story = Rc::new(RefCell::new(Story::after(&records)));
        let mirror = Rc::new(RefCell::new(Mirror::new(&arena, setup.kind)));
        let crashes = Rc::new(RefCell::new(Crashes {
            setup,
            place: place.clone(),
            random: Random::new(random.draw()),
            story: Rc::clone(&story),
            mirror: Rc::clone(&mirror),
            tally,
            violation: None,
        }));
        let (witness, known, seed) = (Rc::clone(&crashes), std::mem::take(&mut records), random.draw());
        let before = known.len();
        let mut ends_with = None;
        let live = watch(Box::new(move |deed: &Deed<'_>| witness.borrow_mut().see(deed)), || {
            let mut live = Live::start(&arena, setup.kind, known, Rc::clone(&story), Rc::clone(&mirror), seed);
            for _ in 0..setup.steps {
                live.step();
                if crashes.borrow().violation.is_some() {
                    break;
                }
            }
            ends_with = Some(mirror.borrow().image(Crash::Power, false, &mut live.random));
            live
        });
        let mut crashes = crashes.borrow_mut();
        crashes.tally.commits += live.commits;
        crashes.tally.laps += live.laps();
        crashes.tally.coalesced += live.coalesced();
        crashes.tally.updates += (live.records.len() - before) as u64;
        let wrong = crashes.violation.take().or_else(|| {
            live.check_applied().map(|wrong| format!("seed {}, life {life}: without a crash: {wrong}", setup.seed))
        });
        let survived = match wrong {
            Some(wrong) => Err(wrong),
            None => crashes.examine(&ends_with.expect("taken"), Crash::Power),
        };
        tally = crashes.tally;
        match survived {
            Ok(survived) => records = live.records[..before + survived].to_vec(),
            Err(violation) => return (tally, Some(violation)),
        }
        drop(live);
        std::mem::swap(&mut arena, &mut place);
    }
    (tally, None)
}

fn all_is_well(setup: Setup, seeds: std::ops::Range<u64>) {
    let mut total = Tally::default();
    for seed in seeds {
        let (tally, violation) = pretend(setup.kind, || enumerate(Setup { seed, ..setup }));
        assert!(violation.is_none(), "{}", violation.unwrap_or_default());
        total.add(&tally);
    }
    println!("{:?}: {total}", setup.kind);
    let tried =
        [total.torn_commits, total.kills, total.cuts, total.repeats, total.commits, total.laps, total.coalesced];
    assert!(tried.iter().all(|&count| count > 2), "something was not tried: {total}");
}

const MEMORY: Setup = Setup { kind: MediumKind::Pmem, seed: 0, steps: 180, lives: 2, images: 4, thinness: 3 };
const DISK: Setup = Setup { kind: MediumKind::Disk, ..MEMORY };

#[test]
fn crash_of_digest_or_recovery_on_memory_keeps_a_prefix() {
    all_is_well(MEMORY, 0..4);
}

#[test]
fn crash_of_digest_or_recovery_on_disk_keeps_a_prefix() {
    all_is_well(DISK, 100..104);
}

#[test]
#[ignore = "minutes: the same with many more scripts"]
fn crashes_of_digest_and_recovery_at_length() {
    all_is_well(Setup { images: 8, thinness: 1, ..MEMORY }, 1000..1040);
    all_is_well(Setup { images: 8, thinness: 1, ..DISK }, 2000..2040);
}
