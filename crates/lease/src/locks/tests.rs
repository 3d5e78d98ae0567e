use std::collections::{BTreeMap, BTreeSet};

use ashlar_types::{ByteRange, InodeId, LockAction, LockKind, LockMode, LockedRange, SessionId};
use proptest::prelude::*;

use super::*;

const FILE: InodeId = InodeId(20);
const OTHER: InodeId = InodeId(21);

fn owner(session: u64, owner: u64) -> LockOwner {
    LockOwner { session: SessionId(session), owner }
}

fn record(by: LockOwner, first: u64, last: u64, action: LockAction) -> LockRequest {
    let range = ByteRange { first, last };
    LockRequest { inode: FILE, kind: LockKind::Record, owner: by, pid: by.owner as u32, range, action, wait: None }
}

fn lock(by: LockOwner, first: u64, last: u64, mode: LockMode) -> LockRequest {
    record(by, first, last, mode.into())
}

fn flock(by: LockOwner, mode: LockMode) -> LockRequest {
    LockRequest { kind: LockKind::Flock, ..lock(by, 3, 4, mode) }
}

fn waiting(request: LockRequest, ticket: u64) -> LockRequest {
    LockRequest { wait: Some(ticket), ..request }
}

fn granted(by: LockOwner, ticket: u64) -> Option<Woken> {
    Some(Woken { waiter: WaiterId { session: by.session, ticket }, outcome: LockOutcome::Granted })
}

fn ranges(table: &LockTable, session: u64) -> Vec<(u64, u64, LockMode)> {
    let locks = table.export(SessionId(session));
    locks.iter().map(|lock| (lock.range.first, lock.range.last, lock.mode)).collect()
}

#[test]
fn ranges_split_and_merge() {
    let mut table = LockTable::default();
    let me = owner(1, 1);
    table.handle_lock(lock(me, 0, 99, LockMode::Read));
    table.handle_lock(lock(me, 20, 29, LockMode::Write));
    table.handle_lock(record(me, 50, 59, LockAction::Unlock));
    let split =
        [(0, 19, LockMode::Read), (20, 29, LockMode::Write), (30, 49, LockMode::Read), (60, 99, LockMode::Read)];
    assert_eq!(ranges(&table, 1), split);
    table.handle_lock(lock(me, 20, 59, LockMode::Read));
    assert_eq!(ranges(&table, 1), [(0, 99, LockMode::Read)]);
    table.handle_lock(lock(me, 100, u64::MAX, LockMode::Read));
    assert_eq!(ranges(&table, 1), [(0, u64::MAX, LockMode::Read)]);
}

#[test]
fn first_conflicting_lock_is_reported_with_its_process() {
    let mut table = LockTable::default();
    let (first, second, me) = (owner(2, 9), owner(1, 8), owner(1, 1));
    table.handle_lock(lock(second, 50, 59, LockMode::Write));
    table.handle_lock(lock(first, 10, 19, LockMode::Read));
    let found = table.query(&lock(me, 0, 99, LockMode::Write)).unwrap();
    assert_eq!((found.pid, found.range.first, found.mode), (9, 10, LockMode::Read));
    let found = table.query(&lock(me, 0, 99, LockMode::Read)).unwrap();
    assert_eq!((found.pid, found.range.first), (8, 50));
    assert_eq!(table.query(&lock(me, 60, 99, LockMode::Write)), None);
    assert!(
        matches!(table.handle_lock(lock(me, 0, 99, LockMode::Write)), LockOutcome::WouldBlock(held) if held.pid == 9)
    );
}

