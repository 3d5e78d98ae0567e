//! State, locks and condition variables that all threads of SharedFS share.

use std::fs::File;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ashlar_helper::Helper;
use ashlar_pmem::Arena;
use ashlar_types::{Errno, LogPosition, SessionId};
use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::Config;
use crate::apply::Slice;
use crate::digest;
use crate::file_guard::FileGuard;
use crate::grant::perform_decisions;
use crate::panics::CountedLock;
use crate::placeholder::make_placeholder;
use crate::process_watcher::ProcessWatcher;
use crate::request_slots::RequestSlots;
use crate::session_pool::SessionPool;
use crate::state::State;
use crate::user_shares::{self, UserShares};

/// Batches of one log that are applied before the next session's turn.
const BATCHES_IN_TURN: usize = 8;

/// The state that all threads of SharedFS share.
pub struct SharedState {
    /// How SharedFS was started.
    pub config: Config,
    /// The arena.
    pub arena: Arc<Arena>,
    /// Reports the ends of processes.
    pub watcher: ProcessWatcher,
    /// Does the work that may have to wait for a mount.
    pub helper: Arc<Helper>,
    /// The file that LibFS opens as a placeholder, if one could be made.
    pub placeholder: Option<Arc<File>>,
    /// When SharedFS started.
    pub started: Instant,
    /// Sessions that are made in advance and have no owner yet.
    pub pool: SessionPool,
    /// The files that processes can make longer.
    pub file_guard: FileGuard,
    /// Sessions that ask through request slots in shared memory.
    pub request_slots: RequestSlots,
    /// Shares of users in SharedFS's time and memory.
    pub user_shares: UserShares,
    state: Mutex<State>,
    /// Signals that a log should be digested.
    pub digest_wanted: Condvar,
    /// Signals that a commit is wanted.
    pub commit_wanted: Condvar,
    /// Signals the end of a commit, of a session or of SharedFS, or a fence.
    pub progress: Condvar,
    /// Signals that lease requests were answered.
    pub grants_changed: Condvar,
    /// Signals a freed lock, a cancelled wait, or the end of a session or of SharedFS.
    pub locks_changed: Condvar,
}

/// The state, locked by this thread.
pub struct StateGuard<'a> {
    guard: MutexGuard<'a, State>,
    _held: CountedLock,
}

impl<'a> Deref for StateGuard<'a> {
    type Target = MutexGuard<'a, State>;

    fn deref(&self) -> &Self::Target {
        &self.guard
    }
}

impl DerefMut for StateGuard<'_> {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.guard
    }
}

impl SharedState {
    /// The error of a wait during which SharedFS ends.
    ///
    /// It never reaches a session: SharedFS closes the session's connection instead, and the session asks the next
    /// SharedFS.
    pub const ENDING: Errno = Errno::ECANCELED;
    /// The error of a request in a request slot that can't be answered at once.
    ///
    /// It never reaches a program: the session asks again by a message.
    pub const LATER: Errno = Errno(libc::EINPROGRESS);
    /// The error of a request whose answer needs more memory than was reserved for it.
    ///
    /// It never reaches a session: the request is served again when no other answer waits for the session's user.
    pub const LONG: Errno = Errno(libc::EMSGSIZE);

    /// Puts the parts together.
    pub fn new(config: Config, arena: Arc<Arena>, watcher: ProcessWatcher, state: State) -> Self {
        let placeholder = make_placeholder()
            .inspect_err(|error| tracing::warn!(%error, "code that bypasses LibFS finds an empty file in the place of an open file"))
            .ok();
        Self {
            helper: Arc::new(Helper::new(config.helper.clone())),
            config,
            arena,
            watcher,
            placeholder: placeholder.map(Arc::new),
            started: Instant::now(),
            pool: SessionPool::default(),
            file_guard: FileGuard::default(),
            request_slots: RequestSlots::default(),
            user_shares: UserShares::default(),
            state: Mutex::new(state),
            digest_wanted: Condvar::new(),
            commit_wanted: Condvar::new(),
            progress: Condvar::new(),
            grants_changed: Condvar::new(),
            locks_changed: Condvar::new(),
        }
    }

