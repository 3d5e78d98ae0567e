//! File locks: the lock table decides, and the threads of connections wait.
//!
//! A lock needs an open file, as in POSIX. A session that is not root's asks for locks only on inodes that it has open
//! and may access: to read for a read lock, to write for a write lock, and either for the rest.
//!
//! A restart of SharedFS forgets the table. The record locks of processes it finds again: it has noted them where no
//! session can write ([`crate::noted_locks`]), so no claim takes a lock from a process that has it. Mounts have all
//! other locks. They are root's, so SharedFS believes them when they first of all ask for these locks again. Until
//! every mount that had such locks has done so, SharedFS grants no lock that a mount may have held.
//!
//! SharedFS may delegate a file's record locks to a process. If another session asks about that file, SharedFS takes
//! the locks back into the table, from the process's control page.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use ashlar_lease::locks::{
    DelegationSlots, Delegations, HeldLock, LockOutcome, LockOwner, LockRequest, LockTable, WaiterId,
};
use ashlar_types::{Access, Errno, InodeId, LockAction, LockKind, LockedRange, SessionId};
use ashlar_wire::{
    LOCK_OWNER_PROCESS, LOCK_RANGES_MAX, LOCK_SLOTS, LockSlot, LockSlotState, Reply, Request, SessionKind,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::grant::{boot_time, report_store_error};
use crate::materialise;
use crate::panics::Blame;
use crate::session::ServedSession;
use crate::session_page;
use crate::shared_state::{SharedState, StateGuard};
use crate::state::State;

/// How long a restarted SharedFS waits for sessions that do not return.
///
/// They may be stopped.
const GRACE_MAX: Duration = Duration::from_secs(5);
/// The pause after which a returned session has asked for all its locks.
///
/// It asks for them one after the other.
const GRACE_PAUSE: Duration = Duration::from_millis(200);

/// How often a waiting thread checks whether its peer has hung up.
const HANGUP_CHECK_INTERVAL: Duration = Duration::from_millis(500);

/// How long cancellations that find no wait are remembered, and how many.
const EARLY_MAX: Duration = Duration::from_secs(1);
const EARLY_COUNT_MAX: usize = 1024;

/// File locks, and the threads that wait for them.
#[derive(Debug, Default)]
pub struct Locking {
    table: LockTable,
    delegations: Delegations,
    /// Waits that have ended, until their threads notice.
    ended: BTreeMap<WaiterId, LockOutcome>,
    /// Whether there are ended waits whose threads were not woken yet.
    has_unreported: bool,
    /// Threads that wait.
    waiting: BTreeSet<WaiterId>,
    /// Cancellations that arrived before their wait, on another connection.
    early_cancels: VecDeque<(WaiterId, Instant)>,
    grace: Option<Grace>,
}

#[derive(Debug)]
struct Grace {
    until: Instant,
    expected: BTreeSet<SessionId>,
    last: Instant,
}

impl Locking {
    /// Records that a running session may have held locks before the restart.
    pub fn expect_reclaim(&mut self, session: SessionId) {
        let now = Instant::now();
        let grace =
            self.grace.get_or_insert_with(|| Grace { until: now + GRACE_MAX, expected: BTreeSet::new(), last: now });
        grace.expected.insert(session);
    }

    /// Records that a session has returned, and asks for a lock that it had.
    pub fn record_reclaim(&mut self) {
        if let Some(grace) = &mut self.grace {
            grace.last = Instant::now();
        }
    }

    /// Records that a session has asked for all locks that it had.
    pub fn record_return(&mut self, session: SessionId) {
        self.record_reclaim();
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
    fn grace_until(&mut self) -> Option<Instant> {
        let grace = self.grace.as_ref()?;
        let settled = grace.last + GRACE_PAUSE;
        let until = if grace.expected.is_empty() { settled.min(grace.until) } else { grace.until };
        if Instant::now() >= until {
            self.grace = None;
            return None;
        }
        Some(until.min(Instant::now() + GRACE_PAUSE))
    }

    /// Returns whether a wait that is about to begin was cancelled already.
    fn is_cancelled(&mut self, waiter: WaiterId) -> bool {
        self.early_cancels.retain(|(_, at)| at.elapsed() < EARLY_MAX);
        let found = self.early_cancels.iter().position(|(early, _)| *early == waiter);
        found.and_then(|at| self.early_cancels.remove(at)).is_some()
    }

    /// Takes up the record locks of running processes after the restart.
    ///
    /// Files that an earlier SharedFS noted as delegated come first: these are the session's alone, and its control
    /// page has the locks. The locks that the earlier SharedFS had in its table come second.
    pub fn take_up(&mut self, ids: &[SessionId], sessions: &BTreeMap<SessionId, ServedSession>) {
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

    fn take_up_delegated(&mut self, session: &ServedSession, sessions: &BTreeMap<SessionId, ServedSession>) {
        let claimed = session.control.claimed_lock_slots();
        for slot in 0..LOCK_SLOTS {
            let noted = session_page::delegated(&*session.page, slot);
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
                    // The page has a word for each lock slot.
                    let _ = session_page::set_delegated(&*session.page, slot, None);
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
        sessions: &BTreeMap<SessionId, ServedSession>,
    ) {
        let claim = (inode, process_owner(session.id), session.identity.process.pid, slot);
        let (table, pages) = (&mut self.table, &mut LockSlotPages { sessions, word: 0 });
        self.delegations.restore_claim(claim, is_delegated, ranges, table, pages);
    }

    /// Notes the record locks that a process has on a file, for the next SharedFS.
    fn note_locks(&self, request: &LockRequest, sessions: &BTreeMap<SessionId, ServedSession>) {
        if !is_own(request) {
            return;
        }
        if let Some(session) = sessions.get(&request.owner.session) {
            session.noted_locks.set(request.inode, &self.table.records(request.inode, request.owner));
        }
    }

    /// Takes a process's own locks on a file back into the table, if they are delegated to it.
    fn recall_own(&mut self, inode: InodeId, owner: LockOwner, sessions: &BTreeMap<SessionId, ServedSession>) {
        if self.delegations.is_delegated_to(inode, owner) {
            self.delegations.recall(inode, &mut self.table, &mut LockSlotPages { sessions, word: 0 });
        }
    }

    /// Prepares for a request about record locks on a file.
    ///
    /// Delegated locks return to the table, and dead processes lose locks that conflict.
    fn prepare_request(&mut self, request: &LockRequest, sessions: &BTreeMap<SessionId, ServedSession>) {
        if request.kind == LockKind::Record {
            let now_ms = boot_time().as_millis() as u64;
            let pages = &mut LockSlotPages { sessions, word: 0 };
            self.delegations.handle_request(now_ms, request.inode, request.owner, &mut self.table, pages);
        }
        // A process that has ended holds no lock from the moment at which other processes can know of its end.
        while let Some(holder) = self.table.query(request).map(|held| held.owner.session) {
            // A holder that SharedFS does not know any more has ended as well.
            let is_gone = |session: &ServedSession| {
                session.identity.kind == SessionKind::Process && session.identity.process.is_gone()
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

    /// Prepares for a request; returns `false` if the process must ask on a mount.
    fn is_ready_for(
        &mut self,
        request: &LockRequest,
        sessions: &BTreeMap<SessionId, ServedSession>,
        shared: &SharedState,
    ) -> bool {
        self.prepare_request(request, sessions);
        self.wake_waiters(shared);
        !self.is_of_mount(request)
    }

    /// Collects waits that have ended.
    fn collect_woken(&mut self) {
        while let Some(woken) = self.table.poll_woken() {
            self.ended.insert(woken.waiter, woken.outcome);
            self.has_unreported = true;
        }
    }

    /// Wakes the threads whose waits have ended.
    fn wake_waiters(&mut self, shared: &SharedState) {
        self.collect_woken();
        if std::mem::take(&mut self.has_unreported) {
            shared.locks_changed.notify_all();
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
}

/// The lock slots in sessions' control pages.
struct LockSlotPages<'a> {
    sessions: &'a BTreeMap<SessionId, ServedSession>,
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
        let before = session_page::delegated(&*session.page, slot);
        let is_noted = session_page::set_delegated(&*session.page, slot, Some(inode)).is_ok();
        let is_delegated =
            is_noted && session.control.delegate_locks(LockSlot { number: slot, word: self.word }, inode, locks);
        if is_delegated {
            // The slot is the truth from here on.
            session.noted_locks.set(inode, &[]);
        } else {
            // A restart would believe the note. The page has a word for each lock slot.
            let _ = session_page::set_delegated(&*session.page, slot, before);
        }
        is_delegated
    }

    fn recall(&mut self, from: SessionId, slot: u32, inode: InodeId) -> Vec<LockedRange> {
        let Some(session) = self.sessions.get(&from) else { return Vec::new() };
        let locks = session.control.recall_locks(slot, inode);
        session.noted_locks.set(inode, &locks);
        // The page has a word for each lock slot, and other slots are refused.
        let _ = session_page::set_delegated(&*session.page, slot, None);
        locks
    }
}

/// Returns the owner of a process's own record locks.
fn process_owner(session: SessionId) -> LockOwner {
    LockOwner { session, owner: LOCK_OWNER_PROCESS }
}

fn is_own(request: &LockRequest) -> bool {
    request.kind == LockKind::Record && request.owner.owner == LOCK_OWNER_PROCESS
}

fn decode_lock(session: SessionId, request: &Request) -> Option<LockRequest> {
    let (inode, kind, owner, pid, range, action, wait) = match *request {
        Request::Lock { inode, kind, owner, pid, range, action, wait, .. } => {
            (inode, kind, owner, pid, range, action, wait)
        }
        Request::QueryLock { inode, kind, owner, range, action } => (inode, kind, owner, 0, range, action, None),
        _ => return None,
    };
    let owner = LockOwner { session, owner };
    range.is_valid().then_some(LockRequest { inode, kind, owner, pid, range, action, wait })
}

/// Returns a request as the table takes it.
///
/// A process's locks bear the number by which SharedFS knows it, whatever the process says.
fn lock_request_of(state: &State, id: SessionId, request: &Request) -> Result<LockRequest, Errno> {
    let mut asked = decode_lock(id, request).ok_or(Errno::EINVAL)?;
    let session = live_session(state, id)?;
    if session.identity.kind == SessionKind::Process {
        asked.pid = session.identity.process.pid;
    }
    Ok(asked)
}

/// Locks the state to serve a request about locks on an inode.
///
/// The session may just have made the inode: then its log is applied first.
fn lock_state_for(shared: &SharedState, id: SessionId, inode: InodeId) -> Result<StateGuard<'_>, Errno> {
    let state = shared.lock();
    let is_there = state.store.inode(inode).map_err(|error| report_store_error(&error))?.is_some();
    Ok(if is_there { state } else { shared.apply_settled(state, id) })
}

/// Fails unless the session may have such a lock on the inode.
///
/// It must have the inode open, in LibFS or by a descriptor of a mount. Then it needs no right to the directories that
/// lead there. The super-user's sessions are trusted: a mount asks for what the kernel has checked.
///
/// # Errors
/// `ESTALE` if the inode does not exist; `EACCES` if the session does not have it open with the right to access it so.
fn check_lock_rights(state: &State, id: SessionId, request: &LockRequest, is_query: bool) -> Result<(), Errno> {
    let session = live_session(state, id)?;
    let found = state.store.inode(request.inode).map_err(|error| report_store_error(&error))?.ok_or(Errno::ESTALE)?;
    if !session.needs_validation() {
        return Ok(());
    }
    let is_mounts =
        |other: &ServedSession| other.identity.kind == SessionKind::Mount && other.control.has_open(request.inode);
    if !state.has_opened(session, request.inode) && !state.sessions.values().any(is_mounts) {
        return Err(Errno::EACCES);
    }
    let held = materialise::held_access(state, session, (request.inode, &found))?;
    let is_allowed = match request.action {
        LockAction::Read if !is_query && request.kind == LockKind::Record => held.contains(Access::READ),
        LockAction::Write if !is_query && request.kind == LockKind::Record => held.contains(Access::WRITE),
        _ => held != Access::NONE,
    };
    if is_allowed { Ok(()) } else { Err(Errno::EACCES) }
}

/// Returns the session, if it may have locks.
fn live_session(state: &State, id: SessionId) -> Result<&ServedSession, Errno> {
    state.live(id).filter(|session| !session.is_ending).ok_or(Errno::EIO)
}

/// Sets or removes a lock, and waits for it if the session asks for that.
///
/// It waits as long as the peer of the socket is there.
pub fn set_lock(
    shared: &SharedState,
    id: SessionId,
    request: &Request,
    reclaims: bool,
    socket: BorrowedFd<'_>,
) -> Result<Reply, Errno> {
    let slot = if let Request::Lock { slot, .. } = request { *slot } else { None };
    if slot.is_some_and(|slot| slot.number >= LOCK_SLOTS) {
        return Err(Errno::EINVAL);
    }
    let &Request::Lock { inode, .. } = request else { return Err(Errno::EINVAL) };
    let mut state = lock_state_for(shared, id, inode)?;
    let request = lock_request_of(&state, id, request)?;
    if request.action != LockAction::Unlock {
        check_lock_rights(&state, id, &request, false)?;
    }
    let session = live_session(&state, id)?;
    let is_trusted = session.credentials.is_privileged();
    if is_trusted && request.action != LockAction::Unlock && !is_own(&request) {
        session_page::set_other_locks(&*session.page).map_err(|_| Errno::EIO)?;
    }
    if reclaims && is_trusted {
        state.locking.record_reclaim();
        take_over_moved(&mut state, &request);
    } else if request.action != LockAction::Unlock {
        await_grace(shared, &mut state, id)?;
    }
    let State { locking, sessions, .. } = &mut **state;
    if !locking.is_ready_for(&request, sessions, shared) {
        return Ok(Reply::LockedOnMount);
    }
    let outcome = locking.table.handle_lock(request);
    let delegate = |slot: LockSlot| {
        let wanted = (request.inode, request.owner, request.pid, slot.number);
        let pages = &mut LockSlotPages { sessions, word: slot.word };
        locking.delegations.delegate(boot_time().as_millis() as u64, wanted, &mut locking.table, pages)
    };
    let may_delegate = outcome == LockOutcome::Granted && is_own(&request);
    let is_delegated = slot.filter(|_| may_delegate).is_some_and(delegate);
    if outcome == LockOutcome::Granted {
        locking.handle_granted(&request);
        if !is_delegated {
            locking.note_locks(&request, sessions);
        }
    }
    locking.wake_waiters(shared);
    if is_delegated {
        return Ok(Reply::Delegated);
    }
    match (outcome, request.wait) {
        (LockOutcome::Blocked, Some(ticket)) => {
            let outcome = wait_for_lock(shared, &mut state, WaiterId { session: id, ticket }, socket)?;
            if outcome == LockOutcome::Granted {
                let State { locking, sessions, .. } = &mut **state;
                locking.handle_granted(&request);
                locking.note_locks(&request, sessions);
                locking.wake_waiters(shared);
            }
            reply_for(outcome)
        }
        (outcome, _) => reply_for(outcome),
    }
}

/// Moves a process's record locks out of the mount's way.
///
/// The mount asks for them again in the process's name. They may have moved to the mount just before the restart, and
/// still stand in the process's control page.
fn take_over_moved(state: &mut State, request: &LockRequest) {
    if request.kind != LockKind::Record || is_own(request) {
        return;
    }
    let State { locking, sessions, .. } = state;
    let of_process = sessions
        .values()
        .filter(|session| session.identity.kind == SessionKind::Process && session.identity.process.pid == request.pid);
    of_process.for_each(|session| locking.table.handle_move(request.inode, process_owner(session.id)));
}

/// Waits until all sessions have asked again for their locks.
///
/// These are the sessions that may have held locks before a restart. The asking session may have ended by then.
fn await_grace(shared: &SharedState, state: &mut StateGuard<'_>, id: SessionId) -> Result<(), Errno> {
    while let Some(until) = state.locking.grace_until() {
        if state.ending {
            return Err(SharedState::ENDING);
        }
        shared.locks_changed.wait_until(state, until);
    }
    live_session(state, id).map(drop)
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

/// Returns whether the peer has closed its end, so that no answer reaches it.
fn is_hung_up(socket: BorrowedFd<'_>) -> bool {
    let mut fds = [PollFd::from_borrowed_fd(socket, PollFlags::empty())];
    let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut fds, Some(&at_once)).is_ok_and(|count| count > 0)
        && fds[0].revents().intersects(PollFlags::HUP | PollFlags::ERR)
}

fn wait_for_lock(
    shared: &SharedState,
    state: &mut StateGuard<'_>,
    waiter: WaiterId,
    socket: BorrowedFd<'_>,
) -> Result<LockOutcome, Errno> {
    if state.locking.is_cancelled(waiter) {
        state.locking.table.handle_cancel(waiter);
        return Err(Errno::EINTR);
    }
    state.locking.waiting.insert(waiter);
    let mut next_check = Instant::now() + HANGUP_CHECK_INTERVAL;
    loop {
        if let Some(outcome) = state.locking.ended.remove(&waiter) {
            state.locking.waiting.remove(&waiter);
            return Ok(outcome);
        }
        live_session(state, waiter.session)?;
        if !state.locking.waiting.contains(&waiter) {
            return Err(Errno::EINTR);
        }
        if state.ending {
            return Err(SharedState::ENDING);
        }
        shared.locks_changed.wait_until(state, next_check);
        if Instant::now() < next_check {
            continue;
        }
        next_check = Instant::now() + HANGUP_CHECK_INTERVAL;
        // A peer that has hung up would hold a lock without knowing.
        if is_hung_up(socket) && state.locking.table.handle_cancel(waiter) {
            state.locking.waiting.remove(&waiter);
            return Err(Errno::EINTR);
        }
    }
}

/// Ends a wait. A wait that has just got its lock keeps it.
pub fn cancel_wait(shared: &SharedState, id: SessionId, ticket: u64) -> Reply {
    let waiter = WaiterId { session: id, ticket };
    let mut state = shared.lock();
    let locking = &mut state.locking;
    if locking.table.handle_cancel(waiter) {
        locking.waiting.remove(&waiter);
    } else if !locking.waiting.contains(&waiter) && locking.early_cancels.len() < EARLY_COUNT_MAX {
        locking.early_cancels.push_back((waiter, Instant::now()));
    }
    locking.collect_woken();
    locking.has_unreported = false;
    shared.locks_changed.notify_all();
    Reply::Done
}

/// Returns the lock that conflicts with the requested one.
pub fn query_lock(shared: &SharedState, id: SessionId, request: &Request) -> Result<Reply, Errno> {
    let &Request::QueryLock { inode, .. } = request else { return Err(Errno::EINVAL) };
    let mut state = lock_state_for(shared, id, inode)?;
    let request = lock_request_of(&state, id, request)?;
    check_lock_rights(&state, id, &request, true)?;
    await_grace(shared, &mut state, id)?;
    let State { locking, sessions, .. } = &mut **state;
    if !locking.is_ready_for(&request, sessions, shared) {
        return Ok(Reply::LockedOnMount);
    }
    let conflict = locking.table.query(&request);
    let conflict = conflict.map(|HeldLock { mode, range, pid, .. }| (LockedRange { mode, range }, pid));
    Ok(Reply::Conflict(conflict))
}

/// Takes a process's own record locks on a file back, and returns them.
///
/// They return to the table. If `moves`, they may move to a mount from then on.
pub fn yield_locks(shared: &SharedState, id: SessionId, inode: InodeId, moves: bool) -> Reply {
    let mut state = shared.lock();
    let State { locking, sessions, .. } = &mut **state;
    locking.recall_own(inode, process_owner(id), sessions);
    let locks = locking.table.records(inode, process_owner(id));
    if moves {
        locking.table.handle_move(inode, process_owner(id));
        locking.wake_waiters(shared);
    }
    Reply::Locks(locks)
}

/// Removes an owner's locks on a file.
pub fn release_locks(shared: &SharedState, id: SessionId, inode: InodeId, owner: u64, lock_kind: LockKind) -> Reply {
    let mut state = shared.lock();
    let State { locking, sessions, .. } = &mut **state;
    let is_of_process = lock_kind == LockKind::Record && owner == LOCK_OWNER_PROCESS;
    if is_of_process {
        locking.recall_own(inode, process_owner(id), sessions);
    }
    locking.table.handle_close(LockOwner { session: id, owner }, inode, lock_kind);
    if let Some(session) = sessions.get(&id).filter(|_| is_of_process) {
        session.noted_locks.set(inode, &[]);
    }
    locking.wake_waiters(shared);
    Reply::Done
}
