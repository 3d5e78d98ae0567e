//! What all threads of SharedFS share.

use std::fs::File;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ashlar_helper::Helper;
use ashlar_pmem::Arena;
use ashlar_types::{Errno, LogPosition, SessionId};
use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::Config;
use crate::apply::Slice;
use crate::digest;
use crate::grant::drive;
use crate::placeholder::make_placeholder;
use crate::pool::Pool;
use crate::request_slots::RequestSlots;
use crate::state::State;
use crate::watch::Watcher;

/// So many batches of one session's log are applied before it's the next one's turn.
const BATCHES_IN_TURN: usize = 8;

/// What all threads share.
pub struct Shared {
    /// What SharedFS was told.
    pub config: Config,
    /// The arena.
    pub arena: Arc<Arena>,
    /// Ends of processes.
    pub watcher: Watcher,
    /// Does what may have to wait for a mount.
    pub helper: Arc<Helper>,
    /// What processes have in the kernel in the place of their files, if there is any.
    pub placeholder: Option<Arc<File>>,
    /// When SharedFS started.
    pub started: Instant,
    /// Sessions that are nobody's yet.
    pub pool: Pool,
    /// Who asks in shared memory.
    pub request_slots: RequestSlots,
    state: Mutex<State>,
    /// Something to digest.
    pub digest_wanted: Condvar,
    /// Something to commit.
    pub commit_wanted: Condvar,
    /// A commit has ended, a session was fenced or has gone, or SharedFS is ending.
    pub progress: Condvar,
    /// Lease requests were answered.
    pub grants_changed: Condvar,
    /// A lock was freed, a waiting was cancelled, a session has gone, or SharedFS is ending.
    pub locks_changed: Condvar,
}

impl Shared {
    /// What a wait gives when SharedFS ends under it. It never reaches a session: its connection is closed instead, and it
    /// asks the next SharedFS.
    pub const ENDING: Errno = Errno::ECANCELED;
    /// What a question gives that can't be answered at once. It never reaches a program: its session asks again by a message.
    pub const LATER: Errno = Errno(libc::EINPROGRESS);

    /// Puts the parts together.
    pub fn new(config: Config, arena: Arc<Arena>, watcher: Watcher, state: State) -> Self {
        let placeholder = make_placeholder()
            .inspect_err(|error| tracing::warn!(%error, "code past LibFS finds an empty file in the place of a file that is open"))
            .ok();
        Self {
            helper: Arc::new(Helper::new(config.helper.clone())),
            config,
            arena,
            watcher,
            placeholder: placeholder.map(Arc::new),
            started: Instant::now(),
            pool: Pool::default(),
            request_slots: RequestSlots::default(),
            state: Mutex::new(state),
            digest_wanted: Condvar::new(),
            commit_wanted: Condvar::new(),
            progress: Condvar::new(),
            grants_changed: Condvar::new(),
            locks_changed: Condvar::new(),
        }
    }

    /// Takes the lock.
    pub fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Milliseconds for which a mount's kernel may believe its cache.
    pub fn cache_ttl(&self) -> Duration {
        Duration::from_millis(self.config.cache_ttl_ms)
    }

    /// Starts the end of SharedFS.
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
    }

    /// Applies some of a session's log, at most [`BATCHES_IN_TURN`] batches, and has what is due committed meanwhile. Whether there is more.
    pub fn apply_some<'a>(&'a self, mut state: MutexGuard<'a, State>, id: SessionId) -> (MutexGuard<'a, State>, bool) {
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
            // Who waits for it waits for nothing more.
            self.progress.notify_all();
        }
        (state, has_more)
    }

    /// Applies a batch of a session's log, and has it committed if it's time; whether that was the last one up to `settled`.
    fn apply_batch(&self, state: &mut MutexGuard<'_, State>, id: SessionId, settled: LogPosition) -> bool {
        let is_last = state.apply(id, settled, Slice::Batch);
        self.drive(state);
        if digest::is_commit_due_after(state, id) {
            self.want_commit(state);
        }
        is_last
    }

    /// Has the commit thread commit.
    pub fn want_commit(&self, state: &mut State) {
        state.commit_wanted = true;
        self.commit_wanted.notify_all();
    }

    /// Has the digest thread look at all logs.
    pub fn want_digest(&self, state: &mut State) {
        state.digest_wanted = true;
        self.digest_wanted.notify_all();
    }

    /// Applies a session's log up to what is settled now, in slices, so that others get the lock in between. The lock is
    /// held again on return.
    pub fn apply_settled<'a>(&'a self, mut state: MutexGuard<'a, State>, id: SessionId) -> MutexGuard<'a, State> {
        let Some(settled) = state.settled(id) else { return state };
        while !self.apply_batch(&mut state, id, settled) {
            MutexGuard::bump(&mut state);
        }
        state
    }

    /// [`Self::apply_settled`] for all sessions, one after the other.
    pub fn apply_all_settled<'a>(&'a self, mut state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        for id in state.live_ids() {
            state = self.apply_settled(state, id);
        }
        state
    }

    /// Performs what the lease manager has decided; returns when to go on, if there is such a time.
    pub fn drive(&self, state: &mut MutexGuard<'_, State>) -> Option<u64> {
        let (answered, until) = drive(state);
        if answered {
            self.grants_changed.notify_all();
        }
        until
    }

    /// Waits until all of a session's log up to `target`, which is applied, is committed, or the session is gone.
    ///
    /// # Errors
    /// `EIO` where the session is fenced or the shared area has failed; [`Shared::ENDING`].
    pub fn wait_committed(
        &self,
        state: &mut MutexGuard<'_, State>,
        id: SessionId,
        target: LogPosition,
    ) -> Result<LogPosition, Errno> {
        self.wait_while_behind(state, id, target, |state| self.want_commit(state))
    }

    /// Waits until the digest thread has applied a session's log up to `target`, and that is committed, or the session is gone.
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
            self.want_digest(state);
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
        // A batch that is under way may not hold the newest updates; the one that begins next does.
        let (target, failed) = (state.commits_begun + 1, state.counters.commits_failed);
        while state.store.is_dirty() && state.commits_ended < target {
            if state.failure.is_some() || state.counters.commits_failed > failed {
                return Err(Errno::EIO);
            }
            if state.ending {
                return Err(Self::ENDING);
            }
            self.want_commit(state);
            self.progress.wait(state);
        }
        Ok(())
    }
}
