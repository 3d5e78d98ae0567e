//! Files that processes have mapped (DAX), with the blocks in each process's memory.
//!
//! A mapped block stays in place, and is given out to no other file, until it is unmapped
//! ([`crate::blocks::held_blocks`]). Writes to the file use other blocks, as always: a block to which a committed row
//! refers is never overwritten. A mapping that *follows* its file (a shared one) receives new content by copies. If the
//! file has left a block for good, the block gets its copy when an update is applied. Other blocks get it with the
//! commit by which the file leaves them. Until then the mapping *lags*.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use ashlar_types::{BLOCK_BYTES, BlockAddress, Contents, Extent, InodeId, SessionId, blocks_for};
use ashlar_update::{Allocation, Update};

use crate::blocks::segment::{Block, checksum};
use crate::model::{MapBlocks, MappedRun};
use crate::{Store, StoreError};

/// More pieces than these are not mapped: each is a mapping of the kernel's.
const RUNS_MAX: usize = 1024;
/// Nor does a file have more different mappings that follow it: each write is shown to all of them.
const FOLLOWERS_MAX: usize = 64;
/// Ranges of a file that lag apart from each other.
const LAGGING_MAX: usize = 16;
/// Of all blocks, the part that may be mapped at once: blocks of deleted files stay taken.
const HELD_PART: u64 = 2;

/// Blocks that follow their file, and for how many mappings.
#[derive(Clone, Copy, Debug)]
struct Follower {
    logical_block: u64,
    blocks: u64,
    address: BlockAddress,
    count: u32,
}

impl Follower {
    fn is_of(&self, run: &MappedRun) -> bool {
        (self.logical_block, self.blocks, self.address) == (run.logical_block, run.blocks, run.address)
    }
}

/// All mapped blocks.
#[derive(Debug, Default)]
pub(crate) struct Mapped {
    by_session: BTreeMap<SessionId, Vec<MappedRun>>,
    followers: HashMap<InodeId, Vec<Follower>>,
    /// Ranges in which followers may show older content than the applied state.
    lagging: BTreeMap<InodeId, Vec<Range<u64>>>,
}

impl Mapped {
    fn record_lagging(&mut self, inode: InodeId, blocks: Range<u64>) {
        let known = self.lagging.entry(inode).or_default();
        let is_full = known.len() >= LAGGING_MAX;
        let is_near = |one: &Range<u64>| is_full || one.start <= blocks.end && blocks.start <= one.end;
        let (near, mut apart): (Vec<_>, Vec<_>) = known.drain(..).partition(is_near);
        let all = near.into_iter().fold(blocks, |all, one| all.start.min(one.start)..all.end.max(one.end));
        apart.push(all);
        *known = apart;
    }

    fn forget_followers(&mut self, inode: InodeId) {
        self.followers.remove(&inode);
        self.lagging.remove(&inode);
    }
}

impl Store {
    /// Keeps blocks of a file in place, since a session maps them under this number of its own.
    ///
    /// # Errors
    /// [`StoreError::Corrupt`], [`StoreError::Database`].
    pub fn map_blocks(
        &mut self,
        session: SessionId,
        (number, follows): (u32, bool),
        inode: InodeId,
        blocks: Range<u64>,
    ) -> Result<MapBlocks, StoreError> {
        let most = self.allocator.total_blocks() / HELD_PART;
        let Contents::Extents(extents) = self.contents_range(inode, blocks.clone())? else {
            return Ok(MapBlocks::Impossible);
        };
        let mut runs = Vec::with_capacity(extents.len());
        let (mut at, mut is_fresh) = (blocks.start, false);
        for Extent { logical_block, blocks, address } in extents {
            let address = address.filter(|address| logical_block == at && !self.allocator.is_closed(address.segment()));
            let Some(address) = address else { return Ok(MapBlocks::Impossible) };
            at += blocks;
            is_fresh |= (0..blocks).any(|step| self.allocator.is_fresh(address.plus(step)))
                || self.frozen.as_ref().is_some_and(|frozen| frozen.has_written(address, blocks));
            runs.push(MappedRun { number, follows, inode, logical_block, blocks, address });
        }
        let followers = self.mapped.followers.get(&inode).map_or(&[][..], Vec::as_slice);
        let is_new = |run: &&MappedRun| !followers.iter().any(|follower| follower.is_of(run));
        let new = if follows { runs.iter().filter(is_new).count() } else { 0 };
        let is_possible = at == blocks.end
            && !runs.is_empty()
            && runs.len() <= RUNS_MAX
            && (new == 0 || followers.is_empty() || followers.len() + new <= FOLLOWERS_MAX)
            && self.allocator.held_blocks() + (blocks.end - blocks.start) <= most;
        if !is_possible {
            return Ok(MapBlocks::Impossible);
        }
        // A start would find the same bytes in other blocks, and these taken: there might be no room for both.
        if is_fresh {
            return Ok(MapBlocks::CommitFirst);
        }
        for run in &runs {
            self.keep_mapped(session, run);
        }
        Ok(MapBlocks::Done(runs))
    }