#[test]
fn waiters_are_served_in_order() {
    let mut table = LockTable::default();
    let (holder, second, third) = (owner(1, 1), owner(2, 2), owner(3, 3));
    table.handle_lock(lock(holder, 0, 9, LockMode::Write));
    for (by, mode) in [(second, LockMode::Write), (third, LockMode::Write)] {
        assert_eq!(table.handle_lock(waiting(lock(by, 0, 9, mode), 7)), LockOutcome::Blocked);
    }
    assert_eq!(table.poll_woken(), None);
    table.handle_lock(record(holder, 0, 9, LockAction::Unlock));
    assert_eq!((table.poll_woken(), table.poll_woken()), (granted(second, 7), None));
    table.handle_close(second, FILE, LockKind::Record);
    assert_eq!((table.poll_woken(), table.poll_woken()), (granted(third, 7), None));
    assert_eq!(ranges(&table, 3), [(0, 9, LockMode::Write)]);
}

#[test]
fn readers_wake_together_when_a_writer_becomes_a_reader() {
    let mut table = LockTable::default();
    let (holder, second, third) = (owner(1, 1), owner(2, 2), owner(3, 3));
    table.handle_lock(lock(holder, 0, 9, LockMode::Write));
    table.handle_lock(waiting(lock(second, 0, 4, LockMode::Read), 1));
    table.handle_lock(waiting(lock(third, 5, 9, LockMode::Read), 2));
    table.handle_lock(lock(holder, 0, 9, LockMode::Read));
    assert_eq!((table.poll_woken(), table.poll_woken()), (granted(second, 1), granted(third, 2)));
}

#[test]
fn circle_over_two_files_is_a_deadlock() {
    let mut table = LockTable::default();
    let (one, two) = (owner(1, 1), owner(2, 2));
    let elsewhere = |by| LockRequest { inode: OTHER, ..lock(by, 0, 0, LockMode::Write) };
    table.handle_lock(lock(one, 0, 0, LockMode::Write));
    table.handle_lock(elsewhere(two));
    assert_eq!(table.handle_lock(waiting(elsewhere(one), 1)), LockOutcome::Blocked);
    assert_eq!(table.handle_lock(waiting(lock(two, 0, 0, LockMode::Write), 1)), LockOutcome::Deadlock);
    // A request without waiting closes no circle, and neither does a cancelled wait.
    assert!(matches!(table.handle_lock(lock(two, 0, 0, LockMode::Write)), LockOutcome::WouldBlock(_)));
    assert!(table.handle_cancel(WaiterId { session: SessionId(1), ticket: 1 }));
    assert_eq!(table.handle_lock(waiting(lock(two, 0, 0, LockMode::Write), 1)), LockOutcome::Blocked);
}

#[test]
fn circle_closed_by_a_grant_wakes_the_waiter() {
    let mut table = LockTable::default();
    let (one, two, three) = (owner(1, 1), owner(2, 2), owner(3, 3));
    let elsewhere = |by| LockRequest { inode: OTHER, ..lock(by, 0, 0, LockMode::Write) };
    table.handle_lock(lock(three, 0, 0, LockMode::Write));
    table.handle_lock(elsewhere(one));
    // One thread of `two` waits for `one` elsewhere. Then another thread gets the lock that `one` waits for.
    assert_eq!(table.handle_lock(waiting(elsewhere(two), 1)), LockOutcome::Blocked);
    assert_eq!(table.handle_lock(waiting(lock(two, 0, 0, LockMode::Write), 2)), LockOutcome::Blocked);
    assert_eq!(table.handle_lock(waiting(lock(one, 0, 0, LockMode::Write), 3)), LockOutcome::Blocked);
    table.handle_close(three, FILE, LockKind::Record);
    assert_eq!(table.poll_woken(), granted(two, 2));
    let woken = table.poll_woken().unwrap();
    assert_eq!((woken.waiter.ticket, woken.outcome), (3, LockOutcome::Deadlock));
}

#[test]
fn flock_covers_the_file_and_does_not_see_record_locks() {
    let mut table = LockTable::default();
    let (one, two) = (owner(1, 1), owner(1, 2));
    table.handle_lock(lock(one, 0, 9, LockMode::Write));
    assert_eq!(table.handle_lock(flock(two, LockMode::Write)), LockOutcome::Granted);
    assert!(
        matches!(table.handle_lock(flock(one, LockMode::Read)), LockOutcome::WouldBlock(held) if held.owner == two)
    );
    table.handle_owner_end(two, LockKind::Flock);
    assert_eq!(table.handle_lock(flock(one, LockMode::Read)), LockOutcome::Granted);
}

