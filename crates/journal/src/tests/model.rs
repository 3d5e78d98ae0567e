//! The ring against a queue: whatever happens to it, it holds the same frames.

use std::collections::VecDeque;
use std::sync::Arc;

use ashlar_pmem::CrashMedium;
use ashlar_types::JournalPosition;
use proptest::prelude::*;

use super::{IDENTITY, Twin, bytes_between, epoch, frames, plain, ring, twin};
use crate::{FRAME_HEADER_BYTES, JournalError, JournalRing};

#[derive(Clone, Debug)]
enum RingStep {
    Append(Vec<u8>),
    Flush,
    /// Frees space up to so many parts in 8 of what is flushed.
    Truncate(u64),
    /// Cuts behind so many parts in 8 of the frames.
    Cut(usize),
    BeginEpoch(u32),
    /// The process dies, and another one opens the journal.
    Reopen,
    /// The copy receives what it lacks.
    Send,
}

fn step() -> impl Strategy<Value = RingStep> {
    prop_oneof![
        8 => prop::collection::vec(any::<u8>(), 0..220).prop_map(RingStep::Append),
        3 => Just(RingStep::Flush),
        3 => (0..9u64).prop_map(RingStep::Truncate),
        1 => (0..9usize).prop_map(RingStep::Cut),
        1 => (1..3u32).prop_map(RingStep::BeginEpoch),
        1 => Just(RingStep::Reopen),
        3 => Just(RingStep::Send),
    ]
}

/// A frame of the model.
#[derive(Clone, Debug, PartialEq, Eq)]
struct ModelFrame {
    position: u64,
    end: u64,
    epoch: u32,
    content: Vec<u8>,
}

/// The ring, the queue that it must be equal to, and a copy in another ring.
struct Bench {
    ring: JournalRing<Twin>,
    copy: JournalRing<Twin>,
    queue: VecDeque<ModelFrame>,
    flushed: u64,
    epoch: u32,
}

impl Bench {
    fn new() -> Self {
        let copy = JournalRing::format(twin(CrashMedium::Pages, 1024), IDENTITY, epoch(1)).unwrap();
        Self { ring: ring(1536), copy, queue: VecDeque::new(), flushed: 0, epoch: 1 }
    }

    fn end(&self) -> u64 {
        self.queue.back().map_or(self.ring.end().0, |last| last.end)
    }

    fn append(&mut self, content: Vec<u8>) -> Result<(), TestCaseError> {
        // The length from the format: choice, kind and length of the body stand before it.
        let fields = 2 + if content.len() < 128 { 1 } else { 2 };
        let bytes = (FRAME_HEADER_BYTES + fields + content.len() as u64).next_multiple_of(8);
        let (position, head) = (self.end(), self.queue.front().map_or(self.end(), |first| first.position));
        let has_room = position - head + bytes <= self.ring.capacity();
        match self.ring.append(&plain(&content)) {
            Ok(appended) => {
                prop_assert!(has_room);
                let frame = ModelFrame { position, end: position + bytes, epoch: self.epoch, content };
                prop_assert_eq!((appended.position.0, appended.end.0), (frame.position, frame.end));
                self.queue.push_back(frame);
            }
            Err(JournalError::Full { needed }) => {
                prop_assert!(!has_room);
                prop_assert_eq!(needed, position - head + bytes - self.ring.capacity());
            }
            Err(error) => return Err(TestCaseError::fail(error.to_string())),
        }
        Ok(())
    }

    /// A writer that lost its end goes on in a new epoch, so no two frames of one epoch have the same position.
    fn cut(&mut self, kept: usize) {
        let at = self.queue.get(kept).map_or(self.end(), |frame| frame.position);
        let kept_lineage = self.ring.lineage().upto(JournalPosition(at)).unwrap();
        self.ring.cut(JournalPosition(at), kept_lineage).unwrap();
        self.queue.truncate(kept);
        self.flushed = self.flushed.min(at);
        self.begin_epoch(1);
    }

    fn begin_epoch(&mut self, step: u32) {
        self.epoch += step;
        self.ring.begin_epoch(epoch(self.epoch)).unwrap();
    }

