//! Open handles, and file locks.

use std::collections::HashMap;

use ashlar_types::{Access, Credentials, Errno, InodeId};
use ashlar_update::Update;
use ashlar_wire::{HandleSlot, LockKind, LockMode, OperationKind, Reply, Request};

use crate::LibFs;
use crate::alone::Mutex;
use crate::api::{Found, Outcome};
use crate::grants::{Claim, Stop};
use crate::node::{KnownHandle, NodeState};
use crate::warm::OpenInode;

impl LibFs {
    /// Notes a handle: the inode lives on until its last handle is closed, whoever removes its last name.
    ///
    /// # Errors
    /// `ESTALE` where it is gone; `ENFILE` where too many are open.
    pub fn open(&self, id: InodeId) -> Outcome<Found> {
        self.open_if(id, &|| self.found(id))
    }

    /// As [`LibFs::open`], where `who` has the access.
    ///
    /// # Errors
    /// As [`LibFs::open`]; `EACCES`.
    pub fn open_for(&self, who: &Credentials, id: InodeId, access: Access) -> Outcome<Found> {
        if who.checked {
            return self.open(id);
        }
        self.open_if(id, &|| {
            let guard = self.view(Claim::read(id).with_xattrs())?;
            if !self.allows(&guard, who, access) {
                return Err(Errno::EACCES);
            }
            Ok(Found { id, inode: guard.inode.clone().ok_or(Errno::ESTALE)? })
        })
    }

    /// As [`LibFs::open`], of a file that was opened with this access outside the session: its rights are those that `who` has now.
    ///
    /// # Errors
    /// As [`LibFs::open`]; `EACCES` where SharedFS would take what is written for forged, since others have narrowed the rights.
    pub fn open_again(&self, who: &Credentials, id: InodeId, access: Access) -> Outcome<Found> {
        if who.is_privileged() {
            return self.open(id);
        }
        self.open_if(id, &|| {
            let guard = self.view(Claim::read(id).with_xattrs())?;
            if !self.held(&guard, who).contains(access) {
                return Err(Errno::EACCES);
            }
            Ok(Found { id, inode: guard.inode.clone().ok_or(Errno::ESTALE)? })
        })
    }

    fn open_if(&self, id: InodeId, look: &dyn Fn() -> Outcome<Found>) -> Outcome<Found> {
        let _measured = self.measured(OperationKind::Name);
        while let Err(stop) = self.note_open(id) {
            self.recover_from(stop)?;
        }
        // The handle stands in the table before the inode is looked at: whoever frees inodes looks there after it has
        // taken away the lease that this look needs.
        let mut found = look();
        if found.as_ref().is_ok_and(|found| found.inode.links == 0) {
            // What has no name may be freed under a lease of its own, while it is known here by that of the directory where it
            // had one: only SharedFS can tell, and what it said before does not count.
            self.nodes.begin_eviction();
            self.nodes.write(id).lease = None;
            found = look();
        }
        if found.is_err() {
            self.note_closed(id);
        }
        found
    }

    /// Takes a handle away; the last one on an inode without names frees it.
    pub fn close(&self, id: InodeId) {
        if self.note_closed(id) {
            let is_freed = self.nodes.read_existing(id).is_some_and(|state| self.is_freed(&state));
            self.closed(id, is_freed);
        }
    }

    /// As [`LibFs::close`], by the way to the inode.
    pub fn close_open(&self, open: OpenInode) {
        let id = open.id();
        let Some(state) = open.state(self) else { return self.close(id) };
        let (is_last, is_freed) = (self.note_closed_of(id, &state), self.is_freed(&state));
        drop(state);
        // The node may go with what is freed.
        drop(open);
        if is_last {
            self.closed(id, is_freed);
        }
    }

    /// Whether what is closed for the last time is freed by this session. Where another one removed the last name, SharedFS finds the inode among its orphans.
    fn is_freed(&self, state: &NodeState) -> bool {
        !state.gone && state.is_orphan() && self.holds(state, true)
    }

