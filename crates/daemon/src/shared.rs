//! What all threads of SharedFS share.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ashlar_helper::Helper;
use ashlar_pmem::Arena;
use ashlar_types::{Errno, LogPosition, SessionId};
use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::Config;
use crate::apply::Slice;
use crate::grant::drive;
use crate::mailbox::Mailboxes;
use crate::pool::Pool;
use crate::state::State;
use crate::watch::Watcher;

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
    /// When SharedFS started.
    pub started: Instant,
    /// Sessions that are nobody's yet.
    pub pool: Pool,
    /// Who asks in shared memory.
    pub mailboxes: Mailboxes,
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
        Self {
            helper: Arc::new(Helper::new(config.helper.clone())),
            config,
            arena,
            watcher,
            started: Instant::now(),
            pool: Pool::default(),
            mailboxes: Mailboxes::default(),
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

    /// Applies a session's log up to what is settled now, in slices, so that others get the lock in between. The lock is
    /// held again on return.
    pub fn apply_settled<'a>(&'a self, mut state: MutexGuard<'a, State>, id: SessionId) -> MutexGuard<'a, State> {
        let Some(settled) = state.settled(id) else { return state };
        while !state.apply(id, settled, Slice::Batch) {
            self.drive(&mut state);
            MutexGuard::bump(&mut state);
        }
        self.drive(&mut state);
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

    /// Waits until all of a session's log up to `target` is committed, or the session is gone.
    ///
    /// # Errors
    /// `EIO` where the session is fenced or the shared area has failed; [`Shared::ENDING`].
    pub fn wait_committed(
        &self,
        state: &mut MutexGuard<'_, State>,
        id: SessionId,
        target: LogPosition,
    ) -> Result<LogPosition, Errno> {
        loop {
            let committed = state.store.committed(id);
            if committed >= target || !state.sessions.contains_key(&id) {
                return Ok(committed);
            }
            if state.failure.is_some() || state.sessions.get(&id).is_some_and(|session| session.fenced.is_some()) {
                return Err(Errno::EIO);
            }
            if state.ending {
                return Err(Self::ENDING);
            }
            state.commit_wanted = true;
            self.commit_wanted.notify_all();
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
            state.commit_wanted = true;
            self.commit_wanted.notify_all();
            self.progress.wait(state);
        }
        Ok(())
    }
}
