//! File locks of a mount's owners: `flock` and record locks, held in SharedFS.
//!
//! Record locks of a process under `ashlar run` are in `files/record_locks.rs`.

use ashlar_types::{ByteRange, Errno, InodeId, LockAction, LockKind};
use ashlar_wire::{Reply, Request};

use crate::LibFs;
use crate::api::Outcome;
use crate::files::record_locks::ConflictingLock;

impl LibFs {
    /// Sets or removes a lock. `wait` is the caller's ticket for the waiting, unique while it lasts.
    ///
    /// # Errors
    /// `EAGAIN` if another lock is in the way and the call does not wait; `EINTR` after [`LibFs::cancel_lock`];
    /// `EDEADLK`.
    #[allow(clippy::too_many_arguments, reason = "the parameters of one call")]
    pub fn lock(
        &self,
        inode: InodeId,
        kind: LockKind,
        owner: u64,
        pid: u32,
        range: ByteRange,
        action: LockAction,
        wait: Option<u64>,
    ) -> Outcome<()> {
        let request = Request::Lock { inode, kind, owner, pid, range, action, wait, slot: None };
        if action == LockAction::Unlock && !self.held_locks.has_locks(inode, owner, kind) {
            return Ok(());
        }
        let before = self.held_locks.history(inode, owner, kind);
        loop {
            let sharedfs_generation = self.sharedfs_generation();
            let done = self.call(&request);
            // After a request without an answer, the lock may exist or come into being. Closing the file then removes
            // it.
            let may_be_there = done.as_ref().err() == Some(&Errno::EIO) && action != LockAction::Unlock;
            if done.is_ok() || may_be_there {
                self.held_locks.record_request(&request);
            }
            // Another SharedFS may have been sent the locks before this one was recorded, so this SharedFS is asked
            // too.
            if done.is_err() || self.sharedfs_generation() == sharedfs_generation {
                return done.map(drop);
            }
            self.held_locks.restore_history(inode, owner, kind, before.clone());
        }
    }

    /// Stops a waiting.
    ///
    /// # Errors
    /// `EIO` if SharedFS is away.
    pub fn cancel_lock(&self, ticket: u64) -> Outcome<()> {
        self.call(&Request::CancelLock { ticket }).map(drop)
    }

    /// Returns the first lock that conflicts with a wanted one.
    ///
    /// # Errors
    /// `EIO` if SharedFS is away.
    pub fn query_lock(
        &self,
        inode: InodeId,
        kind: LockKind,
        owner: u64,
        range: ByteRange,
        action: LockAction,
    ) -> Outcome<Option<ConflictingLock>> {
        match self.call(&Request::QueryLock { inode, kind, owner, range, action })? {
            Reply::Conflict(conflict) => Ok(conflict),
            _ => Err(Errno::EIO),
        }
    }

    /// Removes all locks of an owner on a file. It costs nothing if the owner has none.
    ///
    /// # Errors
    /// `EIO` if SharedFS is away.
    pub fn release_locks(&self, inode: InodeId, owner: u64, kind: LockKind) -> Outcome<()> {
        if !self.held_locks.forget_locks(inode, owner, kind) {
            return Ok(());
        }
        self.call(&Request::ReleaseLocks { inode, owner, kind }).map(drop)
    }
}
