//! Record locks of honest and hostile sessions.
//!
//! They exclude other sessions, over ends and restarts.

mod common;

use std::time::{Duration, Instant};

use ashlar_types::{Errno, FileKind, InodeId};
use ashlar_wire::{
    CONTROL_BYTES_BEFORE, LOCK_LAST, LOCK_OWNER_PROCESS, LOCK_SLOTS, LockChange, LockKind, LockMode, LockSlot,
    LockSlotState, LockedRange, Reply, Request, SessionKind,
};
use common::{Client, Site};

const FILE: InodeId = InodeId(77);
/// For waits that take moments.
const SOON: Duration = Duration::from_secs(10);

#[test]
#[ignore = "this is the daemon's process, which the other tests start"]
fn daemon_process() {
    common::run_daemon();
}

/// Returns a session's request for a lock, as a mount sends it.
fn lock(owner: u64, range: (u64, u64), mode: LockMode, wait: Option<u64>) -> Request {
    let (kind, (start, end)) = (LockKind::Record, range);
    Request::Lock { inode: FILE, kind, owner, pid: 42, start, end, mode, wait, slot: None }
}

/// Returns a request for a process's own lock.
fn own_lock(client: &Client, slot: u32, range: (u64, u64), mode: LockMode) -> Request {
    lock_by_slot(slot_of(client, slot), range, mode)
}

fn slot_of(client: &Client, slot: u32) -> LockSlot {
    LockSlot { number: slot, word: client.control.lock_slot_at_present(slot % LOCK_SLOTS).word }
}

/// The same, for a slot as it was once.
fn lock_by_slot(slot: LockSlot, range: (u64, u64), mode: LockMode) -> Request {
    let (kind, (start, end), owner) = (LockKind::Record, range, LOCK_OWNER_PROCESS);
    Request::Lock { inode: FILE, kind, owner, pid: 42, start, end, mode, wait: None, slot: Some(slot) }
}

fn conflict(client: &mut Client, range: (u64, u64)) -> Option<(LockMode, u64, u64)> {
    let (kind, mode, (start, end)) = (LockKind::Record, LockMode::Write, range);
    match client.call(&Request::QueryLock { inode: FILE, kind, owner: 1, start, end, mode }) {
        Ok(Reply::Conflict(conflict)) => conflict.map(|(mode, first, last, _)| (mode, first, last)),
        other => panic!("{other:?}"),
    }
}

