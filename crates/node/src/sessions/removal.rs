//! The removal of sessions that have ended and are committed as a whole.

use ashlar_types::{LogPosition, SessionId};
use ashlar_wire::SessionKind;

use crate::leases::leasing::Leasing;
use crate::node_core::NodeCore;
use crate::sessions::session::ServedSession;

/// A session that the node has removed, and whose files the shell removes next.
pub struct RemovedSession {
    /// The session.
    pub session: ServedSession,
    /// Where its log ends.
    pub end: LogPosition,
    /// Whether its files may pass to another session.
    pub is_reusable: bool,
}

/// Removes the ended sessions that are committed as a whole.
///
/// Their rows stay until the shell has removed their files ([`remove_session_row`]): files without a row would look
/// like a new session's, and be applied again.
///
/// [`remove_session_row`]: crate::journal::acts::remove_session_row
pub fn remove_ended_sessions(state: &mut NodeCore) -> Vec<RemovedSession> {
    let ended = state.sessions.ended(&state.store);
    ended.into_iter().filter_map(|id| remove_session(state, id)).collect()
}

fn remove_session(state: &mut NodeCore, id: SessionId) -> Option<RemovedSession> {
    let session = state.sessions.remove(&id)?;
    let end = state.store.applied(id);
    // It no longer reads blocks freed so far; the session that has its number next may read those that are freed later.
    state.store.release(id, end);
    state.store.unmap_blocks(id, None);
    state.publish_sharing();
    state.counters.sessions_ended += 1;
    let is_reusable = is_reusable(&state.leasing, &session);
    Some(RemovedSession { session, end, is_reusable })
}

/// Returns whether a session's files may pass to another session.
fn is_reusable(leasing: &Leasing, session: &ServedSession) -> bool {
    session.identity.kind == SessionKind::Process
        && session.fenced.is_none()
        && session.is_whole
        && !session.is_cut
        && !session.is_truncated()
        && session.mapped.is_none()
        // The allocated size of a log that an earlier SharedFS made is not known.
        && session.log_room.allocated > 0
        && leasing.manager.has_ended(session.id)
}

/// Records that the files of a fenced session are quarantined.
///
/// Its positions stay known until its process has ended: other sessions build on what was applied.
pub fn record_quarantine(state: &mut NodeCore, id: SessionId) {
    state.store.release_all(id);
    if let Some(session) = state.sessions.get_mut(&id) {
        session.is_quarantined = true;
    }
}
