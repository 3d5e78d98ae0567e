//! A cache of paths that were followed, checked by comparing a few words.
//!
//! A path is remembered with the directories on its way. Two words represent each directory. The first is its lease
//! word, which SharedFS changes before another session may change the directory. The second is the directory version: a
//! count of this session's own changes that may lead a path elsewhere. While both are unchanged, the path leads where
//! it led. The inode at its end is checked at each use.

use std::sync::{Arc, OnceLock};

use ashlar_types::InodeId;
use rustix_futex_sync::Mutex;
use smallvec::SmallVec;

use crate::LibFs;
use crate::cache::node::Lease;

/// The groups of a path cache, by hash. A group is allocated with its first path, since most programs use few paths
/// twice.
const GROUPS: usize = 64;
/// Shards of a group.
const SHARDS_PER_GROUP: usize = 16;
/// Paths of a shard; a path has its place in one shard.
const PATHS_PER_SHARD: usize = 4;
/// The most directories on the way of a remembered path.
const STEPS_MAX: usize = 32;
/// Directories on the way of most paths.
const INLINE_STEPS: usize = 6;
/// Bytes of most paths.
const PATH_BYTES: usize = 64;

/// A directory on a path's way, as it was before the next name was looked up in it.
#[derive(Clone, Copy, Debug)]
struct PathStep {
    directory: InodeId,
    directory_version: u64,
    lease: Lease,
}

/// The way of a path that is being followed.
#[derive(Clone, Debug, Default)]
pub(crate) struct PathWay {
    /// The way of a remembered path that this one begins with. Paths of one directory share it.
    beginning: Option<Arc<[PathStep]>>,
    steps: SmallVec<[PathStep; INLINE_STEPS]>,
    /// The path crosses a link or goes up again, so it must be followed anew each time.
    is_winding: bool,
}

impl PathWay {
    /// Records a directory in which a name was found, with its version from before the lookup.
    pub(crate) fn add_step(&mut self, directory: InodeId, directory_version: u64, lease: Option<Lease>) {
        match lease {
            Some(lease) if self.length() < STEPS_MAX => {
                self.steps.push(PathStep { directory, directory_version, lease })
            }
            _ => self.is_winding = true,
        }
    }

    /// Records that the path crosses a link or goes up again.
    pub(crate) fn mark_winding(&mut self) {
        self.is_winding = true;
    }

    pub(crate) fn can_be_remembered(&self) -> bool {
        !self.is_winding && self.length() > 0
    }

    fn length(&self) -> usize {
        self.beginning.as_ref().map_or(0, |steps| steps.len()) + self.steps.len()
    }

    /// Returns the way in two parts: the steps that other paths share, and the last step unless that is shared too.
    fn split_parts(&self, is_shared: bool) -> (Arc<[PathStep]>, Option<PathStep>) {
        let (last, before) = match self.steps.split_last() {
            Some((last, before)) if !is_shared => (Some(*last), before),
            _ => (None, &self.steps[..]),
        };
        let shared = match &self.beginning {
            Some(beginning) if before.is_empty() => Arc::clone(beginning),
            Some(beginning) => beginning.iter().chain(before).copied().collect(),
            None => before.into(),
        };
        (shared, last)
    }
}

/// Where a remembered path leads.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PathEnd {
    /// The directory of its last name.
    pub(crate) directory: InodeId,
    /// The inode at its end.
    pub(crate) id: InodeId,
}

#[derive(Debug)]
struct CachedPath {
    from: InodeId,
    submount_version: u64,
    end: PathEnd,
    beginning: Arc<[PathStep]>,
    last: Option<PathStep>,
    path: SmallVec<[u8; PATH_BYTES]>,
}

impl CachedPath {
    fn matches(&self, submount_version: u64, from: InodeId, path: &[u8]) -> bool {
        self.from == from && self.submount_version == submount_version && self.path[..] == *path
    }

