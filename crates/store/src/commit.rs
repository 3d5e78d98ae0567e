//! The commit: from the applied state to the committed one.
//!
//! A commit has three steps. `begin_commit` freezes the applied state, which is quick and needs the store.
//! [`CommitJob::run`] makes data durable and then writes the frozen rows in one transaction. It runs on any thread,
//! while the store goes on. `finish_commit` drops the frozen rows. The order makes a crash at any point harmless: rows
//! never refer to blocks that are not durable, and the sessions' positions are rows of the same transaction as the
//! changes of their logs.

use std::sync::{Arc, Weak};

use ashlar_pmem::{MediumKind, Persistent, SharedMemory};
use ashlar_types::{BlockAddress, LogPosition, SessionId};

use crate::blocks::segment::StoreSegment;
use crate::copying::touched::{RowKey, TouchedRows};
use crate::database::{Database, WriteTransaction};
use crate::metadata::batch::Batch;
use crate::metadata::rows::{self, EntryKey, StoredCounters, kind};
use crate::model::Committed;
use crate::{Store, StoreError};

/// A batch that no longer changes.
#[derive(Debug)]
pub(crate) struct Frozen {
    pub(crate) batch: Batch,
    /// Bitmap, quota and session rows.
    rows: Vec<([u8; 9], Option<Vec<u8>>)>,
    positions: Vec<(SessionId, LogPosition)>,
    counters: StoredCounters,
    written: Vec<Written>,
    number: u64,
}

impl Frozen {
    /// Returns the keys of the rows that a copy of the tree has as well.
    pub(crate) fn touched_rows(&self) -> Arc<[RowKey]> {
        let batch = &self.batch;
        let entry = |(directory, cookie, name, _): (u64, u64, &[u8], _)| {
            RowKey::from(EntryKey::new(directory, cookie, name).as_bytes())
        };
        let inodes = batch.inodes().map(|inode| RowKey::from(rows::key1(kind::INODE, inode.0)));
        let chunks =
            batch.sorted_chunks().map(|(inode, number, _)| RowKey::from(rows::key2(kind::CHUNK, inode, number)));
        let inline = batch.sorted_inline().into_iter();
        let inline = inline.map(|(inode, _)| RowKey::from(rows::key1(kind::INLINE, inode)));
        let others = batch.rows(&[]).map(|(key, _)| RowKey::from(key));
        let tables = self.rows.iter().filter(|(key, _)| matches!(key[0], kind::SESSION | kind::QUOTA));
        let tables = tables.map(|(key, _)| RowKey::from(*key));
        inodes
            .chain(batch.sorted_entries().map(entry))
            .chain(chunks)
            .chain(inline)
            .chain(others)
            .chain(tables)
            .collect()
    }

    /// Whether the batch has written any of these blocks.
    pub(crate) fn has_written(&self, address: BlockAddress, blocks: u64) -> bool {
        let (start, end) = (u64::from(address.block()), u64::from(address.block()) + blocks);
        let is_in =
            |&(first, count): &(u32, u32)| u64::from(first) < end && u64::from(first) + u64::from(count) > start;
        let of_segment = self.written.iter().filter(|written| written.segment.info().number == address.segment());
        of_segment.flat_map(|written| &written.runs).any(is_in)
    }
}

/// Blocks of a segment that were written since the freeze before.
#[derive(Debug)]
struct Written {
    segment: Arc<StoreSegment>,
    /// First blocks and counts.
    runs: Vec<(u32, u32)>,
}

/// A commit that waits to be run.
#[derive(Debug)]
#[must_use = "a commit that is not run commits nothing"]
pub struct CommitJob {
    frozen: Arc<Frozen>,
    database: Arc<Database>,
    medium: MediumKind,
    /// Mapped memory that must be durable before the rows are.
    memory: Vec<Arc<SharedMemory>>,
}

/// A commit that was run, for [`Store::finish_commit`].
#[derive(Debug)]
#[must_use = "the store keeps the batch until it learns of its commit"]
pub struct CommitDone {
    number: u64,
    result: Result<(), StoreError>,
}

