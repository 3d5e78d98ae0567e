//! Scenarios of leases, one test each.

use ashlar_types::{InodeId, LeaseMode, LeaseScope, LogPosition, SessionId, WantedLease};

use super::world::{Op, Plant, Tree, World};
use crate::{Command, LeaseManager, Limits, Reach, RequestError, RequestedLease, RevokeReason};

const ROOT: InodeId = InodeId::ROOT;

fn world(limits: Limits) -> World {
    World::new(limits, Plant::None)
}

fn quick() -> Limits {
    Limits { hold_us: 0, ..Limits::default() }
}

fn read(inode: InodeId) -> RequestedLease {
    RequestedLease { lease: WantedLease { inode, mode: LeaseMode::Read, scope: LeaseScope::Node }, may_widen: true }
}

/// Makes a request like [`read`], for a lease of this scope that other readers can join.
fn read_passively(inode: InodeId, scope: LeaseScope) -> RequestedLease {
    RequestedLease { lease: WantedLease { inode, mode: LeaseMode::Read, scope }, may_widen: false }
}

fn write(inode: InodeId) -> RequestedLease {
    RequestedLease { lease: WantedLease { inode, mode: LeaseMode::Write, scope: LeaseScope::Node }, may_widen: true }
}

/// Makes a request like [`write`], for everything below the directory.
fn write_below(inode: InodeId) -> RequestedLease {
    RequestedLease { lease: WantedLease { inode, mode: LeaseMode::Write, scope: LeaseScope::Subtree }, may_widen: true }
}

#[test]
fn only_session_gets_the_whole_tree_and_never_asks_again() {
    let mut world = world(quick());
    let only = world.begin();
    let directory = world.make(only, ROOT, true).unwrap();
    let file = world.make(only, directory, false).unwrap();
    world.run(only, Op::Write { inode: file, value: 7 }).unwrap();
    assert_eq!(world.read(only, file), Ok(7));
    assert_eq!(world.word(only, file).scope, LeaseScope::Subtree);
    assert_eq!((world.manager.stats().grants, world.manager.stats().entries), (1, 1));
}

#[test]
fn second_session_cuts_a_hole_and_sees_logged_updates() {
    let mut world = world(quick());
    let (first, second) = (world.begin(), world.begin());
    let file = world.make(first, ROOT, false).unwrap();
    let other = world.make(first, ROOT, false).unwrap();
    world.run(first, Op::Write { inode: file, value: 7 }).unwrap();
    world.digest(first, usize::MAX).unwrap();
    assert_eq!(world.read(second, file), Ok(7));
    assert_eq!(world.seals[&first], 1);
    // The holder's other inodes stay under its lease, which it gets again on request.
    assert!(!world.is_valid(first, other, LeaseMode::Read));
    world.run(first, Op::Write { inode: other, value: 8 }).unwrap();
    assert_eq!((world.word(first, other).inode, world.word(first, other).scope), (ROOT, LeaseScope::Subtree));
    // Both sessions read the file, on leases of their own.
    assert_eq!(world.read(first, file), Ok(7));
    assert!(world.is_valid(second, file, LeaseMode::Read));
}

/// The lease of a removed directory, by which the session also knew another inode, is removed with it.
///
/// The lease's word is written after the log was applied, which was sealed before. Until then the session continues to
/// use the lease.
#[test]
fn state_known_by_a_removed_directory_holds_until_its_word() {
    let mut world = world(quick());
    let (session, other) = (world.begin(), world.begin());
    world.make(other, ROOT, false).unwrap();
    let parent = world.make(session, ROOT, true).unwrap();
    let directory = world.make(session, parent, true).unwrap();
    let file = world.make(session, directory, false).unwrap();
    // From here on, the session has a granted lease on everything below the directory.
    world.make(other, ROOT, false).unwrap();
    world
        .make(session, parent, false)
        .and_then(|made| world.run(session, Op::Unlink { inode: made, from: parent, keep: false }))
        .unwrap();
    world.run(session, Op::Write { inode: file, value: 1 }).unwrap();
    world.run(session, Op::Rename { inode: directory, from: parent, to: ROOT }).unwrap();
    world.run(session, Op::Unlink { inode: parent, from: ROOT, keep: false }).unwrap();
    world.after_seal = vec![
        (session, Op::Link { inode: file, to: ROOT }),
        (session, Op::Write { inode: file, value: 2 }),
        (session, Op::Unlink { inode: file, from: directory, keep: false }),
        (session, Op::Write { inode: file, value: 3 }),
    ];
    world.acquire(other, &[write(InodeId::RENAME)]).unwrap();
    assert!(world.met.contains("after a seal"), "it has lost all at once");
    world.digest(session, usize::MAX).unwrap();
    assert_eq!(world.read(other, file), Ok(3));
    world.check().unwrap();
}

#[test]
fn stopped_session_is_sealed_once_and_delays_no_other() {
    let mut world = world(Limits { hold_us: 0, ..Limits::default() });
    let (stopped, busy) = (world.begin(), world.begin());
    let files: Vec<_> = (0..10).map(|_| world.make(stopped, ROOT, false).unwrap()).collect();
    world.digest(stopped, usize::MAX).unwrap();
    for file in &files {
        world.run(busy, Op::Write { inode: *file, value: 9 }).unwrap();
    }
    assert_eq!((world.seals[&stopped], world.now_us), (1, 0));
    // The stopped session continues unharmed.
    assert!(files.iter().all(|file| world.read(stopped, *file) == Ok(9)));
}

#[test]
fn competing_sessions_both_get_their_minimum_hold() {
    let mut world = world(Limits { hold_us: 100, ..Limits::default() });
    let (first, second) = (world.begin(), world.begin());
    let file = world.make(first, ROOT, false).unwrap();
    world.digest(first, usize::MAX).unwrap();
    for turn in 1..=5 {
        let session = if turn % 2 == 0 { first } else { second };
        world.run(session, Op::Write { inode: file, value: turn }).unwrap();
        assert_eq!(world.now_us, turn * 100);
    }
}

#[test]
fn wait_is_reported_once_and_ends_with_the_holder() {
    let mut world = world(Limits { hold_us: 100, ..Limits::default() });
    let (holder, other) = (world.begin(), world.begin());
    world.acquire(holder, &[write(ROOT)]).unwrap();
    world.manager.handle_request(50, other, &[read(ROOT)], &world.applied).unwrap();
    assert_eq!(world.manager.poll_command(50, &world.applied, &|_| true), Some(Command::Wait { until_us: 100 }));
    assert_eq!(world.manager.poll_command(60, &world.applied, &|_| true), None);
    assert_eq!(world.manager.next_time_us(), Some(100));
    world.manager.handle_session_end(holder);
    assert!(matches!(world.manager.poll_command(60, &world.applied, &|_| true), Some(Command::Split { .. })));
}

