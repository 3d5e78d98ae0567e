use ashlar_types::{LogPosition, SessionId};
use proptest::prelude::*;

use super::*;
use crate::model::{ModelTree, UpdateChoice};
use crate::test_updates::{self, at};
use crate::{Allocation, Create, Whiteout};

/// A start, a batch that fits it, and the state in which the batch ends.
struct Case {
    start: ModelTree,
    batch: Vec<Update<'static>>,
    end: ModelTree,
}

fn case(before: &[UpdateChoice], batch: &[UpdateChoice], open: u64) -> Case {
    let mut start = ModelTree::new();
    let mut next = InodeId::FIRST_FREE.0;
    start.grow(before, &mut next);
    let open: Vec<InodeId> = start.inodes.keys().copied().filter(|id| open >> (id.0 % 64) & 1 != 0).collect();
    start.set_open(open);
    let mut end = start.clone();
    let batch = end.grow(batch, &mut next);
    end.check();
    Case { start, batch, end }
}

/// The state after the coalesced batch; `None` where a record does not fit.
fn replay(case: &Case, coalesced: &Coalesced<'_>) -> Option<ModelTree> {
    let mut tree = case.start.clone();
    for update in coalesced.left(&case.batch).flatten() {
        tree.apply(update).ok()?;
    }
    Some(tree)
}

fn comes_out_the_same(case: &Case, scope: CoalesceScope) -> bool {
    replay(case, &coalesce(&case.batch, scope)).as_ref() == Some(&case.end)
}

/// A fixed sequence of pseudo-random numbers (SplitMix64).
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    fn choices(&mut self, count: usize) -> Vec<UpdateChoice> {
        let mut choice = || {
            let n = self.next();
            (self.next() as u8, n as u16, (n >> 16) as u16, (n >> 32) as u16, (n >> 48) as u16)
        };
        (0..count).map(|_| choice()).collect()
    }

    fn case(&mut self) -> Case {
        let before = (self.next() % 12) as usize;
        let batch = 2 + (self.next() % 50) as usize;
        let (mut before, mut batch) = (self.choices(before), self.choices(batch));
        if self.next() % 3 == 0 {
            // Changes of one file's content only, after it was made; the first number of a choice is the kind.
            let content = |choice: &mut UpdateChoice| (choice.0, choice.3) = (17 + choice.0 % 8, choice.3 / 16 * 16);
            before.iter_mut().for_each(content);
            batch.iter_mut().for_each(content);
            before.insert(0, (0, 0, 0, 0, 1));
        }
        case(&before, &batch, self.next())
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, ..ProptestConfig::default() })]

    #[test]
    fn a_coalesced_batch_ends_in_the_same_state(
        before in prop::collection::vec(any::<UpdateChoice>(), 0..15),
        batch in prop::collection::vec(any::<UpdateChoice>(), 0..60),
        open in any::<u64>(),
        borders in prop::collection::vec(0usize..60, 0..3),
    ) {
        let mut case = case(&before, &batch, open);
        for border in borders {
            let depend = Update::Depend { session: SessionId(1), position: LogPosition(8) };
            case.batch.insert(border.min(case.batch.len()), depend);
        }
        for scope in [CoalesceScope::All, CoalesceScope::Content] {
            let coalesced = coalesce(&case.batch, scope);
            let state = replay(&case, &coalesced);
            prop_assert_eq!(state.as_ref(), Some(&case.end), "{:?}: {:#?}\n{:#?}", scope, &case.batch, coalesced);
        }
    }

    #[test]
    fn jumbled_batch_gets_an_action_for_each_record(
        before in prop::collection::vec(any::<UpdateChoice>(), 0..40),
        order in prop::collection::vec(any::<prop::sample::Index>(), 0..60),
    ) {
        let batch = case(&[], &before, 0).batch;
        if !batch.is_empty() {
            let jumbled: Vec<_> = order.iter().map(|index| index.get(&batch).clone()).collect();
            prop_assert_eq!(coalesce(&jumbled, CoalesceScope::All).actions.len(), jumbled.len());
        }
    }
}

/// The comparison of states bites: each planted bug shows in some batch, and the batches show nothing without one.
#[test]
fn planted_bugs_are_found() {
    for bug in Bug::ALL {
        let mut numbers = Numbers(7);
        BUG.set(bug);
        let found = (0..30_000).any(|_| {
            let case = numbers.case();
            !comes_out_the_same(&case, CoalesceScope::All)
        });
        BUG.set(Bug::None);
        assert!(found, "{bug:?} was not found");
    }
    let mut numbers = Numbers(7);
    assert!((0..3_000).all(|_| comes_out_the_same(&numbers.case(), CoalesceScope::All)));
}

