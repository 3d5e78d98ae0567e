//! Makes sessions' updates persistent.
//!
//! For `fsync` these are any session's writes to an inode, for `sync` all sessions' updates. A session makes its own
//! log persistent by itself. SharedFS applies the logs of other sessions as far as they are settled, and commits. It
//! asks nothing of their processes, and no lease moves. A commit takes all applied updates, so the dependencies of a
//! log's records are part of it: a record names only updates that were applied before.

use std::collections::BTreeSet;

use ashlar_store::{Store, StoreError};
use ashlar_types::{InodeId, LogPosition, SessionId};

use crate::leases::leasing::{Ancestors, Leasing};
use crate::sessions::session_table::SessionTable;

/// Returns the sessions whose logs may hold unapplied updates of an inode.
///
/// Updates of a directory that leads to it count too.
pub fn find_writers(
    store: &Store,
    leasing: &Leasing,
    sessions: &SessionTable,
    inode: InodeId,
) -> Result<BTreeSet<SessionId>, StoreError> {
    if store.inode(inode)?.is_some() {
        return Ok(leasing.manager.writers(inode, &Ancestors(store)));
    }
    // A process may have a file open by a descriptor that it received. Then only the session that made the file knows
    // it.
    let makers = sessions.values().filter(|session| session.ranges.contains(inode));
    Ok(makers.map(|session| session.id).collect())
}

/// Returns whether applied updates up to any of these positions are not committed.
///
/// A wait for a position that no session has reached would never end.
#[must_use]
pub fn is_uncommitted(store: &Store, positions: &[(SessionId, LogPosition)]) -> bool {
    positions.iter().any(|(id, position)| store.committed(*id) < store.applied(*id).min(*position))
}
