//! Random operations of random sessions on a random tree.

use std::collections::BTreeSet;

use ashlar_types::{InodeId, LeaseMode, LeaseScope, SessionId, WantedLease};
use proptest::prelude::*;

use super::world::{Check, Op, Plant, World};
use crate::{Limits, Reach, RequestedLease};

const SESSIONS_MAX: usize = 4;

/// Limits so small that every one of them is reached.
fn tight(hold_us: u64) -> Limits {
    let few = Limits {
        entries_per_session_max: 8,
        widen_after_entries: 2,
        widen_min_age_us: 3,
        table_slots: 10,
        splits_max: 2,
        marks_max: 4,
        ..Limits::default()
    };
    Limits { hold_us, passive_ttl_us: 30, ..few }
}

fn pick<T: Copy>(choices: &[T], by: u64) -> Option<T> {
    (!choices.is_empty()).then(|| choices[by as usize % choices.len()])
}

fn step(world: &mut World, step: u64) -> Check {
    let (action, by, first, second) = (step % 32, step >> 8 & 0xff, step >> 16 & 0xffff, step >> 32 & 0xffff);
    if world.sessions().len() < 2 {
        world.begin();
    }
    let Some(session) = pick(&world.sessions(), by) else { return Ok(()) };
    let Some(directory) = pick(&world.inodes(Some(true)), first) else { return Ok(()) };
    let any = pick(&world.inodes(None), second).unwrap_or(InodeId::ROOT);
    let file = pick(&world.inodes(Some(false)), second);
    world.after_seal = if step >> 48 & 1 == 0 { late(world, session, file.unwrap_or(any), step) } else { Vec::new() };
    match action {
        0 if world.refuses(session, &[wanted(any, LeaseScope::Node, by)]) => {}
        2..5 | 29 if world.refuses(session, &[wanted(any, LeaseScope::Files, by)]) => {}
        0 => world.read_by(session, wanted(any, LeaseScope::Node, by)).map(|_| ())?,
        1 => {
            let is_joined = world.join_readers(session, any)?;
            world.met.extend(is_joined.then(|| "join".to_owned()));
        }
        2..5 => world.read_by(session, wanted(any, LeaseScope::Files, by)).map(|_| ())?,
        5..9 => world.run(session, Op::Write { inode: any, value: step })?,
        9..13 => world.make(session, directory, action == 9).map(|_| ())?,
        13..16 => rename(world, session, any, directory)?,
        16..18 => {
            if let Some(inode) = file.filter(|file| !world.state(*file).parents.contains(&directory)) {
                world.run(session, Op::Link { inode, to: directory })?;
            }
        }
        18..20 => {
            let is_empty = world.state(any).children.is_empty();
            if let Some(from) = world.state(any).parents.first().copied().filter(|_| is_empty) {
                world.run(session, Op::Unlink { inode: any, from, keep: action == 18 })?;
            }
        }
        20..22 => world.digest(session, first as usize % 4)?,
        22 => world.release(session, any)?,
        23 if by % 4 == 0 => world.end(session)?,
        24 if world.sessions().len() < SESSIONS_MAX => {
            world.begin();
        }
        25 if by % 4 == 0 => world.restart()?,
        26 => world.commit(),
        27 | 28 => {
            world.now_us += first % 16;
            world.manager.handle_time(world.now_us);
            world.perform(None)?;
        }
        29 => world.look_up_to_write(session, any)?,
        // Half of the sessions are mounts.
        30 if session.0 % 2 == 0 => match by % 4 {
            0 => world.free_reserved(session, Some(any)),
            1 if any != InodeId::ROOT && world.state(any).is_directory => {
                world.reserve(session, any, Reach::Directory)?
            }
            _ => world.reserve(session, any, Reach::Inode)?,
        },
        _ => world.read_kernel(session, any)?,
    }
    world.check_reserved()?;
    world.check()
}

/// Returns operations of the other sessions, to run just when their logs were sealed.
fn late(world: &World, asking: SessionId, inode: InodeId, value: u64) -> Vec<(SessionId, Op)> {
    let is_linked = world.state(inode).is_directory || world.state(inode).parents.contains(&InodeId::ROOT);
    let link = (!is_linked).then_some(Op::Link { inode, to: InodeId::ROOT });
    let ops = link.into_iter().chain([Op::Write { inode, value }]);
    let others: Vec<_> = world.sessions().into_iter().filter(|session| *session != asking).collect();
    ops.flat_map(|op| others.iter().map(move |session| (*session, op))).collect()
}

fn wanted(inode: InodeId, scope: LeaseScope, by: u64) -> RequestedLease {
    RequestedLease { lease: WantedLease { inode, mode: LeaseMode::Read, scope }, may_widen: by & 0x80 == 0 }
}

fn rename(world: &mut World, session: SessionId, inode: InodeId, to: InodeId) -> Check {
    let parents = world.state(inode).parents.clone();
    match parents.first().copied() {
        Some(from) if !parents.contains(&to) && world.can_move(inode, to) => {
            world.run(session, Op::Rename { inode, from, to })
        }
        _ => Ok(()),
    }
}