/// Random batches use every rule: otherwise a coalescer that keeps everything would pass the comparison as well.
#[test]
fn every_rule_is_used_by_random_batches() {
    let mut numbers = Numbers(11);
    let (mut dropped, mut reserved, mut trimmed, mut touched, mut joined, mut unlinked, mut moved) =
        (0, 0, 0, 0, 0, 0, 0);
    for _ in 0..3_000 {
        let case = numbers.case();
        let coalesced = coalesce(&case.batch, CoalesceScope::All);
        dropped += coalesced.dropped;
        for (action, update) in coalesced.actions.iter().zip(&case.batch) {
            match (action, update) {
                (Action::Replace(Update::Allocate { .. }), Update::Write { .. }) => reserved += 1,
                (Action::Replace(Update::Write { .. }), Update::Write { .. }) => trimmed += 1,
                (Action::Replace(Update::SetAttributes(_)), Update::SetAttributes(_)) => joined += 1,
                (Action::Replace(Update::SetAttributes(_)), _) => touched += 1,
                (Action::Replace(Update::Unlink { .. }), Update::Rename(_)) => unlinked += 1,
                (Action::Replace(Update::Rename(_)), Update::Rename(_)) => moved += 1,
                (Action::Replace(Update::RemoveDirectory { .. }), Update::Rename(_))
                | (Action::Keep | Action::Drop, _) => {}
                other => panic!("unexpected: {other:?}"),
            }
        }
    }
    assert!(dropped > 3_000, "{dropped} records dropped");
    for count in [reserved, trimmed, touched, joined, unlinked, moved] {
        assert!(count > 5, "{:?}", [reserved, trimmed, touched, joined, unlinked, moved]);
    }
}

const DIRECTORY: InodeId = InodeId::ROOT;
const FILE: InodeId = InodeId(20);

fn create(inode: InodeId, name: &'static [u8], seconds: i64) -> Update<'static> {
    Update::Create(Create {
        inode,
        parent: DIRECTORY,
        name,
        kind: FileKind::Regular,
        mode: 0o644,
        uid: 0,
        gid: 0,
        device: 0,
        at: at(seconds),
        target: b"",
        acl_access: b"",
        acl_default: b"",
    })
}

fn write(inode: InodeId, offset: u64, data: &'static [u8], seconds: i64) -> Update<'static> {
    Update::Write { inode, offset, at: at(seconds), strip: false, data }
}

fn rename(inode: InodeId, name: &'static [u8], new_name: &'static [u8], target: Option<InodeId>) -> Update<'static> {
    let rename = test_updates::rename(inode, (DIRECTORY, name), (DIRECTORY, new_name), target);
    Update::Rename(Rename { at: at(9), ..rename })
}

fn resize(size: u64, seconds: i64) -> Update<'static> {
    Update::Resize { inode: FILE, size, strip: false, at: at(seconds) }
}

const PAGE: &[u8] = &[7; 4096];

#[test]
fn a_page_written_over_and_over_is_written_once() {
    let batch =
        vec![write(FILE, 0, PAGE, 1), write(FILE, 4096, PAGE, 2), write(FILE, 0, PAGE, 3), write(FILE, 0, PAGE, 4)];
    let coalesced = coalesce(&batch, CoalesceScope::Content);
    assert_eq!(coalesced.actions, [Action::Drop, Action::Keep, Action::Drop, Action::Keep]);
    assert_eq!((coalesced.dropped, coalesced.saved_bytes), (2, 2 * (4096 + 29)));
}

#[test]
fn a_temporary_file_leaves_only_its_directorys_times() {
    let batch = vec![
        create(FILE, b"tmp", 1),
        write(FILE, 0, PAGE, 2),
        Update::Accessed { inode: FILE, at: at(3) },
        Update::Unlink { inode: FILE, parent: DIRECTORY, name: b"tmp", release: false, at: at(4) },
        write(FILE, 0, PAGE, 5),
        Update::Release { inode: FILE },
    ];
    let coalesced = coalesce(&batch, CoalesceScope::All);
    assert_eq!(coalesced.dropped, 5);
    let Action::Replace(Update::SetAttributes(set)) = coalesced.actions[3] else { panic!("{coalesced:?}") };
    assert_eq!((set.inode, set.modified, set.at, set.mode, set.accessed), (DIRECTORY, Some(at(4)), at(4), None, None));
    assert_eq!(coalesce(&batch, CoalesceScope::Content).dropped, 1);
}

/// An editor saves a file twice by writing a new one and renaming it over the old one.
#[test]
fn a_file_replaced_twice_is_replaced_once() {
    let (old, first, second) = (InodeId(20), InodeId(21), InodeId(22));
    let batch = vec![
        create(first, b"tmp", 1),
        write(first, 0, PAGE, 1),
        rename(first, b"tmp", b"file", Some(old)),
        create(second, b"tmp", 2),
        write(second, 0, PAGE, 2),
        rename(second, b"tmp", b"file", Some(first)),
    ];
    let coalesced = coalesce(&batch, CoalesceScope::All);
    let unlink = Update::Unlink { inode: old, parent: DIRECTORY, name: b"file", release: true, at: at(9) };
    let Update::Rename(last) = batch[5].clone() else { unreachable!() };
    let into = Update::Rename(Rename { target: None, release: false, ..last });
    assert_eq!(
        coalesced.actions,
        [Action::Drop, Action::Drop, Action::Replace(unlink), Action::Keep, Action::Keep, Action::Replace(into)]
    );
}