    /// Takes over a session's existing mapping after a start.
    ///
    /// No block may have been given out before. Returns `false` if the blocks do not exist.
    pub fn take_up_mapped(&mut self, session: SessionId, run: &MappedRun) -> bool {
        // Blocks that have moved within their file are no longer followed.
        let follows = run.follows && self.is_in_place(run);
        let is_there = self.keep_mapped(session, &MappedRun { follows, ..*run });
        if is_there && follows {
            self.mapped.record_lagging(run.inode, run.logical_block..run.logical_block + run.blocks);
        }
        is_there
    }

    /// Whether no block of a mapping is the file's at another place.
    fn is_in_place(&self, run: &MappedRun) -> bool {
        let end = run.logical_block + run.blocks;
        let Ok(Contents::Extents(extents)) = self.contents_range(run.inode, run.logical_block..end) else {
            return false;
        };
        let is_own = |block: u64| {
            let at = run.address.plus(block - run.logical_block);
            let is_here = |extent: &Extent| {
                let step = block.checked_sub(extent.logical_block).filter(|step| *step < extent.blocks);
                step.is_some_and(|step| extent.address.is_some_and(|address| address.plus(step) == at))
            };
            !self.allocator.is_live(at) || extents.iter().any(is_here)
        };
        (run.logical_block..end).all(is_own)
    }

    fn keep_mapped(&mut self, session: SessionId, run: &MappedRun) -> bool {
        if !self.allocator.hold(run.address, run.blocks) {
            return false;
        }
        self.mapped.by_session.entry(session).or_default().push(*run);
        if run.follows {
            let followers = self.mapped.followers.entry(run.inode).or_default();
            match followers.iter_mut().find(|follower| follower.is_of(run)) {
                Some(follower) => follower.count += 1,
                None => {
                    let MappedRun { logical_block, blocks, address, .. } = *run;
                    followers.push(Follower { logical_block, blocks, address, count: 1 });
                }
            }
        }
        true
    }

    /// Removes a session's mapping of this number, or all its mappings without a number.
    pub fn unmap_blocks(&mut self, session: SessionId, number: Option<u32>) {
        let Some(runs) = self.mapped.by_session.get_mut(&session) else { return };
        let (gone, left): (Vec<_>, _) = runs.iter().partition(|run| number.is_none_or(|number| run.number == number));
        *runs = left;
        if runs.is_empty() {
            self.mapped.by_session.remove(&session);
        }
        for run in gone {
            self.allocator.release_hold(run.address, run.blocks);
            let Some(followers) = self.mapped.followers.get_mut(&run.inode).filter(|_| run.follows) else { continue };
            followers.iter_mut().filter(|follower| follower.is_of(&run)).for_each(|follower| follower.count -= 1);
            followers.retain(|follower| follower.count > 0);
            if followers.is_empty() {
                self.mapped.forget_followers(run.inode);
            }
        }
    }

    /// Returns how many blocks a session has mapped, and how many of them belong to no file any more.
    #[must_use]
    pub fn mapped_blocks(&self, session: SessionId) -> (u64, u64) {
        let runs = self.mapped.by_session.get(&session).map_or(&[][..], Vec::as_slice);
        runs.iter().fold((0, 0), |(mapped, kept), run| {
            (mapped + run.blocks, kept + self.allocator.freed_blocks(run.address, run.blocks))
        })
    }

    /// Whether any process has mapped a file so that writes to it must show there.
    #[must_use]
    pub fn is_followed(&self, inode: InodeId) -> bool {
        self.mapped.followers.contains_key(&inode)
    }

