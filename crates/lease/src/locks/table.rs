//! All locks, and the owners that wait for them.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use ashlar_types::{ByteRange, InodeId, LockAction, LockKind, LockMode, LockedRange, SessionId};

use super::spans::Spans;

/// The owner of a lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct LockOwner {
    /// The session.
    pub session: SessionId,
    /// The owner within it.
    pub owner: u64,
}

/// A wait for a lock, named by the session's ticket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct WaiterId {
    /// The session.
    pub session: SessionId,
    /// The session's number for the wait, unique while it lasts.
    pub ticket: u64,
}

/// A request to set or remove a lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LockRequest {
    /// The file.
    pub inode: InodeId,
    /// The kind.
    pub kind: LockKind,
    /// The owner.
    pub owner: LockOwner,
    /// The process that other lock queries report.
    pub pid: u32,
    /// The range, of a record lock.
    pub range: ByteRange,
    /// The action.
    pub action: LockAction,
    /// The ticket under which to wait; `None`: do not wait.
    pub wait: Option<u64>,
}

/// A lock that is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeldLock {
    /// The file.
    pub inode: InodeId,
    /// The kind.
    pub kind: LockKind,
    /// The owner.
    pub owner: LockOwner,
    /// The process that the owner named.
    pub pid: u32,
    /// The range.
    pub range: ByteRange,
    /// The mode.
    pub mode: LockMode,
}

/// The result of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LockOutcome {
    /// The request is done.
    Granted,
    /// The owner waits; [`LockTable::poll_woken`] reports the end of the wait.
    Blocked,
    /// This lock conflicts (`EAGAIN`).
    WouldBlock(HeldLock),
    /// Waiting would never end (`EDEADLK`).
    Deadlock,
    /// The session has as many locks as it may (`ENOLCK`).
    Full,
    /// The process now has its locks on the file under another owner, and must ask as that one.
    Moved,
}

/// A wait that is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Woken {
    /// The waiter.
    pub waiter: WaiterId,
    /// `Granted`: the waiter holds the lock. `Deadlock`: a lock granted to another owner closed a circle.
    pub outcome: LockOutcome,
}

/// Limits, each with its reason.
#[derive(Clone, Copy, Debug)]
pub struct LockLimits {
    /// The most locks and waits of one session, which cost SharedFS memory.
    ///
    /// Linux no longer has a limit of its own. A database that locks record by record needs thousands.
    pub per_session_max: usize,
}

impl Default for LockLimits {
    fn default() -> Self {
        Self { per_session_max: 65_536 }
    }
}

/// The locks of an owner on a file.
#[derive(Debug, Default)]
struct OwnerLocks {
    /// The process that the owner named.
    pid: u32,
    spans: Spans,
    /// Whether its locks move to another owner of the same process, and do not conflict with that owner.
    yields: bool,
}

/// The locks on one file of one kind.
#[derive(Debug, Default)]
struct File {
    owners: BTreeMap<LockOwner, OwnerLocks>,
    waiters: VecDeque<LockRequest>,
}

impl File {
    /// Returns the locks of other owners that a request must respect.
    fn others(&self, request: &LockRequest) -> impl Iterator<Item = (LockOwner, &OwnerLocks)> {
        let (asking, pid) = (request.owner, request.pid);
        let is_other =
            move |(owner, held): &(&LockOwner, &OwnerLocks)| **owner != asking && !(held.yields && held.pid == pid);
        self.owners.iter().filter(is_other).map(|(owner, held)| (*owner, held))
    }
}

/// All locks of one machine's sessions.
#[derive(Debug, Default)]
pub struct LockTable {
    limits: LockLimits,
    files: BTreeMap<(InodeId, LockKind), File>,
    /// The files for whose record locks an owner waits.
    waiting: BTreeMap<LockOwner, Vec<InodeId>>,
    tickets: BTreeMap<WaiterId, (InodeId, LockKind)>,
    count_of: BTreeMap<SessionId, usize>,
    woken: VecDeque<Woken>,
}