impl Store {
    /// Whether anything is applied that is not committed.
    #[must_use]
    pub fn is_dirty(&self) -> bool {
        self.frozen.is_some()
            || !self.active.is_empty()
            || !self.changed_sessions.is_empty()
            || !self.changed_journals.is_empty()
            || self.allocator.is_changed()
            || self.quotas.is_changed()
    }

    /// Bytes of metadata that wait for the next commit, for deciding when to begin it.
    #[must_use]
    pub fn uncommitted_bytes(&self) -> usize {
        self.active.bytes()
    }

    /// Returns the last batch that may commit the updates applied by now.
    ///
    /// Batches are counted from 1, as they are frozen: a batch that is tried again keeps its number.
    #[must_use]
    pub fn next_batch(&self) -> u64 {
        self.batches + 1
    }

    /// Whether a batch is frozen already.
    ///
    /// Its commit is under way, or has failed and is tried again before anything else is committed.
    #[must_use]
    pub fn is_frozen(&self) -> bool {
        self.frozen.is_some()
    }

    /// Freezes the applied state for a commit.
    ///
    /// Returns `None` if nothing is to be committed, if a commit is under way, or if the applied state can't be
    /// trusted. After a failed commit, this tries the same batch again.
    pub fn begin_commit(&mut self) -> Option<CommitJob> {
        if self.poisoned {
            return None;
        }
        match &self.frozen {
            // The job of the commit under way shares the batch.
            Some(frozen) if Arc::strong_count(frozen) > 1 => return None,
            Some(_) => {}
            None if self.is_dirty() => {
                let frozen = self.freeze();
                self.note_touched(&frozen);
                self.frozen = Some(Arc::new(frozen));
            }
            None => return None,
        }
        let frozen = Arc::clone(self.frozen.as_ref()?);
        let (database, medium) = (Arc::clone(&self.database), self.medium.kind());
        Some(CommitJob { frozen, database, medium, memory: Vec::new() })
    }

    fn freeze(&mut self) -> Frozen {
        let blocks = self.allocator.freeze();
        let mut written: Vec<Written> = Vec::new();
        for (number, block, count) in blocks.written {
            let Some(segment) = self.segments.get(&number) else { continue };
            match written.last_mut().filter(|last| last.segment.info().number == number) {
                Some(last) => last.runs.push((block, count)),
                None => written.push(Written { segment: Arc::clone(segment), runs: vec![(block, count)] }),
            }
        }
        let mut rows = blocks.rows;
        rows.extend(self.quotas.freeze());
        let mut positions = Vec::new();
        for (session, stays) in std::mem::take(&mut self.changed_sessions) {
            let state = self.sessions.get(&session).filter(|_| stays);
            let value = state.map(|state| rows::encode_session(state.generation, state.applied).to_vec());
            positions.extend(state.map(|state| (session, state.applied)));
            rows.push((rows::key1(kind::SESSION, session.0), value));
        }
        for node in std::mem::take(&mut self.changed_journals) {
            let mark = self.journal_mark(node).map(|mark| rows::encode_journal_mark(mark).to_vec());
            rows.push((rows::key1(kind::JOURNAL, node.get().into()), mark));
        }
        self.inode_end = self.inode_end.max(self.active.inode_end());
        self.absent_inode.set(None);
        self.absent_entry.set(None);
        self.batches += 1;
        Frozen {
            batch: std::mem::take(&mut self.active),
            rows,
            positions,
            counters: self.counters_to_store(),
            written,
            number: self.batches,
        }
    }

    /// Notes the rows of a batch for the copies that are being made.
    fn note_touched(&mut self, frozen: &Frozen) {
        if self.has_copies() {
            let (touched, segments) = (frozen.touched_rows(), self.segments.clone());
            self.each_copy(|copy| copy.begin_batch(&touched, &segments));
        }
    }

    /// Whether a copy is being made of the tree.
    pub(crate) fn has_copies(&mut self) -> bool {
        self.copies.retain(|copy| copy.strong_count() > 0);
        !self.copies.is_empty()
    }

    fn each_copy(&self, tell: impl Fn(&TouchedRows)) {
        self.copies.iter().filter_map(Weak::upgrade).for_each(|copy| tell(&copy));
    }

