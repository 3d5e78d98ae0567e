//! Crash enumeration: a script of appends, stalls, seals and commits runs on memory that knows what a crash may leave;
//! at every persist point, images are recovered and compared with what the script did; some of the recovered logs go
//! on, and crash again.

use std::sync::{Arc, Mutex};

use ashlar_pmem::{CrashMedium, CrashState, CrashTwin, Persistent};
use ashlar_types::{LogPosition, SealCount};

use super::{GENERATION, KEY, Random, records};
use crate::append::Reserved;
use crate::layout::{HEAD_AT, RING_AT, SLOTS_AT, TAIL_AT};
use crate::pins::Pin;
use crate::record::{HEADER_BYTES, UNIT_BYTES, units_for};
use crate::slots::Undecided;
use crate::{AppendError, Bug, Log};

type Twin = Arc<CrashTwin>;

/// The script's actions so far.
#[derive(Clone, Default)]
struct Story {
    /// Records in order: those that were appended, and last, perhaps, the one whose append is under way.
    history: Vec<(LogPosition, Vec<u8>)>,
    /// How many of them a crash must not lose.
    durable: usize,
    /// The position that the metadata store has.
    committed: LogPosition,
    /// The body of the append under way.
    under_way: Option<Vec<u8>>,
    /// Reserved slots, by their starts, with their lengths: what is appended there after a recovery is made as long, so
    /// that whatever stands behind it is in the right place.
    slots: Vec<(LogPosition, u64)>,
}

#[derive(Default)]
struct Tally {
    images: u64,
    second_images: u64,
    voids: u64,
    laps: u64,
    violation: Option<String>,
}

#[derive(Clone, Copy)]
struct Setup {
    medium: CrashMedium,
    bug: Bug,
    seed: u64,
    ring_bytes: u64,
    steps: u64,
    images_per_point: usize,
}

fn scrambled(twin: CrashTwin) -> Twin {
    twin.scramble(TAIL_AT..TAIL_AT + 8);
    twin.scramble(SLOTS_AT..RING_AT);
    twin.into()
}

/// Compares a recovered log with the story; gives the history that survived.
fn compare(log: &Log<Twin>, end: LogPosition, story: &Story) -> Result<Vec<(LogPosition, Vec<u8>)>, String> {
    let found = records(log, story.committed, end).map_err(|error| format!("after recovery: {error}"))?;
    let first = story.history.iter().filter(|(position, _)| *position < story.committed).count();
    let expected = &story.history[first..];
    for (index, record) in found.iter().enumerate() {
        let fits = match expected.get(index) {
            Some((position, body)) => *position == record.position && *body == record.body,
            None => index == expected.len() && story.under_way.as_ref() == Some(&record.body),
        };
        if !fits {
            return Err(format!("record {} at {} was never appended there", first + index, record.position));
        }
    }
    if first + found.len() < story.durable {
        return Err(format!("{} records were durable and {} survived", story.durable, first + found.len()));
    }
    let survivors = found.into_iter().map(|record| (record.position, record.body));
    Ok(story.history[..first].iter().cloned().chain(survivors).collect())
}

/// Recovers one image and checks it; `again` asks for a second run and crash on it.
fn examine(setup: Setup, image: &[u8], story: &Story, again: bool, tally: &mut Tally) -> Result<(), String> {
    tally.images += 1;
    let twin = scrambled(CrashTwin::from_image(setup.medium, image));
    let (log, end) =
        Log::recover_with(Arc::clone(&twin), story.committed, setup.bug).map_err(|error| error.to_string())?;
    let history = compare(&log, end, story)?;
    if !again {
        return Ok(());
    }
    let next = Story { durable: history.len(), history, under_way: None, ..story.clone() };
    let second: Arc<Mutex<(Story, Tally)>> = Arc::new(Mutex::new((next, Tally::default())));
    let shared = Arc::clone(&second);
    let last = Setup { images_per_point: setup.images_per_point.min(12), ..setup };
    twin.on_persist(Box::new(move |twin| {
        let (story, tally) = &mut *shared.lock().unwrap();
        look(last, &twin.state(), story, tally, false);
    }));
    for round in 0..2u8 {
        let begin = log.tail();
        let units = story.slots.iter().rev().find(|(start, _)| *start == begin).map_or(9, |(_, units)| *units);
        let body = vec![0xf0 + round; (units * UNIT_BYTES - HEADER_BYTES) as usize];
        second.lock().unwrap().0.under_way = Some(body.clone());
        match log.append(log.seal_count(), 1, &[&body]) {
            Ok(appended) => record_append(&mut second.lock().unwrap().0, appended.position, body, setup.medium),
            Err(AppendError::Full { .. }) => second.lock().unwrap().0.under_way = None,
            Err(error) => return Err(format!("append after recovery: {error}")),
        }
    }
    twin.stop_observing();
    let (_, found) = &*second.lock().unwrap();
    tally.second_images += found.images;
    found.violation.clone().map_or(Ok(()), |violation| Err(format!("second crash: {violation}")))
}

