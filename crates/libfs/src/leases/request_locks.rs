//! Locks under which threads request grants: of the threads that want one inode, only one sends a request.

use ashlar_types::InodeId;
use rustix_futex_sync::{Mutex, MutexGuard};

/// Locks of inodes: more than threads that request grants at the same moment.
const LOCKS: usize = 64;

/// The locks, by inode. Threads request different inodes at the same time, unless the inodes share a lock.
#[derive(Debug)]
pub(crate) struct RequestLocks([Mutex<()>; LOCKS]);

impl RequestLocks {
    pub(crate) fn new() -> Self {
        Self([const { Mutex::new(()) }; LOCKS])
    }

    /// Returns the lock to hold while a thread requests an inode.
    pub(crate) fn lock_inode(&self, id: InodeId) -> MutexGuard<'_, ()> {
        self.0[id.0 as usize % LOCKS].lock()
    }
}