    /// Whether such a mapping may show older content than the applied state.
    #[must_use]
    pub fn lags(&self, inode: InodeId) -> bool {
        self.mapped.lagging.contains_key(&inode)
    }

    /// Copies the changes of an update into mappings.
    pub(crate) fn show_update(&mut self, update: &Update<'_>) {
        if self.mapped.followers.is_empty() {
            return;
        }
        let (inode, blocks) = match *update {
            Update::Write { inode, offset, data, .. } => {
                (inode, offset / BLOCK_BYTES..blocks_for(offset + data.len() as u64))
            }
            Update::Resize { inode, size, .. } => (inode, size / BLOCK_BYTES..u64::MAX),
            Update::Allocate { how: Allocation::Collapse | Allocation::Insert, inode, .. } => {
                // Mapped blocks are others of the file's now. Their mappings stay as they are.
                self.mapped.forget_followers(inode);
                let runs = self.mapped.by_session.values_mut().flatten();
                runs.filter(|run| run.inode == inode).for_each(|run| run.follows = false);
                return;
            }
            Update::Allocate { inode, offset, length, .. } => {
                (inode, offset / BLOCK_BYTES..blocks_for(offset + length))
            }
            _ => return,
        };
        self.show(inode, &blocks);
    }

    /// Copies committed content into the mappings that lag.
    pub fn show_lagging(&mut self) {
        for (inode, ranges) in std::mem::take(&mut self.mapped.lagging) {
            ranges.iter().for_each(|blocks| self.show(inode, blocks));
        }
    }

    /// Copies the content of these blocks into the file's mappings, unless they still lag.
    fn show(&mut self, inode: InodeId, blocks: &Range<u64>) {
        let Some(followers) = self.mapped.followers.get(&inode) else { return };
        // A checker reads the earlier committed content, and would report a change as damage.
        let bound = self.readers.bound();
        let mut lagging = Vec::new();
        for follower in followers {
            let end = follower.logical_block + follower.blocks;
            let (start, end) = (follower.logical_block.max(blocks.start), end.min(blocks.end));
            if start >= end {
                continue;
            }
            if let Err(error) = self.show_in(inode, follower, start..end, bound, &mut lagging) {
                // It stays as it was last.
                tracing::debug!(%inode, %error, "a mapping is not shown what was written");
            }
        }
        lagging.into_iter().for_each(|blocks| self.mapped.record_lagging(inode, blocks));
    }

    /// Copies the content of these blocks into a mapping, and records the ranges that lag.
    fn show_in(
        &self,
        inode: InodeId,
        follower: &Follower,
        blocks: Range<u64>,
        bound: u64,
        lagging: &mut Vec<Range<u64>>,
    ) -> Result<(), StoreError> {
        if self.inode(inode)?.is_none() {
            return Ok(());
        }
        let extents = match self.contents_range(inode, blocks.clone())? {
            Contents::Extents(extents) | Contents::Withheld(extents) => extents,
            Contents::Inline(_) => Vec::new(),
        };
        let mut at = blocks.start;
        for Extent { logical_block, blocks, address } in extents {
            // The mapped block is still the file's own.
            if address != Some(follower.address.plus(logical_block - follower.logical_block)) {
                continue;
            }
            self.show_blocks(inode, follower, at..logical_block, bound, lagging);
            at = logical_block + blocks;
        }
        self.show_blocks(inode, follower, at..blocks.end, bound, lagging);
        Ok(())
    }

    /// The same for blocks of which none is the file's own any more.
    fn show_blocks(
        &self,
        inode: InodeId,
        follower: &Follower,
        blocks: Range<u64>,
        bound: u64,
        lagging: &mut Vec<Range<u64>>,
    ) {
        let mut content: Block = [0; BLOCK_BYTES as usize];
        for block in blocks {
            let mapped = follower.address.plus(block - follower.logical_block);
            if !self.allocator.is_loose(mapped, bound) {
                match lagging.last_mut().filter(|last| last.end == block) {
                    Some(last) => last.end = block + 1,
                    None => lagging.push(block..block + 1),
                }
                continue;
            }
            content.fill(0);
            let shown = self.read(inode, block * BLOCK_BYTES, &mut content).and_then(|_| {
                let segment = self.segment(mapped)?;
                segment.store(mapped.block(), 0, &content)?;
                // The session that has replaced it in part may read the other part there yet.
                segment.set_checksum(mapped.block(), checksum(&content))
            });
            if let Err(error) = shown {
                // A damaged block is an error to its readers, and the mapping stays as it was.
                tracing::debug!(%inode, block, %error, "a mapping is not shown what was written");
            }
        }
    }
}

