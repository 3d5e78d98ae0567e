use std::cell::Cell;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};

use ashlar_pmem::OutOfBounds;
use proptest::prelude::*;

use super::*;

const FILE: InodeId = InodeId(20);
const OTHER: InodeId = InodeId(21);

thread_local! {
    /// The number of the actor that this thread is, if it is one of the two.
    static ACTOR: Cell<Option<usize>> = const { Cell::new(None) };
}

/// The schedule, and the actor that may touch the memory next.
#[derive(Debug, Default)]
struct Turns {
    schedule: Vec<usize>,
    at: usize,
    is_done: [bool; 2],
    /// How often each actor has touched the memory.
    counts: [usize; 2],
}

/// Memory in which two threads take turns, access by access, as a schedule says.
///
/// After the end of the schedule, both threads go on freely.
#[derive(Debug, Default)]
struct Stepped {
    words: Vec<AtomicU64>,
    turns: Mutex<Turns>,
    changed: Condvar,
}

impl Stepped {
    fn new(schedule: &[usize]) -> Arc<Self> {
        let words = (0..LOCK_SLOTS_BYTES / 8).map(|_| AtomicU64::new(0)).collect();
        let turns = Mutex::new(Turns { schedule: schedule.to_vec(), ..Turns::default() });
        Arc::new(Self { words, turns, changed: Condvar::new() })
    }

    fn word(&self, offset: u64) -> &AtomicU64 {
        if let Some(actor) = ACTOR.get() {
            let mut turns = self.turns.lock().unwrap();
            while turns.schedule.get(turns.at).is_some_and(|&turn| turn != actor && !turns.is_done[turn]) {
                turns = self.changed.wait(turns).unwrap();
            }
            turns.at += 1;
            turns.counts[actor] += 1;
            self.changed.notify_all();
        }
        &self.words[offset as usize / 8]
    }

    /// Runs a closure as one of the two actors.
    fn act<R>(&self, actor: usize, run: impl FnOnce() -> R) -> R {
        ACTOR.set(Some(actor));
        let result = run();
        ACTOR.set(None);
        self.turns.lock().unwrap().is_done[actor] = true;
        self.changed.notify_all();
        result
    }

    fn counts(&self) -> [usize; 2] {
        self.turns.lock().unwrap().counts
    }
}

impl Persistent for Stepped {
    fn len(&self) -> u64 {
        self.words.len() as u64 * 8
    }
    fn load(&self, _: u64, _: &mut [u8]) -> Result<(), OutOfBounds> {
        unreachable!("slots are read by words")
    }
    fn store(&self, _: u64, _: &[u8]) -> Result<(), OutOfBounds> {
        unreachable!("slots are written by words")
    }
    fn load_u64(&self, offset: u64) -> Result<u64, OutOfBounds> {
        Ok(self.word(offset).load(Ordering::SeqCst))
    }
    fn store_u64(&self, offset: u64, value: u64) -> Result<(), OutOfBounds> {
        self.word(offset).store(value, Ordering::SeqCst);
        Ok(())
    }
    fn compare_exchange_u64(&self, offset: u64, current: u64, new: u64) -> Result<Result<u64, u64>, OutOfBounds> {
        Ok(self.word(offset).compare_exchange(current, new, Ordering::SeqCst, Ordering::SeqCst))
    }
    fn flush(&self, _: u64, _: u64) -> Result<(), OutOfBounds> {
        Ok(())
    }
    fn fence(&self) {}
    fn sync(&self) -> io::Result<()> {
        Ok(())
    }
}

/// Returns all orders of so many steps of the first actor and so many of the second.
fn orders(first: usize, second: usize) -> Vec<Vec<usize>> {
    if first == 0 || second == 0 {
        let rest = if first == 0 { vec![1; second] } else { vec![0; first] };
        return vec![rest];
    }
    let begin_with =
        |turn: usize, rest: Vec<Vec<usize>>| rest.into_iter().map(move |rest| [&[turn][..], &rest].concat());
    begin_with(0, orders(first - 1, second)).chain(begin_with(1, orders(first, second - 1))).collect()
}

