//! The state that SharedFS's one lock guards.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ashlar_store::{Store, StoreError};
use ashlar_types::{InodeId, LogPosition, SessionId};
use ashlar_update::{Applied, Update};
use ashlar_wire::SessionKind;

use crate::apply::Slice;
use crate::counters::EventCounters;
use crate::grant_cache::{self, GrantPublisher};
use crate::leasing::Leasing;
use crate::locking::Locking;
use crate::panics::Blame;
use crate::reserved::{self, Reservations};
use crate::session::{Control, ServedSession};
use crate::validate::{RecordRefusal, Violation};
use crate::ways::Ways;

/// How long a sole mount keeps its kernel from caching names.
///
/// The time counts from the end of the last other session. Where programs start and end all the time, each would
/// otherwise wait until the kernel has forgotten those names.
const SOLITUDE: Duration = Duration::from_secs(30);

/// How far SharedFS has come since its start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecoveryPhase {
    /// SharedFS applies the logs of sessions from before the start.
    ///
    /// Each is applied as far as its dependencies are.
    Recovering,
    /// Some dependencies are lost, and no log waits for them any more.
    Salvaging,
    /// All of these logs are applied.
    Running,
}

/// A condition without which a log can't be applied further.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnmetDependency {
    /// Another session's log must be applied first.
    ///
    /// It must be applied up to this position.
    Session(SessionId, LogPosition),
    /// Room, which other logs may give back, or a commit.
    Room,
}

/// The state that SharedFS's one lock guards.
pub struct State {
    /// The shared area.
    pub store: Store,
    /// Leases, and the requests for them.
    pub leasing: Leasing,
    /// Grants that all sessions may read without asking.
    ///
    /// `None` if the system gave no memory for them.
    pub grant_cache: Option<GrantPublisher>,
    /// The ways to inodes, as far as they were checked for sessions' users.
    pub ways: Ways,
    /// Inodes that only mounts' sessions may hold leases on.
    pub reservations: Reservations,
    /// File locks.
    pub locking: Locking,
    /// Sessions, also fenced ones, until their process is gone.
    pub sessions: BTreeMap<SessionId, ServedSession>,
    /// Inodes without links that may be open in a session.
    pub orphans: BTreeSet<InodeId>,
    /// Counts of events since the start.
    pub counters: EventCounters,
    /// When the oldest update was applied that no commit has taken yet.
    pub oldest_uncommitted: Option<Instant>,
    /// A thread waits for a commit.
    pub commit_wanted: bool,
    /// The commit thread is writing a batch.
    pub is_committing: bool,
    /// Commits begun.
    pub commits_begun: u64,
    /// Commits that ended well; see [`Self::commits_begun`].
    pub commits_ended: u64,
    /// A thread waits for a digest.
    pub digest_wanted: bool,
    /// The huge page thread runs.
    pub makes_huge_pages: bool,
    /// When there was last more than one session.
    pub last_shared: Option<Instant>,
    /// No grant is sent before this time.
    ///
    /// An earlier SharedFS may have left kernels with stale caches.
    pub not_before: Instant,
    /// SharedFS is about to end.
    pub ending: bool,
    /// The shared area is unusable: SharedFS must end with this error.
    pub failure: Option<StoreError>,
    /// How far the recovery of logs has come.
    pub phase: RecoveryPhase,
    /// At recovery: what each session's log waits for.
    pub unmet: BTreeMap<SessionId, UnmetDependency>,
    /// Sessions whose logs could not be read at recovery.
    pub lost: BTreeSet<SessionId>,
    /// Sealed logs that must be applied up to a position, before the lease manager goes on.
    pub sealed: VecDeque<(SessionId, LogPosition)>,
    /// The buffer into which batches of records are copied, one after the other.
    pub scratch: Vec<u8>,
    /// The buffer in which writes of a batch are joined.
    pub joined: Vec<u8>,
}

impl State {
    /// Returns the state of a store without sessions.
    pub fn new(store: Store, leasing: Leasing) -> Result<Self, StoreError> {
        let orphans = store.orphans()?.into_iter().collect();
        Ok(Self {
            store,
            leasing,
            grant_cache: None,
            ways: Ways::default(),
            reservations: Reservations::new(),
            locking: Locking::default(),
            sessions: BTreeMap::new(),
            orphans,
            counters: EventCounters::default(),
            oldest_uncommitted: None,
            commit_wanted: false,
            is_committing: false,
            commits_begun: 0,
            commits_ended: 0,
            digest_wanted: false,
            makes_huge_pages: false,
            last_shared: None,
            not_before: Instant::now(),
            ending: false,
            failure: None,
            phase: RecoveryPhase::Running,
            unmet: BTreeMap::new(),
            lost: BTreeSet::new(),
            sealed: VecDeque::new(),
            scratch: Vec::new(),
            joined: Vec::new(),
        })
    }

