//! The identity of a caller, and the access that it asks for.

use std::ops::BitOr;

/// The identity under which an operation runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Credentials {
    /// Effective (file system) user id.
    pub uid: u32,
    /// Effective (file system) group id.
    pub gid: u32,
    /// Supplementary groups, in any order.
    pub groups: Vec<u32>,
    /// Set if the kernel has already checked the permissions of this call, as it does for the FUSE front end
    /// (`default_permissions`). `uid` and `gid` still own the inodes that the call makes.
    pub checked: bool,
}

impl Credentials {
    /// Returns the super-user's credentials.
    #[must_use]
    pub const fn root() -> Self {
        Self { uid: 0, gid: 0, groups: Vec::new(), checked: false }
    }

    /// Returns credentials of a user whose permissions the kernel has already checked.
    #[must_use]
    pub const fn checked(uid: u32, gid: u32) -> Self {
        Self { uid, gid, groups: Vec::new(), checked: true }
    }

    /// Whether permission checks are waived: for the super-user, and if the kernel has made them.
    #[must_use]
    pub const fn is_privileged(&self) -> bool {
        self.checked || self.uid == 0
    }

    /// Whether `gid` is the group or one of the supplementary groups.
    #[must_use]
    pub fn is_member(&self, gid: u32) -> bool {
        self.gid == gid || self.groups.contains(&gid)
    }
}

/// A set of the accesses read, write and execute (search), with the bits of a mode's lowest octal digit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access(pub u32);

impl Access {
    /// None of them.
    pub const NONE: Self = Self(0);
    /// Read.
    pub const READ: Self = Self(4);
    /// Write.
    pub const WRITE: Self = Self(2);
    /// Execute a file; search a directory.
    pub const EXECUTE: Self = Self(1);

    /// Whether all of `other` are among these.
    #[must_use]
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// Returns these without `other`.
    #[must_use]
    pub const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }
}

impl BitOr for Access {
    type Output = Self;
    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}
