//! File locks: the lock table decides, and requests wait for it.
//!
//! A lock needs an open file, as in POSIX. A session that is not root's asks for locks only on inodes that it has open
//! and may access: to read for a read lock, to write for a write lock, and either for the rest.
//!
//! A restart of SharedFS forgets the table. The record locks of processes it finds again: it has noted them where no
//! session can write ([`crate::sessions::noted_locks`]), so no claim takes a lock from a process that has it. Mounts
//! have all other locks. They are root's, so SharedFS believes them when they first of all ask for these locks again.
//! Until every mount that had such locks has done so, SharedFS grants no lock that a mount may have held.
//!
//! SharedFS may delegate a file's record locks to a process. If another session asks about that file, SharedFS takes
//! the locks back into the table, from the process's control page.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use ashlar_lease::locks::{
    DelegationSlots, Delegations, HeldLock, LockOutcome, LockOwner, LockRequest, LockTable, WaiterId,
};
use ashlar_types::{Errno, InodeId, LockAction, LockKind, LockedRange, SessionId};
use ashlar_wire::{LOCK_OWNER_PROCESS, LOCK_RANGES_MAX, LOCK_SLOTS, LockSlot, LockSlotState, Reply, SessionKind};

use crate::blame::Blame;
use crate::effects::{NodeEffect, PendingEffects};
use crate::sessions::identity::ProcessTable;
use crate::sessions::session::ServedSession;
use crate::sessions::session_table::SessionTable;

/// How long a restarted SharedFS waits for sessions that do not return.
///
/// They may be stopped.
const GRACE_MAX: Duration = Duration::from_secs(5);
/// The pause after which a returned session has asked for all its locks.
///
/// It asks for them one after the other.
const GRACE_PAUSE: Duration = Duration::from_millis(200);

/// How long cancellations that find no wait are remembered, and how many.
const EARLY_MAX: Duration = Duration::from_secs(1);
const EARLY_COUNT_MAX: usize = 1024;

/// File locks, and the requests that wait for them.
#[derive(Debug, Default)]
pub struct Locking {
    table: LockTable,
    delegations: Delegations,
    /// Waits that have ended, until their requests are advanced.
    ended: BTreeMap<WaiterId, LockOutcome>,
    /// Whether there are ended waits whose requests were not woken yet.
    has_unreported: bool,
    /// Requests that wait.
    waiting: BTreeSet<WaiterId>,
    /// Cancellations that arrived before their wait, on another connection.
    early_cancels: VecDeque<(WaiterId, Duration)>,
    grace: Option<Grace>,
}

/// A request to set a lock that the session may make.
#[derive(Clone, Copy, Debug)]
pub struct CheckedLock {
    /// The request, as the table takes it.
    pub(super) request: LockRequest,
    pub(super) slot: Option<LockSlot>,
    /// The session had it before a restart, and is believed.
    pub(super) is_repeated: bool,
    /// It waits until all sessions have asked again for their locks.
    pub awaits_grace: bool,
}

/// How an attempt to set a lock ended.
#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "it is returned once, and not kept")]
pub enum LockAttempt {
    /// The request is answered.
    Answered(Result<Reply, Errno>),
    /// The request waits for other locks to end.
    Waits(WaiterId),
}

/// The sessions that lock, and what is known of their processes.
#[derive(Clone, Copy)]
pub struct LockHolders<'a> {
    /// The sessions.
    pub sessions: &'a SessionTable,
    /// Their processes.
    pub processes: &'a dyn ProcessTable,
}

#[derive(Debug)]
struct Grace {
    until: Duration,
    expected: BTreeSet<SessionId>,
    last: Duration,
}

impl Locking {
    /// Records that a running session may have held locks before the restart.
    pub fn expect_reclaim(&mut self, session: SessionId, now: Duration) {
        let grace =
            self.grace.get_or_insert_with(|| Grace { until: now + GRACE_MAX, expected: BTreeSet::new(), last: now });
        grace.expected.insert(session);
    }

    /// Records that a session has returned, and asks for a lock that it had.
    pub fn record_reclaim(&mut self, now: Duration) {
        if let Some(grace) = &mut self.grace {
            grace.last = now;
        }
    }