fn run(limits: Limits, plant: Plant, steps: &[u64]) -> Check {
    run_in(&mut World::new(limits, plant), steps)
}

fn run_in(world: &mut World, steps: &[u64]) -> Check {
    for each in steps {
        step(world, *each)?;
    }
    Ok(())
}

/// Makes a world whose tables begin with little room.
fn small_tables(hold_us: u64) -> World {
    let limits = Limits {
        entries_per_session_max: 32,
        widen_after_entries: 2,
        widen_min_age_us: 3,
        widen_takes_max: 3,
        table_slots: 128,
        hold_us,
        ..Limits::default()
    };
    let mut world = World::new(limits, Plant::None);
    world.first_slots = Some(16);
    world
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_read_sees_the_last_write(steps in prop::collection::vec(any::<u64>(), 1..300)) {
        run(Limits { hold_us: 0, ..Limits::default() }, Plant::None, &steps).map_err(TestCaseError::fail)?;
    }

    #[test]
    fn every_read_sees_the_last_write_at_the_limits(
        steps in prop::collection::vec(any::<u64>(), 1..300),
        hold_us in 0_u64..9,
    ) {
        run(tight(hold_us), Plant::None, &steps).map_err(TestCaseError::fail)?;
    }

    #[test]
    fn every_read_sees_the_last_write_while_tables_grow(
        steps in prop::collection::vec(any::<u64>(), 1..300),
        hold_us in 0_u64..9,
    ) {
        run_in(&mut small_tables(hold_us), &steps).map_err(TestCaseError::fail)?;
    }
}

/// Returns numbers from a seed, so that the canaries run the same steps every time.
fn steps_of(seed: u64) -> Vec<u64> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.wrapping_mul(0x2545_f491_4f6c_dd1d)
    };
    (0..300).map(|_| next() >> 8).collect()
}

#[test]
fn random_steps_meet_every_command_and_reason() {
    let mut met = BTreeSet::new();
    for seed in 0..100 {
        let mut world = World::new(tight(seed % 3), Plant::None);
        for each in steps_of(seed) {
            step(&mut world, each).unwrap();
        }
        met.append(&mut world.met);
    }
    let all = [
        "after a seal",
        "attach Some(Read)",
        "attach Some(Write)",
        "attach beyond the table",
        "downgrade",
        "join",
        "revoke Conflict",
        "revoke Ended",
        "revoke Evicted",
        "revoke Expired",
        "revoke Folded",
        "revoke Gone",
        "revoke Released",
        "revoke TooManyHoles",
        "revoke files Conflict",
        "revoke files Ended",
        "revoke files Evicted",
        "revoke files Expired",
        "revoke files Folded",
        "revoke files Released",
        "revoke files TooManyHoles",
        "serve",
        "split None",
        "split Some((Files, false))",
        "split Some((Files, true))",
        "split Some((Node, false))",
        "split Some((Node, true))",
        "split Some((Subtree, false))",
        "superseded",
        "wait",
    ];
    assert_eq!(met.iter().map(String::as_str).collect::<Vec<_>>(), all);
}

/// A reader's lease was granted and released before the kernel had the answer.
#[test]
fn answer_after_its_lease_is_not_cached() {
    let steps = [
        27037950990400298,
        10250863138518294711,
        198519002417386,
        1632546493779376343,
        14131881359896847992,
        12112336013706139928,
        1824949444961745225,
        2194786242774470793,
        17355949234978702867,
        769571979465304510,
        17791143818336958090,
        13941049540442777610,
        7397228853398954313,
        6664770534661142397,
        5545200747367005194,
        10574555980556911086,
        11657818970683245570,
        8055800291152968043,
        4342172321887440373,
        16205045811460260264,
        6207927468371267737,
        1640825487729221260,
        4551516684862492745,
        15825498615161769292,
        5476724695714965254,
        1010485174349413471,
    ];
    assert_eq!(run(Limits { hold_us: 0, ..Limits::default() }, Plant::None, &steps), Ok(()));
}

fn is_caught(plant: Plant) -> bool {
    let limits = Limits { hold_us: 0, ..Limits::default() };
    (0..400).any(|seed| run(limits, plant, &steps_of(seed)).is_err())
}

#[test]
fn canary_unreported_move_is_caught() {
    assert!(is_caught(Plant::MoveNotReported));
}

#[test]
fn canary_unreported_new_inode_is_caught() {
    assert!(is_caught(Plant::MakeNotReported));
}

#[test]
fn canary_unapplied_log_is_caught() {
    assert!(is_caught(Plant::LogNotApplied));
}

#[test]
fn canary_unwritten_split_is_caught() {
    assert!(is_caught(Plant::SplitNotWritten));
}

#[test]
fn canary_kernel_cache_not_invalidated_is_caught() {
    assert!(is_caught(Plant::KernelNotInvalidated));
}

#[test]
fn canary_lost_dependencies_are_caught() {
    assert!(is_caught(Plant::DependenciesLost));
}

#[test]
fn canary_steps_are_clean_without_a_bug() {
    assert_eq!((0..100).try_for_each(|seed| run(tight(seed % 3), Plant::None, &steps_of(seed))), Ok(()));
}