#[test]
fn flock_that_cannot_be_converted_is_lost() {
    let mut table = LockTable::default();
    let (one, two, three) = (owner(1, 1), owner(1, 2), owner(2, 3));
    table.handle_lock(flock(one, LockMode::Read));
    table.handle_lock(flock(two, LockMode::Read));
    assert!(matches!(table.handle_lock(flock(one, LockMode::Write)), LockOutcome::WouldBlock(_)));
    assert_eq!(table.handle_lock(waiting(flock(three, LockMode::Write), 4)), LockOutcome::Blocked);
    table.handle_close(two, FILE, LockKind::Flock);
    assert_eq!(table.poll_woken(), granted(three, 4), "the first one's lock is gone");
}

#[test]
fn ended_session_leaves_no_locks_and_no_waits() {
    let mut table = LockTable::default();
    let (gone, here) = (owner(1, 1), owner(2, 2));
    assert_eq!(table.handle_lock(lock(gone, 0, 9, LockMode::Write)), LockOutcome::Granted);
    table.handle_lock(waiting(flock(gone, LockMode::Read), 1));
    table.handle_lock(lock(here, 20, 29, LockMode::Write));
    table.handle_lock(waiting(lock(owner(1, 5), 20, 29, LockMode::Write), 2));
    table.handle_lock(waiting(lock(here, 0, 9, LockMode::Write), 3));
    table.handle_session_end(SessionId(1));
    assert_eq!((table.poll_woken(), table.poll_woken()), (granted(here, 3), None));
    assert_eq!(table.counts(), (2, 0));
    assert!(!table.handle_cancel(WaiterId { session: SessionId(1), ticket: 2 }));
}

#[test]
fn locks_outlive_a_restart_and_conflicts_are_returned() {
    let mut table = LockTable::default();
    let (one, two) = (owner(1, 1), owner(2, 2));
    table.handle_lock(lock(one, 0, 9, LockMode::Write));
    table.handle_lock(flock(one, LockMode::Read));
    let locks = table.export(SessionId(1));
    let mut after = LockTable::default();
    after.handle_lock(lock(two, 5, 5, LockMode::Read));
    let lost = after.import(&locks);
    assert_eq!(lost.iter().map(|lock| lock.kind).collect::<Vec<_>>(), [LockKind::Record]);
    assert_eq!(after.export(SessionId(1)), locks[1..]);
}

#[test]
fn session_with_too_many_locks_is_refused_more() {
    let mut table = LockTable::new(LockLimits { per_session_max: 4 });
    let me = owner(1, 1);
    for at in 0..3 {
        assert_eq!(table.handle_lock(lock(me, at * 10, at * 10, LockMode::Read)), LockOutcome::Granted);
    }
    assert_eq!(table.handle_lock(lock(me, 90, 90, LockMode::Read)), LockOutcome::Full);
    assert_eq!(table.handle_lock(record(me, 0, 0, LockAction::Unlock)), LockOutcome::Granted);
    assert_eq!(table.handle_lock(lock(me, 90, 90, LockMode::Read)), LockOutcome::Granted);
}

const BYTES: u64 = 12;
type Bytes = BTreeMap<(InodeId, u64), BTreeMap<LockOwner, LockMode>>;

/// A model of locks byte by byte, without ranges.
#[derive(Default)]
struct Model {
    bytes: Bytes,
    waits: Vec<(u64, LockRequest)>,
}

impl Model {
    fn blockers(&self, request: &LockRequest) -> BTreeSet<LockOwner> {
        let Some(mode) = request.action.mode() else { return BTreeSet::new() };
        let bytes = request.range.first..=request.range.last;
        let held = bytes.filter_map(|byte| self.bytes.get(&(request.inode, byte))).flatten();
        let held =
            held.filter(|(by, held)| **by != request.owner && (mode == LockMode::Write || **held == LockMode::Write));
        held.map(|(by, _)| *by).collect()
    }