#[test]
fn cancelled_request_delays_no_other() {
    let mut world = world(Limits { hold_us: 100, ..Limits::default() });
    let (holder, other, third) = (world.begin(), world.begin(), world.begin());
    world.acquire(holder, &[write(ROOT)]).unwrap();
    let first = world.manager.handle_request(50, other, &[write(ROOT)], &world.applied).unwrap();
    assert_eq!(world.manager.poll_command(50, &world.applied, &|_| true), Some(Command::Wait { until_us: 100 }));
    let behind = world.manager.handle_request(60, third, &[read(ROOT)], &world.applied).unwrap();
    // The first request has announced changes, the second waits behind others, and the third no longer exists.
    world.manager.handle_cancel(first);
    let again = world.manager.handle_request(70, other, &[write(ROOT)], &world.applied).unwrap();
    world.manager.handle_cancel(again);
    world.manager.handle_cancel(first);
    assert_eq!(world.manager.stats().waiting, 1);
    assert!(matches!(world.manager.poll_command(70, &world.applied, &|_| true), Some(Command::Wait { .. })));
    let mut granted = Vec::new();
    while let Some(command) = world.manager.poll_command(100, &world.applied, &|_| true) {
        match command {
            Command::SealAndApply { session } => world.manager.handle_applied(session, LogPosition(1)),
            Command::Grant { request, .. } => granted.push(request),
            _ => {}
        }
    }
    assert_eq!(granted, [behind]);
}

#[test]
fn used_lease_is_taken_without_waiting() {
    let mut world = world(Limits { hold_us: 100, ..Limits::default() });
    let (holder, other) = (world.begin(), world.begin());
    world.acquire(holder, &[write(ROOT)]).unwrap();
    world.manager.handle_request(10, other, &[read(ROOT)], &world.applied).unwrap();
    let uses = |who| move |session| session == who;
    assert_eq!(world.manager.poll_command(10, &world.applied, &uses(holder)), Some(Command::Wait { until_us: 100 }));
    assert_eq!(world.manager.poll_command(20, &world.applied, &uses(holder)), None);
    // Other sessions in the middle of an operation cause no delay.
    assert!(matches!(world.manager.poll_command(20, &world.applied, &uses(other)), Some(Command::Split { .. })));
}

#[test]
fn session_keeps_its_own_directory_beside_others() {
    let mut world = world(quick());
    let (first, second) = (world.begin(), world.begin());
    let mine = world.make(first, ROOT, true).unwrap();
    let theirs = world.make(first, ROOT, true).unwrap();
    world.digest(first, usize::MAX).unwrap();
    world.release(first, ROOT).unwrap();
    // Both sessions hold a read lease on the root, so neither gets all of it. LeasesBelow their directories, no other
    // session holds anything.
    world.read(second, ROOT).unwrap();
    world.read(first, ROOT).unwrap();
    let (a, b) = (world.make(first, mine, false).unwrap(), world.make(second, theirs, false).unwrap());
    for _ in 0..3 {
        world.make(first, mine, false).unwrap();
        world.make(second, theirs, false).unwrap();
    }
    let grants = world.manager.stats().grants;
    world.run(first, Op::Write { inode: a, value: 1 }).unwrap();
    world.run(second, Op::Write { inode: b, value: 1 }).unwrap();
    assert_eq!(world.manager.stats().grants, grants);
}

#[test]
fn lease_split_too_often_is_revoked_as_a_whole() {
    let mut world = world(Limits { splits_max: 3, ..quick() });
    let (wide, narrow) = (world.begin(), world.begin());
    let files: Vec<_> = (0..5).map(|_| world.make(wide, ROOT, false).unwrap()).collect();
    world.digest(wide, usize::MAX).unwrap();
    for file in &files {
        world.run(narrow, Op::Write { inode: *file, value: 2 }).unwrap();
    }
    assert_eq!(world.manager.stats().splits, 3);
    // From here on the two do not collide: a new grant to one does not cover the other's inodes.
    world.run(wide, Op::Write { inode: ROOT, value: 3 }).unwrap();
    assert_eq!(world.word(wide, ROOT).scope, LeaseScope::Node);
    assert!(files.iter().all(|file| world.is_valid(narrow, *file, LeaseMode::Write)));
}

#[test]
fn downgraded_writer_keeps_its_cached_state() {
    let mut world = world(quick());
    let (writer, reader, third) = (world.begin(), world.begin(), world.begin());
    let file = world.make(writer, ROOT, false).unwrap();
    world.digest(writer, usize::MAX).unwrap();
    world.run(reader, Op::Write { inode: file, value: 1 }).unwrap();
    assert_eq!(world.read(third, file), Ok(1));
    assert!(world.is_valid(reader, file, LeaseMode::Read) && !world.is_valid(reader, file, LeaseMode::Write));
    assert_eq!(world.manager.stats().downgrades, 1);
}

#[test]
fn file_made_under_a_node_lease_stays_with_its_maker() {
    let mut world = world(quick());
    let (other, maker) = (world.begin(), world.begin());
    world.acquire(other, &[write(ROOT)]).unwrap();
    let file = world.make(maker, ROOT, false).unwrap();
    world.run(maker, Op::Write { inode: file, value: 5 }).unwrap();
    // The other session may read the directory while its maker continues to read the file that was never granted.
    world.read(other, ROOT).unwrap();
    assert!(world.is_valid(maker, file, LeaseMode::Read));
    world.run(other, Op::Write { inode: file, value: 6 }).unwrap();
    assert!(!world.is_valid(maker, file, LeaseMode::Read));
    assert_eq!(world.read(maker, file), Ok(6));
}

/// A shell that was killed after publishing the applied position must find the maker's lease in the table.
///
/// Without the attached word, the file belonged to no session after the restart. SharedFS then refused acknowledged
/// updates of the maker as forged.
#[test]
fn attached_word_is_returned_before_it_is_polled() {
    let mut world = world(quick());
    let (other, maker) = (world.begin(), world.begin());
    world.acquire(other, &[write(ROOT)]).unwrap();
    let file = world.make(maker, ROOT, false).unwrap();
    assert_eq!(world.manager.take_attached().count(), 0);
    world.manager.handle_made(maker, file, ROOT, false, &world.applied);
    let words: Vec<_> = world.manager.take_attached().collect();
    assert_eq!(words.iter().map(|word| (word.session, word.inode)).collect::<Vec<_>>(), [(maker, file)]);
    let given = world.manager.poll_command(world.now_us, &world.applied, &|_| true);
    assert_eq!(given, Some(Command::Attach { word: words[0] }));
    assert_eq!(world.manager.take_attached().count(), 0);
    // Each word is returned once, and none that was polled meanwhile.
    let [first, second, third] = [1, 2, 3].map(|more| InodeId(file.0 + more));
    world.manager.handle_made(maker, first, ROOT, false, &world.applied);
    world.manager.handle_made(maker, second, ROOT, false, &world.applied);
    assert!(world.manager.poll_command(world.now_us, &world.applied, &|_| true).is_some());
    assert_eq!(world.manager.take_attached().map(|word| word.inode).collect::<Vec<_>>(), [second]);
    world.manager.handle_made(maker, third, ROOT, false, &world.applied);
    assert_eq!(world.manager.take_attached().map(|word| word.inode).collect::<Vec<_>>(), [third]);
}

