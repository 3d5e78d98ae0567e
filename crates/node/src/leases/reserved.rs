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
use ashlar_types::{Errno, InodeId, LeaseMode, LeaseScope, SessionId, WantedLease};
use ashlar_wire::{LeaseRequest, Need, ReserveReason, SessionKind};

use crate::leases::grant::report_store_error;
use crate::leases::leasing::Ancestors;
use crate::node::Node;

/// The most reservations of all mounts.
///
/// There are some for each inode that a mount may have open.
const RESERVED_MAX: usize = 1 << 18;

/// The reserved inodes, with the reserving session and its reason.
pub type Reservations = BTreeSet<(InodeId, SessionId, ReserveReason)>;

/// Reserves an inode for the kernel, and returns the leases that the mount takes with it.
///
/// They must be taken from all sessions that may hold none then.
///
/// # Errors
/// `EPERM` for sessions other than mounts'; `ESTALE` if the inode is gone; `ENFILE` if too many are reserved; `EIO`.
pub fn reserve(state: &mut Node, id: SessionId, inode: InodeId, reason: ReserveReason) -> Result<LeaseRequest, Errno> {
    if state.live(id).ok_or(Errno::EIO)?.identity.kind != SessionKind::Mount {
        return Err(Errno::EPERM);
    }
    let found = state.store.inode(inode).map_err(|error| report_store_error(&error))?.ok_or(Errno::ESTALE)?;
    if reason == ReserveReason::WatchedAll && inode != InodeId::ROOT {
        return Err(Errno::EINVAL);
    }
    if state.reservations.len() >= RESERVED_MAX {
        return Err(Errno::ENFILE);
    }
    // A mount that repeats its reasons may lack the lease of an inode that is reserved already.
    state.reservations.insert((inode, id, reason));
    update_reach(state, inode, found.is_directory());
    let is_whole = reach_of(reason, found.is_directory()) != Reach::Inode;
    let scope = if is_whole { LeaseScope::Subtree } else { LeaseScope::Node };
    // The mount holds the leases from now on. It asks for the state when it needs it.
    Ok(LeaseRequest { lease: WantedLease { inode, mode: LeaseMode::Write, scope }, need: Need::default() })
}

/// Ends one reason for a reservation.
pub fn end_reservation(state: &mut Node, id: SessionId, inode: InodeId, reason: ReserveReason) -> Result<(), Errno> {
    if state.reservations.remove(&(inode, id, reason)) {
        let found = state.store.inode(inode).map_err(|error| report_store_error(&error))?;
        update_reach(state, inode, found.is_some_and(|found| found.is_directory()));
    }
    Ok(())
}

/// Ends all reservations of a session.
pub fn end_session(state: &mut Node, id: SessionId) {
    let ended: Vec<_> = state.reservations.iter().filter(|(_, owner, _)| *owner == id).copied().collect();
    for reservation @ (inode, ..) in ended {
        state.reservations.remove(&reservation);
        let is_directory = state.store.inode(inode).ok().flatten().is_some_and(|found| found.is_directory());
        update_reach(state, inode, is_directory);
    }
}

/// Removes the reservations of a freed inode, whose number may be reused one day.
pub fn forget_inode(reservations: &mut Reservations, inode: InodeId) {
    let of_it: Vec<_> = reservations_of(reservations, inode).collect();
    of_it.iter().for_each(|reservation| _ = reservations.remove(reservation));
}

/// Returns the reservations of one inode.
fn reservations_of(
    reservations: &Reservations,
    inode: InodeId,
) -> impl Iterator<Item = (InodeId, SessionId, ReserveReason)> + '_ {
    let first = (inode, SessionId::SHARED_FS, ReserveReason::Mapped);
    reservations.range(first..).take_while(move |(reserved, ..)| *reserved == inode).copied()
}

fn reach_of(reason: ReserveReason, is_directory: bool) -> Reach {
    match reason {
        ReserveReason::WatchedAll => Reach::All,
        ReserveReason::Watched if is_directory => Reach::Directory,
        ReserveReason::Watched | ReserveReason::Mapped => Reach::Inode,
    }
}

/// Returns whether a program watches the entries of a directory.
pub fn is_watched(reservations: &Reservations, directory: InodeId) -> bool {
    let is_watch = |reason| matches!(reason, ReserveReason::Watched | ReserveReason::WatchedAll);
    [directory, InodeId::ROOT]
        .into_iter()
        .flat_map(|inode| reservations_of(reservations, inode))
        .any(|(inode, _, reason)| is_watch(reason) && (inode == directory || reason == ReserveReason::WatchedAll))
}

/// Reports how far the reasons for a reservation reach to the lease manager.
fn update_reach(state: &mut Node, inode: InodeId, is_directory: bool) {
    let Node { leasing, store, reservations, .. } = state;
    match reservations_of(reservations, inode).map(|(.., reason)| reach_of(reason, is_directory)).max() {
        Some(reach) => leasing.manager.reserve(inode, reach, &Ancestors(store)),
        None => leasing.manager.free_reserved(inode),
    }
}
