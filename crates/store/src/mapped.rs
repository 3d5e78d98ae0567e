//! Files that processes have mapped (DAX): which of their blocks stand in whose memory.
//!
//! A mapped block stays where it is, and is given out to nobody else, until it is unmapped ([`crate::held`]). What is written to the file
//! goes to other blocks, as always: a block that a committed row refers to is never overwritten. A mapping that *follows* its file (a shared
//! one) is shown what was written by copies: into a block that the file has left for good, when an update is applied, and into the others
//! when it is committed that the file has left them. Until then the mapping *lags*.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;

use ashlar_types::{BLOCK_BYTES, BlockAddress, InodeId, SessionId, blocks_for};
use ashlar_update::{Allocation, Update};

use crate::model::{Contents, Extent, MappedRun};
use crate::segment::Block;
use crate::{Store, StoreError};

/// More pieces than these are not mapped: each is a mapping of the kernel's.
const RUNS_MAX: usize = 1024;

/// What is mapped.
#[derive(Debug, Default)]
pub(crate) struct Mapped {
    by_session: BTreeMap<SessionId, Vec<MappedRun>>,
    /// What follows its file.
    followers: HashMap<InodeId, Vec<MappedRun>>,
    lagging: BTreeSet<InodeId>,
}

impl Store {
    /// Has blocks of a file stay where they are, as a session maps them under this number of its own; `None` where they can't be mapped: holes,
    /// reservations, bytes that stand with the metadata, a segment that is to be emptied, or too many pieces.
    ///
    /// # Errors
    /// [`StoreError::Corrupt`], [`StoreError::Lmdb`].
    pub fn map_blocks(
        &mut self,
        session: SessionId,
        (number, follows): (u32, bool),
        inode: InodeId,
        blocks: Range<u64>,
    ) -> Result<Option<Vec<MappedRun>>, StoreError> {
        let Contents::Extents(extents) = self.contents_range(inode, blocks.clone())? else { return Ok(None) };
        let mut runs = Vec::with_capacity(extents.len());
        let mut at = blocks.start;
        for Extent { logical_block, blocks, address } in extents {
            let Some(address) = address.filter(|at| !self.allocator.is_closed(at.segment())) else { return Ok(None) };
            if logical_block != at {
                return Ok(None);
            }
            at += blocks;
            runs.push(MappedRun { number, follows, inode, logical_block, blocks, address });
        }
        if at != blocks.end || runs.is_empty() || runs.len() > RUNS_MAX {
            return Ok(None);
        }
        let lags = self.lags(inode);
        for run in &runs {
            self.keep_mapped(session, run);
        }
        if !lags {
            self.mapped.lagging.remove(&inode);
        }
        Ok(Some(runs))
    }

    /// Takes note of what a session has mapped already, as after a start. Nothing may have been given out before. `false` where there are
    /// no such blocks.
    pub fn keep_mapped(&mut self, session: SessionId, run: &MappedRun) -> bool {
        if !self.allocator.hold(run.address, run.blocks) {
            return false;
        }
        self.mapped.by_session.entry(session).or_default().push(*run);
        if run.follows {
            self.mapped.followers.entry(run.inode).or_default().push(*run);
            self.mapped.lagging.insert(run.inode);
        }
        true
    }

    /// A session has unmapped what it had mapped under a number; or all, without one.
    pub fn unmap_blocks(&mut self, session: SessionId, number: Option<u32>) {
        let Some(runs) = self.mapped.by_session.get_mut(&session) else { return };
        let (gone, left) = runs.iter().partition(|run| number.is_none_or(|number| run.number == number));
        *runs = left;
        if runs.is_empty() {
            self.mapped.by_session.remove(&session);
        }
        let gone: Vec<MappedRun> = gone;
        for run in gone {
            self.allocator.let_go(run.address, run.blocks);
            if let Some(followers) = self.mapped.followers.get_mut(&run.inode).filter(|_| run.follows) {
                if let Some(at) = followers.iter().position(|other| *other == run) {
                    followers.swap_remove(at);
                }
                if followers.is_empty() {
                    self.mapped.followers.remove(&run.inode);
                    self.mapped.lagging.remove(&run.inode);
                }
            }
        }
    }

