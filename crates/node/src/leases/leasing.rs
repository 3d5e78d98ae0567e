//! The lease manager with its requests and answers.
//!
//! Records are validated by its leases.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use ashlar_lease::{Ancestry, InodeHome, LeaseManager, Limits, RequestError, RequestId, RequestedLease, SlotWord};
use ashlar_store::{Store, StoreError};
use ashlar_types::{Errno, Inode, InodeId, LeaseMode, SessionId};
use ashlar_update::{Applied, Update};
use ashlar_wire::{LEASE_SLOTS, LeaseRequest, LeaseWord, SessionKind};

use crate::leases::grant::{GrantAnswer, GrantDependencies};
use crate::leases::kernel_notifier::KernelTicket;
use crate::limits::NodeLimits;
use crate::records::validate::Leases;
use crate::sessions::session::ServedSession;
use crate::time::NodeTime;

/// How long a request that must wait pauses before it checks again.
const PAUSE_MIN: Duration = Duration::from_micros(20);
const PAUSE_MAX: Duration = Duration::from_millis(10);
/// The same while it waits for a session to use its fresh grant.
///
/// That rarely takes longer.
const PAUSE_IN_USE: Duration = Duration::from_micros(50);

/// The leases that a request wants.
#[derive(Clone, Debug, Default)]
pub struct WantedLeases {
    /// Leases, and the state to send with each.
    pub wants: Vec<LeaseRequest>,
    /// How many of them, the first ones, the session asks for.
    ///
    /// The others are grants that it may need next.
    pub asked: usize,
    /// Bytes of memory that the answer may take.
    pub bytes_max: usize,
}

/// The lease manager, and the requests and answers that pass through it.
pub struct Leasing {
    /// Decides on all leases.
    pub manager: LeaseManager,
    limits: Limits,
    /// The wants of each request that waits.
    pub wanted: BTreeMap<RequestId, WantedLeases>,
    /// Answers that their threads have not fetched yet.
    pub answers: BTreeMap<RequestId, GrantAnswer>,
    /// Notifications of kernels that are under way.
    pub tickets: Vec<Arc<dyn KernelTicket>>,
    dropped: Vec<SessionId>,
}

/// The applied tree, as the lease manager sees it.
pub struct Ancestors<'a>(pub &'a Store);

impl Ancestry for Ancestors<'_> {
    fn home(&self, inode: InodeId) -> InodeHome {
        if inode == InodeId::RENAME {
            return InodeHome { directory: Some(InodeId::ROOT), is_directory: true };
        }
        self.0.inode(inode).ok().flatten().map(|found| home_of(inode, &found)).unwrap_or_default()
    }
}

/// Returns where an inode is, as the lease manager sees it.
pub fn home_of(id: InodeId, inode: &Inode) -> InodeHome {
    let is_directory = inode.is_directory();
    let is_below = inode.links == 1 || is_directory && inode.links > 0;
    InodeHome { directory: (is_below && inode.parent != id).then_some(inode.parent), is_directory }
}

/// The leases of one session.
pub struct SessionLeases<'a> {
    manager: &'a LeaseManager,
    session: SessionId,
    store: &'a Store,
}

impl Leases for SessionLeases<'_> {
    fn may_write(&self, inode: InodeId) -> bool {
        self.manager.may_write(self.session, inode, &Ancestors(self.store))
    }
}

/// Inodes that an update may move, and where each was before.
pub type MovedInodes = Vec<(InodeId, InodeHome)>;

impl Leasing {
    /// Returns a state without leases.
    pub fn new(limits: &NodeLimits) -> Self {
        let limits = Limits {
            hold_us: limits.lease_hold_us,
            lease_ttl_us: limits.lease_ttl_us,
            table_slots: LEASE_SLOTS,
            ..Limits::default()
        };
        Self {
            manager: LeaseManager::new(limits),
            limits,
            wanted: BTreeMap::new(),
            answers: BTreeMap::new(),
            tickets: Vec::new(),
            dropped: Vec::new(),
        }
    }