#[test]
fn file_with_a_second_link_stays_with_its_holder() {
    let mut world = world(quick());
    let (linker, other) = (world.begin(), world.begin());
    let directory = world.make(linker, ROOT, true).unwrap();
    let file = world.make(linker, ROOT, false).unwrap();
    world.run(linker, Op::Link { inode: file, to: directory }).unwrap();
    world.digest(linker, usize::MAX).unwrap();
    assert!(world.is_valid(linker, file, LeaseMode::Write));
    world.run(other, Op::Write { inode: file, value: 3 }).unwrap();
    assert_eq!(world.seals[&linker], 1);
    assert_eq!(world.read(linker, file), Ok(3));
}

#[test]
fn unlinked_open_file_stays_with_its_holder() {
    let mut world = world(quick());
    let (remover, other) = (world.begin(), world.begin());
    let file = world.make(remover, ROOT, false).unwrap();
    world.run(remover, Op::Unlink { inode: file, from: ROOT, keep: true }).unwrap();
    world.digest(remover, usize::MAX).unwrap();
    world.run(remover, Op::Write { inode: file, value: 4 }).unwrap();
    assert_eq!(world.read(other, file), Ok(4));
}

#[test]
fn directory_moves_between_subtrees_of_two_sessions() {
    let mut world = world(quick());
    let (mover, other) = (world.begin(), world.begin());
    let (mine, theirs) = (world.make(mover, ROOT, true).unwrap(), world.make(mover, ROOT, true).unwrap());
    let moved = world.make(mover, mine, true).unwrap();
    let file = world.make(mover, moved, false).unwrap();
    world.digest(mover, usize::MAX).unwrap();
    world.acquire(other, &[write_below(theirs)]).unwrap();
    world.run(mover, Op::Rename { inode: moved, from: mine, to: theirs }).unwrap();
    world.read(mover, file).unwrap();
    world.digest(mover, usize::MAX).unwrap();
    // Inodes below the directory stay under the mover's lease, though the other session's directory is above it now.
    assert!(world.is_valid(mover, file, LeaseMode::Write));
    world.run(other, Op::Write { inode: file, value: 5 }).unwrap();
    assert_eq!(world.read(mover, file), Ok(5));
}

#[test]
fn subtree_lease_takes_everything_below_from_others() {
    let mut world = world(quick());
    let (first, second) = (world.begin(), world.begin());
    let directory = world.make(first, ROOT, true).unwrap();
    let below = world.make(first, directory, true).unwrap();
    let file = world.make(first, below, false).unwrap();
    world.digest(first, usize::MAX).unwrap();
    world.run(second, Op::Write { inode: file, value: 1 }).unwrap();
    world.acquire(first, &[write_below(directory)]).unwrap();
    assert!(!world.is_valid(second, file, LeaseMode::Read));
    assert_eq!(world.seals[&second], 1);
}

#[test]
fn lease_passed_on_twice_keeps_both_dependencies() {
    let mut world = world(quick());
    let (writer, idle, last) = (world.begin(), world.begin(), world.begin());
    let file = world.make(writer, ROOT, false).unwrap();
    world.digest(writer, usize::MAX).unwrap();
    world.acquire(idle, &[write(file)]).unwrap();
    world.acquire(last, &[write(file)]).unwrap();
    assert_eq!(world.manager.dependencies(last, file, &world.applied), vec![(writer, LogPosition(1))]);
    assert_eq!(world.manager.dependencies(writer, file, &world.applied), vec![]);
    world.commit_all();
    assert_eq!(world.manager.dependencies(last, file, &world.applied), vec![]);
}

/// `fsync` takes the logs of these sessions, and of no others.
#[test]
fn writers_are_the_holders_up_to_the_root_until_applied() {
    let mut world = world(quick());
    let [holder, writer, reader] = [(); 3].map(|()| world.begin());
    let directory = world.make(holder, ROOT, true).unwrap();
    let (file, beside) = (world.make(holder, directory, false).unwrap(), world.make(holder, ROOT, false).unwrap());
    world.digest(holder, usize::MAX).unwrap();
    world.run(writer, Op::Write { inode: file, value: 1 }).unwrap();
    let writers = |world: &World, inode| world.manager.writers(inode, &world.applied).into_iter().collect::<Vec<_>>();
    assert_eq!(writers(&world, file), [holder, writer]);
    assert_eq!(writers(&world, beside), [holder], "the other one has no part in it");
    assert_eq!(world.read(reader, file), Ok(1));
    assert_eq!(writers(&world, file), [holder], "to be read, the writer's records were applied");
    let depends = |session| world.manager.path_dependencies(session, file, &world.applied);
    assert!(depends(reader).iter().any(|(session, _)| *session == writer), "they are not persistent yet");
    assert!(depends(writer).iter().all(|(session, _)| *session != writer), "its own it knows");
}

/// A moving session had itself excepted an inode that it reads from its lease on everything. Found by random steps.
#[test]
fn moved_directory_keeps_its_dependencies() {
    let mut world = world(quick());
    let [writer, mover, reader, last] = [(); 4].map(|()| world.begin());
    world.acquire(mover, &[write(ROOT)]).unwrap();
    let above = world.make(writer, ROOT, true).unwrap();
    world.make(mover, ROOT, false).unwrap();
    let moved = world.make(writer, above, true).unwrap();
    let below = world.make(writer, moved, true).unwrap();
    world.release(writer, above).unwrap();
    world.read_in(reader, below, LeaseScope::Files).unwrap();
    world.run(mover, Op::Rename { inode: moved, from: above, to: ROOT }).unwrap();
    world.digest(mover, usize::MAX).unwrap();
    let shown = world.manager.dependencies(last, below, &world.applied);
    assert!(shown.iter().any(|(session, _)| *session == writer), "{shown:?}");
    world.run(last, Op::Write { inode: below, value: 1 }).unwrap();
}

