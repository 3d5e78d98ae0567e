//! Inodes that are reserved for the kernel, and the reasons.
//!
//! LibFS in a program does not know all that the kernel knows of a file: pages that a mapping has changed, or programs
//! that watch for changes. So a mount's session reserves such an inode ([`Request::Reserve`]). From then on the lease
//! manager refuses leases that cover it to all sessions but mounts'. Their front ends let the kernel serve the call.
//!
//! A reservation lasts as long as any mount has a reason for it. After a restart of SharedFS, the mounts reserve again
//! before SharedFS serves them otherwise, so reservations are not stored.
//!
//! [`Request::Reserve`]: ashlar_wire::Request::Reserve

use std::collections::BTreeSet;

use ashlar_lease::Reach;
use ashlar_store::Store;
use ashlar_types::{Errno, InodeId, LeaseMode, LeaseScope, SessionId, WantedLease};
use ashlar_wire::{LeaseRequest, Need, ReserveReason, SessionKind};

use crate::leases::grant::report_store_error;
use crate::leases::leasing::{Ancestors, Leasing};
use crate::sessions::session::ServedSession;

/// The most reservations of all mounts.
///
/// There are some for each inode that a mount may have open.
const RESERVED_MAX: usize = 1 << 18;

/// The reserved inodes, with the reserving session and its reason.
#[derive(Debug, Default)]
pub struct Reservations(BTreeSet<(InodeId, SessionId, ReserveReason)>);

impl Reservations {
    /// Reserves an inode for the kernel, and returns the leases that the mount takes with it.
    ///
    /// They must be taken from all sessions that may hold none then.
    ///
    /// # Errors
    /// `EPERM` for sessions other than mounts'; `ESTALE` if the inode is gone; `ENFILE` if too many are reserved;
    /// `EIO`.
    pub fn reserve(
        &mut self,
        session: &ServedSession,
        (inode, reason): (InodeId, ReserveReason),
        leasing: &mut Leasing,
        store: &Store,
    ) -> Result<LeaseRequest, Errno> {
        if session.identity.kind != SessionKind::Mount {
            return Err(Errno::EPERM);
        }
        let found = store.inode(inode).map_err(|error| report_store_error(&error))?.ok_or(Errno::ESTALE)?;
        if reason == ReserveReason::WatchedAll && inode != InodeId::ROOT {
            return Err(Errno::EINVAL);
        }
        if self.0.len() >= RESERVED_MAX {
            return Err(Errno::ENFILE);
        }
        // A mount that repeats its reasons may lack the lease of an inode that is reserved already.
        self.0.insert((inode, session.id, reason));
        self.update_reach(leasing, store, inode, found.is_directory());
        let is_whole = reach_of(reason, found.is_directory()) != Reach::Inode;
        let scope = if is_whole { LeaseScope::Subtree } else { LeaseScope::Node };
        // The mount holds the leases from now on. It asks for the state when it needs it.
        Ok(LeaseRequest { lease: WantedLease { inode, mode: LeaseMode::Write, scope }, need: Need::default() })
    }

    /// Ends one reason for a reservation.
    pub fn end_reservation(
        &mut self,
        (inode, id, reason): (InodeId, SessionId, ReserveReason),
        leasing: &mut Leasing,
        store: &Store,
    ) -> Result<(), Errno> {
        if self.0.remove(&(inode, id, reason)) {
            let found = store.inode(inode).map_err(|error| report_store_error(&error))?;
            self.update_reach(leasing, store, inode, found.is_some_and(|found| found.is_directory()));
        }
        Ok(())
    }

    /// Ends all reservations of a session.
    pub fn end_session(&mut self, id: SessionId, leasing: &mut Leasing, store: &Store) {
        let ended: Vec<_> = self.0.iter().filter(|(_, owner, _)| *owner == id).copied().collect();
        for reservation @ (inode, ..) in ended {
            self.0.remove(&reservation);
            let is_directory = store.inode(inode).ok().flatten().is_some_and(|found| found.is_directory());
            self.update_reach(leasing, store, inode, is_directory);
        }
    }

    /// Removes the reservations of a freed inode, whose number may be reused one day.
    pub fn forget_inode(&mut self, inode: InodeId) {
        let of_it: Vec<_> = self.of_inode(inode).collect();
        of_it.iter().for_each(|reservation| _ = self.0.remove(reservation));
    }

    /// Returns the reservations of one inode.
    fn of_inode(&self, inode: InodeId) -> impl Iterator<Item = (InodeId, SessionId, ReserveReason)> + '_ {
        let first = (inode, SessionId::SHARED_FS, ReserveReason::Mapped);
        self.0.range(first..).take_while(move |(reserved, ..)| *reserved == inode).copied()
    }

    /// Returns whether a program watches the entries of a directory.
    pub fn is_watched(&self, directory: InodeId) -> bool {
        let is_watch = |reason| matches!(reason, ReserveReason::Watched | ReserveReason::WatchedAll);
        [directory, InodeId::ROOT]
            .into_iter()
            .flat_map(|inode| self.of_inode(inode))
            .any(|(inode, _, reason)| is_watch(reason) && (inode == directory || reason == ReserveReason::WatchedAll))
    }

    /// Reports how far the reasons for a reservation reach to the lease manager.
    fn update_reach(&self, leasing: &mut Leasing, store: &Store, inode: InodeId, is_directory: bool) {
        match self.of_inode(inode).map(|(.., reason)| reach_of(reason, is_directory)).max() {
            Some(reach) => leasing.manager.reserve(inode, reach, &Ancestors(store)),
            None => leasing.manager.free_reserved(inode),
        }
    }
}

fn reach_of(reason: ReserveReason, is_directory: bool) -> Reach {
    match reason {
        ReserveReason::WatchedAll => Reach::All,
        ReserveReason::Watched if is_directory => Reach::Directory,
        ReserveReason::Watched | ReserveReason::Mapped => Reach::Inode,
    }
}
