//! Logs that are sealed, and then applied up to the seal.

use ashlar_types::SessionId;

use crate::blame::Blame;
use crate::node_core::NodeCore;
use crate::records::apply::{Slice, apply_log};
use crate::records::logs::fence_session;
use crate::records::validate::Violation;

/// Applies a batch of the first sealed log; `None` if there is none, else whether that log is applied as a whole.
pub fn apply_sealed(state: &mut NodeCore) -> Option<bool> {
    let (id, end) = *state.sealed.front()?;
    let is_over = apply_log(state, id, end, Slice::Batch);
    if is_over {
        state.sealed.pop_front();
        let position = state.store.applied(id);
        state.leasing.manager.handle_applied(id, position);
    }
    Some(is_over)
}

/// Seals a session's log and applies all of it.
pub fn seal_and_apply(state: &mut NodeCore, id: SessionId) {
    let Some(session) = state.live(id) else { return };
    let _blame = Blame::for_records(session, state.store.applied(id));
    let sealed = session.log.seal();
    state.counters.seals += 1;
    match sealed {
        Ok((_, end)) => {
            apply_log(state, id, end, Slice::All);
        }
        Err(damaged) => fence_session(state, id, &Violation::Log(damaged.to_string())),
    }
}