#[test]
fn ended_session_leaves_updates_and_no_leases() {
    let mut world = world(quick());
    let (ending, other) = (world.begin(), world.begin());
    let file = world.make(ending, ROOT, false).unwrap();
    world.run(ending, Op::Write { inode: file, value: 6 }).unwrap();
    world.end(ending).unwrap();
    assert_eq!(world.manager.stats().entries, 0);
    assert_eq!(world.read(other, file), Ok(6));
    assert_eq!(world.word(other, file).inode, ROOT);
}

#[test]
fn ended_session_drops_its_requests() {
    let mut world = world(Limits { hold_us: 100, ..Limits::default() });
    let (holder, asking) = (world.begin(), world.begin());
    world.acquire(holder, &[write(ROOT)]).unwrap();
    world.manager.handle_request(0, asking, &[write(ROOT)], &world.applied).unwrap();
    assert!(matches!(world.manager.poll_command(0, &world.applied, &|_| true), Some(Command::Wait { .. })));
    world.end(asking).unwrap();
    assert_eq!(world.manager.stats().waiting, 0);
    assert!(world.is_valid(holder, ROOT, LeaseMode::Write));
    assert_eq!(world.manager.handle_request(0, holder, &[write(ROOT)], &world.applied).map(|_| ()), Ok(()));
}

#[test]
fn leases_and_unapplied_records_outlive_a_restart() {
    let mut world = world(quick());
    let (first, second) = (world.begin(), world.begin());
    let file = world.make(first, ROOT, false).unwrap();
    world.digest(first, usize::MAX).unwrap();
    world.run(second, Op::Write { inode: file, value: 1 }).unwrap();
    let made = world.make(second, ROOT, false).unwrap();
    world.restart().unwrap();
    assert!(world.inodes(Some(false)).contains(&made), "the logs were applied");
    let entries = world.manager.stats().entries;
    assert_eq!(world.read(second, file), Ok(1));
    assert_eq!(world.manager.stats().entries, entries, "the lease was there");
}

#[test]
fn idle_session_loses_only_its_leases() {
    let mut world = world(Limits { lease_ttl_us: 1000, ..quick() });
    let (idle, busy) = (world.begin(), world.begin());
    let file = world.make(idle, ROOT, false).unwrap();
    world.digest(idle, usize::MAX).unwrap();
    world.now_us = 900;
    world.acquire(busy, &[write(ROOT)]).unwrap();
    world.manager.handle_time(1000);
    world.perform(None).unwrap();
    assert!(!world.is_valid(idle, file, LeaseMode::Read) && world.is_valid(busy, ROOT, LeaseMode::Write));
    world.manager.handle_activity(busy, 1500);
    world.manager.handle_time(2000);
    world.perform(None).unwrap();
    assert!(world.is_valid(busy, ROOT, LeaseMode::Write));
    assert_eq!(world.read(idle, file), Ok(0));
}

#[test]
fn least_recently_granted_leases_are_evicted() {
    let mut world = world(Limits { entries_per_session_max: 8, ..quick() });
    let (maker, reader) = (world.begin(), world.begin());
    let files: Vec<_> = (0..12).map(|_| world.make(maker, ROOT, false).unwrap()).collect();
    world.digest(maker, usize::MAX).unwrap();
    for file in &files {
        world.run(reader, Op::Write { inode: *file, value: 1 }).unwrap();
        world.acquire(reader, &[write(files[0])]).unwrap();
    }
    assert!(world.manager.stats().entries <= 9);
    assert!(world.is_valid(reader, files[0], LeaseMode::Write), "granted again and again");
    assert!(!world.is_valid(reader, files[1], LeaseMode::Write));
}

/// An inode that was made while its table had no room is recorded as soon as the table has room.
#[test]
fn leases_beyond_the_table_are_written_when_it_grows() {
    let mut world = world(quick());
    let (other, maker) = (world.begin(), world.begin());
    world.acquire(other, &[write(ROOT)]).unwrap();
    world.acquire(maker, &[write(ROOT)]).unwrap();
    world.manager.set_table_slots(maker, 4);
    (1..=5).for_each(|number| world.manager.handle_made(maker, InodeId(100 + number), ROOT, false, &world.applied));
    let slots = |world: &mut World| world.manager.take_attached().map(|word| word.slot).collect::<Vec<_>>();
    assert_eq!(slots(&mut world), [1, 2, 3]);
    world.manager.set_table_slots(maker, 16);
    assert_eq!(slots(&mut world), [4, 5]);
    // A session with room for only two leases loses the oldest for a third.
    world.manager.set_table_slots(other, 4);
    let files: Vec<_> = (0..3).map(|_| world.make(other, ROOT, false).unwrap()).collect();
    world.digest(other, usize::MAX).unwrap();
    let reader = world.begin();
    world.manager.set_table_slots(reader, 4);
    for file in &files {
        world.acquire(reader, &[read(*file)]).unwrap();
    }
    let valid: Vec<_> = files.iter().map(|file| world.is_valid(reader, *file, LeaseMode::Read)).collect();
    assert_eq!(valid, [false, true, true]);
}

#[test]
fn deleted_file_leaves_no_lease() {
    let mut world = world(quick());
    let (maker, other) = (world.begin(), world.begin());
    let file = world.make(maker, ROOT, false).unwrap();
    world.digest(maker, usize::MAX).unwrap();
    world.run(other, Op::Write { inode: file, value: 1 }).unwrap();
    world.run(other, Op::Unlink { inode: file, from: ROOT, keep: false }).unwrap();
    let entries = world.manager.stats().entries;
    world.digest(other, usize::MAX).unwrap();
    assert_eq!(world.manager.stats().entries, entries - 1);
}

#[test]
fn held_lease_is_answered_outside_the_queue() {
    let mut world = world(Limits { hold_us: 100, ..Limits::default() });
    let (holder, other) = (world.begin(), world.begin());
    let file = world.make(holder, ROOT, false).unwrap();
    world.digest(holder, usize::MAX).unwrap();
    world.manager.handle_request(0, other, &[write(ROOT)], &world.applied).unwrap();
    assert!(matches!(world.manager.poll_command(0, &world.applied, &|_| true), Some(Command::Wait { .. })));
    let (grant, dependencies) = world.manager.find_covering(0, holder, file, LeaseMode::Write, &world.applied).unwrap();
    assert_eq!((grant.word.inode, dependencies), (ROOT, vec![]));
    assert_eq!(world.manager.find_covering(0, other, file, LeaseMode::Read, &world.applied), None);
}

#[test]
fn request_over_the_limits_is_refused() {
    let limits = Limits { queue_max: 2, wants_max: 3, ..quick() };
    let mut manager = LeaseManager::new(limits);
    let session = SessionId(1);
    let (wants, tree) = ([read(ROOT); 4], Tree::default());
    assert_eq!(manager.handle_request(0, session, &wants, &tree), Err(RequestError::TooManyWants(4)));
    manager.handle_request(0, session, &wants[..1], &tree).unwrap();
    manager.handle_request(0, session, &wants[..1], &tree).unwrap();
    assert_eq!(manager.handle_request(0, session, &wants[..1], &tree), Err(RequestError::QueueFull(2)));
    manager.handle_session_end(session);
    assert_eq!(manager.handle_request(0, session, &wants[..1], &tree), Err(RequestError::Ended(session)));
}

