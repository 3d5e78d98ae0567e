//! File locks: the table decides, connections' threads wait.
//!
//! A restart of SharedFS forgets all locks but those that processes keep in their control pages; the sessions ask for the others again, first
//! of all. Until every running session has done so, nobody gets a lock that another one may have held.
//!
//! A process may have a file's record locks delegated; whoever else asks about that file takes them back into the table, from the
//! process's control page.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use ashlar_lease::locks::{
    ByteRange, Delegations, HeldLock, LockAction, LockKind as Kind, LockMode as Mode, LockOutcome, LockOwner,
    LockRequest, LockTable, Slots, WaiterId,
};
use ashlar_types::{Errno, InodeId, SessionId};
use ashlar_wire::{
    LOCK_LAST, LOCK_OWNER_PROCESS, LOCK_RANGES_MAX, LockKind, LockMode, LockSlotState, LockedRange, Reply, Request,
    SessionKind,
};
use parking_lot::MutexGuard;

use crate::grant::boot_time;
use crate::session::Session;
use crate::shared::Shared;
use crate::state::State;

/// How long a restarted SharedFS waits for sessions that do not come back: they may be stopped.
const GRACE_MAX: Duration = Duration::from_secs(5);
/// A session that has come back asks for its locks one behind the other; so long after the last one, it has them all.
const GRACE_PAUSE: Duration = Duration::from_millis(200);

/// A cancellation that finds nothing to cancel is remembered for so long, and only so many are.
const EARLY_MAX: Duration = Duration::from_secs(1);
const EARLY_COUNT_MAX: usize = 1024;

/// File locks, and who waits for them.
#[derive(Debug, Default)]
pub struct Locking {
    table: LockTable,
    delegations: Delegations,
    /// Waits that are over, until their threads notice.
    over: BTreeMap<WaiterId, LockOutcome>,
    /// Who waits.
    waiting: BTreeSet<WaiterId>,
    /// Cancellations that came before what they cancel, on another connection.
    early: VecDeque<(WaiterId, Instant)>,
    grace: Option<Grace>,
}

#[derive(Debug)]
struct Grace {
    until: Instant,
    expected: BTreeSet<SessionId>,
    last: Instant,
}

impl Locking {
    /// A running session may have held locks before the restart.
    pub fn expect(&mut self, session: SessionId) {
        let now = Instant::now();
        let grace =
            self.grace.get_or_insert_with(|| Grace { until: now + GRACE_MAX, expected: BTreeSet::new(), last: now });
        grace.expected.insert(session);
    }

    /// It has come back, or asked for a lock that it had.
    pub fn note_resumed(&mut self, session: SessionId) {
        if let Some(grace) = &mut self.grace {
            grace.expected.remove(&session);
            grace.last = Instant::now();
        }
    }

    /// The session is over: its locks are free.
    pub fn end_session(&mut self, session: SessionId) {
        self.delegations.handle_session_end(session);
        self.table.handle_session_end(session);
        self.over.retain(|waiter, _| waiter.session != session);
        self.waiting.retain(|waiter| waiter.session != session);
        if let Some(grace) = &mut self.grace {
            grace.expected.remove(&session);
        }
        self.collect_woken();
    }

    /// Until when new locks must wait, if they must.
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

    /// Whether a waiting that is about to begin was cancelled already.
    fn is_cancelled(&mut self, waiter: WaiterId) -> bool {
        self.early.retain(|(_, at)| at.elapsed() < EARLY_MAX);
        let found = self.early.iter().position(|(early, _)| *early == waiter);
        found.and_then(|at| self.early.remove(at)).is_some()
    }

    /// Takes up what a running session has in its control page after the restart.
    pub fn take_up(&mut self, id: SessionId, sessions: &BTreeMap<SessionId, Session>) {
        let Some(session) = sessions.get(&id).filter(|session| session.identity.kind == SessionKind::Process) else {
            return;
        };
        let (owner, pid) = (process(id), session.identity.process.pid);
        for (slot, inode, state, ranges) in session.control.claimed_lock_slots() {
            let ranges: Vec<_> = ranges.into_iter().map(from_slot).collect();
            let is_delegated = state == LockSlotState::Delegated;
            let (table, pages) = (&mut self.table, &mut Pages(sessions));
            self.delegations.take_up((inode, owner, pid, slot), is_delegated, &ranges, table, pages);
        }
    }

    /// Somebody asks about record locks on a file: what is delegated comes back, and dead processes lose what is in the way.
    fn prepare(&mut self, request: &LockRequest, sessions: &BTreeMap<SessionId, Session>) {
        if request.kind == Kind::Record {
            let now_ms = boot_time().as_millis() as u64;
            let pages = &mut Pages(sessions);
            self.delegations.handle_request(now_ms, request.inode, request.owner, &mut self.table, pages);
        }
        // A process that has ended holds nothing from the moment on at which others can know of it.
        while let Some(holder) = self.table.query(request).map(|held| held.owner.session) {
            let session = sessions.get(&holder).filter(|session| session.identity.kind == SessionKind::Process);
            if session.is_none_or(|session| !session.identity.process.is_gone()) {
                return;
            }
            self.end_session(holder);
        }
    }

