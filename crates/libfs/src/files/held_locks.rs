//! The file locks that SharedFS has granted to a mount's owners, to be restored in a restarted SharedFS.

use std::collections::HashMap;

use ashlar_types::{InodeId, LockAction, LockKind};
use ashlar_wire::Request;
use rustix_futex_sync::Mutex;

/// Requests to keep for one owner and file. Later requests beyond this number are not kept.
const HISTORY_MAX: usize = 4096;

/// The granted lock requests of each owner, in order.
///
/// Sent again to a restarted SharedFS, they restore the same locks.
#[derive(Debug, Default)]
pub(crate) struct HeldLocks(Mutex<HashMap<(InodeId, u64, LockKind), Vec<Request>>>);

impl HeldLocks {
    /// Returns whether an owner may have locks on a file.
    pub(crate) fn has_locks(&self, inode: InodeId, owner: u64, kind: LockKind) -> bool {
        self.0.lock().contains_key(&(inode, owner, kind))
    }

    /// Returns the granted requests of an owner on a file, in order.
    pub(crate) fn history(&self, inode: InodeId, owner: u64, kind: LockKind) -> Option<Vec<Request>> {
        self.0.lock().get(&(inode, owner, kind)).cloned()
    }

    /// Restores such a history.
    pub(crate) fn restore_history(&self, inode: InodeId, owner: u64, kind: LockKind, history: Option<Vec<Request>>) {
        let mut all = self.0.lock();
        match history {
            Some(history) => drop(all.insert((inode, owner, kind), history)),
            None => drop(all.remove(&(inode, owner, kind))),
        }
    }

    /// Records a lock request that SharedFS has granted, or may have granted.
    pub(crate) fn record_request(&self, request: &Request) {
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

    /// Removes an owner's requests on a file; returns whether there were any.
    pub(crate) fn forget_locks(&self, inode: InodeId, owner: u64, kind: LockKind) -> bool {
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
    use ashlar_types::ByteRange;

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