    fn set(&mut self, request: &LockRequest) {
        for byte in request.range.first..=request.range.last {
            let holders = self.bytes.entry((request.inode, byte)).or_default();
            match request.action.mode() {
                Some(mode) => holders.insert(request.owner, mode),
                None => holders.remove(&request.owner),
            };
        }
        self.bytes.retain(|_, holders| !holders.is_empty());
    }

    /// Whether `from` waits for `to` over any number of steps: adds steps until none are left.
    fn reaches(&self, from: BTreeSet<LockOwner>, to: LockOwner) -> bool {
        let mut reached = from;
        loop {
            let waits = self.waits.iter().filter(|(_, wait)| reached.contains(&wait.owner));
            let further: BTreeSet<_> = waits.flat_map(|(_, wait)| self.blockers(wait)).collect();
            let before = reached.len();
            reached.extend(further);
            if reached.len() == before {
                return reached.contains(&to);
            }
        }
    }

    /// Only waits for this file can end: other files gained and lost no blockers.
    fn settle(&mut self, inode: InodeId, woken: &mut Vec<(u64, bool)>) {
        'again: loop {
            for at in 0..self.waits.len() {
                let (ticket, request) = self.waits[at];
                if request.inode != inode {
                    continue;
                }
                let blockers = self.blockers(&request);
                let is_free = blockers.is_empty();
                if is_free || self.reaches(blockers, request.owner) {
                    self.waits.remove(at);
                    if is_free {
                        self.set(&request);
                    }
                    woken.push((ticket, is_free));
                    continue 'again;
                }
            }
            return;
        }
    }
}

fn held(table: &LockTable) -> Bytes {
    let mut bytes = Bytes::new();
    for lock in (0..3).flat_map(|session| table.export(SessionId(session))) {
        for byte in lock.range.first..=lock.range.last {
            let is_new = bytes.entry((lock.inode, byte)).or_default().insert(lock.owner, lock.mode).is_none();
            assert!(is_new, "an owner's spans overlap");
        }
    }
    bytes
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn record_locks_equal_the_byte_by_byte_model(
        steps in prop::collection::vec((0_u8..10, 0_u64..5, 0_u64..2, 0..BYTES, 0..BYTES, any::<bool>()), 1..60),
    ) {
        let (mut table, mut model) = (LockTable::default(), Model::default());
        for (ticket, (action, by, file, first, last, waits)) in (1_u64..).zip(steps) {
            let by = owner(by % 3, by);
            let action = match action {
                0..3 => LockAction::Read,
                3..7 => LockAction::Write,
                _ => LockAction::Unlock,
            };
            let inode = InodeId(20 + file);
            let request = LockRequest { inode, ..record(by, first.min(last), first.max(last), action) };
            let request = LockRequest { wait: waits.then_some(ticket), ..request };
            let blockers = model.blockers(&request);
            let outcome = table.handle_lock(request);
            let mut expected = Vec::new();
            match outcome {
                LockOutcome::Granted => {
                    prop_assert!(blockers.is_empty());
                    model.set(&request);
                    model.settle(inode, &mut expected);
                }
                LockOutcome::WouldBlock(holder) => prop_assert!(!waits && blockers.contains(&holder.owner)),
                LockOutcome::Deadlock => prop_assert!(waits && model.reaches(blockers, by)),
                LockOutcome::Blocked => {
                    prop_assert!(waits && !blockers.is_empty() && !model.reaches(blockers, by));
                    model.waits.push((ticket, request));
                }
                LockOutcome::Full | LockOutcome::Moved => prop_assert!(false),
            }
            let woken = std::iter::from_fn(|| table.poll_woken());
            let is_granted = |woken: Woken| (woken.waiter.ticket, woken.outcome == LockOutcome::Granted);
            let woken: Vec<_> = woken.map(is_granted).collect();
            prop_assert_eq!(woken, expected);
            prop_assert_eq!(&held(&table), &model.bytes);
            prop_assert_eq!(table.counts().1, model.waits.len());
        }
        for session in 0..3 {
            table.handle_session_end(SessionId(session));
        }
        prop_assert_eq!(table.counts(), (0, 0));
        prop_assert!(table.is_empty());
    }
}