    /// The last handle is gone.
    fn closed(&self, id: InodeId, is_freed: bool) {
        let mut unnamed = self.unnamed.lock();
        if !unnamed.is_empty() {
            unnamed.remove(&id);
        }
        drop(unnamed);
        if !is_freed {
            return;
        }
        let _using = self.using();
        let freed = self.change_held(&[Claim::write(id)], false, |locked| {
            if locked.inode(id)?.links == 0 && !self.control.has_open(id) {
                locked.commit(&Update::Release { inode: id }).map(drop)
            } else {
                Ok(())
            }
        });
        if let Err(errno) = freed {
            tracing::debug!(inode = id.0, %errno, "an orphan is left to the daemon");
        }
    }

    /// Notes a handle in the table, which has few slots at first: most sessions need no more.
    pub(crate) fn note_open(&self, id: InodeId) -> Result<(), Stop> {
        // By its node, which is made here if it must be: one that is made meanwhile would go on from a slot that is the inode's no more.
        self.note_open_of(id, &self.nodes.node(id).read())
    }

    /// As [`LibFs::note_open`], of an inode that nobody knows yet; says where, for its node to come.
    pub(crate) fn note_open_new(&self, id: InodeId) -> Result<HandleSlot, Stop> {
        self.note_open_in(id, None)
    }

    /// As [`LibFs::note_open`], of a node.
    pub(crate) fn note_open_of(&self, id: InodeId, state: &NodeState) -> Result<(), Stop> {
        self.note_open_in(id, Some(&state.handle)).map(drop)
    }

    fn note_open_in(&self, id: InodeId, known: Option<&KnownHandle>) -> Result<HandleSlot, Stop> {
        let _one_writer = self.handles.lock();
        // Looked at first: another thread may just have had room made.
        let has_all = self.control.has_all_handle_slots();
        let last = known.map_or(HandleSlot::default(), KnownHandle::slot);
        let Some(noted) = self.control.open_handle_at(id, last) else {
            return Err(if has_all { Errno::ENFILE.into() } else { Stop::Handles });
        };
        // Before anybody else may note another one.
        known.into_iter().for_each(|known| known.note(noted));
        Ok(noted)
    }

    /// As [`LibFs::note_closed`], of a node.
    fn note_closed_of(&self, id: InodeId, state: &NodeState) -> bool {
        let _one_writer = self.handles.lock();
        self.control.close_handle_at(id, state.handle.slot())
    }

    /// `true` where it was the last handle on the inode.
    pub(crate) fn note_closed(&self, id: InodeId) -> bool {
        let _one_writer = self.handles.lock();
        self.control.close_handle(id)
    }

    /// Sets or removes a lock. `wait` is the caller's name for the waiting, unique as long as it lasts.
    ///
    /// # Errors
    /// `EAGAIN` where another lock is in the way and the call does not wait; `EINTR` after [`LibFs::cancel_lock`]; `EDEADLK`.
    #[allow(clippy::too_many_arguments, reason = "the parts of one call")]
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
        if mode == LockMode::Unlock && !self.held_locks.owns(inode, owner, kind) {
            return Ok(());
        }
        let before = self.held_locks.history(inode, owner, kind);
        loop {
            let asked_of = self.asked_of();
            let done = self.call(&request);
            // Of one that was not answered nobody knows what became of it, or will: it goes with the file.
            let may_be_there = done.as_ref().err() == Some(&Errno::EIO) && mode != LockMode::Unlock;
            if done.is_ok() || may_be_there {
                self.held_locks.note(&request);
            }
            // Another SharedFS may have been told of the locks before this was noted: it's asked, too.
            if done.is_err() || self.asked_of() == asked_of {
                return done.map(drop);
            }
            self.held_locks.restore(inode, owner, kind, before.clone());
        }
    }

    /// Stops a waiting.
    ///
    /// # Errors
    /// `EIO` where SharedFS is away.
    pub fn cancel_lock(&self, ticket: u64) -> Outcome<()> {
        self.call(&Request::CancelLock { ticket }).map(drop)
    }

    /// The first lock that is in the way of one: mode, first byte, last byte, process.
    ///
    /// # Errors
    /// `EIO` where SharedFS is away.
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

    /// Removes all locks of an owner on a file. Costs nothing where it has none.
    ///
    /// # Errors
    /// `EIO` where SharedFS is away.
    pub fn release_locks(&self, inode: InodeId, owner: u64, kind: LockKind) -> Outcome<()> {
        if !self.held_locks.forget(inode, owner, kind) {
            return Ok(());
        }
        self.call(&Request::ReleaseLocks { inode, owner, kind }).map(drop)
    }
}