    /// Records that a commit was run.
    ///
    /// Blocks that it has freed may be used again, and logs may be truncated at the returned positions.
    ///
    /// # Errors
    /// Those of the commit. Then nothing is committed and nothing is lost, and the next [`Self::begin_commit`] tries
    /// again.
    pub fn finish_commit(&mut self, done: CommitDone) -> Result<Committed, StoreError> {
        done.result?;
        let Some(frozen) = self.frozen.as_ref().filter(|frozen| frozen.number == done.number) else {
            return Ok(Committed::default());
        };
        let frozen = Arc::clone(frozen);
        let snapshot = self.database.snapshot()?;
        self.committed_bytes = snapshot.used_bytes()?;
        self.snapshot = snapshot;
        self.seen.forget(frozen.batch.inodes());
        self.frozen = None;
        self.stored.next_inode = self.stored.next_inode.max(frozen.counters.next_inode);
        self.stored.next_session = self.stored.next_session.max(frozen.counters.next_session);
        self.readers.note_committed(self.allocator.frozen_batches());
        self.allocator.committed(self.readers.bound());
        self.each_copy(TouchedRows::finish_batch);
        self.show_lagging();
        let mut committed = Committed { batch: Some(frozen.number), ..Committed::default() };
        for &(session, position) in &frozen.positions {
            if let Some(state) = self.sessions.get_mut(&session) {
                state.committed = state.committed.max(position);
                committed.sessions.push((session, state.committed));
            }
        }
        Ok(committed)
    }

    /// Commits all that is applied, here and now.
    ///
    /// # Errors
    /// [`StoreError::CommitUnderWay`]; [`StoreError::Poisoned`]; those of [`Self::finish_commit`].
    pub fn commit(&mut self) -> Result<Committed, StoreError> {
        let mut committed = Committed::default();
        while self.is_dirty() {
            let under_way = if self.poisoned { StoreError::Poisoned } else { StoreError::CommitUnderWay };
            let done = self.begin_commit().ok_or(under_way)?.run();
            let Committed { sessions, batch } = self.finish_commit(done)?;
            committed.sessions.extend(sessions);
            committed.batch = batch.or(committed.batch);
        }
        Ok(committed)
    }
}

impl CommitJob {
    /// Has other memory be durable before the rows are.
    pub fn sync_first(&mut self, memory: Vec<Arc<SharedMemory>>) {
        self.memory = memory;
    }

    /// Commits: data first, then the rows that refer to it.
    pub fn run(self) -> CommitDone {
        let result = self.write_data().and_then(|()| self.write_rows());
        if let Err(error) = &result {
            tracing::error!(%error, "a commit failed; it will be tried again");
        }
        CommitDone { number: self.frozen.number, result }
    }

    /// Does not commit: the store tries again later.
    pub fn give_up(self, reason: &'static str) -> CommitDone {
        let source = std::io::ErrorKind::Other.into();
        CommitDone { number: self.frozen.number, result: Err(StoreError::Io { what: reason, source }) }
    }

    fn write_data(&self) -> Result<(), StoreError> {
        for Written { segment, runs } in &self.frozen.written {
            match self.medium {
                MediumKind::Disk => segment.sync()?,
                // With flushes switched off, as on plain memory, this costs nothing.
                MediumKind::Pmem | MediumKind::Memory => {
                    for &(block, blocks) in runs {
                        segment.flush(block, blocks)?;
                    }
                }
            }
        }
        if let Some(Written { segment, .. }) = self.frozen.written.last() {
            segment.fence();
        }
        for memory in &self.memory {
            memory.sync().map_err(StoreError::io("cannot sync the rights of a session"))?;
        }
        Ok(())
    }