/// A model of the locks that sessions keep: a table each, of one owner and file, by session and slot.
#[derive(Default)]
struct Kept {
    slots: BTreeMap<(SessionId, InodeId), LockTable>,
}

impl DelegationSlots for Kept {
    fn delegate(&mut self, to: SessionId, _: u32, inode: InodeId, locks: &[LockedRange]) -> bool {
        let mut table = LockTable::default();
        for &LockedRange { mode, range } in locks {
            table.handle_lock(LockRequest { inode, ..lock(owner(to.0, to.0), range.first, range.last, mode) });
        }
        assert!(self.slots.insert((to, inode), table).is_none(), "nothing is delegated twice");
        true
    }

    fn recall(&mut self, from: SessionId, _: u32, inode: InodeId) -> Vec<LockedRange> {
        let table = self.slots.remove(&(from, inode)).expect("it was delegated");
        table.records(inode, owner(from.0, from.0))
    }
}

/// Handles a request as SharedFS does.
fn ask(table: &mut LockTable, kept: (&mut Delegations, &mut Kept), now_ms: u64, request: LockRequest) -> LockOutcome {
    let (delegations, slots) = kept;
    delegations.handle_request(now_ms, request.inode, request.owner, table, slots);
    let outcome = table.handle_lock(request);
    if outcome == LockOutcome::Granted && request.owner.session.0 < 3 {
        let slot = request.inode.0 as u32;
        delegations.delegate(now_ms, (request.inode, request.owner, request.pid, slot), table, slots);
    }
    outcome
}

#[test]
fn sole_owner_is_delegated_again_after_a_quiet_time() {
    let (mut table, mut delegations, mut slots) = (LockTable::default(), Delegations::default(), Kept::default());
    let (me, mount) = (owner(1, 1), owner(7, 7));
    let mut ask = |now_ms, request| {
        let outcome = ask(&mut table, (&mut delegations, &mut slots), now_ms, request);
        (outcome, slots.slots.len(), table.counts().0)
    };
    assert_eq!(ask(0, lock(me, 0, 9, LockMode::Write)), (LockOutcome::Granted, 1, 0));
    assert!(
        matches!(ask(1000, lock(mount, 5, 5, LockMode::Read)), (LockOutcome::WouldBlock(held), 0, 1) if held.pid == 1)
    );
    // First the quiet time is too short. Then it suffices, but another owner has a lock. Then the other owner has none.
    assert_eq!(ask(1010, lock(me, 20, 29, LockMode::Read)), (LockOutcome::Granted, 0, 2));
    assert_eq!(ask(1100, lock(mount, 20, 20, LockMode::Read)), (LockOutcome::Granted, 0, 3));
    assert_eq!(ask(1200, record(me, 0, 9, LockAction::Unlock)), (LockOutcome::Granted, 0, 2));
    assert_eq!(ask(1250, record(mount, 0, 99, LockAction::Unlock)), (LockOutcome::Granted, 0, 1));
    assert_eq!(ask(1300, record(me, 0, 9, LockAction::Unlock)), (LockOutcome::Granted, 0, 1));
    assert_eq!(ask(1399, record(me, 0, 9, LockAction::Unlock)), (LockOutcome::Granted, 0, 1));
    assert_eq!(ask(1400, record(me, 0, 9, LockAction::Unlock)), (LockOutcome::Granted, 1, 0));
}

