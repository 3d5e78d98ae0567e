//! The rules of POSIX for permission bits, access lists, sticky directories, ownership, links and attributes.
//!
//! LibFS asks them before it logs an update, and SharedFS validates the record by them.

use ashlar_types::{Access, Credentials, Errno, FileKind, Inode, MODE_SETGID, MODE_SETUID, MODE_STICKY, NEVER_NAMED};

use crate::acl::Acl;
use crate::{XATTR_ACL_ACCESS, XATTR_ACL_DEFAULT};

const GROUP_EXECUTES: u32 = 0o010;

/// Whether `credentials` have `access` to the inode, by its list where it has one, else by its permission bits.
#[must_use]
pub fn allows(inode: &Inode, acl: Option<&Acl>, credentials: &Credentials, access: Access) -> bool {
    if credentials.checked {
        return true;
    }
    if credentials.uid == 0 {
        // The super-user may execute only a file with some permission to execute; a directory may always be searched.
        return access.0 & Access::EXECUTE.0 == 0 || inode.is_directory() || inode.mode & 0o111 != 0;
    }
    if let Some(acl) = acl {
        return acl.allows(inode, credentials, access);
    }
    let bits = if credentials.uid == inode.uid {
        inode.mode >> 6
    } else if credentials.is_member(inode.gid) {
        inode.mode >> 3
    } else {
        inode.mode
    };
    bits & access.0 == access.0
}

/// Whether `credentials` may change the inode's mode, times and the like.
#[must_use]
pub fn owns(inode: &Inode, credentials: &Credentials) -> bool {
    credentials.is_privileged() || credentials.uid == inode.uid
}

/// Returns the access with which `credentials` may have an inode open.
///
/// The owner may have both accesses, since it can grant itself the right again.
#[must_use]
pub fn granted_access(inode: &Inode, acl: Option<&Acl>, credentials: &Credentials) -> Access {
    if owns(inode, credentials) {
        return Access::READ | Access::WRITE;
    }
    let one = |access| if allows(inode, acl, credentials, access) { access } else { Access::NONE };
    one(Access::READ) | one(Access::WRITE)
}

/// Whether a sticky `directory` keeps `credentials` from removing or renaming its entry for `inode`.
#[must_use]
pub fn is_stuck(directory: &Inode, inode: &Inode, credentials: &Credentials) -> bool {
    directory.mode & MODE_STICKY != 0 && !owns(directory, credentials) && !owns(inode, credentials)
}

/// Whether a file runs with rights of its owner or group, which new content must not get.
///
/// Without the group's right to execute, set-group-id asks for mandatory locking and lends nothing.
#[must_use]
pub const fn lends_rights(inode: &Inode) -> bool {
    inode.mode & MODE_SETUID != 0 || lends_group(inode.mode)
}

/// Whether a file of this mode runs with rights of its group.
#[must_use]
pub const fn lends_group(mode: u32) -> bool {
    mode & MODE_SETGID != 0 && mode & GROUP_EXECUTES != 0
}

/// Whether an inode may get another name: a removed file gets none, a file that was made without a name may get one.
#[must_use]
pub const fn is_linkable(inode: &Inode) -> bool {
    inode.links > 0 || inode.device & NEVER_NAMED != 0
}

/// Whether `credentials` may give an inode another name: the kernel's rule with `fs.protected_hardlinks` at 1.
///
/// A user must own the file, or be able to read and write it; the file must be regular and lend no rights. A file that
/// was made without a name gets one from its owner only: other users can't show that they have it open.
#[must_use]
pub fn may_link(inode: &Inode, acl: Option<&Acl>, credentials: &Credentials) -> bool {
    if owns(inode, credentials) {
        return true;
    }
    inode.links > 0
        && inode.kind == FileKind::Regular
        && !lends_rights(inode)
        && allows(inode, acl, credentials, Access::READ | Access::WRITE)
}

/// Whether an extended attribute is an access list.
#[must_use]
pub fn is_acl(name: &[u8]) -> bool {
    name == XATTR_ACL_ACCESS || name == XATTR_ACL_DEFAULT
}

/// Checks that `credentials` may set or remove an extended attribute (`xattr(7)`).
///
/// User attributes follow the file's permissions. Trusted and security attributes belong to the super-user, access
/// lists to the owner. The order of the errors is the kernel's.
///
/// # Errors
/// `EPERM`, `EACCES`, `EOPNOTSUPP`, `EINVAL`.
pub fn check_xattr_change(
    inode: &Inode,
    acl: Option<&Acl>,
    credentials: &Credentials,
    name: &[u8],
) -> Result<(), Errno> {
    let may_write = || allows(inode, acl, credentials, Access::WRITE);
    if name.starts_with(b"user.") {
        if !matches!(inode.kind, FileKind::Regular | FileKind::Directory) {
            return Err(Errno::EPERM);
        }
        // In a directory that many users write, attributes belong to its owner.
        if inode.is_directory() && inode.mode & MODE_STICKY != 0 && !owns(inode, credentials) {
            return Err(Errno::EPERM);
        }
        return if may_write() { check_xattr_name(name) } else { Err(Errno::EACCES) };
    }
    if is_acl(name) {
        if inode.kind == FileKind::Symlink {
            return Err(Errno::EOPNOTSUPP);
        }
        return if owns(inode, credentials) { Ok(()) } else { Err(Errno::EPERM) };
    }
    if name.starts_with(b"trusted.") || name.starts_with(b"security.") {
        return if credentials.is_privileged() { check_xattr_name(name) } else { Err(Errno::EPERM) };
    }
    // A user without the right to write the file gets that error before any about the name.
    let is_refused = !name.starts_with(b"system.") && !may_write();
    Err(if is_refused { Errno::EACCES } else { Errno::EOPNOTSUPP })
}

/// Checks that an extended attribute can have this name, as the kernel's file systems do.
///
/// # Errors
/// `EINVAL` for a namespace alone, `EOPNOTSUPP` for a name in no namespace.
pub fn check_xattr_name(name: &[u8]) -> Result<(), Errno> {
    if is_acl(name) {
        return Ok(());
    }
    let below = [&b"user."[..], b"trusted.", b"security."].into_iter().find_map(|space| name.strip_prefix(space));
    match below {
        Some([]) => Err(Errno::EINVAL),
        Some(_) => Ok(()),
        None => Err(Errno::EOPNOTSUPP),
    }
}

#[cfg(test)]
mod tests;
