//! Memory that a faulty or hostile session has overwritten.
//!
//! SharedFS gets an answer soon, and takes nothing that it did not verify.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use ashlar_pmem::{CrashMedium, CrashTwin, Medium, Persistent};
use ashlar_types::LogPosition;

use super::{GENERATION, Random, log, mappings, records};
use crate::layout::{FENCED_AT, HEAD_AT, RING_AT, SLOTS_AT, TAIL_AT};
use crate::{Log, Record};

#[test]
fn garbage_in_any_word_gives_answers_and_no_forged_record() {
    let mut random = Random(11);
    for round in 0..300 {
        let log = log(1024);
        let mut genuine: Vec<Record> = Vec::new();
        for length in [10, 100, 40] {
            let body = vec![round as u8; length];
            log.append(log.seal_count(), 1, &[&body]).unwrap();
        }
        let end = log.settled().unwrap();
        genuine.extend(records(&log, LogPosition(0), end).unwrap());
        for _ in 0..=random.below(6) {
            let at = match random.below(4) {
                0 => TAIL_AT,
                1 => SLOTS_AT + random.below(512) * 8,
                2 => [HEAD_AT, FENCED_AT][random.below(2) as usize],
                _ => RING_AT + random.below(128) * 8,
            };
            let old = log.memory().load_u64(at).unwrap();
            let value = match random.below(4) {
                0 => random.next(),
                1 => old ^ 1 << random.below(64),
                2 => u64::MAX,
                _ => old.wrapping_add(random.below(600)),
            };
            log.memory().store_u64(at, value).unwrap();
        }
        let _ = log.append(log.seal_count(), 1, &[b"mine"]);
        let _ = (log.settled(), log.seal(), log.tail(), log.used(), log.fence_session());
        for record in log.scan(LogPosition(0), end).map_while(Result::ok) {
            assert!(genuine.contains(&record) || record.body == b"mine", "forged: {record:?}");
        }
        let image = log.memory().state().current();
        if let Ok((recovered, end)) = Log::recover(CrashTwin::from_image(CrashMedium::Words, &image), LogPosition(0)) {
            for record in records(&recovered, LogPosition(0), end).unwrap() {
                assert!(genuine.contains(&record) || record.body == b"mine", "forged: {record:?}");
            }
        }
    }
}

#[test]
fn changing_words_do_not_delay_the_daemon() {
    let [session, daemon] = mappings(4096, Medium::MEMORY);
    let log = Log::format(daemon, GENERATION).unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut random = Random(5);
            while !stop.load(Ordering::Relaxed) {
                let at = if random.below(2) == 0 { TAIL_AT } else { SLOTS_AT + random.below(512) * 8 };
                session.store_u64(at, random.next() >> random.below(64)).unwrap();
            }
        });
        let started = Instant::now();
        for _ in 0..200 {
            let _ = (log.seal(), log.settled());
        }
        stop.store(true, Ordering::Relaxed);
        assert!(started.elapsed().as_secs() < 60);
    });
}

#[test]
fn stale_user_bytes_are_not_taken_for_a_record() {
    // A user knows everything but the key. It writes a body full of records for the place where that body will lie one
    // lap later. The machine goes down when the log's end is there.
    let attacker =
        Log::format_with_key(CrashTwin::new(CrashMedium::Words, (RING_AT + 1024) as usize), GENERATION, 1).unwrap();
    attacker.release(LogPosition(1 << 40));
    let mut forged = vec![0; 176];
    for round in 0..9 {
        let appended = attacker.append(attacker.seal_count(), 1, &[&[round; 136]]).unwrap();
        attacker.set_head(appended.end);
        if appended.position.0 >= 1024 {
            let offset = (appended.position.0 % 1024) as usize;
            let mut slot = vec![0; 160];
            attacker.memory().load(RING_AT + offset as u64, &mut slot).unwrap();
            forged[..160].copy_from_slice(&slot);
            break;
        }
    }
    let victim = log(1024);
    victim.append(victim.seal_count(), 1, &[&forged]).unwrap();
    let image = victim.memory().state().current();
    let (recovered, end) =
        Log::recover(CrashTwin::from_image(CrashMedium::Words, &image), LogPosition(1024 + 24)).unwrap();
    assert_eq!(end, LogPosition(1048));
    assert_eq!(records(&recovered, LogPosition(1048), end).unwrap(), []);
}
