//! File locks of a mount's owners: `flock` and record locks, held in SharedFS.
//!
//! Record locks of a process under `ashlar run` are in `files/record_locks.rs`.

use std::collections::HashMap;

use ashlar_types::{ByteRange, Errno, InodeId, LockAction, LockKind};
use ashlar_wire::{Reply, Request};
use rustix_futex_sync::Mutex;

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

/// The granted lock requests of each owner, in order.
///
/// Sent again to a restarted SharedFS, they restore the same locks.
#[derive(Debug, Default)]
pub(crate) struct HeldLocks(Mutex<HashMap<(InodeId, u64, LockKind), Vec<Request>>>);

/// Requests to keep for one owner and file. Later requests beyond this number are not kept.
const HISTORY_MAX: usize = 4096;

impl HeldLocks {
    fn has_locks(&self, inode: InodeId, owner: u64, kind: LockKind) -> bool {
        self.0.lock().contains_key(&(inode, owner, kind))
    }

    /// Returns the granted requests of an owner on a file, in order.
    fn history(&self, inode: InodeId, owner: u64, kind: LockKind) -> Option<Vec<Request>> {
        self.0.lock().get(&(inode, owner, kind)).cloned()
    }

    /// Restores such a history.
    fn restore_history(&self, inode: InodeId, owner: u64, kind: LockKind, history: Option<Vec<Request>>) {
        let mut all = self.0.lock();
        match history {
            Some(history) => drop(all.insert((inode, owner, kind), history)),
            None => drop(all.remove(&(inode, owner, kind))),
        }
    }

    fn record_request(&self, request: &Request) {
        let Request::Lock { inode, kind, owner, range, action, .. } = request else { return };
        let key = (*inode, *owner, *kind);
        let mut all = self.0.lock();
        if *action == LockAction::Unlock && range.first == 0 && range.last >= i64::MAX as u64 {
            all.remove(&key);
            return;
        }
        let history = all.entry(key).or_default();
        // A request replaces all earlier ones that lie within its range.
        history.retain(|old| !matches!(old, Request::Lock { range: old, .. } if range.contains(*old)));
        if history.len() < HISTORY_MAX {
            history.push(request.clone());
        }
        let only_unlocks = history.iter().all(|old| matches!(old, Request::Lock { action: LockAction::Unlock, .. }));
        if only_unlocks {
            all.remove(&key);
        }
    }

    fn forget_locks(&self, inode: InodeId, owner: u64, kind: LockKind) -> bool {
        self.0.lock().remove(&(inode, owner, kind)).is_some()
    }

    /// Returns the requests in order, without waiting.
    pub(crate) fn requests(&self) -> Vec<Request> {
        let mut requests: Vec<Request> = self.0.lock().values().flatten().cloned().collect();
        for request in &mut requests {
            if let Request::Lock { wait, .. } = request {
                *wait = None;
            }
        }
        requests
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(first: u64, last: u64, action: LockAction) -> Request {
        Request::Lock {
            inode: InodeId(9),
            kind: LockKind::Record,
            owner: 1,
            pid: 1,
            range: ByteRange::new(first, last),
            action,
            wait: Some(3),
            slot: None,
        }
    }

    #[test]
    fn granted_locks_are_requested_again_without_waiting() {
        let held = HeldLocks::default();
        held.record_request(&request(0, 9, LockAction::Read));
        held.record_request(&request(20, 29, LockAction::Write));
        held.record_request(&request(0, 9, LockAction::Unlock));
        assert!(held.has_locks(InodeId(9), 1, LockKind::Record));
        assert_eq!(held.requests().len(), 2);
        assert!(held.requests().iter().all(|r| matches!(r, Request::Lock { wait: None, .. })));
        held.record_request(&request(0, u64::MAX, LockAction::Unlock));
        assert!(held.requests().is_empty());
        assert!(!held.forget_locks(InodeId(9), 1, LockKind::Record));
    }
}
