//! The end of a session: all that it logged is digested, and all that it held is free.

use ashlar_types::{LogPosition, SessionId};

use crate::blame::Blame;
use crate::leases::decisions::end_leases;
use crate::node_core::NodeCore;
use crate::records::logs::fence_session;
use crate::records::validate::Violation;

/// Begins the end of a session; returns the end of its log, which is to be applied up to there.
///
/// Returns `None` if nothing of it is to be applied. Until [`end_holdings`] the session stays.
pub fn begin_session_end(state: &mut NodeCore, id: SessionId) -> Option<LogPosition> {
    let session = state.sessions.get_mut(&id)?;
    let _blame = Blame::for_request(session);
    session.is_ending = true;
    state.store.unmap_blocks(id, None);
    // The seal voids records that a thread of the ended process had begun to append.
    match state.live(id)?.log.seal() {
        Ok((_, sealed)) => Some(sealed),
        Err(damaged) => {
            fence_session(state, id, &Violation::Log(damaged.to_string()));
            None
        }
    }
}

/// Takes all that an ended session holds: its leases, reservations and locks.
pub fn end_holdings(state: &mut NodeCore, id: SessionId) {
    if let Some(session) = state.sessions.get_mut(&id) {
        session.outstanding.clear();
        session.page.clear_delegated();
    }
    end_leases(state, id);
    state.reservations.end_session(id, &mut state.leasing, &state.store);
    state.locking.end_session(id);
}