fn page(memory: &Arc<Stepped>) -> CheckedMemory<Arc<Stepped>, LOCK_SLOTS_BYTES> {
    CheckedMemory::new(Arc::clone(memory)).unwrap()
}

/// The first byte, the last byte, and whether it is a write lock.
type Spans = Vec<(u64, u64, bool)>;

fn locked(first: u64, last: u64, mode: LockMode) -> LockedRange {
    LockedRange { mode, range: ByteRange::new(first, last) }
}

fn spans(ranges: &[LockedRange]) -> Spans {
    ranges.iter().map(|held| (held.range.first, held.range.last, held.mode == LockMode::Write)).collect()
}

/// Replaces two ranges by one, step by step, until the slot is recalled: the session's part of every run.
fn changes(slots: &LockSlots<'_, Arc<Stepped>, LOCK_SLOTS_BYTES>, is_broken: bool) -> Spans {
    let mut expected = vec![(0, 0, false), (8, 9, true)];
    let steps =
        [(0, 0, LockAction::Unlock, vec![(8, 9, true)]), (2, 3, LockAction::Read, vec![(2, 3, false), (8, 9, true)])];
    for (first, last, action, after) in steps {
        let change = |list: &mut LockList| list.set(ByteRange::new(first, last), action);
        let changed = if is_broken {
            let word = slots.word(0);
            if word.state() != LockSlotState::Delegated {
                break;
            }
            // The broken session writes to the active list.
            let mut list = slots.read_own(0, word.active());
            assert!(change(&mut list));
            slots.write(0, word.active(), list.ranges());
            if slots.exchange(0, word, word.next(LockSlotState::Delegated, word.active())) {
                LockChange::Done
            } else {
                LockChange::Moved
            }
        } else {
            slots.change(0, FILE, LockSlotState::Delegated, change)
        };
        match changed {
            LockChange::Done => expected = after,
            LockChange::Moved => break,
            LockChange::Full => unreachable!("there is room"),
        }
    }
    expected
}

/// Runs the session's changes and a recall in one order of their steps.
///
/// Returns the session's locks, the locks that SharedFS has read, and how many steps each took.
fn race(schedule: &[usize], is_broken: bool) -> (Spans, Spans, [usize; 2]) {
    let memory = Stepped::new(schedule);
    let page = page(&memory);
    let slots = LockSlots { memory: &page, at: PartAt::new(0) };
    assert_eq!(slots.claim(FILE), Some(0));
    let begun = [(0, 0, LockMode::Read), (8, 9, LockMode::Write)].map(|(first, last, mode)| locked(first, last, mode));
    assert!(slots.delegate(slots.at_present(0), FILE, &begun));
    let (done, read) = std::thread::scope(|scope| {
        let session = scope.spawn(|| memory.act(0, || changes(&slots, is_broken)));
        let shared = scope.spawn(|| memory.act(1, || slots.recall(0, FILE)));
        (session.join().unwrap(), shared.join().unwrap())
    });
    assert_eq!(slots.word(0).state(), LockSlotState::Shared);
    (done, spans(&read), memory.counts())
}

/// Returns orders that are long enough for both actors to finish, thinned to so many.
fn schedules(most: usize) -> Vec<Vec<usize>> {
    // The session comes first, so that it takes all of its steps.
    let (_, _, alone) = race(&[0; 256], false);
    let all = orders(alone[0].min(14), alone[1].min(8));
    let step = all.len().div_ceil(most);
    all.into_iter().step_by(step).collect()
}

/// All orders of the first steps, in which the change and the recall lie, and some longer ones.
#[test]
fn recall_gets_exactly_the_changes_made_in_every_order() {
    for schedule in orders(12, 5).into_iter().chain(schedules(3000)) {
        let (done, read, _) = race(&schedule, false);
        assert_eq!(done, read, "in the order {schedule:?}");
    }
}

