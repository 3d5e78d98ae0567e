//! The writer's side: reads the committed tree, part by part.

use std::collections::btree_set;
use std::ops::RangeFrom;
use std::sync::Arc;

use ashlar_types::{BLOCK_BYTES, InodeId, NameHashKey, NodeNumber, SessionId, name_cookie};

use crate::blocks::readers::{StateReader, StateReaders};
use crate::blocks::segment::{Block, StoreSegment};
use crate::copying::error::FullCopyError;
use crate::copying::item::{COPY_PART_BYTES_MAX, CopiedBlocks, CopyEnd, CopyItem, ITEM_BLOCKS_MAX};
use crate::copying::touched::{RowKey, SegmentMaps, TouchedRows};
use crate::database::{Database, Snapshot};
use crate::metadata::chunk::{CHUNK_BLOCKS, ExtentChunk, Run};
use crate::metadata::rows::{self, kind};
use crate::model::JournalMark;
use crate::{Store, StoreError};

/// The most rows that are noted during a pass: some 300 MB of keys. A copy that is slower than that never ends.
const TOUCHED_ROWS_MAX: usize = 4 << 20;
/// Rows that one step looks at, at most: bitmaps are read and not sent.
const STEP_ROWS_MAX: usize = 4096;
/// Where the tables begin: inodes, entries, all others.
const TABLE_STARTS: [u8; 3] = [kind::INODE, kind::ENTRY, 0];

/// A full copy that is being made of a store's committed tree.
///
/// It works beside the store, on any thread. The store notes which rows its commits touch until this is dropped, or its
/// last pass begins. After an error the copy must be begun anew.
pub struct CopySource {
    database: Arc<Database>,
    readers: Arc<StateReaders>,
    touched: Arc<TouchedRows>,
    node: NodeNumber,
    hash_key: NameHashKey,
    /// Inodes from this one on were made since the copy began, so that all their rows are noted.
    new_inodes: u64,
    pass: CopyPass,
    progress: CopyProgress,
}

/// How far a copy is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CopyProgress {
    /// The pass, counted from 0.
    pub pass: u32,
    /// Rows that the pass has read.
    pub rows: u64,
    /// Rows that the pass reads in all, about.
    pub rows_total: u64,
    /// Bytes of all parts so far.
    pub bytes: u64,
}

/// The rows that were touched since the pass began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CopyBacklog {
    /// How many.
    pub rows: u64,
    /// How many of them are pieces of 512 KiB of files.
    pub chunks: u64,
}

impl CopyBacklog {
    /// Returns the bytes of a pass that sends these rows, estimated from above.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.chunks * CHUNK_BLOCKS * BLOCK_BYTES + (self.rows - self.chunks) * 512
    }
}

enum CopyPass {
    /// All rows: the next one.
    All(RowPlace),
    /// Touched rows, each as committed when it is read.
    Touched(TouchedPass),
    /// Touched rows in one view.
    Last(CopyView, TouchedPass),
    Over,
    Failed,
}

/// The first row with this key or a later one; in the same chunk, from this block on.
struct RowPlace {
    key: Vec<u8>,
    block: u64,
}

struct TouchedPass {
    rows: btree_set::IntoIter<RowKey>,
    /// The rest of a chunk, from this block on.
    current: Option<(RowKey, u64)>,
}

/// A committed state, whose blocks stay as they are.
struct CopyView {
    snapshot: Snapshot,
    segments: SegmentMaps,
    _reader: StateReader,
}

impl Store {
    /// Begins a full copy of the committed tree. The first pass sends all of it.
    ///
    /// # Errors
    /// As for [`Self::check_sound`]; [`StoreError::Database`].
    pub fn begin_copy(&mut self) -> Result<CopySource, StoreError> {
        self.begin_copy_with(TOUCHED_ROWS_MAX)
    }