#[test]
fn slot_holds_one_file_until_its_session_ends() {
    let (mut table, mut delegations, mut slots) = (LockTable::default(), Delegations::default(), Kept::default());
    for session in [1, 2] {
        for (number, slot) in [(0, 0), (1, 0), (2, 7)] {
            let inode = InodeId(100 * session + number);
            let me = owner(session, session);
            assert!(delegations.delegate(0, (inode, me, 1, slot), &mut table, &mut slots));
        }
    }
    assert_eq!(delegations.count(), 4);
    // The former file of a slot is not recalled, since the session has given it back.
    assert_eq!(delegations.recall(InodeId(100), &mut table, &mut slots), None);
    delegations.handle_session_end(SessionId(1));
    assert_eq!(delegations.count(), 2);
    assert_eq!(delegations.recall(InodeId(101), &mut table, &mut slots), None);
    assert_eq!(delegations.recall(InodeId(202), &mut table, &mut slots), Some(owner(2, 2)));
    assert_eq!(delegations.recall(InodeId(201), &mut table, &mut slots), Some(owner(2, 2)));
    assert_eq!(delegations.count(), 0);
}

#[test]
fn file_with_waiters_is_not_delegated() {
    let mut table = LockTable::default();
    let (me, other) = (owner(1, 1), owner(2, 2));
    table.handle_lock(lock(me, 0, 9, LockMode::Write));
    assert!(table.is_sole_owner(FILE, me) && !table.is_sole_owner(FILE, other) && table.is_sole_owner(OTHER, other));
    table.handle_lock(waiting(lock(other, 0, 0, LockMode::Read), 1));
    assert!(!table.is_sole_owner(FILE, me));
}

#[test]
fn locks_move_to_another_owner_without_a_gap() {
    let mut table = LockTable::default();
    let (me, other) = (owner(1, 0), owner(2, 2));
    let mine = |request: LockRequest| LockRequest { pid: 50, ..request };
    let on_mount = owner(7, 99);
    table.handle_lock(mine(lock(me, 0, 9, LockMode::Write)));
    assert!(matches!(table.handle_lock(mine(lock(on_mount, 0, 9, LockMode::Write))), LockOutcome::WouldBlock(_)));
    assert!(!table.is_held_elsewhere(FILE, me, 50));
    table.handle_move(FILE, me);
    assert!(matches!(table.handle_lock(lock(other, 3, 3, LockMode::Read)), LockOutcome::WouldBlock(_)));
    assert_eq!(table.handle_lock(mine(lock(on_mount, 0, 9, LockMode::Write))), LockOutcome::Granted);
    table.handle_close(me, FILE, LockKind::Record);
    assert!(table.is_held_elsewhere(FILE, me, 50) && !table.is_held_elsewhere(FILE, me, 51));
    assert!(matches!(table.handle_lock(lock(other, 3, 3, LockMode::Read)), LockOutcome::WouldBlock(_)));
    assert!(matches!(table.handle_lock(mine(lock(me, 3, 3, LockMode::Read))), LockOutcome::WouldBlock(_)));
}

#[test]
fn waits_of_a_process_end_when_its_locks_move() {
    let mut table = LockTable::default();
    let (me, other, on_mount) = (owner(1, 0), owner(2, 2), owner(7, 99));
    let mine = |request: LockRequest| LockRequest { pid: 50, ..request };
    table.handle_lock(mine(lock(me, 20, 29, LockMode::Read)));
    table.handle_lock(lock(other, 0, 9, LockMode::Write));
    let wait = waiting(mine(lock(me, 0, 39, LockMode::Write)), 4);
    assert_eq!(table.handle_lock(wait), LockOutcome::Blocked);
    table.handle_move(FILE, me);
    let moved = |ticket| Woken { waiter: WaiterId { session: SessionId(1), ticket }, outcome: LockOutcome::Moved };
    assert_eq!((table.poll_woken(), table.poll_woken()), (Some(moved(4)), None));
    table.handle_close(me, FILE, LockKind::Record);
    // One wait is queued before the process gets its lock under the other owner. Waits of other processes stay.
    let late = waiting(mine(lock(me, 0, 39, LockMode::Write)), 5);
    let others = waiting(lock(owner(3, 0), 0, 0, LockMode::Read), 6);
    assert_eq!((table.handle_lock(late), table.handle_lock(others)), (LockOutcome::Blocked, LockOutcome::Blocked));
    assert_eq!(table.handle_lock(mine(lock(on_mount, 20, 29, LockMode::Read))), LockOutcome::Granted);
    table.handle_lock_elsewhere(FILE, SessionId(7), 50, 0);
    assert_eq!((table.poll_woken(), table.poll_woken()), (Some(moved(5)), None));
    assert_eq!(table.counts(), (2, 1));
}

