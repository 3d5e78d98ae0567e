//! Ids, positions and addresses, as newtypes.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::NodeNumber;

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
    /// An inode number, unique in the file system for ever: a number is never used twice. 48 bits: node and counter.
    InodeId(u64)
}

number! {
    /// A session: one LibFS process as SharedFS sees it. Never used twice. 48 bits: node and
    /// counter.
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
    /// A block in a node's arena: the node in the upper 12 bits, the segment's number in the next 20, the block's
    /// number in the segment in the lower 32.
    BlockAddress(u64)
}

number! {
    /// A subtree with a quota of its own: the number of the directory at its top, so that it is never used twice; 0:
    /// none.
    QuotaId(u64)
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
    pub node: NodeNumber,
}

impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of node {}", self.number, self.node)
    }
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
    /// Bits of a segment's number.
    pub const SEGMENT_BITS: u32 = 20;
    /// The most segments that an arena may have.
    pub const SEGMENTS_MAX: u32 = 1 << Self::SEGMENT_BITS;

    /// Returns the address of a block in a segment of a node's arena.
    ///
    /// # Panics
    /// If the segment's number has more bits than there are: no arena has so many segments.
    #[must_use]
    pub const fn new(node: NodeNumber, segment: u32, block: u32) -> Self {
        assert!(segment < Self::SEGMENTS_MAX, "an arena has fewer segments");
        Self((node.get() as u64) << (32 + Self::SEGMENT_BITS) | (segment as u64) << 32 | block as u64)
    }

    /// Returns the node in whose arena the block is.
    #[must_use]
    pub const fn node(self) -> NodeNumber {
        NodeNumber::from_low_bits(self.0 >> (32 + Self::SEGMENT_BITS))
    }

    /// Returns the segment's number.
    #[must_use]
    pub const fn segment(self) -> u32 {
        (self.0 >> 32) as u32 & (Self::SEGMENTS_MAX - 1)
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

const _: () = assert!(NodeNumber::BITS + BlockAddress::SEGMENT_BITS + 32 == 64);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn block_address_names_node_segment_and_block() {
        let node = NodeNumber::new(5).unwrap();
        let address = BlockAddress::new(node, BlockAddress::SEGMENTS_MAX - 1, u32::MAX);
        assert_eq!(
            (address.node(), address.segment(), address.block()),
            (node, BlockAddress::SEGMENTS_MAX - 1, u32::MAX)
        );
        assert_eq!(BlockAddress::new(NodeNumber::FIRST, 2, 9), BlockAddress(2 << 32 | 9), "as on media");
    }
}
