//! Checks what sessions ask for, and says how much of it they may be granted.

use ashlar_store::{Store, StoreError};
use ashlar_types::{Access, Errno, InodeId, LeaseMode, LeaseScope, SessionId, WantedLease};
use ashlar_wire::{LeaseRequest, Need, Reply};

use crate::access::rights::{may_change, may_read, may_search};
use crate::access::tree_view::TreeView;
use crate::leases::grant::report_store_error;
use crate::leases::inode_state::directory_entry;
use crate::leases::leasing::{Leasing, home_of};
use crate::leases::scan_detection;
use crate::sessions::session_table::SessionTable;

/// Returns whether a session asks only for extents under leases that it holds.
///
/// The session itself applies to the answer what it has logged and SharedFS has not applied yet. So it need not wait
/// for that: otherwise a program that reads back what it wrote would wait for the digest of all that it has written
/// since.
pub fn is_extent_request(
    (store, leasing): (&Store, &mut Leasing),
    sessions: &SessionTable,
    now_us: u64,
    id: SessionId,
    wants: &[LeaseRequest],
) -> bool {
    // A session that knows nothing of an inode wants its extended attributes, too.
    let is_of_bytes = |want: &LeaseRequest| {
        let Need { contents, entries, xattrs, .. } = want.need;
        contents && !entries && !xattrs && want.lease.scope == LeaseScope::Node
    };
    let mut is_covered =
        |want: &LeaseRequest| leasing.find_covering(store, now_us, id, want.lease.inode, want.lease.mode).is_some();
    sessions.live(id).is_some()
        && wants.iter().all(is_of_bytes)
        && check_exists(store, wants).is_ok()
        && wants.iter().all(&mut is_covered)
}

/// Fails unless a session reaches a directory and has an access to it.
///
/// Reading goes on where it began before the directory was narrowed.
pub fn check_directory(tree: TreeView<'_>, id: SessionId, directory: InodeId, access: Access) -> Result<(), Errno> {
    let Some(session) = tree.sessions.ordinary(id) else { return Ok(()) };
    let found = tree.store.inode(directory).map_err(|error| report_store_error(&error))?.ok_or(Errno::ESTALE)?;
    let inode = (directory, &found);
    let is_reached = tree.reaches(session, inode).map_err(|error| report_store_error(&error))?;
    if !is_reached {
        return Err(session.refusal());
    }
    let allowed = if access == Access::READ {
        may_read(tree.store, session, inode)
    } else {
        may_search(tree.store, session, inode)
    };
    if allowed.map_err(|error| report_store_error(&error))? { Ok(()) } else { Err(Errno::EACCES) }
}

/// Returns a page of a directory.
///
/// # Errors
/// `EACCES` if the session's user may not read it; `EIO`.
pub fn read_directory(
    tree: TreeView<'_>,
    id: SessionId,
    directory: InodeId,
    after: u64,
    limit: u32,
) -> Result<Reply, Errno> {
    let limit = (limit as usize).min(Need::ENTRIES_MAX as usize);
    check_directory(tree, id, directory, Access::READ)?;
    let entries = tree.store.entries(directory, after, limit).map_err(|error| report_store_error(&error))?;
    Ok(Reply::Entries(entries.into_iter().map(directory_entry).collect()))
}

/// Fails if a session asks for an inode that does not exist.
pub fn check_exists(store: &Store, wants: &[LeaseRequest]) -> Result<(), Errno> {
    for want in wants {
        let exists = want.lease.inode == InodeId::RENAME
            || store.inode(want.lease.inode).map_err(|error| report_store_error(&error))?.is_some();
        if !exists {
            return Err(Errno::ESTALE);
        }
    }
    Ok(())
}

/// Fails if a session asks for a scope that no session asks for.
///
/// Only SharedFS grants the files of a directory at once, and only directories have something below them.
pub fn check_scopes(store: &Store, wants: &[LeaseRequest]) -> Result<(), Errno> {
    for want in wants {
        let is_odd = match want.lease.scope {
            LeaseScope::Node => false,
            LeaseScope::Files => true,
            LeaseScope::Subtree => {
                let found = store.inode(want.lease.inode).map_err(|error| report_store_error(&error))?;
                found.is_none_or(|found| !found.is_directory())
            }
        };
        if is_odd {
            return Err(Errno::EINVAL);
        }
    }
    Ok(())
}

/// Returns what a session is granted of what it wants; `None` if it does not reach the inode.
///
/// Without a right to change anything of the inode, it gets a lease to read: LibFS asks before it knows the rights.
pub fn check_want(tree: TreeView<'_>, id: SessionId, want: &LeaseRequest) -> Result<Option<LeaseRequest>, StoreError> {
    let (Some(session), Some(found)) = (tree.sessions.ordinary(id), tree.store.inode(want.lease.inode)?) else {
        return Ok(Some(*want));
    };
    if !tree.reaches(session, (want.lease.inode, &found))? {
        return Ok(None);
    }
    let write = want.lease.mode.is_write() && may_change(tree.store, session, (want.lease.inode, &found))?;
    let scope = if write || want.lease.scope == LeaseScope::Files { want.lease.scope } else { LeaseScope::Node };
    let lease = WantedLease { inode: want.lease.inode, mode: LeaseMode::new(write), scope };
    Ok(Some(LeaseRequest { lease, ..*want }))
}

/// Widens a want to what the session is likely to access next.
pub fn widen_want(store: &Store, sessions: &mut SessionTable, id: SessionId, want: &LeaseRequest) -> LeaseRequest {
    // If no state is to be sent, no further state is sent either.
    if want.lease.mode.is_write() || want.lease.scope != LeaseScope::Node || want.need == Need::default() {
        return *want;
    }
    let inode = |inode| store.inode(inode).ok().flatten();
    let Some(found) = inode(want.lease.inode) else { return *want };
    if found.is_directory() && found.entries <= scan_detection::LISTED_ENTRIES_MAX {
        return LeaseRequest { need: Need { entries: true, children: true, ..want.need }, ..*want };
    }
    let directory = home_of(want.lease.inode, &found).as_file();
    let entries = directory.and_then(inode).map(|found| found.entries);
    let (Some(directory), Some(entries), Some(session)) = (directory, entries, sessions.get_mut(&id)) else {
        return *want;
    };
    let scope = if session.scans.record_access(directory, entries, want.need.contents) {
        LeaseScope::Files
    } else {
        LeaseScope::Node
    };
    LeaseRequest { lease: WantedLease { scope, ..want.lease }, ..*want }
}
