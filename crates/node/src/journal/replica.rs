//! A replica of another node: a copy of the node's journal, and a store that follows it.

use std::sync::Arc;

use ashlar_journal::{JournalCursor, JournalIdentity, JournalRing};
use ashlar_pmem::{SegmentInfo, SharedMemory};
use ashlar_store::{CommitDone, CommitJob, JournalMark, Store, StoreError};
use ashlar_types::JournalPosition;

use crate::journal::applier::{FrameApplier, ReplayError, ReplicaFault};
use crate::journal::copy::{CopyPart, CopyPlan, CopyState};
use crate::journal::writer::journal_failure;

/// A replica of another node.
///
/// It applies, and so commits, nothing that is not durable in its own copy and at the writing node. So a commit never
/// has to be taken back.
pub struct Replica {
    store: Store,
    applier: FrameApplier,
    ring: JournalRing<Arc<SharedMemory>>,
    /// Where the next frame is applied.
    cursor: JournalCursor,
    /// The position up to which the writing node says that its journal is durable.
    durable_there: JournalPosition,
    /// The position that the commit under way makes durable, and that of the last commit.
    frozen: JournalPosition,
    committed: JournalPosition,
}

impl Replica {
    /// Takes a store, and the copy of the journal of this identity's node that the store follows.
    ///
    /// # Errors
    /// [`ReplayError::Open`]; [`ReplayError::Journal`] if the store's frames are not in the copy.
    pub fn open(store: Store, memory: Arc<SharedMemory>, identity: JournalIdentity) -> Result<Self, ReplayError> {
        let (node, ring) = (identity.node, JournalRing::open(memory, identity)?);
        let applier = FrameApplier::new(&store, node);
        let committed = applier.mark().position;
        let cursor = ring.cursor_at(committed)?;
        Ok(Self { store, applier, ring, cursor, durable_there: committed, frozen: committed, committed })
    }

    /// Plants a fault, which a comparison of trees must find.
    pub fn plant(&mut self, fault: ReplicaFault) {
        self.applier.plant(fault);
    }

    /// Returns the store.
    #[must_use]
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// Returns how far the journal is applied.
    #[must_use]
    pub fn mark(&self) -> JournalMark {
        self.applier.mark()
    }

    /// Returns what it says when it connects to the writing node.
    #[must_use]
    pub fn copy_state(&self) -> CopyState {
        CopyState { lineage: self.ring.lineage().clone(), end: self.ring.end() }
    }

    /// Returns the position that it acknowledges: its copy is durable up to there.
    #[must_use]
    pub fn durable(&self) -> JournalPosition {
        self.ring.flushed()
    }

    /// Returns how far the journal is applied and committed.
    #[must_use]
    pub fn committed(&self) -> JournalPosition {
        self.committed
    }

    /// Cuts the copy where it parts from the writing node's journal, and takes over its epochs.
    ///
    /// # Errors
    /// [`ReplayError::OtherCopy`] if frames behind that are applied; [`ReplayError::Journal`].
    pub fn follow(&mut self, plan: CopyPlan) -> Result<(), ReplayError> {
        if plan.from < self.cursor.position {
            let applied = self.cursor.position;
            tracing::warn!(from = %plan.from, %applied, "a copy has applied frames that the journal lacks");
            return Err(ReplayError::OtherCopy);
        }
        Ok(self.ring.cut(plan.from, plan.lineage)?)
    }

    /// Stores frames in the copy.
    ///
    /// # Errors
    /// [`ReplayError::Copy`]: the frames are not the next ones, or there is no room for them before a commit.
    pub fn take_frames(&mut self, part: &CopyPart) -> Result<(), ReplayError> {
        self.ring.append_copied(&part.bytes)?;
        self.durable_there = self.durable_there.max(part.durable);
        Ok(())
    }

    /// Returns how many bytes of frames it can take before its next commit.
    #[must_use]
    pub fn room(&self) -> u64 {
        self.ring.capacity() - self.ring.used()
    }

    /// Makes the copy durable.
    ///
    /// # Errors
    /// Those of the medium; the replica must then be opened again.
    pub fn flush(&mut self) -> Result<(), ReplayError> {
        self.ring.flush()?;
        Ok(())
    }

    /// Applies frames that are durable here and at the writing node, at most so many; returns whether there are more.
    ///
    /// # Errors
    /// [`ReplayError`]; the replica must then be opened again.
    pub fn apply_frames(&mut self, frames_max: usize) -> Result<bool, ReplayError> {
        let bound = self.durable_there.min(self.ring.flushed());
        let mut buffer = Vec::new();
        for _ in 0..frames_max {
            if self.cursor.position >= bound {
                return Ok(false);
            }
            let Some(frame) = self.ring.read_frame(self.cursor, &mut buffer)? else { return Ok(false) };
            self.applier.apply_frame(&mut self.store, &frame)?;
            self.cursor = frame.next();
        }
        Ok(self.cursor.position < bound)
    }

    /// Takes into use a segment that was added to its arena.
    ///
    /// # Errors
    /// Those of the store.
    pub fn add_segment(&mut self, segment: SegmentInfo) -> Result<(), StoreError> {
        self.store.add_segment(segment)
    }

    /// Freezes the applied state for a commit; `None` if there is nothing to commit.
    pub fn begin_commit(&mut self) -> Option<CommitJob> {
        // A batch that is tried again takes only what it took the first time.
        let is_new = !self.store.is_frozen();
        let job = self.store.begin_commit()?;
        if is_new {
            self.frozen = self.applier.mark().position;
        }
        Some(job)
    }

    /// Records the outcome of a commit, and reuses the frames before it.
    ///
    /// # Errors
    /// Those of the commit, which must be tried again, and of the medium.
    pub fn finish_commit(&mut self, done: CommitDone) -> Result<(), StoreError> {
        self.store.finish_commit(done)?;
        // No reader of the replica's blocks is there that could release them.
        self.store.sessions().iter().for_each(|(id, _)| self.store.release_all(*id));
        self.committed = self.frozen;
        self.ring.truncate(self.committed).map(drop).map_err(journal_failure)
    }
}