    fn is_current(&self, fs: &LibFs) -> bool {
        let is_as_it_was = |step: &PathStep| {
            fs.lease_holds(step.lease, false)
                && fs.directory_versions.version_of(step.directory) == step.directory_version
        };
        self.last.iter().chain(&self.beginning[..]).all(is_as_it_was)
    }
}

/// The paths of one shard. One line of the processor's cache shows that a path is not here.
#[derive(Debug, Default)]
struct ShardPaths {
    /// The hashes of the paths that have come here; 0 for a free place.
    hashes: [u32; PATHS_PER_SHARD],
    /// The paths that came twice.
    known: [Option<Box<CachedPath>>; PATHS_PER_SHARD],
    /// The place that the next new path takes first.
    next: u8,
}

impl ShardPaths {
    fn position(&self, hash: u32) -> Option<usize> {
        self.hashes.iter().position(|&here| here == hash)
    }

    /// Takes a place for a path that comes for the first time.
    ///
    /// Paths that came once are replaced in turn, then the others.
    fn take_place(&mut self, hash: u32) {
        let in_turn = || (0..PATHS_PER_SHARD).map(|offset| (usize::from(self.next) + offset) % PATHS_PER_SHARD);
        let place = in_turn().find(|&place| self.known[place].is_none()).unwrap_or(usize::from(self.next));
        self.next = ((place + 1) % PATHS_PER_SHARD) as u8;
        (self.hashes[place], self.known[place]) = (hash, None);
    }
}

/// A shard, in a cache line of its own.
#[derive(Debug, Default)]
#[repr(align(64))]
struct PathShard(Mutex<ShardPaths>);

type ShardGroup = OnceLock<Box<[PathShard]>>;

/// Paths that were followed for one user, in surroundings of one kind.
#[derive(Debug)]
pub struct PathCache([ShardGroup; GROUPS]);

impl Default for PathCache {
    fn default() -> Self {
        Self([const { OnceLock::new() }; GROUPS])
    }
}

impl PathCache {
    fn group(&self, hash: u32) -> &ShardGroup {
        &self.0[hash as usize / SHARDS_PER_GROUP % GROUPS]
    }

    /// Returns where a path leads, if that is remembered and still true.
    pub(crate) fn find_end(&self, fs: &LibFs, submount_version: u64, from: InodeId, path: &[u8]) -> Option<PathEnd> {
        self.find(fs, submount_version, from, path, |known| known.end)
    }

    /// As [`Self::find_end`], for the directory of a path's last name; also returns the way there.
    pub(crate) fn find_beginning(
        &self,
        fs: &LibFs,
        submount_version: u64,
        from: InodeId,
        path: &[u8],
    ) -> Option<(InodeId, PathWay)> {
        self.find(fs, submount_version, from, path, |known| {
            let (beginning, steps) = (Some(Arc::clone(&known.beginning)), known.last.into_iter().collect());
            (known.end.id, PathWay { beginning, steps, is_winding: false })
        })
    }

    fn find<R>(
        &self,
        fs: &LibFs,
        submount_version: u64,
        from: InodeId,
        path: &[u8],
        take: impl FnOnce(&CachedPath) -> R,
    ) -> Option<R> {
        let hash = hash(from, path);
        let places = self.group(hash).get()?[hash as usize % SHARDS_PER_GROUP].0.try_lock()?;
        let known = places.known[places.position(hash)?].as_ref()?;
        (known.matches(submount_version, from, path) && known.is_current(fs)).then(|| take(known))
    }

    /// Remembers where a path has led, if it comes for the second time.
    pub(crate) fn remember_end(&self, submount_version: u64, from: InodeId, path: &[u8], way: &PathWay, end: PathEnd) {
        self.remember(submount_version, from, path, || (way.split_parts(false), end));
    }

