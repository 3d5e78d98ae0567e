//! Changes that are applied and not yet committed.
//!
//! A batch lies over the batch before it (while that one is being committed) and over the database. For
//! each row that it made, it knows whether the layers below lack the row. So a row that is made and deleted within one
//! batch leaves no trace.

use std::collections::{BTreeMap, HashMap};
use std::hash::BuildHasherDefault;
use std::ops::Range;

use ashlar_types::{Inode, InodeHasher, InodeId};
use ashlar_update::Entry;

use crate::metadata::chunk::ExtentChunk;

/// Bytes that a row takes in the database beside its key and value, pages being two thirds full.
const ROW_OVERHEAD_BYTES: usize = 32;

/// A map by inode number.
pub type InodeMap<T> = HashMap<u64, T, BuildHasherDefault<InodeHasher>>;

/// A layer's content for a row: `None`: nothing; `Some(None)`: it is deleted.
pub type LayerValue<T> = Option<Option<T>>;

#[derive(Debug)]
struct InodeRow {
    value: Option<Inode>,
    /// Whether the layers below have no such row.
    fresh: bool,
}

#[derive(Debug)]
struct EntryRow {
    name: Box<[u8]>,
    value: Option<Entry>,
    fresh: bool,
}

/// The entries of one directory and one cookie: nearly always a single one, which needs no second allocation.
#[derive(Debug)]
struct EntrySlot {
    first: EntryRow,
    more: Vec<EntryRow>,
}

impl EntrySlot {
    fn rows(&self) -> impl Iterator<Item = &EntryRow> {
        std::iter::once(&self.first).chain(&self.more)
    }
}

/// One batch.
#[derive(Debug, Default)]
pub struct Batch {
    inodes: InodeMap<InodeRow>,
    entries: BTreeMap<(u64, u64), EntrySlot>,
    chunks: BTreeMap<(u64, u64), Option<ExtentChunk>>,
    inline: InodeMap<Option<Vec<u8>>>,
    rows: BTreeMap<Box<[u8]>, Option<Box<[u8]>>>,
    bytes: usize,
    paid: u64,
    inode_end: u64,
}

impl Batch {
    /// Whether nothing has changed.
    pub fn is_empty(&self) -> bool {
        self.inodes.is_empty()
            && self.entries.is_empty()
            && self.chunks.is_empty()
            && self.inline.is_empty()
            && self.rows.is_empty()
    }

    /// Bytes of all rows that the batch writes, estimated from above.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Bytes that the database may grow by, estimated from above.
    ///
    /// The estimate is the space of the rows in split pages, which are two thirds full on average. Since most rows
    /// replace others, the credit paid limits it. Space that the batch frees is not subtracted.
    pub fn growth(&self) -> u64 {
        self.paid.min(self.bytes as u64 * 3 / 2)
    }

    /// Notes the metadata bytes that an update was to use up at the most.
    pub fn pay(&mut self, bytes: u64) {
        self.paid += bytes;
    }

    /// How many rows a commit writes or deletes.
    pub fn rows_count(&self) -> usize {
        self.inodes.len() + self.entries.len() + self.chunks.len() + self.inline.len() + self.rows.len()
    }

    /// The inodes whose rows it changes.
    pub fn inodes(&self) -> impl ExactSizeIterator<Item = InodeId> {
        self.inodes.keys().copied().map(InodeId)
    }

    /// No inode with this number or a higher one is in the batch.
    pub fn inode_end(&self) -> u64 {
        self.inode_end
    }

    /// Whether the batch made the inode, so that nothing below has rows of it.
    #[inline]
    pub fn has_made(&self, inode: InodeId) -> bool {
        self.inodes.get(&inode.0).is_some_and(|row| row.fresh)
    }

    /// The batch's content for an inode.
    #[inline]
    pub fn inode(&self, inode: InodeId) -> LayerValue<&Inode> {
        self.inodes.get(&inode.0).map(|row| row.value.as_ref())
    }

