//! The ring, one behaviour at a time.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ashlar_pmem::{CrashMedium, CrashTwin, OutOfBounds, Persistent};
use ashlar_types::{FileSystemId, JournalPosition, NodeNumber};

use super::{IDENTITY, bytes_between, contents, epoch, frames, plain, ring, twin};
use crate::layout::RING_AT;
use crate::{
    CopyError, FRAME_BYTES_MAX, FrameFault, JournalCursor, JournalDamaged, JournalError, JournalIdentity,
    JournalOpenError, JournalRing, Lineage, LineageEntry,
};

fn lineage(entries: &[(u32, u64)]) -> Lineage {
    let entry = |&(number, begin): &(u32, u64)| LineageEntry { begin: JournalPosition(begin), epoch: epoch(number) };
    Lineage::from_entries(entries.iter().map(entry).collect()).unwrap()
}

#[test]
fn frames_are_read_as_appended_across_the_end_of_the_ring() {
    let mut ring = ring(1024);
    let mut expected = Vec::new();
    for index in 0..40u8 {
        let body = vec![index; 10 + usize::from(index) % 50];
        let appended = ring.append(&plain(&body)).unwrap();
        assert_eq!(appended.end, ring.end());
        expected.push(body);
        ring.flush().unwrap();
        if ring.used() > 700 {
            // In the middle of a frame: only whole frames before it are freed.
            let bound = JournalPosition(ring.head().0 + 400);
            let before = frames(&ring);
            let head = ring.truncate(bound).unwrap();
            let freed = before.iter().filter(|frame| frame.stored().end() <= bound).count();
            assert_eq!(head, before[freed].header.position);
            expected.drain(..freed);
        }
        assert_eq!(contents(&ring), expected);
    }
    assert!(ring.end().0 > 2 * ring.capacity());
    let reopened = JournalRing::open(Arc::clone(ring.memory()), IDENTITY).unwrap();
    assert_eq!(contents(&reopened), expected);
    assert_eq!(reopened.flushed(), ring.end());
}

#[test]
fn full_ring_says_how_much_must_become_free() {
    let mut ring = ring(1024);
    let body = [7; 125];
    for _ in 0..6 {
        ring.append(&plain(&body)).unwrap();
    }
    assert_eq!(ring.used(), 6 * 152);
    assert!(matches!(ring.append(&plain(&body)), Err(JournalError::Full { needed: 40 })));
    ring.append(&plain(&[1; 50])).unwrap();
    assert!(matches!(ring.truncate(ring.end()), Err(JournalError::NotFlushed { flushed: JournalPosition(0) })));
    ring.flush().unwrap();
    assert_eq!(ring.truncate(JournalPosition(152)).unwrap(), JournalPosition(152));
    ring.append(&plain(&body)).unwrap();
    assert_eq!(contents(&ring).len(), 7);
}

#[test]
fn frame_longer_than_a_quarter_of_the_ring_is_refused() {
    let mut small = ring(1024);
    assert_eq!(small.frame_bytes_max(), 256);
    assert!(matches!(small.append(&plain(&[0; 300])), Err(JournalError::TooLong { bytes: 328 })));
    small.append(&plain(&[0; 228])).unwrap();
    assert_eq!(ring(8 << 20).frame_bytes_max(), FRAME_BYTES_MAX);
}

#[test]
fn copy_has_the_same_bytes_whatever_the_size_of_its_ring() {
    let mut writer = ring(2048);
    let mut copy = ring(1024);
    for round in 0..30u8 {
        let from = writer.end();
        for _ in 0..=round % 3 {
            writer.append(&plain(&vec![round; 20 + usize::from(round)])).unwrap();
        }
        assert_eq!(copy.append_copied(&bytes_between(&writer, from, writer.end())).unwrap(), writer.end());
        assert_eq!(copy.end_cursor(), writer.end_cursor());
        for ring in [&mut writer, &mut copy] {
            ring.flush().unwrap();
            ring.truncate(JournalPosition(from.0.saturating_sub(200))).unwrap();
        }
        assert_eq!(frames(&copy), frames(&writer));
    }
    assert!(writer.end().0 > 3 * copy.capacity());
}