    /// Brings the copy up to date, as two nodes do that compare their copies.
    fn send(&mut self) -> Result<(), TestCaseError> {
        let (ring, copy) = (&self.ring, &mut self.copy);
        let lineage = ring.lineage().clone();
        let common = lineage.last_common(ring.end(), copy.lineage(), copy.end());
        let Some(common) = common.filter(|common| *common >= ring.head()) else {
            // The copy lacks frames whose space was reused: it begins anew.
            *copy = JournalRing::format_copy(Arc::clone(copy.memory()), IDENTITY, ring.head_cursor(), lineage).unwrap();
            return Ok(());
        };
        let mut cursor = ring.cursor_at(common).unwrap();
        prop_assert_eq!(copy.cursor_at(common).unwrap(), cursor);
        copy.cut(common, lineage).unwrap();
        copy.flush().unwrap();
        copy.truncate(ring.head().min(copy.flushed())).unwrap();
        while let Some(next) = ring.skip_frame(cursor).unwrap() {
            if next.position.0 - copy.head().0 > copy.capacity() {
                break;
            }
            copy.append_copied(&bytes_between(ring, cursor.position, next.position)).unwrap();
            cursor = next;
        }
        Ok(())
    }

    fn step(&mut self, step: RingStep) -> Result<(), TestCaseError> {
        match step {
            RingStep::Append(content) => self.append(content)?,
            RingStep::Flush => {
                self.flushed = self.end();
                prop_assert_eq!(self.ring.flush().unwrap().0, self.flushed);
            }
            RingStep::Truncate(parts) => {
                let head = self.ring.head().0;
                let bound = head + (self.flushed - head) * parts / 8;
                self.ring.truncate(JournalPosition(bound)).unwrap();
                while self.queue.front().is_some_and(|first| first.end <= bound) {
                    self.queue.pop_front();
                }
            }
            RingStep::Cut(parts) => self.cut(self.queue.len() * parts / 8),
            RingStep::BeginEpoch(step) => self.begin_epoch(step),
            RingStep::Reopen => {
                self.ring = JournalRing::open(Arc::clone(self.ring.memory()), IDENTITY).unwrap();
                self.ring.resume_epoch();
                self.flushed = self.end();
            }
            RingStep::Send => self.send()?,
        }
        self.check()
    }

    fn check(&self) -> Result<(), TestCaseError> {
        let found: Vec<_> = frames(&self.ring)
            .into_iter()
            .map(|frame| ModelFrame {
                position: frame.header.position.0,
                end: frame.stored().end().0,
                epoch: frame.header.epoch,
                content: frame.content().unwrap(),
            })
            .collect();
        prop_assert_eq!(&found, &Vec::from(self.queue.clone()));
        prop_assert_eq!(self.ring.flushed().0, self.flushed);
        Ok(())
    }

    /// After a transfer, the copy holds the ring's frames as far as it has room.
    fn check_copy(&mut self) -> Result<(), TestCaseError> {
        self.send()?;
        self.send()?;
        let (own, copied) = (frames(&self.ring), frames(&self.copy));
        let behind: Vec<_> = own.iter().filter(|frame| frame.header.position >= self.copy.head()).cloned().collect();
        prop_assert!(behind.starts_with(&copied[..]), "{copied:?} is not {behind:?}");
        let lacking = behind.get(copied.len());
        let is_full = |frame: &super::OwnedFrame| self.copy.used() + frame.header.frame_bytes() > self.copy.capacity();
        prop_assert!(lacking.is_none_or(is_full));
        let reopened = JournalRing::open(Arc::clone(self.copy.memory()), IDENTITY).unwrap();
        prop_assert_eq!(frames(&reopened), copied);
        Ok(())
    }
}

proptest! {
    #[test]
    fn ring_holds_the_frames_of_a_queue(steps in prop::collection::vec(step(), 1..100)) {
        let mut bench = Bench::new();
        for step in steps {
            bench.step(step)?;
        }
        bench.check_copy()?;
    }
}