    /// Begins a copy that notes at most so many rows in a pass.
    pub(crate) fn begin_copy_with(&mut self, rows_max: usize) -> Result<CopySource, StoreError> {
        self.check_sound()?;
        let touched = Arc::new(TouchedRows::new(self.segments.clone(), rows_max));
        if let Some(frozen) = &self.frozen {
            touched.begin_batch(&frozen.touched_rows(), &self.segments);
        }
        self.copies.push(Arc::downgrade(&touched));
        Ok(CopySource {
            database: Arc::clone(&self.database),
            readers: Arc::clone(&self.readers),
            touched,
            node: self.node,
            hash_key: self.hash_key,
            new_inodes: self.snapshot.inode_end()?,
            pass: CopyPass::All(RowPlace::start(0)),
            progress: CopyProgress { rows_total: self.snapshot.rows()?, ..CopyProgress::default() },
        })
    }
}

impl CopySource {
    /// Reads the next part of the pass: whole items, of so many bytes at most, but one item at least. A part has no
    /// more than [`COPY_PART_BYTES_MAX`] bytes. `None`: the pass is over.
    ///
    /// # Errors
    /// [`StoreError::Corrupt`], [`StoreError::Database`]. Damaged blocks are sent as such.
    pub fn next_part(&mut self, bytes_max: usize) -> Result<Option<Vec<u8>>, FullCopyError> {
        loop {
            let (part, next) = match std::mem::replace(&mut self.pass, CopyPass::Failed) {
                CopyPass::All(place) => {
                    let view = self.open_view()?;
                    let mut reader = self.part_reader(&view, bytes_max);
                    let next = reader.read_all(place, self.new_inodes)?;
                    (reader.end(&mut self.progress), next.map_or(CopyPass::Over, CopyPass::All))
                }
                CopyPass::Touched(mut pass) => {
                    let view = self.open_view()?;
                    let mut reader = self.part_reader(&view, bytes_max);
                    let is_over = reader.read_touched(&mut pass)?;
                    let next = if is_over { CopyPass::Over } else { CopyPass::Touched(pass) };
                    (reader.end(&mut self.progress), next)
                }
                CopyPass::Last(view, mut pass) => {
                    let mut reader = self.part_reader(&view, bytes_max);
                    let is_over = reader.read_touched(&mut pass)?;
                    let part = reader.end(&mut self.progress);
                    (part, if is_over { CopyPass::Over } else { CopyPass::Last(view, pass) })
                }
                CopyPass::Over => {
                    self.pass = CopyPass::Over;
                    return Ok(None);
                }
                CopyPass::Failed => return Err(FullCopyError::Failed),
            };
            self.pass = next;
            if !part.is_empty() {
                return Ok(Some(part));
            }
        }
    }

    /// Begins a pass over the rows that were touched since the last pass began. That one must be over.
    ///
    /// # Errors
    /// [`FullCopyError::TooManyTouched`].
    pub fn begin_pass(&mut self) -> Result<(), FullCopyError> {
        self.check_over()?;
        let rows = self.touched.take()?;
        self.note_pass(rows.len());
        self.pass = CopyPass::Touched(TouchedPass { rows: rows.into_iter(), current: None });
        Ok(())
    }

    /// Begins the last pass, which leaves a copy of the tree as it is committed now.
    ///
    /// Until the pass is over, no block that is freed from now on is given out again. Frames from the position of the
    /// returned mark on must be kept from before this call. The pass before must be over.
    ///
    /// # Errors
    /// [`FullCopyError::TooManyTouched`]; [`StoreError::Database`].
    pub fn begin_last_pass(&mut self) -> Result<CopyEnd, FullCopyError> {
        self.check_over()?;
        // In this order: all rows that this state has and no pass has sent are noted by now.
        let view = self.open_view()?;
        let rows = self.touched.take()?;
        self.touched.stop();
        let key = rows::key1(kind::JOURNAL, self.node.get().into());
        let mark = match view.snapshot.get(&key)?.map(|value| rows::decode_journal_mark(&key, value)) {
            Some(decoded) => decoded.ok_or(StoreError::Corrupt("a journal's mark is damaged"))?.1,
            None => JournalMark::default(),
        };
        let (inodes, entries) = view.snapshot.inodes_and_entries()?;
        self.note_pass(rows.len());
        self.pass = CopyPass::Last(view, TouchedPass { rows: rows.into_iter(), current: None });
        Ok(CopyEnd { writer: self.node, mark, inodes, entries })
    }