/// Asks for a lock through a slot until it is delegated.
///
/// No other session has a lock then, or waits.
fn await_delegation(client: &mut Client, slot: u32, range: (u64, u64)) {
    let begun = Instant::now();
    loop {
        let request = own_lock(client, slot, range, LockMode::Write);
        if matches!(client.call(&request).expect("it has the file"), Reply::Delegated) {
            return;
        }
        assert!(begun.elapsed() < SOON, "the file is never delegated");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Writes into a session's own page that all of the file is delegated to it.
fn claim_all(hostile: &Client, slot: u32) {
    let all = [LockedRange { first: 0, last: LOCK_LAST, write: true }];
    assert!(hostile.control.delegate_locks(slot_of(hostile, slot), FILE, &all));
}

/// Checks that after a restart the delegated lock exists, and no other.
fn check_honest_alone(site: &mut Site, sessions: [&mut Client; 2], (first, last): (u64, u64)) {
    site.kill();
    site.start();
    sessions.into_iter().for_each(|session| session.resume(&site.socket()));
    let mut mount = Client::open_as(&site.socket(), SessionKind::Mount);
    assert_eq!(conflict(&mut mount, (0, LOCK_LAST)), Some((LockMode::Write, first, last)));
    site.check();
}

#[test]
fn slot_number_out_of_range_is_refused() {
    let mut site = Site::new(64 << 20);
    let mut client = Client::open(&site.socket());
    assert_eq!(client.control.claim_lock_slot(FILE), Some(0));
    for slot in [LOCK_SLOTS, u32::MAX] {
        let request = own_lock(&client, slot, (0, 9), LockMode::Write);
        assert_eq!(client.call(&request).err(), Some(Errno::EINVAL), "slot {slot}");
    }
    await_delegation(&mut client, 0, (0, 9));
    site.check();
}

#[test]
fn lock_awaiting_returns_is_not_given_to_ended_session() {
    let mut site = Site::new(64 << 20);
    let (mut stays_away, mut two) = (Client::open(&site.socket()), Client::open(&site.socket()));
    stays_away.call(&lock(1, (100, 109), LockMode::Write, None)).expect("locked");
    site.kill();
    site.start();
    two.resume(&site.socket());
    let mut side = two.attach(&site.socket());
    let waiter = std::thread::spawn(move || {
        two.call(&Request::InodeRange).expect("it is there");
        two.call(&lock(1, (0, 9), LockMode::Write, None))
    });
    std::thread::sleep(Duration::from_millis(100));
    assert!(matches!(side.call(&Request::Goodbye, &[]).expect("answered").0, Reply::Done));
    assert_eq!(waiter.join().expect("answered").err(), Some(Errno::EIO));
    let mut three = Client::open(&site.socket());
    assert!(three.call(&lock(1, (5, 5), LockMode::Write, None)).is_ok(), "no session has it");
    site.check();
}

/// A shell that waits for its child does not return to a restarted SharedFS.
#[test]
fn restart_waits_for_no_session_without_locks() {
    let mut site = Site::new(64 << 20);
    let (idle, mut busy) = (Client::open(&site.socket()), Client::open(&site.socket()));
    site.kill();
    site.start();
    busy.resume(&site.socket());
    let begin = Instant::now();
    busy.call(&lock(7, (0, 9), LockMode::Write, None)).expect("locked");
    assert!(begin.elapsed() < Duration::from_secs(3), "the lock waits for the idle session");
    drop(idle);
    site.check();
}

#[test]
fn delegation_never_given_is_not_believed_after_restart() {
    let mut site = Site::new(64 << 20);
    let (mut hostile, mut honest) = (Client::open(&site.socket()), Client::open(&site.socket()));
    let slot = honest.control.claim_lock_slot(FILE).expect("a slot");
    await_delegation(&mut honest, slot, (10, 19));
    let claimed = hostile.control.claim_lock_slot(FILE).expect("a slot");
    claim_all(&hostile, claimed);
    // It also claims one of which it only has a copy.
    let other = hostile.control.claim_lock_slot(FILE).expect("a slot");
    let set = |list: &mut ashlar_wire::LockList| list.set(15, 15, LockMode::Write);
    assert_eq!(hostile.control.change_locks(other, FILE, LockSlotState::Shared, set), LockChange::Done);
    check_honest_alone(&mut site, [&mut hostile, &mut honest], (10, 19));
}

#[test]
fn failed_delegation_is_not_believed_after_restart() {
    let mut site = Site::new(64 << 20);
    let (mut hostile, mut honest) = (Client::open(&site.socket()), Client::open(&site.socket()));
    let claimed = hostile.control.claim_lock_slot(FILE).expect("a slot");
    let present = slot_of(&hostile, claimed);
    let wrong = LockSlot { word: present.word ^ 1 << 40, ..present };
    // SharedFS tries it when no other session has asked for a while.
    for _ in 0..30 {
        let reply = hostile.call(&lock_by_slot(wrong, (50, 59), LockMode::Write)).expect("no session has it");
        assert!(matches!(reply, Reply::Done), "{reply:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
    hostile.call(&lock_by_slot(wrong, (50, 59), LockMode::Unlock)).expect("it's its own");
    let slot = honest.control.claim_lock_slot(FILE).expect("a slot");
    await_delegation(&mut honest, slot, (10, 19));
    claim_all(&hostile, claimed);
    check_honest_alone(&mut site, [&mut hostile, &mut honest], (10, 19));
}

#[test]
fn process_locks_only_under_its_own_pid() {
    let mut site = Site::new(64 << 20);
    let mut client = Client::open(&site.socket());
    client.call(&lock(1, (0, 9), LockMode::Write, None)).expect("no session has it");
    let mut mount = Client::open_as(&site.socket(), SessionKind::Mount);
    let query =
        Request::QueryLock { inode: FILE, kind: LockKind::Record, owner: 1, start: 0, end: 9, mode: LockMode::Write };
    let Ok(Reply::Conflict(Some((.., pid)))) = mount.call(&query) else { panic!("no session has it") };
    assert_eq!(pid, std::process::id(), "it said 42");
    site.check();
}

#[test]
fn lock_copied_since_restart_holds_when_session_returns() {
    let mut site = Site::new(64 << 20);
    let (mut one, mut two) = (Client::open(&site.socket()), Client::open(&site.socket()));
    let slot = one.control.claim_lock_slot(FILE).expect("a slot");
    site.kill();
    site.start();
    // SharedFS was killed after it had granted a lock, and before the session had noted it.
    let set = |list: &mut ashlar_wire::LockList| list.set(0, 9, LockMode::Write);
    assert_eq!(one.control.change_locks(slot, FILE, LockSlotState::Shared, set), LockChange::Done);
    one.resume(&site.socket());
    two.resume(&site.socket());
    two.call(&Request::InodeRange).expect("it is there");
    assert_eq!(two.call(&lock(1, (5, 5), LockMode::Write, None)).err(), Some(Errno::EAGAIN));
    assert!(two.call(&lock(1, (10, 10), LockMode::Write, None)).is_ok());
    site.check();
}

#[test]
fn wait_on_closed_connection_ends() {
    let mut site = Site::new(64 << 20);
    let (mut one, two) = (Client::open(&site.socket()), Client::open(&site.socket()));
    let slot = one.control.claim_lock_slot(FILE).expect("a slot");
    await_delegation(&mut one, slot, (0, 9));
    let mut side = two.attach(&site.socket());
    side.send(&lock(1, (5, 5), LockMode::Write, Some(3)), &[]).expect("sent");
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
    let mut site = Site::new(64 << 20);
    let mut client = Client::open(&site.socket());
    let slot = client.control.claim_lock_slot(FILE).expect("a slot");
    let before = slot_of(&client, slot);
    let set = |list: &mut ashlar_wire::LockList| list.set(0, 9, LockMode::Write);
    assert_eq!(client.control.change_locks(slot, FILE, LockSlotState::Shared, set), LockChange::Done);
    let reply = client.call(&lock_by_slot(before, (0, 9), LockMode::Write)).expect("no session has it");
    assert!(matches!(reply, Reply::Done), "{reply:?}");
    assert_eq!(client.control.lock_slot(slot).1, LockSlotState::Shared);
    await_delegation(&mut client, slot, (0, 9));
    site.check();
}

#[test]
fn log_with_earlier_control_page_is_not_lost() {
    let mut site = Site::new(64 << 20);
    let mut client = Client::open(&site.socket());
    client.acquire(&[(InodeId::ROOT, true)]).expect("granted");
    client.make(InodeId::ROOT, b"made", FileKind::Regular);
    site.kill();
    let name = format!("sessions/{}.control", client.welcome.peer.session.0);
    let file = std::fs::File::options().write(true).open(site.arena().join(name)).expect("the control page's file");
    file.set_len(CONTROL_BYTES_BEFORE).expect("shorter");
    site.start();
    let mut other = Client::open(&site.socket());
    client.resume(&site.socket());
    assert!(other.lookup(InodeId::ROOT, b"made").expect("answered").is_some(), "it was in the log alone");
    assert!(client.control.claim_lock_slot(FILE).is_some());
    site.check();
}