    /// Writes the rows in key order, so that neighbours find their page in the processor's cache.
    fn write_rows(&self) -> Result<(), StoreError> {
        let Frozen { batch, rows, counters, .. } = &*self.frozen;
        let count = batch.rows_count() + rows.len() + 1;
        let bytes =
            batch.bytes() + rows.iter().map(|(_, value)| 16 + value.as_ref().map_or(0, Vec::len)).sum::<usize>();
        let mut writer = self.database.write(count as u64, bytes as u64)?;
        write_inodes_and_entries(&mut writer, batch)?;
        for (inode, number, chunk) in batch.sorted_chunks() {
            let mut value = std::mem::take(&mut writer.value);
            value.clear();
            if let Some(chunk) = chunk {
                chunk.encode(&mut value);
            }
            write(&mut writer, &rows::key2(kind::CHUNK, inode, number), chunk.map(|_| &*value))?;
            value.clear();
            writer.value = value;
        }
        for (inode, bytes) in batch.sorted_inline() {
            write(&mut writer, &rows::key1(kind::INLINE, inode), bytes.map(|bytes| &**bytes))?;
        }
        for (key, value) in batch.rows(&[]) {
            write(&mut writer, key, value)?;
        }
        for (key, value) in rows {
            write(&mut writer, key, value.as_deref())?;
        }
        // Numbers may have been set aside since the freeze.
        let mut counters = *counters;
        if let Some(found) = writer.get(&[kind::COUNTERS])?.and_then(rows::decode_counters) {
            counters.next_inode = counters.next_inode.max(found.next_inode);
            counters.next_session = counters.next_session.max(found.next_session);
        }
        writer.put(&[kind::COUNTERS], &rows::encode_counters(counters))?;
        writer.commit()
    }
}

fn write_inodes_and_entries(writer: &mut WriteTransaction<'_>, batch: &Batch) -> Result<(), StoreError> {
    for (number, inode) in batch.sorted_inodes() {
        let key = rows::key1(kind::INODE, number);
        match inode {
            Some(inode) => {
                rows::encode_inode(inode, &mut writer.value);
                writer.put_inode(&key)?;
            }
            None => writer.delete(&key)?,
        }
    }
    for (directory, cookie, name, entry) in batch.sorted_entries() {
        let key = EntryKey::new(directory, cookie, name);
        match entry {
            Some(entry) => writer.put(key.as_bytes(), &rows::encode_entry(entry))?,
            None => writer.delete(key.as_bytes())?,
        }
    }
    Ok(())
}

fn write(writer: &mut WriteTransaction<'_>, key: &[u8], value: Option<&[u8]>) -> Result<(), StoreError> {
    match value {
        Some(value) => writer.put(key, value),
        None => writer.delete(key),
    }
}

#[cfg(test)]
mod tests {
    use ashlar_types::{InodeId, LogGeneration, Timestamp};
    use ashlar_update::Update;

    use super::*;
    use crate::test_media::{StoreTestArena, TestMedium, on_both_databases};

    fn a_failed_commit_loses_nothing_and_is_tried_again(medium: TestMedium) {
        let arena = StoreTestArena::new(medium, 16 << 20);
        let mut store = arena.open();
        let session = SessionId(1);
        store.set_session(session, LogGeneration(1), LogPosition(0));
        let at = Timestamp { seconds: 5, nanoseconds: 0 };
        store.apply(session, LogPosition(7), &Update::Accessed { inode: InodeId::ROOT, at }, &|_| true).unwrap();
        let number = store.begin_commit().unwrap().frozen.number;
        let failed = CommitDone { number, result: Err(StoreError::Corrupt("planted")) };
        assert!(store.finish_commit(failed).is_err());
        assert_eq!(store.committed(session), LogPosition(0));
        assert_eq!(store.inode(InodeId::ROOT).unwrap().unwrap().accessed, at);
        let at = Timestamp { seconds: 6, nanoseconds: 0 };
        store.apply(session, LogPosition(9), &Update::Accessed { inode: InodeId::ROOT, at }, &|_| true).unwrap();
        let done = store.begin_commit().unwrap().run();
        let committed = store.finish_commit(done).unwrap();
        assert_eq!(committed, Committed { sessions: vec![(session, LogPosition(7))], batch: Some(number) });
        assert_eq!(store.next_batch(), number + 1);
        assert_eq!(store.inode(InodeId::ROOT).unwrap().unwrap().accessed, at);
        drop(store);
        let store = arena.open();
        assert_eq!(store.inode(InodeId::ROOT).unwrap().unwrap().accessed.seconds, 5);
    }

    on_both_databases!(a_failed_commit_loses_nothing_and_is_tried_again);
}