    /// Returns the rows that were touched since the pass began.
    #[must_use]
    pub fn backlog(&self) -> CopyBacklog {
        let (rows, chunks) = self.touched.counts();
        CopyBacklog { rows, chunks }
    }

    /// Returns how far the copy is.
    #[must_use]
    pub fn progress(&self) -> CopyProgress {
        self.progress
    }

    fn check_over(&self) -> Result<(), FullCopyError> {
        assert!(matches!(self.pass, CopyPass::Over | CopyPass::Failed), "the pass before is not over");
        if matches!(self.pass, CopyPass::Failed) { Err(FullCopyError::Failed) } else { Ok(()) }
    }

    fn note_pass(&mut self, rows: usize) {
        self.progress.pass += 1;
        (self.progress.rows, self.progress.rows_total) = (0, rows as u64);
    }

    fn open_view(&self) -> Result<CopyView, StoreError> {
        let reader = self.readers.begin_read();
        // A segment may come or go at this moment.
        let mut segments = self.touched.segments();
        let snapshot = self.database.snapshot()?;
        segments.extend(self.touched.segments());
        Ok(CopyView { snapshot, segments, _reader: reader })
    }

    fn part_reader<'a>(&self, view: &'a CopyView, bytes_max: usize) -> PartReader<'a> {
        let (node, hash_key) = (self.node, self.hash_key);
        let bytes_max = bytes_max.min(COPY_PART_BYTES_MAX);
        PartReader { view, node, hash_key, part: Vec::new(), bytes_max, rows: 0 }
    }
}

impl RowPlace {
    fn start(table: usize) -> Self {
        Self { key: vec![TABLE_STARTS[table]], block: 0 }
    }

    /// Returns the beginning of the table behind the one of this place.
    fn next_table(&self) -> Option<Self> {
        match self.key.first() {
            Some(&kind::INODE) => Some(Self::start(1)),
            Some(&kind::ENTRY) => Some(Self::start(2)),
            _ => None,
        }
    }
}

/// Reads one part of a view.
struct PartReader<'a> {
    view: &'a CopyView,
    node: NodeNumber,
    hash_key: NameHashKey,
    part: Vec<u8>,
    bytes_max: usize,
    rows: u64,
}