impl LockTable {
    /// Makes an empty table.
    #[must_use]
    pub fn new(limits: LockLimits) -> Self {
        Self { limits, ..Self::default() }
    }

    /// Sets or removes a lock.
    ///
    /// A `flock` request of another mode first removes the held lock. If the new lock can't be granted, the old one is
    /// lost, as `flock(2)` says.
    pub fn handle_lock(&mut self, request: LockRequest) -> LockOutcome {
        let mut request = request;
        if request.kind == LockKind::Flock {
            request.range = ByteRange::ALL;
        }
        let Some(mode) = request.action.mode() else {
            self.apply(&request, None);
            self.settle(request.inode, request.kind);
            return LockOutcome::Granted;
        };
        // A lock in the middle of another makes three locks of one.
        if self.count_of(request.owner.session) + 2 > self.limits.per_session_max {
            return LockOutcome::Full;
        }
        let is_conversion = request.kind == LockKind::Flock && self.holds_other_mode(&request, mode);
        if is_conversion {
            self.apply(&request, None);
        }
        let outcome = match self.find_conflict(&request, mode) {
            None => {
                self.apply(&request, Some(mode));
                LockOutcome::Granted
            }
            Some(holder) => self.block(request, mode, holder),
        };
        if is_conversion || outcome == LockOutcome::Granted {
            self.settle(request.inode, request.kind);
        }
        outcome
    }

    /// Returns the next wait that is over.
    pub fn poll_woken(&mut self) -> Option<Woken> {
        self.woken.pop_front()
    }

    /// Whether a wait continues.
    #[must_use]
    pub fn is_waiting(&self, waiter: WaiterId) -> bool {
        self.tickets.contains_key(&waiter)
    }

    /// Ends a wait; `false` if it is over already (its outcome is or was in [`LockTable::poll_woken`]).
    pub fn handle_cancel(&mut self, waiter: WaiterId) -> bool {
        let Some((inode, kind)) = self.tickets.get(&waiter).copied() else { return false };
        let Some(file) = self.files.get_mut(&(inode, kind)) else { return false };
        let is_it = |request: &LockRequest| waiter_id(request) == Some(waiter);
        let Some(at) = file.waiters.iter().position(is_it) else { return false };
        if let Some(request) = file.waiters.remove(at) {
            self.forget_waiter(&request);
        }
        self.remove_if_empty(inode, kind);
        true
    }

    /// Returns the conflicting lock that begins first (`F_GETLK`). Nothing changes.
    #[must_use]
    pub fn query(&self, request: &LockRequest) -> Option<HeldLock> {
        let mode = request.action.mode()?;
        let mut request = *request;
        if request.kind == LockKind::Flock {
            request.range = ByteRange::ALL;
        }
        self.find_conflict(&request, mode)
    }

    /// Removes an owner's locks on a file, since the owner has closed a descriptor of it.
    ///
    /// Waits under the owner's name continue.
    pub fn handle_close(&mut self, owner: LockOwner, inode: InodeId, kind: LockKind) {
        let request =
            LockRequest { inode, kind, owner, pid: 0, range: ByteRange::ALL, action: LockAction::Unlock, wait: None };
        self.handle_lock(request);
    }

    /// Removes all locks and waits of this kind of an owner that is gone.
    pub fn handle_owner_end(&mut self, owner: LockOwner, kind: LockKind) {
        self.handle_end(kind, |other| other == owner);
    }

    /// Removes all locks and waits of a session that has ended.
    pub fn handle_session_end(&mut self, session: SessionId) {
        for kind in [LockKind::Record, LockKind::Flock] {
            self.handle_end(kind, |owner| owner.session == session);
        }
        self.woken.retain(|woken| woken.waiter.session != session);
        self.count_of.remove(&session);
    }

