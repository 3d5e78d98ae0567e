//! A replica of another node: its store follows the frames of the node's journal.

use std::sync::Arc;

use ashlar_journal::{JournalCursor, JournalRing};
use ashlar_pmem::SharedMemory;
use ashlar_store::{CommitDone, CommitJob, JournalMark, Store, StoreError};
use ashlar_types::{JournalPosition, NodeNumber};

use crate::journal::applier::{FrameApplier, ReplayError};

/// A replica of another node.
pub struct Replica {
    store: Store,
    applier: FrameApplier,
    /// Where the next frame is read; `None` before the first.
    cursor: Option<JournalCursor>,
    /// The mark that the commit under way makes durable.
    frozen: JournalPosition,
    committed: JournalPosition,
}

impl Replica {
    /// Takes a store that holds a node's journal up to the store's mark.
    #[must_use]
    pub fn new(store: Store, node: NodeNumber) -> Self {
        let applier = FrameApplier::new(&store, node);
        let committed = applier.mark().position;
        Self { store, applier, cursor: None, frozen: committed, committed }
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

    /// Returns how far the journal is applied and committed.
    #[must_use]
    pub fn committed(&self) -> JournalPosition {
        self.committed
    }

    /// Applies the frames of a journal, or of a copy, up to its end; at most so many.
    ///
    /// Returns whether there are more.
    ///
    /// # Errors
    /// [`ReplayError`]; the replica must then be opened again.
    pub fn apply_frames(
        &mut self,
        ring: &JournalRing<Arc<SharedMemory>>,
        frames_max: usize,
    ) -> Result<bool, ReplayError> {
        let mut cursor = match self.cursor {
            Some(cursor) => cursor,
            None => ring.cursor_at(self.applier.mark().position)?,
        };
        let mut buffer = Vec::new();
        for _ in 0..frames_max {
            let Some(frame) = ring.read_frame(cursor, &mut buffer)? else {
                self.cursor = Some(cursor);
                return Ok(false);
            };
            self.applier.apply_frame(&mut self.store, &frame)?;
            cursor = frame.next();
        }
        self.cursor = Some(cursor);
        Ok(true)
    }

    /// Freezes the applied state for a commit; `None` if there is nothing to commit.
    pub fn begin_commit(&mut self) -> Option<CommitJob> {
        let job = self.store.begin_commit()?;
        self.frozen = self.applier.mark().position;
        Some(job)
    }

    /// Records the outcome of a commit.
    ///
    /// # Errors
    /// Those of the commit, which must be tried again.
    pub fn finish_commit(&mut self, done: CommitDone) -> Result<(), StoreError> {
        self.store.finish_commit(done)?;
        // No reader of the replica's blocks is there that could release them.
        self.store.sessions().iter().for_each(|(id, _)| self.store.release_all(*id));
        self.committed = self.frozen;
        Ok(())
    }
}
