//! Notifies mounts' kernels of stale caches, through the shell.

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use ashlar_types::InodeId;

/// Cached state that a kernel must forget.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StaleCache {
    /// The inode that it belongs to.
    pub inode: InodeId,
    /// Whether pages are stale too, not only attributes.
    pub data: bool,
    /// Whether everything below the inode is stale as well.
    pub subtree: bool,
}

/// Records until when a mount's kernel may believe stale state.
///
/// The clock counts from the machine's start. A restarted SharedFS waits so long. Zero: the kernel has received all
/// notifications.
pub type NoteStale = Box<dyn Fn(Duration) + Send + Sync>;

/// Notifies one mount's kernel. None of its methods waits.
pub trait KernelNotifier: Send + Sync + fmt::Debug {
    /// Records that a lease is about to be taken of which the kernel must be notified.
    ///
    /// A restart from here on waits for the kernel. The notifications are queued next.
    fn begin_revocation(&self);

    /// Queues a notification behind others. The ticket is the last one's, and so stands for all.
    fn queue_stale(self: Arc<Self>, before: &[StaleCache], stale: StaleCache) -> Arc<dyn KernelTicket>;

    /// Returns whether pages of a file are still to be dropped.
    fn owes_pages(&self, inode: InodeId) -> bool;

    /// Returns the shell's own notifier.
    fn into_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync>;
}

/// A wait for a notification.
///
/// It must end before any session may learn of the change that made the cache stale.
pub trait KernelTicket: Send + Sync + fmt::Debug {
    /// Returns the state that the kernel must forget.
    fn stale(&self) -> StaleCache;

    /// Returns whether the kernel has forgotten the state, or may not believe it any more.
    fn is_done(&self) -> bool;

    /// Returns the shell's own ticket.
    fn into_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync>;
}