    /// Returns whether there are several sessions, or were within [`SOLITUDE`].
    pub fn is_shared(&self) -> bool {
        self.last_shared.is_some_and(|last| last.elapsed() < SOLITUDE)
    }

    /// Writes into all control pages whether there are other sessions.
    ///
    /// Sessions count that ended within [`SOLITUDE`]. Returns the sole mounts that have become shared, each with the
    /// number of the change that its kernel must follow.
    pub fn publish_sharing(&mut self) -> Vec<(Arc<Control>, u64)> {
        if self.sessions.len() > 1 {
            self.last_shared = Some(Instant::now());
        }
        let is_shared = self.is_shared();
        let is_program = |session: &&ServedSession| session.identity.kind == SessionKind::Process;
        let programs = self.sessions.values().filter(is_program).count() as u64;
        let mut disturbed = Vec::new();
        for session in self.sessions.values() {
            if session.identity.kind == SessionKind::Mount && session.control.programs() != programs {
                session.control.set_programs(programs);
                session.control.wake_programs();
            }
            let is_disturbed = is_shared && session.notifier.is_some() && !session.control.is_shared();
            let company = session.control.set_shared(is_shared);
            if is_disturbed {
                session.control.wake_company();
                disturbed.push((Arc::clone(&session.control), company));
            }
        }
        disturbed
    }

    /// Returns the session, unless it's gone or fenced.
    pub fn live(&self, id: SessionId) -> Option<&ServedSession> {
        self.sessions.get(&id).filter(|session| session.fenced.is_none())
    }

    /// Returns the sessions that are neither gone nor fenced.
    pub fn live_ids(&self) -> Vec<SessionId> {
        self.sessions.values().filter(|session| session.fenced.is_none()).map(|session| session.id).collect()
    }

    /// Applies a validated update.
    ///
    /// It reports to the lease manager which inodes the update moved.
    pub fn apply_update(
        &mut self,
        id: SessionId,
        end: LogPosition,
        update: &Update<'_>,
    ) -> Result<Applied, StoreError> {
        let others = || self.sessions.values().filter(|other| other.id != id && other.fenced.is_none());
        // Recovery sees handles as they are now. The logs are of a time when a session may still have had the inode
        // open and written to it. The inode may be freed when all logs are applied.
        let keeps_all = self.phase != RecoveryPhase::Running && id != SessionId::SHARED_FS && others().next().is_some();
        let may_free = |inode: InodeId| !keeps_all && !others().any(|other| other.has_opened(inode));
        let moves = Leasing::find_moves(&self.store, update)?;
        let applied = self.store.apply(id, end, update, &may_free)?;
        self.leasing.report_applied(&self.store, id, update, applied, moves)?;
        if self.ways.record_applied(&self.store, update)? {
            grant_cache::withdraw_hidden(self)?;
            self.keep_cut_ways()?;
        }
        self.record_placed(id, update)?;
        if let (Update::Accessed { inode, at }, Some(grant_cache)) = (update, &mut self.grant_cache) {
            // It takes no lease, so the published grant stands.
            grant_cache.record_access_time(*inode, *at, self.store.next_batch());
        }
        if let Update::Create(create) = update {
            self.note_own_handle(id, create.inode);
        }
        if let Some(inode) = applied.orphaned {
            self.orphans.insert(inode);
            self.note_own_handle(id, inode);
        }
        if let Some(inode) = applied.freed {
            self.orphans.remove(&inode);
            reserved::forget_inode(&mut self.reservations, inode);
        }
        if let Update::Link { inode, .. } = update {
            self.orphans.remove(inode);
        }
        Ok(applied)
    }

    /// Draws the consequences of a record that can't be applied.
    pub fn handle_refusal(&mut self, id: SessionId, refusal: RecordRefusal) {
        match refusal {
            RecordRefusal::Forged(violation) => self.fence(id, &violation),
            RecordRefusal::Unmet(other, position) => {
                self.unmet.insert(id, UnmetDependency::Session(other, position));
            }
            RecordRefusal::NotGranted(violation) => {
                let position = self.store.applied(id);
                tracing::warn!(session = id.0, %position, %violation, "the log is cut: the grant of its next record is lost");
                self.cut(id);
            }
            RecordRefusal::Store(StoreError::FullBlocks { .. } | StoreError::FullMetadata { .. })
                if self.phase == RecoveryPhase::Recovering =>
            {
                self.unmet.insert(id, UnmetDependency::Room);
            }
            RecordRefusal::Store(error @ (StoreError::FullBlocks { .. } | StoreError::FullMetadata { .. })) => {
                // Credit covers every record, so only damage leads here. The record is kept with its log in the
                // quarantine.
                tracing::error!(session = id.0, %error, "a record that its credit covers finds no room");
                self.fence(id, &Violation::Log(error.to_string()));
            }
            RecordRefusal::Store(error) => {
                tracing::error!(session = id.0, %error, "the shared area failed");
                self.failure.get_or_insert(error);
            }
        }
    }