    /// Locks the state.
    ///
    /// Of the threads that act for one ordinary user, only one at a time contends with those of others.
    pub fn lock(&self) -> StateGuard<'_> {
        let guard = user_shares::lock_in_turn(|| self.state.lock());
        StateGuard { guard, _held: CountedLock::new() }
    }

    /// Returns for how long a mount's kernel may believe its cache.
    pub fn cache_ttl(&self) -> Duration {
        Duration::from_millis(self.config.cache_ttl_ms)
    }

    /// Begins the end of SharedFS.
    pub fn stop(&self) {
        self.lock().ending = true;
        self.wake_all();
    }

    fn wake_all(&self) {
        self.digest_wanted.notify_all();
        self.commit_wanted.notify_all();
        self.progress.notify_all();
        self.grants_changed.notify_all();
        self.locks_changed.notify_all();
        self.watcher.wake();
        self.pool.end();
        self.file_guard.end();
    }

    /// Applies at most [`BATCHES_IN_TURN`] batches of a session's log.
    ///
    /// It requests commits that are due meanwhile. Returns whether there is more to apply.
    pub fn apply_some<'a>(&'a self, mut state: StateGuard<'a>, id: SessionId) -> (StateGuard<'a>, bool) {
        let mut has_more = false;
        if let Some(settled) = state.settled(id) {
            for _ in 0..BATCHES_IN_TURN {
                has_more = !self.apply_batch(&mut state, id, settled);
                if !has_more {
                    break;
                }
                MutexGuard::bump(&mut state);
            }
        }
        if state.live(id).is_none() {
            // A thread that waits for the session need not wait any longer.
            self.progress.notify_all();
        }
        (state, has_more)
    }

    /// Applies a batch of a session's log, and requests a commit if one is due.
    ///
    /// Returns whether that batch was the last one up to `settled`.
    fn apply_batch(&self, state: &mut MutexGuard<'_, State>, id: SessionId, settled: LogPosition) -> bool {
        let is_last = state.apply(id, settled, Slice::Batch);
        self.perform_decisions(state);
        if digest::is_commit_due_after(state, id) {
            self.request_commit(state);
        }
        is_last
    }

    /// Asks the commit thread to commit.
    pub fn request_commit(&self, state: &mut State) {
        state.commit_wanted = true;
        self.commit_wanted.notify_all();
    }

    /// Asks the digest thread to check all logs.
    pub fn request_digest(&self, state: &mut State) {
        state.digest_wanted = true;
        self.digest_wanted.notify_all();
    }

    /// Applies a session's log up to what is settled now, in slices.
    ///
    /// Between slices, other threads get the lock. The lock is held again on return.
    pub fn apply_settled<'a>(&'a self, mut state: StateGuard<'a>, id: SessionId) -> StateGuard<'a> {
        let Some(settled) = state.settled(id) else { return state };
        while !self.apply_batch(&mut state, id, settled) {
            MutexGuard::bump(&mut state);
        }
        state
    }

    /// Calls [`Self::apply_settled`] for all sessions, one after the other.
    pub fn apply_all_settled<'a>(&'a self, mut state: StateGuard<'a>) -> StateGuard<'a> {
        for id in state.live_ids() {
            state = self.apply_settled(state, id);
        }
        state
    }

    /// Performs the lease manager's decisions.
    ///
    /// Between the batches of the logs that are applied for them, other threads get the lock. Returns when to go on, if
    /// there is such a time.
    pub fn perform_decisions(&self, state: &mut MutexGuard<'_, State>) -> Option<u64> {
        let (answered, until) = perform_decisions(state, MutexGuard::bump);
        if answered {
            self.grants_changed.notify_all();
        }
        until
    }

    /// Waits until a session's log is committed up to `target`.
    ///
    /// It is applied up to there. The wait ends too if the session is gone.
    ///
    /// # Errors
    /// `EIO` if the session is fenced or the shared area has failed; [`SharedState::ENDING`].
    pub fn wait_committed(
        &self,
        state: &mut MutexGuard<'_, State>,
        id: SessionId,
        target: LogPosition,
    ) -> Result<LogPosition, Errno> {
        self.wait_while_behind(state, id, target, |state| self.request_commit(state))
    }

    /// Waits until a session's log is applied and committed up to `target`.
    ///
    /// The wait ends too if the session is gone. The digest thread does the application.
    ///
    /// # Errors
    /// As [`Self::wait_committed`].
    pub fn wait_digested(
        &self,
        state: &mut MutexGuard<'_, State>,
        id: SessionId,
        target: LogPosition,
    ) -> Result<LogPosition, Errno> {
        self.wait_while_behind(state, id, target, |state| {
            if let Some(session) = state.sessions.get_mut(&id) {
                session.wanted = session.wanted.max(target);
            }
            self.request_digest(state);
        })
    }

    fn wait_while_behind(
        &self,
        state: &mut MutexGuard<'_, State>,
        id: SessionId,
        target: LogPosition,
        ask: impl Fn(&mut State),
    ) -> Result<LogPosition, Errno> {
        loop {
            let (committed, applied) = (state.store.committed(id), state.store.applied(id));
            let Some(session) = state.sessions.get(&id) else { return Ok(committed) };
            if committed >= target || session.is_cut && committed >= applied {
                return Ok(committed);
            }
            if state.failure.is_some() || session.fenced.is_some() {
                return Err(Errno::EIO);
            }
            if state.ending {
                return Err(Self::ENDING);
            }
            ask(state);
            self.progress.wait(state);
        }
    }

    /// Waits until everything that is applied now is committed.
    pub fn commit_all(&self, state: &mut MutexGuard<'_, State>) -> Result<(), Errno> {
        // A batch that is under way may lack the newest updates; the next one that begins has them.
        let (target, failed) = (state.commits_begun + 1, state.counters.commits_failed);
        while state.store.is_dirty() && state.commits_ended < target {
            if state.failure.is_some() || state.counters.commits_failed > failed {
                return Err(Errno::EIO);
            }
            if state.ending {
                return Err(Self::ENDING);
            }
            self.request_commit(state);
            self.progress.wait(state);
        }
        Ok(())
    }
}
