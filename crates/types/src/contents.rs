//! A file's content as extents or inline bytes.

use serde::{Deserialize, Serialize};

use crate::BlockAddress;

/// An extent of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Extent {
    /// The first block within the file.
    pub logical_block: u64,
    /// The number of blocks.
    pub blocks: u64,
    /// The address of the first block; the others follow it in the same segment. `None`: reserved, and read as zeros.
    pub address: Option<BlockAddress>,
}

impl Extent {
    /// Whether `next` continues this extent, in the file and in the arena.
    #[must_use]
    pub fn continues(&self, next: &Self) -> bool {
        self.logical_block + self.blocks == next.logical_block
            && match (self.address, next.address) {
                (None, None) => true,
                (Some(own), Some(other)) => own.plus(self.blocks) == other && own.segment() == other.segment(),
                _ => false,
            }
    }
}

/// A file's content.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Contents {
    /// The bytes themselves, of a small file. There may be fewer than the file's size; zeros follow.
    Inline(Vec<u8>),
    /// Extents, in order. Gaps between and behind them are holes.
    Extents(Vec<Extent>),
    /// The session's user may not read the file: the extents without addresses, for a user that may write it.
    ///
    /// Only answers to sessions hold this form.
    Withheld(Vec<Extent>),
}
