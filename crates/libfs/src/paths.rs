//! Paths that were followed: what each rests on, so that the next time a look at a few words is enough.
//!
//! A path is remembered with the directories on its way. Two words stand for each: its lease's, which SharedFS changes before somebody else
//! may change the directory, and a count of what this session has done to it that may lead a path elsewhere. While both are as they
//! were, the path leads where it led. What is at its end is looked at each time.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use ashlar_types::InodeId;
use smallvec::SmallVec;

use crate::LibFs;
use crate::alone::Mutex;
use crate::node::Lease;

/// Paths remembered by a front end: so many shelves, with so many places each. A shelf is made when the first path comes to it, since most
/// programs use few paths twice.
const SHELVES: usize = 64;
const PLACES: usize = 64;
/// Each path has so many neighbouring places that it can stand in, so that two that fall on the same one don't drive each other out.
const CHOICES: usize = 2;
/// Inodes share counts: that one has changed only means another look.
const COUNTS: usize = 1024;
/// Directories on the way of a path that is remembered, at the most.
const STEPS_MAX: usize = 32;
/// Directories on the way of most paths.
const WAY: usize = 6;

/// Counts what this session does to directories and links that may lead a path elsewhere: a name removed or replaced, other rights.
#[derive(Debug)]
pub(crate) struct Detours(Box<[AtomicU64]>);

impl Detours {
    pub(crate) fn new() -> Self {
        Self((0..COUNTS).map(|_| AtomicU64::new(0)).collect())
    }

    fn count(&self, id: InodeId) -> &AtomicU64 {
        &self.0[id.0 as usize % COUNTS]
    }

    /// How often it has happened to an inode.
    pub(crate) fn of(&self, id: InodeId) -> u64 {
        self.count(id).load(Ordering::Acquire)
    }

    /// Notes that paths through an inode may lead elsewhere from now on. The caller holds the inode's node for writing.
    pub(crate) fn note(&self, id: InodeId) {
        self.count(id).fetch_add(1, Ordering::Release);
    }
}

/// A directory on a path's way, as it was before the next name was looked up in it.
#[derive(Clone, Copy, Debug)]
struct Step {
    directory: InodeId,
    detours: u64,
    lease: Lease,
}

/// The way of a path that is being followed.
#[derive(Clone, Debug, Default)]
pub(crate) struct Way {
    steps: SmallVec<[Step; WAY]>,
    /// It has gone where another look is needed each time: over a link, or up again.
    is_winding: bool,
}

impl Way {
    /// Notes a directory in which a name was found, with its detours as they were before the name was looked up.
    pub(crate) fn went_through(&mut self, directory: InodeId, detours: u64, lease: Option<Lease>) {
        match lease {
            Some(lease) if self.steps.len() < STEPS_MAX => self.steps.push(Step { directory, detours, lease }),
            _ => self.is_winding = true,
        }
    }

    /// Notes that it has gone over a link, or up again.
    pub(crate) fn winds(&mut self) {
        self.is_winding = true;
    }

    pub(crate) fn can_be_remembered(&self) -> bool {
        !self.is_winding && !self.steps.is_empty()
    }

    fn is_open(&self, fs: &LibFs) -> bool {
        let is_as_it_was = |step: &Step| fs.stands(step.lease, false) && fs.detours.of(step.directory) == step.detours;
        self.steps.iter().all(is_as_it_was)
    }
}

/// Where a remembered path leads.
#[derive(Clone, Copy, Debug)]
pub(crate) struct End {
    /// The directory of its last name.
    pub(crate) directory: InodeId,
    /// What is there.
    pub(crate) id: InodeId,
}

#[derive(Debug)]
struct Known {
    from: InodeId,
    era: u64,
    path: Box<[u8]>,
    way: Way,
    end: End,
}

impl Known {
    fn is(&self, era: u64, from: InodeId, path: &[u8]) -> bool {
        self.from == from && self.era == era && *self.path == *path
    }
}

#[derive(Debug, Default)]
struct Place {
    /// The path that came here last and was not remembered: one that comes twice is.
    passed: u64,
    known: Option<Box<Known>>,
    /// It came here before the one in the neighbouring place.
    gives_way: bool,
}

type Shelf = OnceLock<Box<[Mutex<Place>]>>;

/// Paths that were followed for one user, in surroundings of one kind.
#[derive(Debug)]
pub struct Paths([Shelf; SHELVES]);

impl Default for Paths {
    fn default() -> Self {
        Self([const { OnceLock::new() }; SHELVES])
    }
}

impl Paths {
    fn shelf(&self, hash: u64) -> &Shelf {
        &self.0[hash as usize / PLACES % SHELVES]
    }

    /// Where a path leads and which way, if that is remembered and still so.
    pub(crate) fn find<R>(
        &self,
        fs: &LibFs,
        era: u64,
        from: InodeId,
        path: &[u8],
        take: impl FnOnce(End, &Way) -> R,
    ) -> Option<R> {
        let hash = hash(from, path);
        for place in choices(self.shelf(hash).get()?, hash) {
            let Some(place) = place.try_lock() else { continue };
            let Some(known) = place.known.as_ref().filter(|known| known.is(era, from, path)) else { continue };
            return known.way.is_open(fs).then(|| take(known.end, &known.way));
        }
        None
    }

    /// Remembers where a path has led, if it comes for the second time.
    pub(crate) fn note(&self, era: u64, from: InodeId, path: &[u8], way: &Way, end: End) {
        let hash = hash(from, path);
        let shelf = self.shelf(hash).get_or_init(|| (0..PLACES).map(|_| Mutex::default()).collect());
        let [one, other] = choices(shelf, hash).map(Mutex::try_lock);
        let (Some(mut one), Some(mut other)) = (one, other) else { return };
        let is_here = |place: &Place| place.known.as_ref().is_some_and(|known| known.is(era, from, path));
        let comes_again = one.passed == hash || other.passed == hash;
        // Where it was before, or where none is; else the two give way in turn.
        let stays =
            is_here(&one) || !is_here(&other) && (one.known.is_none() || other.known.is_some() && one.gives_way);
        let (place, neighbour) = if stays { (&mut one, &mut other) } else { (&mut other, &mut one) };
        if !comes_again {
            place.passed = hash;
            return;
        }
        place.known = Some(Box::new(Known { from, era, path: path.into(), way: way.clone(), end }));
        (place.gives_way, neighbour.gives_way) = (false, true);
    }
}

/// The places that a path can stand in.
fn choices(shelf: &[Mutex<Place>], hash: u64) -> [&Mutex<Place>; CHOICES] {
    let place = hash as usize % PLACES;
    [&shelf[place], &shelf[place ^ 1]]
}

/// Eight bytes at a time; the upper half of the last product is the best mixed.
fn hash(from: InodeId, path: &[u8]) -> u64 {
    const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;
    let mix = |state: u64, word: u64| (state ^ word).wrapping_mul(FACTOR).rotate_left(29);
    let word = |bytes: &[u8]| bytes.iter().fold(0, |word, &byte| word << 8 | u64::from(byte));
    path.chunks(8).fold(mix(path.len() as u64, from.0), |state, bytes| mix(state, word(bytes))) >> 32
}
