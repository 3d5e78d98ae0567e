//! The facts that belong to the file system and not to one of its arenas.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A file system's id: random, drawn when the file system is made. All its arenas have the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct FileSystemId(pub u128);

impl fmt::Display for FileSystemId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

/// An arena's own random number. A member of a cluster is an arena, and not a machine: an arena in memory is empty
/// after its machine restarts, and is then another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ArenaId(pub u64);

impl fmt::Display for ArenaId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// The key of the hash that orders the names of a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct NameHashKey(pub [u8; 16]);

/// The facts that all arenas of a file system have in common. An arena that joins is formatted with them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileSystemIdentity {
    /// The file system's id.
    pub id: FileSystemId,
    /// The key of its name hash, so that directories have the same order at every node.
    pub hash_key: NameHashKey,
}
