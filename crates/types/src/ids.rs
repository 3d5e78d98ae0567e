//! Ids, positions and addresses, as newtypes.

use std::fmt;

use serde::{Deserialize, Serialize};

macro_rules! number {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[repr(transparent)]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

number! {
    /// An inode number, unique in the file system for ever: a number is never used twice.
    InodeId(u64)
}

number! {
    /// A session: one LibFS process as SharedFS sees it. Never used twice in one arena.
    SessionId(u64)
}

number! {
    /// A position in an update log: a count of bytes since the log was made, which only grows. It names a record
    /// wherever the log is copied to; the byte's place in the log's ring is the position modulo the ring's length.
    LogPosition(u64)
}

number! {
    /// A log's generation: how many times its ring was initialised. A record of another generation is stale.
    LogGeneration(u32)
}

number! {
    /// How many times SharedFS has sealed a log. A reservation made under an older count fails.
    SealCount(u32)
}

number! {
    /// How often SharedFS has taken extents from a session. Extents that were granted under another count are invalid.
    ExtentVersion(u64)
}

number! {
    /// How often the segments of a session may have changed. A segment that was mapped under an earlier count may be
    /// another segment now.
    SegmentVersion(u64)
}

number! {
    /// A block in the arena: the segment's number in the upper 32 bits, the block's number in the segment in the lower.
    BlockAddress(u64)
}

number! {
    /// A subtree with a quota of its own: the number of the directory at its top, so that it is never used twice; 0:
    /// none.
    QuotaId(u64)
}

number! {
    /// A node of a cluster: a number that is given once to an arena, and never used twice.
    NodeId(u16)
}

number! {
    /// The file system's own random number, which the arenas of all its nodes share.
    FileSystemId(u64)
}

number! {
    /// A position in a node's journal: a count of bytes since the journal was made, which only grows. It means the same
    /// on every copy.
    JournalPosition(u64)
}

/// An epoch: a state of the cluster's membership. A higher number is a later one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Epoch {
    /// The number; two nodes never make epochs of equal numbers unless the cluster manager fails.
    pub number: u32,
    /// The node that made the epoch.
    pub node: NodeId,
}

impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of node {}", self.number, self.node)
    }
}

impl NodeId {
    /// Bits of the largest number: the upper bits of ids that the node makes.
    pub const BITS: u32 = 12;
}

impl JournalPosition {
    /// Returns the position `bytes` further on.
    #[must_use]
    pub const fn plus(self, bytes: u64) -> Self {
        Self(self.0 + bytes)
    }
}

impl QuotaId {
    /// No subtree.
    pub const NONE: Self = Self(0);
    /// Bits of the largest number: the shared area keeps the kind of a quota above them. Inode numbers never become so
    /// large.
    pub const BITS: u32 = 56;

    /// Whether the shared area can keep the number.
    #[must_use]
    pub const fn is_storable(self) -> bool {
        self.0 >> Self::BITS == 0
    }

    /// Returns the subtree of which this directory is the top.
    #[must_use]
    pub const fn of(top: InodeId) -> Self {
        Self(top.0)
    }
}

impl SessionId {
    /// SharedFS itself, in place of a session: it has no log, and the updates that it applies depend on none.
    pub const SHARED_FS: Self = Self(0);
}

impl InodeId {
    /// The root directory.
    pub const ROOT: Self = Self(1);
    /// The pseudo-inode whose write lease allows moving a directory to another parent.
    pub const RENAME: Self = Self(2);
    /// The first number that a file may have.
    pub const FIRST_FREE: Self = Self(16);
}

impl ExtentVersion {
    /// Returns the version that follows.
    #[must_use]
    pub const fn next(self) -> Self {
        // The session can write the word that this is read from, so any number is possible.
        Self(self.0.wrapping_add(1))
    }
}

impl SegmentVersion {
    /// Returns the version that follows.
    #[must_use]
    pub const fn next(self) -> Self {
        // The session can write the word that this is read from, so any number is possible.
        Self(self.0.wrapping_add(1))
    }
}

impl LogPosition {
    /// Returns the position `bytes` further on.
    #[must_use]
    pub const fn plus(self, bytes: u64) -> Self {
        Self(self.0 + bytes)
    }
}

impl BlockAddress {
    /// Returns the address of block `block` in segment `segment`.
    #[must_use]
    pub const fn new(segment: u32, block: u32) -> Self {
        Self(((segment as u64) << 32) | block as u64)
    }

    /// Returns the segment's number.
    #[must_use]
    pub const fn segment(self) -> u32 {
        (self.0 >> 32) as u32
    }

    /// Returns the block's number in its segment.
    #[must_use]
    pub const fn block(self) -> u32 {
        self.0 as u32
    }

    /// Returns the address `blocks` further on, in the same segment.
    #[must_use]
    pub const fn plus(self, blocks: u64) -> Self {
        Self(self.0 + blocks)
    }
}
