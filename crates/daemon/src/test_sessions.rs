//! Arenas and sessions for the crate's tests.

use std::path::Path;
use std::sync::Arc;

use ashlar_metrics::StatusSlot;
use ashlar_pmem::{Arena, ArenaOptions};
use ashlar_processes::clock::boot_time;
use ashlar_processes::process::find_process;
use ashlar_store::Store;
use ashlar_types::{LogPosition, SessionId, Timestamp};
use ashlar_wire::{LeaseRequest, Reply, Request, SessionKind};

use crate::Config;
use crate::leading::StartingProcess;
use crate::node_requests::ask_node;
use crate::recovery::{open_arena, recover};
use crate::sessions::prepare_session;
use crate::shared_state::SharedState;
use ashlar_node::Node;
use ashlar_node::leases::grant::Patience;
use ashlar_node::pending::RequestTerms;
use ashlar_node::records::apply::Slice;
use ashlar_node::sessions::identity::SessionIdentity;
use ashlar_node::sessions::session::ServedSession;

/// Makes a small arena.
pub fn make_arena(place: &Path) {
    let options = ArenaOptions::new(16 << 20);
    let arena = Arena::create(place, &options).expect("an arena");
    Store::format(&arena, Timestamp::default()).expect("formatted");
}

/// Starts SharedFS on an arena of no cluster.
pub fn start(config: Config) -> SharedState {
    let arena = Arc::new(open_arena(&config).expect("an arena"));
    let process = StartingProcess { should_end: &|| false, status: &StatusSlot::default() };
    recover(config, arena, None, process).expect("a sound arena")
}

/// Returns the identity of a user's session in a process that lives.
pub fn identity(pid: u32, uid: u32) -> SessionIdentity {
    let process = find_process(pid).expect("a process");
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
    let prepared = prepare_session(shared).expect("made");
    let (session, _) = prepared.give_to(identity(pid, 7), boot_time()).expect("given");
    insert_session(shared, session)
}

/// Applies a session's log up to what is settled now.
pub fn apply_settled(state: &mut Node, id: SessionId) {
    if let Some(settled) = state.settled(id) {
        state.apply(id, settled, Slice::All);
    }
    state.decide_all();
}

/// Grants leases to a session.
pub fn acquire(shared: &SharedState, id: SessionId, want: LeaseRequest) -> Reply {
    let terms = RequestTerms { patience: Patience::Any, bytes_max: usize::MAX, reclaims: false };
    ask_node(shared, id, Request::Acquire(vec![want]), terms).expect("granted")
}