/// The lock requests that were granted, per owner, in order: sent again to a SharedFS that has restarted, they bring it to
/// the same locks.
#[derive(Debug, Default)]
pub(crate) struct HeldLocks(Mutex<HashMap<(InodeId, u64, LockKindKey), Vec<Request>>>);

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum LockKindKey {
    Record,
    Flock,
}

/// Requests kept for one owner and file; beyond, those that an `Unlock` of everything follows are dropped first.
const HISTORY_MAX: usize = 4096;

fn key(inode: InodeId, owner: u64, kind: LockKind) -> (InodeId, u64, LockKindKey) {
    let kind = match kind {
        LockKind::Record => LockKindKey::Record,
        LockKind::Flock => LockKindKey::Flock,
    };
    (inode, owner, kind)
}

impl HeldLocks {
    fn owns(&self, inode: InodeId, owner: u64, kind: LockKind) -> bool {
        self.0.lock().contains_key(&key(inode, owner, kind))
    }

    /// What was granted of an owner's locks on a file, in order.
    fn history(&self, inode: InodeId, owner: u64, kind: LockKind) -> Option<Vec<Request>> {
        self.0.lock().get(&key(inode, owner, kind)).cloned()
    }

    /// Puts that back.
    fn restore(&self, inode: InodeId, owner: u64, kind: LockKind, history: Option<Vec<Request>>) {
        let mut all = self.0.lock();
        match history {
            Some(history) => drop(all.insert(key(inode, owner, kind), history)),
            None => drop(all.remove(&key(inode, owner, kind))),
        }
    }

    fn note(&self, request: &Request) {
        let Request::Lock { inode, kind, owner, start, end, mode, .. } = request else { return };
        let key = key(*inode, *owner, *kind);
        let mut all = self.0.lock();
        if *mode == LockMode::Unlock && (*start, *end >= i64::MAX as u64) == (0, true) {
            all.remove(&key);
            return;
        }
        let history = all.entry(key).or_default();
        // A request makes those void that lie wholly within its range.
        history.retain(|old| !matches!(old, Request::Lock { start: s, end: e, .. } if s >= start && e <= end));
        if history.len() < HISTORY_MAX {
            history.push(request.clone());
        }
        let only_unlocks = history.iter().all(|old| matches!(old, Request::Lock { mode: LockMode::Unlock, .. }));
        if only_unlocks {
            all.remove(&key);
        }
    }

    fn forget(&self, inode: InodeId, owner: u64, kind: LockKind) -> bool {
        self.0.lock().remove(&key(inode, owner, kind)).is_some()
    }

    /// The requests, in order, without waiting.
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
    fn what_was_granted_is_asked_for_again_without_waiting() {
        let held = HeldLocks::default();
        held.note(&request(0, 9, LockMode::Read));
        held.note(&request(20, 29, LockMode::Write));
        held.note(&request(0, 9, LockMode::Unlock));
        assert!(held.owns(InodeId(9), 1, LockKind::Record));
        assert_eq!(held.requests().len(), 2);
        assert!(held.requests().iter().all(|r| matches!(r, Request::Lock { wait: None, .. })));
        held.note(&request(0, u64::MAX, LockMode::Unlock));
        assert!(held.requests().is_empty());
        assert!(!held.forget(InodeId(9), 1, LockKind::Record));
    }
}
