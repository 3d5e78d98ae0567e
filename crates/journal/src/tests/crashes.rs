//! Crash enumeration: a script of appends, flushes, reuse, cuts and epochs runs on memory that knows what a crash may
//! leave. At every persist point, images are opened and compared with the script. Some of the opened journals go on,
//! with other frames of the same lengths, and crash again.

use std::sync::{Arc, Mutex};

use ashlar_pmem::{CrashMedium, CrashState, CrashTwin, Persistent};
use ashlar_types::JournalPosition;

use super::{IDENTITY, Random, Twin, bytes_between, contents, epoch, frames_from, plain, ring, twin};
use crate::layout::RING_AT;
use crate::ring::PlantedBug;
use crate::{JournalError, JournalRing, Lineage, LineageEntry};

/// The script's actions so far.
#[derive(Clone, Default)]
struct Story {
    /// All frames that were appended and not cut, by position.
    frames: Vec<(JournalPosition, Vec<u8>)>,
    /// The heads that a crash may leave: one, or two while the head is moved.
    heads: Vec<JournalPosition>,
    /// A crash must not lose frames before this position.
    durable: JournalPosition,
    /// The lengths of all frames that ever stood at a position, cut ones too.
    lengths: Vec<(JournalPosition, usize)>,
}

#[derive(Default)]
struct Tally {
    images: u64,
    second_images: u64,
    cuts: u64,
    laps: u64,
    violation: Option<String>,
}

type Shared = Arc<Mutex<(Story, Tally)>>;

#[derive(Clone, Copy)]
struct Setup {
    medium: CrashMedium,
    bug: PlantedBug,
    seed: u64,
    ring_bytes: u64,
    body_bytes_max: u64,
    steps: u64,
    images_per_point: usize,
}

/// Compares an opened journal with the story; gives the frames that survived.
fn compare(ring: &JournalRing<Twin>, story: &Story) -> Result<Vec<(JournalPosition, Vec<u8>)>, String> {
    if !story.heads.contains(&ring.head()) {
        return Err(format!("the head is at {}, and was never there", ring.head()));
    }
    let found = frames_from(ring, ring.head_cursor()).map_err(|error| format!("after opening: {error}"))?;
    let expected = story.frames.iter().filter(|(position, _)| *position >= ring.head());
    let mut survivors = Vec::new();
    for (frame, expected) in found.iter().zip(expected.map(Some).chain(std::iter::repeat(None))) {
        let position = frame.header.position;
        match (frame.content(), expected) {
            (Some(content), Some(expected)) if (position, &content) == (expected.0, &expected.1) => {
                survivors.push((position, content));
            }
            _ => return Err(format!("the frame at {position} was never appended there, or was cut")),
        }
    }
    if ring.end() < story.durable {
        return Err(format!("frames were durable up to {} and survived up to {}", story.durable, ring.end()));
    }
    Ok(survivors)
}

/// Opens one image and checks it; `again` asks for a second run and crash on it.
fn examine(setup: Setup, image: &[u8], story: &Story, again: bool, tally: &mut Tally) -> Result<(), String> {
    tally.images += 1;
    let twin: Twin = CrashTwin::from_image(setup.medium, image).into();
    let mut ring = JournalRing::open_with(Arc::clone(&twin), IDENTITY, setup.bug).map_err(|error| error.to_string())?;
    let frames = compare(&ring, story)?;
    if !again {
        return Ok(());
    }
    let heads = vec![ring.head()];
    let story = Story { durable: ring.end(), frames, heads, lengths: story.lengths.clone() };
    let shared: Shared = Arc::new(Mutex::new((story, Tally::default())));
    let observed = Arc::clone(&shared);
    let last = Setup { images_per_point: setup.images_per_point.min(6), ..setup };
    twin.on_persist(Box::new(move |twin| {
        let (story, tally) = &mut *observed.lock().unwrap();
        look(last, &twin.state(), story, tally, false);
    }));
    // A journal goes on in its epoch or in another one; checksums alone, and with the lineage, must do.
    let next = ring.lineage().last().epoch.number + 1;
    ring.begin_epoch(epoch(next)).map_err(|error| error.to_string())?;
    for round in 0..3u8 {
        let lengths = &shared.lock().unwrap().0.lengths.clone();
        let length = lengths.iter().rev().find(|(at, _)| *at == ring.end()).map_or(9, |(_, length)| *length);
        append(&mut ring, &shared, vec![0xf0 + round; length]);
        if round != 0 {
            flush(&mut ring, &shared);
        }
    }
    twin.stop_observing();
    let (_, found) = &*shared.lock().unwrap();
    tally.second_images += found.images;
    found.violation.clone().map_or(Ok(()), |violation| Err(format!("second crash: {violation}")))
}

