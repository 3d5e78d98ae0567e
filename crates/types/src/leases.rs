//! Leases as all layers name them: scope, mode and the core of a request.

use serde::{Deserialize, Serialize};

use crate::InodeId;

/// The inodes that a lease covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum LeaseScope {
    /// One inode: attributes, content, entries.
    Node,
    /// The files of one directory that have no other link and no lease of their own.
    ///
    /// Such a lease is for reading only, and is shared with other readers.
    Files,
    /// A directory and everything below it that has no lease of its own.
    Subtree,
}

/// The right that a lease gives its holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum LeaseMode {
    /// Read; shared with other readers.
    Read,
    /// Read and write; exclusive.
    Write,
}

impl LeaseMode {
    /// Returns the mode of a lease to write, or only to read.
    #[must_use]
    pub const fn new(is_write: bool) -> Self {
        if is_write { Self::Write } else { Self::Read }
    }

    /// Whether the holder may write.
    #[must_use]
    pub const fn is_write(self) -> bool {
        matches!(self, Self::Write)
    }
}

/// A lease that a session asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct WantedLease {
    /// The inode.
    pub inode: InodeId,
    /// Read or write; a subtree lease is always a write lease.
    pub mode: LeaseMode,
    /// The scope.
    ///
    /// `Subtree` takes everything below the directory from all other sessions. `Node` may be answered with more.
    /// `Files` is like `Node`, but a file to be read is best held together with the other files of its directory.
    pub scope: LeaseScope,
}
