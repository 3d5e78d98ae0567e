//! A node: its store, its sessions, and what they hold.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use ashlar_pmem::MediumKind;
use ashlar_store::{Store, StoreError};
use ashlar_types::{InodeId, LogPosition, SessionId};
use ashlar_wire::SessionKind;

use crate::access::ways::Ways;
use crate::counters::EventCounters;
use crate::effects::{NodeEffect, PendingEffects};
use crate::journal::{BatchNotes, NodeJournal};
use crate::leases::grant_cache::GrantPublisher;
use crate::leases::leasing::Leasing;
use crate::leases::reserved::Reservations;
use crate::locks::locking::Locking;
use crate::pending::PendingRequests;
use crate::sessions::identity::ProcessTable;
use crate::sessions::session::{Control, ServedSession};
use crate::time::NodeTime;

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

/// The terms under which a node grants.
#[derive(Clone, Copy, Debug)]
pub struct NodeLimits {
    /// Microseconds for which a fresh lease isn't revoked.
    pub lease_hold_us: u64,
    /// Microseconds after which an idle session loses its leases; 0: never.
    pub lease_ttl_us: u64,
    /// The arena's medium.
    pub medium: MediumKind,
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

/// A node.
pub struct Node {
    /// The time of the last event.
    pub now: NodeTime,
    /// The terms under which it grants.
    pub limits: NodeLimits,
    /// Knows the processes of sessions.
    pub processes: Arc<dyn ProcessTable>,
    /// Acts that the shell is asked for.
    pub effects: PendingEffects,
    /// Requests that could not be answered at once.
    pub pending: PendingRequests,
    /// The journal for replicas; a machine by itself has none.
    pub journal: Option<NodeJournal>,
    /// Decisions on the batch that is being applied, for replicas.
    pub batch_notes: BatchNotes,
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
    /// When the oldest update was applied that no commit has taken yet, since boot.
    pub oldest_uncommitted: Option<Duration>,
    /// A request waits for a commit.
    pub commit_wanted: bool,
    /// The commit thread is writing a batch.
    pub is_committing: bool,
    /// Commits begun.
    pub commits_begun: u64,
    /// Commits that ended well; see [`Self::commits_begun`].
    pub commits_ended: u64,
    /// A request waits for a digest.
    pub digest_wanted: bool,
    /// The huge page thread runs.
    pub makes_huge_pages: bool,
    /// When there was last more than one session, since boot.
    pub last_shared: Option<Duration>,
    /// No grant is sent before this time.
    ///
    /// An earlier SharedFS may have left kernels with stale caches.
    pub not_before: Duration,
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

impl Node {
    /// Returns a node without sessions.
    ///
    /// # Errors
    /// Those of the store.
    pub fn new(
        store: Store,
        limits: NodeLimits,
        processes: Arc<dyn ProcessTable>,
        now: NodeTime,
    ) -> Result<Self, StoreError> {
        let orphans = store.orphans()?.into_iter().collect();
        Ok(Self {
            now,
            leasing: Leasing::new(&limits),
            limits,
            processes,
            effects: PendingEffects::default(),
            pending: PendingRequests::default(),
            journal: None,
            batch_notes: BatchNotes::default(),
            store,
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
            not_before: now.since_boot,
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

    /// Returns whether there are several sessions, or were within `SOLITUDE`.
    pub fn is_shared(&self) -> bool {
        self.last_shared.is_some_and(|last| self.now.since_boot < last + SOLITUDE)
    }

    /// Writes into all control pages whether there are other sessions.
    ///
    /// Sessions count that ended within `SOLITUDE`. Returns the sole mounts that have become shared, each with the
    /// number of the change that its kernel must follow.
    pub fn publish_sharing(&mut self) -> Vec<(Arc<Control>, u64)> {
        if self.sessions.len() > 1 {
            self.last_shared = Some(self.now.since_boot);
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

    /// Takes the time from the shell.
    pub fn handle_time(&mut self, now: NodeTime) {
        self.now = now;
    }

    /// Returns the next act that the shell is asked for.
    pub fn poll_effect(&mut self) -> Option<NodeEffect> {
        self.effects.poll()
    }

    /// Returns whether batches must wait until a commit frees a part of the journal.
    #[must_use]
    pub fn is_journal_short(&self) -> bool {
        self.journal.as_ref().is_some_and(NodeJournal::is_short)
    }

    /// Asks for a commit.
    pub fn request_commit(&mut self) {
        self.commit_wanted = true;
        self.effects.push(NodeEffect::Commit);
    }

    /// Asks for a check of all logs.
    pub fn request_digest(&mut self) {
        self.digest_wanted = true;
        self.effects.push(NodeEffect::Digest);
    }

    /// Begins the end of SharedFS: requests that wait are given up.
    pub fn begin_end(&mut self) {
        self.ending = true;
        use NodeEffect::{Commit, Digest, WakeDigests, WakeGrants, WakeLocks};
        [WakeGrants, WakeLocks, WakeDigests, Digest, Commit].into_iter().for_each(|effect| self.effects.push(effect));
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