#[cfg(test)]
mod tests {

    use ashlar_types::{FileKind, LogPosition, Timestamp};
    use ashlar_update::Create;

    use super::*;
    use crate::test_media::{StoreTestArena, TestMedium, on_both_databases};

    const FILE: InodeId = InodeId(100);
    const MAPPER: SessionId = SessionId(7);
    const WRITER: SessionId = SessionId(1);
    const BLOCK: usize = BLOCK_BYTES as usize;

    struct Bench {
        arena: StoreTestArena,
        store: Store,
        end: u64,
    }

    impl Bench {
        /// A store with a file of eight blocks, of ones, committed.
        fn new(medium: TestMedium) -> Self {
            let arena = StoreTestArena::new(medium, 16 << 20);
            let mut bench = Self { store: arena.open(), arena, end: 0 };
            bench.apply(&Update::Create(Create {
                inode: FILE,
                parent: InodeId::ROOT,
                name: b"file",
                kind: FileKind::Regular,
                mode: 0o644,
                uid: 0,
                gid: 0,
                device: 0,
                at: Timestamp::default(),
                target: b"",
                acl_access: b"",
                acl_default: b"",
            }));
            bench.write(0, &[1; 8 * BLOCK]);
            // Beyond the first chunk of its map.
            bench.write(8 * BLOCK_BYTES, &[1; 192 * BLOCK]);
            bench.store.commit().unwrap();
            bench
        }

        fn apply(&mut self, update: &Update<'_>) {
            self.end += 1;
            self.store.apply(WRITER, LogPosition(self.end), update, &|_| true).unwrap();
            self.store.release(WRITER, LogPosition(self.end));
        }

        fn write(&mut self, offset: u64, data: &[u8]) {
            self.apply(&Update::Write { inode: FILE, offset, at: Timestamp::default(), strip: false, data });
        }

        fn map(&mut self, number: u32, follows: bool) -> Vec<MappedRun> {
            self.map_some(number, follows, 0..8)
        }

        fn map_some(&mut self, number: u32, follows: bool, blocks: Range<u64>) -> Vec<MappedRun> {
            match self.store.map_blocks(MAPPER, (number, follows), FILE, blocks).unwrap() {
                MapBlocks::Done(runs) => runs,
                other => panic!("{other:?}"),
            }
        }

        /// The first byte of each block that is mapped.
        fn seen(&self, runs: &[MappedRun]) -> Vec<u8> {
            let blocks = runs.iter().flat_map(|run| (0..run.blocks).map(|step| run.address.plus(step)));
            let first = |address: BlockAddress| {
                let mut byte = [0];
                self.store.segment(address).unwrap().load(address.block(), 0, &mut byte).unwrap();
                byte[0]
            };
            blocks.map(first).collect()
        }
    }

    fn mapping_that_does_not_follow_keeps_its_content(medium: TestMedium) {
        let mut bench = Bench::new(medium);
        let runs = bench.map(1, false);
        for round in 0..4 {
            bench.write(0, &[2 + round; 8 * BLOCK]);
            bench.store.commit().unwrap();
        }
        assert_eq!(bench.seen(&runs), [1; 8]);
        assert!(!bench.store.is_followed(FILE) && !bench.store.lags(FILE));
        let free = bench.store.space().blocks_free;
        bench.store.unmap_blocks(MAPPER, Some(1));
        assert_eq!(bench.store.space().blocks_free, free + 8, "and is free afterwards");
    }

