//! A full copy of a writer's file system into a replica's arena: the journal's part of it.
//!
//! The store's part is [`ashlar_store::StoreImport`]. A whole copy is a store at a position of the writer's journal,
//! and a copy of the journal that begins there.
//!
//! Invariant: the copy of the journal is made while the store is still marked as a part of a tree. So an arena whose
//! store is whole has the journal from its mark on. A crash between the two leaves a marked store, and the copy begins
//! anew.

use std::sync::Arc;

use ashlar_journal::{JournalCursor, JournalIdentity, Lineage};
use ashlar_node::journal::{NodeJournal, ReplayError, Replica};
use ashlar_pmem::Arena;
use ashlar_store::{CopyEnd, FullCopyError, StoreImport};
use ashlar_types::FileSystemId;

use crate::error::ReplicaError;
use crate::journal_file::{make_copy_memory, ring_bytes};

/// The place in the writer's journal at which a full copy goes on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CopyOrigin {
    /// The next frame, and the checksum that it is seeded with.
    pub begin: JournalCursor,
    /// The epochs of the journal.
    pub lineage: Lineage,
}

impl CopyOrigin {
    /// Finds the place of a copy's end in its writer's journal.
    ///
    /// The journal must not have reused the frame there, so this belongs into the step that begins the last pass.
    ///
    /// # Errors
    /// [`ReplicaError::Journal`] if the frame is gone.
    pub fn find(journal: &NodeJournal, end: &CopyEnd) -> Result<Self, ReplicaError> {
        let ring = journal.ring();
        let begin = ring.cursor_at(end.mark.position).map_err(ReplayError::from)?;
        Ok(Self { begin, lineage: ring.lineage().clone() })
    }
}

/// Begins a full copy in an arena: empties its store, marks it, and removes the arena's journal.
///
/// Neither the store nor the journal may be in use.
///
/// # Errors
/// Those of the store and of the arena.
pub fn begin_full_copy(arena: &Arc<Arena>) -> Result<StoreImport, ReplicaError> {
    let import = StoreImport::begin(Arc::clone(arena))?;
    // Its frames belong to the tree that was given up.
    if arena.open_journal()?.is_some() {
        arena.remove_journal()?;
    }
    Ok(import)
}

/// Ends a full copy: makes the copy of the writer's journal, which begins at the copy's end, and then the store whole.
///
/// # Errors
/// [`FullCopyError`]; those of the journal, of the store and of the system. The store is then marked, and the copy must
/// be begun anew.
pub fn finish_full_copy(
    arena: &Arc<Arena>,
    file_system: FileSystemId,
    import: StoreImport,
    end: &CopyEnd,
    origin: CopyOrigin,
) -> Result<Replica, ReplicaError> {
    if origin.begin.position != end.mark.position {
        return Err(FullCopyError::Item("a copy that ends elsewhere than its journal begins").into());
    }
    let identity = JournalIdentity { file_system, node: end.writer };
    let memory = make_copy_memory(arena, identity, ring_bytes(arena), origin.begin, origin.lineage)?;
    let store = import.finish(end)?;
    Ok(Replica::open(store, memory, identity)?)
}
