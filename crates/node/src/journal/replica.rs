//! A replica of another node: a copy of the node's journal, and a store that follows it.
//!
//! The two are apart, so that a shell can take frames, make them durable and acknowledge them while others are applied.

use std::sync::Arc;

use ashlar_journal::{JournalCursor, JournalIdentity, JournalRing, StoredFrame};
use ashlar_pmem::{SegmentInfo, SharedMemory};
use ashlar_store::{CommitDone, CommitJob, JournalMark, Store, StoreError};
use ashlar_types::JournalPosition;

use crate::journal::applier::{FrameApplier, ReplayError, ReplicaFault};
use crate::journal::copy::{CopyPart, CopyPlan, CopyState};
use crate::journal::writer::journal_failure;

/// A copy of another node's journal.
pub struct JournalCopy {
    ring: JournalRing<Arc<SharedMemory>>,
    /// The position up to which the writing node says that its journal is durable.
    durable_there: JournalPosition,
}

impl JournalCopy {
    /// Returns what it says when it connects to the writing node.
    #[must_use]
    pub fn state(&self) -> CopyState {
        CopyState { lineage: self.ring.lineage().clone(), end: self.ring.end() }
    }

    /// Returns its end.
    #[must_use]
    pub fn end(&self) -> JournalPosition {
        self.ring.end()
    }

    /// Returns the position that it acknowledges: the copy is durable up to there.
    #[must_use]
    pub fn durable(&self) -> JournalPosition {
        self.ring.flushed()
    }

    /// Returns how many bytes of frames it can take before the store's next commit.
    #[must_use]
    pub fn room(&self) -> u64 {
        self.ring.capacity() - self.ring.used()
    }

    /// Cuts the copy where it parts from the writing node's journal, and takes over its epochs. The store has applied
    /// frames up to `applied`.
    ///
    /// # Errors
    /// [`ReplayError::OtherCopy`] if frames behind the cut are applied; [`ReplayError::Journal`].
    pub fn follow(&mut self, plan: CopyPlan, applied: JournalPosition) -> Result<(), ReplayError> {
        if plan.from < applied {
            tracing::warn!(from = %plan.from, %applied, "a copy has applied frames that the journal lacks");
            return Err(ReplayError::OtherCopy);
        }
        Ok(self.ring.cut(plan.from, plan.lineage)?)
    }

    /// Takes the position up to which the journal is durable at the writing node.
    ///
    /// This comes before the frames that it came with: they may need the room of those that may be applied now.
    pub fn handle_durable(&mut self, durable: JournalPosition) {
        self.durable_there = self.durable_there.max(durable);
    }

    /// Stores frames.
    ///
    /// # Errors
    /// [`ReplayError::Copy`]: the frames are not the next ones, or there is no room for them before a commit.
    pub fn take_frames(&mut self, bytes: &[u8]) -> Result<(), ReplayError> {
        self.ring.append_copied(bytes)?;
        Ok(())
    }

    /// Makes the copy durable.
    ///
    /// # Errors
    /// Those of the medium; the replica must then be opened again.
    pub fn flush(&mut self) -> Result<(), ReplayError> {
        self.ring.flush()?;
        Ok(())
    }

    /// Returns the position up to which frames may be applied: they are durable here and at the writing node.
    #[must_use]
    pub fn bound(&self) -> JournalPosition {
        self.durable_there.min(self.ring.flushed())
    }

    /// Reads the frame at a place, if it may be applied.
    ///
    /// # Errors
    /// Those of the journal.
    pub fn read_frame<'b>(
        &self,
        cursor: JournalCursor,
        buffer: &'b mut Vec<u8>,
    ) -> Result<Option<StoredFrame<'b>>, ReplayError> {
        if cursor.position >= self.bound() { Ok(None) } else { Ok(self.ring.read_frame(cursor, buffer)?) }
    }

    /// Reuses frames that the store has committed.
    ///
    /// # Errors
    /// Those of the medium.
    pub fn reuse(&mut self, committed: JournalPosition) -> Result<(), StoreError> {
        self.ring.truncate(committed).map(drop).map_err(journal_failure)
    }
}

/// A store that follows another node's journal.
///
/// It applies, and so commits, nothing that is not durable in the copy and at the writing node. So a commit never has
/// to be taken back.
pub struct ReplicaStore {
    store: Store,
    applier: FrameApplier,
    /// Where the next frame is applied.
    cursor: JournalCursor,
    /// The position that the commit under way makes durable, and that of the last commit.
    frozen: JournalPosition,
    committed: JournalPosition,
}

impl ReplicaStore {
    /// Returns the store.
    #[must_use]
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// Returns the place of the next frame.
    #[must_use]
    pub fn cursor(&self) -> JournalCursor {
        self.cursor
    }

    /// Returns how far the journal is applied and committed.
    #[must_use]
    pub fn committed(&self) -> JournalPosition {
        self.committed
    }

    /// Returns how far the journal is applied, and the number of the last verdict.
    #[must_use]
    pub fn mark(&self) -> JournalMark {
        self.applier.mark()
    }

