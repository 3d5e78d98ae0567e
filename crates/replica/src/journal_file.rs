//! The journal's memory in an arena.

use std::sync::Arc;

use ashlar_journal::{JournalCursor, JournalIdentity, JournalRing, Lineage};
use ashlar_node::journal::{NodeJournal, ReplayError, Replica};
use ashlar_pmem::{Arena, Mapping, MappingAccess, SharedMemory};
use ashlar_store::Store;
use ashlar_types::{Epoch, FileSystemId, JournalPosition, NodeNumber};

use crate::error::ReplicaError;

/// The journal takes this part of a large arena, and no more than so many bytes.
const ARENA_PART: u64 = 8;
const RING_BYTES_MAX: u64 = 256 << 20;
/// Of a small arena it takes a larger part: a lease move may need room for a whole log.
const SMALL_ARENA_PART: u64 = 4;
const SMALL_RING_BYTES_MAX: u64 = 32 << 20;
/// It takes no less than this: any frame must fit.
const RING_BYTES_MIN: u64 = 1 << 20;

/// Returns which journal the node of an arena writes.
pub fn identity_of(arena: &Arena) -> JournalIdentity {
    let summary = arena.summary();
    JournalIdentity { file_system: summary.file_system.id, node: summary.node }
}

/// Returns the bytes of the ring of an arena.
pub fn ring_bytes(arena: &Arena) -> u64 {
    let arena_bytes = arena.summary().size_bytes;
    let least = (arena_bytes / SMALL_ARENA_PART).min(SMALL_RING_BYTES_MAX);
    (arena_bytes / ARENA_PART).max(least).clamp(RING_BYTES_MIN, RING_BYTES_MAX) / 4096 * 4096
}

/// Opens the memory of the journal in an arena; `None` if the arena has no journal.
///
/// # Errors
/// Those of the system.
pub fn open_memory(arena: &Arena) -> Result<Option<Arc<SharedMemory>>, ReplicaError> {
    let Some(file) = arena.open_journal()? else { return Ok(None) };
    let bytes = file.metadata().map_err(|error| ReplicaError::System { what: "reading the journal's size", error })?;
    map(arena, &file, bytes.len()).map(Some)
}

/// Makes an empty journal in an arena, in place of any other, for the frames of the node of `identity`.
///
/// # Errors
/// Those of the system; a lack of room, for one.
pub fn make_memory(
    arena: &Arena,
    identity: JournalIdentity,
    ring_bytes: u64,
) -> Result<Arc<SharedMemory>, ReplicaError> {
    let begin = JournalCursor { position: JournalPosition(0), seed: identity.origin() };
    let lineage = Lineage::new(Epoch::default(), begin.position);
    make_copy_memory(arena, identity, ring_bytes, begin, lineage)
}

/// Makes an empty copy of a journal in an arena, in place of any other, whose first frame is the one at `begin`.
///
/// # Errors
/// As [`make_memory`]; [`ReplicaError::Journal`] if the lineage does not reach back to `begin`.
pub fn make_copy_memory(
    arena: &Arena,
    identity: JournalIdentity,
    ring_bytes: u64,
    begin: JournalCursor,
    lineage: Lineage,
) -> Result<Arc<SharedMemory>, ReplicaError> {
    let bytes = JournalRing::<SharedMemory>::bytes_for(ring_bytes);
    let file = arena.make_journal(bytes, |file| {
        let ring = JournalRing::format_copy(map(arena, file, bytes)?, identity, begin, lineage);
        ring.map(drop).map_err(|error| ReplicaError::Journal(ReplayError::Open(error)))
    })?;
    map(arena, &file, bytes)
}

fn map(arena: &Arena, file: &std::fs::File, bytes: u64) -> Result<Arc<SharedMemory>, ReplicaError> {
    let mapping = Mapping::map(file, bytes, MappingAccess::ReadWrite, arena.medium());
    let mapping = mapping.map_err(|error| ReplicaError::System {
        what: "cannot map the journal",
        error: std::io::Error::other(error),
    })?;
    Ok(Arc::new(SharedMemory::Mapped(mapping)))
}

/// Opens the journal of an arena's node; makes one if there is none.
///
/// # Errors
/// Those of the journal and of the system.
pub fn open_journal(arena: &Arena, store: &mut Store) -> Result<NodeJournal, ReplicaError> {
    let identity = identity_of(arena);
    let memory = match open_memory(arena)? {
        Some(memory) => memory,
        None => {
            // A mark without its journal is of one that was about to be forgotten.
            forget_mark(arena, store);
            make_memory(arena, identity, ring_bytes(arena))?
        }
    };
    Ok(NodeJournal::open(store, memory, identity)?)
}

/// Opens the copy of a journal in an arena; makes an empty one if there is none.
///
/// # Errors
/// Those of the system.
pub fn open_copy_memory(
    arena: &Arena,
    identity: JournalIdentity,
    ring_bytes: u64,
) -> Result<Arc<SharedMemory>, ReplicaError> {
    open_memory(arena)?.map_or_else(|| make_memory(arena, identity, ring_bytes), Ok)
}

/// Opens the replica of another node's journal in an arena; makes an empty copy if there is none.
///
/// # Errors
/// Those of the journal, the store and the system.
pub fn open_copy(arena: &Arc<Arena>, file_system: FileSystemId, writer: NodeNumber) -> Result<Replica, ReplicaError> {
    let identity = JournalIdentity { file_system, node: writer };
    let memory = open_copy_memory(arena, identity, ring_bytes(arena))?;
    Ok(Replica::open(Store::open(Arc::clone(arena))?, memory, identity)?)
}

/// Removes the journal of a node that has no replica any more.
///
/// Its frames are not needed: what the store lacks of them is in the sessions' logs.
///
/// # Errors
/// Those of the system.
pub fn forget_journal(arena: &Arena, store: &mut Store) -> Result<(), ReplicaError> {
    forget_mark(arena, store);
    if arena.open_journal()?.is_some() {
        arena.remove_journal()?;
        tracing::info!("the journal was removed: SharedFS has no replica any more");
    }
    Ok(())
}

fn forget_mark(arena: &Arena, store: &mut Store) {
    let node = arena.summary().node;
    if store.journal_mark(node).is_some() {
        store.remove_journal_mark(node);
    }
}