/// The test detects a session that writes to the active list.
#[test]
fn step_orders_reveal_a_partly_read_list() {
    let is_torn = |schedule: &Vec<usize>| {
        let (done, read, _) = race(schedule, true);
        done != read
    };
    assert!(schedules(3000).iter().any(is_torn));
}

#[test]
fn slot_is_claimed_delegated_recalled_and_freed() {
    let memory = Stepped::new(&[]);
    let page = page(&memory);
    let slots = LockSlots { memory: &page, at: PartAt::new(0) };
    let lock = |first, last| move |list: &mut LockList| list.set(ByteRange::new(first, last), LockAction::Write);
    assert_eq!((slots.find_slot(FILE), slots.claim(FILE), slots.find_slot(FILE)), (None, Some(0), Some(0)));
    let change = slots.change(0, FILE, LockSlotState::Delegated, lock(0, 9));
    assert_eq!(change, LockChange::Moved, "it's not delegated yet");
    assert_eq!(slots.recall(0, FILE), []);
    assert_eq!(slots.change(0, FILE, LockSlotState::Shared, lock(0, 9)), LockChange::Done);
    assert!(!slots.delegate(slots.at_present(0), OTHER, &[]) && !slots.delegate(slots.at_present(1), FILE, &[]));
    assert!(slots.delegate(slots.at_present(0), FILE, &[locked(3, 3, LockMode::Write)]));
    assert_eq!(slots.change(0, OTHER, LockSlotState::Delegated, |_| true), LockChange::Moved);
    assert_eq!(slots.change(0, FILE, LockSlotState::Delegated, lock(4, 4)), LockChange::Done);
    assert_eq!(slots.change(0, FILE, LockSlotState::Delegated, |_| false), LockChange::Full);
    assert_eq!(slots.recall(0, OTHER), []);
    let claimed = slots.claimed();
    assert_eq!(claimed.len(), 1);
    assert_eq!(
        (claimed[0].1, claimed[0].2, spans(&claimed[0].3)),
        (FILE, LockSlotState::Delegated, vec![(3, 4, true)])
    );
    assert_eq!(spans(&slots.recall(0, FILE)), [(3, 4, true)]);
    assert_eq!(slots.recall(0, FILE), [], "once");
    assert_eq!(slots.read_content(0).1, LockSlotState::Shared);
    for number in 1..u64::from(LOCK_SLOTS) {
        assert!(slots.claim(InodeId(30 + number)).is_some());
    }
    assert_eq!(slots.claim(OTHER), None);
    assert!(slots.free(0) && slots.find_slot(FILE).is_none());
    assert_eq!((slots.claim(OTHER), slots.find_slot(OTHER)), (Some(0), Some(0)));
    assert!(slots.read_content(0).2.is_empty());
}

#[test]
fn forged_slot_stays_harmless() {
    let memory = Stepped::new(&[]);
    for word in &memory.words {
        word.store(u64::MAX, Ordering::SeqCst);
    }
    let page = page(&memory);
    let slots = LockSlots { memory: &page, at: PartAt::new(0) };
    assert!(slots.claimed().iter().all(|(.., ranges)| ranges.len() <= LOCK_RANGES_MAX));
    // Write a delegated slot of FILE with the largest number of ranges, all of which end before they begin.
    memory.words[0].store(2, Ordering::SeqCst);
    memory.words[1].store(FILE.0, Ordering::SeqCst);
    for range in 0..LOCK_RANGES_MAX {
        memory.words[(LISTS / 8) as usize + 2 + range * 2].store(9, Ordering::SeqCst);
        memory.words[(LISTS / 8) as usize + 3 + range * 2].store(8, Ordering::SeqCst);
    }
    assert_eq!(slots.recall(0, FILE), []);
}

