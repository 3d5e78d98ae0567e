//! Many appenders, and SharedFS sealing and digesting meanwhile.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use ashlar_pmem::{Mapping, Medium, Persistent};
use ashlar_types::{LogPosition, SealCount};

use super::{GENERATION, Random, mappings};
use crate::layout::HEAD_AT;
use crate::record::units_for;
use crate::{AppendError, Appended, Damaged, Log};

const THREADS: u64 = 4;

impl<M: Persistent> Log<M> {
    /// An append whose thread is stopped for a while after it has reserved, and again after it has filled. Once,
    /// without trying again: none where the slot was voided.
    pub(crate) fn append_slowly(
        &self,
        seal: SealCount,
        kind: u8,
        body: &[u8],
        pause: impl Fn(),
    ) -> Result<Option<Appended>, AppendError> {
        let head = || self.memory.load_u64(HEAD_AT).map_err(AppendError::from);
        let pin = self.pins.pin(head)?.unwrap();
        let reserved = self.reserve(seal, units_for(body.len() as u64), &pin)?;
        pause();
        let filled = self.fill(&reserved, kind, body.len() as u64, &[body])?;
        pause();
        if !filled || !self.commit(&reserved)? {
            self.settle(reserved.slot.number, crate::slots::Undecided::Void)?;
            return Ok(None);
        }
        self.settle_before(reserved.slot.number)?;
        let crate::append::Reserved { start, record, end, .. } = reserved;
        Ok(Some(Appended { position: start, end, body: record.plus(24) }))
    }
}

/// The events that the appenders report.
#[derive(Default)]
struct Story {
    /// Appends that returned: position, by the number that stands in the body.
    returned: BTreeMap<u64, (LogPosition, SealCount)>,
    /// Appends that did not happen.
    refused: BTreeSet<u64>,
}

fn body_of(number: u64) -> Vec<u8> {
    let length = 8 + (number.wrapping_mul(0x9e37_79b9) >> 7) % if number % 5 == 0 { 1500 } else { 200 };
    number.to_le_bytes().into_iter().chain((8..length).map(|i| (i ^ number) as u8)).collect()
}

fn append_many(log: &Log<Mapping>, thread: u64, count: u64, last_end: &AtomicU64, story: &Mutex<Story>) {
    let mut random = Random(thread);
    let (mut done, mut number) = (0, thread << 32);
    while done < count {
        number += 1;
        let seal = log.seal_count();
        let body = body_of(number);
        let slow = random.below(200) == 0;
        let result = if slow {
            let pause = Duration::from_micros(random.below(600));
            log.append_slowly(seal, thread as u8, &body, || std::thread::sleep(pause))
        } else {
            log.append(seal, thread as u8, &[&body[..5], &body[5..]]).map(Some)
        };
        match result {
            Ok(Some(appended)) => {
                last_end.fetch_max(appended.end.0, Ordering::SeqCst);
                story.lock().unwrap().returned.insert(number, (appended.position, seal));
                done += 1;
            }
            Ok(None) | Err(AppendError::Sealed | AppendError::Full { .. }) => {
                story.lock().unwrap().refused.insert(number);
                std::thread::yield_now();
            }
            Err(error) => panic!("append failed: {error}"),
        }
    }
}

/// The records that SharedFS has found.
#[derive(Default)]
struct Found {
    records: Vec<(LogPosition, u64)>,
    seals: BTreeMap<SealCount, LogPosition>,
}

fn digest(log: &Log<Mapping>, last_end: &AtomicU64, random: &mut Random, found: &mut Found) -> Result<(), Damaged> {
    let seen = last_end.load(Ordering::SeqCst);
    let to = if random.below(3) == 0 {
        let (count, bound) = log.seal()?;
        assert!(found.seals.insert(count, bound).is_none());
        bound
    } else {
        log.settled()?
    };
    assert!(to.0 >= seen, "an append that had returned lies behind the settled end {to}: {seen}");
    let mut scanner = log.scanner(log.head(), to);
    while let Some(record) = scanner.next() {
        let record = record.unwrap();
        let number = u64::from_le_bytes(record.body[..8].try_into().unwrap());
        assert_eq!(record.body, body_of(number));
        found.records.push((record.position, number));
    }
    log.set_head(to);
    Ok(())
}

fn run(medium: Medium, seed: u64, ring_bytes: u64, count: u64) {
    let [session, daemon] = mappings(ring_bytes, medium);
    let session = Log::format(session, GENERATION).unwrap();
    let daemon = Log::open(daemon).unwrap();
    session.release(LogPosition(1 << 55));
    let (last_end, story, mut found) = (AtomicU64::new(0), Mutex::new(Story::default()), Found::default());
    let finished = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut random = Random(seed);
            loop {
                let last = finished.load(Ordering::SeqCst);
                digest(&daemon, &last_end, &mut random, &mut found).unwrap();
                if last {
                    return found;
                }
                std::thread::sleep(Duration::from_micros(random.below(150)));
            }
        });
        let (session, last_end, story) = (&session, &last_end, &story);
        let appenders: Vec<_> = (1..=THREADS)
            .map(|thread| scope.spawn(move || append_many(session, thread, count, last_end, story)))
            .collect();
        for appender in appenders {
            appender.join().unwrap();
        }
        finished.store(true, Ordering::SeqCst);
        let found = reader.join().unwrap();
        check(&story.lock().unwrap(), &found);
    });
}

