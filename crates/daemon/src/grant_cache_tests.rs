//! Tests of the grant cache, on a node with an arena.

use std::path::Path;

use ashlar_log::Log;
use ashlar_pmem::SessionFile;
use ashlar_processes::clock::boot_time;
use ashlar_types::FileKind;
use ashlar_update::{SetAttributes, Update};
use ashlar_wire::{Credit, CreditKind, LeaseRequest};

use crate::shared_state::SharedState;
use ashlar_node::Node;
use ashlar_node::digest::commit::{begin_commit, commit, finish_commit};
use ashlar_node::sessions::session::LogRoom;
use ashlar_pmem::{Mapping, MappingAccess};
use ashlar_types::{Credentials, InodeId, SessionId, Timestamp};
use ashlar_wire::Need;
use std::sync::Arc;

use crate::session_files::PreparedSession;
use crate::test_sessions::{acquire as acquire_lease, apply_settled, identity, insert_session, make_arena};
use crate::{Config, test_sessions};

const LOG_BYTES: u64 = 1 << 20;

/// Starts SharedFS on a new arena; leases move at once.
fn start(place: &Path) -> SharedState {
    make_arena(place);
    test_sessions::start(Config { cache_ttl_ms: 0, lease_hold_us: 0, ..Config::new(place) })
}

/// Opens a session of this process, and its log.
fn session(shared: &SharedState) -> (SessionId, Log<Arc<Mapping>>) {
    let id = shared.lock().store.next_session_id().expect("a number");
    let prepared =
        PreparedSession::make(&shared.arena, id, LogRoom { bytes: LOG_BYTES, allocated: LOG_BYTES }).expect("made");
    let identity = identity(std::process::id(), 0);
    let (mut session, _) = prepared.give_to(identity, boot_time()).expect("given");
    session.grant_credit(Credit { blocks: 9, metadata_bytes: 1 << 20 }, CreditKind::Common);
    insert_session(shared, session);
    let file = shared.arena.open_session_file(id, SessionFile::Log).expect("there");
    let memory = Mapping::map(&file, LOG_BYTES, MappingAccess::ReadWrite, shared.arena.medium()).expect("mapped");
    (id, Log::open(Arc::new(memory)).expect("a log"))
}

/// A commit retried after a failure covers only the frozen batch.
///
/// It failed after a resize. It once counted one batch more on its second try. So it stood for updates that were
/// applied after the freeze, and that a crash could still lose.
#[test]
fn commit_retry_persists_only_frozen_batch() {
    let directory = tempfile::tempdir().expect("a directory");
    let shared = start(&directory.path().join("arena"));
    let ((writer, log), (reader, _)) = (session(&shared), session(&shared));
    let need = Need { entries: true, ..Need::default() };
    let acquire = |id, write| {
        let want = LeaseRequest::on_inode(InodeId::ROOT, write, need);
        acquire_lease(&shared, id, want);
    };
    let change = |mode| {
        let at = Timestamp { seconds: 7, nanoseconds: 0 };
        let (inode, mode) = (InodeId::ROOT, Some(mode));
        let set = SetAttributes { inode, mode, uid: None, gid: None, accessed: None, modified: None, at };
        let update = Update::SetAttributes(set);
        log.append(log.seal_count(), update.kind() as u8, &update.encode().parts()).expect("appended");
    };
    let is_posted_as_persistent = |state: &Node| {
        let post = state.grant_cache.as_ref().expect("a grant cache").grant_cache().find(InodeId::ROOT, need);
        post.expect("posted").dependencies.is_empty()
    };
    acquire(writer, true);
    change(0o700);
    let mut state = shared.lock();
    apply_settled(&mut state, writer);
    let failed = begin_commit(&mut state).expect("a batch").give_up();
    assert!(finish_commit(&mut state, failed).is_err());
    drop(state);
    change(0o711);
    acquire(reader, false);
    let mut state = shared.lock();
    assert!(!is_posted_as_persistent(&state));
    // A thread that waits now for all that is applied waits for this commit.
    let target = state.commits.begun + 1;
    let job = begin_commit(&mut state).expect("the frozen batch");
    finish_commit(&mut state, job.run()).expect("committed");
    assert!(state.store.committed(writer) < state.store.applied(writer));
    assert!(!is_posted_as_persistent(&state), "it's in the next batch");
    assert!(state.commits.ended < target);
    commit(&mut state).expect("committed");
    assert_eq!(state.store.committed(writer), state.store.applied(writer));
    assert!(is_posted_as_persistent(&state) && state.commits.ended == target);
}

