//! Arenas and sessions for the crate's tests.

use std::path::Path;

use ashlar_pmem::{Arena, ArenaOptions};
use ashlar_store::Store;
use ashlar_types::{LogPosition, SessionId, Timestamp};
use ashlar_wire::SessionKind;

use crate::identity::{Process, SessionIdentity};
use crate::session::ServedSession;
use crate::sessions::prepare_session;
use crate::shared_state::SharedState;

/// Makes a small arena.
pub fn make_arena(place: &Path) {
    let options = ArenaOptions::new(16 << 20);
    let arena = Arena::create(place, &options).expect("an arena");
    Store::format(&arena, Timestamp::default()).expect("formatted");
}

/// Returns the identity of a user's session in a process that lives.
pub fn identity(pid: u32, uid: u32) -> SessionIdentity {
    let process = Process::find(pid).expect("a process");
    let (groups, kind) = (Vec::new(), SessionKind::Process);
    SessionIdentity { process, uid, gid: uid, groups, kind, label: "test".into() }
}

/// Adds a session to the state. Its log is empty.
pub fn insert_session(shared: &SharedState, session: ServedSession) -> SessionId {
    let (id, mut state) = (session.id, shared.lock());
    state.store.set_session(id, session.log.generation(), LogPosition(0));
    state.sessions.insert(id, session);
    id
}

/// Adds a session of an ordinary user, in a process that lives.
pub fn add_session(shared: &SharedState, pid: u32) -> SessionId {
    let session = prepare_session(shared).expect("made").give_to(identity(pid, 7)).expect("given");
    insert_session(shared, session)
}
