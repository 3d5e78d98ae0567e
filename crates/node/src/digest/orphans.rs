//! Inodes without a name: freed when no session has them open.

use ashlar_types::{InodeId, SessionId};
use ashlar_update::Update;

use crate::journal::acts::journal_own;
use crate::node_core::NodeCore;
use crate::records::apply::apply_update;
use crate::recovery::state::RecoveryPhase;
use crate::sessions::session::ServedSession;

/// Returns whether any session that is not fenced has the inode open.
///
/// Recovery does not know yet which handles were opened by right.
pub fn is_open(state: &NodeCore, inode: InodeId) -> bool {
    let has_opened = |session: &ServedSession| match state.recovery.phase {
        RecoveryPhase::Running => state.handle_leases().has_opened(session, inode),
        RecoveryPhase::Recovering | RecoveryPhase::Salvaging => session.control.has_open(inode),
    };
    state.sessions.all_live().any(has_opened)
}

/// Returns the orphans that no session has open.
#[must_use]
pub fn closed_orphans(state: &NodeCore) -> Vec<InodeId> {
    state.orphans.iter().copied().filter(|&inode| !is_open(state, inode)).collect()
}

/// Frees the orphans that no session has open.
///
/// A log may still write to them.
pub fn free_orphans(state: &mut NodeCore) {
    closed_orphans(state).into_iter().for_each(|inode| free_orphan(state, inode));
}

/// Frees one orphan that no session has open.
pub fn free_orphan(state: &mut NodeCore, inode: InodeId) {
    let end = state.store.applied(SessionId::SHARED_FS).plus(1);
    state.batch_notes.clear();
    match apply_update(state, SessionId::SHARED_FS, end, &Update::Release { inode }) {
        Ok(applied) => {
            if applied.freed.is_some() {
                journal_own(state, &Update::Release { inode });
            }
            state.counters.orphans_freed += u64::from(applied.freed.is_some());
            // It has a name again, or is gone: no orphan either way.
            state.orphans.remove(&inode);
            state.commits.record_applied(state.now.since_boot);
        }
        Err(error) => tracing::error!(%inode, %error, "an orphan can't be freed"),
    }
}