#[test]
fn lease_of_odd_scope_is_refused() {
    let mut world = world(quick());
    let (one, other) = (world.begin(), world.begin());
    let directory = world.make(one, ROOT, true).unwrap();
    let file = world.make(one, directory, false).unwrap();
    world.digest(one, usize::MAX).unwrap();
    let want = |inode, mode, scope| [RequestedLease { lease: WantedLease { inode, mode, scope }, may_widen: true }];
    for (inode, mode, scope) in [
        (file, LeaseMode::Write, LeaseScope::Subtree),
        (file, LeaseMode::Read, LeaseScope::Subtree),
        (directory, LeaseMode::Read, LeaseScope::Subtree),
        (InodeId(4711), LeaseMode::Write, LeaseScope::Subtree),
        (file, LeaseMode::Write, LeaseScope::Files),
    ] {
        let asked = world.manager.handle_request(0, other, &want(inode, mode, scope), &world.applied);
        assert_eq!(asked, Err(RequestError::OddScope(inode)), "{mode:?} {scope:?}");
    }
    world.acquire(other, &want(file, LeaseMode::Read, LeaseScope::Files)).unwrap();
    world.acquire(other, &want(directory, LeaseMode::Write, LeaseScope::Subtree)).unwrap();
}

#[test]
fn subtree_of_directory_that_goes_meanwhile_is_answered() {
    let mut world = world(quick());
    let (one, other) = (world.begin(), world.begin());
    let directory = world.make(one, ROOT, true).unwrap();
    world.digest(one, usize::MAX).unwrap();
    world.run(one, Op::Unlink { inode: directory, from: ROOT, keep: false }).unwrap();
    let want = RequestedLease {
        lease: WantedLease { inode: directory, mode: LeaseMode::Write, scope: LeaseScope::Subtree },
        may_widen: true,
    };
    let request = world.manager.handle_request(0, other, &[want], &world.applied).unwrap();
    assert_eq!(world.perform(Some(request)), Ok(true), "the log that is applied for it removes the directory");
}

#[test]
fn revocation_names_its_reason() {
    let mut world = world(quick());
    let (holder, other) = (world.begin(), world.begin());
    let file = world.make(holder, ROOT, false).unwrap();
    world.digest(holder, usize::MAX).unwrap();
    world.acquire(other, &[write(file)]).unwrap();
    world.manager.handle_release(other, file);
    let command = world.manager.poll_command(0, &world.applied, &|_| true);
    let Some(Command::Revoke { word, reason: RevokeReason::Released }) = command else { panic!("{command:?}") };
    assert_eq!((word.session, word.inode, word.mode), (other, file, None));
}

/// Makes a directory of files without holders.
fn files_of_ended_session(world: &mut World, count: usize) -> (InodeId, Vec<InodeId>) {
    let maker = world.begin();
    let directory = world.make(maker, ROOT, true).unwrap();
    let files = (0..count).map(|_| world.make(maker, directory, false).unwrap()).collect();
    world.end(maker).unwrap();
    (directory, files)
}

/// Makes such a directory whose own lease is held, so that no session gets everything.
fn files_of_no_session(world: &mut World, count: usize) -> (InodeId, Vec<InodeId>) {
    let (directory, files) = files_of_ended_session(world, count);
    let (first, second) = (world.begin(), world.begin());
    world.read(first, directory).unwrap();
    world.read(second, directory).unwrap();
    world.release(first, ROOT).unwrap();
    (directory, files)
}

#[test]
fn one_read_lease_covers_all_files_of_a_directory() {
    let mut world = world(quick());
    let (directory, files) = files_of_no_session(&mut world, 5);
    let readers = [world.begin(), world.begin()];
    for reader in readers {
        world.read_in(reader, files[0], LeaseScope::Files).unwrap();
        assert_eq!(
            (world.word(reader, files[0]).inode, world.word(reader, files[0]).scope),
            (directory, LeaseScope::Files)
        );
        assert!(files.iter().all(|file| world.is_valid(reader, *file, LeaseMode::Read)));
    }
    assert!(files.iter().all(|file| world.is_valid(readers[0], *file, LeaseMode::Read)), "readers share it");
    // A session that asks for less joins the readers.
    let third = world.begin();
    world.read(third, files[1]).unwrap();
    assert_eq!(world.word(third, files[1]).scope, LeaseScope::Files);
    assert!(!world.is_valid(third, files[2], LeaseMode::Write));
}

#[test]
fn writer_cuts_its_file_out_of_a_shared_read_lease() {
    let mut world = world(quick());
    let (_, files) = files_of_no_session(&mut world, 3);
    let (reader, writer, third) = (world.begin(), world.begin(), world.begin());
    for session in [reader, writer] {
        world.read_in(session, files[0], LeaseScope::Files).unwrap();
    }
    world.run(writer, Op::Write { inode: files[0], value: 1 }).unwrap();
    assert!(files.iter().all(|file| !world.is_valid(reader, *file, LeaseMode::Read)));
    assert!(world.is_valid(writer, files[0], LeaseMode::Write) && world.is_valid(writer, files[1], LeaseMode::Read));
    // The writer knew the file on its read lease, too: a session that takes one lease takes both.
    world.read(writer, files[1]).unwrap();
    world.run(third, Op::Write { inode: files[0], value: 2 }).unwrap();
    assert!(!world.is_valid(writer, files[1], LeaseMode::Read));
    world.check().unwrap();
    // One file's grant renews everything that the session needs.
    world.read(reader, files[1]).unwrap();
    assert!(world.is_valid(reader, files[2], LeaseMode::Read));
}

/// One file's lease is evicted, and the lease on all files, by which the file was known too, stays.
#[test]
fn evicted_file_lease_leaves_the_lease_on_all_files() {
    let mut world = world(Limits { entries_per_session_max: 4, ..quick() });
    let (directory, files) = files_of_no_session(&mut world, 3);
    let (session, other, third) = (world.begin(), world.begin(), world.begin());
    world.run(other, Op::Write { inode: files[1], value: 1 }).unwrap();
    world.read(third, files[1]).unwrap();
    world.read_in(session, files[0], LeaseScope::Files).unwrap();
    // A write lease is granted and taken again before any write. State read on the wide lease stays known on it.
    world.acquire(session, &[write(files[0])]).unwrap();
    world.read(other, files[0]).unwrap();
    world.acquire(session, &[read(files[2])]).unwrap();
    world.read(session, ROOT).unwrap();
    world.read(session, directory).unwrap();
    assert_eq!(world.join_readers(session, files[1]), Ok(false), "there is no room");
    world.run(other, Op::Write { inode: files[0], value: 2 }).unwrap();
    world.check().unwrap();
    assert_eq!(world.join_readers(session, files[1]), Ok(true));
}