fn record_append(story: &mut Story, position: LogPosition, body: Vec<u8>, medium: CrashMedium) {
    story.history.push((position, body));
    story.under_way = None;
    if medium == CrashMedium::Words {
        story.durable = story.history.len();
    }
}

/// Recovers images of a state, and keeps the first violation.
fn look(setup: Setup, state: &CrashState, story: &Story, tally: &mut Tally, again: bool) {
    if tally.violation.is_some() {
        return;
    }
    let point = state.persist_points();
    for (index, image) in state.crash_images(setup.seed ^ point, setup.images_per_point).enumerate() {
        let again = again && (index as u64 + point) % 16 < 2;
        if let Err(violation) = examine(setup, &image, story, again, tally) {
            tally.violation = Some(format!("seed {}, persist point {point}, image {index}: {violation}", setup.seed));
            return;
        }
    }
}

/// A slot whose owner is stopped.
struct Stalled<'a> {
    reserved: Reserved,
    body: Vec<u8>,
    _pin: Pin<'a>,
}

struct Script<'a> {
    setup: Setup,
    log: &'a Log<Twin>,
    shared: &'a Mutex<(Story, Tally)>,
    random: Random,
    stalled: Vec<Stalled<'a>>,
    body_bytes_max: u64,
}

impl Script<'_> {
    fn body(&mut self) -> Vec<u8> {
        let length = 1 + self.random.below(self.body_bytes_max);
        // A few values only, so that stale and fresh bytes are often alike.
        let value = self.random.below(3) as u8;
        (0..length).map(|i| value.wrapping_add((i % 5) as u8)).collect()
    }

    fn step(&mut self) {
        match self.random.below(10) {
            0..=4 => self.append(),
            5 => self.stall(),
            6 => self.wake(),
            7 => self.seal(),
            8 => self.commit(),
            _ => self.write_back(),
        }
    }

    fn append(&mut self) {
        let body = self.body();
        self.shared.lock().unwrap().0.under_way = Some(body.clone());
        let begin = self.log.tail();
        let result = self.log.append(self.log.seal_count(), 1, &[&body]);
        let (story, _) = &mut *self.shared.lock().unwrap();
        match result {
            Ok(appended) => {
                story.slots.push((begin, units_for(body.len() as u64)));
                record_append(story, appended.position, body, self.setup.medium);
            }
            Err(AppendError::Full { .. }) => story.under_way = None,
            Err(error) => panic!("append: {error}"),
        }
    }

    fn stall(&mut self) {
        if self.stalled.len() == 3 {
            return self.wake();
        }
        let body = self.body();
        let units = units_for(body.len() as u64);
        let pin = self.log.pins.pin(|| self.log.memory().load_u64(HEAD_AT)).unwrap().unwrap();
        let Ok(reserved) = self.log.reserve(self.log.seal_count(), units, &pin) else { return };
        // Stopped before it stored anything, or after all but its mark.
        if self.random.below(2) == 0 {
            self.log.fill(&reserved, 1, body.len() as u64, &[&body]).unwrap();
        }
        self.shared.lock().unwrap().0.slots.push((reserved.start, units));
        self.stalled.push(Stalled { reserved, body, _pin: pin });
    }

    /// A stopped owner goes on: it fills its slot, whatever has become of it, and finds out.
    fn wake(&mut self) {
        if self.stalled.is_empty() {
            return;
        }
        let index = self.random.below(self.stalled.len() as u64) as usize;
        let Stalled { reserved, body, _pin } = self.stalled.remove(index);
        self.log.fill(&reserved, 1, body.len() as u64, &[&body]).unwrap();
        // Void it first if it is still open: its append would be a second one under way.
        self.log.settle(reserved.slot.number, Undecided::Void).unwrap();
        assert!(!self.log.commit(&reserved).unwrap());
        self.shared.lock().unwrap().1.voids += 1;
    }

    fn seal(&mut self) {
        let before = self.log.seal_count();
        let (after, bound) = self.log.seal().unwrap();
        assert_eq!(after, SealCount(before.0.wrapping_add(1)));
        assert_eq!(bound, self.log.tail());
    }

    /// Acts as SharedFS does: sync, apply, commit in the metadata store, move the head.
    fn commit(&mut self) {
        let end = self.log.settled().unwrap();
        self.log.memory().sync().unwrap();
        {
            let (story, tally) = &mut *self.shared.lock().unwrap();
            let found = records(self.log, story.committed, end);
            let expected = story.history.iter().filter(|(position, _)| *position >= story.committed && *position < end);
            let alike = found.as_ref().is_ok_and(|found| {
                found.iter().map(|record| (record.position, &record.body)).eq(expected.map(|(p, body)| (*p, body)))
            });
            if !alike && tally.violation.is_none() {
                tally.violation = Some(format!("the settled range up to {end} is not what was appended: {found:?}"));
            }
            story.durable = story.history.len();
            story.committed = end;
            tally.laps = end.0 / self.setup.ring_bytes;
        }
        self.log.release(end);
        self.log.set_head(end);
    }

    fn write_back(&mut self) {
        let pages = self.log.memory().len() / 4096;
        let page = self.random.below(pages);
        if self.setup.medium == CrashMedium::Pages {
            self.log.memory().write_back_page(page as usize);
        }
    }
}