    /// Whether the process of a session must ask on a mount: it has locks on the file there.
    fn is_of_mount(&self, request: &LockRequest) -> bool {
        is_own(request) && self.table.is_held_elsewhere(request.inode, request.owner, request.pid)
    }

    /// Takes note of waits that are over; whether there are any.
    fn collect_woken(&mut self) -> bool {
        let before = self.over.len();
        while let Some(woken) = self.table.poll_woken() {
            self.over.insert(woken.waiter, woken.outcome);
        }
        self.over.len() > before
    }
}

/// The slots in sessions' control pages.
struct Pages<'a>(&'a BTreeMap<SessionId, Session>);

impl Slots for Pages<'_> {
    fn delegate(&mut self, to: SessionId, slot: u32, inode: InodeId, locks: &[(ByteRange, Mode)]) -> bool {
        // Where it is almost full, the next lock would have it recalled.
        locks.len() <= LOCK_RANGES_MAX / 2 && {
            let ranges: Vec<_> = locks.iter().map(to_slot).collect();
            self.0.get(&to).is_some_and(|session| session.control.delegate_locks(slot, inode, &ranges))
        }
    }

    fn recall(&mut self, from: SessionId, slot: u32, inode: InodeId) -> Vec<(ByteRange, Mode)> {
        let ranges = self.0.get(&from).map(|session| session.control.recall_locks(slot, inode));
        ranges.into_iter().flatten().map(from_slot).collect()
    }
}

fn to_slot((range, mode): &(ByteRange, Mode)) -> LockedRange {
    LockedRange { first: range.first, last: range.last.min(LOCK_LAST), write: *mode == Mode::Write }
}

fn from_slot(range: LockedRange) -> (ByteRange, Mode) {
    let mode = if range.write { Mode::Write } else { Mode::Read };
    (ByteRange { first: range.first, last: range.last }, mode)
}

/// The owner of a process's own record locks.
fn process(session: SessionId) -> LockOwner {
    LockOwner { session, owner: LOCK_OWNER_PROCESS }
}

fn is_own(request: &LockRequest) -> bool {
    request.kind == Kind::Record && request.owner.owner == LOCK_OWNER_PROCESS
}

fn kind(kind: LockKind) -> Kind {
    match kind {
        LockKind::Record => Kind::Record,
        LockKind::Flock => Kind::Flock,
    }
}

fn action(mode: LockMode) -> LockAction {
    match mode {
        LockMode::Read => LockAction::Lock(Mode::Read),
        LockMode::Write => LockAction::Lock(Mode::Write),
        LockMode::Unlock => LockAction::Unlock,
    }
}

fn asked(session: SessionId, request: &Request) -> Option<LockRequest> {
    let (inode, lock_kind, owner, pid, range, mode, wait) = match *request {
        Request::Lock { inode, kind, owner, pid, start, end, mode, wait, .. } => {
            (inode, kind, owner, pid, (start, end), mode, wait)
        }
        Request::QueryLock { inode, kind, owner, start, end, mode } => {
            (inode, kind, owner, 0, (start, end), mode, None)
        }
        _ => return None,
    };
    let is_range = range.0 <= range.1;
    is_range.then(|| LockRequest {
        inode,
        kind: kind(lock_kind),
        owner: LockOwner { session, owner },
        pid,
        range: ByteRange { first: range.0, last: range.1 },
        action: action(mode),
        wait,
    })
}

/// A request as the table takes it. A process's own locks bear the number by which SharedFS knows it, whatever it calls itself.
fn asked_by(state: &State, id: SessionId, request: &Request) -> Result<LockRequest, Errno> {
    let mut asked = asked(id, request).ok_or(Errno::EINVAL)?;
    let session = state.live(id).ok_or(Errno::EIO)?;
    if is_own(&asked) && session.identity.kind == SessionKind::Process {
        asked.pid = session.identity.process.pid;
    }
    Ok(asked)
}

/// Sets or removes a lock, and waits for it where that was asked.
pub fn lock(shared: &Shared, id: SessionId, request: &Request, reclaims: bool) -> Result<Reply, Errno> {
    let slot = if let Request::Lock { slot, .. } = request { *slot } else { None };
    let mut state = shared.lock();
    let request = asked_by(&state, id, request)?;
    if reclaims {
        state.locking.note_resumed(id);
    } else if request.action != LockAction::Unlock {
        await_grace(shared, &mut state)?;
    }
    let State { locking, sessions, .. } = &mut *state;
    locking.prepare(&request, sessions);
    if locking.is_of_mount(&request) {
        return Ok(Reply::LockedOnMount);
    }
    let outcome = locking.table.handle_lock(request);
    let is_delegated = outcome == LockOutcome::Granted && is_own(&request) && {
        let wanted = slot.map(|slot| (request.inode, request.owner, request.pid, slot));
        let now_ms = boot_time().as_millis() as u64;
        wanted.is_some_and(|wanted| {
            locking.delegations.delegate(now_ms, wanted, &mut locking.table, &mut Pages(sessions))
        })
    };
    if locking.collect_woken() {
        shared.locks_changed.notify_all();
    }
    if is_delegated {
        return Ok(Reply::Delegated);
    }
    match (outcome, request.wait) {
        (LockOutcome::Blocked, Some(ticket)) => wait(shared, &mut state, WaiterId { session: id, ticket }),
        (outcome, _) => answer(outcome),
    }
}

