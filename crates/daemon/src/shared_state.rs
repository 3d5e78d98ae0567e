//! The node, locks and condition variables that all threads of SharedFS share.

use std::collections::BTreeMap;
use std::fs::File;
use std::ops::{Deref, DerefMut};
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use ashlar_helper::Helper;
use ashlar_member::Membership;
use ashlar_node::blame::CountedLock;
use ashlar_node::digest::commit::commit_with;
use ashlar_node::leases::grant::{ENDING, LATER, Patience};
use ashlar_node::pending::progress::{Progress, WaitFor};
use ashlar_node::pending::{NodeAnswer, NodeRequest, RequestTerms, RequestTicket};
use ashlar_node::{Node, NodeCore, NodeEffect};
use ashlar_pmem::Arena;
use ashlar_processes::clock;
use ashlar_processes::process_watcher::ProcessWatcher;
use ashlar_replica::Shadow;
use ashlar_replica::mirror::LeaderService;
use ashlar_store::StoreError;
use ashlar_types::{Errno, JournalPosition, SessionId};
use ashlar_wire::Request;
use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::Config;
use crate::file_guard::FileGuard;
use crate::placeholder::make_placeholder;
use crate::request_slots::RequestSlots;
use crate::session_files::SessionFiles;
use crate::session_pool::SessionPool;
use crate::user_shares::{self, UserShares};
use crate::waiting_syncs::WaitingSyncs;

/// How often a thread that waits for a lock checks whether its peer has hung up.
const HANGUP_CHECK_INTERVAL: Duration = Duration::from_millis(500);

/// How often a commit that waits for the replica checks whether SharedFS ends.
const END_CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// How long an end of SharedFS waits for the replica.
const END_PATIENCE: Duration = Duration::from_secs(2);

/// A writer's place in its cluster, and the service that carries its journal to the replica.
pub struct Leading {
    /// Its place.
    pub membership: Membership,
    /// The service.
    pub leader: Arc<LeaderService>,
}

/// The copies of the journal besides its own.
#[derive(Default)]
pub struct Copies {
    /// In this process.
    pub shadow: Option<Shadow>,
    /// On another machine.
    pub leading: Option<Leading>,
}

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
    /// The grant cache that sessions map, if the system gave memory for it.
    pub grant_cache: Option<Arc<File>>,
    /// When SharedFS started.
    pub started: Instant,
    /// Sessions that are made in advance and have no owner yet.
    pub pool: SessionPool,
    /// The descriptors that each session receives when it connects.
    pub session_files: Mutex<BTreeMap<SessionId, SessionFiles>>,
    /// The files that processes can make longer.
    pub file_guard: FileGuard,
    /// Sessions that ask through request slots in shared memory.
    pub request_slots: RequestSlots,
    /// Shares of users in SharedFS's time and memory.
    pub user_shares: UserShares,
    /// The replica in this process. It is locked after the node.
    pub shadow: Option<Mutex<Shadow>>,
    /// Carries the journal to the replica on another machine, with the node's place in its cluster.
    pub leading: Option<Leading>,
    node: Mutex<Node>,
    /// The node's document has changed: SharedFS ends, to start again.
    pub role_changed: AtomicBool,
    /// Requests that wait for the copies of the journal, without a thread.
    pub waiting_syncs: WaitingSyncs,
    /// Signals that the copies have more of the journal.
    pub replicated: Condvar,
    /// Signals that a log should be digested.
    pub digest_wanted: Condvar,
    /// Signals that a commit is wanted.
    pub commit_wanted: Condvar,
    /// Signals that the journal has grown, that it is durable, or the end of SharedFS.
    pub journal_grew: Condvar,
    /// Signals the end of a commit, of a session or of SharedFS, or a fence.
    pub progress: Condvar,
    /// Signals that lease requests were answered.
    grants_changed: Condvar,
    /// Signals a freed lock, a cancelled wait, or the end of a session or of SharedFS.
    locks_changed: Condvar,
}

/// The node, locked by this thread.
///
/// The node's effects are performed before another thread gets it.
pub struct StateGuard<'a> {
    shared: &'a SharedState,
    guard: MutexGuard<'a, Node>,
    _held: CountedLock,
}

impl Deref for StateGuard<'_> {
    type Target = Node;

    fn deref(&self) -> &Node {
        &self.guard
    }
}

impl DerefMut for StateGuard<'_> {
    fn deref_mut(&mut self) -> &mut Node {
        &mut self.guard
    }
}

impl Drop for StateGuard<'_> {
    fn drop(&mut self) {
        self.perform_effects();
    }
}

