//! One thread, no crashes.

use std::time::Instant;

use ashlar_pmem::{Medium, Persistent};
use ashlar_types::{LogPosition, SealCount};

use super::{GENERATION, Random, log, mappings, records};
use crate::layout::{RING_AT, TAIL_AT};
use crate::record::HEADER_BYTES;
use crate::slots::Tail;
use crate::{AppendError, Log, LogOpenError};

#[test]
fn appended_records_are_scanned_and_read_in_order() {
    let log = log(4096);
    let seal = log.seal_count();
    let first = log.append(seal, 1, &[b"hello ", b"world"]).unwrap();
    let second = log.append(seal, 2, &[]).unwrap();
    let third = log.append(seal, 255, &[&[9; 900]]).unwrap();
    assert_eq!((first.position, first.end, first.body), (LogPosition(0), LogPosition(40), LogPosition(24)));
    assert_eq!(second.position, first.end);
    assert_eq!(log.settled().unwrap(), third.end);
    let found = records(&log, LogPosition(0), third.end).unwrap();
    let bodies: Vec<_> = found.iter().map(|record| (record.kind, &record.body[..])).collect();
    assert_eq!(bodies, [(1, &b"hello world"[..]), (2, b""), (255, &[9; 900])]);
    assert_eq!(found[2].body_position, third.body);
    let mut body = [0; 5];
    log.read(first.body.plus(6), &mut body).unwrap();
    assert_eq!(&body, b"world");
    assert!(log.read(LogPosition(4090), &mut [0; 7]).is_err());
    assert_eq!(records(&log, second.position, third.position).unwrap().len(), 1);
    assert_eq!(log.used(), third.end.0);
}

#[test]
fn a_write_of_128_bytes_takes_184_bytes_of_log() {
    let log = log(4096);
    let appended = log.append(log.seal_count(), 1, &[&[0; 30], &[7; 128]]).unwrap();
    assert_eq!(appended.end.0 - appended.position.0, 184);
}

#[test]
fn one_flush_and_one_fence_persist_a_small_record() {
    let log = log(4096);
    for length in [0, 128, 512] {
        let before = log.memory().state().persist_points();
        log.append(log.seal_count(), 1, &[&vec![1; length]]).unwrap();
        assert_eq!(log.memory().state().persist_points(), before + 2);
    }
}

#[test]
fn full_log_names_missing_bytes_then_takes_more_once_freed() {
    let log = log(1024);
    let seal = log.seal_count();
    let append = || log.append(seal, 1, &[&[1; 176]]);
    for _ in 0..5 {
        append().unwrap();
    }
    assert_eq!(append(), Err(AppendError::Full { needed: 200 }));
    // Either side alone frees nothing.
    log.set_head(LogPosition(200));
    assert_eq!(append(), Err(AppendError::Full { needed: 200 }));
    log.release(LogPosition(400));
    // The 24 bytes at the ring's end are skipped, since no record wraps.
    let wrapped = append().unwrap();
    assert_eq!(
        (wrapped.position, wrapped.body, wrapped.end),
        (LogPosition(1000), LogPosition(1048), LogPosition(1224))
    );
    let found = records(&log, LogPosition(200), wrapped.end).unwrap();
    assert_eq!(found.len(), 5);
    assert!(found.iter().all(|record| record.body == [1; 176]));
}

#[test]
fn records_of_every_length_survive_many_laps() {
    for medium in [Medium::MEMORY, Medium::emulated_pmem()] {
        let [session, daemon] = mappings(16384, medium);
        let session = Log::format(session, GENERATION).unwrap();
        let daemon = Log::open(daemon).unwrap();
        session.release(LogPosition(1 << 50));
        let mut random = Random(1);
        let mut from = LogPosition(0);
        for round in 0..1500u64 {
            let length = random.below(if round % 3 == 0 { session.body_bytes_max() + 1 } else { 300 });
            let body: Vec<u8> = (0..length).map(|i| (i ^ round) as u8).collect();
            let split = random.below(length + 1) as usize;
            let appended =
                session.append(session.seal_count(), round as u8, &[&body[..split], &body[split..]]).unwrap();
            let to = daemon.settled().unwrap();
            assert_eq!(to, appended.end);
            let found = records(&daemon, from, to).unwrap();
            assert_eq!(found.len(), 1);
            assert_eq!((found[0].kind, &found[0].body), (round as u8, &body));
            daemon.set_head(to);
            from = to;
        }
        assert!(from.0 > 20 * 16384);
    }
}

