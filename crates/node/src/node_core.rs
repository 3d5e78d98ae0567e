//! The parts of a node that decide together.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use ashlar_store::{Store, StoreError};
use ashlar_types::{InodeId, LogPosition, SessionId};

use crate::access::open_handles::HandleLeases;
use crate::access::tree_view::TreeView;
use crate::access::ways::Ways;
use crate::counters::EventCounters;
use crate::digest::commit_state::CommitState;
use crate::effects::{NodeEffect, PendingEffects};
use crate::journal::{BatchNotes, NodeJournal};
use crate::leases::grant_cache::GrantPublisher;
use crate::leases::lease_tables::LeaseTables;
use crate::leases::leasing::Leasing;
use crate::leases::reserved::Reservations;
use crate::limits::NodeLimits;
use crate::locks::locking::Locking;
use crate::recovery::state::{RecoveryPhase, RecoveryState};
use crate::sessions::identity::ProcessTable;
use crate::sessions::session::{Control, ServedSession};
use crate::sessions::session_table::SessionTable;
use crate::sessions::sharing::Sharing;
use crate::time::NodeTime;

/// All that a node knows, but for the requests that wait.
///
/// Each part has its own type, whose methods need no other part, or are lent it. A function takes all of them only if
/// it may apply records: that moves leases, rights, locks, credit and orphans at once.
pub struct NodeCore {
    /// The time of the last event.
    pub now: NodeTime,
    /// The terms under which it grants.
    pub limits: NodeLimits,
    /// Knows the processes of sessions.
    pub processes: Arc<dyn ProcessTable>,
    /// Acts that the shell is asked for.
    pub effects: PendingEffects,
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
    pub sessions: SessionTable,
    /// Whether a session has the arena to itself.
    pub sharing: Sharing,
    /// Inodes without links that may be open in a session.
    pub orphans: BTreeSet<InodeId>,
    /// Counts of events since the start.
    pub counters: EventCounters,
    /// The commits that are wanted, under way and over.
    pub commits: CommitState,
    /// A request waits for a digest.
    pub digest_wanted: bool,
    /// The huge page thread runs.
    pub makes_huge_pages: bool,
    /// No grant is sent before this time.
    ///
    /// An earlier SharedFS may have left kernels with stale caches.
    pub not_before: Duration,
    /// SharedFS is about to end.
    pub ending: bool,
    /// The shared area is unusable: SharedFS must end with this error.
    pub failure: Option<StoreError>,
    /// How far the recovery of logs has come.
    pub recovery: RecoveryState,
    /// Sealed logs that must be applied up to a position, before the lease manager goes on.
    pub sealed: VecDeque<(SessionId, LogPosition)>,
    /// The buffer into which batches of records are copied, one after the other.
    pub scratch: Vec<u8>,
    /// The buffer in which writes of a batch are joined.
    pub joined: Vec<u8>,
    /// The decisions of the lease manager so far, some of which are checked.
    pub decisions: u32,
}

impl NodeCore {
    /// Returns the parts of a node without sessions.
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
            journal: None,
            batch_notes: BatchNotes::default(),
            store,
            grant_cache: None,
            ways: Ways::default(),
            reservations: Reservations::default(),
            locking: Locking::default(),
            sessions: SessionTable::default(),
            sharing: Sharing::default(),
            orphans,
            counters: EventCounters::default(),
            commits: CommitState::default(),
            digest_wanted: false,
            makes_huge_pages: false,
            not_before: now.since_boot,
            ending: false,
            failure: None,
            recovery: RecoveryState::default(),
            sealed: VecDeque::new(),
            scratch: Vec::new(),
            joined: Vec::new(),
            decisions: 0,
        })
    }

    /// Returns whether there are several sessions, or were a short time ago.
    pub fn is_shared(&self) -> bool {
        self.sharing.is_shared(self.now.since_boot)
    }

    /// Writes into all control pages whether there are other sessions.
    ///
    /// Returns the sole mounts that have become shared, each with the number of the change that its kernel must follow.
    pub fn publish_sharing(&mut self) -> Vec<(Arc<Control>, u64)> {
        self.sharing.publish(&self.sessions, self.now.since_boot)
    }

    /// Returns the session, unless it's gone or fenced.
    pub fn live(&self, id: SessionId) -> Option<&ServedSession> {
        self.sessions.live(id)
    }

    /// Returns the sessions that are neither gone nor fenced.
    pub fn live_ids(&self) -> Vec<SessionId> {
        self.sessions.live_ids()
    }

    /// Takes the time from the shell.
    pub fn handle_time(&mut self, now: NodeTime) {
        self.now = now;
    }

    /// Returns the next act that the shell is asked for.
    pub fn poll_effect(&mut self) -> Option<NodeEffect> {
        self.effects.poll()
    }

    /// Returns whether SharedFS ends, or has failed: no commit need come any more.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.ending || self.failure.is_some()
    }

    /// Asks for a commit.
    pub fn request_commit(&mut self) {
        self.commits.is_wanted = true;
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
        use NodeEffect::{Commit, Digest, Replicate, WakeDigests, WakeGrants, WakeLocks};
        let all = [WakeGrants, WakeLocks, WakeDigests, Digest, Commit, Replicate];
        all.into_iter().for_each(|effect| self.effects.push(effect));
    }

    /// Returns the tree as sessions' users see it.
    pub fn tree(&self) -> TreeView<'_> {
        TreeView { store: &self.store, sessions: &self.sessions, ways: &self.ways }
    }

    /// Returns the leases under which sessions may have opened files.
    pub fn handle_leases(&self) -> HandleLeases<'_> {
        HandleLeases { store: &self.store, leasing: &self.leasing, grant_cache: self.grant_cache.as_ref() }
    }

    /// Returns the lease tables of all sessions.
    pub fn lease_tables(&mut self) -> LeaseTables<'_> {
        LeaseTables { sessions: &mut self.sessions, leasing: &mut self.leasing, grant_cache: self.grant_cache.as_ref() }
    }

    /// Begins recovery: the sessions are taken up next.
    pub fn begin_recovery(&mut self) {
        self.recovery.phase = RecoveryPhase::Recovering;
    }
}
