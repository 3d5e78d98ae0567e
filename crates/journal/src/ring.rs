//! The ring: appending, flushing, reuse of space, cutting, and opening after a crash.
//!
//! The order of writes and the states after a crash are in `docs/format-journal.md`, section "Order of writes".

use std::io;
use std::ops::Range;

use ashlar_pmem::{OutOfBounds, Persistent};
use ashlar_types::{Epoch, JournalPosition};

use crate::encode::EncodedFrame;
use crate::frame::{FRAME_BYTES_MAX, FRAME_HEADER_BYTES, FRAME_UNIT_BYTES, FrameHeader};
use crate::layout::{
    self, JournalIdentity, JournalState, POSITION_MAX, RING_AT, RING_BYTES_MIN, clear_bytes, persist_io, ring_bytes,
};
use crate::lineage::Lineage;
use crate::{CopyError, FrameBody, FrameFault, JournalError, JournalOpenError};

/// A place between two frames, and what the next frame's checksum is seeded with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JournalCursor {
    /// The position of the next frame.
    pub position: JournalPosition,
    /// The checksum of the frame before; the journal's origin if there is none.
    pub seed: u32,
}

/// The place of a frame that was appended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AppendedFrame {
    /// The frame's position.
    pub position: JournalPosition,
    /// The position of the next one.
    pub end: JournalPosition,
}

/// A node's journal, or a copy of it, in persistent memory that no other process writes.
///
/// Appending, and everything that takes `&mut self`, is for the holder of the caller's lock. The slow parts of flushing
/// and of reuse are jobs, which run without the lock.
#[derive(Debug)]
pub struct JournalRing<M> {
    memory: M,
    identity: JournalIdentity,
    pub(crate) capacity: u64,
    pub(crate) state: JournalState,
    end: JournalCursor,
    flushed: JournalPosition,
    /// How often the end was cut: a flush that began before a cut says nothing about the bytes after it.
    cuts: u64,
    is_truncating: bool,
    has_failed: bool,
    /// Whether frames may be appended in the last epoch: not if a loss of power may have taken some of its frames.
    has_epoch: bool,
    #[cfg(test)]
    pub(crate) bug: PlantedBug,
}

/// Faults that tests plant to show that their checkers detect them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(test), allow(dead_code))]
pub(crate) enum PlantedBug {
    /// No fault.
    None,
    /// Frames are not flushed.
    SkipFlush,
    /// Checksums are not verified.
    SkipChecksum,
    /// A checksum does not depend on the frame before.
    SkipSeed,
    /// Frames of any epoch are valid anywhere.
    SkipEpoch,
    /// A cut end stays as it is.
    SkipClear,
    /// Space is reused before the new head is durable.
    SkipHead,
    /// Opening leaves the parts of states and frames that were not written whole.
    SkipSettle,
}

/// A flush that has begun: [`JournalRing::begin_flush`].
#[derive(Clone, Debug)]
pub struct FlushJob {
    parts: [Range<u64>; 2],
    upto: JournalPosition,
    cuts: u64,
}

impl FlushJob {
    /// Makes the frames durable. It takes no lock; `memory` is the journal's.
    ///
    /// # Errors
    /// Those of the medium.
    pub fn run(&self, memory: &impl Persistent) -> io::Result<()> {
        persist_io(memory, self.parts.iter().cloned())
    }
}

/// A move of the head that has begun: [`JournalRing::begin_truncate`].
#[derive(Clone, Debug)]
pub struct TruncateJob {
    /// Nothing to write: a planted bug.
    is_skipped: bool,
    state: JournalState,
    origin: u32,
}

impl TruncateJob {
    /// Makes the new head durable. It takes no lock; `memory` is the journal's.
    ///
    /// # Errors
    /// Those of the medium.
    pub fn run(&self, memory: &impl Persistent) -> io::Result<()> {
        if self.is_skipped { Ok(()) } else { self.state.write(memory, self.origin) }
    }
}

