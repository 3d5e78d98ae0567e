//! Quotas: limits and use of users, groups and subtrees.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{Inode, QuotaId};

/// A user, group or subtree whose use of space is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum QuotaKey {
    /// All inodes with this owner.
    User(u32),
    /// All inodes with this group.
    Group(u32),
    /// All inodes that count against this subtree.
    Subtree(QuotaId),
}

impl fmt::Display for QuotaKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::User(uid) => write!(f, "user {uid}"),
            Self::Group(gid) => write!(f, "group {gid}"),
            Self::Subtree(id) => write!(f, "the subtree of directory {id}"),
        }
    }
}

/// An amount that is used, granted or asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct QuotaAmount {
    /// Data blocks of [`crate::BLOCK_BYTES`].
    pub blocks: u64,
    /// Inodes.
    pub inodes: u64,
}

/// The most that may be used; `None` if only the space itself limits it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct QuotaLimits {
    /// Data blocks of [`crate::BLOCK_BYTES`].
    pub blocks: Option<u64>,
    /// Inodes.
    pub inodes: Option<u64>,
}

impl QuotaLimits {
    /// Whether nothing is limited.
    #[must_use]
    pub const fn is_none(&self) -> bool {
        self.blocks.is_none() && self.inodes.is_none()
    }
}

impl Inode {
    /// Returns the accounts that the inode counts against.
    pub fn quota_keys(&self) -> impl Iterator<Item = QuotaKey> + use<> {
        quota_keys(self.uid, self.gid, self.quota)
    }

    /// Returns the inode's own use.
    #[must_use]
    pub const fn quota_amount(&self) -> QuotaAmount {
        QuotaAmount { blocks: self.blocks, inodes: 1 }
    }
}

/// Returns the accounts that an inode with this owner, group and subtree counts against.
pub fn quota_keys(uid: u32, gid: u32, subtree: QuotaId) -> impl Iterator<Item = QuotaKey> {
    let subtree = (subtree != QuotaId::NONE).then_some(QuotaKey::Subtree(subtree));
    [QuotaKey::User(uid), QuotaKey::Group(gid)].into_iter().chain(subtree)
}