/// An overlay moves a file away and the file goes: what hides the one below must stay.
#[test]
fn whiteout_stays_when_its_file_vanishes() {
    let (file, other, left) = (InodeId(20), InodeId(21), InodeId(22));
    let whiteout = Some(Whiteout { inode: left, uid: 0, gid: 0, acl_access: b"" });
    let leaving = |update: Update<'static>| {
        let Update::Rename(rename) = update else { unreachable!() };
        Update::Rename(Rename { whiteout, ..rename })
    };
    let unlink = |inode, name| Update::Unlink { inode, parent: DIRECTORY, name, release: true, at: at(10) };
    let batch = vec![
        create(file, b"a", 1),
        create(other, b"b", 2),
        leaving(rename(file, b"a", b"b", Some(other))),
        unlink(file, b"b"),
    ];
    let Update::Rename(last) = batch[2].clone() else { unreachable!() };
    let into = Update::Rename(Rename { target: None, release: false, ..last });
    let coalesced = coalesce(&batch, CoalesceScope::All);
    assert_eq!(coalesced.actions, [Action::Keep, Action::Drop, Action::Replace(into), Action::Keep]);
    assert_eq!(coalesce(&batch, CoalesceScope::Content).dropped, 0);
}

#[test]
fn no_record_is_coalesced_across_a_dependency() {
    let depend = Update::Depend { session: SessionId(1), position: LogPosition(8) };
    let unlink = Update::Unlink { inode: FILE, parent: DIRECTORY, name: b"a", release: true, at: at(4) };
    let batch =
        vec![create(FILE, b"a", 1), write(FILE, 0, PAGE, 1), depend.clone(), write(FILE, 0, PAGE, 2), depend, unlink];
    let coalesced = coalesce(&batch, CoalesceScope::All);
    assert!(coalesced.actions.iter().all(|action| *action == Action::Keep));
    assert_eq!((coalesced.dropped, coalesced.saved_bytes), (0, 0));
}

/// Cutting a file to the size that it has frees what was reserved behind its end; growing it to that size does not. So
/// the size before a cut matters, and a write that is cut off may be what made it a cut.
#[test]
fn write_that_makes_a_resize_a_truncation_keeps_its_blocks() {
    let batch = vec![write(FILE, 8192, PAGE, 1), write(FILE, 8192, PAGE, 2), resize(4096, 3)];
    let coalesced = coalesce(&batch, CoalesceScope::All);
    assert_eq!(coalesced.actions[0], Action::Drop);
    let reserved =
        Update::Allocate { inode: FILE, how: Allocation::Reserve, offset: 8192, length: 4096, strip: false, at: at(2) };
    assert_eq!(coalesced.actions[1], Action::Replace(reserved));
    let to_nothing = vec![write(FILE, 8192, PAGE, 1), write(FILE, 8192, PAGE, 2), resize(0, 3)];
    assert_eq!(coalesce(&to_nothing, CoalesceScope::All).dropped, 2);
}

#[test]
fn chain_of_truncations_becomes_two() {
    let batch: Vec<_> = (1..=50).rev().map(|n| resize(n * 100, 60 - n as i64)).collect();
    let coalesced = coalesce(&batch, CoalesceScope::All);
    assert_eq!(coalesced.dropped, 48);
    assert!(coalesced.actions[48..].iter().all(|action| *action == Action::Keep));
}

#[test]
fn attributes_set_one_by_one_are_set_at_once() {
    let none =
        SetAttributes { inode: FILE, mode: None, uid: None, gid: None, accessed: None, modified: None, at: at(1) };
    let batch = vec![
        Update::SetAttributes(SetAttributes { uid: Some(4), gid: Some(5), ..none }),
        Update::SetAttributes(SetAttributes { mode: Some(0o600), at: at(2), ..none }),
        Update::SetAttributes(SetAttributes { modified: Some(at(0)), gid: Some(6), at: at(3), ..none }),
    ];
    let coalesced = coalesce(&batch, CoalesceScope::All);
    let (mode, uid, gid) = (Some(0o600), Some(4), Some(6));
    let joined = SetAttributes { mode, uid, gid, modified: Some(at(0)), at: at(3), ..none };
    assert_eq!(coalesced.actions, [Action::Drop, Action::Drop, Action::Replace(Update::SetAttributes(joined))]);
}

/// A batch as large as a digest takes comes out in a moment: the passes do not look at all records for each.
#[test]
fn a_large_batch_takes_no_time() {
    let batch: Vec<_> = (0..8192u64).map(|n| write(FILE, n * 37 % 8192 * 2, b"abc", n as i64)).collect();
    let began = std::time::Instant::now();
    let coalesced = coalesce(&batch, CoalesceScope::All);
    assert_eq!(coalesced.actions.len(), 8192);
    assert!(began.elapsed().as_secs() < 2, "{:?}", began.elapsed());
}