#[test]
fn only_one_of_two_claims_after_a_restart_succeeds() {
    let (mut table, mut delegations, mut slots) = (LockTable::default(), Delegations::default(), Kept::default());
    let (one, two, three) = (owner(1, 1), owner(2, 2), owner(3, 3));
    let all = [LockedRange { mode: LockMode::Write, range: ByteRange { first: 0, last: 9 } }];
    assert!(slots.delegate(SessionId(1), 4, FILE, &all) && slots.delegate(SessionId(2), 4, FILE, &all));
    delegations.restore_claim((FILE, one, 1, 4), true, &all, &mut table, &mut slots);
    assert_eq!((delegations.count(), table.counts().0), (1, 0));
    delegations.restore_claim((FILE, two, 2, 4), true, &all, &mut table, &mut slots);
    delegations.restore_claim((FILE, three, 3, 4), false, &all, &mut table, &mut slots);
    assert_eq!((delegations.count(), ranges(&table, 1)), (0, vec![(0, 9, LockMode::Write)]));
    assert_eq!((table.counts().0, slots.slots.len()), (1, 0));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    /// Three sessions with delegations, and two owners on a mount, get the same answers as from a table alone.
    #[test]
    fn table_with_delegations_equals_a_table_alone(
        steps in prop::collection::vec(
            (0_u8..10, 0_u64..5, 0_u64..2, 0..BYTES, 0..BYTES, any::<bool>(), 0_u64..80), 1..80),
    ) {
        let (mut table, mut delegations, mut slots) = (LockTable::default(), Delegations::default(), Kept::default());
        let mut plain = LockTable::default();
        let mut now_ms = 0;
        for (ticket, (action, by, file, first, last, waits, passed)) in (1_u64..).zip(steps) {
            now_ms += passed;
            let by = owner(by, by);
            if action == 9 && by.session.0 < 3 {
                for table in [&mut table, &mut plain] {
                    table.handle_session_end(by.session);
                }
                delegations.handle_session_end(by.session);
                slots.slots.retain(|(session, _), _| *session != by.session);
            }
            let action = match action {
                0..3 => LockAction::Read,
                3..6 => LockAction::Write,
                _ => LockAction::Unlock,
            };
            let inode = InodeId(20 + file);
            let request = LockRequest { inode, ..record(by, first.min(last), first.max(last), action) };
            let request = LockRequest { wait: waits.then_some(ticket), ..request };
            let expected = plain.handle_lock(request);
            let outcome = match slots.slots.get_mut(&(by.session, inode)) {
                Some(own) => own.handle_lock(request),
                None => ask(&mut table, (&mut delegations, &mut slots), now_ms, request),
            };
            prop_assert_eq!(outcome, expected);
            prop_assert_eq!(std::iter::from_fn(|| table.poll_woken()).collect::<Vec<_>>(), std::iter::from_fn(|| plain.poll_woken()).collect::<Vec<_>>());
            prop_assert_eq!(slots.slots.len(), delegations.count());
        }
        for inode in [FILE, OTHER] {
            delegations.recall(inode, &mut table, &mut slots);
        }
        for session in 0..5 {
            prop_assert_eq!(table.export(SessionId(session)), plain.export(SessionId(session)));
        }
    }
}