#[test]
fn read_in_progress_notices_a_lease_taken_on_its_old_slot() {
    let mut world = world(quick());
    let (_, files) = files_of_no_session(&mut world, 2);
    let (session, other) = (world.begin(), world.begin());
    world.read_in(session, files[0], LeaseScope::Files).unwrap();
    // A write lease is granted and taken again before any write.
    world.acquire(session, &[write(files[0])]).unwrap();
    world.run(other, Op::Write { inode: files[0], value: 1 }).unwrap();
    world.check().unwrap();
}

#[test]
fn owner_writes_all_files_again_when_it_alone_reads_them() {
    let mut world = world(quick());
    let (owner, reader) = (world.begin(), world.begin());
    let directory = world.make(owner, ROOT, true).unwrap();
    let files: Vec<_> = (0..3).map(|_| world.make(owner, directory, false).unwrap()).collect();
    world.digest(owner, usize::MAX).unwrap();
    world.read_in(reader, files[0], LeaseScope::Files).unwrap();
    assert_eq!(world.seals[&owner], 1);
    world.read(owner, files[0]).unwrap();
    world.read(owner, files[1]).unwrap();
    assert_eq!(world.word(owner, files[1]).scope, LeaseScope::Files);
    // While another session reads, one file at a time is cut out, and the kernel's cache of the others stays valid.
    world.run(owner, Op::Write { inode: files[0], value: 1 }).unwrap();
    assert_eq!(world.word(owner, files[0]).scope, LeaseScope::Node);
    world.run(reader, Op::Write { inode: files[1], value: 1 }).unwrap();
    world.read_kernel(owner, files[1]).unwrap();
    world.end(reader).unwrap();
    world.run(owner, Op::Write { inode: files[2], value: 2 }).unwrap();
    assert_eq!(world.word(owner, files[2]).scope, LeaseScope::Subtree);
}

#[test]
fn file_moved_among_shared_files_stays_with_its_holder() {
    let mut world = world(quick());
    let (mover, reader) = (world.begin(), world.begin());
    let (here, there) = (world.make(mover, ROOT, true).unwrap(), world.make(mover, ROOT, true).unwrap());
    let (moved, read) = (world.make(mover, here, false).unwrap(), world.make(mover, there, false).unwrap());
    world.digest(mover, usize::MAX).unwrap();
    world.read_in(reader, read, LeaseScope::Files).unwrap();
    world.run(mover, Op::Rename { inode: moved, from: here, to: there }).unwrap();
    let made = world.make(mover, there, false).unwrap();
    world.digest(mover, usize::MAX).unwrap();
    assert!(world.is_valid(mover, moved, LeaseMode::Write) && world.is_valid(mover, made, LeaseMode::Write));
    for file in [moved, made] {
        world.read(reader, file).unwrap();
        world.run(mover, Op::Write { inode: file, value: 1 }).unwrap();
        world.check().unwrap();
        assert_eq!(world.read(reader, file), Ok(1));
    }
}

#[test]
fn sole_reader_that_writes_keeps_its_kernel_cache_valid() {
    let mut world = world(quick());
    let (_, files) = files_of_no_session(&mut world, 2);
    let (reader, other) = (world.begin(), world.begin());
    world.read_in(reader, files[0], LeaseScope::Files).unwrap();
    world.read(reader, files[1]).unwrap();
    world.run(reader, Op::Write { inode: files[0], value: 1 }).unwrap();
    world.run(other, Op::Write { inode: files[1], value: 2 }).unwrap();
    world.read_kernel(reader, files[1]).unwrap();
}

#[test]
fn files_lease_split_too_often_is_taken_from_all_readers() {
    let mut world = world(Limits { splits_max: 2, ..quick() });
    let (_, files) = files_of_no_session(&mut world, 4);
    let (first, second, writer) = (world.begin(), world.begin(), world.begin());
    for reader in [first, second, writer] {
        world.read_in(reader, files[3], LeaseScope::Files).unwrap();
    }
    for file in &files[..3] {
        world.run(writer, Op::Write { inode: *file, value: 1 }).unwrap();
    }
    // For a while the files are read one by one.
    for reader in [first, second, writer] {
        world.read_in(reader, files[3], LeaseScope::Files).unwrap();
        assert_eq!(world.word(reader, files[3]).scope, LeaseScope::Node);
    }
}

#[test]
fn removed_directory_leaves_no_lease_on_its_files() {
    let mut world = world(quick());
    let (directory, files) = files_of_no_session(&mut world, 1);
    let (reader, remover) = (world.begin(), world.begin());
    world.read_in(reader, files[0], LeaseScope::Files).unwrap();
    world.run(remover, Op::Unlink { inode: files[0], from: directory, keep: false }).unwrap();
    world.run(remover, Op::Unlink { inode: directory, from: ROOT, keep: false }).unwrap();
    world.digest(remover, usize::MAX).unwrap();
    world.read(reader, ROOT).unwrap();
}

/// Makes a program, and a mount that has made the directory and some files in it.
///
/// A mount does so for programs that have no session yet.
fn filled(limits: Limits) -> (World, SessionId, SessionId, InodeId, InodeId) {
    let mut world = world(Limits { widen_after_entries: 4, ..limits });
    let (mount, program) = (world.begin(), world.begin());
    let directory = world.make(mount, ROOT, true).unwrap();
    world.digest(mount, usize::MAX).unwrap();
    world.acquire(program, &[write(directory)]).unwrap();
    let left = world.make(mount, directory, false).unwrap();
    world.digest(mount, usize::MAX).unwrap();
    world.acquire(program, &[write(directory)]).unwrap();
    (world, mount, program, directory, left)
}

fn fill(world: &mut World, session: SessionId, directory: InodeId, count: usize) {
    for _ in 0..count {
        world.make(session, directory, false).unwrap();
    }
    world.digest(session, usize::MAX).unwrap();
    world.perform(None).unwrap();
}

