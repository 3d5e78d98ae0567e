//! File locks: the table decides, connections' threads wait.
//!
//! A restart of SharedFS forgets all locks; their sessions ask for them again, first of all. Until every running session
//! has done so, nobody gets a lock that another one may have held.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use ashlar_lease::locks::{
    ByteRange, HeldLock, LockAction, LockKind as Kind, LockMode as Mode, LockOutcome, LockOwner, LockRequest,
    LockTable, WaiterId,
};
use ashlar_types::{Errno, InodeId, SessionId};
use ashlar_wire::{LockKind, LockMode, Reply, Request};
use parking_lot::MutexGuard;

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

    /// Takes note of waits that are over; whether there are any.
    fn collect_woken(&mut self) -> bool {
        let before = self.over.len();
        while let Some(woken) = self.table.poll_woken() {
            self.over.insert(woken.waiter, woken.outcome);
        }
        self.over.len() > before
    }
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
        Request::Lock { inode, kind, owner, pid, start, end, mode, wait } => {
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

/// Sets or removes a lock, and waits for it where that was asked.
pub fn lock(shared: &Shared, id: SessionId, request: &Request, reclaims: bool) -> Result<Reply, Errno> {
    let request = asked(id, request).ok_or(Errno::EINVAL)?;
    let mut state = shared.lock();
    if reclaims {
        state.locking.note_resumed(id);
    } else if request.action != LockAction::Unlock {
        while let Some(until) = state.locking.grace_until() {
            if state.ending {
                return Err(Shared::ENDING);
            }
            shared.locks_changed.wait_until(&mut state, until);
        }
    }
    let outcome = state.locking.table.handle_lock(request);
    if state.locking.collect_woken() {
        shared.locks_changed.notify_all();
    }
    match (outcome, request.wait) {
        (LockOutcome::Blocked, Some(ticket)) => wait(shared, &mut state, WaiterId { session: id, ticket }),
        (outcome, _) => answer(outcome),
    }
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
    let request = asked(id, request).ok_or(Errno::EINVAL)?;
    let conflict = shared.lock().locking.table.query(&request).map(|HeldLock { mode, range, pid, .. }| {
        let mode = match mode {
            Mode::Read => LockMode::Read,
            Mode::Write => LockMode::Write,
        };
        (mode, range.first, range.last, pid)
    });
    Ok(Reply::Conflict(conflict))
}

/// Removes an owner's locks on a file.
pub fn release(shared: &Shared, id: SessionId, inode: InodeId, owner: u64, lock_kind: LockKind) -> Reply {
    let mut state = shared.lock();
    state.locking.table.handle_close(LockOwner { session: id, owner }, inode, kind(lock_kind));
    if state.locking.collect_woken() {
        shared.locks_changed.notify_all();
    }
    Reply::Done
}
