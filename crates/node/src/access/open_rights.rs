//! Decides which inodes a session may open, and with which access.
//!
//! A file that leaves a session's sight must become a real one: a helper of the shell opens it on a mount. This module
//! decides whether the session may have it: by the rights to the inode, and to search the directories that lead to it.

use ashlar_store::Store;
use ashlar_types::{Access, Errno, FileKind, Inode, InodeId};
use ashlar_update::permission::{granted_access, owns};
use ashlar_wire::SessionKind;

use crate::access::inode_names::find_name;
use crate::access::rights::access_acl;
use crate::access::tree_view::TreeView;
use crate::leases::grant::report_store_error;
use crate::leases::reserved::Reservations;
use crate::sessions::session::ServedSession;
use crate::sessions::session_table::SessionTable;

/// The most entries of a directory that SharedFS searches for a file's name.
const NAMES_MAX: usize = 100_000;

/// Returns a name of a file in a directory that a program watches.
///
/// By that name the kernel knows which watchers to notify of changes to the file.
pub fn watched_entry(
    store: &Store,
    reservations: &Reservations,
    (inode, found): (InodeId, &Inode),
) -> Result<Option<(InodeId, Vec<u8>)>, Errno> {
    if found.is_directory() || found.links == 0 || !reservations.is_watched(found.parent) {
        return Ok(None);
    }
    let name = find_name(store, found.parent, inode, &mut { NAMES_MAX }).map_err(|error| report_store_error(&error))?;
    Ok(name.map(|name| (found.parent, name.as_bytes().to_vec())))
}

/// Returns the device that the files of a living session's mount show.
pub fn served_device(session: &ServedSession) -> Option<u64> {
    let is_serving = session.identity.kind == SessionKind::Mount
        && session.mount_device != 0
        && session.fenced.is_none()
        && !session.is_ending;
    is_serving.then_some(session.mount_device)
}

/// Returns the living session that serves a mount whose files show this device.
pub fn find_mount(sessions: &SessionTable, device: u64) -> Option<&ServedSession> {
    sessions.values().find(|session| served_device(session) == Some(device))
}

/// Returns whether a living session serves a mount whose files show this device.
pub fn is_mount(sessions: &SessionTable, device: u64) -> bool {
    find_mount(sessions, device).is_some()
}

/// Fails unless the session reaches an inode.
pub fn check_way(tree: TreeView<'_>, session: &ServedSession, inode: (InodeId, &Inode)) -> Result<(), Errno> {
    let reached = tree.reaches(session, inode).map_err(|error| report_store_error(&error))?;
    if reached { Ok(()) } else { Err(Errno::EACCES) }
}

/// Fails unless the session may open an inode.
///
/// Devices, pipes and sockets are the kernel's from the beginning. Opening one may wait for ever or have effects.
pub fn check_rights(
    tree: TreeView<'_>,
    session: &ServedSession,
    (inode, found): (InodeId, &Inode),
    access: Access,
    keeps_time: bool,
) -> Result<(), Errno> {
    if !matches!(found.kind, FileKind::Regular | FileKind::Directory) {
        return Err(Errno::EINVAL);
    }
    if keeps_time && !owns(found, &session.credentials) {
        return Err(Errno::EPERM);
    }
    check_way(tree, session, (inode, found))?;
    if held_access(tree.store, session, (inode, found))?.contains(access) { Ok(()) } else { Err(Errno::EACCES) }
}

/// Returns the access with which a session may have an inode open: as its user has it now, and kept rights.
pub fn held_access(store: &Store, session: &ServedSession, (inode, found): (InodeId, &Inode)) -> Result<Access, Errno> {
    let acl = access_acl(store, inode).map_err(|error| report_store_error(&error))?;
    let granted = granted_access(found, acl.as_ref(), &session.credentials);
    Ok(granted | session.rights.kept(inode).without(Access::EXECUTE))
}