    /// Records that a session has asked for all locks that it had.
    pub fn record_return(&mut self, session: SessionId, now: Duration) {
        self.record_reclaim(now);
        if let Some(grace) = &mut self.grace {
            grace.expected.remove(&session);
        }
    }

    /// Frees the locks of a session that has ended.
    pub fn end_session(&mut self, session: SessionId) {
        self.delegations.handle_session_end(session);
        self.table.handle_session_end(session);
        self.ended.retain(|waiter, _| waiter.session != session);
        self.waiting.retain(|waiter| waiter.session != session);
        self.early_cancels.retain(|(waiter, _)| waiter.session != session);
        if let Some(grace) = &mut self.grace {
            grace.expected.remove(&session);
        }
        self.collect_woken();
    }

    /// Returns until when new locks must wait, if they must.
    pub fn grace_until(&mut self, now: Duration) -> Option<Duration> {
        let grace = self.grace.as_ref()?;
        let settled = grace.last + GRACE_PAUSE;
        let until = if grace.expected.is_empty() { settled.min(grace.until) } else { grace.until };
        if now >= until {
            self.grace = None;
            return None;
        }
        Some(until.min(now + GRACE_PAUSE))
    }

    /// Returns whether a wait that is about to begin was cancelled already.
    fn is_cancelled(&mut self, waiter: WaiterId, now: Duration) -> bool {
        self.early_cancels.retain(|(_, at)| now < *at + EARLY_MAX);
        let found = self.early_cancels.iter().position(|(early, _)| *early == waiter);
        found.and_then(|at| self.early_cancels.remove(at)).is_some()
    }

    /// Takes up the record locks of running processes after the restart.
    ///
    /// Files that an earlier SharedFS noted as delegated come first: these are the session's alone, and its control
    /// page has the locks. The locks that the earlier SharedFS had in its table come second.
    pub fn take_up(&mut self, ids: &[SessionId], sessions: &SessionTable) {
        let is_process = |session: &&ServedSession| session.identity.kind == SessionKind::Process;
        let processes: Vec<_> = ids.iter().filter_map(|id| sessions.get(id)).filter(is_process).collect();
        for session in &processes {
            let _blame = Blame::for_request(session);
            self.take_up_delegated(session, sessions);
        }
        for session in &processes {
            let _blame = Blame::for_request(session);
            for (inode, ranges) in session.noted_locks.all() {
                self.restore(session, (inode, 0), false, &ranges, sessions);
            }
        }
    }

    fn take_up_delegated(&mut self, session: &ServedSession, sessions: &SessionTable) {
        let claimed = session.control.claimed_lock_slots();
        for slot in 0..LOCK_SLOTS {
            let noted = session.page.delegated(slot);
            let found =
                claimed.iter().find(|(number, inode, ..)| *number == slot && noted.is_none_or(|of| of == *inode));
            match (noted, found) {
                (Some(inode), Some((.., LockSlotState::Delegated, _))) => {
                    self.restore(session, (inode, slot), true, &[], sessions);
                }
                (Some(inode), found) => {
                    // SharedFS was killed while it took them back, or the session gave the file up.
                    let ranges = found.into_iter().flat_map(|(.., ranges)| ranges).copied();
                    session.noted_locks.set(inode, &ranges.collect::<Vec<_>>());
                    session.page.set_delegated(slot, None);
                }
                (None, Some((_, inode, LockSlotState::Delegated, _))) => {
                    // No SharedFS has delegated that.
                    let _ = session.control.recall_locks(slot, *inode);
                }
                (None, _) => {}
            }
        }
    }

    fn restore(
        &mut self,
        session: &ServedSession,
        (inode, slot): (InodeId, u32),
        is_delegated: bool,
        ranges: &[LockedRange],
        sessions: &SessionTable,
    ) {
        let claim = (inode, process_owner(session.id), session.identity.process.pid, slot);
        let (table, pages) = (&mut self.table, &mut LockSlotPages { sessions, word: 0 });
        self.delegations.restore_claim(claim, is_delegated, ranges, table, pages);
    }