    /// Cuts the log of a session whose process is gone: nothing more of it is applied.
    pub fn cut(&mut self, id: SessionId) {
        if let Some(session) = self.sessions.get_mut(&id) {
            (session.is_ending, session.is_cut) = (true, true);
            self.counters.logs_cut += 1;
        }
    }

    /// Fences a session: nothing more of its log is taken, and all its calls fail.
    ///
    /// Its leases are taken after the current step.
    pub fn fence(&mut self, id: SessionId, violation: &Violation) {
        let Some(session) = self.sessions.get_mut(&id) else { return };
        if session.fenced.is_some() {
            return;
        }
        let violation = if session.is_truncated() { &Violation::Truncated } else { violation };
        let (pid, uid, label) = (session.identity.process.pid, session.identity.uid, &session.identity.label);
        tracing::error!(session = id.0, pid, uid, %label, reason = %violation, "session fenced for a forged log");
        session.fenced = Some(violation.to_string());
        // A log that is damaged is fenced all the same.
        let _ = session.log.fence_session();
        session.control.set_fenced();
        session.account.granted = session.account.used;
        session.outstanding.clear();
        // The page has room for all slots.
        let _ = crate::session_page::clear_delegated(&*session.page);
        session.noted_locks.clear();
        self.counters.sessions_fenced += 1;
        self.commit_wanted = true;
        self.leasing.drop_leases_later(id);
        reserved::end_session(self, id);
        self.locking.end_session(id);
    }

    /// Returns the end of the settled part of a session's log.
    ///
    /// There, every slot is committed or void. A log that contradicts itself fences its session.
    pub fn settled(&mut self, id: SessionId) -> Option<LogPosition> {
        let session = self.live(id)?;
        let _blame = Blame::for_records(session, self.store.applied(id));
        let reason = match session.log.settled() {
            Ok(_) if session.is_truncated() => "it is truncated".to_owned(),
            Ok(settled) if settled >= self.store.applied(id) => return Some(settled),
            Ok(_) => "it goes backwards".to_owned(),
            Err(damaged) => damaged.to_string(),
        };
        self.fence(id, &Violation::Log(reason));
        None
    }

    /// Seals a session's log, which is then to be applied up to there ([`Self::apply_sealed`]).
    ///
    /// A lease of the session moves only afterwards.
    pub fn seal(&mut self, id: SessionId) {
        let Some(session) = self.live(id) else {
            self.sealed.push_back((id, LogPosition(0)));
            return;
        };
        let _blame = Blame::for_records(session, self.store.applied(id));
        let sealed = session.log.seal();
        self.counters.seals += 1;
        let end = match sealed {
            Ok((_, end)) => end,
            Err(damaged) => {
                self.fence(id, &Violation::Log(damaged.to_string()));
                LogPosition(0)
            }
        };
        self.sealed.push_back((id, end));
    }

    /// Applies a batch of the first sealed log; `None` if there is none, else whether that log is applied as a whole.
    pub fn apply_sealed(&mut self) -> Option<bool> {
        let (id, end) = *self.sealed.front()?;
        let is_over = self.apply(id, end, Slice::Batch);
        if is_over {
            self.sealed.pop_front();
            let position = self.store.applied(id);
            self.leasing.manager.handle_applied(id, position);
        }
        Some(is_over)
    }

    /// Seals a session's log and applies all of it.
    pub fn seal_and_apply(&mut self, id: SessionId) {
        let Some(session) = self.live(id) else { return };
        let _blame = Blame::for_records(session, self.store.applied(id));
        let sealed = session.log.seal();
        self.counters.seals += 1;
        match sealed {
            Ok((_, end)) => {
                self.apply(id, end, Slice::All);
            }
            Err(damaged) => self.fence(id, &Violation::Log(damaged.to_string())),
        }
    }

    /// Returns whether any session that is not fenced has the inode open.
    ///
    /// Recovery does not know yet which handles were opened by right.
    pub fn is_open(&self, inode: InodeId) -> bool {
        let has_opened = |session: &ServedSession| match self.phase {
            RecoveryPhase::Running => self.has_opened(session, inode),
            RecoveryPhase::Recovering | RecoveryPhase::Salvaging => session.control.has_open(inode),
        };
        self.sessions.values().any(|session| session.fenced.is_none() && has_opened(session))
    }
}
