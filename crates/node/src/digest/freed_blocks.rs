//! Blocks that sessions have freed, and that some may still read.

use ashlar_store::Store;
use ashlar_types::SessionId;

use crate::sessions::session_table::SessionTable;

/// Makes blocks usable again that sessions have freed and refer to no more.
pub fn release_blocks(store: &mut Store, sessions: &SessionTable) {
    for session in sessions.all_live() {
        let (id, position) = (session.id, session.control.released());
        // A word about positions to come would count as the word of the session that gets this number next.
        store.release(id, position.min(store.applied(id)));
    }
    store.release_all(SessionId::SHARED_FS);
}

/// Takes freed blocks from sessions that might still read them.
///
/// Their freeing is committed. These sessions begin a new extent version, in which they ask again where their data are.
/// That needs no action of theirs now.
pub fn take_unreleased_blocks(store: &mut Store, sessions: &SessionTable) {
    for session in sessions.all_live() {
        let committed = store.committed(session.id);
        if store.has_unreleased(session.id, committed) {
            session.control.raise_extent_version();
            store.release(session.id, committed);
        }
    }
}
