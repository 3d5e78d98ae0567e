//! The place from which the server takes a node's status.

use std::sync::Arc;

use ashlar_wire::StatusReply;
use parking_lot::Mutex;

/// Returns the status of a node.
pub type StatusSource = Arc<dyn Fn() -> StatusReply + Send + Sync>;

/// The source of a node's status, while some part of the node runs that knows it.
#[derive(Clone, Default)]
pub struct StatusSlot(Arc<Mutex<Option<StatusSource>>>);

/// A filled slot, which is empty again when this is dropped.
#[must_use]
pub struct FilledStatus(StatusSlot);

impl StatusSlot {
    /// Fills the slot until the returned value is dropped.
    pub fn fill(&self, source: StatusSource) -> FilledStatus {
        *self.0.lock() = Some(source);
        FilledStatus(self.clone())
    }

    /// Returns the status; `None` while the node is starting or ending.
    #[must_use]
    pub fn status(&self) -> Option<StatusReply> {
        // The source takes its time and other locks.
        let source = self.0.lock().clone();
        source.map(|source| source())
    }
}

impl Drop for FilledStatus {
    fn drop(&mut self) {
        *self.0.0.lock() = None;
    }
}