impl<M: Persistent> JournalRing<M> {
    /// Returns the bytes of memory that a journal with a ring of this size needs.
    ///
    /// A ring takes frames of up to a quarter of its size: one of four times [`FRAME_BYTES_MAX`] takes all. A copy's
    /// ring must take what the writer's does.
    #[must_use]
    pub const fn bytes_for(ring_bytes: u64) -> u64 {
        RING_AT + if ring_bytes < RING_BYTES_MIN { RING_BYTES_MIN } else { ring_bytes }
    }

    /// Makes an empty journal, durably, which begins in this epoch. Earlier content of the memory is cleared.
    ///
    /// # Errors
    /// [`JournalOpenError::TooSmall`], [`JournalOpenError::System`].
    pub fn format(memory: M, identity: JournalIdentity, epoch: Epoch) -> Result<Self, JournalOpenError> {
        let begin = JournalCursor { position: JournalPosition(0), seed: identity.origin() };
        Self::format_copy(memory, identity, begin, Lineage::new(epoch, begin.position))
    }

    /// Makes an empty copy of a journal, durably, whose first frame is the one at `begin`.
    ///
    /// # Errors
    /// As [`Self::format`]; [`JournalOpenError::WrongBegin`] if the lineage does not reach back to `begin`.
    pub fn format_copy(
        memory: M,
        identity: JournalIdentity,
        begin: JournalCursor,
        lineage: Lineage,
    ) -> Result<Self, JournalOpenError> {
        let capacity = ring_bytes(memory.len())?;
        let position = begin.position;
        if position.0 % FRAME_UNIT_BYTES != 0 || position.0 >= POSITION_MAX || lineage.epoch_at(position).is_none() {
            return Err(JournalOpenError::WrongBegin(position));
        }
        layout::clear_header(&memory)?;
        clear_bytes(&memory, std::iter::once(RING_AT..RING_AT + capacity))?;
        let state = JournalState { sequence: 1, head: begin, cut: None, lineage };
        state.write(&memory, identity.origin())?;
        layout::write_identity(&memory, &identity, capacity)?;
        Ok(Self::over(memory, identity, capacity, state))
    }

    /// Opens the journal that a process or the machine left when it died.
    ///
    /// Its end is behind the last frame of the valid chain; all frames are durable when this returns. Before a writer
    /// appends, it calls [`Self::begin_epoch`], or [`Self::resume_epoch`] if it knows that the machine lost nothing.
    ///
    /// # Errors
    /// [`JournalOpenError`].
    pub fn open(memory: M, identity: JournalIdentity) -> Result<Self, JournalOpenError> {
        let (found, capacity) = layout::read_identity(&memory)?;
        if found != identity {
            return Err(JournalOpenError::other(found.file_system, found.node));
        }
        let state = JournalState::read(&memory, identity.origin())?;
        Self::over(memory, identity, capacity, state).recover()
    }

    #[cfg(test)]
    pub(crate) fn open_with(memory: M, identity: JournalIdentity, bug: PlantedBug) -> Result<Self, JournalOpenError> {
        let (_, capacity) = layout::read_identity(&memory)?;
        let state = JournalState::read(&memory, identity.origin())?;
        let mut ring = Self::over(memory, identity, capacity, state);
        ring.bug = bug;
        ring.recover()
    }

    fn over(memory: M, identity: JournalIdentity, capacity: u64, state: JournalState) -> Self {
        let end = state.head;
        Self {
            memory,
            identity,
            capacity,
            state,
            end,
            flushed: end.position,
            cuts: 0,
            is_truncating: false,
            has_failed: false,
            has_epoch: true,
            #[cfg(test)]
            bug: PlantedBug::None,
        }
    }