    /// Returns the locks of a session, in order of files, owners and ranges.
    ///
    /// Waiting owners ask again after a restart.
    #[must_use]
    pub fn export(&self, session: SessionId) -> Vec<HeldLock> {
        let mut locks = Vec::new();
        for ((inode, kind), file) in &self.files {
            for (owner, held) in file.owners.iter().filter(|(owner, _)| owner.session == session) {
                locks.extend(held.spans.iter().map(|LockedRange { mode, range }| HeldLock {
                    inode: *inode,
                    kind: *kind,
                    owner: *owner,
                    pid: held.pid,
                    range,
                    mode,
                }));
            }
        }
        locks
    }

    /// Restores exported locks after a restart.
    ///
    /// Returns the locks that conflict with locks held by now, and are lost.
    pub fn import(&mut self, locks: &[HeldLock]) -> Vec<HeldLock> {
        let is_lost = |lock: &&HeldLock| {
            let request = LockRequest {
                inode: lock.inode,
                kind: lock.kind,
                owner: lock.owner,
                pid: lock.pid,
                range: lock.range,
                action: lock.mode.into(),
                wait: None,
            };
            self.handle_lock(request) != LockOutcome::Granted
        };
        locks.iter().filter(is_lost).copied().collect()
    }

    /// Returns the number of held locks, and the number of waits.
    #[must_use]
    pub fn counts(&self) -> (usize, usize) {
        let held = self.files.values().flat_map(|file| file.owners.values()).map(|held| held.spans.len()).sum();
        (held, self.tickets.len())
    }

