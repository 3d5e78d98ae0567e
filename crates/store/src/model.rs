//! The store's descriptions of files, sessions and space.

use ashlar_types::{BlockAddress, Extent, InodeId, JournalPosition, LogGeneration, LogPosition, SessionId};
use serde::{Deserialize, Serialize};

/// Blocks of a file that stand in a process's memory, one behind the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MappedRun {
    /// The number under which the process's session has mapped it.
    pub number: u32,
    /// Writes to the file must show there.
    pub follows: bool,
    /// The file.
    pub inode: InodeId,
    /// The first block in the file.
    pub logical_block: u64,
    /// How many blocks.
    pub blocks: u64,
    /// The address of the first block; the others follow it in the same segment.
    pub address: BlockAddress,
}

impl MappedRun {
    /// Returns the blocks as an extent of the file.
    #[must_use]
    pub const fn extent(&self) -> Extent {
        Extent { logical_block: self.logical_block, blocks: self.blocks, address: Some(self.address) }
    }
}

/// The result for blocks that a process wants to map.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MapBlocks {
    /// The blocks stay in place.
    Done(Vec<MappedRun>),
    /// Their content must be committed first.
    CommitFirst,
    /// The blocks can't be mapped.
    ///
    /// They are holes, reservations, inline bytes or in a segment that is being emptied; or the pieces or the mapped
    /// blocks are too many.
    Impossible,
}

/// Extended attributes, names and values, by name.
pub type Xattrs = Vec<(Vec<u8>, Vec<u8>)>;

/// The state of a session's log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SessionState {
    /// The log's generation.
    pub generation: LogGeneration,
    /// The log is applied up to here.
    pub applied: LogPosition,
    /// The log is committed up to here, so that its space may be used again.
    pub committed: LogPosition,
}

/// The result of a commit.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Committed {
    /// The sessions whose logs are committed further than before, with their new positions.
    pub sessions: Vec<(SessionId, LogPosition)>,
    /// The newest batch that is committed ([`crate::Store::next_batch`]); `None` where this commit had none.
    pub batch: Option<u64>,
}

/// Space in the arena.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ArenaSpace {
    /// Blocks in all segments.
    pub blocks_total: u64,
    /// Blocks that can be written now: those that files have reserved are not among them.
    pub blocks_free: u64,
    /// Freed blocks that wait for a commit or for a session to release its log.
    pub blocks_pinned: u64,
    /// Blocks that files have reserved and not written.
    pub blocks_reserved: u64,
    /// Bytes of metadata that updates may use up in all: a quarter of the database's map, since a commit that touches
    /// every page needs room for three copies.
    pub metadata_bytes_total: u64,
    /// Bytes of metadata used, with an upper estimate of the rows that wait for a commit.
    pub metadata_bytes_used: u64,
}

/// The room of another copy of the file system, used or free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RoomLimit {
    /// Blocks in all segments.
    pub blocks: u64,
    /// Bytes of metadata that updates may use up in all.
    pub metadata_bytes: u64,
}

/// How far a node's journal is applied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct JournalMark {
    /// All frames before this position are applied.
    pub position: JournalPosition,
    /// The number of the last verdict before it.
    pub order: u64,
}