    /// Takes up the lease tables of running sessions.
    ///
    /// It also takes up how far other sessions may have seen their logs.
    pub fn restore<'a>(&mut self, store: &Store, sessions: impl Iterator<Item = &'a ServedSession>) {
        let (mut words, mut applied, mut all) = (Vec::new(), Vec::new(), Vec::new());
        for session in sessions {
            all.push(session);
            applied.push((session.id, session.validated));
            words.extend((0..session.lease_room).filter_map(|slot| restore_word(session, slot)));
        }
        self.manager = LeaseManager::restore(self.limits, &words, &applied, &Ancestors(store));
        all.into_iter().for_each(|session| self.take_up(session));
    }

    /// Registers a session with the manager.
    pub fn take_up(&mut self, session: &ServedSession) {
        self.manager.set_table_slots(session.id, session.lease_room);
        if session.identity.kind == SessionKind::Mount {
            self.manager.admit_to_reserved(session.id);
        }
    }

    /// Returns the leases of a session, by which its records are validated.
    pub fn leases_of<'a>(&'a self, session: SessionId, store: &'a Store) -> SessionLeases<'a> {
        SessionLeases { manager: &self.manager, session, store }
    }

    /// Returns the inodes that an update may move, before it's applied.
    pub fn find_moves(store: &Store, update: &Update<'_>) -> Result<MovedInodes, StoreError> {
        let inodes = match update {
            Update::Rename(rename) => [Some(rename.inode), rename.target],
            Update::Link { inode, .. } | Update::Unlink { inode, .. } | Update::RemoveDirectory { inode, .. } => {
                [Some(*inode), None]
            }
            _ => return Ok(MovedInodes::new()),
        };
        let mut moves = MovedInodes::new();
        for id in inodes.into_iter().flatten() {
            if let Some(found) = store.inode(id)? {
                moves.push((id, home_of(id, &found)));
            }
        }
        Ok(moves)
    }

    /// Reports to the manager what an applied update has made, moved and freed.
    pub fn report_applied(
        &mut self,
        store: &Store,
        session: SessionId,
        update: &Update<'_>,
        applied: Applied,
        moves: MovedInodes,
    ) -> Result<(), StoreError> {
        let ancestors = Ancestors(store);
        match update {
            Update::Create(create) => {
                let is_directory = create.kind == ashlar_types::FileKind::Directory;
                self.manager.handle_made(session, create.inode, create.parent, is_directory, &ancestors);
                if create.name.is_empty() {
                    // Its maker knows it through the directory, where it has no name.
                    self.manager.handle_moved(create.inode, Some(create.parent), None, is_directory, &ancestors);
                }
            }
            Update::Rename(rename) => {
                if let Some(whiteout) = rename.makes() {
                    self.manager.handle_made(session, whiteout.inode, whiteout.parent, false, &ancestors);
                }
            }
            _ => {}
        }
        for (id, from) in moves {
            let to = store.inode(id)?.and_then(|found| home_of(id, &found).directory);
            if applied.freed != Some(id) && from.directory != to {
                self.manager.handle_moved(id, from.directory, to, from.is_directory, &ancestors);
            }
        }
        if let Some(id) = applied.freed {
            self.manager.handle_gone(id);
        }
        Ok(())
    }

    /// Queues a fenced session: its leases are taken after the current step.
    pub fn drop_leases_later(&mut self, session: SessionId) {
        self.dropped.push(session);
    }

    /// Adds a notification of a kernel, and forgets those that are over.
    pub fn add_ticket(&mut self, ticket: Arc<dyn KernelTicket>) {
        self.tickets.retain(|ticket| !ticket.is_done());
        self.tickets.push(ticket);
    }

    /// Returns a session whose leases are to be taken.
    pub fn take_dropped(&mut self) -> Option<SessionId> {
        self.dropped.pop()
    }

    /// Returns whether a session is refused a lease on a reserved inode.
    ///
    /// The lease would cover it, and the session is not a mount's.
    pub fn is_refused(&self, store: &Store, id: SessionId, want: &LeaseRequest) -> bool {
        self.manager.refuses(id, &want.lease, &Ancestors(store))
    }

    /// Queues a session's request for leases.
    ///
    /// # Errors
    /// `EAGAIN` if too many wait, `EINVAL` if it asks for too many at once, `EIO` if the session has ended.
    pub fn request_leases(
        &mut self,
        store: &Store,
        now_us: u64,
        (id, is_mount): (SessionId, bool),
        wanted: WantedLeases,
    ) -> Result<RequestId, Errno> {
        // A kernel that goes through a tree has no grant cache. It would have to be notified of each lease that is
        // taken back.
        let lease = |want: &LeaseRequest| RequestedLease {
            lease: want.lease,
            may_widen: want.lease.mode.is_write() || is_mount,
        };
        let asked: Vec<_> = wanted.wants.iter().map(lease).collect();
        let request = self.manager.handle_request(now_us, id, &asked, &Ancestors(store));
        let request = request.map_err(|error| match error {
            RequestError::QueueFull(_) => Errno::EAGAIN,
            RequestError::TooManyWants(_) | RequestError::OddScope(_) => Errno::EINVAL,
            RequestError::Ended(_) => Errno::EIO,
        })?;
        self.wanted.insert(request, wanted);
        Ok(request)
    }

    /// Returns the lease that a session holds on an inode already.
    ///
    /// The dependencies of the inode's state come with it.
    pub fn find_covering(
        &mut self,
        store: &Store,
        now_us: u64,
        id: SessionId,
        inode: InodeId,
        mode: LeaseMode,
    ) -> Option<(ashlar_lease::Grant, GrantDependencies)> {
        self.manager.find_covering(now_us, id, inode, mode, &Ancestors(store))
    }

    /// Returns when a request that waits for a grant must be advanced at the latest.
    #[must_use]
    pub fn next_decision(&self, now: NodeTime) -> Duration {
        let pause = |until: u64| {
            Duration::from_micros(until.saturating_sub(now.since_boot_us())).clamp(PAUSE_MIN, PAUSE_IN_USE)
        };
        now.since_boot + self.manager.next_time_us().map_or(PAUSE_MAX, pause)
    }

    /// Returns names and numbers, for `status`.
    pub fn counters(&self) -> Vec<(String, u64)> {
        let stats = self.manager.stats();
        let named = [
            ("leases_held", stats.entries),
            ("lease_splits", stats.splits),
            ("lease_downgrades", stats.downgrades),
            ("lease_requests_waiting", stats.waiting),
        ];
        named.map(|(name, number)| (name.to_owned(), number)).to_vec()
    }
}

/// Returns the content of a slot of a session's table, if the slot was ever used.
fn restore_word(session: &ServedSession, slot: u32) -> Option<SlotWord> {
    let word = session.leases.word(slot);
    (word != LeaseWord::default()).then(|| SlotWord {
        session: session.id,
        slot,
        inode: session.leases.inode(slot),
        generation: word.generation(),
        mode: word.may_read().then(|| LeaseMode::new(word.may_write())),
        scope: word.scope(),
    })
}

/// Returns the lease word for a slot word.
pub fn lease_word(word: &SlotWord) -> LeaseWord {
    match word.mode {
        None => LeaseWord::revoked(word.generation),
        Some(mode) => LeaseWord::new(word.generation, word.scope, mode.is_write()),
    }
}