/// Opens images of a state, and keeps the first violation.
fn look(setup: Setup, state: &CrashState, story: &Story, tally: &mut Tally, again: bool) {
    if tally.violation.is_some() {
        return;
    }
    let point = state.persist_points();
    for (index, image) in state.crash_images(setup.seed ^ point, setup.images_per_point).enumerate() {
        let again = again && (index as u64 + point) % 12 == 0;
        if let Err(violation) = examine(setup, &image, story, again, tally) {
            tally.violation = Some(format!("seed {}, persist point {point}, image {index}: {violation}", setup.seed));
            return;
        }
    }
}

fn append(ring: &mut JournalRing<Twin>, shared: &Shared, body: Vec<u8>) {
    match ring.append(&plain(&body)) {
        Ok(appended) => {
            let (story, _) = &mut *shared.lock().unwrap();
            story.lengths.push((appended.position, body.len()));
            story.frames.push((appended.position, body));
        }
        Err(JournalError::Full { .. }) => {}
        Err(error) => panic!("append: {error}"),
    }
}

fn flush(ring: &mut JournalRing<Twin>, shared: &Shared) {
    let flushed = ring.flush().unwrap();
    assert_eq!(flushed, ring.end());
    shared.lock().unwrap().0.durable = flushed;
}

struct Script<'a> {
    setup: Setup,
    ring: JournalRing<Twin>,
    shared: &'a Shared,
    random: Random,
}

impl Script<'_> {
    fn step(&mut self) {
        match self.random.below(14) {
            0..=6 => {
                let (length, value) = (self.random.below(self.setup.body_bytes_max), self.random.below(3) as u8);
                // A few values only, so that stale and fresh bytes are often alike.
                append(&mut self.ring, self.shared, (0..length).map(|i| value.wrapping_add((i % 5) as u8)).collect());
            }
            7..=8 => flush(&mut self.ring, self.shared),
            9..=10 => self.truncate(),
            11 => self.cut(),
            12 => self.begin_epoch(),
            _ => self.write_back(),
        }
    }

    fn truncate(&mut self) {
        let flushed = self.ring.flushed();
        let bound = JournalPosition(self.ring.head().0 + self.random.below(flushed.0 - self.ring.head().0 + 1));
        let Some(job) = self.ring.begin_truncate(bound).unwrap() else { return };
        {
            let (story, _) = &mut *self.shared.lock().unwrap();
            let ends = story.frames.iter().skip(1).map(|(position, _)| *position).chain([self.ring.end()]);
            let head = ends.filter(|end| *end <= bound).max().expect("a whole frame is freed");
            story.heads.push(head);
        }
        let result = job.run(self.ring.memory());
        let head = self.ring.finish_truncate(job, result).unwrap();
        let (story, tally) = &mut *self.shared.lock().unwrap();
        assert_eq!(story.heads.last(), Some(&head));
        story.heads = vec![head];
        tally.laps = head.0 / self.setup.ring_bytes;
    }

    fn cut(&mut self) {
        let at = {
            let (story, tally) = &mut *self.shared.lock().unwrap();
            let kept: Vec<_> = story.frames.iter().filter(|(at, _)| *at >= self.ring.head()).collect();
            if kept.is_empty() {
                return;
            }
            let at = kept[self.random.below(kept.len() as u64) as usize].0;
            story.durable = story.durable.min(at);
            tally.cuts += 1;
            at
        };
        let lineage = self.ring.lineage().upto(at).unwrap();
        self.ring.cut(at, lineage).unwrap();
        self.shared.lock().unwrap().0.frames.retain(|(position, _)| *position < at);
    }

    fn begin_epoch(&mut self) {
        let next = self.ring.lineage().last().epoch.number + 1;
        self.ring.begin_epoch(epoch(next)).unwrap();
    }

    fn write_back(&mut self) {
        if self.setup.medium == CrashMedium::Pages {
            let pages = JournalRing::<Twin>::bytes_for(self.setup.ring_bytes) / 4096;
            self.ring.memory().write_back_page(self.random.below(pages) as usize);
        }
    }
}