    fn mapped_blocks_that_no_file_has_are_counted(medium: TestMedium) {
        let mut bench = Bench::new(medium);
        bench.map(1, false);
        bench.map(2, true);
        assert_eq!(bench.store.mapped_blocks(MAPPER), (16, 0));
        bench.write(2 * BLOCK_BYTES, &[2; 2 * BLOCK]);
        assert_eq!(bench.store.mapped_blocks(MAPPER), (16, 4), "two blocks, mapped twice");
        bench.store.unmap_blocks(MAPPER, Some(1));
        bench.store.commit().unwrap();
        assert_eq!(bench.store.mapped_blocks(MAPPER), (8, 2));
        bench.apply(&Update::Unlink {
            inode: FILE,
            parent: InodeId::ROOT,
            name: b"file",
            release: true,
            at: Timestamp::default(),
        });
        assert_eq!(bench.store.mapped_blocks(MAPPER), (8, 8));
        assert_eq!(bench.store.mapped_blocks(WRITER), (0, 0));
        bench.store.unmap_blocks(MAPPER, None);
        assert_eq!(bench.store.mapped_blocks(MAPPER), (0, 0));
    }

    fn follower_sees_writes_once_no_committed_row_refers(medium: TestMedium) {
        let mut bench = Bench::new(medium);
        let runs = bench.map(1, true);
        assert!(bench.store.is_followed(FILE) && !bench.store.lags(FILE));
        bench.write(3 * BLOCK_BYTES, &[2; BLOCK]);
        assert_eq!(bench.seen(&runs), [1; 8], "a committed row refers to it");
        assert!(bench.store.lags(FILE));
        bench.store.commit().unwrap();
        assert_eq!(bench.seen(&runs), [1, 1, 1, 2, 1, 1, 1, 1]);
        assert!(!bench.store.lags(FILE));
        bench.write(3 * BLOCK_BYTES, &[3; BLOCK]);
        assert_eq!(bench.seen(&runs), [1, 1, 1, 3, 1, 1, 1, 1], "at once");
        bench.apply(&Update::Resize { inode: FILE, size: 4 * BLOCK_BYTES, strip: false, at: Timestamp::default() });
        bench.store.commit().unwrap();
        assert_eq!(bench.seen(&runs), [1, 1, 1, 3, 0, 0, 0, 0]);
        bench.store.unmap_blocks(MAPPER, None);
        assert!(!bench.store.is_followed(FILE) && bench.store.mapped.by_session.is_empty());
    }

    fn all_of_a_long_file_is_followed(medium: TestMedium) {
        let mut bench = Bench::new(medium);
        let runs = bench.map_some(1, true, 0..200);
        for block in [0, 127, 128, 199] {
            bench.write(block * BLOCK_BYTES + 5, &[2; BLOCK]);
            bench.store.commit().unwrap();
            bench.write(block * BLOCK_BYTES, &[3; 2]);
            bench.store.commit().unwrap();
            assert_eq!(bench.seen(&runs)[block as usize], 3, "block {block}");
        }
    }

    fn a_checker_sees_no_block_change(medium: TestMedium) {
        let mut bench = Bench::new(medium);
        let runs = bench.map(1, true);
        let checker = bench.store.readers.begin_read();
        bench.write(0, &[2; 8 * BLOCK]);
        bench.store.commit().unwrap();
        assert_eq!(bench.seen(&runs), [1; 8]);
        assert!(bench.store.lags(FILE));
        drop(checker);
        bench.store.show_lagging();
        assert_eq!(bench.seen(&runs), [2; 8]);
        assert!(!bench.store.lags(FILE));
    }

    fn equal_mappings_count_once_and_others_are_limited(medium: TestMedium) {
        let mut bench = Bench::new(medium);
        let runs: Vec<_> = (0..100).flat_map(|number| bench.map(number, true)).collect();
        bench.write(0, &[2; BLOCK]);
        bench.store.commit().unwrap();
        assert_eq!(bench.seen(&runs[..1])[0], 2);
        for number in 0..99 {
            bench.store.unmap_blocks(MAPPER, Some(number));
        }
        bench.write(0, &[3; BLOCK]);
        assert_eq!(bench.seen(&runs[..1])[0], 3, "one is left");
        let mut is_done = |first| {
            let mapped = bench.store.map_blocks(MAPPER, (7, true), FILE, first..first + 2).unwrap();
            matches!(mapped, MapBlocks::Done(_))
        };
        let count = (10..190).filter(|first| is_done(*first)).count();
        assert!((FOLLOWERS_MAX / 2..=FOLLOWERS_MAX).contains(&count), "{count}");
    }