    /// Notes the record locks that a process has on a file, for the next SharedFS.
    fn note_locks(&self, request: &LockRequest, sessions: &SessionTable) {
        if !is_own(request) {
            return;
        }
        if let Some(session) = sessions.get(&request.owner.session) {
            session.noted_locks.set(request.inode, &self.table.records(request.inode, request.owner));
        }
    }

    /// Takes a process's own locks on a file back into the table, if they are delegated to it.
    fn recall_own(&mut self, inode: InodeId, owner: LockOwner, sessions: &SessionTable) {
        if self.delegations.is_delegated_to(inode, owner) {
            self.delegations.recall(inode, &mut self.table, &mut LockSlotPages { sessions, word: 0 });
        }
    }

    /// Prepares for a request about record locks on a file.
    ///
    /// Delegated locks return to the table, and dead processes lose locks that conflict.
    fn prepare_request(
        &mut self,
        request: &LockRequest,
        LockHolders { sessions, processes }: LockHolders<'_>,
        now: Duration,
    ) {
        if request.kind == LockKind::Record {
            let now_ms = now.as_millis() as u64;
            let pages = &mut LockSlotPages { sessions, word: 0 };
            self.delegations.handle_request(now_ms, request.inode, request.owner, &mut self.table, pages);
        }
        // A process that has ended holds no lock from the moment at which other processes can know of its end.
        while let Some(holder) = self.table.query(request).map(|held| held.owner.session) {
            // A holder that SharedFS does not know any more has ended as well.
            let is_gone = |session: &ServedSession| {
                session.identity.kind == SessionKind::Process && processes.is_gone(&session.identity.process)
            };
            if sessions.get(&holder).is_some_and(|session| !is_gone(session)) {
                return;
            }
            self.end_session(holder);
        }
    }

    /// Returns whether the session's process must ask on a mount.
    ///
    /// It has locks on the file there.
    fn is_of_mount(&self, request: &LockRequest) -> bool {
        is_own(request) && self.table.is_held_elsewhere(request.inode, request.owner, request.pid)
    }

    /// Collects waits that have ended.
    fn collect_woken(&mut self) {
        while let Some(woken) = self.table.poll_woken() {
            self.ended.insert(woken.waiter, woken.outcome);
            self.has_unreported = true;
        }
    }

    /// Asks the shell to advance the requests whose waits have ended.
    pub fn wake_waiters(&mut self, effects: &mut PendingEffects) {
        self.collect_woken();
        if std::mem::take(&mut self.has_unreported) {
            effects.push(NodeEffect::WakeLocks);
        }
    }

    /// Follows up on a granted lock.
    ///
    /// If it is a mount's, its process no longer waits on that file as a session: it would wait for itself.
    fn handle_granted(&mut self, request: &LockRequest) {
        if request.kind == LockKind::Record && request.action != LockAction::Unlock && !is_own(request) {
            let LockRequest { inode, owner, pid, .. } = *request;
            self.table.handle_lock_elsewhere(inode, owner.session, pid, LOCK_OWNER_PROCESS);
        }
    }

    /// Sets or removes a lock, or begins to wait for it.
    pub fn try_lock(
        &mut self,
        checked: &CheckedLock,
        holders: LockHolders<'_>,
        effects: &mut PendingEffects,
        now: Duration,
    ) -> LockAttempt {
        let CheckedLock { request, slot, .. } = *checked;
        if !self.prepare(&request, holders, effects, now) {
            return LockAttempt::Answered(Ok(Reply::LockedOnMount));
        }
        let sessions = holders.sessions;
        let outcome = self.table.handle_lock(request);
        let delegate = |slot: LockSlot| {
            let wanted = (request.inode, request.owner, request.pid, slot.number);
            let pages = &mut LockSlotPages { sessions, word: slot.word };
            self.delegations.delegate(now.as_millis() as u64, wanted, &mut self.table, pages)
        };
        let may_delegate = outcome == LockOutcome::Granted && is_own(&request);
        let is_delegated = slot.filter(|_| may_delegate).is_some_and(delegate);
        if outcome == LockOutcome::Granted {
            self.handle_granted(&request);
            if !is_delegated {
                self.note_locks(&request, sessions);
            }
        }
        self.wake_waiters(effects);
        if is_delegated {
            return LockAttempt::Answered(Ok(Reply::Delegated));
        }
        match (outcome, request.wait) {
            (LockOutcome::Blocked, Some(ticket)) => {
                let waiter = WaiterId { session: request.owner.session, ticket };
                if self.is_cancelled(waiter, now) {
                    self.table.handle_cancel(waiter);
                    return LockAttempt::Answered(Err(Errno::EINTR));
                }
                self.waiting.insert(waiter);
                LockAttempt::Waits(waiter)
            }
            (outcome, _) => LockAttempt::Answered(reply_for(outcome)),
        }
    }