    /// Stores an inode; `absent`: the layers below are known to lack it.
    pub fn put_inode(&mut self, inode: InodeId, value: Inode, absent: bool) {
        match self.inodes.entry(inode.0) {
            std::collections::hash_map::Entry::Occupied(mut row) => row.get_mut().value = Some(value),
            std::collections::hash_map::Entry::Vacant(place) => {
                self.bytes += crate::metadata::rows::INODE_BYTES + value.target.len() + 9 + ROW_OVERHEAD_BYTES;
                self.inode_end = self.inode_end.max(inode.0.saturating_add(1));
                place.insert(InodeRow { value: Some(value), fresh: absent });
            }
        }
    }

    /// Removes an inode's own row, after all its other rows.
    pub fn remove_inode(&mut self, inode: InodeId) {
        if self.has_made(inode) {
            self.inodes.remove(&inode.0);
        } else {
            self.inodes.insert(inode.0, InodeRow { value: None, fresh: false });
        }
    }

    /// The batch's content for an entry.
    pub fn entry(&self, directory: u64, cookie: u64, name: &[u8]) -> LayerValue<Entry> {
        let slot = self.entries.get(&(directory, cookie))?;
        slot.rows().find(|row| *row.name == *name).map(|row| row.value)
    }

    /// Stores or removes an entry; `absent`: the layers below are known to lack it.
    pub fn set_entry(&mut self, directory: u64, cookie: u64, name: &[u8], value: Option<Entry>, absent: bool) {
        let make = |name: &[u8]| EntryRow { name: name.into(), value, fresh: absent };
        let slot = match self.entries.entry((directory, cookie)) {
            std::collections::btree_map::Entry::Vacant(place) => {
                if value.is_some() || !absent {
                    self.bytes += name.len() + 26 + ROW_OVERHEAD_BYTES;
                    place.insert(EntrySlot { first: make(name), more: Vec::new() });
                }
                return;
            }
            std::collections::btree_map::Entry::Occupied(slot) => slot,
        };
        if value.is_none() && slot.get().more.is_empty() && slot.get().first.fresh && *slot.get().first.name == *name {
            slot.remove();
            return;
        }
        let slot = slot.into_mut();
        match std::iter::once(&mut slot.first).chain(&mut slot.more).find(|row| *row.name == *name) {
            Some(row) => row.value = value,
            None => slot.more.push(make(name)),
        }
    }

    /// The batch's content for a directory's entries with cookies above `after`: cookie, name, entry; by cookie, then
    /// name.
    pub fn entries(&self, directory: u64, after: u64) -> impl Iterator<Item = (u64, &[u8], Option<Entry>)> {
        use std::ops::Bound::{Excluded, Included};
        self.entries.range((Excluded((directory, after)), Included((directory, u64::MAX)))).flat_map(
            |(&(_, cookie), slot)| {
                let mut rows: Vec<&EntryRow> = slot.rows().collect();
                rows.sort_unstable_by(|a, b| a.name.cmp(&b.name));
                rows.into_iter().map(move |row| (cookie, &*row.name, row.value))
            },
        )
    }

    /// The batch's content for a chunk.
    pub fn chunk(&self, inode: InodeId, chunk: u64) -> LayerValue<&ExtentChunk> {
        self.chunks.get(&(inode.0, chunk)).map(Option::as_ref)
    }

    /// Stores a chunk; an empty one is deleted.
    pub fn put_chunk(&mut self, inode: InodeId, number: u64, chunk: ExtentChunk) {
        let empty = chunk.is_empty();
        if empty && self.has_made(inode) {
            self.chunks.remove(&(inode.0, number));
        } else if self.chunks.insert((inode.0, number), (!empty).then_some(chunk)).is_none() {
            self.bytes += 17 + 40 + ROW_OVERHEAD_BYTES;
        }
    }

