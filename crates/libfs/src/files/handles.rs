//! Open handles, and the file locks of a mount's owners.

use std::collections::HashMap;

use ashlar_types::{Access, Credentials, Errno, InodeId};
use ashlar_update::Update;
use ashlar_wire::{HandleSlot, LockKind, LockMode, OperationKind, Reply, Request};

use crate::LibFs;
use crate::api::{FoundInode, Outcome};
use crate::cache::node::{HandleHint, NodeState};
use crate::files::open_file::OpenInode;
use crate::leases::grants::{Claim, Stop};
use crate::single_threaded::Mutex;

impl LibFs {
    /// Records a handle: the inode lives until its last handle is closed, even if its last name is removed.
    ///
    /// # Errors
    /// `ESTALE` if it is gone; `ENFILE` if too many are open.
    pub fn open(&self, id: InodeId) -> Outcome<FoundInode> {
        self.open_if(id, &|| self.find_inode(id))
    }

    /// As [`LibFs::open`], if `user` has the access.
    ///
    /// # Errors
    /// As [`LibFs::open`]; `EACCES`.
    pub fn open_for(&self, user: &Credentials, id: InodeId, access: Access) -> Outcome<FoundInode> {
        if user.checked {
            return self.open(id);
        }
        self.open_if(id, &|| {
            let guard = self.view_node(Claim::read(id).with_xattrs())?;
            if !self.allows_access(&guard, user, access) {
                return Err(Errno::EACCES);
            }
            Ok(FoundInode { id, inode: guard.inode.clone().ok_or(Errno::ESTALE)? })
        })
    }

    /// As [`LibFs::open`], for a file that was opened with this access outside the session.
    ///
    /// Its rights are those that `user` has now.
    ///
    /// # Errors
    /// As [`LibFs::open`]; `EACCES` if another session has narrowed the rights, so that SharedFS would take writes for
    /// forged.
    pub fn open_adopted(&self, user: &Credentials, id: InodeId, access: Access) -> Outcome<FoundInode> {
        if user.is_privileged() {
            return self.open(id);
        }
        self.open_if(id, &|| {
            let guard = self.view_node(Claim::read(id).with_xattrs())?;
            if !self.held_access(&guard, user).contains(access) {
                return Err(Errno::EACCES);
            }
            Ok(FoundInode { id, inode: guard.inode.clone().ok_or(Errno::ESTALE)? })
        })
    }

    fn open_if(&self, id: InodeId, look: &dyn Fn() -> Outcome<FoundInode>) -> Outcome<FoundInode> {
        let _measured = self.begin_operation(OperationKind::Name);
        while let Err(stop) = self.record_open(id) {
            self.recover_from(stop)?;
        }
        // The handle is recorded before the inode is read. SharedFS reads the handles after it has revoked the lease
        // that this read needs, and frees no inode with a handle.
        let mut found = look();
        if found.as_ref().is_ok_and(|found| found.inode.links == 0) {
            // SharedFS may free a nameless inode under the inode's own lease, while this session knows it by the lease
            // of its former directory. Only SharedFS knows, and its earlier answers don't count.
            self.nodes.begin_eviction();
            self.nodes.write(id).lease = None;
            found = look();
        }
        if found.is_err() {
            self.record_closed(id);
        }
        found
    }

    /// Removes a handle. Closing the last handle of a nameless inode frees the inode.
    pub fn close(&self, id: InodeId) {
        if self.record_closed(id) {
            let is_freed = self.nodes.read_existing(id).is_some_and(|state| self.is_freed(&state));
            self.finish_close(id, is_freed);
        }
    }

    /// As [`LibFs::close`], for an inode that is open by its node.
    pub fn close_open(&self, open: OpenInode) {
        let id = open.id();
        let Some(state) = open.state(self) else { return self.close(id) };
        let (is_last, is_freed) = (self.record_closed_of(id, &state), self.is_freed(&state));
        drop(state);
        // The node must not outlive an inode that is freed.
        drop(open);
        if is_last {
            self.finish_close(id, is_freed);
        }
    }