/// Waits until all that may have held locks before a restart have said so.
fn await_grace(shared: &Shared, state: &mut MutexGuard<'_, State>) -> Result<(), Errno> {
    while let Some(until) = state.locking.grace_until() {
        if state.ending {
            return Err(Shared::ENDING);
        }
        shared.locks_changed.wait_until(state, until);
    }
    Ok(())
}

fn answer(outcome: LockOutcome) -> Result<Reply, Errno> {
    match outcome {
        LockOutcome::Granted => Ok(Reply::Done),
        LockOutcome::Blocked | LockOutcome::WouldBlock(_) => Err(Errno::EAGAIN),
        LockOutcome::Deadlock => Err(Errno::EDEADLK),
        LockOutcome::Full => Err(Errno::ENOLCK),
    }
}

fn wait(shared: &Shared, state: &mut MutexGuard<'_, State>, waiter: WaiterId) -> Result<Reply, Errno> {
    if state.locking.is_cancelled(waiter) {
        state.locking.table.handle_cancel(waiter);
        return Err(Errno::EINTR);
    }
    state.locking.waiting.insert(waiter);
    loop {
        if let Some(outcome) = state.locking.over.remove(&waiter) {
            state.locking.waiting.remove(&waiter);
            return answer(outcome);
        }
        if state.live(waiter.session).is_none_or(|session| session.is_ending) {
            return Err(Errno::EIO);
        }
        if !state.locking.waiting.contains(&waiter) {
            return Err(Errno::EINTR);
        }
        if state.ending {
            return Err(Shared::ENDING);
        }
        shared.locks_changed.wait(state);
    }
}

/// Ends a waiting. One that has just got its lock keeps it.
pub fn cancel(shared: &Shared, id: SessionId, ticket: u64) -> Reply {
    let waiter = WaiterId { session: id, ticket };
    let mut state = shared.lock();
    let locking = &mut state.locking;
    if locking.table.handle_cancel(waiter) {
        locking.waiting.remove(&waiter);
    } else if !locking.waiting.contains(&waiter) && locking.early.len() < EARLY_COUNT_MAX {
        locking.early.push_back((waiter, Instant::now()));
    }
    locking.collect_woken();
    shared.locks_changed.notify_all();
    Reply::Done
}

/// The lock that is in the way of one that is asked about.
pub fn query(shared: &Shared, id: SessionId, request: &Request) -> Result<Reply, Errno> {
    let mut state = shared.lock();
    let request = asked_by(&state, id, request)?;
    await_grace(shared, &mut state)?;
    let State { locking, sessions, .. } = &mut *state;
    locking.prepare(&request, sessions);
    if locking.is_of_mount(&request) {
        return Ok(Reply::LockedOnMount);
    }
    let conflict = locking.table.query(&request).map(|HeldLock { mode, range, pid, .. }| {
        let mode = match mode {
            Mode::Read => LockMode::Read,
            Mode::Write => LockMode::Write,
        };
        (mode, range.first, range.last, pid)
    });
    if locking.collect_woken() {
        shared.locks_changed.notify_all();
    }
    Ok(Reply::Conflict(conflict))
}

/// Takes a process's own record locks on a file back into the table, and tells them; from then on they may move to its mount.
pub fn yield_locks(shared: &Shared, id: SessionId, inode: InodeId, moves: bool) -> Reply {
    let mut state = shared.lock();
    let State { locking, sessions, .. } = &mut *state;
    locking.delegations.recall(inode, &mut locking.table, &mut Pages(sessions));
    let locks = locking.table.records(inode, process(id));
    if moves {
        locking.table.handle_move(inode, process(id));
    }
    let told = locks.into_iter().map(|(range, mode)| {
        let mode = if mode == Mode::Write { LockMode::Write } else { LockMode::Read };
        (mode, range.first, range.last)
    });
    Reply::Locks(told.collect())
}

/// Removes an owner's locks on a file.
pub fn release(shared: &Shared, id: SessionId, inode: InodeId, owner: u64, lock_kind: LockKind) -> Reply {
    let mut state = shared.lock();
    let State { locking, sessions, .. } = &mut *state;
    if lock_kind == LockKind::Record && owner == LOCK_OWNER_PROCESS {
        locking.delegations.recall(inode, &mut locking.table, &mut Pages(sessions));
    }
    locking.table.handle_close(LockOwner { session: id, owner }, inode, kind(lock_kind));
    if locking.collect_woken() {
        shared.locks_changed.notify_all();
    }
    Reply::Done
}