    /// Returns the answer to a request that waits for a lock; `None` if it must wait on.
    pub fn poll_lock(
        &mut self,
        checked: &CheckedLock,
        waiter: WaiterId,
        sessions: &SessionTable,
        effects: &mut PendingEffects,
    ) -> Option<Result<Reply, Errno>> {
        if let Some(outcome) = self.ended.remove(&waiter) {
            self.waiting.remove(&waiter);
            if outcome == LockOutcome::Granted {
                self.handle_granted(&checked.request);
                self.note_locks(&checked.request, sessions);
                self.wake_waiters(effects);
            }
            return Some(reply_for(outcome));
        }
        if let Err(errno) = sessions.lockable(waiter.session) {
            return Some(Err(errno));
        }
        if !self.waiting.contains(&waiter) {
            return Some(Err(Errno::EINTR));
        }
        None
    }

    /// Gives up a wait whose peer has hung up: it would hold a lock without knowing.
    ///
    /// Returns whether the wait has ended by that. A wait that has just got its lock keeps it.
    pub fn abandon_wait(&mut self, waiter: WaiterId) -> bool {
        let is_cancelled = self.table.handle_cancel(waiter);
        if is_cancelled {
            self.waiting.remove(&waiter);
        }
        is_cancelled
    }

    /// Prepares for a request; returns `false` if the process must ask on a mount.
    fn prepare(
        &mut self,
        request: &LockRequest,
        holders: LockHolders<'_>,
        effects: &mut PendingEffects,
        now: Duration,
    ) -> bool {
        self.prepare_request(request, holders, now);
        self.wake_waiters(effects);
        !self.is_of_mount(request)
    }

    /// Handles a lock that a session has had before a restart and asks for again.
    ///
    /// A process's record locks move out of the mount's way. The mount asks for them again in the process's name. They
    /// may have moved to the mount just before the restart, and still stand in the process's control page.
    pub fn handle_reclaim(&mut self, checked: &CheckedLock, sessions: &SessionTable, now: Duration) {
        let CheckedLock { request, is_repeated, .. } = checked;
        if !is_repeated {
            return;
        }
        self.record_reclaim(now);
        if request.kind != LockKind::Record || is_own(request) {
            return;
        }
        let of_process = sessions.values().filter(|session| {
            session.identity.kind == SessionKind::Process && session.identity.process.pid == request.pid
        });
        of_process.for_each(|session| self.table.handle_move(request.inode, process_owner(session.id)));
    }

    /// Ends a wait. A wait that has just got its lock keeps it.
    pub fn cancel_wait(&mut self, id: SessionId, ticket: u64, effects: &mut PendingEffects, now: Duration) -> Reply {
        let waiter = WaiterId { session: id, ticket };
        if self.table.handle_cancel(waiter) {
            self.waiting.remove(&waiter);
        } else if !self.waiting.contains(&waiter) && self.early_cancels.len() < EARLY_COUNT_MAX {
            self.early_cancels.push_back((waiter, now));
        }
        self.collect_woken();
        self.has_unreported = false;
        effects.push(NodeEffect::WakeLocks);
        Reply::Done
    }

