//! Nodes, and the numbers that each node gives out by itself.
//!
//! Inode numbers and session ids have 48 bits: the node that gave them out in the upper 12, and a counter of that node
//! in the lower 36. So nodes give out numbers without asking each other, and the first node's numbers stay small.

use std::fmt;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::{InodeId, SessionId};

/// A node's number: given once for each arena, and never reused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "u16", into = "u16")]
pub struct NodeNumber(u16);

impl NodeNumber {
    /// Bits of a number.
    pub const BITS: u32 = 12;
    /// The node that makes a file system, and a single machine's only one.
    pub const FIRST: Self = Self(0);
    /// The largest number.
    pub const MAX: Self = Self((1 << Self::BITS) - 1);

    /// Returns the node of this number; `None` if the number is too large.
    #[must_use]
    pub const fn new(number: u16) -> Option<Self> {
        if number <= Self::MAX.0 { Some(Self(number)) } else { None }
    }

    /// Returns the number.
    #[must_use]
    pub const fn get(self) -> u16 {
        self.0
    }

    /// Returns the node whose number stands in the lowest 12 bits; the others are ignored.
    pub(crate) const fn from_low_bits(bits: u64) -> Self {
        Self((bits & Self::MAX.0 as u64) as u16)
    }
}

impl fmt::Display for NodeNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The number is that of no node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("{0} is no node's number; the largest is {max}", max = NodeNumber::MAX)]
pub struct NodeNumberError(pub u16);

impl TryFrom<u16> for NodeNumber {
    type Error = NodeNumberError;

    fn try_from(number: u16) -> Result<Self, Self::Error> {
        Self::new(number).ok_or(NodeNumberError(number))
    }
}

impl From<NodeNumber> for u16 {
    fn from(node: NodeNumber) -> Self {
        node.0
    }
}

/// Bits of the counter in an inode number or a session id.
const COUNTER_BITS: u32 = 36;
/// The first counter that does not fit.
const COUNTER_END: u64 = 1 << COUNTER_BITS;

const _: () = assert!(NodeNumber::BITS + COUNTER_BITS == 48, "lease tables keep numbers in 48 bits of a word");

macro_rules! numbers_of_nodes {
    ($name:ident) => {
        impl $name {
            /// Counters that one node can give out: as many as fit 36 bits.
            pub const COUNTER_END: u64 = COUNTER_END;

            /// Returns a node's number with this counter; `None` if the node has run out of counters.
            #[must_use]
            pub const fn new(node: NodeNumber, counter: u64) -> Option<Self> {
                if counter < COUNTER_END { Some(Self((node.get() as u64) << COUNTER_BITS | counter)) } else { None }
            }

            /// Returns all numbers of a node.
            #[must_use]
            pub const fn numbers_of(node: NodeNumber) -> std::ops::Range<u64> {
                let first = (node.get() as u64) << COUNTER_BITS;
                first..first + COUNTER_END
            }

            /// Whether it has no more bits than a node and a counter.
            #[must_use]
            pub const fn is_valid(self) -> bool {
                self.0 >> (NodeNumber::BITS + COUNTER_BITS) == 0
            }

            /// Returns the node that gave it out.
            #[must_use]
            pub const fn node(self) -> NodeNumber {
                NodeNumber::from_low_bits(self.0 >> COUNTER_BITS)
            }

            /// Returns its node's counter.
            #[must_use]
            pub const fn counter(self) -> u64 {
                self.0 & (COUNTER_END - 1)
            }

            /// Whether this very node gave it out.
            #[must_use]
            pub fn is_of(self, node: NodeNumber) -> bool {
                self.is_valid() && self.node() == node
            }
        }
    };
}

numbers_of_nodes!(InodeId);
numbers_of_nodes!(SessionId);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_nodes_numbers_are_its_counters() {
        assert_eq!(InodeId::new(NodeNumber::FIRST, 16), Some(InodeId::FIRST_FREE));
        assert_eq!(SessionId::new(NodeNumber::FIRST, 0), Some(SessionId::SHARED_FS));
        assert_eq!(InodeId::ROOT.node(), NodeNumber::FIRST);
    }

    #[test]
    fn number_names_its_node_and_counter() {
        for node in [NodeNumber::FIRST, NodeNumber(7), NodeNumber::MAX] {
            for counter in [0, 1, COUNTER_END - 1] {
                let inode = InodeId::new(node, counter).unwrap();
                assert_eq!((inode.node(), inode.counter()), (node, counter));
                assert!(inode.is_of(node) && !inode.is_of(NodeNumber(8)) && inode.0 >> 48 == 0);
                let session = SessionId::new(node, counter).unwrap();
                assert_eq!((session.node(), session.counter()), (node, counter));
            }
        }
    }

    #[test]
    fn counter_beyond_its_bits_gives_no_number() {
        assert_eq!(InodeId::numbers_of(NodeNumber(1)), 1 << 36..2 << 36);
        assert_eq!(InodeId::new(NodeNumber(1), COUNTER_END), None);
        assert_eq!(SessionId::new(NodeNumber::MAX, u64::MAX), None);
    }

    #[test]
    fn number_of_more_than_48_bits_is_of_no_node() {
        let number = InodeId(1 << 48 | 16);
        assert!(!number.is_valid() && !number.is_of(number.node()));
    }

    #[test]
    fn number_beyond_12_bits_is_no_node() {
        assert_eq!(NodeNumber::new(4095), Some(NodeNumber::MAX));
        assert_eq!(NodeNumber::new(4096), None);
        assert_eq!(NodeNumber::try_from(u16::MAX), Err(NodeNumberError(u16::MAX)));
    }
}