    /// Finds the end, completes a cut, and makes state and frames durable.
    fn recover(mut self) -> Result<Self, JournalOpenError> {
        if !self.planted(PlantedBug::SkipSettle) {
            self.state.settle(&self.memory)?;
        }
        let lap = self.head().plus(self.capacity);
        let cut = self.state.cut.clone();
        if cut.as_ref().is_some_and(|cut| cut.end > lap) {
            return Err(JournalOpenError::DamagedHeader);
        }
        let limit = cut.as_ref().map_or(lap, |cut| cut.start);
        let mut buffer = Vec::new();
        while let Ok(frame) = self.check_frame(self.end, limit, &mut buffer) {
            self.end = frame.next();
        }
        // The frames may have been read from caches: from here on the journal must not shrink.
        let kept = self.parts(self.head(), self.end.position);
        persist_io(&self.memory, kept.into_iter())?;
        self.flushed = self.end.position;
        self.has_epoch = false;
        if !self.planted(PlantedBug::SkipSettle) {
            // A process may have died in the middle of a frame. With words of the next frame, it could become whole.
            let torn = self.end.position.plus(self.frame_bytes_max()).min(lap);
            clear_bytes(&self.memory, self.parts(self.end.position, torn).into_iter())?;
        }
        if let Some(cut) = cut {
            clear_bytes(&self.memory, self.parts(cut.start, cut.end).into_iter())?;
            let state = JournalState { sequence: self.state.sequence + 1, cut: None, ..self.state.clone() };
            state.write(&self.memory, self.identity.origin())?;
            self.state = state;
        }
        Ok(self)
    }

    /// Returns the memory, for jobs and for sending.
    #[must_use]
    pub fn memory(&self) -> &M {
        &self.memory
    }

    /// Returns which journal it is.
    #[must_use]
    pub fn identity(&self) -> &JournalIdentity {
        &self.identity
    }

    /// Returns the epochs of its frames.
    #[must_use]
    pub fn lineage(&self) -> &Lineage {
        &self.state.lineage
    }

    /// Returns the bytes of the ring.
    #[must_use]
    pub fn capacity(&self) -> u64 {
        self.capacity
    }

    /// Returns the bytes between head and end.
    #[must_use]
    pub fn used(&self) -> u64 {
        self.end.position.0 - self.head().0
    }

    /// Returns the bytes of the longest frame: a quarter of the ring at most, so that no frame waits for a whole lap.
    #[must_use]
    pub fn frame_bytes_max(&self) -> u64 {
        (self.capacity / 4).min(FRAME_BYTES_MAX) / FRAME_UNIT_BYTES * FRAME_UNIT_BYTES
    }

    /// Returns the position of the oldest frame.
    #[must_use]
    pub fn head(&self) -> JournalPosition {
        self.state.head.position
    }

    /// Returns the place of the oldest frame.
    #[must_use]
    pub fn head_cursor(&self) -> JournalCursor {
        self.state.head
    }

    /// Returns the position at which the next frame will begin.
    #[must_use]
    pub fn end(&self) -> JournalPosition {
        self.end.position
    }

    /// Returns the place of the next frame.
    #[must_use]
    pub fn end_cursor(&self) -> JournalCursor {
        self.end
    }

    /// Returns the position up to which all frames are durable here.
    #[must_use]
    pub fn flushed(&self) -> JournalPosition {
        self.flushed
    }

    /// Appends a frame in the journal's last epoch. It is not durable until it is flushed.
    ///
    /// # Errors
    /// [`JournalError::Full`], [`JournalError::TooLong`], [`JournalError::Frame`], [`JournalError::Failed`];
    /// [`JournalError::EpochNotBegun`] after opening; [`JournalError::WrongLineage`] if the last epoch begins behind
    /// the end: such a copy only receives frames.
    pub fn append(&mut self, body: &FrameBody<'_>) -> Result<AppendedFrame, JournalError> {
        self.append_encoded(&body.encode()?)
    }

