//! Inodes without a name: freed when no session has them open.

use ashlar_types::{InodeId, SessionId};
use ashlar_update::Update;

use crate::node::Node;

/// Returns the orphans that no session has open.
#[must_use]
pub fn closed_orphans(state: &Node) -> Vec<InodeId> {
    state.orphans.iter().copied().filter(|&inode| !state.is_open(inode)).collect()
}

/// Frees the orphans that no session has open.
///
/// A log may still write to them.
pub fn free_orphans(state: &mut Node) {
    closed_orphans(state).into_iter().for_each(|inode| free_orphan(state, inode));
}

/// Frees one orphan that no session has open.
pub fn free_orphan(state: &mut Node, inode: InodeId) {
    let end = state.store.applied(SessionId::SHARED_FS).plus(1);
    state.batch_notes.clear();
    match state.apply_update(SessionId::SHARED_FS, end, &Update::Release { inode }) {
        Ok(applied) => {
            if applied.freed.is_some() {
                state.journal_own(&Update::Release { inode });
            }
            state.counters.orphans_freed += u64::from(applied.freed.is_some());
            // It has a name again, or is gone: no orphan either way.
            state.orphans.remove(&inode);
            state.oldest_uncommitted.get_or_insert(state.now.since_boot);
        }
        Err(error) => tracing::error!(%inode, %error, "an orphan can't be freed"),
    }
}