fn enumerate(setup: Setup) -> Tally {
    let twin = twin(setup.medium, setup.ring_bytes);
    let mut ring = JournalRing::format(Arc::clone(&twin), IDENTITY, epoch(1)).unwrap();
    ring.bug = setup.bug;
    let story = Story { heads: vec![JournalPosition(0)], ..Story::default() };
    let shared: Shared = Arc::new(Mutex::new((story, Tally::default())));
    let observed = Arc::clone(&shared);
    twin.on_persist(Box::new(move |twin| {
        let (story, tally) = &mut *observed.lock().unwrap();
        look(setup, &twin.state(), story, tally, true);
    }));
    let mut script = Script { setup, ring, shared: &shared, random: Random(setup.seed) };
    for _ in 0..setup.steps {
        script.step();
        if shared.lock().unwrap().1.violation.is_some() {
            break;
        }
    }
    twin.stop_observing();
    std::mem::take(&mut shared.lock().unwrap().1)
}

const WORDS: Setup = Setup {
    medium: CrashMedium::Words,
    bug: PlantedBug::None,
    seed: 0,
    ring_bytes: 1024,
    body_bytes_max: 200,
    steps: 100,
    images_per_point: 12,
};
const PAGES: Setup =
    Setup { medium: CrashMedium::Pages, ring_bytes: 3 * 4096, body_bytes_max: 2000, images_per_point: 16, ..WORDS };

fn all_is_well(setup: Setup, seeds: std::ops::Range<u64>) {
    let mut total = Tally::default();
    for seed in seeds {
        let tally = enumerate(Setup { seed, ..setup });
        assert_eq!(tally.violation, None);
        total.images += tally.images;
        total.second_images += tally.second_images;
        total.cuts += tally.cuts;
        total.laps += tally.laps;
    }
    println!(
        "{:?}: {} crash images opened, and {} of a second crash; {} cuts, {} laps of the ring",
        setup.medium, total.images, total.second_images, total.cuts, total.laps
    );
    assert!(total.images > 1000 && total.second_images > 1000 && total.cuts > 10 && total.laps > 2);
}

#[test]
fn every_crash_on_persistent_memory_keeps_a_prefix() {
    all_is_well(WORDS, 0..8);
}

#[test]
fn every_power_loss_on_disk_keeps_a_prefix() {
    all_is_well(PAGES, 100..112);
}

#[test]
#[ignore = "minutes: the same with many more scripts"]
fn crashes_at_length() {
    all_is_well(Setup { steps: 120, images_per_point: 50, ..WORDS }, 1000..1060);
    all_is_well(Setup { steps: 120, images_per_point: 50, ..PAGES }, 2000..2060);
}

/// The checkers above must find each of the faults that can be planted.
fn is_caught(setup: Setup) {
    let found = (0..60).find_map(|seed| enumerate(Setup { seed, images_per_point: 16, ..setup }).violation);
    println!("{:?} on {:?}: {found:?}", setup.bug, setup.medium);
    assert!(found.is_some(), "{:?} was not noticed", setup.bug);
}

#[test]
fn missing_flush_is_caught() {
    is_caught(Setup { bug: PlantedBug::SkipFlush, ..WORDS });
}

#[test]
fn missing_checksum_is_caught() {
    is_caught(Setup { bug: PlantedBug::SkipChecksum, ..WORDS });
    is_caught(Setup { bug: PlantedBug::SkipChecksum, ..PAGES });
}

/// A frame of the greatest length that a ring of 1024 bytes takes: opening clears no more behind the end.
const LONG: [u8; 228] = [1; 228];
const FIRST: JournalPosition = JournalPosition(72);
const SECOND: JournalPosition = JournalPosition(72 + 256);