    /// Appends a frame that is encoded already.
    ///
    /// # Errors
    /// As [`Self::append`].
    pub fn append_encoded(&mut self, frame: &EncodedFrame<'_>) -> Result<AppendedFrame, JournalError> {
        let bytes = frame.frame_bytes();
        self.check_room(bytes)?;
        let [prefix, tail] = frame.parts();
        let zeros = [0; FRAME_UNIT_BYTES as usize];
        let zeros = &zeros[..(bytes - FRAME_HEADER_BYTES - frame.body_bytes()) as usize];
        let (position, last) = (self.end.position, self.state.lineage.last());
        if !self.has_epoch {
            return Err(JournalError::EpochNotBegun);
        }
        if last.begin > position {
            // This copy follows another one, which has gone on to later epochs.
            return Err(JournalError::WrongLineage(position));
        }
        let mut header = FrameHeader {
            kind: frame.kind as u8,
            flags: frame.flags,
            session: frame.session,
            length: frame.body_bytes() as u32,
            position,
            checksum: 0,
            epoch: last.epoch.number,
        };
        header.checksum = header.sum(self.seed(self.end), &[prefix, tail, zeros]);
        let mut at = position;
        for part in [&header.to_bytes()[..], prefix, tail, zeros] {
            self.store(at, part)?;
            at = at.plus(part.len() as u64);
        }
        self.end = JournalCursor { position: at, seed: header.checksum };
        Ok(AppendedFrame { position, end: at })
    }

    /// Appends whole frames of another copy, as they stand there. They are not durable until they are flushed.
    ///
    /// Each frame is checked first: it must be the one that follows, in the epoch that the lineage has there. Returns
    /// the new end.
    ///
    /// # Errors
    /// [`CopyError`]; the whole frames before the faulty one are appended.
    pub fn append_copied(&mut self, mut bytes: &[u8]) -> Result<JournalPosition, CopyError> {
        while !bytes.is_empty() {
            let position = self.end.position;
            let refuse = |fault| CopyError::NotNext { position, fault };
            let (header, behind) = bytes.split_first_chunk().ok_or(refuse(FrameFault::Length))?;
            let header = FrameHeader::from_bytes(header);
            self.check_header(&header, position).map_err(refuse)?;
            let length = header.frame_bytes();
            let rest = behind.get(..(length - FRAME_HEADER_BYTES) as usize).ok_or(refuse(FrameFault::Length))?;
            self.check_body(&header, self.end, rest).map_err(refuse)?;
            self.check_room(length)?;
            let (frame, others) = bytes.split_at(length as usize);
            self.store(position, frame).map_err(JournalError::from)?;
            self.end = JournalCursor { position: position.plus(length), seed: header.checksum };
            bytes = others;
        }
        Ok(self.end.position)
    }

    /// Begins a flush of all frames that are not durable yet. Returns `None` if all are.
    ///
    /// The caller runs the job without its lock, and then calls [`Self::finish_flush`].
    #[must_use]
    pub fn begin_flush(&self) -> Option<FlushJob> {
        let upto = self.end.position;
        let mut parts = self.parts(self.flushed, upto);
        if self.planted(PlantedBug::SkipFlush) {
            parts = [0..0, 0..0];
        }
        (self.flushed < upto).then_some(FlushJob { parts, upto, cuts: self.cuts })
    }

    /// Notes the result of a flush. Returns the flushed position.
    ///
    /// # Errors
    /// [`JournalError::System`] if the flush failed. The kernel may have dropped the bytes, so the journal has failed;
    /// [`JournalError::Failed`] if another access failed before.
    pub fn finish_flush(&mut self, job: &FlushJob, result: io::Result<()>) -> Result<JournalPosition, JournalError> {
        self.note_result(result)?;
        self.check_usable()?;
        if job.cuts == self.cuts {
            self.flushed = self.flushed.max(job.upto);
        }
        Ok(self.flushed)
    }

    /// Makes all frames durable. Returns the flushed position.
    ///
    /// # Errors
    /// As [`Self::finish_flush`]; [`JournalError::Failed`].
    pub fn flush(&mut self) -> Result<JournalPosition, JournalError> {
        self.check_usable()?;
        match self.begin_flush() {
            None => Ok(self.flushed),
            Some(job) => {
                let result = job.run(&self.memory);
                self.finish_flush(&job, result)
            }
        }
    }

