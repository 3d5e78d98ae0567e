//! Crash enumeration of digest and recovery.
//!
//! A session works ([`script`]) and SharedFS digests what it logs. These are the real log, the real apply and commit,
//! and the real store, on a machine in memory and from one seed. Crashes are tried at the persist points of all media,
//! and in the middle of commits ([`trials`]). Each try makes a second machine that the crash may leave, and starts
//! SharedFS on it. The result is compared with the session's updates:
//! * It must be a prefix of the updates, byte for byte, with all that was durable by then.
//! * The check must be clean, checksums and allocation included.
//! * No session is fenced. A log is cut only after a loss of power on a disk, which may lose the grant of a record.
//! * A second recovery, and one after a recovery that was itself cut by a crash, must end the same.
//!
//! At the end of a life the next one goes on with the machine that a crash has left.
//!
//! That the enumeration bites was tried by planting faults by hand, each alone. Caught on both media: rows written
//! before data; blocks that a committed row refers to taken for fresh and overwritten; a freed block given out before
//! the commit that freed it; the session's position committed in a transaction before that of its updates; the log's
//! head moved as a commit begins. Caught on persistent memory: no fence behind the flushes of data; checksums not
//! flushed. Caught on disk: data segments not synced; recovery from the log's own head instead of the committed
//! position. On the other medium each of the last four does no harm, or too seldom for these scripts.
//!
//! Not caught: batches of more than one record after a loss of power, of which `tests/sessions.rs` has the case. Not
//! tried here: the order in which the daemon removes a session's files and its row, and torn pages of LMDB, which the
//! store's tests have.
#![allow(clippy::print_stdout, reason = "the number of images tried is part of the result")]

mod script;
mod trials;

use std::sync::{Arc, Mutex};

use ashlar_pmem::MediumKind;
use ashlar_sim::machine::{CrashKind, Machine, MachineObserver, MachineOptions};
use ashlar_sim::random::SimRandom;

use script::SessionScript;
use trials::{CrashSetup, Story, Tally, Trials, chooser, examine, lock};

/// Blocks of the only segment: few, so that they are soon reused.
const SEGMENT_BLOCKS: u32 = 24;

/// Runs one script with all its crashes, and returns the first violation.
fn enumerate(setup: CrashSetup) -> (Tally, Option<String>) {
    let medium = setup.medium;
    let options = MachineOptions { medium, blocks: SEGMENT_BLOCKS, lease_hold_us: 0, ring_bytes: None };
    let mut machine = Machine::new(options).expect("an arena");
    machine.start(0, None).expect("started");
    let mut random = SimRandom::new(setup.seed, 1);
    let (mut tally, mut records) = (Tally::default(), Vec::new());
    for life in 0..setup.lives {
        let before = records.len();
        let story = Arc::new(Mutex::new(Story::after(&records)));
        let mut script = SessionScript::begin(machine, records, Arc::clone(&story), random.draw());
        let trials = Trials::new(setup, script.machine.without_shared_fs(), Arc::clone(&story), random.draw());
        let trials = Arc::new(Mutex::new(trials));
        let observed = Arc::clone(&trials);
        let observer: MachineObserver = Arc::new(move || lock(&observed).see());
        script.machine.on_persist(&observer);
        for _ in 0..setup.steps {
            script.step();
            if lock(&trials).violation.is_some() {
                break;
            }
        }
        script.machine.stop_observing();
        let left = script.machine.after_crash(CrashKind::PowerLoss, &mut chooser(&mut random));
        let trials = &mut *lock(&trials);
        trials.tally.commits += script.commits;
        trials.tally.laps += script.laps();
        trials.tally.coalesced += script.coalesced();
        trials.tally.updates += (script.records.len() - before) as u64;
        let wrong = trials.violation.take().or_else(|| {
            script.check_applied().map(|wrong| format!("seed {}, life {life}: without a crash: {wrong}", setup.seed))
        });
        let survived = match wrong {
            Some(wrong) => Err(wrong),
            None => examine(trials, left, CrashKind::PowerLoss),
        };
        tally.add(&trials.tally);
        match survived {
            Ok((survived, recovered)) => {
                records = script.records[..before + survived].to_vec();
                machine = recovered;
            }
            Err(violation) => return (tally, Some(violation)),
        }
    }
    (tally, None)
}

fn all_is_well(setup: CrashSetup, seeds: std::ops::Range<u64>) {
    let mut total = Tally::default();
    for seed in seeds {
        let (tally, violation) = enumerate(CrashSetup { seed, ..setup });
        assert!(violation.is_none(), "{}", violation.unwrap_or_default());
        total.add(&tally);
    }
    println!("{:?}: {total}", setup.medium);
    assert!(total.has_all(), "something was not tried: {total}");
}

const MEMORY: CrashSetup =
    CrashSetup { medium: MediumKind::Pmem, seed: 0, steps: 180, lives: 2, images: 4, thinness: 3 };
const DISK: CrashSetup = CrashSetup { medium: MediumKind::Disk, ..MEMORY };

#[test]
fn crash_of_digest_or_recovery_on_memory_keeps_a_prefix() {
    all_is_well(MEMORY, 0..8);
}

#[test]
fn crash_of_digest_or_recovery_on_disk_keeps_a_prefix() {
    all_is_well(DISK, 100..108);
}

#[test]
#[ignore = "minutes: the same with many more scripts"]
fn crashes_of_digest_and_recovery_at_length() {
    all_is_well(CrashSetup { images: 8, thinness: 1, ..MEMORY }, 1000..1040);
    all_is_well(CrashSetup { images: 8, thinness: 1, ..DISK }, 2000..2040);
}