impl StateGuard<'_> {
    fn perform_effects(&mut self) {
        while let Some(effect) = self.guard.poll_effect() {
            let condition = match effect {
                NodeEffect::WakeGrants => &self.shared.grants_changed,
                NodeEffect::WakeLocks => &self.shared.locks_changed,
                NodeEffect::WakeDigests => &self.shared.progress,
                NodeEffect::Digest => &self.shared.digest_wanted,
                NodeEffect::Commit => &self.shared.commit_wanted,
                NodeEffect::Replicate => &self.shared.journal_grew,
            };
            condition.notify_all();
            if effect == NodeEffect::Replicate
                && let Some(Leading { leader, .. }) = &self.shared.leading
            {
                leader.wake();
            }
        }
    }

    /// Waits until the copies that count have the journal up to a position.
    ///
    /// # Errors
    /// Those of the shadow; [`StoreError::CommitUnderWay`] if SharedFS ends meanwhile.
    pub fn await_copies(&mut self, upto: JournalPosition) -> Result<(), StoreError> {
        let shared = self.shared;
        if shared.leading.is_none() {
            return shared.await_shadow(self, upto);
        }
        while !self.journal.as_ref().is_none_or(|journal| journal.is_acknowledged(upto)) {
            if self.is_over() {
                return Err(StoreError::CommitUnderWay);
            }
            self.wait_for(&shared.replicated, END_CHECK_INTERVAL);
        }
        Ok(())
    }

    /// Tells the node what time it is.
    pub fn refresh_time(&mut self) {
        self.guard.handle_time(clock::now());
    }

    /// Lets a thread that waits for the node have it first.
    pub fn bump(&mut self) {
        self.perform_effects();
        MutexGuard::bump(&mut self.guard);
        self.refresh_time();
    }

    /// Runs code without the lock.
    pub fn unlocked<T>(&mut self, code: impl FnOnce() -> T) -> T {
        self.perform_effects();
        let result = MutexGuard::unlocked(&mut self.guard, code);
        self.refresh_time();
        result
    }

    /// Waits for a signal, and no longer than until this time since boot.
    pub fn wait_until(&mut self, condition: &Condvar, until: Option<Duration>) {
        match until {
            Some(until) => _ = self.wait_for(condition, until.saturating_sub(self.now.since_boot)),
            None => self.wait(condition),
        }
    }

    /// Waits for a signal.
    pub fn wait(&mut self, condition: &Condvar) {
        self.perform_effects();
        condition.wait(&mut self.guard);
        self.refresh_time();
    }

    /// Waits for a signal, and no longer than `pause`; returns whether that has passed.
    pub fn wait_for(&mut self, condition: &Condvar, pause: Duration) -> bool {
        self.perform_effects();
        let has_timed_out = condition.wait_for(&mut self.guard, pause).timed_out();
        self.refresh_time();
        has_timed_out
    }

    /// Serves a request, and waits as long as it must.
    ///
    /// # Errors
    /// Those of the request; [`LATER`] for one without patience that must wait.
    pub fn serve_request(&mut self, request: NodeRequest, terms: RequestTerms) -> Result<NodeAnswer, Errno> {
        let ticket = self.begin_request(request, terms);
        self.await_answer(ticket, terms.patience, None)
    }

    /// Serves a request of SharedFS itself.
    ///
    /// # Errors
    /// As [`Self::serve_request`].
    pub fn perform(&mut self, request: NodeRequest) -> Result<(), Errno> {
        self.serve_request(request, RequestTerms::OWN).map(drop)
    }

    /// Serves a session's request to make updates durable. `None`: only copies of the journal are missing, and the
    /// thread that learns of them replies.
    ///
    /// # Errors
    /// Those of the request.
    pub fn serve_or_wait(
        mut self,
        id: SessionId,
        request: Request,
        terms: RequestTerms,
        socket: &Arc<UnixStream>,
    ) -> Result<Option<NodeAnswer>, Errno> {
        let shared = self.shared;
        let ticket = self.begin_request(NodeRequest::Session(id, request), terms);
        loop {
            match self.guard.advance(ticket) {
                Progress::Done(answer) => return answer.map(Some),
                Progress::Wait(WaitFor::Copies, _) => break,
                Progress::More => self.bump(),
                Progress::Wait(..) => return self.await_answer(ticket, terms.patience, None).map(Some),
            }
        }
        shared.waiting_syncs.add(ticket, id, Arc::clone(socket));
        // This thread sends the frames, so the other one need not be woken for that.
        self.guard.effects.take(NodeEffect::Replicate);
        drop(self);
        shared.send_frames();
        Ok(None)
    }

    /// Advances a request until it has ended.
    ///
    /// A request for a lock is given up when the peer of its socket has hung up.
    ///
    /// # Errors
    /// Those of the request; `EINTR` if the peer has hung up.
    pub fn await_answer(
        &mut self,
        ticket: RequestTicket,
        patience: Patience,
        socket: Option<BorrowedFd<'_>>,
    ) -> Result<NodeAnswer, Errno> {
        let shared = self.shared;
        let mut next_check = Instant::now() + HANGUP_CHECK_INTERVAL;
        let mut has_sent = false;
        loop {
            let (event, until) = match self.guard.advance(ticket) {
                Progress::Done(answer) => return answer,
                Progress::More => {
                    self.bump();
                    continue;
                }
                Progress::Wait(event, until) => (event, until),
            };
            if patience == Patience::None && self.cancel_request(ticket) {
                return Err(LATER);
            }
            if event == WaitFor::Digests && self.is_over() && self.cancel_request(ticket) {
                return Err(if self.ending { ENDING } else { Errno::EIO });
            }
            let condition = match event {
                WaitFor::Grants => &shared.grants_changed,
                WaitFor::Locks => &shared.locks_changed,
                WaitFor::Digests => &shared.progress,
                WaitFor::Copies => &shared.replicated,
            };
            if event == WaitFor::Copies && !std::mem::replace(&mut has_sent, true) {
                self.unlocked(|| shared.send_frames());
                continue;
            }
            let Some(socket) = socket else {
                self.wait_until(condition, until);
                continue;
            };
            let pause = until.map(|until| until.saturating_sub(self.now.since_boot));
            let left = next_check.saturating_duration_since(Instant::now());
            self.wait_for(condition, pause.map_or(left, |pause| pause.min(left)));
            if Instant::now() >= next_check {
                next_check = Instant::now() + HANGUP_CHECK_INTERVAL;
                if clock::is_hung_up(socket) && self.cancel_request(ticket) {
                    return Err(Errno::EINTR);
                }
            }
        }
    }
}

