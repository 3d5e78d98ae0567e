//! A replica becomes a writer: it takes over what its writer journalled.

use std::sync::Arc;

use ashlar_journal::JournalIdentity;
use ashlar_node::journal::{ReplayError, Replica};
use ashlar_pmem::Arena;
use ashlar_store::Store;
use ashlar_types::{FileSystemId, NodeNumber};

use crate::error::ReplicaError;
use crate::journal_file::open_memory;

/// Applies all of the former writer's journal, ends its sessions, and forgets the journal's copy.
///
/// Everything that was acknowledged has its verdict in the copy. Records at its end without one were not, and don't
/// count. Returns whether there was anything to do. After a crash in its middle it is called again.
///
/// # Errors
/// Those of the journal, the store and the system.
pub fn adopt_copy(arena: &Arc<Arena>, file_system: FileSystemId, former: NodeNumber) -> Result<bool, ReplicaError> {
    let identity = JournalIdentity { file_system, node: former };
    let mut store = match open_memory(arena)? {
        Some(memory) if JournalIdentity::read(&*memory).map_err(ReplayError::Open)? == identity => {
            let mut store = Replica::open(Store::open(Arc::clone(arena))?, memory, identity)?.adopt()?;
            for (session, _) in store.sessions() {
                store.remove_session(session);
            }
            // The mark stays until the journal is gone: without it, a start would apply the frames again.
            commit(&mut store)?;
            arena.remove_journal()?;
            store
        }
        _ => {
            let store = Store::open(Arc::clone(arena))?;
            if store.journal_mark(former).is_none() {
                return Ok(false);
            }
            store
        }
    };
    store.remove_journal_mark(former);
    commit(&mut store)?;
    Ok(true)
}

fn commit(store: &mut Store) -> Result<(), ReplicaError> {
    while let Some(job) = store.begin_commit() {
        store.finish_commit(job.run())?;
    }
    Ok(())
}
