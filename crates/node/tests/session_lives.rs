//! Sessions begin, are taken up and settled after a start, and are removed.

use std::sync::Arc;
use std::time::Duration;

use ashlar_node::digest::commit::commit;
use ashlar_node::records::apply::Slice;
use ashlar_node::recovery::settling::SessionSettling;
use ashlar_node::recovery::take_up::{FoundSession, SoundSession, take_up_sessions};
use ashlar_node::sessions::beginning::begin_session;
use ashlar_node::sessions::identity::{Process, ProcessTable, SessionIdentity};
use ashlar_node::sessions::removal::remove_ended_sessions;
use ashlar_node::sessions::session::{ServedSession, SessionMemory};
use ashlar_node::{Node, NodeLimits, NodeTime};
use ashlar_pmem::{CrashMedium, MediumKind};
use ashlar_store::{MemoryArena, MemoryArenaOptions, Store};
use ashlar_types::{LogPosition, SessionId, Timestamp};
use ashlar_wire::{MountTerms, SessionKind};

const PROCESS: Process = Process { pid: 1, start_ticks: 1, boot: [0; 16] };
const CACHE_TTL: Duration = Duration::from_secs(1);
/// The device number of the mount's files.
const DEVICE: u64 = 77;

struct OneProcess;

impl ProcessTable for OneProcess {
    fn is_gone(&self, _: &Process) -> bool {
        false
    }
}

fn make_node() -> Node {
    let arena = Arc::new(MemoryArena::new(&MemoryArenaOptions::new(CrashMedium::Words, vec![256])));
    Store::format_in_memory(&arena, Timestamp::default()).expect("formatted");
    let store = Store::open_in_memory(arena).expect("a sound store");
    let limits = NodeLimits::new(MediumKind::Pmem);
    let now = NodeTime { since_boot: Duration::from_secs(5), wall: Timestamp::default() };
    Node::new(store, limits, Arc::new(OneProcess), now).expect("a sound store")
}

fn make_session(id: SessionId, kind: SessionKind) -> ServedSession {
    let memory = SessionMemory::in_twins(CrashMedium::Words, id, 1, 32 << 10).expect("long enough");
    let (groups, label) = (Vec::new(), String::new());
    let owner = SessionIdentity { process: PROCESS, uid: 0, gid: 0, groups, kind, label };
    ServedSession::new(id, owner, 1, memory, Duration::ZERO).expect("long enough")
}

/// A process begins with inode numbers and credit, and a mount asks for all.
#[test]
fn process_begins_with_means_and_mount_without() {
    let mut node = make_node();
    let process = begin_session(&mut node, make_session(SessionId(1), SessionKind::Process), false).expect("begun");
    let mount = begin_session(&mut node, make_session(SessionId(2), SessionKind::Mount), false).expect("begun");
    assert!(process.inodes.1 > 0 && mount.inodes.1 == 0);
    let granted = |id| node.sessions[&SessionId(id)].account.granted.blocks;
    assert!(granted(1) > 0 && granted(2) == 0);
    assert!(node.store.has_session(SessionId(1)) && node.store.has_session(SessionId(2)));
    assert!(node.sessions.values().all(|session| session.control.is_shared()));
}

/// Positions of a retired session's log mean one record for ever: the next session keeps its row.
#[test]
fn session_of_retired_files_keeps_row() {
    let mut node = make_node();
    let session = make_session(SessionId(1), SessionKind::Process);
    node.store.set_session(SessionId(1), session.log.generation(), LogPosition(640));
    begin_session(&mut node, session, false).expect("begun");
    assert_eq!(node.store.applied(SessionId(1)), LogPosition(640));
}

/// A row without memory is one of an ended session; memory without a session is lost.
#[test]
fn take_up_removes_rows_without_memory() {
    let mut node = make_node();
    let session = make_session(SessionId(1), SessionKind::Process);
    let (version, generation) = (session.control.segment_version(), session.log.generation());
    node.store.set_session(SessionId(9), generation, LogPosition(64));
    let sound = FoundSession::Sound(Box::new(SoundSession { session, mapped: None }));
    take_up_sessions(&mut node, [(SessionId(1), sound), (SessionId(2), FoundSession::Lost)].into())
        .expect("no journal");
    assert!(!node.store.has_session(SessionId(9)) && node.store.has_session(SessionId(1)));
    assert_eq!(node.recovery.lost, [SessionId(2)].into());
    assert_ne!(node.sessions[&SessionId(1)].control.segment_version(), version);
}

/// Sessions of dead processes and fenced sessions end; only files of a sound process serve another session.
#[test]
fn settling_ends_dead_and_fenced_sessions() {
    let mut node = make_node();
    let kinds =
        [SessionKind::Process, SessionKind::Process, SessionKind::Process, SessionKind::Mount, SessionKind::Mount];
    for (id, kind) in (1..).map(SessionId).zip(kinds) {
        let mut session = make_session(id, kind);
        if kind == SessionKind::Mount {
            session.set_mount(DEVICE + id.0, MountTerms::default()).expect("few users");
            session.page.set_stale_until_ms(60_000);
        }
        session.fenced = (id.0 == 3).then(|| "a test".to_owned());
        node.sessions.insert(id, session);
    }
    let mut settling = SessionSettling::default();
    let mut goes_on = |id, is_alive| settling.settle_session(&mut node, SessionId(id), is_alive, CACHE_TTL);
    assert!(goes_on(1, true).is_some_and(|running| running.mount_stale_until.is_none()));
    assert!(goes_on(2, false).is_none());
    assert!(goes_on(3, true).is_none());
    let until = goes_on(4, true).and_then(|running| running.mount_stale_until);
    assert_eq!(until, Some(Duration::from_secs(6)), "no kernel believes its cache for longer");
    assert!(goes_on(5, false).is_none());
    let settled = settling.finish(&mut node);
    assert_eq!(settled.ended, [2, 3, 5].map(SessionId));
    assert_eq!(settled.dead_mounts, [DEVICE + 5]);
    assert_eq!(node.not_before, Duration::from_secs(6));
    commit(&mut node).expect("committed");
    let removed = remove_ended_sessions(&mut node);
    let found: Vec<_> = removed.iter().map(|removed| (removed.session.id.0, removed.is_reusable)).collect();
    assert_eq!(found, [(2, true), (3, false), (5, false)]);
    assert_eq!(node.sessions.keys().copied().collect::<Vec<_>>(), [SessionId(1), SessionId(4)]);
}

/// Positions only grow; a node that finds otherwise must not go on.
#[test]
#[should_panic(expected = "was applied, and now only")]
fn position_that_goes_back_ends_the_node() {
    let mut node = make_node();
    begin_session(&mut node, make_session(SessionId(1), SessionKind::Process), false).expect("begun");
    node.sessions.get_mut(&SessionId(1)).expect("a session").checked = LogPosition(64);
    node.apply(SessionId(1), LogPosition(0), Slice::All);
}

/// No session has used more than it was granted.
#[test]
#[should_panic(expected = "of a credit of")]
fn use_beyond_credit_ends_the_node() {
    let mut node = make_node();
    begin_session(&mut node, make_session(SessionId(1), SessionKind::Process), false).expect("begun");
    node.sessions.get_mut(&SessionId(1)).expect("a session").account.used.blocks = u64::MAX;
    node.apply(SessionId(1), LogPosition(0), Slice::All);
}