#[test]
fn an_old_seal_count_and_a_fence_end_appends() {
    let log = log(4096);
    let old = log.seal_count();
    let first = log.append(old, 1, &[b"a"]).unwrap();
    let (count, bound) = log.seal().unwrap();
    assert_eq!((count, bound), (SealCount(old.0 + 1), first.end));
    assert_eq!(log.append(old, 1, &[b"b"]), Err(AppendError::Sealed));
    let second = log.append(count, 1, &[b"c"]).unwrap();
    assert_eq!(second.position, bound);
    log.fence_session().unwrap();
    assert_eq!(log.append(count, 1, &[b"d"]), Err(AppendError::Fenced));
    assert_eq!(log.append(log.seal_count(), 1, &[b"d"]), Err(AppendError::Fenced));
    assert!(log.is_fenced());
    assert_eq!(records(&log, LogPosition(0), log.settled().unwrap()).unwrap().len(), 2);
}

#[test]
fn slot_and_seal_numbers_wrap() {
    let log = log(4096);
    // A table as it stands after 2^32 − 3 slots, none of them unsettled.
    let near = Tail { number: 0u32.wrapping_sub(3), seal: SealCount(u32::MAX) };
    log.reset_slots(near, LogPosition(0)).unwrap();
    log.release(LogPosition(1 << 50));
    let mut from = LogPosition(0);
    for round in 0..600u32 {
        let appended = log.append(log.seal_count(), 1, &[&round.to_le_bytes()]).unwrap();
        if round % 7 == 0 {
            log.seal().unwrap();
        }
        let found = records(&log, from, log.settled().unwrap()).unwrap();
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].body, round.to_le_bytes());
        from = appended.end;
        log.set_head(from);
    }
    assert!(log.seal_count().0 < 100);
}

#[test]
fn only_a_log_of_this_version_is_opened() {
    let make = || log(1024).memory().state().current();
    let open = |image: &[u8]| Log::open(ashlar_pmem::CrashTwin::from_image(ashlar_pmem::CrashMedium::Words, image));
    assert!(open(&make()).is_ok());
    assert!(matches!(open(&make()[..9000]), Err(LogOpenError::TooSmall { .. })));
    for (at, check) in [(0usize, 0), (8, 1), (16, 2), (24, 2), (32, 2), (128, 2), (136, 2)] {
        let mut image = make();
        image[at] ^= 1;
        let error = open(&image).unwrap_err();
        let fits = match check {
            0 => matches!(error, LogOpenError::NotALog),
            1 => matches!(error, LogOpenError::WrongVersion { found: 0, supported: 1 }),
            _ => matches!(error, LogOpenError::DamagedHeader),
        };
        assert!(fits, "byte {at}: {error}");
    }
}

#[test]
fn record_longer_than_the_ring_is_refused() {
    let log = log(4096);
    let most = log.body_bytes_max() as usize;
    assert_eq!(most, 1000);
    assert_eq!(log.append(log.seal_count(), 1, &[&vec![1; most + 1]]), Err(AppendError::TooLong));
    assert!(log.append(log.seal_count(), 1, &[&vec![1; most]]).is_ok());
}