    /// What a session has mapped.
    #[must_use]
    pub fn mapped_by(&self, session: SessionId) -> &[MappedRun] {
        self.mapped.by_session.get(&session).map_or(&[], Vec::as_slice)
    }

    /// Whether anybody has mapped a file so that what is written to it is to be seen there.
    #[must_use]
    pub fn is_followed(&self, inode: InodeId) -> bool {
        self.mapped.followers.contains_key(&inode)
    }

    /// Whether such a mapping may show something older than what is applied, until the next commit.
    #[must_use]
    pub fn lags(&self, inode: InodeId) -> bool {
        self.mapped.lagging.contains(&inode)
    }

    /// Shows mappings what an update has changed.
    pub(crate) fn show_update(&mut self, update: &Update<'_>) {
        if self.mapped.followers.is_empty() {
            return;
        }
        let (inode, blocks) = match *update {
            Update::Write { inode, offset, data, .. } => {
                (inode, offset / BLOCK_BYTES..blocks_for(offset + data.len() as u64))
            }
            Update::Resize { inode, size, .. } => (inode, size / BLOCK_BYTES..u64::MAX),
            Update::Allocate { how: Allocation::Collapse | Allocation::Insert, inode, offset, .. } => {
                (inode, offset / BLOCK_BYTES..u64::MAX)
            }
            Update::Allocate { inode, offset, length, .. } => {
                (inode, offset / BLOCK_BYTES..blocks_for(offset + length))
            }
            _ => return,
        };
        if self.show(inode, &blocks) {
            self.mapped.lagging.insert(inode);
        }
    }

    /// Shows mappings what they lag behind in, as far as it is committed.
    pub(crate) fn show_lagging(&mut self) {
        for inode in std::mem::take(&mut self.mapped.lagging) {
            if self.show(inode, &(0..u64::MAX)) {
                self.mapped.lagging.insert(inode);
            }
        }
    }

    /// Shows the mappings of a file what is in these of its blocks; says whether they lag afterwards.
    fn show(&mut self, inode: InodeId, blocks: &Range<u64>) -> bool {
        let Some(runs) = self.mapped.followers.get(&inode) else { return false };
        // A checker reads what was committed before, and finds it damaged if it changes.
        let is_held = self.is_held();
        let mut lags = false;
        for run in runs {
            let (start, end) = (run.logical_block.max(blocks.start), (run.logical_block + run.blocks).min(blocks.end));
            if start >= end {
                continue;
            }
            match self.show_run(run, start..end, is_held) {
                Ok(run_lags) => lags |= run_lags,
                // A file that is gone stays as it was last, and what is damaged is an error to its readers.
                Err(error) => tracing::debug!(%inode, %error, "a mapping is not shown what was written"),
            }
        }
        lags
    }

    fn show_run(&self, run: &MappedRun, blocks: Range<u64>, is_held: bool) -> Result<bool, StoreError> {
        let mut lags = false;
        let mut content: Block = [0; BLOCK_BYTES as usize];
        let now = self.addresses(run.inode, &blocks)?;
        for block in blocks {
            let mapped = run.address.plus(block - run.logical_block);
            if now.get(&block) == Some(&mapped) {
                continue;
            }
            if is_held || !self.allocator.is_loose(mapped) {
                lags = true;
                continue;
            }
            content.fill(0);
            self.read(run.inode, block * BLOCK_BYTES, &mut content)?;
            self.segment(mapped)?.store(mapped.block(), 0, &content)?;
        }
        Ok(lags)
    }

