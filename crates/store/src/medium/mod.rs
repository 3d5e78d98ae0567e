//! The memory under a store: an arena's files, or their twin.

mod memory_arena;

pub(crate) use memory_arena::TwinMemory;
pub use memory_arena::{MemoryArena, MemoryArenaOptions, PersistObserver};

use std::sync::Arc;

use ashlar_pmem::{Arena, ArenaSummary, MediumKind, SegmentInfo};
use ashlar_types::{FileSystemIdentity, NodeNumber};

use crate::StoreError;
use crate::blocks::segment::StoreSegment;
use crate::database::Database;

/// The facts of an arena on which its store relies.
#[derive(Clone, Copy, Debug)]
pub struct StoreIdentity {
    /// The arena's number, which the superblock row repeats.
    pub id: u64,
    /// The node whose arena it is.
    pub node: NodeNumber,
    /// The file system that the arena is a part of.
    pub file_system: FileSystemIdentity,
}

impl StoreIdentity {
    /// Returns the facts in the superblock of an arena's files.
    pub fn of_arena(arena: &Arena) -> Self {
        let ArenaSummary { id, node, file_system, .. } = arena.summary();
        Self { id, node, file_system }
    }
}

/// Where a store keeps its blocks and its rows.
#[derive(Clone, Debug)]
pub enum StoreMedium {
    /// The files of an arena.
    Arena(Arc<Arena>),
    /// Their twin in memory.
    Memory(Arc<MemoryArena>),
}

impl StoreMedium {
    /// Returns the facts of the arena on which the store relies.
    pub fn identity(&self) -> StoreIdentity {
        match self {
            Self::Arena(arena) => StoreIdentity::of_arena(arena),
            Self::Memory(arena) => arena.identity(),
        }
    }

    /// The kind of medium, which decides how stored bytes become durable.
    pub fn kind(&self) -> MediumKind {
        match self {
            Self::Arena(arena) => arena.medium().kind,
            Self::Memory(arena) => arena.kind(),
        }
    }

    /// The segments, in the order of their numbers.
    pub fn segments(&self) -> Vec<SegmentInfo> {
        match self {
            Self::Arena(arena) => arena.segments(),
            Self::Memory(arena) => arena.segments(),
        }
    }

    /// Opens a segment.
    pub fn open_segment(&self, info: SegmentInfo) -> Result<StoreSegment, StoreError> {
        match self {
            Self::Arena(arena) => StoreSegment::open(arena, info),
            Self::Memory(arena) => StoreSegment::open_twin(arena, info),
        }
    }

    /// Opens the metadata database, if there is one.
    pub fn open_database(&self) -> Result<Database, StoreError> {
        match self {
            Self::Arena(arena) if !Database::exists(arena) => Err(StoreError::NotFormatted),
            Self::Arena(arena) => Database::open(arena),
            Self::Memory(arena) => Ok(arena.open_database()),
        }
    }
}
