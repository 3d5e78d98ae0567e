//! The rules of POSIX for permission bits, access lists, sticky directories and ownership.

use ashlar_types::{Access, Credentials, Inode, MODE_STICKY};

use crate::acl::Acl;

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

#[cfg(test)]
mod tests;