    /// Returns whether this session frees an inode at its last close.
    ///
    /// If another session removed the last name, SharedFS finds the inode among its orphans.
    fn is_freed(&self, state: &NodeState) -> bool {
        !state.is_gone && state.is_orphan() && self.holds_lease(state, true)
    }

    /// Ends the last close of an inode: frees it if `is_freed`.
    fn finish_close(&self, id: InodeId, is_freed: bool) {
        let mut unnamed = self.unnamed.lock();
        if !unnamed.is_empty() {
            unnamed.remove(&id);
        }
        drop(unnamed);
        if !is_freed {
            return;
        }
        let _using = self.enter_operation();
        let freed = self.change_nodes_holding(&[Claim::write(id)], false, |locked| {
            if locked.inode(id)?.links == 0 && !self.control.has_open(id) {
                locked.log_update(&Update::Release { inode: id }).map(drop)
            } else {
                Ok(())
            }
        });
        if let Err(errno) = freed {
            tracing::debug!(inode = id.0, %errno, "an orphan is left to the daemon");
        }
    }

    /// Records a handle in the table. It has few slots at first: most sessions need no more.
    pub(crate) fn record_open(&self, id: InodeId) -> Result<(), Stop> {
        // The node is created here if there is none. A node that another thread created meanwhile would start with a
        // slot that is no longer the inode's.
        self.record_open_of(id, &self.nodes.node(id).read())
    }

    /// As [`LibFs::record_open`], for a new inode that no other thread knows; returns the slot for its future node.
    pub(crate) fn record_open_new(&self, id: InodeId) -> Result<HandleSlot, Stop> {
        self.record_open_in(id, None)
    }

    /// As [`LibFs::record_open`], for a node.
    pub(crate) fn record_open_of(&self, id: InodeId, state: &NodeState) -> Result<(), Stop> {
        self.record_open_in(id, Some(&state.handle)).map(drop)
    }

    fn record_open_in(&self, id: InodeId, known: Option<&HandleHint>) -> Result<HandleSlot, Stop> {
        let _one_writer = self.handles.lock();
        // Read first: another thread may just have made room in the table.
        let has_all = self.control.has_all_handle_slots();
        let last = known.map_or(HandleSlot::default(), HandleHint::slot);
        let Some(noted) = self.control.open_handle_at(id, last) else {
            return Err(if has_all { Errno::ENFILE.into() } else { Stop::Handles });
        };
        // Under the lock, before another thread can record a handle of the inode.
        known.into_iter().for_each(|known| known.set_slot(noted));
        Ok(noted)
    }

    /// As [`LibFs::record_closed`], for a node.
    fn record_closed_of(&self, id: InodeId, state: &NodeState) -> bool {
        let _one_writer = self.handles.lock();
        self.control.close_handle_at(id, state.handle.slot())
    }