#[test]
fn session_filling_a_directory_takes_files_left_by_others() {
    let (mut world, mount, program, directory, left) = filled(quick());
    world.now_us += 1000;
    fill(&mut world, program, directory, 3);
    assert_eq!(world.word(program, directory).scope, LeaseScope::Node);
    fill(&mut world, program, directory, 1);
    // State that the program knew stays known.
    assert!(world.is_valid(program, directory, LeaseMode::Write) && !world.is_valid(mount, left, LeaseMode::Read));
    assert_eq!(world.word(program, directory).scope, LeaseScope::Subtree);
    let entries = world.manager.stats().entries;
    fill(&mut world, program, directory, 100);
    assert_eq!(world.manager.stats().entries, entries, "none has a lease of its own");
    // A session that has left a file there gets it back on request.
    world.run(mount, Op::Write { inode: left, value: 7 }).unwrap();
    assert_eq!(world.read(program, left), Ok(7));
    fill(&mut world, program, directory, 1);
    assert_eq!(world.word(program, directory).scope, LeaseScope::Subtree);
}

#[test]
fn session_filling_a_directory_takes_nothing_in_use() {
    // The lease was granted just now.
    let (mut world, mount, program, directory, left) = filled(quick());
    world.run(mount, Op::Write { inode: left, value: 7 }).unwrap();
    fill(&mut world, program, directory, 4);
    assert!(world.is_valid(mount, left, LeaseMode::Write));
    // At twice as many entries, the lease is old enough.
    world.now_us += 1000;
    fill(&mut world, program, directory, 3);
    assert!(world.is_valid(mount, left, LeaseMode::Write));
    fill(&mut world, program, directory, 1);
    assert!(!world.is_valid(mount, left, LeaseMode::Write));
    assert_eq!(world.word(program, directory).scope, LeaseScope::Subtree);

    // The other holder's lease covers a directory and everything below it.
    let (mut world, _, program, directory, _) = filled(quick());
    let other = world.begin();
    let below = world.make(other, directory, true).unwrap();
    fill(&mut world, other, below, 1);
    world.acquire(program, &[write(directory)]).unwrap();
    world.now_us += 1000;
    fill(&mut world, program, directory, 64);
    assert_eq!(world.word(program, directory).scope, LeaseScope::Node);

    // There are more leases than a few.
    let (mut world, _, program, directory, _) = filled(Limits { widen_takes_max: 2, ..quick() });
    let other = world.begin();
    fill(&mut world, other, directory, 3);
    world.acquire(program, &[write(directory)]).unwrap();
    world.now_us += 1000;
    fill(&mut world, program, directory, 64);
    assert_eq!(world.word(program, directory).scope, LeaseScope::Node);
}

#[test]
fn lease_on_a_filled_directory_is_not_evicted_first() {
    // Another session's directory there keeps the lease from being widened.
    let (mut world, _, program, directory, _) = filled(Limits { entries_per_session_max: 32, ..quick() });
    let other = world.begin();
    let below = world.make(other, directory, true).unwrap();
    fill(&mut world, other, below, 1);
    world.acquire(program, &[write(directory)]).unwrap();
    let lease = world.word(program, directory);
    for _ in 0..8 {
        fill(&mut world, program, directory, 16);
        let now = world.word(program, directory);
        assert_eq!((now.slot, now.mode, now.scope), (lease.slot, Some(LeaseMode::Write), LeaseScope::Node));
    }
}

#[test]
fn filling_below_an_own_lease_revokes_state_known_by_it() {
    let mut world = world(Limits { widen_after_entries: 4, ..quick() });
    let (other, program) = (world.begin(), world.begin());
    let directory = world.make(other, ROOT, true).unwrap();
    let (inside, beside) = (world.make(other, directory, false).unwrap(), world.make(other, ROOT, false).unwrap());
    world.digest(other, usize::MAX).unwrap();
    world.acquire(program, &[write(directory)]).unwrap();
    world.end(other).unwrap();
    // Without another session there, the program has everything.
    world.acquire(program, &[write(beside)]).unwrap();
    assert_eq!((world.word(program, beside).inode, world.word(program, directory).scope), (ROOT, LeaseScope::Node));
    world.read(program, inside).unwrap();
    world.now_us += 1000;
    fill(&mut world, program, directory, 8);
    let third = world.begin();
    world.run(third, Op::Write { inode: inside, value: 9 }).unwrap();
    assert!(!world.is_valid(program, inside, LeaseMode::Read));
    assert_eq!(world.read(program, inside), Ok(9));
}

#[test]
fn reader_admits_others_and_widens_its_lease_on_write() {
    let mut world = world(quick());
    let (directory, files) = files_of_ended_session(&mut world, 4);
    let (reader, passive) = (world.begin(), world.begin());
    world.read_by(reader, read_passively(directory, LeaseScope::Node)).unwrap();
    world.read_by(reader, read_passively(files[0], LeaseScope::Files)).unwrap();
    assert_eq!(
        (world.word(reader, directory).scope, world.word(reader, files[0]).scope),
        (LeaseScope::Node, LeaseScope::Files)
    );
    assert!(
        world.join_readers(passive, directory).unwrap() && world.join_readers(passive, files[0]).unwrap(),
        "others join the readers"
    );
    for file in &files {
        world.read(reader, *file).unwrap();
    }
    let (known, grants) = (world.word(reader, files[0]), world.manager.stats().grants);
    world.run(reader, Op::Write { inode: files[0], value: 7 }).unwrap();
    let now = world.word(reader, files[0]);
    assert_eq!((now.slot, now.generation, now.scope), (known.slot, known.generation, LeaseScope::Subtree));
    assert!(!world.join_readers(passive, files[1]).unwrap(), "no session can join any more");
    for file in &files {
        world.run(reader, Op::Write { inode: *file, value: 8 }).unwrap();
    }
    assert_eq!(world.manager.stats().grants, grants + 1, "all that was known can be written");
    // The directory itself comes under that lease when it is changed, and new inodes there need no lease of their own.
    for _ in 0..3 {
        world.make(reader, directory, false).unwrap();
        world.digest(reader, usize::MAX).unwrap();
    }
    assert_eq!(world.word(reader, directory).scope, LeaseScope::Subtree);
    assert_eq!(world.manager.stats().entries, 1);
    // Another session comes, and the lease behaves like any subtree lease.
    let other = world.begin();
    assert_eq!(world.read(other, files[3]), Ok(8));
    world.check().unwrap();
}

#[test]
fn reader_beside_others_writes_one_file_at_a_time() {
    let mut world = world(quick());
    let (_, files) = files_of_no_session(&mut world, 3);
    let (reader, other) = (world.begin(), world.begin());
    world.read_by(reader, read_passively(files[0], LeaseScope::Files)).unwrap();
    world.run(other, Op::Write { inode: files[2], value: 1 }).unwrap();
    world.run(reader, Op::Write { inode: files[0], value: 2 }).unwrap();
    assert_eq!(world.word(reader, files[0]).scope, LeaseScope::Node);
    world.run(other, Op::Write { inode: files[2], value: 3 }).unwrap();
    assert_eq!((world.read(reader, files[2]), world.read(other, files[0])), (Ok(3), Ok(2)));
    world.check().unwrap();
}