    /// Where the blocks of a file are.
    fn addresses(&self, inode: InodeId, blocks: &Range<u64>) -> Result<HashMap<u64, BlockAddress>, StoreError> {
        let Contents::Extents(extents) = self.contents_range(inode, blocks.clone())? else { return Ok(HashMap::new()) };
        let at = |extent: Extent| extent.address.map(|address| (extent, address));
        let each = |(extent, address): (Extent, BlockAddress)| {
            (0..extent.blocks).map(move |step| (extent.logical_block + step, address.plus(step)))
        };
        Ok(extents.into_iter().filter_map(at).flat_map(each).collect())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use ashlar_pmem::{Arena, ArenaOptions};
    use ashlar_types::{FileKind, LogPosition, Timestamp};
    use ashlar_update::Create;

    use super::*;

    const FILE: InodeId = InodeId(100);
    const MAPPER: SessionId = SessionId(7);
    const WRITER: SessionId = SessionId(1);
    const BLOCK: usize = BLOCK_BYTES as usize;

    struct Bench {
        store: Store,
        end: u64,
        _directory: tempfile::TempDir,
    }

    impl Bench {
        /// A store with a file of eight blocks, of ones, committed.
        fn new() -> Self {
            let directory = tempfile::tempdir().unwrap();
            let options = ArenaOptions { size_bytes: 16 << 20, emulate_pmem: false };
            let arena = Arc::new(Arena::create(&directory.path().join("arena"), &options).unwrap());
            Store::format(&arena, Timestamp::default()).unwrap();
            let mut bench = Self { store: Store::open(arena).unwrap(), end: 0, _directory: directory };
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
            self.store.map_blocks(MAPPER, (number, follows), FILE, 0..8).unwrap().expect("mapped")
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

    #[test]
    fn what_is_mapped_alone_stays_as_it_was() {
        let mut bench = Bench::new();
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

    #[test]
    fn a_follower_sees_what_is_written_once_its_blocks_are_nobodys() {
        let mut bench = Bench::new();
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
        assert!(!bench.store.is_followed(FILE) && bench.store.mapped_by(MAPPER).is_empty());
    }

    #[test]
    fn all_of_a_long_file_is_followed() {
        let mut bench = Bench::new();
        let runs = bench.store.map_blocks(MAPPER, (1, true), FILE, 0..200).unwrap().expect("mapped");
        for block in [0, 127, 128, 199] {
            bench.write(block * BLOCK_BYTES + 5, &[2; BLOCK]);
            bench.store.commit().unwrap();
            bench.write(block * BLOCK_BYTES, &[3; 2]);
            bench.store.commit().unwrap();
            assert_eq!(bench.seen(&runs)[block as usize], 3, "block {block}");
        }
    }

    #[test]
    fn a_checker_sees_no_block_change() {
        let mut bench = Bench::new();
        let runs = bench.map(1, true);
        let checker = Arc::clone(&bench.store.hold);
        bench.write(0, &[2; 8 * BLOCK]);
        bench.store.commit().unwrap();
        assert_eq!(bench.seen(&runs), [1; 8]);
        assert!(bench.store.lags(FILE));
        drop(checker);
        bench.write(0, &[3; BLOCK]);
        bench.store.commit().unwrap();
        assert_eq!(bench.seen(&runs), [3, 2, 2, 2, 2, 2, 2, 2]);
    }

    #[test]
    fn holes_small_files_and_segments_that_go_are_not_mapped() {
        let mut bench = Bench::new();
        assert_eq!(bench.store.map_blocks(MAPPER, (1, false), FILE, 190..201).unwrap(), None, "there are 200");
        bench.map(1, false);
        assert!(matches!(bench.store.retire_segment(0), Err(StoreError::Mapped(0))));
        bench.apply(&Update::Resize { inode: FILE, size: 0, strip: false, at: Timestamp::default() });
        bench.write(0, b"short");
        assert_eq!(bench.store.map_blocks(MAPPER, (2, false), FILE, 0..1).unwrap(), None);
    }

    #[test]
    fn what_was_mapped_is_kept_by_who_opens_the_store_again() {
        let mut bench = Bench::new();
        let runs = bench.map(1, true);
        bench.write(0, &[2; 8 * BLOCK]);
        let Bench { store, _directory, .. } = bench;
        let arena = Arc::clone(&store.arena);
        drop(store);
        let mut bench = Bench { store: Store::open(arena).unwrap(), end: 0, _directory };
        assert!(runs.iter().all(|run| bench.store.keep_mapped(MAPPER, run)));
        bench.write(0, &[2; 8 * BLOCK]);
        bench.store.commit().unwrap();
        assert_eq!(bench.seen(&runs), [2; 8]);
        bench.write(0, &[3; BLOCK]);
        assert_eq!(bench.seen(&runs), [3, 2, 2, 2, 2, 2, 2, 2]);
    }
}