    /// Removes a handle from the table; returns whether it was the inode's last one.
    pub(crate) fn record_closed(&self, id: InodeId) -> bool {
        let _one_writer = self.handles.lock();
        self.control.close_handle(id)
    }

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
        range: (u64, u64),
        mode: LockMode,
        wait: Option<u64>,
    ) -> Outcome<()> {
        let (start, end) = range;
        let request = Request::Lock { inode, kind, owner, pid, start, end, mode, wait, slot: None };
        if mode == LockMode::Unlock && !self.held_locks.has_locks(inode, owner, kind) {
            return Ok(());
        }
        let before = self.held_locks.history(inode, owner, kind);
        loop {
            let sharedfs_generation = self.sharedfs_generation();
            let done = self.call(&request);
            // After a request without an answer, the lock may exist or come into being. It then goes when the file is
            // closed.
            let may_be_there = done.as_ref().err() == Some(&Errno::EIO) && mode != LockMode::Unlock;
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

    /// Returns the first lock that conflicts with a wanted one: mode, first byte, last byte, process.
    ///
    /// # Errors
    /// `EIO` if SharedFS is away.
    pub fn query_lock(
        &self,
        inode: InodeId,
        kind: LockKind,
        owner: u64,
        range: (u64, u64),
        mode: LockMode,
    ) -> Outcome<Option<(LockMode, u64, u64, u32)>> {
        match self.call(&Request::QueryLock { inode, kind, owner, start: range.0, end: range.1, mode })? {
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
pub(crate) struct HeldLocks(Mutex<HashMap<(InodeId, u64, LockKindKey), Vec<Request>>>);

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum LockKindKey {
    Record,
    Flock,
}

/// Requests to keep for one owner and file. Later requests beyond this number are not kept.
const HISTORY_MAX: usize = 4096;

fn owner_key(inode: InodeId, owner: u64, kind: LockKind) -> (InodeId, u64, LockKindKey) {
    let kind = match kind {
        LockKind::Record => LockKindKey::Record,
        LockKind::Flock => LockKindKey::Flock,
    };
    (inode, owner, kind)
}

impl HeldLocks {
    fn has_locks(&self, inode: InodeId, owner: u64, kind: LockKind) -> bool {
        self.0.lock().contains_key(&owner_key(inode, owner, kind))
    }

    /// Returns the granted requests of an owner on a file, in order.
    fn history(&self, inode: InodeId, owner: u64, kind: LockKind) -> Option<Vec<Request>> {
        self.0.lock().get(&owner_key(inode, owner, kind)).cloned()
    }

    /// Restores such a history.
    fn restore_history(&self, inode: InodeId, owner: u64, kind: LockKind, history: Option<Vec<Request>>) {
        let mut all = self.0.lock();
        match history {
            Some(history) => drop(all.insert(owner_key(inode, owner, kind), history)),
            None => drop(all.remove(&owner_key(inode, owner, kind))),
        }
    }

    fn record_request(&self, request: &Request) {
        let Request::Lock { inode, kind, owner, start, end, mode, .. } = request else { return };
        let key = owner_key(*inode, *owner, *kind);
        let mut all = self.0.lock();
        if *mode == LockMode::Unlock && (*start, *end >= i64::MAX as u64) == (0, true) {
            all.remove(&key);
            return;
        }
        let history = all.entry(key).or_default();
        // A request replaces all earlier ones that lie within its range.
        history.retain(|old| !matches!(old, Request::Lock { start: s, end: e, .. } if s >= start && e <= end));
        if history.len() < HISTORY_MAX {
            history.push(request.clone());
        }
        let only_unlocks = history.iter().all(|old| matches!(old, Request::Lock { mode: LockMode::Unlock, .. }));
        if only_unlocks {
            all.remove(&key);
        }
    }

    fn forget_locks(&self, inode: InodeId, owner: u64, kind: LockKind) -> bool {
        self.0.lock().remove(&owner_key(inode, owner, kind)).is_some()
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

    fn request(start: u64, end: u64, mode: LockMode) -> Request {
        Request::Lock {
            inode: InodeId(9),
            kind: LockKind::Record,
            owner: 1,
            pid: 1,
            start,
            end,
            mode,
            wait: Some(3),
            slot: None,
        }
    }

    #[test]
    fn granted_locks_are_requested_again_without_waiting() {
        let held = HeldLocks::default();
        held.record_request(&request(0, 9, LockMode::Read));
        held.record_request(&request(20, 29, LockMode::Write));
        held.record_request(&request(0, 9, LockMode::Unlock));
        assert!(held.has_locks(InodeId(9), 1, LockKind::Record));
        assert_eq!(held.requests().len(), 2);
        assert!(held.requests().iter().all(|r| matches!(r, Request::Lock { wait: None, .. })));
        held.record_request(&request(0, u64::MAX, LockMode::Unlock));
        assert!(held.requests().is_empty());
        assert!(!held.forget_locks(InodeId(9), 1, LockKind::Record));
    }
}
