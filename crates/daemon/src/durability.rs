//! Makes sessions' updates persistent.
//!
//! For `fsync` these are any session's writes to an inode, for `sync` all sessions' updates. A session makes its own
//! log persistent by itself. SharedFS applies the logs of other sessions as far as they are settled, and commits. It
//! asks nothing of their processes, and no lease moves. A commit takes all applied updates, so the dependencies of a
//! log's records are part of it: a record names only updates that were applied before.

use std::collections::BTreeSet;

use ashlar_store::StoreError;
use ashlar_types::{Errno, InodeId, LogPosition, SessionId};

use crate::grant::report_store_error;
use crate::leasing::Ancestors;
use crate::shared_state::{SharedState, StateGuard};
use crate::state::State;

/// Makes persistent what other sessions have done to an inode.
///
/// That includes the names that lead to it. `id` is the asking session. It also makes their updates persistent up to
/// `positions`.
///
/// # Errors
/// As [`sync_positions`].
pub fn sync_inode(
    shared: &SharedState,
    id: SessionId,
    inode: InodeId,
    mut positions: Vec<(SessionId, LogPosition)>,
) -> Result<(), Errno> {
    let mut state = shared.lock();
    let mut applied = BTreeSet::from([id]);
    // A log may lead to further ones: it makes the inode, or moves it below another directory.
    while let Some(writer) = find_writers(&state, inode)
        .map_err(|error| report_store_error(&error))?
        .into_iter()
        .find(|writer| !applied.contains(writer))
    {
        state = shared.apply_settled(state, writer);
        applied.insert(writer);
        positions.push((writer, state.store.applied(writer)));
    }
    positions.extend(state.leasing.manager.path_dependencies(id, inode, &Ancestors(&state.store)));
    sync_positions(shared, state, &positions)
}

/// Returns the sessions whose logs may hold unapplied updates of an inode.
///
/// Updates of a directory that leads to it count too.
fn find_writers(state: &State, inode: InodeId) -> Result<BTreeSet<SessionId>, StoreError> {
    if state.store.inode(inode)?.is_some() {
        return Ok(state.leasing.manager.writers(inode, &Ancestors(&state.store)));
    }
    // A process may have a file open by a descriptor that it received. Then only the session that made the file knows
    // it.
    let makers = state.sessions.values().filter(|session| session.ranges.contains(inode));
    Ok(makers.map(|session| session.id).collect())
}

/// Makes persistent what all sessions have done.
///
/// # Errors
/// As [`SharedState::commit_all`].
pub fn sync_all(shared: &SharedState) -> Result<(), Errno> {
    let mut state = shared.apply_all_settled(shared.lock());
    shared.commit_all(&mut state)
}

/// Makes applied updates of sessions persistent, up to these positions.
///
/// # Errors
/// `EIO` if they can't be committed; [`SharedState::ENDING`].
pub fn sync_positions(
    shared: &SharedState,
    mut state: StateGuard<'_>,
    positions: &[(SessionId, LogPosition)],
) -> Result<(), Errno> {
    // A wait for a position that no session has reached would never end.
    let is_behind = |(id, position): &(SessionId, LogPosition)| {
        state.store.committed(*id) < state.store.applied(*id).min(*position)
    };
    if positions.iter().any(is_behind) { shared.commit_all(&mut state) } else { Ok(()) }
}