/// A ring with three frames, and what a loss of power leaves that takes a part of the second.
fn ring_with_gap(bug: PlantedBug) -> (JournalRing<Twin>, Twin) {
    let mut ring = ring(1024);
    ring.bug = bug;
    for body in [&[0; 40][..], &LONG, &[2; 40]] {
        ring.append(&plain(body)).unwrap();
    }
    let mut image = ring.memory().state().current();
    image[(RING_AT + FIRST.0) as usize + 30] ^= 1;
    (ring, CrashTwin::from_image(CrashMedium::Words, &image).into())
}

/// The medium loses a frame and keeps the one behind it; then another frame comes in the gap, in the same epoch.
fn frames_after_a_gap_is_filled(bug: PlantedBug) -> usize {
    let (_, memory) = ring_with_gap(bug);
    let mut opened = JournalRing::open_with(Arc::clone(&memory), IDENTITY, bug).unwrap();
    assert_eq!(contents(&opened), [[0; 40]]);
    opened.resume_epoch();
    opened.append(&plain(&[9; 228])).unwrap();
    contents(&JournalRing::open_with(memory, IDENTITY, bug).unwrap()).len()
}

#[test]
fn frame_behind_a_filled_gap_is_no_frame() {
    assert_eq!(frames_after_a_gap_is_filled(PlantedBug::None), 2);
}

#[test]
fn checksum_without_a_seed_is_caught() {
    assert_eq!(frames_after_a_gap_is_filled(PlantedBug::SkipSeed), 3);
}

#[test]
fn cut_end_that_is_not_cleared_is_caught() {
    is_caught(Setup { bug: PlantedBug::SkipClear, ..WORDS });
    is_caught(Setup { bug: PlantedBug::SkipClear, ..PAGES });
}

#[test]
fn state_page_that_is_left_in_parts_is_caught() {
    is_caught(Setup { bug: PlantedBug::SkipSettle, ..WORDS });
}

#[test]
fn reuse_before_the_head_is_durable_is_caught() {
    is_caught(Setup { bug: PlantedBug::SkipHead, ..WORDS });
}

/// A copy loses a frame and keeps the one behind it; then it learns that an epoch begins between the two.
fn frames_after_an_epoch_between(bug: PlantedBug) -> usize {
    let (ring, memory) = ring_with_gap(bug);
    let second = bytes_between(&ring, FIRST, SECOND);
    let mut copy = JournalRing::open_with(Arc::clone(&memory), IDENTITY, bug).unwrap();
    assert_eq!(contents(&copy), [[0; 40]]);
    let entries = [(1, JournalPosition(0)), (2, SECOND)];
    let entries = entries.map(|(number, begin)| LineageEntry { begin, epoch: epoch(number) });
    copy.cut(copy.end(), Lineage::from_entries(entries.to_vec()).unwrap()).unwrap();
    copy.resume_epoch();
    assert!(matches!(copy.append(&plain(&[7])), Err(JournalError::WrongLineage(_))));
    // The lost frame comes once more, so the checksum of the one behind it is right again.
    copy.append_copied(&second).unwrap();
    contents(&JournalRing::open_with(memory, IDENTITY, bug).unwrap()).len()
}

#[test]
fn remains_of_an_epoch_that_ended_before_are_no_frames() {
    assert_eq!(frames_after_an_epoch_between(PlantedBug::None), 2);
}

#[test]
fn missing_check_of_epochs_is_caught() {
    assert_eq!(frames_after_an_epoch_between(PlantedBug::SkipEpoch), 3);
}