#[test]
fn only_what_the_audience_may_see_is_published() {
    let directory = tempfile::tempdir().expect("a directory");
    let shared = start(&directory.path().join("arena"));
    let ((writer, log), (reader, _)) = (session(&shared), session(&shared));
    let need = Need { contents: true, entries: true, xattrs: true, children: false };
    let acquire = |id, inode, write| {
        let want = LeaseRequest::on_inode(inode, write, need);
        acquire_lease(&shared, id, want);
    };
    let append = |update: &Update<'_>| {
        log.append(log.seal_count(), update.kind() as u8, &update.encode().parts()).expect("appended");
    };
    let at = Timestamp { seconds: 7, nanoseconds: 0 };
    let (private, open) = (InodeId(1000), InodeId(1001));
    let (below, shown, secret) = (InodeId(1002), InodeId(1003), InodeId(1004));
    let page = shared.lock().sessions[&writer].page.clone();
    shared.lock().sessions.get_mut(&writer).expect("there").ranges.add(&page, private, 9);
    acquire(writer, InodeId::ROOT, true);
    let make = |inode, parent, name: &[u8], kind, mode| {
        let (uid, gid, device) = (0, 0, 0);
        let (target, acl_access, acl_default) = (&[][..], &[][..], &[][..]);
        append(&Update::Create(ashlar_update::Create {
            inode,
            parent,
            name,
            kind,
            mode,
            uid,
            gid,
            device,
            at,
            target,
            acl_access,
            acl_default,
        }));
    };
    make(private, InodeId::ROOT, b"private", FileKind::Directory, 0o700);
    make(open, InodeId::ROOT, b"open", FileKind::Directory, 0o755);
    make(below, private, b"below", FileKind::Regular, 0o644);
    make(shown, open, b"shown", FileKind::Regular, 0o644);
    make(secret, open, b"secret", FileKind::Regular, 0o600);
    let parts = |inode| {
        let state = shared.lock();
        let cache = state.grant_cache.as_ref().expect("a grant cache").grant_cache();
        let has = |need| cache.has(inode, need);
        let whole = Need { xattrs: true, ..need };
        [has(Need::default()), has(whole)]
    };
    let read_all = || {
        [private, open, below, shown, secret].into_iter().for_each(|inode| acquire(reader, inode, false));
        [private, open, below, shown, secret].map(parts)
    };
    let (all, part, none) = ([true, true], [true, false], [false, false]);
    assert_eq!(read_all(), [all; 5], "the super-user may see all");
    let user = Credentials { uid: 7, gid: 7, groups: Vec::new(), checked: false };
    shared.lock().ways.add_user(&user);
    shared.lock().grant_cache.as_mut().expect("a grant cache").admit(&user);
    assert_eq!([private, open, below, shown, secret].map(parts), [none; 5], "the user maps no older grant");
    assert_eq!(read_all(), [part, all, none, all, part]);
    let (mode, uid, gid, accessed, modified) = (Some(0o700), None, None, None, None);
    acquire(writer, open, true);
    append(&Update::SetAttributes(SetAttributes { inode: open, mode, uid, gid, accessed, modified, at }));
    apply_settled(&mut shared.lock(), writer);
    assert_eq!([shown, secret].map(parts), [none; 2], "the way is narrowed");
}