fn enumerate(setup: Setup) -> Tally {
    let twin = scrambled(CrashTwin::new(setup.medium, (RING_AT + setup.ring_bytes) as usize));
    let mut log = Log::format_with_key(Arc::clone(&twin), GENERATION, KEY).unwrap();
    log.bug = setup.bug;
    let shared = Arc::new(Mutex::new((Story::default(), Tally::default())));
    let observed = Arc::clone(&shared);
    twin.on_persist(Box::new(move |twin| {
        let (story, tally) = &mut *observed.lock().unwrap();
        look(setup, &twin.state(), story, tally, true);
    }));
    let body_bytes_max = if setup.medium == CrashMedium::Words { 70 } else { log.body_bytes_max() };
    let random = Random(setup.seed);
    let mut script = Script { setup, log: &log, shared: &shared, random, stalled: Vec::new(), body_bytes_max };
    for _ in 0..setup.steps {
        script.step();
        if shared.lock().unwrap().1.violation.is_some() {
            break;
        }
    }
    drop(script);
    twin.stop_observing();
    std::mem::take(&mut shared.lock().unwrap().1)
}

const WORDS: Setup =
    Setup { medium: CrashMedium::Words, bug: Bug::None, seed: 0, ring_bytes: 1024, steps: 60, images_per_point: 40 };
const PAGES: Setup = Setup { medium: CrashMedium::Pages, ring_bytes: 3 * 4096, images_per_point: 32, ..WORDS };

fn all_is_well(setup: Setup, seeds: std::ops::Range<u64>) {
    let mut total = Tally::default();
    for seed in seeds.clone() {
        let tally = enumerate(Setup { seed, ..setup });
        assert_eq!(tally.violation, None);
        total.images += tally.images;
        total.second_images += tally.second_images;
        total.voids += tally.voids;
        total.laps += tally.laps;
    }
    println!(
        "{:?}: {} crash images recovered, and {} of a second crash; {} late owners, {} laps of the ring",
        setup.medium, total.images, total.second_images, total.voids, total.laps
    );
    assert!(total.images > 1000 && total.second_images > 1000 && total.voids > 5 && total.laps > 3);
}

#[test]
fn every_crash_on_persistent_memory_keeps_a_prefix() {
    all_is_well(WORDS, 0..12);
}

#[test]
fn every_power_loss_on_disk_keeps_a_prefix() {
    all_is_well(PAGES, 100..112);
}

#[test]
#[ignore = "minutes: the same with many more scripts"]
fn crashes_at_length() {
    all_is_well(Setup { steps: 100, images_per_point: 60, ..WORDS }, 1000..1300);
    all_is_well(Setup { steps: 100, images_per_point: 60, ..PAGES }, 2000..2300);
}

/// The checkers above must find each of the faults that can be planted.
fn is_caught(setup: Setup) {
    let found = (0..40).find_map(|seed| enumerate(Setup { seed, images_per_point: 24, ..setup }).violation);
    println!("{:?} on {:?}: {found:?}", setup.bug, setup.medium);
    assert!(found.is_some(), "{:?} was not noticed", setup.bug);
}

#[test]
fn a_missing_flush_is_caught() {
    is_caught(Setup { bug: Bug::SkipFlush, ..WORDS });
}

#[test]
fn a_missing_checksum_is_caught() {
    is_caught(Setup { bug: Bug::SkipChecksum, ..WORDS });
    is_caught(Setup { bug: Bug::SkipChecksum, ..PAGES });
}

#[test]
fn an_append_that_returns_too_early_is_caught() {
    is_caught(Setup { bug: Bug::SkipOrder, ..WORDS });
}

#[test]
fn a_recovery_that_keeps_the_generation_is_caught() {
    is_caught(Setup { bug: Bug::SkipGeneration, ..WORDS });
}

#[test]
fn a_mark_before_the_decision_is_caught() {
    is_caught(Setup { bug: Bug::MarkFirst, ..WORDS });
    is_caught(Setup { bug: Bug::MarkFirst, ..PAGES });
}

#[test]
fn space_that_a_late_owner_still_writes_to_is_caught() {
    is_caught(Setup { bug: Bug::IgnorePins, ..WORDS });
}
