//! The hard state: what a node must know again after a restart.

use ashlar_types::{Epoch, JournalPosition};

/// Why and since when a writer acknowledges without a replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AloneSince {
    /// The end of the journal when this was recorded: nothing behind it was acknowledged without the replica before.
    pub since: JournalPosition,
    /// An administrator said so: by a promotion, or by force.
    pub by_order: bool,
}

/// All that a node has seen and promised. It is durable before the node acts on it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HardState {
    /// Of a writer: it acknowledges without its replica.
    pub alone: Option<AloneSince>,
    /// Of a replica: it has all that the writer had acknowledged when the writer said so. A store that is being copied
    /// is not in sync.
    pub in_sync: bool,
    /// Of a replica: the writer stopped in order, with its journal's end here, and has not been back since.
    pub writer_stopped_at: Option<JournalPosition>,
    /// Of a replica: the writer's `min_replicas`, as the writer said last. The replica's own may be edited since.
    pub writer_min_replicas: Option<u8>,
    /// The newest epoch seen. A document with an older one is a restored copy, and is refused.
    pub newest_epoch: Epoch,
}

impl HardState {
    /// Notes an epoch that another member knows. One with the same number of another node counts as newer: the two must
    /// not both serve.
    #[must_use]
    pub fn with_epoch(self, epoch: Epoch) -> Self {
        let newest = self.newest_epoch;
        let is_news = epoch.number > newest.number || epoch.number == newest.number && epoch.node != newest.node;
        Self { newest_epoch: if is_news { epoch } else { newest }, ..self }
    }

    /// Returns the epoch that stops a node whose document is of `epoch`, if the hard state has one.
    #[must_use]
    pub fn superseding(&self, epoch: Epoch) -> Option<Epoch> {
        let newest = self.newest_epoch;
        (newest != epoch && newest.number >= epoch.number).then_some(newest)
    }

    /// Returns the hard state of a replica whose writer is back, acknowledges alone or not, and has this
    /// `min_replicas`. It is durable before the replica confirms the writer's epoch.
    ///
    /// A writer that is alone may have acknowledged updates that the replica lacks: it is in sync only when the writer
    /// says so again.
    #[must_use]
    pub fn with_writer(self, is_alone: bool, min_replicas: u8) -> Self {
        let in_sync = self.in_sync && !is_alone;
        Self { in_sync, writer_stopped_at: None, writer_min_replicas: Some(min_replicas), ..self }
    }

    /// Returns the hard state of a replica whose store is emptied, for a copy of the whole file system.
    #[must_use]
    pub fn with_copy_begun(self) -> Self {
        Self { in_sync: false, writer_stopped_at: None, ..self }
    }

    /// Returns the hard state of a replica that the writer has declared in sync.
    #[must_use]
    pub fn with_sync(self) -> Self {
        Self { in_sync: true, ..self }
    }

    /// Returns the hard state of a replica whose writer has stopped in order, with its journal's end here.
    #[must_use]
    pub fn with_writer_stopped(self, end: JournalPosition) -> Self {
        Self { writer_stopped_at: Some(end), ..self }
    }
}