#[test]
fn flipped_bit_anywhere_in_a_record_is_detected() {
    // One that is verified in one piece, and one that takes several.
    for content in [&b"some content"[..], &[7; 2500]] {
        let log = log(16 << 10);
        let appended = log.append(log.seal_count(), 7, &[content]).unwrap();
        let unused = appended.end.0 - HEADER_BYTES - content.len() as u64;
        for byte in 0..appended.end.0 - unused {
            let at = RING_AT + byte / 8 * 8;
            let word = log.memory().load_u64(at).unwrap();
            log.memory().store_u64(at, word ^ (0x10 << (byte % 8 * 8))).unwrap();
            assert!(records(&log, LogPosition(0), appended.end).is_err(), "byte {byte}");
            assert!(log.verify(LogPosition(0)).is_err(), "byte {byte}");
            log.memory().store_u64(at, word).unwrap();
        }
        assert!(records(&log, LogPosition(0), appended.end).is_ok());
        assert_eq!(log.verify(LogPosition(0)), Ok(()));
        assert!(log.verify(LogPosition(4)).is_err() && log.verify(LogPosition(8)).is_err());
        assert_eq!(log.memory().load_u64(TAIL_AT).unwrap() >> 32, 1);
    }
}

/// Says what an append costs; run it in a release build: `cargo test --release -p ashlar-log -- --ignored --nocapture`.
#[test]
#[ignore = "a measurement"]
fn cost_of_an_append() {
    for (name, medium) in [("memory", Medium::MEMORY), ("emulated pmem", Medium::emulated_pmem())] {
        for length in [128usize, 4096, 65536] {
            let [memory, _] = mappings(64 << 20, medium);
            let log = Log::format(memory, GENERATION).unwrap();
            log.release(LogPosition(1 << 55));
            let (header, body) = ([1; 30], vec![5; length]);
            // One lap first, so that page faults are not measured.
            let rounds = (128 << 20) / (length as u64 + 64);
            let mut started = Instant::now();
            for round in 0..rounds * 2 {
                if round == rounds {
                    started = Instant::now();
                }
                let appended = log.append(log.seal_count(), 1, &[&header, &body]).unwrap();
                if round % 1024 == 0 || length > 10_000 {
                    log.set_head(appended.end);
                }
            }
            let ns = started.elapsed().as_nanos() as f64 / rounds as f64;
            println!("append of {length} bytes on {name}: {ns:.0} ns, {:.2} GB/s", length as f64 / ns);
        }
    }
}

#[test]
fn append_writes_nothing_beyond_the_ready_position() {
    let log = log(1024);
    log.set_ready(LogPosition(500));
    let append = || log.append(log.seal_count(), 1, &[&[1; 176]]);
    assert_eq!(append().unwrap().end, LogPosition(200));
    assert_eq!(append().unwrap().end, LogPosition(400));
    let tail = log.tail();
    assert_eq!(append(), Err(AppendError::Unready { upto: LogPosition(600) }));
    assert_eq!(log.tail(), tail, "nothing was taken");
    log.record_ready(LogPosition(900));
    log.record_ready(LogPosition(600));
    assert_eq!(append().unwrap().end, LogPosition(600));
    assert_eq!(append().unwrap().end, LogPosition(800));
    // The next record does not fit in the rest of the ring. It begins at the ring's start, which is written for the
    // second time.
    log.set_head(log.settled().unwrap());
    log.release(LogPosition(800));
    let large = || log.append(log.seal_count(), 1, &[&[2; 230]]);
    let Err(AppendError::Unready { upto }) = large() else { panic!("it is not ready") };
    assert!(upto > LogPosition(1024));
    assert_eq!(log.bytes_upto(upto), RING_AT + 1024);
    log.record_ready(upto);
    assert_eq!(large().unwrap().end, upto);
}

#[test]
fn append_goes_no_further_than_the_limit() {
    let log = log(1024);
    let append = || log.append(log.seal_count(), 1, &[&[1; 176]]);
    log.set_limit(Some(LogPosition(400)));
    assert_eq!(append().unwrap().end, LogPosition(200));
    assert_eq!(append().unwrap().end, LogPosition(400));
    let tail = log.tail();
    assert_eq!(append(), Err(AppendError::Limited { upto: LogPosition(600) }));
    assert_eq!(log.tail(), tail, "nothing was taken");
    log.set_limit(Some(LogPosition(599)));
    assert_eq!(append(), Err(AppendError::Limited { upto: LogPosition(600) }));
    log.set_limit(Some(LogPosition(600)));
    assert_eq!(append().unwrap().end, LogPosition(600));
    log.set_limit(None);
    assert_eq!(append().unwrap().end, LogPosition(800));
}
