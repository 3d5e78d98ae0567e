//! Quotas: limits and use of users, groups and subtrees.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{BLOCK_BYTES, Inode, QuotaId};

/// Entries of a directory that count as one block: so many names take about as much of the metadata.
const ENTRIES_OF_BLOCK: u64 = 64;
/// Bytes of extended attributes that come with an inode, as in an inode of ext4.
const XATTR_BYTES_FREE: u64 = 1024;

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
    /// Blocks of [`crate::BLOCK_BYTES`], of data and of metadata beyond an inode's own.
    pub blocks: u64,
    /// Inodes.
    pub inodes: u64,
}

/// A quota version: balances that were granted under one version are worthless under the next.
///
/// An odd version has limits. An even version has none, and sessions need not ask for balances.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct QuotaVersion(pub u64);

impl QuotaVersion {
    /// Whether any user, group or subtree is limited.
    #[must_use]
    pub const fn has_limits(self) -> bool {
        self.0 % 2 == 1
    }

    /// Returns the next version, with limits or without.
    #[must_use]
    pub const fn next(self, has_limits: bool) -> Self {
        // The session can write the word that this is read from, so any number is possible.
        Self(self.0.wrapping_add(if self.has_limits() == has_limits { 2 } else { 1 }))
    }
}

/// The most that may be used; `None` if only the space itself limits it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct QuotaLimits {
    /// Blocks of [`crate::BLOCK_BYTES`].
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

    /// Returns the inode's own use, without its extended attributes ([`xattr_blocks`]).
    #[must_use]
    pub const fn quota_amount(&self) -> QuotaAmount {
        QuotaAmount { blocks: self.blocks + entry_blocks(self.entries), inodes: 1 }
    }
}

/// Returns the blocks that so many entries of a directory count.
#[must_use]
pub const fn entry_blocks(entries: u64) -> u64 {
    entries / ENTRIES_OF_BLOCK
}

/// Returns the blocks that so many bytes of an inode's extended attributes count.
#[must_use]
pub const fn xattr_blocks(bytes: u64) -> u64 {
    if bytes <= XATTR_BYTES_FREE { 0 } else { bytes.div_ceil(BLOCK_BYTES) }
}

/// Returns the accounts that an inode with this owner, group and subtree counts against.
pub fn quota_keys(uid: u32, gid: u32, subtree: QuotaId) -> impl Iterator<Item = QuotaKey> {
    let subtree = (subtree != QuotaId::NONE).then_some(QuotaKey::Subtree(subtree));
    [QuotaKey::User(uid), QuotaKey::Group(gid)].into_iter().chain(subtree)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{FileKind, InodeId, Timestamp};

    #[test]
    fn metadata_beyond_the_inode_counts_in_blocks() {
        assert_eq!([0, 1024, 1025, 4096, 4097].map(xattr_blocks), [0, 0, 1, 1, 2]);
        let mut directory = Inode::new(FileKind::Directory, 0o755, InodeId::ROOT, Timestamp::default());
        let counts = [0, 63, 64, 128].map(|entries| {
            directory.entries = entries;
            directory.quota_amount().blocks
        });
        assert_eq!(counts, [0, 0, 1, 2]);
    }
}
