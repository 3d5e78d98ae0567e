//! File locks of a mount's owners: `flock` and record locks, held in SharedFS.
//!
//! Record locks of a process under `ashlar run` are in `files/record_locks.rs`.

use ashlar_types::{ByteRange, Errno, InodeId, LockAction, LockKind, LockedRange, SegmentVersion};
use ashlar_wire::{Reply, Request};

use crate::LibFs;
use crate::api::Outcome;
use crate::files::held_locks::{LockHolder, PendingLock};
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
        let holder = LockHolder { inode, owner, kind };
        if action == LockAction::Unlock && !self.held_locks.has_locks(holder) {
            return Ok(());
        }
        let mut sharedfs_generation = self.sharedfs_generation();
        let pending = self.held_locks.begin_request(holder, range, action);
        loop {
            let Err(errno) = self.call(&request) else {
                self.held_locks.record_served(holder, pid, &pending);
                let now = self.sharedfs_generation();
                if now == sharedfs_generation {
                    return Ok(());
                }
                // Another SharedFS may have been sent the locks before this one was recorded, so it is asked too.
                self.held_locks.record_unserved(holder, &pending);
                sharedfs_generation = now;
                continue;
            };
            self.handle_refusal((holder, pid), &pending, errno, sharedfs_generation);
            return Err(errno);
        }
    }

    /// Records the locks that an owner has after a refused request.
    fn handle_refusal(
        &self,
        (holder, pid): (LockHolder, u32),
        pending: &PendingLock,
        errno: Errno,
        sharedfs_generation: (SegmentVersion, u64),
    ) {
        match errno {
            // There is no answer: the lock may exist or come into being. Closing the file then removes it.
            Errno::EIO => self.held_locks.mark_doubtful(holder),
            // Another SharedFS knows only what was certain, and gets to know the rest.
            _ if self.sharedfs_generation() != sharedfs_generation => {
                self.held_locks.record_unserved(holder, pending);
                let LockHolder { inode, owner, kind } = holder;
                for LockedRange { range, mode } in pending.weakened(kind) {
                    // If another owner has got a conflicting lock by then, this one is lost.
                    let _ = self.lock(inode, kind, owner, pid, *range, (*mode).into(), None);
                }
            }
            Errno::EAGAIN | Errno::EINTR | Errno::EDEADLK => {
                self.held_locks.record_refused(holder, pending, pending.refused(holder.kind));
            }
            // SharedFS has changed nothing.
            _ => self.held_locks.record_refused(holder, pending, pending.before()),
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
        if !self.held_locks.forget_locks(LockHolder { inode, owner, kind }) {
            return Ok(());
        }
        self.call(&Request::ReleaseLocks { inode, owner, kind }).map(drop)
    }
}