/// A file was looked up for writing, and is still known by the lease on all files.
///
/// Others read it by now, and that lease must not become a write lease.
#[test]
fn other_readers_keep_a_files_lease_from_widening() {
    let mut world = world(quick());
    let (directory, files) = files_of_ended_session(&mut world, 2);
    let (reader, other, passive) = (world.begin(), world.begin(), world.begin());
    for file in &files {
        world.read_by(reader, read_passively(*file, LeaseScope::Files)).unwrap();
    }
    world.read_by(other, read_passively(directory, LeaseScope::Node)).unwrap();
    world.look_up_to_write(reader, files[0]).unwrap();
    assert_eq!(world.word(reader, files[0]).scope, LeaseScope::Files);
    world.read(other, files[0]).unwrap();
    world.end(other).unwrap();
    assert!(world.join_readers(passive, files[0]).unwrap());
    world.run(reader, Op::Write { inode: files[1], value: 1 }).unwrap();
    assert!(!world.is_valid(reader, files[0], LeaseMode::Write), "another session reads it");
    world.run(reader, Op::Write { inode: files[0], value: 2 }).unwrap();
    assert!(!world.is_valid(passive, files[0], LeaseMode::Read));
    world.check().unwrap();
}

#[test]
fn reserved_inode_is_refused_and_held_leases_are_taken() {
    let mut world = world(quick());
    let (mount, program) = (world.begin(), world.begin());
    let directory = world.make(program, ROOT, true).unwrap();
    let file = world.make(program, directory, false).unwrap();
    let other = world.make(program, directory, false).unwrap();
    world.digest(program, usize::MAX).unwrap();
    world.run(program, Op::Write { inode: file, value: 7 }).unwrap();
    world.reserve(mount, file, Reach::Inode).unwrap();
    assert!(!world.is_valid(program, file, LeaseMode::Read));
    assert!(world.refuses(program, &[read(file)]) && world.refuses(program, &[write(file)]));
    assert!(!world.refuses(mount, &[write(file)]) && !world.refuses(program, &[write(other)]));
    // The mount sees the program's writes.
    assert_eq!(world.read(mount, file), Ok(7));
    world.run(program, Op::Write { inode: other, value: 8 }).unwrap();
    world.free_reserved(mount, None);
    assert_eq!(world.read(program, file), Ok(7));
}

#[test]
fn reserved_inode_gets_no_wider_lease_above_it() {
    let mut world = world(quick());
    let (mount, program) = (world.begin(), world.begin());
    let directory = world.make(mount, ROOT, true).unwrap();
    let file = world.make(mount, directory, false).unwrap();
    let other = world.make(mount, directory, false).unwrap();
    let inner = world.make(mount, directory, true).unwrap();
    let below = world.make(mount, inner, false).unwrap();
    world.digest(mount, usize::MAX).unwrap();
    world.reserve(mount, file, Reach::Inode).unwrap();
    world.release(mount, ROOT).unwrap();
    world.release(mount, directory).unwrap();
    world.run(program, Op::Write { inode: other, value: 1 }).unwrap();
    assert_eq!(world.word(program, other).scope, LeaseScope::Node);
    assert!(world.refuses(program, &[write_below(directory)]) && world.refuses(program, &[write_below(ROOT)]));
    assert!(!world.refuses(program, &[write_below(inner)]));
    // Beside it, everything below belongs to the program.
    world.run(program, Op::Write { inode: below, value: 2 }).unwrap();
    assert_eq!((world.word(program, below).inode, world.word(program, below).scope), (inner, LeaseScope::Subtree));
    let third = world.begin();
    assert_eq!(world.read_by(third, read_passively(other, LeaseScope::Files)), Ok(1));
    assert_eq!(world.word(third, other).scope, LeaseScope::Node);
}

#[test]
fn reserved_directory_covers_only_its_own_content() {
    let mut world = world(quick());
    let (mount, program) = (world.begin(), world.begin());
    let directory = world.make(program, ROOT, true).unwrap();
    let file = world.make(program, directory, false).unwrap();
    let inner = world.make(program, directory, true).unwrap();
    let below = world.make(program, inner, false).unwrap();
    world.digest(program, usize::MAX).unwrap();
    world.reserve(mount, directory, Reach::Directory).unwrap();
    for inode in [directory, file, inner] {
        assert!(!world.is_valid(program, inode, LeaseMode::Read));
        assert!(world.refuses(program, &[read(inode)]));
    }
    world.run(program, Op::Write { inode: below, value: 3 }).unwrap();
    assert!(world.is_valid(program, below, LeaseMode::Write) && !world.refuses(program, &[write(below)]));
    // A lease on everything below the inner directory would cover that file, too.
    assert_eq!(world.word(program, below).scope, LeaseScope::Node);
    // A file that moves out is free for all sessions; a file that moves in is not.
    world.run(mount, Op::Rename { inode: file, from: directory, to: ROOT }).unwrap();
    assert_eq!(world.read(program, file), Ok(0));
    world.run(mount, Op::Rename { inode: file, from: ROOT, to: directory }).unwrap();
    world.digest(mount, usize::MAX).unwrap();
    assert!(!world.is_valid(program, file, LeaseMode::Read) && world.refuses(program, &[read(file)]));
}

#[test]
fn reservation_of_all_covers_every_inode_until_it_ends() {
    let mut world = world(quick());
    let (mount, program) = (world.begin(), world.begin());
    let directory = world.make(program, ROOT, true).unwrap();
    let file = world.make(program, directory, false).unwrap();
    world.digest(program, usize::MAX).unwrap();
    world.reserve(mount, ROOT, Reach::All).unwrap();
    for inode in [ROOT, directory, file] {
        assert!(!world.is_valid(program, inode, LeaseMode::Read) && world.refuses(program, &[read(inode)]));
    }
    assert!(!world.refuses(mount, &[write(file)]));
    world.free_reserved(mount, None);
    assert_eq!(world.read(program, file), Ok(0));
}

#[test]
fn lease_on_reserved_inode_is_not_evicted() {
    let mut world = world(Limits { entries_per_session_max: 8, ..quick() });
    let (mount, other) = (world.begin(), world.begin());
    let directories: Vec<_> = (0..20).map(|_| world.make(other, ROOT, true).unwrap()).collect();
    let file = world.make(other, directories[0], false).unwrap();
    world.digest(other, usize::MAX).unwrap();
    world.reserve(mount, file, Reach::Inode).unwrap();
    assert_eq!(world.read(mount, file), Ok(0));
    for directory in &directories[1..] {
        world.read(mount, *directory).unwrap();
    }
    assert!(world.is_valid(mount, file, LeaseMode::Write));
}
