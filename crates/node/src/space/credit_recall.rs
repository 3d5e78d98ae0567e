//! Takes credit back from sessions, whatever they show of it.

use ashlar_wire::Credit;

use crate::node_core::NodeCore;
use crate::records::sealed_logs::seal_and_apply;
use crate::sessions::session::ServedSession;

/// Takes back all credit that sessions hold unused, whatever their control pages say.
///
/// The logs should be applied: what is left of them is applied under the lock.
pub fn write_off_credit(state: &mut NodeCore, is_of: impl Fn(&ServedSession) -> bool) {
    for id in state.live_ids() {
        let is_holder =
            |session: &&mut ServedSession| is_of(session) && session.account.outstanding() != Credit::default();
        let Some(session) = state.sessions.get_mut(&id).filter(is_holder) else { continue };
        session.recall_credit();
        seal_and_apply(state, id);
        if let Some(session) = state.sessions.get_mut(&id) {
            session.write_off_credit();
        }
    }
}