    /// The chunks of an inode in a range that the batch knows, and whether they are there.
    pub fn chunks(&self, inode: InodeId, range: Range<u64>) -> impl Iterator<Item = (u64, bool)> {
        self.chunks
            .range((inode.0, range.start)..(inode.0, range.end))
            .map(|(&(_, number), row)| (number, row.is_some()))
    }

    /// The batch's content for a small file's bytes.
    pub fn inline(&self, inode: InodeId) -> LayerValue<&Vec<u8>> {
        self.inline.get(&inode.0).map(Option::as_ref)
    }

    /// Takes a small file's bytes out of the batch; the caller puts them back changed.
    pub fn take_inline(&mut self, inode: InodeId) -> LayerValue<Vec<u8>> {
        let bytes = self.inline.get_mut(&inode.0)?.take();
        self.bytes -= bytes.as_ref().map_or(0, |bytes| bytes.len() + ROW_OVERHEAD_BYTES);
        Some(bytes)
    }

    /// Stores or removes a small file's bytes.
    pub fn set_inline(&mut self, inode: InodeId, bytes: Option<Vec<u8>>) {
        self.take_inline(inode);
        if bytes.is_none() && self.has_made(inode) {
            self.inline.remove(&inode.0);
            return;
        }
        self.bytes += bytes.as_ref().map_or(0, |bytes| bytes.len() + ROW_OVERHEAD_BYTES);
        self.inline.insert(inode.0, bytes);
    }

    /// The batch's content for any other row.
    pub fn row(&self, key: &[u8]) -> LayerValue<&[u8]> {
        self.rows.get(key).map(Option::as_deref)
    }

    /// Stores or removes any other row, which belongs to `inode`.
    pub fn set_row(&mut self, inode: InodeId, key: &[u8], value: Option<&[u8]>) {
        let size = |value: Option<&[u8]>| value.map_or(0, |value| key.len() + value.len() + ROW_OVERHEAD_BYTES);
        let old = if value.is_none() && self.has_made(inode) {
            self.rows.remove(key)
        } else {
            self.rows.insert(key.into(), value.map(Into::into))
        };
        self.bytes = self.bytes + size(value) - size(old.flatten().as_deref());
    }

    /// Returns the batch's other rows whose keys begin with `prefix`.
    pub fn rows<'a>(&'a self, prefix: &'a [u8]) -> impl Iterator<Item = (&'a [u8], Option<&'a [u8]>)> {
        self.rows
            .range::<[u8], _>((std::ops::Bound::Included(prefix), std::ops::Bound::Unbounded))
            .take_while(move |(key, _)| key.starts_with(prefix))
            .map(|(key, value)| (&**key, value.as_deref()))
    }

    /// The inodes, in order, for the commit.
    pub fn sorted_inodes(&self) -> Vec<(u64, Option<&Inode>)> {
        let mut inodes: Vec<_> = self.inodes.iter().map(|(&number, row)| (number, row.value.as_ref())).collect();
        inodes.sort_unstable_by_key(|(number, _)| *number);
        inodes
    }

    /// All entries, by directory, cookie and name, for the commit.
    pub fn sorted_entries(&self) -> impl Iterator<Item = (u64, u64, &[u8], Option<Entry>)> {
        self.entries.iter().flat_map(|(&(directory, cookie), slot)| {
            slot.rows().map(move |row| (directory, cookie, &*row.name, row.value))
        })
    }

    /// All chunks, in order, for the commit.
    pub fn sorted_chunks(&self) -> impl Iterator<Item = (u64, u64, Option<&ExtentChunk>)> {
        self.chunks.iter().map(|(&(inode, number), chunk)| (inode, number, chunk.as_ref()))
    }

    /// The small files' bytes, in order, for the commit.
    pub fn sorted_inline(&self) -> Vec<(u64, Option<&Vec<u8>>)> {
        let mut inline: Vec<_> = self.inline.iter().map(|(&number, bytes)| (number, bytes.as_ref())).collect();
        inline.sort_unstable_by_key(|(number, _)| *number);
        inline
    }
}