fn check(story: &Story, found: &Found) {
    let numbers: BTreeMap<u64, LogPosition> =
        found.records.iter().map(|&(position, number)| (number, position)).collect();
    assert_eq!(numbers.len(), found.records.len(), "a record was found twice");
    for (number, &(position, seal)) in &story.returned {
        assert_eq!(numbers.get(number), Some(&position), "append {number:#x} returned and is not there");
        for (&count, &bound) in &found.seals {
            assert_eq!(count > seal, position < bound, "append {number:#x} is on the wrong side of seal {count}");
        }
    }
    for number in &story.refused {
        assert!(!numbers.contains_key(number), "append {number:#x} failed and is there");
    }
    assert_eq!(numbers.len(), story.returned.len());
    assert!(!story.refused.is_empty() && !found.seals.is_empty(), "nothing was contended, so nothing was shown");
    let mut last = BTreeMap::new();
    for (position, number) in &found.records {
        let earlier = last.insert(number >> 32, (*position, *number));
        assert!(earlier.is_none_or(|(p, n)| p < *position && n < *number), "a thread's records are out of order");
    }
}

#[test]
fn appenders_and_sealing_daemon_agree_on_memory() {
    run(Medium::MEMORY, 1, 16 << 10, 4000);
    run(Medium::MEMORY, 2, 256 << 10, 4000);
}

#[test]
fn appenders_and_sealing_daemon_agree_on_emulated_pmem() {
    run(Medium::emulated_pmem(), 3, 32 << 10, 4000);
}

#[test]
fn nested_append_passes_the_append_it_interrupts() {
    let [session, daemon] = mappings(4096, Medium::MEMORY);
    let session = Log::format(session, GENERATION).unwrap();
    let daemon = Log::open(daemon).unwrap();
    let seal = session.seal_count();
    // Acts as a signal handler in the middle of its own thread's append.
    let outer = session.append_slowly(seal, 1, b"outer", || {
        session.append(seal, 1, &[b"inner"]).unwrap();
    });
    assert_eq!(outer, Ok(None));
    let bodies: Vec<_> = daemon.scan(LogPosition(0), daemon.settled().unwrap()).map(|r| r.unwrap().body).collect();
    assert_eq!(bodies, [b"inner", b"inner"]);
}

#[test]
fn stopped_appender_delays_neither_settled_end_nor_seal() {
    let [session, daemon] = mappings(4096, Medium::MEMORY);
    let session = Log::format(session, GENERATION).unwrap();
    let daemon = Log::open(daemon).unwrap();
    let seal = session.seal_count();
    let first = session.append(seal, 1, &[b"first"]).unwrap();
    let outcome = session.append_slowly(seal, 1, b"stopped", || {
        if session.seal_count() == seal {
            assert_eq!(daemon.settled().unwrap(), first.end);
            let (count, bound) = daemon.seal().unwrap();
            assert_eq!(count, session.seal_count());
            assert!(bound > first.end);
            assert_eq!(daemon.scan(LogPosition(0), bound).count(), 1);
        }
    });
    assert_eq!(outcome, Ok(None));
    assert_eq!(session.append(seal, 1, &[b"late"]), Err(AppendError::Sealed));
}

/// Once a log is sealed under a lower limit, no append goes behind both, whatever appends were under way.
#[test]
fn lowered_limit_holds_from_the_next_seal_on() {
    let [session, daemon] = mappings(16 << 10, Medium::MEMORY);
    let session = Log::format(session, GENERATION).unwrap();
    let daemon = Log::open(daemon).unwrap();
    let is_over = AtomicBool::new(false);
    let limited = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    match session.append(session.seal_count(), 1, &[&[7; 40]]) {
                        Ok(appended) => session.release(appended.end),
                        Err(AppendError::Limited { .. }) => _ = limited.fetch_add(1, Ordering::Relaxed),
                        Err(AppendError::Sealed | AppendError::Full { .. }) => {}
                        Err(error) => panic!("{error}"),
                    }
                }
            });
        }
        for round in 0..2000 {
            let limit = daemon.tail().plus(64 * (round % 3));
            daemon.set_limit(Some(limit));
            let (_, sealed) = daemon.seal().unwrap();
            let bound = limit.max(sealed);
            for _ in 0..50 {
                assert!(daemon.tail() <= bound, "an append went behind {bound}");
                std::hint::spin_loop();
            }
            daemon.set_head(daemon.settled().unwrap());
            daemon.set_limit(Some(bound.plus(2000)));
            std::thread::yield_now();
        }
        is_over.store(true, Ordering::Relaxed);
    });
    assert!(limited.load(Ordering::Relaxed) > 0, "no append was limited, so nothing was shown");
}
