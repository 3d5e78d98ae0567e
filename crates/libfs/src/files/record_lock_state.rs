//! A session's knowledge of its process's record locks that the slots of the control page do not have.

use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, Ordering};

use ashlar_types::{Errno, InodeId};
use rustix_futex_sync::{Mutex, MutexGuard};

/// Locks of files, by inode: more than threads that lock at the same moment.
const GUARDS: usize = 16;

/// A session's knowledge of its process's record locks, beside the slots.
#[derive(Debug, Default)]
pub(crate) struct RecordLockState {
    /// Held over each change of the locks of a file.
    guards: [Mutex<()>; GUARDS],
    /// Held while a thread searches for a slot.
    claiming: Mutex<()>,
    /// The last ticket for a waiting.
    ticket: AtomicU64,
    /// Files on which the process may have unknown locks, since SharedFS gave no answer. Closing the file removes such
    /// locks.
    doubtful: Mutex<HashSet<InodeId>>,
}

impl RecordLockState {
    /// Returns the lock to hold over each change of the locks of a file.
    pub(crate) fn guard(&self, inode: InodeId) -> &Mutex<()> {
        &self.guards[inode.0 as usize % GUARDS]
    }

    /// Records that a lock request has failed: if SharedFS was away, the lock may be set all the same.
    pub(crate) fn record_failure(&self, inode: InodeId, errno: Errno) -> Errno {
        if errno == Errno::EIO {
            self.mark_doubtful(inode);
        }
        errno
    }

    /// Records that the process may have unknown locks on a file.
    pub(crate) fn mark_doubtful(&self, inode: InodeId) {
        self.doubtful.lock().insert(inode);
    }

    /// Returns whether the process may have unknown locks on a file.
    pub(crate) fn is_doubtful(&self, inode: InodeId) -> bool {
        self.doubtful.lock().contains(&inode)
    }

    /// Forgets that there may be unknown locks on a file; returns whether there may have been some.
    ///
    /// The caller then asks SharedFS to remove them.
    pub(crate) fn take_doubtful(&self, inode: InodeId) -> bool {
        self.doubtful.lock().remove(&inode)
    }

    /// Begins a search for a slot, up to the drop of the result. Only one thread searches at a time.
    pub(crate) fn begin_claim(&self) -> MutexGuard<'_, ()> {
        self.claiming.lock()
    }

    /// Returns a number that no other call gets: the ticket for a waiting.
    pub(crate) fn next_ticket(&self) -> u64 {
        self.ticket.fetch_add(1, Ordering::Relaxed)
    }
}