    /// Returns the lock that conflicts with the requested one.
    pub fn query_lock(
        &mut self,
        checked: &CheckedLock,
        holders: LockHolders<'_>,
        effects: &mut PendingEffects,
        now: Duration,
    ) -> Reply {
        let request = checked.request;
        if !self.prepare(&request, holders, effects, now) {
            return Reply::LockedOnMount;
        }
        let conflict = self.table.query(&request);
        let conflict = conflict.map(|HeldLock { mode, range, pid, .. }| (LockedRange { mode, range }, pid));
        Reply::Conflict(conflict)
    }

    /// Takes a process's own record locks on a file back, and returns them.
    ///
    /// They return to the table. If `moves`, they may move to a mount from then on.
    pub fn yield_locks(
        &mut self,
        id: SessionId,
        (inode, moves): (InodeId, bool),
        sessions: &SessionTable,
        effects: &mut PendingEffects,
    ) -> Reply {
        self.recall_own(inode, process_owner(id), sessions);
        let locks = self.table.records(inode, process_owner(id));
        if moves {
            self.table.handle_move(inode, process_owner(id));
            self.wake_waiters(effects);
        }
        Reply::Locks(locks)
    }

    /// Removes an owner's locks on a file.
    pub fn release_locks(
        &mut self,
        id: SessionId,
        (inode, owner, lock_kind): (InodeId, u64, LockKind),
        sessions: &SessionTable,
        effects: &mut PendingEffects,
    ) -> Reply {
        let is_of_process = lock_kind == LockKind::Record && owner == LOCK_OWNER_PROCESS;
        if is_of_process {
            self.recall_own(inode, process_owner(id), sessions);
        }
        self.table.handle_close(LockOwner { session: id, owner }, inode, lock_kind);
        if let Some(session) = sessions.get(&id).filter(|_| is_of_process) {
            session.noted_locks.set(inode, &[]);
        }
        self.wake_waiters(effects);
        Reply::Done
    }
}

/// The lock slots in sessions' control pages.
struct LockSlotPages<'a> {
    sessions: &'a SessionTable,
    /// The word of the slot that may be delegated.
    word: u64,
}

impl DelegationSlots for LockSlotPages<'_> {
    fn delegate(&mut self, to: SessionId, slot: u32, inode: InodeId, locks: &[LockedRange]) -> bool {
        // If the slot is almost full, the next lock would recall it.
        if locks.len() > LOCK_RANGES_MAX / 2 {
            return false;
        }
        let Some(session) = self.sessions.get(&to) else { return false };
        let before = session.page.delegated(slot);
        session.page.set_delegated(slot, Some(inode));
        let is_delegated = session.control.delegate_locks(LockSlot { number: slot, word: self.word }, inode, locks);
        if is_delegated {
            // The slot is the truth from here on.
            session.noted_locks.set(inode, &[]);
        } else {
            // A restart would believe the note.
            session.page.set_delegated(slot, before);
        }
        is_delegated
    }

    fn recall(&mut self, from: SessionId, slot: u32, inode: InodeId) -> Vec<LockedRange> {
        let Some(session) = self.sessions.get(&from) else { return Vec::new() };
        let locks = session.control.recall_locks(slot, inode);
        session.noted_locks.set(inode, &locks);
        session.page.set_delegated(slot, None);
        locks
    }
}

/// Returns the owner of a process's own record locks.
fn process_owner(session: SessionId) -> LockOwner {
    LockOwner { session, owner: LOCK_OWNER_PROCESS }
}

/// Returns whether a request is about a process's own record locks.
pub fn is_own(request: &LockRequest) -> bool {
    request.kind == LockKind::Record && request.owner.owner == LOCK_OWNER_PROCESS
}

fn reply_for(outcome: LockOutcome) -> Result<Reply, Errno> {
    match outcome {
        LockOutcome::Granted => Ok(Reply::Done),
        LockOutcome::Blocked | LockOutcome::WouldBlock(_) => Err(Errno::EAGAIN),
        LockOutcome::Deadlock => Err(Errno::EDEADLK),
        LockOutcome::Full => Err(Errno::ENOLCK),
        LockOutcome::Moved => Ok(Reply::LockedOnMount),
    }
}