    /// As [`Self::remember_end`], for the directory that other paths go on from.
    pub(crate) fn remember_beginning(
        &self,
        submount_version: u64,
        from: InodeId,
        path: &[u8],
        way: &PathWay,
        id: InodeId,
    ) {
        self.remember(submount_version, from, path, || (way.split_parts(true), PathEnd { directory: id, id }));
    }

    fn remember(
        &self,
        submount_version: u64,
        from: InodeId,
        path: &[u8],
        found: impl FnOnce() -> ((Arc<[PathStep]>, Option<PathStep>), PathEnd),
    ) {
        let hash = hash(from, path);
        let group = self.group(hash).get_or_init(|| (0..SHARDS_PER_GROUP).map(|_| PathShard::default()).collect());
        let Some(mut places) = group[hash as usize % SHARDS_PER_GROUP].0.try_lock() else { return };
        let Some(place) = places.position(hash) else {
            places.take_place(hash);
            return;
        };
        let ((beginning, last), end) = found();
        places.known[place] =
            Some(Box::new(CachedPath { from, submount_version, end, beginning, last, path: path.into() }));
    }
}

/// Hashes a path, eight bytes at a time. The hash is never 0.
fn hash(from: InodeId, path: &[u8]) -> u32 {
    const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;
    let mix = |state: u64, word: u64| (state ^ word).wrapping_mul(FACTOR).rotate_left(29);
    let (words, rest) = path.as_chunks();
    let mixed = words.iter().fold(mix(path.len() as u64, from.0), |state, word| mix(state, u64::from_le_bytes(*word)));
    let rest = rest.iter().fold(0, |word, &byte| word << 8 | u64::from(byte));
    // The upper half of a product depends on all bits of its factors.
    ((mix(mixed, rest).wrapping_mul(FACTOR) >> 32) as u32).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Files of one directory have names that differ little, and are used together.
    #[test]
    fn similar_paths_spread_over_the_shards() {
        const PATHS: usize = GROUPS * SHARDS_PER_GROUP;
        for pattern in ["/directory/file-", "/d/f", "/mail/cur/1795382347.M", "/a/rather/long/way/to/some/object_"] {
            let mut shards = [0; GROUPS * SHARDS_PER_GROUP];
            for number in 0..PATHS {
                shards[hash(InodeId(1), format!("{pattern}{number}").as_bytes()) as usize % shards.len()] += 1;
            }
            // The average is one path each. By chance, four in a thousand have more than there are places.
            let lost: usize = shards.iter().map(|&paths: &usize| paths.saturating_sub(PATHS_PER_SHARD)).sum();
            assert!(lost < PATHS / 50, "{lost} of {PATHS} paths like {pattern} have no place");
        }
    }

    #[test]
    fn paths_followed_twice_outlive_paths_followed_once() {
        let known = || {
            let (from, end, path) = (InodeId(1), PathEnd { directory: InodeId(1), id: InodeId(2) }, SmallVec::new());
            Some(Box::new(CachedPath { from, submount_version: 0, end, beginning: Arc::default(), last: None, path }))
        };
        let mut places = ShardPaths::default();
        let hashes = 1..=PATHS_PER_SHARD as u32;
        hashes.clone().for_each(|hash| places.take_place(hash));
        assert!(hashes.clone().all(|hash| places.position(hash).is_some()), "each has a place: {places:?}");
        for hash in 1..PATHS_PER_SHARD {
            places.known[places.position(hash as u32).expect("a place")] = known();
        }
        (100..200).for_each(|hash| places.take_place(hash));
        assert!((1..PATHS_PER_SHARD).all(|hash| places.position(hash as u32).is_some()), "{places:?}");
        assert!(places.position(199).is_some(), "{places:?}");
        places.known[places.position(199).expect("a place")] = known();
        (200..204).for_each(|hash| places.take_place(hash));
        let left = places.known.iter().flatten().count();
        assert_eq!(
            left,
            PATHS_PER_SHARD - 1,
            "one of them is replaced, and its place then serves paths that come once: {places:?}"
        );
    }
}