/// A process dies in the middle of a frame. The next one resumes the epoch, and then the machine loses power.
///
/// Returns how many crash images hold the frame that was never whole.
fn frames_completed_by_the_next_one(bug: PlantedBug) -> usize {
    let mut ring = ring(1024);
    ring.append(&plain(&[0; 40])).unwrap();
    ring.flush().unwrap();
    let (memory, at) = (Arc::clone(ring.memory()), ring.end());
    ring.append(&plain(&[1; 37])).unwrap();
    // All but the last word, whose bytes the next frame has as well.
    let last = ring.parts(at, ring.end())[0].end - 8;
    let word = memory.load_u64(last).unwrap();
    memory.store_u64(last, 0).unwrap();
    memory.flush(0, memory.len()).unwrap();
    memory.fence();
    let mut opened = JournalRing::open_with(Arc::clone(&memory), IDENTITY, bug).unwrap();
    assert_eq!((opened.end(), word.to_ne_bytes()), (at, [1; 8]));
    opened.resume_epoch();
    opened.append(&plain(&[&[2; 29][..], &[1; 8]].concat())).unwrap();
    let images = memory.crash_images(1, 400);
    let found = images.map(|image| {
        let memory: Twin = CrashTwin::from_image(CrashMedium::Words, &image).into();
        let found = contents(&JournalRing::open(memory, IDENTITY).unwrap());
        assert_eq!(found[0], [0; 40]);
        found.get(1).is_some_and(|content| *content == [1; 37])
    });
    found.filter(|is_there| *is_there).count()
}

#[test]
fn frame_that_was_never_whole_stays_away() {
    assert_eq!(frames_completed_by_the_next_one(PlantedBug::None), 0);
}

#[test]
fn remains_that_opening_leaves_are_caught() {
    assert!(frames_completed_by_the_next_one(PlantedBug::SkipSettle) > 0);
}

/// A cut that a crash interrupts is completed by the next start: what it was to clear never comes back.
#[test]
fn interrupted_cut_is_completed_by_the_next_start() {
    let mut ring = ring(1024);
    for index in 0..4 {
        ring.append(&plain(&[index; 40])).unwrap();
    }
    ring.flush().unwrap();
    let at = JournalPosition(72);
    let second = bytes_between(&ring, at, JournalPosition(144));
    let seen = Arc::new(Mutex::new((0, 0)));
    let counts = Arc::clone(&seen);
    ring.memory().on_persist(Box::new(move |twin| {
        for image in twin.crash_images(twin.state().persist_points(), 40) {
            let memory: Twin = CrashTwin::from_image(CrashMedium::Words, &image).into();
            let mut opened = JournalRing::open(Arc::clone(&memory), IDENTITY).unwrap();
            let counts = &mut *counts.lock().unwrap();
            if opened.end() > at {
                // The state page is not durable: nothing is cut yet, and nothing may be cleared.
                assert_eq!(contents(&opened).len(), 4);
                counts.0 += 1;
            } else {
                opened.append_copied(&second).unwrap();
                assert_eq!(contents(&JournalRing::open(memory, IDENTITY).unwrap()), [[0; 40], [1; 40]]);
                counts.1 += 1;
            }
        }
    }));
    ring.cut(at, ring.lineage().clone()).unwrap();
    ring.memory().stop_observing();
    let (before, after) = *seen.lock().unwrap();
    assert!(before > 0 && after > 10, "{before} images before the cut, {after} after it");
}

/// Formatting over an earlier journal of the same identity.
#[test]
fn interrupted_formatting_leaves_old_journal_new_one_or_none() {
    let mut old = ring(1024);
    for index in 0..4 {
        old.append(&plain(&[index; 40])).unwrap();
    }
    old.flush().unwrap();
    let seen = Arc::new(Mutex::new([0; 3]));
    let counts = Arc::clone(&seen);
    old.memory().on_persist(Box::new(move |twin| {
        for image in twin.crash_images(twin.state().persist_points(), 40) {
            let memory: Twin = CrashTwin::from_image(CrashMedium::Words, &image).into();
            let kind = match JournalRing::open(memory, IDENTITY) {
                Err(_) => 0,
                Ok(opened) if opened.lineage().last().epoch == epoch(1) => {
                    assert_eq!(contents(&opened).len(), 4);
                    1
                }
                Ok(opened) => {
                    assert_eq!((opened.lineage().last().epoch, opened.used()), (epoch(5), 0));
                    2
                }
            };
            counts.lock().unwrap()[kind] += 1;
        }
    }));
    JournalRing::format(Arc::clone(old.memory()), IDENTITY, epoch(5)).unwrap();
    old.memory().stop_observing();
    assert!(seen.lock().unwrap().iter().all(|count| *count > 0), "{seen:?}");
}
