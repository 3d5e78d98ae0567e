//! Reserved inodes: only admitted sessions may hold leases that cover them.
//!
//! SharedFS admits the sessions of mounts, and those of programs that the kernel can't serve instead. It refuses a
//! request of another session for such a lease ([`LeaseManager::refuses`]) before the request enters the queue. The
//! manager itself lets no wider lease reach a reserved inode. A session that is not admitted gets no subtree lease with
//! a reserved inode below, and no lease on the files of a directory that contains one.
//!
//! A reservation by itself takes no lease. The session that reserves asks for a write lease on the inode, or on
//! everything below the directory. That request takes the leases of other sessions there, in its turn. The write lease
//! stays until another session asks for it: no lease on a reserved inode is evicted.
//!
//! Invariant: as long as an admitted session holds a lease at a reserved inode, no other session's lease governs it.

use std::collections::{BTreeMap, BTreeSet};

use ashlar_types::{InodeId, LeaseScope, SessionId, WantedLease};

use crate::evaluate::Work;
use crate::leases_below::LeasesBelow;
use crate::{Ancestry, LeaseManager};

/// The inodes that a reservation covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reach {
    /// The inode alone.
    Inode,
    /// A directory, its files, and its subdirectories without their content.
    Directory,
    /// All inodes, wherever they are. Only the root's reservation has this reach.
    All,
}

/// The reserved inodes, and the admitted sessions.
#[derive(Debug, Default)]
pub(crate) struct ReservedInodes {
    admitted: BTreeSet<SessionId>,
    inodes: BTreeMap<InodeId, Reach>,
    /// Whether one of them covers all inodes.
    is_all: bool,
    /// The places of the reserved inodes in the tree, all counted under SharedFS.
    below: LeasesBelow,
}

impl ReservedInodes {
    fn is_free_to(&self, session: SessionId) -> bool {
        self.inodes.is_empty() || self.admitted.contains(&session)
    }

    fn covers(&self, inode: InodeId, ancestry: &impl Ancestry) -> bool {
        let home = || ancestry.home(inode).directory;
        self.is_all || self.inodes.contains_key(&inode) || home().is_some_and(|home| self.reaches_into(home))
    }

    /// Whether the content of a directory is reserved with it.
    fn reaches_into(&self, directory: InodeId) -> bool {
        self.inodes.get(&directory) == Some(&Reach::Directory)
    }

    /// Whether reservations allow a session a subtree lease on a directory.
    pub fn admits_below(&self, session: SessionId, directory: InodeId, ancestry: &impl Ancestry) -> bool {
        let is_any_below = || self.below.has_others(directory, SessionId(u64::MAX));
        self.is_free_to(session) || !is_any_below() && !self.covers(directory, ancestry)
    }

    /// Whether reservations allow a session a lease on the files of a directory.
    pub fn admits_files(&self, session: SessionId, directory: InodeId) -> bool {
        let is_reserved = |inode: InodeId| self.inodes.contains_key(&inode);
        let is_any = || self.is_all || is_reserved(directory) || self.below.children(directory).any(is_reserved);
        self.is_free_to(session) || !is_any()
    }

    fn update_is_all(&mut self) {
        self.is_all = self.inodes.get(&InodeId::ROOT) == Some(&Reach::All);
    }

    /// Whether a lease at an inode is exempt from eviction.
    pub fn keeps(&self, inode: InodeId) -> bool {
        self.inodes.contains_key(&inode)
    }

    /// Records that the inode is below `to` now; `None`: below no directory.
    pub fn record_move(&mut self, inode: InodeId, to: Option<InodeId>, ancestry: &impl Ancestry) {
        self.below.record_move(inode, to, ancestry);
    }

    /// Removes a session that has ended.
    pub fn forget_session(&mut self, session: SessionId) {
        self.admitted.remove(&session);
    }
}

impl LeaseManager {
    /// Allows the session to hold leases on reserved inodes, from now on.
    pub fn admit_to_reserved(&mut self, session: SessionId) {
        self.reserved.admitted.insert(session);
    }

    /// Reserves an inode, or changes the reach of its reservation.
    pub fn reserve(&mut self, inode: InodeId, reach: Reach, ancestry: &impl Ancestry) {
        if self.reserved.inodes.insert(inode, reach).is_none() {
            self.reserved.below.add(inode, SessionId::SHARED_FS, ancestry);
        }
        self.reserved.update_is_all();
    }

    /// Ends the reservation of an inode.
    pub fn free_reserved(&mut self, inode: InodeId) {
        if self.reserved.inodes.remove(&inode).is_some() {
            self.reserved.below.remove(inode, SessionId::SHARED_FS);
            self.reserved.update_is_all();
        }
    }

    /// Takes the leases on an inode that has moved to where it is reserved, from sessions that are not admitted.
    pub(crate) fn take_if_reserved(&mut self, inode: InodeId, ancestry: &impl Ancestry) {
        let holders: Vec<_> = self.leases.holders_at(inode).map(|(session, _)| session).collect();
        let refused = holders.into_iter().filter(|session| self.is_reserved_from(*session, inode, ancestry));
        let releases: Vec<_> = refused.map(|session| Work::Release { session, inode }).collect();
        self.queue.extend(releases);
    }

    /// Whether a session may hold no lease on an inode, since the inode is reserved.
    #[must_use]
    pub fn is_reserved_from(&self, session: SessionId, inode: InodeId, ancestry: &impl Ancestry) -> bool {
        !self.reserved.is_free_to(session) && self.reserved.covers(inode, ancestry)
    }

    /// Whether a session may not have a lease, since the lease would cover reserved inodes of others.
    #[must_use]
    pub fn refuses(&self, session: SessionId, want: &WantedLease, ancestry: &impl Ancestry) -> bool {
        self.is_reserved_from(session, want.inode, ancestry)
            || want.scope == LeaseScope::Subtree && !self.reserved.admits_below(session, want.inode, ancestry)
    }
}
