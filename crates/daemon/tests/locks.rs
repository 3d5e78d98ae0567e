//! Record locks of honest and hostile sessions.
//!
//! They exclude other sessions, over ends and restarts.

mod common;

use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use ashlar_types::{ByteRange, Errno, FileKind, InodeId, LockAction, LockKind, LockMode, LockedRange};
use ashlar_update::{SetAttributes, Update};
use ashlar_wire::{
    LOCK_LAST, LOCK_OWNER_PROCESS, LOCK_SLOTS, LeaseRequest, LockChange, LockSlot, LockSlotState, Need, Reply, Request,
    SessionKind,
};
use common::{Client, NOW, Site, create};

const FILE: InodeId = InodeId(77);
const NOBODY: u32 = 65534;
/// For waits that take moments.
const SOON: Duration = Duration::from_secs(10);

#[test]
#[ignore = "this is the daemon's process, which the other tests start"]
fn daemon_process() {
    common::run_daemon();
}

/// Makes a site with [`FILE`], which all users may read.
fn site_with_file() -> Site {
    let site = Site::new(64 << 20);
    let mut maker = Client::open(&site.socket());
    let (first, count) = maker.welcome.inodes;
    assert!((first.0..first.0 + count).contains(&FILE.0));
    maker.acquire(&[(InodeId::ROOT, true)]).expect("granted");
    maker.append(&Update::Create(create(FILE, InodeId::ROOT, b"file", FileKind::Regular)));
    maker.digest().expect("digested");
    maker.call(&Request::Goodbye).expect("ended");
    site
}

/// Returns a session's request for a lock, as a mount sends it.
fn lock(owner: u64, (first, last): (u64, u64), action: LockAction, wait: Option<u64>) -> Request {
    let (kind, range) = (LockKind::Record, ByteRange::new(first, last));
    Request::Lock { inode: FILE, kind, owner, pid: 42, range, action, wait, slot: None }
}

/// Returns a request for a process's own lock.
fn own_lock(client: &Client, slot: u32, range: (u64, u64), action: LockAction) -> Request {
    lock_by_slot(slot_of(client, slot), range, action)
}

fn slot_of(client: &Client, slot: u32) -> LockSlot {
    LockSlot { number: slot, word: client.control.lock_slot_at_present(slot % LOCK_SLOTS).word }
}

/// The same, for a slot as it was once.
fn lock_by_slot(slot: LockSlot, (first, last): (u64, u64), action: LockAction) -> Request {
    let (kind, range, owner) = (LockKind::Record, ByteRange::new(first, last), LOCK_OWNER_PROCESS);
    Request::Lock { inode: FILE, kind, owner, pid: 42, range, action, wait: None, slot: Some(slot) }
}

fn conflict(client: &mut Client, (first, last): (u64, u64)) -> Option<LockedRange> {
    let (kind, action, range) = (LockKind::Record, LockAction::Write, ByteRange::new(first, last));
    match client.call(&Request::QueryLock { inode: FILE, kind, owner: 1, range, action }) {
        Ok(Reply::Conflict(conflict)) => conflict.map(|(held, _)| held),
        other => panic!("{other:?}"),
    }
}

