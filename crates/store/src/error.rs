//! Errors of the shared area.

use std::io;

use ashlar_types::{BlockAddress, InodeId, NodeNumber, VersionRange};
use ashlar_update::Invalid;
use thiserror::Error;

use crate::database::DatabaseError;

/// Why an operation on the shared area failed.
#[derive(Debug, Error)]
pub enum StoreError {
    /// The update does not fit the state. Nothing has changed.
    #[error(transparent)]
    Invalid(#[from] Invalid),
    /// There are not enough free blocks. Nothing has changed; blocks that are still pinned may come free with the next
    /// commit and release.
    #[error("the arena has {free} free blocks where {needed} are needed; delete files or grow the arena")]
    FullBlocks {
        /// Blocks wanted.
        needed: u64,
        /// Blocks free.
        free: u64,
    },
    /// The metadata budget is used up. Nothing has changed.
    #[error("the metadata of the arena takes {used} of {total} bytes; delete files or use a larger arena")]
    FullMetadata {
        /// Bytes used.
        used: u64,
        /// The bytes available.
        total: u64,
    },
    /// The node has given out all numbers that it can.
    #[error("node {node} has given out all its {what}; move its users to another node")]
    NumbersExhausted {
        /// The node.
        node: NodeNumber,
        /// The kind of numbers.
        what: &'static str,
    },
    /// A block's content does not match its checksum.
    #[error("block {block} of inode {inode} is damaged (arena block {address:?}); run `ashlar fsck`")]
    Checksum {
        /// The file.
        inode: InodeId,
        /// The block in the file.
        block: u64,
        /// The block in the arena.
        address: BlockAddress,
    },
    /// A row differs from everything that the store writes.
    #[error("damaged metadata: {0}; run `ashlar fsck`")]
    Corrupt(&'static str),
    /// The arena holds no shared area.
    #[error(
        "the arena has no metadata: either its making was cut short, and `ashlar mount` takes it up again, or they were \
         removed"
    )]
    NotFormatted,
    /// The arena holds a part of a tree, which is copied from another node, and no shared area yet.
    #[error("the arena holds a part of a file system that is copied from its writer; its node makes the copy anew")]
    Copying,
    /// The metadata belongs to another arena.
    #[error("the metadata belongs to arena {found:016x}, not to {expected:016x}")]
    WrongArena {
        /// The arena that the metadata names.
        found: u64,
        /// The arena that was opened.
        expected: u64,
    },
    /// The metadata was written by a release that this one does not understand.
    #[error("the metadata has format {found}; this release reads {supported}; use the matching release")]
    WrongVersion {
        /// The versions that understand the metadata.
        found: VersionRange,
        /// The versions that this release reads.
        supported: VersionRange,
    },
    /// An update failed half-way for another reason than being invalid, so the applied state can't be trusted: open the
    /// store again and replay the logs from their committed positions.
    #[error("an earlier failure left the applied state unusable; restart the daemon")]
    Poisoned,
    /// A commit is under way, and this must wait for it.
    #[error("a commit is under way")]
    CommitUnderWay,
    /// The segment is not there, or still in use.
    #[error("segment {0} does not exist or is still in use")]
    Segment(u32),
    /// Processes have mapped blocks of the segment.
    #[error("programs have files mapped that are in segment {0}")]
    Mapped(u32),
    /// An input or output error outside the metadata database.
    #[error("{what}: {source}")]
    Io {
        /// The attempted operation.
        what: &'static str,
        /// Why it failed.
        source: io::Error,
    },
    /// The metadata database failed.
    #[error("metadata database: {0}")]
    Database(#[from] DatabaseError),
    /// The arena failed.
    #[error(transparent)]
    Arena(#[from] ashlar_pmem::ArenaError),
    /// A segment could not be mapped.
    #[error(transparent)]
    Map(#[from] ashlar_pmem::MapError),
    /// An address outside its segment: the row that holds it is damaged.
    #[error(transparent)]
    OutOfBounds(#[from] ashlar_pmem::OutOfBounds),
}

impl StoreError {
    /// Turns an I/O error into a store error that names the failed action.
    pub(crate) fn io(what: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { what, source }
    }
}