    /// Begins to free the whole frames before `bound` for reuse. Returns `None` if there are none.
    ///
    /// The caller runs the job without its lock, and then calls [`Self::finish_truncate`]. Until then the journal moves
    /// its head in no other way, and refuses to begin an epoch or to be cut ([`JournalError::Busy`]).
    ///
    /// # Errors
    /// [`JournalError::NotFlushed`], [`JournalError::Busy`], [`JournalError::Failed`], [`JournalError::Damaged`].
    pub fn begin_truncate(&mut self, bound: JournalPosition) -> Result<Option<TruncateJob>, JournalError> {
        self.check_idle()?;
        if bound > self.flushed {
            return Err(JournalError::NotFlushed { flushed: self.flushed });
        }
        let mut head = self.state.head;
        while let Some(next) = self.skip_frame(head)?.filter(|next| next.position <= bound) {
            head = next;
        }
        if head == self.state.head {
            return Ok(None);
        }
        self.is_truncating = true;
        let state = JournalState { sequence: self.state.sequence + 1, head, ..self.state.clone() };
        let is_skipped = self.planted(PlantedBug::SkipHead);
        Ok(Some(TruncateJob { is_skipped, state, origin: self.identity.origin() }))
    }

    /// Notes that the new head is durable: from now on, the space before it is reused. Returns the head.
    ///
    /// # Errors
    /// [`JournalError::System`] if the job failed, [`JournalError::Failed`] if another access failed before.
    pub fn finish_truncate(
        &mut self,
        job: TruncateJob,
        result: io::Result<()>,
    ) -> Result<JournalPosition, JournalError> {
        self.is_truncating = false;
        self.note_result(result)?;
        self.check_usable()?;
        self.state = job.state;
        Ok(self.head())
    }

    /// Frees the whole frames before `bound` for reuse. Returns the head.
    ///
    /// # Errors
    /// As [`Self::begin_truncate`] and [`Self::finish_truncate`].
    pub fn truncate(&mut self, bound: JournalPosition) -> Result<JournalPosition, JournalError> {
        match self.begin_truncate(bound)? {
            None => Ok(self.head()),
            Some(job) => {
                let result = job.run(&self.memory);
                self.finish_truncate(job, result)
            }
        }
    }

    /// Begins an epoch at the journal's end, durably: frames appended from now on are of this epoch.
    ///
    /// # Errors
    /// [`JournalError::StaleEpoch`], [`JournalError::LineageFull`], [`JournalError::Busy`], [`JournalError::System`].
    pub fn begin_epoch(&mut self, epoch: Epoch) -> Result<(), JournalError> {
        self.check_idle()?;
        let mut lineage = self.state.lineage.clone();
        lineage.make_room(self.head());
        lineage.begin_epoch(epoch, self.end.position)?;
        self.write_state(None, lineage)?;
        self.has_epoch = true;
        Ok(())
    }

    /// Goes on in the last epoch after opening: the machine has not lost power since a frame was appended.
    ///
    /// After a loss of power, the medium may hold parts of frames that were lost. A new frame in their place, of the
    /// same epoch, and another loss of power could bring back such a lost frame.
    pub fn resume_epoch(&mut self) {
        self.has_epoch = true;
    }

    /// Cuts the journal at `at`, durably, and takes over the lineage of the copy that it is to follow.
    ///
    /// Frames from there on are cleared: they are never read again. `at` may be the end, to take over a lineage alone.
    ///
    /// # Errors
    /// [`JournalError::Outside`], [`JournalError::NoBoundary`], [`JournalError::WrongLineage`] if the lineage has other
    /// epochs before `at`, [`JournalError::Busy`], [`JournalError::System`].
    pub fn cut(&mut self, at: JournalPosition, lineage: Lineage) -> Result<(), JournalError> {
        self.check_idle()?;
        let cursor = self.cursor_at(at)?;
        if lineage.epoch_at(self.head()).is_none() || !self.state.lineage.agrees(&lineage, self.head(), at) {
            return Err(JournalError::WrongLineage(at));
        }
        let end = self.end.position;
        if at == end {
            return self.write_state(None, lineage);
        }
        self.write_state(Some(at..end), lineage.clone())?;
        self.end = cursor;
        self.flushed = self.flushed.min(at);
        self.cuts += 1;
        if !self.planted(PlantedBug::SkipClear) {
            let cleared = clear_bytes(&self.memory, self.parts(at, end).into_iter());
            self.note_result(cleared)?;
        }
        self.write_state(None, lineage)
    }