/// Asks for a lock through a slot until it is delegated.
///
/// No other session has a lock then, or waits.
fn await_delegation(client: &mut Client, slot: u32, range: (u64, u64)) {
    let begun = Instant::now();
    loop {
        let request = own_lock(client, slot, range, LockAction::Write);
        if matches!(client.call(&request).expect("it has the file"), Reply::Delegated) {
            return;
        }
        assert!(begun.elapsed() < SOON, "the file is never delegated");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Writes into a session's own page that all of the file is delegated to it.
fn claim_all(hostile: &Client, slot: u32) {
    let all = [LockedRange { mode: LockMode::Write, range: ByteRange::new(0, LOCK_LAST) }];
    assert!(hostile.control.delegate_locks(slot_of(hostile, slot), FILE, &all));
}

/// Checks that after a restart the delegated lock exists, and no other.
fn check_honest_alone(site: &mut Site, sessions: [&mut Client; 2], (first, last): (u64, u64)) {
    site.kill();
    site.start();
    sessions.into_iter().for_each(|session| session.resume(&site.socket()));
    let mut mount = Client::open_as(&site.socket(), SessionKind::Mount);
    let delegated = LockedRange { mode: LockMode::Write, range: ByteRange::new(first, last) };
    assert_eq!(conflict(&mut mount, (0, LOCK_LAST)), Some(delegated));
    site.check();
}

#[test]
fn slot_number_out_of_range_is_refused() {
    let mut site = site_with_file();
    let mut client = Client::open(&site.socket());
    assert_eq!(client.control.claim_lock_slot(FILE), Some(0));
    for slot in [LOCK_SLOTS, u32::MAX] {
        let request = own_lock(&client, slot, (0, 9), LockAction::Write);
        assert_eq!(client.call(&request).err(), Some(Errno::EINVAL), "slot {slot}");
    }
    await_delegation(&mut client, 0, (0, 9));
    site.check();
}

#[test]
fn lock_awaiting_returns_is_not_given_to_ended_session() {
    let mut site = site_with_file();
    let (mut stays_away, mut two) = (Client::open(&site.socket()), Client::open(&site.socket()));
    stays_away.call(&lock(1, (100, 109), LockAction::Write, None)).expect("locked");
    site.kill();
    site.start();
    two.resume(&site.socket());
    let mut side = two.attach(&site.socket());
    let waiter = std::thread::spawn(move || {
        two.call(&Request::InodeRange).expect("it is there");
        two.call(&lock(1, (0, 9), LockAction::Write, None))
    });
    std::thread::sleep(Duration::from_millis(100));
    assert!(matches!(side.call(&Request::Goodbye, &[]).expect("answered").0, Reply::Done));
    assert_eq!(waiter.join().expect("answered").err(), Some(Errno::EIO));
    let mut three = Client::open(&site.socket());
    assert!(three.call(&lock(1, (5, 5), LockAction::Write, None)).is_ok(), "no session has it");
    site.check();
}

/// A shell that waits for its child does not return to a restarted SharedFS.
#[test]
fn restart_waits_for_no_session_without_locks() {
    let mut site = site_with_file();
    let (idle, mut busy) = (Client::open(&site.socket()), Client::open(&site.socket()));
    site.kill();
    site.start();
    busy.resume(&site.socket());
    let begin = Instant::now();
    busy.call(&lock(7, (0, 9), LockAction::Write, None)).expect("locked");
    assert!(begin.elapsed() < Duration::from_secs(3), "the lock waits for the idle session");
    drop(idle);
    site.check();
}

#[test]
fn delegation_never_given_is_not_believed_after_restart() {
    let mut site = site_with_file();
    let (mut hostile, mut honest) = (Client::open(&site.socket()), Client::open(&site.socket()));
    let slot = honest.control.claim_lock_slot(FILE).expect("a slot");
    await_delegation(&mut honest, slot, (10, 19));
    let claimed = hostile.control.claim_lock_slot(FILE).expect("a slot");
    claim_all(&hostile, claimed);
    // It also claims one of which it only has a copy.
    let other = hostile.control.claim_lock_slot(FILE).expect("a slot");
    let set = |list: &mut ashlar_wire::LockList| list.set(ByteRange::new(15, 15), LockAction::Write);
    assert_eq!(hostile.control.change_locks(other, FILE, LockSlotState::Shared, set), LockChange::Done);
    check_honest_alone(&mut site, [&mut hostile, &mut honest], (10, 19));
}

#[test]
fn failed_delegation_is_not_believed_after_restart() {
    let mut site = site_with_file();
    let (mut hostile, mut honest) = (Client::open(&site.socket()), Client::open(&site.socket()));
    let claimed = hostile.control.claim_lock_slot(FILE).expect("a slot");
    let present = slot_of(&hostile, claimed);
    let wrong = LockSlot { word: present.word ^ 1 << 40, ..present };
    // SharedFS tries it when no other session has asked for a while.
    for _ in 0..30 {
        let reply = hostile.call(&lock_by_slot(wrong, (50, 59), LockAction::Write)).expect("no session has it");
        assert!(matches!(reply, Reply::Done), "{reply:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
    hostile.call(&lock_by_slot(wrong, (50, 59), LockAction::Unlock)).expect("it's its own");
    let slot = honest.control.claim_lock_slot(FILE).expect("a slot");
    await_delegation(&mut honest, slot, (10, 19));
    claim_all(&hostile, claimed);
    check_honest_alone(&mut site, [&mut hostile, &mut honest], (10, 19));
}

#[test]
fn process_locks_only_under_its_own_pid() {
    let mut site = site_with_file();
    let mut client = Client::open(&site.socket());
    client.call(&lock(1, (0, 9), LockAction::Write, None)).expect("no session has it");
    let mut mount = Client::open_as(&site.socket(), SessionKind::Mount);
    let (kind, range, action) = (LockKind::Record, ByteRange::new(0, 9), LockAction::Write);
    let query = Request::QueryLock { inode: FILE, kind, owner: 1, range, action };
    let Ok(Reply::Conflict(Some((_, pid)))) = mount.call(&query) else { panic!("no session has it") };
    assert_eq!(pid, std::process::id(), "it said 42");
    site.check();
}

/// SharedFS is killed after it has granted a lock, and before the session has copied it.
#[test]
fn granted_lock_holds_after_restart_without_copy() {
    let mut site = site_with_file();
    let (mut one, mut two) = (Client::open(&site.socket()), Client::open(&site.socket()));
    let mut mount = Client::open_as(&site.socket(), SessionKind::Mount);
    // Another process's lock keeps the file from being delegated.
    let beside = lock(1, (100, 100), LockAction::Write, None);
    mount.call(&beside).expect("no session has it");
    let slot = one.control.claim_lock_slot(FILE).expect("a slot");
    for (range, action) in [((0, 9), LockAction::Write), ((20, 29), LockAction::Read), ((4, 5), LockAction::Unlock)] {
        let reply = one.call(&own_lock(&one, slot, range, action)).expect("no session has it");
        assert!(matches!(reply, Reply::Done), "{reply:?}");
    }
    site.kill();
    site.start();
    mount.begin_to_resume(&site.socket());
    mount.call(&beside).expect("it has had it");
    mount.call(&Request::SyncDependencies(Vec::new())).expect("it is back");
    two.resume(&site.socket());
    for (byte, is_free) in [(3, false), (4, true), (5, true), (6, false), (10, true), (29, false)] {
        let is_granted = two.call(&lock(1, (byte, byte), LockAction::Write, None)).is_ok();
        assert_eq!(is_granted, is_free, "byte {byte}");
    }
    one.resume(&site.socket());
    let (owner, kind) = (LOCK_OWNER_PROCESS, LockKind::Record);
    one.call(&Request::ReleaseLocks { inode: FILE, owner, kind }).expect("released");
    assert!(two.call(&lock(1, (0, 99), LockAction::Write, None)).is_ok());
    site.kill();
    site.start();
    let mut mount = Client::open_as(&site.socket(), SessionKind::Mount);
    assert_eq!(conflict(&mut mount, (0, 99)), None, "a released lock is not noted");
    site.check();
}

#[test]
fn copy_never_granted_is_not_believed_after_restart() {
    let mut site = site_with_file();
    let (mut hostile, mut honest) = (Client::open(&site.socket()), Client::open(&site.socket()));
    let slot = hostile.control.claim_lock_slot(FILE).expect("a slot");
    let set = |list: &mut ashlar_wire::LockList| list.set(ByteRange::new(0, 9), LockAction::Write);
    assert_eq!(hostile.control.change_locks(slot, FILE, LockSlotState::Shared, set), LockChange::Done);
    site.kill();
    site.start();
    hostile.resume(&site.socket());
    honest.resume(&site.socket());
    assert!(honest.call(&lock(1, (5, 5), LockAction::Write, None)).is_ok(), "no session has had it");
    site.check();
}

/// Sets the permission bits of [`FILE`].
fn set_mode(root: &mut Client, mode: u32) {
    root.acquire(&[(FILE, true)]).expect("granted");
    let set =
        SetAttributes { inode: FILE, mode: Some(mode), uid: None, gid: None, accessed: None, modified: None, at: NOW };
    root.append(&Update::SetAttributes(set));
    root.digest().expect("digested");
}

/// Runs a story of [`ordinary_user`] as an ordinary user, in a process of its own.
fn begin_as_nobody(site: &Site, story: &str) -> std::process::Child {
    let mut child = common::this_test("ordinary_user");
    child.env("ASHLAR_TEST_SOCKET", site.socket()).env("ASHLAR_TEST_STORY", story);
    common::spawn(child.uid(NOBODY).gid(NOBODY))
}

fn run_as_nobody(site: &Site, story: &str) {
    assert!(begin_as_nobody(site, story).wait().expect("ended").success(), "{story}");
}

#[test]
fn lock_takes_an_open_file_and_the_right_to_access_it() {
    if !common::may_change_users() {
        return;
    }
    let mut site = site_with_file();
    let mut root = Client::open(&site.socket());
    for (mode, story) in [(0o600, "no right"), (0o644, "may read"), (0o646, "may write"), (0o642, "may only write")] {
        set_mode(&mut root, mode);
        run_as_nobody(&site, story);
    }
    // A descriptor of a mount is an open file, too.
    set_mode(&mut root, 0o646);
    let mount = Client::open_as(&site.socket(), SessionKind::Mount);
    assert!(mount.control.open_handle(FILE));
    run_as_nobody(&site, "open on a mount");
    site.check();
}

#[test]
fn lock_on_unknown_inode_is_refused() {
    let mut site = Site::new(64 << 20);
    let mut client = Client::open(&site.socket());
    assert_eq!(client.call(&lock(1, (0, 9), LockAction::Write, None)).err(), Some(Errno::ESTALE));
    client.call(&lock(1, (0, 9), LockAction::Unlock, None)).expect("there is none");
    // An inode that the session has just made is known.
    client.acquire(&[(InodeId::ROOT, true)]).expect("granted");
    let inode = client.make(InodeId::ROOT, b"made", FileKind::Regular);
    let (kind, owner, action) = (LockKind::Record, LOCK_OWNER_PROCESS, LockAction::Write);
    let range = ByteRange::new(0, 9);
    let request = Request::Lock { inode, kind, owner, pid: 1, range, action, wait: None, slot: None };
    client.call(&request).expect("locked");
    site.check();
}

/// An ordinary user's session returns first, and asks for a lock as if it had had it.
#[test]
fn lock_reclaimed_by_ordinary_user_never_precedes_others() {
    if !common::may_change_users() {
        return;
    }
    let mut site = site_with_file();
    let (mut root, mut mount) = (Client::open(&site.socket()), Client::open_as(&site.socket(), SessionKind::Mount));
    set_mode(&mut root, 0o666);
    mount.call(&lock(7, (0, 9), LockAction::Write, None)).expect("no session has it");
    let mut thief = begin_as_nobody(&site, "reclaim");
    let deadline = Instant::now() + SOON;
    while site.status().sessions.iter().all(|session| session.uid != NOBODY) {
        assert!(Instant::now() < deadline, "it does not begin");
        std::thread::sleep(Duration::from_millis(2));
    }
    // It opens the file by then.
    std::thread::sleep(Duration::from_millis(500));
    site.kill();
    site.start();
    // The thief returns first, and the mount later.
    std::thread::sleep(Duration::from_millis(300));
    mount.begin_to_resume(&site.socket());
    mount.call(&lock(7, (0, 9), LockAction::Write, None)).expect("it has had it");
    mount.call(&Request::SyncDependencies(Vec::new())).expect("it is back");
    assert!(thief.wait().expect("ended").success());
    site.check();
}

/// Asks for a record lock to read and one to write, a `flock`, and a conflicting lock; returns which are allowed.
fn answers(client: &mut Client) -> [bool; 4] {
    let (inode, owner, range) = (FILE, LOCK_OWNER_PROCESS, ByteRange::new(0, LOCK_LAST));
    let (pid, wait, slot) = (1, None, None);
    let lock = |kind, action| Request::Lock { inode, kind, owner, pid, range, action, wait, slot };
    let requests = [
        lock(LockKind::Record, LockAction::Read),
        lock(LockKind::Record, LockAction::Write),
        lock(LockKind::Flock, LockAction::Write),
        Request::QueryLock { inode, kind: LockKind::Record, owner, range, action: LockAction::Write },
    ];
    requests.map(|request| client.call(&request).map_err(|errno| assert_eq!(errno, Errno::EACCES)).is_ok())
}

#[test]
#[ignore = "this is a user's process, which another test starts"]
fn ordinary_user() {
    let Some(socket) = std::env::var_os("ASHLAR_TEST_SOCKET").map(PathBuf::from) else { return };
    let story = std::env::var("ASHLAR_TEST_STORY").expect("a story");
    let mut client = Client::open(&socket);
    let want = LeaseRequest::on_inode(FILE, false, Need::default());
    assert!(client.call(&Request::Acquire(vec![want])).is_ok() || story == "no right");
    if story == "reclaim" {
        assert!(client.control.open_handle(FILE));
        while client.line.call::<_, Reply>(&Request::InodeRange, &[]).is_ok() {
            std::thread::sleep(Duration::from_millis(2));
        }
        client.begin_to_resume(&socket);
        let reply = client.call(&lock(LOCK_OWNER_PROCESS, (5, 5), LockAction::Write, None));
        assert_eq!(reply.err(), Some(Errno::EAGAIN), "the mount has it");
        return;
    }
    if story != "open on a mount" {
        assert_eq!(answers(&mut client), [false; 4], "it has not opened the file");
        assert!(client.control.open_handle(FILE));
    }
    let expected = match story.as_str() {
        "no right" => [false; 4],
        "may read" => [true, false, true, true],
        "may only write" => [false, true, true, true],
        _ => [true; 4],
    };
    assert_eq!(answers(&mut client), expected, "{story}");
}

#[test]
fn wait_on_closed_connection_ends() {
    let mut site = site_with_file();
    let (mut one, two) = (Client::open(&site.socket()), Client::open(&site.socket()));
    let slot = one.control.claim_lock_slot(FILE).expect("a slot");
    await_delegation(&mut one, slot, (0, 9));
    let mut side = two.attach(&site.socket());
    side.send(&lock(1, (5, 5), LockAction::Write, Some(3)), &[]).expect("sent");
    // It is delegated no more, as another session waits for it.
    let begun = Instant::now();
    while one.control.lock_slot(slot).1 != LockSlotState::Shared {
        assert!(begun.elapsed() < SOON, "the lock is not waited for");
        std::thread::sleep(Duration::from_millis(1));
    }
    drop(side);
    await_delegation(&mut one, slot, (0, 9));
    site.check();
}

#[test]
fn late_request_delegates_nothing() {
    let mut site = site_with_file();
    let mut client = Client::open(&site.socket());
    let slot = client.control.claim_lock_slot(FILE).expect("a slot");
    let before = slot_of(&client, slot);
    let set = |list: &mut ashlar_wire::LockList| list.set(ByteRange::new(0, 9), LockAction::Write);
    assert_eq!(client.control.change_locks(slot, FILE, LockSlotState::Shared, set), LockChange::Done);
    let reply = client.call(&lock_by_slot(before, (0, 9), LockAction::Write)).expect("no session has it");
    assert!(matches!(reply, Reply::Done), "{reply:?}");
    assert_eq!(client.control.lock_slot(slot).1, LockSlotState::Shared);
    await_delegation(&mut client, slot, (0, 9));
    site.check();
}