    /// Applies the frame at [`Self::cursor`].
    ///
    /// # Errors
    /// [`ReplayError::CommitFirst`]; with any other one the replica must be opened again.
    pub fn apply_frame(&mut self, frame: &StoredFrame<'_>) -> Result<(), ReplayError> {
        self.applier.apply_frame(&mut self.store, frame)?;
        self.cursor = frame.next();
        Ok(())
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

    /// Records the outcome of a commit. Frames before the position that it returns may be reused.
    ///
    /// # Errors
    /// Those of the commit, which must be tried again.
    pub fn finish_commit(&mut self, done: CommitDone) -> Result<JournalPosition, StoreError> {
        self.store.finish_commit(done)?;
        // No reader of the replica's blocks is there that could release them.
        self.store.sessions().iter().for_each(|(id, _)| self.store.release_all(*id));
        self.committed = self.frozen;
        Ok(self.committed)
    }
}

/// A replica of another node, in one piece.
pub struct Replica {
    copy: JournalCopy,
    state: ReplicaStore,
}

impl Replica {
    /// Takes a store, and the copy of the journal of this identity's node that the store follows.
    ///
    /// # Errors
    /// [`ReplayError::Open`]; [`ReplayError::Journal`] if the store's frames are not in the copy.
    pub fn open(store: Store, memory: Arc<SharedMemory>, identity: JournalIdentity) -> Result<Self, ReplayError> {
        let (node, ring) = (identity.node, JournalRing::open(memory, identity)?);
        let applier = FrameApplier::with_commits(&store, node);
        let committed = applier.mark().position;
        let cursor = ring.cursor_at(committed)?;
        let state = ReplicaStore { store, applier, cursor, frozen: committed, committed };
        Ok(Self { copy: JournalCopy { ring, durable_there: committed }, state })
    }

    /// Takes it apart, for a shell whose threads take frames and apply them side by side.
    #[must_use]
    pub fn into_parts(self) -> (JournalCopy, ReplicaStore) {
        (self.copy, self.state)
    }

    /// Applies all frames of the copy, also those that the writing node may have lost: this node takes over.
    ///
    /// # Errors
    /// [`ReplayError`]; the replica must then be opened again.
    pub fn adopt(mut self) -> Result<Store, ReplayError> {
        self.flush()?;
        self.copy.durable_there = self.copy.durable();
        while self.apply_frames(usize::MAX)? {}
        Ok(self.state.store)
    }

    /// Plants a fault, which a comparison of trees must find.
    pub fn plant(&mut self, fault: ReplicaFault) {
        self.state.applier.plant(fault);
    }

    /// Returns the store.
    #[must_use]
    pub fn store(&self) -> &Store {
        self.state.store()
    }

    /// Returns how far the journal is applied.
    #[must_use]
    pub fn mark(&self) -> JournalMark {
        self.state.mark()
    }

    /// Returns what it says when it connects to the writing node.
    #[must_use]
    pub fn copy_state(&self) -> CopyState {
        self.copy.state()
    }

    /// Returns the position that it acknowledges: its copy is durable up to there.
    #[must_use]
    pub fn durable(&self) -> JournalPosition {
        self.copy.durable()
    }

    /// Returns how far the journal is applied and committed.
    #[must_use]
    pub fn committed(&self) -> JournalPosition {
        self.state.committed()
    }

    /// Cuts the copy; see [`JournalCopy::follow`].
    ///
    /// # Errors
    /// As [`JournalCopy::follow`].
    pub fn follow(&mut self, plan: CopyPlan) -> Result<(), ReplayError> {
        self.copy.follow(plan, self.state.cursor.position)
    }

    /// Takes the position up to which the journal is durable at the writing node; see [`JournalCopy::handle_durable`].
    pub fn handle_durable(&mut self, durable: JournalPosition) {
        self.copy.handle_durable(durable);
    }

    /// Stores frames in the copy, with the news that came with them; see [`JournalCopy::take_frames`].
    ///
    /// # Errors
    /// As [`JournalCopy::take_frames`].
    pub fn take_frames(&mut self, part: &CopyPart) -> Result<(), ReplayError> {
        self.copy.handle_durable(part.durable);
        self.copy.take_frames(&part.bytes)
    }

    /// Returns how many bytes of frames it can take before its next commit.
    #[must_use]
    pub fn room(&self) -> u64 {
        self.copy.room()
    }

    /// Makes the copy durable.
    ///
    /// # Errors
    /// Those of the medium; the replica must then be opened again.
    pub fn flush(&mut self) -> Result<(), ReplayError> {
        self.copy.flush()
    }

    /// Applies frames that are durable here and at the writing node, at most so many; returns whether there are more.
    ///
    /// It commits where a frame may need room that only a commit makes free. No commit may be under way.
    ///
    /// # Errors
    /// [`ReplayError`]; the replica must then be opened again.
    pub fn apply_frames(&mut self, frames_max: usize) -> Result<bool, ReplayError> {
        let mut buffer = Vec::new();
        for _ in 0..frames_max {
            let Some(frame) = self.copy.read_frame(self.state.cursor, &mut buffer)? else { return Ok(false) };
            match self.state.apply_frame(&frame) {
                Err(ReplayError::CommitFirst) => self.commit()?,
                applied => applied?,
            }
        }
        Ok(self.state.cursor.position < self.copy.bound())
    }

    /// Takes into use a segment that was added to its arena.
    ///
    /// # Errors
    /// Those of the store.
    pub fn add_segment(&mut self, segment: SegmentInfo) -> Result<(), StoreError> {
        self.state.add_segment(segment)
    }

    /// Commits all that is applied, here and now.
    fn commit(&mut self) -> Result<(), ReplayError> {
        while let Some(job) = self.begin_commit() {
            self.finish_commit(job.run())?;
        }
        Ok(())
    }

    /// Freezes the applied state for a commit; `None` if there is nothing to commit.
    pub fn begin_commit(&mut self) -> Option<CommitJob> {
        self.state.begin_commit()
    }

    /// Records the outcome of a commit, and reuses the frames before it.
    ///
    /// # Errors
    /// Those of the commit, which must be tried again, and of the medium.
    pub fn finish_commit(&mut self, done: CommitDone) -> Result<(), StoreError> {
        let committed = self.state.finish_commit(done)?;
        self.copy.reuse(committed)
    }
}
