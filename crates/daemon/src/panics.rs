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

use crate::session::ServedSession;
use crate::session_page::SessionPage;

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

/// Ends the process at a panic that is not contained, and bars the session that caused it.
///
/// The whole process is SharedFS.
pub fn confine_panics() {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        report(panic);
        if CONTAINED.get() == Some(LOCKED.get()) {
            return;
        }
        if let Some(blamed) = BLAMED.take() {
            blamed.bar();
        }
        std::process::abort();
    }));
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::process::Command;

    use super::*;
    use crate::shared_state::SharedState;
    use crate::test_sessions::{add_session, make_arena};

    /// Names the arena of the process that is to panic.
    const ARENA_ENV: &str = "ASHLAR_TEST_PANIC_ARENA";

    fn recover(place: &Path) -> SharedState {
        crate::recovery::recover(crate::Config::new(place)).expect("a sound arena")
    }

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

    #[test]
    fn request_that_panics_costs_only_its_session() {
        let place = tempfile::tempdir().expect("a directory");
        make_arena(place.path());
        let shared = recover(place.path());
        let (one, two) = (add_session(&shared, std::process::id()), add_session(&shared, std::process::id()));
        assert_eq!(contain(|| panic!("planted")), Err::<(), _>(Panicked));
        crate::serve::fence_after_panic(&shared, Some(one));
        let state = shared.lock();
        assert!(state.live(one).is_none() && state.live(two).is_some());
    }

    #[test]
    #[ignore = "this is the process that panics, which another test starts"]
    fn panicking_process() {
        let Some(place) = std::env::var_os(ARENA_ENV) else { return };
        let shared = recover(Path::new(&place));
        let pid = rustix::process::getppid().expect("a parent").as_raw_nonzero().get().unsigned_abs();
        let (blamed, _other) = (add_session(&shared, pid), add_session(&shared, pid));
        confine_panics();
        let contained = contain(|| panic!("planted, without the lock"));
        assert_eq!(contained, Err::<(), _>(Panicked), "the process goes on");
        let _ = contain(|| {
            let state = shared.lock();
            let _blame = Blame::for_request(&state.sessions[&blamed]);
            panic!("planted, in the middle of a change");
        });
        unreachable!("the process has ended");
    }

    /// A change that a panic cuts must reach neither other threads nor the next start.
    #[test]
    fn panic_under_the_lock_ends_the_process_and_bars_its_session() {
        let place = tempfile::tempdir().expect("a directory");
        make_arena(place.path());
        let mut command = Command::new(std::env::current_exe().expect("this program"));
        let name = "panics::tests::panicking_process";
        command.args(["--exact", name, "--ignored", "--nocapture", "--test-threads=1"]).env(ARENA_ENV, place.path());
        let status = command.status().expect("run");
        assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(libc::SIGABRT), "{status}");
        let shared = recover(place.path());
        assert_eq!(shared.lock().live_ids().len(), 1, "the other session goes on");
        let kept = std::fs::read_dir(place.path().join("sessions")).expect("listed");
        let is_fenced = |name: &std::ffi::OsStr| name.to_string_lossy().starts_with("fenced-");
        assert_eq!(kept.filter(|file| file.as_ref().is_ok_and(|file| is_fenced(&file.file_name()))).count(), 3);
    }
}