    fn blocks_moved_within_a_file_are_no_longer_followed(medium: TestMedium) {
        let mut bench = Bench::new(medium);
        let runs = bench.map(1, true);
        let (at, how) = (Timestamp::default(), Allocation::Collapse);
        let (offset, length) = (0, BLOCK_BYTES);
        bench.apply(&Update::Allocate { inode: FILE, how, offset, length, strip: false, at });
        assert!(!bench.store.is_followed(FILE));
        bench.write(0, &[2; 8 * BLOCK]);
        bench.store.commit().unwrap();
        assert_eq!(bench.seen(&runs), [1; 8]);
        // A later mapping of the same blocks follows, even if the first ends.
        bench.map(2, true);
        bench.store.unmap_blocks(MAPPER, Some(1));
        assert!(bench.store.is_followed(FILE));
        bench.store.unmap_blocks(MAPPER, None);
        assert!(!bench.store.is_followed(FILE));
    }

    fn uncommitted_blocks_are_not_mapped(medium: TestMedium) {
        let mut bench = Bench::new(medium);
        bench.write(0, &[2; 8 * BLOCK]);
        let job = bench.store.begin_commit().expect("a job");
        let try_to = |bench: &mut Bench| bench.store.map_blocks(MAPPER, (1, false), FILE, 0..8).unwrap();
        assert_eq!(try_to(&mut bench), MapBlocks::CommitFirst);
        let done = job.run();
        bench.store.finish_commit(done).unwrap();
        assert!(matches!(try_to(&mut bench), MapBlocks::Done(_)));
    }

    #[test]
    fn lagging_ranges_are_kept_separate_up_to_a_limit() {
        let mut mapped = Mapped::default();
        for block in [5, 7, 6, 100] {
            mapped.record_lagging(FILE, block..block + 1);
        }
        assert_eq!(mapped.lagging[&FILE], [5..8, 100..101]);
        (0..100).for_each(|block| mapped.record_lagging(FILE, 1000 * block..1000 * block + 1));
        assert!(mapped.lagging[&FILE].len() <= LAGGING_MAX + 1);
        assert!((0..100).all(|block| mapped.lagging[&FILE].iter().any(|one| one.contains(&(1000 * block)))));
    }

    fn holes_inline_files_and_leaving_segments_are_not_mapped(medium: TestMedium) {
        let mut bench = Bench::new(medium);
        let try_to = |bench: &mut Bench, blocks| bench.store.map_blocks(MAPPER, (1, false), FILE, blocks).unwrap();
        assert_eq!(try_to(&mut bench, 190..201), MapBlocks::Impossible, "there are 200");
        bench.write(0, &[5; 1]);
        assert_eq!(try_to(&mut bench, 0..8), MapBlocks::CommitFirst);
        bench.store.commit().unwrap();
        bench.map(1, false);
        assert!(matches!(bench.store.retire_segment(0), Err(StoreError::Mapped(0))));
        bench.apply(&Update::Resize { inode: FILE, size: 0, strip: false, at: Timestamp::default() });
        bench.write(0, b"short");
        assert_eq!(try_to(&mut bench, 0..1), MapBlocks::Impossible);
    }

    fn reopened_store_keeps_mapped_blocks(medium: TestMedium) {
        let mut bench = Bench::new(medium);
        let runs = bench.map(1, true);
        bench.write(0, &[2; 8 * BLOCK]);
        let Bench { store, arena, .. } = bench;
        drop(store);
        let mut bench = Bench { store: arena.open(), arena, end: 0 };
        assert!(runs.iter().all(|run| bench.store.take_up_mapped(MAPPER, run)));
        bench.write(0, &[2; 8 * BLOCK]);
        bench.store.commit().unwrap();
        assert_eq!(bench.seen(&runs), [2; 8]);
        bench.write(0, &[3; BLOCK]);
        assert_eq!(bench.seen(&runs), [3, 2, 2, 2, 2, 2, 2, 2]);
    }

    on_both_databases!(
        mapping_that_does_not_follow_keeps_its_content,
        mapped_blocks_that_no_file_has_are_counted,
        follower_sees_writes_once_no_committed_row_refers,
        all_of_a_long_file_is_followed,
        a_checker_sees_no_block_change,
        equal_mappings_count_once_and_others_are_limited,
        blocks_moved_within_a_file_are_no_longer_followed,
        uncommitted_blocks_are_not_mapped,
        holes_inline_files_and_leaving_segments_are_not_mapped,
        reopened_store_keeps_mapped_blocks,
    );
}