#[test]
fn copied_bytes_that_are_not_the_next_frame_are_refused() {
    let mut writer = ring(4096);
    for index in 0..3 {
        writer.append(&plain(&[index; 30])).unwrap();
    }
    let good = bytes_between(&writer, JournalPosition(0), writer.end());
    let length = good.len() / 3;
    let fault = |bytes: &[u8]| {
        let mut copy = ring(1024);
        match copy.append_copied(bytes) {
            Err(CopyError::NotNext { position, fault }) => {
                assert_eq!(position, copy.end());
                (contents(&copy).len(), fault)
            }
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(fault(&good[length..]), (0, FrameFault::Position));
    assert_eq!(fault(&good[..good.len() - 1]), (2, FrameFault::Length));
    assert_eq!(fault(&good[..2 * length + 10]), (2, FrameFault::Length));
    // Each bit of the second frame counts, and the frame before it is stored.
    for bit in length * 8..2 * length * 8 {
        let mut bytes = good.clone();
        bytes[bit / 8] ^= 1 << (bit % 8);
        let (stored, _) = fault(&bytes);
        assert_eq!(stored, 1, "bit {bit}");
    }
    let mut of_other_node = JournalRing::format(
        twin(CrashMedium::Words, 1024),
        JournalIdentity { node: NodeNumber::new(8).unwrap(), ..IDENTITY },
        epoch(1),
    )
    .unwrap();
    let refused = of_other_node.append_copied(&good);
    assert!(matches!(refused, Err(CopyError::NotNext { fault: FrameFault::Checksum, .. })));
    let mut of_other_epoch = JournalRing::format(twin(CrashMedium::Words, 1024), IDENTITY, epoch(2)).unwrap();
    let refused = of_other_epoch.append_copied(&good);
    assert!(matches!(refused, Err(CopyError::NotNext { fault: FrameFault::Epoch, .. })));
}

#[test]
fn copy_may_begin_in_the_middle() {
    let mut writer = ring(2048);
    let mut cursors = Vec::new();
    for index in 0..6 {
        cursors.push(writer.end_cursor());
        writer.append(&plain(&[index; 30])).unwrap();
        if index == 2 {
            writer.begin_epoch(epoch(4)).unwrap();
        }
    }
    let begin = writer.cursor_at(cursors[4].position).unwrap();
    assert_eq!(begin, cursors[4]);
    let memory = twin(CrashMedium::Words, 1024);
    let mut copy = JournalRing::format_copy(Arc::clone(&memory), IDENTITY, begin, writer.lineage().clone()).unwrap();
    copy.append_copied(&bytes_between(&writer, begin.position, writer.end())).unwrap();
    copy.flush().unwrap();
    assert_eq!(contents(&JournalRing::open(memory, IDENTITY).unwrap()), [[4; 30], [5; 30]]);
    let late = JournalCursor { position: JournalPosition(0), seed: 0 };
    let refused = JournalRing::format_copy(twin(CrashMedium::Words, 1024), IDENTITY, late, lineage(&[(4, 8)]));
    assert!(matches!(refused, Err(JournalOpenError::WrongBegin(JournalPosition(0)))));
}

#[test]
fn reader_finds_reused_space_and_wrong_places() {
    let mut ring = ring(1024);
    let start = ring.head_cursor();
    for index in 0..6 {
        ring.append(&plain(&[index; 60])).unwrap();
    }
    let second = ring.skip_frame(start).unwrap().unwrap();
    assert!(matches!(ring.cursor_at(JournalPosition(8)), Err(JournalError::NoBoundary(JournalPosition(8)))));
    let mut buffer = Vec::new();
    let wrong = JournalCursor { seed: second.seed ^ 1, ..second };
    let read = ring.read_frame(wrong, &mut buffer).map(drop);
    let damaged = JournalDamaged { position: second.position, fault: FrameFault::Checksum };
    assert!(matches!(read, Err(JournalError::Damaged(found)) if found == damaged));
    ring.flush().unwrap();
    ring.truncate(second.position).unwrap();
    assert!(matches!(ring.read_frame(start, &mut buffer), Err(JournalError::Outside { .. })));
    assert!(matches!(ring.read_bytes(start.position, &mut [0; 8]), Err(JournalError::Outside { .. })));
    assert!(ring.read_bytes(second.position, &mut [0; 8]).is_ok());
    let mut beyond = vec![0; ring.used() as usize + 1];
    assert!(matches!(ring.read_bytes(second.position, &mut beyond), Err(JournalError::Outside { .. })));
    assert_eq!(ring.skip_frame(ring.end_cursor()).unwrap(), None);
}

/// The end that is cut off and the frames that come in its place have the same positions.
#[test]
fn cut_end_is_never_read_again_behind_new_frames() {
    let mut ring = ring(2048);
    let mut ends = vec![ring.end()];
    for index in 0..6 {
        ring.append(&plain(&[index; 40])).unwrap();
        ends.push(ring.end());
    }
    ring.flush().unwrap();
    let old = bytes_between(&ring, ends[2], ends[6]);
    ring.cut(ends[2], ring.lineage().clone()).unwrap();
    assert_eq!((ring.end(), ring.flushed()), (ends[2], ends[2]));
    assert_eq!(contents(&JournalRing::open(Arc::clone(ring.memory()), IDENTITY).unwrap()), [[0; 40], [1; 40]]);
    // The very frame that was cut comes again: even then, those behind it stay gone.
    let frame_bytes = (ends[3].0 - ends[2].0) as usize;
    ring.append_copied(&old[..frame_bytes]).unwrap();
    let reopened = JournalRing::open(Arc::clone(ring.memory()), IDENTITY).unwrap();
    assert_eq!(contents(&reopened), [[0; 40], [1; 40], [2; 40]]);
    // So do they behind another frame, in the same epoch and in a new one.
    ring.cut(ends[2], ring.lineage().clone()).unwrap();
    ring.append(&plain(&[9; 40])).unwrap();
    ring.begin_epoch(epoch(2)).unwrap();
    ring.append(&plain(&[8; 40])).unwrap();
    let reopened = JournalRing::open(Arc::clone(ring.memory()), IDENTITY).unwrap();
    assert_eq!(contents(&reopened), [[0; 40], [1; 40], [9; 40], [8; 40]]);
}

#[test]
fn copies_of_a_cut_journal_become_the_same() {
    let (mut writer, mut copy) = (ring(2048), ring(2048));
    for index in 0..3 {
        writer.append(&plain(&[index; 40])).unwrap();
    }
    copy.append_copied(&bytes_between(&writer, JournalPosition(0), writer.end())).unwrap();
    let common = writer.end();
    // The writer goes on alone; the successor, which has the copy, goes on in the next epoch.
    writer.append(&plain(&[3; 40])).unwrap();
    copy.begin_epoch(epoch(2)).unwrap();
    copy.append(&plain(&[4; 60])).unwrap();
    let found = writer.lineage().last_common(writer.end(), copy.lineage(), copy.end());
    assert_eq!(found, Some(common));
    assert_eq!(writer.cursor_at(common).unwrap(), copy.cursor_at(common).unwrap());
    writer.cut(common, copy.lineage().clone()).unwrap();
    writer.append_copied(&bytes_between(&copy, common, copy.end())).unwrap();
    assert_eq!(frames(&writer), frames(&copy));
    assert_eq!(writer.lineage(), copy.lineage());
}

#[test]
fn cut_refuses_places_and_lineages_that_do_not_fit() {
    let mut ring = ring(1024);
    ring.append(&plain(&[0; 40])).unwrap();
    let middle = ring.end();
    ring.begin_epoch(epoch(2)).unwrap();
    ring.append(&plain(&[1; 40])).unwrap();
    let own = ring.lineage().clone();
    assert!(matches!(ring.cut(JournalPosition(8), own.clone()), Err(JournalError::NoBoundary(_))));
    assert!(matches!(ring.cut(ring.end().plus(8), own.clone()), Err(JournalError::Outside { .. })));
    for (at, wrong) in [(ring.end(), &[(1, 0)][..]), (ring.end(), &[(1, 0), (3, middle.0)]), (middle, &[(2, 0)])] {
        assert!(matches!(ring.cut(at, lineage(wrong)), Err(JournalError::WrongLineage(_))), "{wrong:?}");
    }
    assert!(matches!(ring.cut(middle, lineage(&[(1, 8)])), Err(JournalError::WrongLineage(_))));
    assert_eq!(contents(&ring).len(), 2);
    ring.cut(middle, lineage(&[(1, 0)])).unwrap();
    assert_eq!(contents(&ring), [[0; 40]]);
    assert!(matches!(ring.begin_epoch(epoch(1)), Err(JournalError::StaleEpoch { .. })));
}

#[test]
fn flush_that_began_before_a_cut_says_nothing_after_it() {
    let mut ring = ring(1024);
    ring.append(&plain(&[0; 40])).unwrap();
    ring.append(&plain(&[1; 40])).unwrap();
    let job = ring.begin_flush().unwrap();
    job.run(ring.memory()).unwrap();
    ring.cut(JournalPosition(0), ring.lineage().clone()).unwrap();
    ring.append(&plain(&[2; 40])).unwrap();
    assert_eq!(ring.finish_flush(&job, Ok(())).unwrap(), JournalPosition(0));
    assert_eq!(ring.flush().unwrap(), ring.end());
    assert!(ring.begin_flush().is_none());
}

#[test]
fn head_moves_only_when_its_job_has_finished() {
    let mut ring = ring(1024);
    for index in 0..4 {
        ring.append(&plain(&[index; 40])).unwrap();
    }
    ring.flush().unwrap();
    let job = ring.begin_truncate(ring.end()).unwrap().unwrap();
    job.run(ring.memory()).unwrap();
    assert_eq!(ring.head(), JournalPosition(0));
    assert!(matches!(ring.begin_truncate(ring.end()), Err(JournalError::Busy)));
    assert!(matches!(ring.begin_epoch(epoch(2)), Err(JournalError::Busy)));
    assert!(matches!(ring.cut(ring.end(), ring.lineage().clone()), Err(JournalError::Busy)));
    // Appends go on meanwhile.
    ring.append(&plain(&[9; 40])).unwrap();
    ring.finish_truncate(job, Ok(())).unwrap();
    assert_eq!(contents(&ring), [[9; 40]]);
    ring.begin_epoch(epoch(2)).unwrap();
}

/// Memory whose medium fails on demand.
struct FailingMemory {
    twin: CrashTwin,
    fails: AtomicBool,
}

impl Persistent for FailingMemory {
    fn len(&self) -> u64 {
        self.twin.len()
    }
    fn load(&self, offset: u64, into: &mut [u8]) -> Result<(), OutOfBounds> {
        self.twin.load(offset, into)
    }
    fn store(&self, offset: u64, bytes: &[u8]) -> Result<(), OutOfBounds> {
        self.twin.store(offset, bytes)
    }
    fn load_u64(&self, offset: u64) -> Result<u64, OutOfBounds> {
        self.twin.load_u64(offset)
    }
    fn store_u64(&self, offset: u64, value: u64) -> Result<(), OutOfBounds> {
        self.twin.store_u64(offset, value)
    }
    fn compare_exchange_u64(&self, offset: u64, current: u64, new: u64) -> Result<Result<u64, u64>, OutOfBounds> {
        self.twin.compare_exchange_u64(offset, current, new)
    }
    fn flush(&self, offset: u64, length: u64) -> Result<(), OutOfBounds> {
        self.twin.flush(offset, length)
    }
    fn fence(&self) {
        self.twin.fence();
    }
    fn sync(&self) -> io::Result<()> {
        if self.fails.load(Ordering::Relaxed) { Err(io::Error::other("no medium")) } else { self.twin.sync() }
    }
}

#[test]
fn journal_does_no_more_after_its_medium_failed() {
    let format = || {
        let twin = CrashTwin::new(CrashMedium::Words, RING_AT as usize + 1024);
        let memory = Arc::new(FailingMemory { twin, fails: AtomicBool::new(false) });
        let mut ring = JournalRing::format(Arc::clone(&memory), IDENTITY, epoch(1)).unwrap();
        ring.append(&plain(&[1; 40])).unwrap();
        ring.flush().unwrap();
        ring.append(&plain(&[2; 40])).unwrap();
        (memory, ring)
    };
    type Act = fn(&mut JournalRing<Arc<FailingMemory>>) -> Result<(), JournalError>;
    let acts: [Act; 4] = [
        |ring| ring.flush().map(drop),
        |ring| ring.truncate(ring.flushed()).map(drop),
        |ring| ring.begin_epoch(epoch(2)),
        |ring| ring.cut(ring.flushed(), ring.lineage().clone()),
    ];
    for act in acts {
        let (memory, mut ring) = format();
        let flushed = ring.flushed();
        memory.fails.store(true, Ordering::Relaxed);
        assert!(matches!(act(&mut ring), Err(JournalError::System(_))));
        memory.fails.store(false, Ordering::Relaxed);
        assert_eq!(ring.flushed(), flushed);
        assert!(matches!(ring.append(&plain(&[3; 40])), Err(JournalError::Failed)));
        assert!(acts.iter().all(|act| matches!(act(&mut ring), Err(JournalError::Failed))));
        let reopened = JournalRing::open(memory, IDENTITY).unwrap();
        assert!(!contents(&reopened).is_empty());
    }
}

/// Two flushes at once, of which one fails: the kernel reports an error once, so the other's success means nothing.
#[test]
fn flush_beside_a_failed_one_makes_nothing_durable() {
    let mut ring = ring(1024);
    ring.append(&plain(&[0; 40])).unwrap();
    let (one, two) = (ring.begin_flush().unwrap(), ring.begin_flush().unwrap());
    assert!(matches!(ring.finish_flush(&one, Err(io::Error::other("no medium"))), Err(JournalError::System(_))));
    assert!(matches!(ring.finish_flush(&two, Ok(())), Err(JournalError::Failed)));
    assert_eq!(ring.flushed(), JournalPosition(0));
}

#[test]
fn opened_journal_takes_no_frame_before_its_epoch_is_known() {
    let mut ring = ring(1024);
    ring.append(&plain(&[1; 40])).unwrap();
    let open = || JournalRing::open(Arc::clone(ring.memory()), IDENTITY).unwrap();
    let mut opened = open();
    assert!(matches!(opened.append(&plain(&[2; 40])), Err(JournalError::EpochNotBegun)));
    opened.begin_epoch(epoch(2)).unwrap();
    opened.append(&plain(&[2; 40])).unwrap();
    let mut opened = open();
    opened.resume_epoch();
    opened.append(&plain(&[3; 40])).unwrap();
    assert_eq!(frames(&opened).iter().map(|frame| frame.header.epoch).collect::<Vec<_>>(), [1, 2, 2]);
}

#[test]
fn memory_that_is_no_journal_is_refused() {
    let open = |twin: CrashTwin| JournalRing::open(twin, IDENTITY).map(drop).unwrap_err();
    let blank = |bytes: usize| CrashTwin::new(CrashMedium::Words, bytes);
    assert!(matches!(open(blank(RING_AT as usize)), JournalOpenError::TooSmall { .. }));
    assert!(matches!(open(blank(RING_AT as usize + 1024)), JournalOpenError::NotAJournal));
    let ring = ring(1024);
    let image = ring.memory().state().current();
    let other = JournalIdentity { file_system: FileSystemId(1 << 64 | 0xf5), ..IDENTITY };
    let refused = JournalRing::open(Arc::clone(ring.memory()), other).map(drop);
    assert!(
        matches!(refused, Err(JournalOpenError::OtherJournal { file_system: FileSystemId(0xf5), node }) if node == IDENTITY.node)
    );
    // A later version that needs itself, and one that older programs can read.
    let with = |at: usize, bytes: [u8; 4]| {
        let mut image = image.clone();
        image[at..at + 4].copy_from_slice(&bytes);
        open(CrashTwin::from_image(CrashMedium::Words, &image))
    };
    assert!(matches!(with(12, [2, 0, 0, 0]), JournalOpenError::WrongVersion { needed: 2, newest: 1, .. }));
    assert!(matches!(with(8, [0; 4]), JournalOpenError::WrongVersion { found: 0, oldest: 1, .. }));
    for at in [16, 24, 32, 40] {
        assert!(matches!(with(at, [9; 4]), JournalOpenError::DamagedHeader), "offset {at}");
    }
    // Of the state pages, only the second is in use after formatting.
    assert!(matches!(with(8192 + 8, [8, 0, 0, 0]), JournalOpenError::DamagedHeader));
}

#[test]
fn formatting_leaves_nothing_of_an_earlier_journal() {
    let mut old = ring(1024);
    for index in 0..5 {
        old.append(&plain(&[index; 40])).unwrap();
    }
    old.flush().unwrap();
    old.begin_epoch(epoch(2)).unwrap();
    let first = bytes_between(&old, JournalPosition(0), JournalPosition(72));
    let mut new = JournalRing::format(Arc::clone(old.memory()), IDENTITY, epoch(1)).unwrap();
    assert_eq!(new.end(), JournalPosition(0));
    // Even the old journal's own first frame does not bring back the second.
    new.append_copied(&first).unwrap();
    let reopened = JournalRing::open(Arc::clone(new.memory()), IDENTITY).unwrap();
    assert_eq!(contents(&reopened), [[0; 40]]);
    assert_eq!(reopened.lineage(), &lineage(&[(1, 0)]));
}