    /// Writes the state with another cut and lineage, durably.
    fn write_state(&mut self, cut: Option<Range<JournalPosition>>, lineage: Lineage) -> Result<(), JournalError> {
        let state = JournalState { sequence: self.state.sequence + 1, head: self.state.head, cut, lineage };
        let result = state.write(&self.memory, self.identity.origin());
        self.note_result(result)?;
        self.state = state;
        Ok(())
    }

    /// Returns the ranges of memory between two positions, which are at most one lap apart.
    ///
    /// The second range holds the part behind the ring's end.
    #[must_use]
    pub fn parts(&self, from: JournalPosition, to: JournalPosition) -> [Range<u64>; 2] {
        let first = RING_AT + from.0 % self.capacity;
        let (behind, end) = (first + to.0.saturating_sub(from.0).min(self.capacity), RING_AT + self.capacity);
        [first..behind.min(end), RING_AT..RING_AT + behind.saturating_sub(end)]
    }

    /// Copies bytes into the ring.
    fn store(&self, position: JournalPosition, bytes: &[u8]) -> Result<(), OutOfBounds> {
        let [first, second] = self.parts(position, position.plus(bytes.len() as u64));
        let (before, behind) = bytes.split_at((first.end - first.start) as usize);
        self.memory.store(first.start, before)?;
        self.memory.store(second.start, behind)
    }

    /// Copies bytes out of the ring.
    pub(crate) fn load(&self, position: JournalPosition, into: &mut [u8]) -> Result<(), OutOfBounds> {
        let [first, second] = self.parts(position, position.plus(into.len() as u64));
        let (before, behind) = into.split_at_mut((first.end - first.start) as usize);
        self.memory.load(first.start, before)?;
        self.memory.load(second.start, behind)
    }

    fn check_usable(&self) -> Result<(), JournalError> {
        if self.has_failed { Err(JournalError::Failed) } else { Ok(()) }
    }

    fn check_idle(&self) -> Result<(), JournalError> {
        self.check_usable()?;
        if self.is_truncating { Err(JournalError::Busy) } else { Ok(()) }
    }

    fn check_room(&self, bytes: u64) -> Result<(), JournalError> {
        self.check_usable()?;
        if bytes > self.frame_bytes_max() || self.end.position.0 + bytes >= POSITION_MAX {
            return Err(JournalError::TooLong { bytes });
        }
        match bytes.saturating_sub(self.capacity - self.used()) {
            0 => Ok(()),
            needed => Err(JournalError::Full { needed }),
        }
    }

    /// Notes the result of an access to the medium: after an error, it is not known what is durable.
    fn note_result(&mut self, result: io::Result<()>) -> Result<(), JournalError> {
        self.has_failed |= result.is_err();
        Ok(result?)
    }

    /// Returns what a frame's checksum is seeded with.
    pub(crate) fn seed(&self, cursor: JournalCursor) -> u32 {
        if self.planted(PlantedBug::SkipSeed) { 0 } else { cursor.seed }
    }

    #[cfg(test)]
    pub(crate) fn planted(&self, bug: PlantedBug) -> bool {
        self.bug == bug
    }

    #[cfg(not(test))]
    #[inline(always)]
    #[allow(clippy::unused_self)]
    pub(crate) const fn planted(&self, _bug: PlantedBug) -> bool {
        false
    }
}