impl PartReader<'_> {
    fn end(self, progress: &mut CopyProgress) -> Vec<u8> {
        progress.rows += self.rows;
        progress.bytes += self.part.len() as u64;
        self.part
    }

    /// Reads rows from a place on, but for those of new inodes. Returns the place of the next one; `None` if there is
    /// none.
    fn read_all(&mut self, place: RowPlace, new_inodes: u64) -> Result<Option<RowPlace>, StoreError> {
        let view = self.view;
        for (step, row) in view.snapshot.from(&place.key)?.enumerate() {
            let (key, value) = row?;
            if step == STEP_ROWS_MAX {
                return Ok(Some(RowPlace { key: key.to_vec(), block: 0 }));
            }
            if is_row_of_any(key, new_inodes..) {
                continue;
            }
            let block = if *key == *place.key { place.block } else { 0 };
            if let Some(block) = self.add_row(key, Some(value), block)? {
                return Ok(Some(RowPlace { key: key.to_vec(), block }));
            }
        }
        Ok(place.next_table())
    }

    /// Reads touched rows, and says whether these were all.
    fn read_touched(&mut self, pass: &mut TouchedPass) -> Result<bool, StoreError> {
        while let Some((key, block)) = pass.current.take().or_else(|| pass.rows.next().map(|key| (key, 0))) {
            let value = self.view.snapshot.get(&key)?;
            if let Some(block) = self.add_row(&key, value, block)? {
                pass.current = Some((key, block));
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Adds the items of a row, or of a row that is gone. If there is no room for all, returns where it goes on.
    fn add_row(&mut self, key: &[u8], value: Option<&[u8]>, block: u64) -> Result<Option<u64>, StoreError> {
        let left = match key.first() {
            Some(&kind::CHUNK) => self.add_chunk(key, value, block)?,
            _ => match row_item(key, value, &self.hash_key)? {
                Some(item) => (!self.add_item(&item)).then_some(0),
                None => None,
            },
        };
        self.rows += u64::from(left.is_none());
        Ok(left)
    }

    /// Adds an item, if there is room for it.
    fn add_item(&mut self, item: &CopyItem<'_>) -> bool {
        let before = self.part.len();
        item.encode(&mut self.part);
        debug_assert!(self.part.len() - before <= COPY_PART_BYTES_MAX, "an item that fits into no part");
        let fits = before == 0 || self.part.len() <= self.bytes_max;
        if !fits {
            self.part.truncate(before);
        }
        fits
    }

    fn add_chunk(&mut self, key: &[u8], value: Option<&[u8]>, from: u64) -> Result<Option<u64>, StoreError> {
        let damaged = || StoreError::Corrupt("a file's map is damaged");
        let (inode, number, rest) = rows::split_key2(key).ok_or_else(damaged)?;
        let base = number.checked_mul(CHUNK_BLOCKS).filter(|_| rest.is_empty()).ok_or_else(damaged)?;
        let chunk = value.map(|value| ExtentChunk::decode(value).ok_or_else(damaged)).transpose()?;
        let chunk = chunk.unwrap_or_default();
        let (inode, mut at, mut bytes) = (InodeId(inode), from, Vec::new());
        while at < CHUNK_BLOCKS {
            let run = chunk.within(at, CHUNK_BLOCKS).next();
            let hole_end = run.map_or(CHUNK_BLOCKS, |run| run.start);
            let (count, blocks) = match run {
                _ if at < hole_end => (hole_end - at, CopiedBlocks::Hole((hole_end - at) as u8)),
                Some(Run { blocks, address: None, .. }) => (blocks, CopiedBlocks::Reserved(blocks as u8)),
                Some(Run { blocks, address: Some(address), .. }) => {
                    let count = blocks.min(ITEM_BLOCKS_MAX);
                    if !self.part.is_empty() && self.part.len() + (count * BLOCK_BYTES) as usize > self.bytes_max {
                        return Ok(Some(at));
                    }
                    let segment = self.view.segments.get(&address.segment());
                    let segment = segment
                        .filter(|_| address.node() == self.node)
                        .ok_or(StoreError::Corrupt("an extent lies in a segment that does not exist"))?;
                    let damaged = read_blocks(segment, address.block(), count, &mut bytes)?;
                    if !damaged.is_empty() {
                        tracing::error!(%inode, first = base + at, ?damaged, "damaged blocks are copied as such");
                    }
                    (count, CopiedBlocks::Written { bytes: &bytes, damaged })
                }
                None => break,
            };
            if !self.add_item(&CopyItem::Blocks { inode, first: base + at, blocks }) {
                return Ok(Some(at));
            }
            at += count;
        }
        Ok(None)
    }
}

/// Whether a row belongs to any of these inodes.
fn is_row_of_any(key: &[u8], inodes: RangeFrom<u64>) -> bool {
    const KINDS: [u8; 6] = [kind::INODE, kind::ENTRY, kind::CHUNK, kind::INLINE, kind::ORPHAN, kind::XATTR];
    let number = rows::split_key1(key).filter(|_| KINDS.contains(&key[0]));
    number.is_some_and(|(number, _)| inodes.contains(&number))
}

/// Reads blocks; returns which of them are damaged.
fn read_blocks(segment: &StoreSegment, first: u32, count: u64, bytes: &mut Vec<u8>) -> Result<Vec<u8>, StoreError> {
    let mut damaged = Vec::new();
    let mut content: Block = [0; BLOCK_BYTES as usize];
    bytes.clear();
    for step in 0..count as u8 {
        if !segment.load_verified(first.saturating_add(step.into()), &mut content)? {
            damaged.push(step);
        }
        bytes.extend_from_slice(&content);
    }
    Ok(damaged)
}

/// Returns the item of a row that is no chunk; `None` for a row that is local to the store.
fn row_item<'a>(
    key: &'a [u8],
    value: Option<&'a [u8]>,
    hash_key: &NameHashKey,
) -> Result<Option<CopyItem<'a>>, StoreError> {
    let number = rows::split_key1(key);
    let whole = || number.filter(|(_, rest)| rest.is_empty()).map(|(number, _)| number);
    let inode = || whole().map(InodeId).ok_or(StoreError::Corrupt("an inode's key is damaged"));
    Ok(Some(match key.first() {
        Some(&kind::INODE) => {
            let decode = |value| rows::decode_inode(value).ok_or(StoreError::Corrupt("an inode's row is damaged"));
            CopyItem::Inode { inode: inode()?, value: value.map(decode).transpose()? }
        }
        Some(&kind::ENTRY) => {
            let split = rows::split_key2(key).filter(|(_, cookie, name)| *cookie == name_cookie(hash_key, name));
            let (directory, _, name) = split.ok_or(StoreError::Corrupt("an entry's key is damaged"))?;
            let decode = |value| rows::decode_entry(value).ok_or(StoreError::Corrupt("an entry's row is damaged"));
            let target = value.map(decode).transpose()?.map(|entry| (entry.inode, entry.kind));
            CopyItem::Entry { directory: InodeId(directory), name, target }
        }
        Some(&kind::INLINE) => CopyItem::Inline { inode: inode()?, bytes: value },
        Some(&kind::XATTR) => {
            let (inode, name) = number.ok_or(StoreError::Corrupt("an attribute's key is damaged"))?;
            CopyItem::Xattr { inode: InodeId(inode), name, value }
        }
        Some(&kind::ORPHAN) => CopyItem::Orphan { inode: inode()?, is_orphan: value.is_some() },
        Some(&kind::SESSION) => {
            let damaged = StoreError::Corrupt("a session's row is damaged");
            match (whole(), value.map(|value| rows::decode_session(key, value))) {
                (Some(session), None) => CopyItem::Session { session: SessionId(session), state: None },
                (_, Some(Some((session, generation, position)))) => {
                    CopyItem::Session { session, state: Some((generation, position)) }
                }
                _ => return Err(damaged),
            }
        }
        Some(&kind::QUOTA) => {
            let damaged = StoreError::Corrupt("a quota's row is damaged");
            match (whole().and_then(rows::quota_key_of), value.map(|value| rows::decode_quota(key, value))) {
                (Some(key), None) => CopyItem::Quota { key, account: None },
                (_, Some(Some((key, used, limits)))) => CopyItem::Quota { key, account: Some((used, limits)) },
                _ => return Err(damaged),
            }
        }
        // The superblock, bitmaps, counters, marks of journals, and rows that only later releases know.
        _ => return Ok(None),
    }))
}

#[cfg(test)]
mod tests {
    use ashlar_types::{LogGeneration, LogPosition};

    use super::*;
    use crate::test_media::{StoreTestArena, TestMedium};

    #[test]
    fn copy_ends_if_too_many_rows_are_touched() {
        let mut store = StoreTestArena::new(TestMedium::Memory, 16 << 20).open();
        let mut source = store.begin_copy_with(2).unwrap();
        while source.next_part(COPY_PART_BYTES_MAX).unwrap().is_some() {}
        for session in 1..4 {
            assert!(source.begin_pass().is_ok());
            assert_eq!(source.next_part(COPY_PART_BYTES_MAX).unwrap().is_some(), session > 1);
            assert_eq!(source.next_part(COPY_PART_BYTES_MAX).unwrap(), None);
            store.set_session(SessionId(session), LogGeneration(1), LogPosition(0));
            store.commit().unwrap();
        }
        for session in 4..7 {
            store.set_session(SessionId(session), LogGeneration(1), LogPosition(0));
        }
        store.commit().unwrap();
        assert!(matches!(source.begin_pass(), Err(FullCopyError::TooManyTouched(2))));
    }
}