#[test]
fn notes_hold_the_last_locks_of_each_file() {
    let memory = Stepped::new(&[]);
    let notes = LockNotes::<_, LOCK_SLOTS_BYTES>::new(Arc::clone(&memory)).unwrap();
    let range = |first| locked(first, first, LockMode::Write);
    assert!(notes.set(FILE, [range(1), range(3)].into_iter()) && notes.set(OTHER, [range(5)].into_iter()));
    assert!(notes.set(FILE, [range(3)].into_iter()));
    let noted =
        |notes: &LockNotes<_, LOCK_SLOTS_BYTES>| notes.all().into_iter().map(|(inode, list)| (inode, spans(&list)));
    assert!(noted(&notes).eq([(FILE, vec![(3, 3, true)]), (OTHER, vec![(5, 5, true)])]));
    assert!(notes.set(FILE, [].into_iter()) && notes.set(InodeId(9), [].into_iter()));
    assert!(noted(&notes).eq([(OTHER, vec![(5, 5, true)])]));
    let many = (0..=LOCK_RANGES_MAX as u64).map(|at| range(2 * at)).collect::<Vec<_>>();
    assert!(!notes.set(OTHER, many.into_iter()), "there is no room for so many");
    assert!(noted(&notes).eq([(OTHER, vec![(5, 5, true)])]));
    assert!((0..15).all(|more| notes.set(InodeId(50 + more), [range(more)].into_iter())));
    assert!(!notes.set(FILE, [range(1)].into_iter()), "nor for so many files");
    notes.clear();
    assert!(notes.all().is_empty());
}

#[test]
fn full_list_stays_unchanged() {
    let mut list = LockList::default();
    for at in 0..LOCK_RANGES_MAX as u64 {
        assert!(list.set(ByteRange::new(at * 10, at * 10 + 4), LockAction::Read));
    }
    let before = spans(list.ranges());
    let refused = [(2, LockAction::Unlock), (7, LockAction::Read), (2, LockAction::Write)];
    assert!(refused.into_iter().all(|(byte, action)| !list.set(ByteRange::new(byte, byte), action)));
    assert_eq!(spans(list.ranges()), before);
    assert!(list.set(ByteRange::new(0, 4), LockAction::Write));
    assert!(list.set(ByteRange::new(0, LOCK_LAST), LockAction::Unlock) && list.is_empty());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn list_equals_byte_by_byte_model(
        steps in prop::collection::vec((0_u64..40, 0_u64..40, 0_u8..5, any::<bool>()), 1..60),
    ) {
        let mut list = LockList::default();
        // The last byte stands for all bytes behind it.
        let mut bytes = [None; 41];
        for (a, b, action, is_open) in steps {
            let (first, end) = (a.min(b), if is_open { 40 } else { a.max(b) });
            let range = ByteRange::new(first, if is_open { LOCK_LAST } else { end });
            let within = &mut bytes[first as usize..=end as usize];
            prop_assert_eq!(list.overlaps(range), within.iter().any(Option::is_some));
            match action {
                0 => list.weaken(range, LockMode::Read),
                1 => list.weaken(range, LockMode::Write),
                _ => {
                    let action = [LockAction::Read, LockAction::Write, LockAction::Unlock][usize::from(action) - 2];
                    prop_assert!(list.set(range, action));
                    within.fill(action.mode());
                }
            }
            if action == 0 {
                within.iter_mut().for_each(|held| *held = (*held).min(Some(LockMode::Read)));
            }
            let mut found = [None; 41];
            for LockedRange { mode, range } in list.ranges() {
                found[range.first as usize..=range.last.min(40) as usize].fill(Some(*mode));
            }
            prop_assert_eq!(found, bytes);
            let is_apart = |pair: &[LockedRange]| {
                let (end, next) = (pair[0].range.last + 1, pair[1].range.first);
                end < next || end == next && pair[0].mode != pair[1].mode
            };
            prop_assert!(list.ranges().windows(2).all(is_apart));
        }
    }
}
