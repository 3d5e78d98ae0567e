//! Confines a panic to the session that caused it.
//!
//! Purpose: a defect of SharedFS that a session can reach costs that session, and no other.
//!
//! Invariants:
//! - No thread sees a change that a panic has cut. A panic in contained code that has not locked the state meanwhile
//!   ends there: the code changes nothing that others share, so nothing is half made. Requests are contained as a
//!   whole, and so is the look at each record before it is applied. The session is fenced, and SharedFS goes on.
//! - Every other panic ends the process before the lock is free again. The next start recovers from the logs; all
//!   sessions resume, as after any kill. A log that made SharedFS panic must not do so again: its session is *barred*
//!   first. From the position that is noted then, no record of it is ever applied, and the next start fences it.
//! - A session is barred in its lease table's first page, which it can't write. No other session depends on a record
//!   behind that position: none has seen one applied.
//!
//! Non-goals: defects in threads that act for no session; exhausted memory, which ends the process anyway.

use std::cell::{Cell, RefCell};
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind};

use ashlar_types::{LogPosition, SessionId};

use crate::sessions::session::ServedSession;
use crate::sessions::session_page::SessionPage;

/// Contained code has panicked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Panicked;

/// A session that is to blame for a panic of this thread.
#[derive(Clone)]
struct BlamedSession {
    id: SessionId,
    page: SessionPage,
    /// Records from here on are to blame; `None`: a request is.
    from: Option<LogPosition>,
}

thread_local! {
    /// How many times this thread has the state locked.
    static LOCKED: Cell<u32> = const { Cell::new(0) };
    /// That number when the innermost contained code began.
    static CONTAINED: Cell<Option<u32>> = const { Cell::new(None) };
    static BLAMED: RefCell<Option<BlamedSession>> = const { RefCell::new(None) };
}

/// Runs code whose panic is no more than its error.
///
/// It may end anywhere. So it may change nothing that other threads see, unless it locks the state for that.
///
/// # Errors
/// [`Panicked`].
pub fn contain<T>(code: impl FnOnce() -> T) -> Result<T, Panicked> {
    let outer = CONTAINED.replace(Some(LOCKED.get()));
    let result = catch_unwind(AssertUnwindSafe(code));
    CONTAINED.set(outer);
    result.map_err(|_| Panicked)
}

/// Counts a lock of the state by this thread, as long as it lives.
#[derive(Debug)]
pub struct CountedLock(PhantomData<*const ()>);

impl Default for CountedLock {
    fn default() -> Self {
        Self::new()
    }
}

impl CountedLock {
    /// Counts a lock that was just taken.
    pub fn new() -> Self {
        LOCKED.set(LOCKED.get() + 1);
        Self(PhantomData)
    }
}

impl Drop for CountedLock {
    fn drop(&mut self) {
        LOCKED.set(LOCKED.get() - 1);
    }
}

/// Blames a session for panics of this thread, as long as it lives.
pub struct Blame(Option<BlamedSession>);

impl Blame {
    /// Blames the session whose request is served.
    pub fn for_request(session: &ServedSession) -> Self {
        Self::new(session, None)
    }

    /// Blames the session whose records from a position on are applied.
    pub fn for_records(session: &ServedSession, from: LogPosition) -> Self {
        Self::new(session, Some(from))
    }

    fn new(session: &ServedSession, from: Option<LogPosition>) -> Self {
        let blamed = BlamedSession { id: session.id, page: session.page.clone(), from };
        Self(BLAMED.replace(Some(blamed)))
    }
}

impl Drop for Blame {
    fn drop(&mut self) {
        BLAMED.set(self.0.take());
    }
}

impl BlamedSession {
    /// Notes that no further record of the session may be applied.
    fn bar(&self) {
        // Records before that have been applied, and others may have seen them.
        let from = self.from.unwrap_or_else(|| self.page.validated());
        tracing::error!(session = self.id.0, position = from.0, "a session met a defect of SharedFS, and is barred");
        self.page.set_barred(from);
        self.page.fence();
    }
}

/// Returns whether the panic that this thread has just met is contained.
///
/// If it is not, this bars the session that caused it. The shell then ends the process.
pub fn is_contained_else_bar() -> bool {
    let is_contained = CONTAINED.get() == Some(LOCKED.get());
    if !is_contained && let Some(blamed) = BLAMED.take() {
        blamed.bar();
    }
    is_contained
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contained_panic_is_an_error_and_the_next_code_runs() {
        let before = (LOCKED.get(), CONTAINED.get());
        let panicked = contain(|| {
            let _held = CountedLock::new();
            panic!("planted");
        });
        assert_eq!(panicked, Err::<(), _>(Panicked));
        assert_eq!((LOCKED.get(), CONTAINED.get()), before);
        assert_eq!(contain(|| contain(|| 7)), Ok(Ok(7)));
    }
}