    /// Whether the table is empty.
    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.files.is_empty() && self.waiting.is_empty() && self.tickets.is_empty() && self.count_of.is_empty()
    }

    fn count_of(&self, session: SessionId) -> usize {
        self.count_of.get(&session).copied().unwrap_or(0)
    }

    fn holds_other_mode(&self, request: &LockRequest, mode: LockMode) -> bool {
        let file = self.files.get(&(request.inode, request.kind));
        let held = file.and_then(|file| file.owners.get(&request.owner));
        held.is_some_and(|held| held.spans.iter().any(|held| held.mode != mode))
    }

    /// Returns the record locks of an owner on a file.
    #[must_use]
    pub fn records(&self, inode: InodeId, owner: LockOwner) -> Vec<LockedRange> {
        let file = self.files.get(&(inode, LockKind::Record));
        file.and_then(|file| file.owners.get(&owner)).map(|held| held.spans.iter().collect()).unwrap_or_default()
    }

    /// Whether no other owner has a record lock on a file or waits for one.
    #[must_use]
    pub fn is_sole_owner(&self, inode: InodeId, owner: LockOwner) -> bool {
        let file = self.files.get(&(inode, LockKind::Record));
        file.is_none_or(|file| file.waiters.is_empty() && file.owners.keys().all(|other| *other == owner))
    }

    /// Whether an owner in another session, with the same process, has record locks on a file.
    #[must_use]
    pub fn is_held_elsewhere(&self, inode: InodeId, owner: LockOwner, pid: u32) -> bool {
        let file = self.files.get(&(inode, LockKind::Record));
        let is_it = |(other, held): (&LockOwner, &OwnerLocks)| other.session != owner.session && held.pid == pid;
        file.is_some_and(|file| file.owners.iter().any(is_it))
    }

    /// Moves an owner's record locks on a file to other owners of the same process.
    ///
    /// Until the owner has closed the file, its locks conflict with no owner that names the same process. Its waits
    /// there end: the moved locks would block them for ever.
    pub fn handle_move(&mut self, inode: InodeId, owner: LockOwner) {
        self.end_waits(inode, |wait| wait.owner == owner);
        let file = self.files.get_mut(&(inode, LockKind::Record));
        if let Some(held) = file.and_then(|file| file.owners.get_mut(&owner)) {
            held.yields = true;
        }
    }

    /// Ends a process's waits on a file under other sessions' owners of this number.
    ///
    /// The process has got a record lock on the file in session `by`.
    pub fn handle_lock_elsewhere(&mut self, inode: InodeId, by: SessionId, pid: u32, number: u64) {
        self.end_waits(inode, |wait| wait.pid == pid && wait.owner.owner == number && wait.owner.session != by);
    }

    fn end_waits(&mut self, inode: InodeId, is_it: impl Fn(&LockRequest) -> bool) {
        let Some(file) = self.files.get_mut(&(inode, LockKind::Record)) else { return };
        let waiters = std::mem::take(&mut file.waiters).into_iter();
        let (ended, kept): (VecDeque<_>, VecDeque<_>) = waiters.partition(is_it);
        file.waiters = kept;
        for request in &ended {
            self.forget_waiter(request);
            self.woken.extend(waiter_id(request).map(|waiter| Woken { waiter, outcome: LockOutcome::Moved }));
        }
        self.remove_if_empty(inode, LockKind::Record);
    }

    fn find_conflict(&self, request: &LockRequest, mode: LockMode) -> Option<HeldLock> {
        let file = self.files.get(&(request.inode, request.kind))?;
        let conflicts = file.others(request).filter_map(|(owner, held)| {
            let LockedRange { mode, range } = held.spans.find_conflict(request.range, mode)?;
            Some(HeldLock { inode: request.inode, kind: request.kind, owner, pid: held.pid, range, mode })
        });
        conflicts.min_by_key(|lock| (lock.range, lock.owner))
    }

    /// Returns every owner that conflicts with a request.
    fn blockers(&self, request: &LockRequest) -> Vec<LockOwner> {
        let (Some(mode), Some(file)) = (request.action.mode(), self.files.get(&(request.inode, request.kind))) else {
            return Vec::new();
        };
        file.others(request)
            .filter(|(_, held)| held.spans.find_conflict(request.range, mode).is_some())
            .map(|(owner, _)| owner)
            .collect()
    }

    /// Whether the conflicting owners wait, directly or indirectly, for the request's owner.
    fn closes_circle(&self, request: &LockRequest) -> bool {
        if request.kind != LockKind::Record {
            return false;
        }
        let mut rest = self.blockers(request);
        let mut seen = BTreeSet::new();
        while let Some(owner) = rest.pop() {
            if owner == request.owner {
                return true;
            }
            if !seen.insert(owner) {
                continue;
            }
            for inode in self.waiting.get(&owner).into_iter().flatten() {
                let file = self.files.get(&(*inode, LockKind::Record));
                let waits = file.into_iter().flat_map(|file| &file.waiters).filter(|wait| wait.owner == owner);
                rest.extend(waits.flat_map(|wait| self.blockers(wait)));
            }
        }
        false
    }

    fn block(&mut self, request: LockRequest, mode: LockMode, holder: HeldLock) -> LockOutcome {
        debug_assert_eq!(request.action.mode(), Some(mode));
        let Some(waiter) = waiter_id(&request) else { return LockOutcome::WouldBlock(holder) };
        if self.closes_circle(&request) {
            return LockOutcome::Deadlock;
        }
        if request.kind == LockKind::Record {
            self.waiting.entry(request.owner).or_default().push(request.inode);
        }
        self.tickets.insert(waiter, (request.inode, request.kind));
        *self.count_of.entry(waiter.session).or_insert(0) += 1;
        self.files.entry((request.inode, request.kind)).or_default().waiters.push_back(request);
        LockOutcome::Blocked
    }

    /// Changes the owner's locks.
    fn apply(&mut self, request: &LockRequest, mode: Option<LockMode>) {
        let key = (request.inode, request.kind);
        if mode.is_none() && !self.files.contains_key(&key) {
            return;
        }
        let file = self.files.entry(key).or_default();
        let held = file.owners.entry(request.owner).or_default();
        let before = held.spans.len();
        held.spans.set(request.range, mode);
        if mode.is_some() {
            held.pid = request.pid;
        }
        let after = held.spans.len();
        if held.spans.is_empty() {
            file.owners.remove(&request.owner);
        }
        let count_of = self.count_of.entry(request.owner.session).or_insert(0);
        *count_of = *count_of + after - before;
        if *count_of == 0 {
            self.count_of.remove(&request.owner.session);
        }
        self.remove_if_empty(request.inode, request.kind);
    }

    /// Grants free locks to waiting owners, in the order of their requests.
    fn settle(&mut self, inode: InodeId, kind: LockKind) {
        let mut at = 0;
        while let Some(request) = self.files.get(&(inode, kind)).and_then(|file| file.waiters.get(at)).copied() {
            let Some(mode) = request.action.mode() else { unreachable!("only locks are waited for") };
            let outcome = if self.find_conflict(&request, mode).is_none() {
                LockOutcome::Granted
            } else if self.closes_circle(&request) {
                LockOutcome::Deadlock
            } else {
                at += 1;
                continue;
            };
            if let Some(file) = self.files.get_mut(&(inode, kind)) {
                file.waiters.remove(at);
            }
            self.forget_waiter(&request);
            if outcome == LockOutcome::Granted {
                self.apply(&request, Some(mode));
                // An owner that has got a weaker lock may have unblocked an earlier waiter.
                at = 0;
            }
            self.woken.extend(waiter_id(&request).map(|waiter| Woken { waiter, outcome }));
        }
        self.remove_if_empty(inode, kind);
    }

    fn forget_waiter(&mut self, request: &LockRequest) {
        if let Some(waiter) = waiter_id(request) {
            self.tickets.remove(&waiter);
        }
        self.give_back(request.owner.session, 1);
        if let Some(inodes) = self.waiting.get_mut(&request.owner).filter(|_| request.kind == LockKind::Record) {
            if let Some(at) = inodes.iter().position(|inode| *inode == request.inode) {
                inodes.swap_remove(at);
            }
            if inodes.is_empty() {
                self.waiting.remove(&request.owner);
            }
        }
    }

    fn give_back(&mut self, session: SessionId, count: usize) {
        if let Some(count_of) = self.count_of.get_mut(&session) {
            *count_of -= count;
            if *count_of == 0 {
                self.count_of.remove(&session);
            }
        }
    }

    fn handle_end(&mut self, kind: LockKind, is_ended: impl Fn(LockOwner) -> bool) {
        let keys: Vec<_> = self.files.keys().filter(|key| key.1 == kind).copied().collect();
        let mut changed = Vec::new();
        for key in keys {
            let Some(file) = self.files.get_mut(&key) else { continue };
            let waiters = std::mem::take(&mut file.waiters).into_iter();
            let (gone, kept): (VecDeque<_>, VecDeque<_>) = waiters.partition(|wait| is_ended(wait.owner));
            file.waiters = kept;
            let before = file.owners.len();
            let mut freed = Vec::new();
            file.owners.retain(|owner, held| {
                let is_kept = !is_ended(*owner);
                if !is_kept {
                    freed.push((owner.session, held.spans.len()));
                }
                is_kept
            });
            if file.owners.len() != before || !gone.is_empty() {
                changed.push(key);
            }
            for request in &gone {
                self.forget_waiter(request);
            }
            for (session, count) in freed {
                self.give_back(session, count);
            }
        }
        // Settle only now, so that no owner that also ends is granted a lock or blocks one.
        for (inode, kind) in changed {
            self.settle(inode, kind);
        }
    }

    fn remove_if_empty(&mut self, inode: InodeId, kind: LockKind) {
        let key = (inode, kind);
        if self.files.get(&key).is_some_and(|file| file.owners.is_empty() && file.waiters.is_empty()) {
            self.files.remove(&key);
        }
    }
}

fn waiter_id(request: &LockRequest) -> Option<WaiterId> {
    request.wait.map(|ticket| WaiterId { session: request.owner.session, ticket })
}
