//! A session's rights to one inode, as its user has them now and as it keeps them.

use ashlar_store::{Store, StoreError};
use ashlar_types::{Access, FileKind, Inode, InodeId};
use ashlar_update::XATTR_ACL_ACCESS;
use ashlar_update::acl::Acl;
use ashlar_update::permission::{allows, granted_access, is_stuck, owns};

use crate::sessions::session::ServedSession;

/// Returns an inode's access list, if it has one.
pub fn access_acl(store: &Store, inode: InodeId) -> Result<Option<Acl>, StoreError> {
    Ok(store.xattr(inode, XATTR_ACL_ACCESS)?.and_then(|value| Acl::parse(&value)))
}

/// Returns the access with which a session's user may open an inode now.
///
/// # Errors
/// Those of the store.
pub fn openable(store: &Store, session: &ServedSession, id: InodeId) -> Result<Access, StoreError> {
    let Some(inode) = store.inode(id)? else { return Ok(Access::NONE) };
    Ok(granted_access(&inode, access_acl(store, id)?.as_ref(), &session.credentials))
}

/// Returns whether a session may be shown the content or the entries of an inode that it reaches.
///
/// # Errors
/// Those of the store.
pub fn may_read(store: &Store, session: &ServedSession, (id, found): (InodeId, &Inode)) -> Result<bool, StoreError> {
    let acl = access_acl(store, id)?;
    let held = granted_access(found, acl.as_ref(), &session.credentials);
    Ok(held.contains(Access::READ) || session.rights.has(id, Access::READ))
}

/// Returns whether a session may change anything of an inode that it reaches, or the names of it.
///
/// # Errors
/// Those of the store.
pub fn may_change(store: &Store, session: &ServedSession, (id, found): (InodeId, &Inode)) -> Result<bool, StoreError> {
    let user = &session.credentials;
    // A file with several names may have one in a directory that the user may change. One without names is open.
    let is_named_elsewhere = id == InodeId::RENAME || !found.is_directory() && found.links != 1;
    if is_named_elsewhere || owns(found, user) || session.rights.has(id, Access::WRITE) {
        return Ok(true);
    }
    if allows(found, access_acl(store, id)?.as_ref(), user, Access::WRITE) {
        return Ok(true);
    }
    let Some(directory) = store.inode(found.parent)?.filter(|_| found.parent != id) else { return Ok(false) };
    let acl = access_acl(store, found.parent)?;
    Ok(allows(&directory, acl.as_ref(), user, Access::WRITE | Access::EXECUTE) && !is_stuck(&directory, found, user))
}

/// Returns whether a session may search a directory that it reaches.
///
/// # Errors
/// Those of the store.
pub fn may_search(store: &Store, session: &ServedSession, (id, found): (InodeId, &Inode)) -> Result<bool, StoreError> {
    let acl = access_acl(store, id)?;
    Ok(found.kind != FileKind::Directory || allows(found, acl.as_ref(), &session.credentials, Access::EXECUTE))
}
