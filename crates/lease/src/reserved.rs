//! Reserved inodes: only admitted sessions may hold leases that cover them.
//!
//! SharedFS admits the sessions of mounts, and those of programs that the kernel can't serve instead. A request of
//! another session for such a lease is refused ([`LeaseManager::refuses`]) before it enters the queue. The manager
//! itself lets nothing wider reach a reserved inode: a session that is not admitted gets no subtree lease with one
//! below, and no lease on the files of a directory in which one is.
//!
//! A reservation by itself takes no lease. The session that reserves asks for a lease to write on the inode, or on all
//! below the directory; that one takes the leases of others there, in its turn. It stays until another session asks for
//! it: no lease on a reserved inode makes room for others.
//!
//! Invariant: as long as an admitted session holds a lease at a reserved inode, no other session's lease governs it.

use std::collections::{BTreeMap, BTreeSet};

use ashlar_types::{InodeId, SessionId};

use crate::below::Below;
use crate::evaluate::Work;
use crate::{Ancestry, LeaseManager, Scope, Want};

/// Stands for all reservations where leases are counted by session.
const COUNTED_AS: SessionId = SessionId(0);

/// How far a reservation reaches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reach {
    /// The inode.
    Inode,
    /// A directory, and what is in it: files, and directories without what is in those.
    Directory,
    /// All inodes that there are, wherever they are: the root's reservation alone.
    All,
}

/// The reserved inodes, and the admitted sessions.
#[derive(Debug, Default)]
pub(crate) struct ReservedInodes {
    admitted: BTreeSet<SessionId>,
    inodes: BTreeMap<InodeId, Reach>,
    /// Whether one of them reaches everywhere.
    is_all: bool,
    /// Where they are.
    below: Below,
}

impl ReservedInodes {
    fn is_free_to(&self, session: SessionId) -> bool {
        self.inodes.is_empty() || self.admitted.contains(&session)
    }

    fn covers(&self, inode: InodeId, ancestry: &impl Ancestry) -> bool {
        let home = || ancestry.home(inode).directory;
        self.is_all || self.inodes.contains_key(&inode) || home().is_some_and(|home| self.reaches_into(home))
    }

    /// Whether what is in a directory is reserved with it.
    fn reaches_into(&self, directory: InodeId) -> bool {
        self.inodes.get(&directory) == Some(&Reach::Directory)
    }

    /// Whether a session may hold a lease on all below a directory, as far as reservations go.
    pub fn admits_below(&self, session: SessionId, directory: InodeId, ancestry: &impl Ancestry) -> bool {
        let is_any_below = || self.below.has_others(directory, SessionId(u64::MAX));
        self.is_free_to(session) || !is_any_below() && !self.covers(directory, ancestry)
    }

    /// Whether a session may hold a lease on the files of a directory, as far as reservations go.
    pub fn admits_files(&self, session: SessionId, directory: InodeId) -> bool {
        let is_reserved = |inode: InodeId| self.inodes.contains_key(&inode);
        let is_any = || self.is_all || is_reserved(directory) || self.below.children(directory).any(is_reserved);
        self.is_free_to(session) || !is_any()
    }

    fn find_all(&mut self) {
        self.is_all = self.inodes.get(&InodeId::ROOT) == Some(&Reach::All);
    }

    /// Whether a lease at an inode is not to make room for others.
    pub fn keeps(&self, inode: InodeId) -> bool {
        self.inodes.contains_key(&inode)
    }

    /// The inode is below `to` now; `None`: below nothing.
    pub fn moved(&mut self, inode: InodeId, to: Option<InodeId>, ancestry: &impl Ancestry) {
        self.below.moved(inode, to, ancestry);
    }

    /// The session is no more.
    pub fn forget_session(&mut self, session: SessionId) {
        self.admitted.remove(&session);
    }
}

impl LeaseManager {
    /// The session may hold leases on what is reserved, from now on.
    pub fn admit_to_reserved(&mut self, session: SessionId) {
        self.reserved.admitted.insert(session);
    }

    /// Reserves an inode, or changes how far its reservation reaches.
    pub fn reserve(&mut self, inode: InodeId, reach: Reach, ancestry: &impl Ancestry) {
        if self.reserved.inodes.insert(inode, reach).is_none() {
            self.reserved.below.add(inode, COUNTED_AS, ancestry);
        }
        self.reserved.find_all();
    }

    /// Ends the reservation of an inode.
    pub fn free_reserved(&mut self, inode: InodeId) {
        if self.reserved.inodes.remove(&inode).is_some() {
            self.reserved.below.remove(inode, COUNTED_AS);
            self.reserved.find_all();
        }
    }

    /// The inode has come to where it's reserved: sessions that may hold none lose the leases on itself.
    pub(crate) fn take_if_reserved(&mut self, inode: InodeId, ancestry: &impl Ancestry) {
        let holders: Vec<_> = self.holds.holders_at(inode).map(|(session, _)| session).collect();
        let refused = holders.into_iter().filter(|session| self.is_reserved_from(*session, inode, ancestry));
        let releases: Vec<_> = refused.map(|session| Work::Release { session, inode }).collect();
        self.queue.extend(releases);
    }

    /// Whether a session may hold no lease on an inode, since it is reserved for others.
    #[must_use]
    pub fn is_reserved_from(&self, session: SessionId, inode: InodeId, ancestry: &impl Ancestry) -> bool {
        !self.reserved.is_free_to(session) && self.reserved.covers(inode, ancestry)
    }

    /// Whether a session may not have a lease that it wants, since that would cover what is reserved for others.
    #[must_use]
    pub fn refuses(&self, session: SessionId, want: &Want, ancestry: &impl Ancestry) -> bool {
        self.is_reserved_from(session, want.inode, ancestry)
            || want.scope == Scope::Subtree && !self.reserved.admits_below(session, want.inode, ancestry)
    }
}