impl SharedState {
    /// Puts the parts together.
    pub fn new(
        config: Config,
        arena: Arc<Arena>,
        watcher: ProcessWatcher,
        node: Node,
        session_files: BTreeMap<SessionId, SessionFiles>,
        grant_cache: Option<Arc<File>>,
        copies: Copies,
    ) -> Self {
        let placeholder = make_placeholder()
            .inspect_err(|error| tracing::warn!(%error, "code that bypasses LibFS finds an empty file in the place of an open file"))
            .ok();
        Self {
            helper: Arc::new(Helper::new(config.helper.clone())),
            config,
            arena,
            watcher,
            placeholder: placeholder.map(Arc::new),
            grant_cache,
            started: Instant::now(),
            pool: SessionPool::default(),
            session_files: Mutex::new(session_files),
            file_guard: FileGuard::default(),
            request_slots: RequestSlots::default(),
            user_shares: UserShares::default(),
            shadow: copies.shadow.map(Mutex::new),
            leading: copies.leading,
            node: Mutex::new(node),
            role_changed: AtomicBool::new(false),
            waiting_syncs: WaitingSyncs::default(),
            replicated: Condvar::new(),
            digest_wanted: Condvar::new(),
            commit_wanted: Condvar::new(),
            journal_grew: Condvar::new(),
            progress: Condvar::new(),
            grants_changed: Condvar::new(),
            locks_changed: Condvar::new(),
        }
    }

    /// Locks the node.
    ///
    /// Of the threads that act for one ordinary user, only one at a time contends with those of others.
    pub fn lock(&self) -> StateGuard<'_> {
        let guard = user_shares::lock_in_turn(|| self.node.lock());
        let mut guard = StateGuard { shared: self, guard, _held: CountedLock::new() };
        guard.refresh_time();
        guard
    }

    /// Commits everything without the commit thread, with the shadow.
    ///
    /// # Errors
    /// Those of the commit and of the shadow.
    pub fn commit(&self, state: &mut NodeCore) -> Result<(), StoreError> {
        commit_with(state, &mut |state, upto| match &self.leading {
            Some(Leading { leader, .. }) => leader.drive_until(state, upto, &clock::boot_time, END_PATIENCE),
            None => self.await_shadow(state, upto),
        })
    }

    /// Sends the shadow, if there is one, the journal up to this position at least.
    ///
    /// # Errors
    /// Those of the shadow.
    pub fn await_shadow(&self, state: &mut NodeCore, upto: JournalPosition) -> Result<(), StoreError> {
        let is_acknowledged = state.journal.as_ref().is_none_or(|journal| journal.is_acknowledged(upto));
        let shadow = self.shadow.as_ref().filter(|_| !is_acknowledged);
        shadow.map_or(Ok(()), |shadow| shadow.lock().catch_up(state))
    }

    /// Sends the replica what is new in the journal, from this thread. The node is not locked.
    pub fn send_frames(&self) {
        if let Some(Leading { leader, .. }) = &self.leading {
            leader.send_now(self);
        }
    }

    /// Returns for how long a mount's kernel may believe its cache.
    pub fn cache_ttl(&self) -> Duration {
        Duration::from_millis(self.config.cache_ttl_ms)
    }

    /// Begins the end of SharedFS.
    pub fn stop(&self) {
        self.lock().begin_end();
        self.watcher.wake();
        self.pool.end();
        self.file_guard.end();
    }
}
