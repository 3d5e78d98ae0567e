//! Appends: the session's side of the log.

use std::sync::atomic::Ordering;

use ashlar_pmem::{Crc32c, Persistent};
use ashlar_types::{LogPosition, SealCount};

use crate::layout::{HEAD_AT, LIMIT_AT};
use crate::pins::Pin;
use crate::record::{
    HEADER_BYTES, POSITION_MAX, PREFIX_BYTES, PREFIX_CRC_AT, PREFIX_OWN_AT, SlotVerdict, UNIT_BYTES, place, units_for,
};
use crate::slots::{LogSlot, SlotState, TRIES_MAX, Undecided};
use crate::stack_buffer::StackBuffer;
use crate::{AppendError, Bug, Log};

/// The longest body that is assembled on the stack and stored at once.
const SMALL_BODY_BYTES: usize = 512;
/// Bytes of a larger body that are stored before the append checks whether its slot was voided.
const CHUNK_BYTES: usize = 32 << 10;
/// Zeros that fill a slot behind its body.
const ZEROS: [u8; UNIT_BYTES as usize] = [0; UNIT_BYTES as usize];
/// Bytes of a cache line: a large body is stored in whole lines, so that they can go past the cache.
const LINE_BYTES: usize = 64;
/// How often an append starts again after its slot was voided, before the caller decides.
const RESTARTS_MAX: u32 = 16;

/// The place of an appended record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Appended {
    /// The record's position.
    pub position: LogPosition,
    /// The position behind the record.
    pub end: LogPosition,
    /// The position of the body's first byte, for [`Log::read`]; the body does not wrap.
    pub body: LogPosition,
}

/// A reserved slot.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reserved {
    pub(crate) slot: LogSlot,
    /// The slot's first position: the record's position.
    pub(crate) start: LogPosition,
    /// The position at which the record's bytes begin. It lies behind the slot's start if the record skips the ring's
    /// end.
    pub(crate) record: LogPosition,
    pub(crate) end: LogPosition,
    /// The record's offset in the memory, kept since the ring's length may not be one that divides quickly.
    at: u64,
    /// The mark that the slot gets at the commit.
    mark: u64,
}

impl<M: Persistent> Log<M> {
    /// Appends a record whose body is `parts` in a row, under a seal count.
    ///
    /// The caller has read the seal count before it checked the leases. When the append returns, the record and all
    /// records before it are durable, as far as the medium goes without a sync.
    ///
    /// # Errors
    /// [`AppendError`]; then nothing was appended.
    pub fn append(&self, seal: SealCount, kind: u8, parts: &[&[u8]]) -> Result<Appended, AppendError> {
        self.append_held(seal, kind, parts).map(|(appended, _)| appended)
    }

    /// Appends like [`Self::append`], and holds the record.
    ///
    /// [`Self::end_before_held`] returns nothing behind the record until the hold is dropped. The caller enters the
    /// record in its account meanwhile.
    ///
    /// # Errors
    /// As [`Self::append`].
    pub fn append_held(&self, seal: SealCount, kind: u8, parts: &[&[u8]]) -> Result<(Appended, Pin<'_>), AppendError> {
        let body_bytes = parts.iter().fold(0u64, |sum, part| sum.saturating_add(part.len() as u64));
        if body_bytes > self.body_bytes_max() {
            return Err(AppendError::TooLong);
        }
        let units = units_for(body_bytes);
        let head = || self.memory.load_u64(HEAD_AT).map_err(AppendError::from);
        let pin = self.pins.pin(head)?.ok_or(AppendError::Full { needed: 0 })?;
        for _ in 0..RESTARTS_MAX {
            if self.is_fenced() {
                return Err(AppendError::Fenced);
            }
            let reserved = self.reserve(seal, units, &pin)?;
            if self.fill(&reserved, kind, body_bytes, parts)? && self.commit(&reserved)? {
                if !self.planted(Bug::SkipOrder) {
                    self.settle_before(reserved.slot.number)?;
                }
                let Reserved { start, record, end, .. } = reserved;
                return Ok((Appended { position: start, end, body: record.plus(HEADER_BYTES) }, pin));
            }
            // Another thread has voided the slot. The void must be durable before the record is appended anew:
            // otherwise a crash could bring both.
            self.settle(reserved.slot.number, Undecided::Void)?;
        }
        Err(if self.is_fenced() { AppendError::Fenced } else { AppendError::Sealed })
    }

    /// Returns the position before which no append of this process is under way or held, at most `upto`.
    ///
    /// The caller has read `upto` before, and the log's tail has already reached it.
    #[must_use]
    pub fn end_before_held(&self, upto: LogPosition) -> LogPosition {
        upto.min(self.pins.lowest())
    }

    /// Releases log bytes before `upto`, to which this process refers no more.
    ///
    /// SharedFS may reuse them once it has committed them. A log begins with nothing released, so space becomes free
    /// only through this call.
    pub fn release(&self, upto: LogPosition) {
        self.released.fetch_max(upto.0, Ordering::SeqCst);
    }

    /// Takes the next slot.
    pub(crate) fn reserve(&self, seal: SealCount, units: u64, pin: &Pin<'_>) -> Result<Reserved, AppendError> {
        for _ in 0..TRIES_MAX {
            let tail = self.load_tail()?;
            if tail.seal != seal {
                return Err(if self.is_fenced() { AppendError::Fenced } else { AppendError::Sealed });
            }
            let Some(entry) = self.free_entry(tail, Undecided::Wait)? else { continue };
            // It belongs to the tail's slot if the swap below succeeds.
            let start = self.load_start(tail.number)?;
            let (record, end) = place(start, units, self.header.capacity);
            if end.0 >= POSITION_MAX {
                return Err(AppendError::Damaged);
            }
            let missing = self.missing(end, pin)?;
            let is_unready = end.0 > self.ready.load(Ordering::Acquire);
            // SharedFS lowers it before it seals, so under the newest seal count it is the newest one.
            let is_limited = end.0 > self.memory.load_u64(LIMIT_AT)?.wrapping_sub(1);
            if missing > 0 || is_unready || is_limited {
                // A start that was read too late may be too large; it counts only if the tail did not move.
                if self.load_tail()? != tail {
                    continue;
                }
                return Err(match (is_limited, is_unready) {
                    (true, _) => AppendError::Limited { upto: end },
                    (_, true) => AppendError::Unready { upto: end },
                    _ => AppendError::Full { needed: missing },
                });
            }
            let slot = LogSlot { number: tail.number, state: SlotState::Reserved, units };
            if self.swap_slot(entry, slot)? {
                self.advance_past(tail, units, end)?;
                let (at, mark) = (self.ring_offset(record), self.stamp(start).mark(SlotVerdict::Record, units));
                return Ok(Reserved { slot, start, record, end, at, mark });
            }
        }
        Err(AppendError::Damaged)
    }

    /// Returns how many bytes must become free before the ring can hold everything up to `end`.
    fn missing(&self, end: LogPosition, pin: &Pin<'_>) -> Result<u64, AppendError> {
        let lacks = |reusable: u64| end.0.saturating_sub(reusable.saturating_add(self.header.capacity));
        if lacks(self.reusable.load(Ordering::Acquire)) == 0 {
            return Ok(0);
        }
        // This append's own pin may be older than the head, and the append holds no slot.
        pin.renew(|| self.memory.load_u64(HEAD_AT).map_err(AppendError::from))?;
        let head = self.load_head()?.0;
        let mut reusable = head.min(self.released.load(Ordering::SeqCst));
        if !self.planted(Bug::IgnorePins) {
            reusable = reusable.min(self.pins.lowest().0);
        }
        self.reusable.fetch_max(reusable, Ordering::AcqRel);
        Ok(lacks(reusable))
    }

    /// Stores the record without its mark; false if the slot was voided meanwhile.
    pub(crate) fn fill(
        &self,
        reserved: &Reserved,
        kind: u8,
        body_bytes: u64,
        parts: &[&[u8]],
    ) -> Result<bool, AppendError> {
        let slot = reserved.slot;
        let prefix = self.stamp(reserved.start).prefix_with(reserved.mark, slot.units, kind, body_bytes);
        let own_at = reserved.at + UNIT_BYTES;
        if self.planted(Bug::MarkFirst) {
            self.memory.store_u64(reserved.at, reserved.mark)?;
        }
        if body_bytes as usize > SMALL_BODY_BYTES {
            return self.fill_large(reserved, prefix, parts);
        }
        self.expect_next(reserved);
        let mut chunk = StackBuffer::<{ PREFIX_BYTES + SMALL_BODY_BYTES + UNIT_BYTES as usize }>::new();
        chunk.push(&prefix);
        // Store piece by piece, since a load that spans two stores waits for both.
        let mut sum = Crc32c::default();
        sum.update(&prefix);
        for part in parts {
            let from = chunk.len();
            chunk.push(part);
            sum.update(&chunk.bytes()[from..]);
        }
        chunk.bytes_mut()[PREFIX_CRC_AT..PREFIX_CRC_AT + 4].copy_from_slice(&sum.finish().to_le_bytes());
        let own_end = PREFIX_OWN_AT + (slot.units * UNIT_BYTES - UNIT_BYTES) as usize;
        chunk.push(&ZEROS[..own_end - chunk.len()]);
        self.memory.store(own_at, &chunk.bytes()[PREFIX_OWN_AT..])?;
        Ok(true)
    }

    fn fill_large(
        &self,
        reserved: &Reserved,
        prefix: [u8; PREFIX_BYTES],
        parts: &[&[u8]],
    ) -> Result<bool, AppendError> {
        let at = reserved.at;
        let is_fetched = self.ahead.covers(reserved.end.0);
        let mut body = Body::new(self, reserved.slot, at + HEADER_BYTES, &prefix, is_fetched);
        for part in parts {
            if !body.push(part)? {
                return Ok(false);
            }
        }
        let sum = body.finish(at + reserved.slot.units * UNIT_BYTES)?;
        self.expect_next(reserved);
        let mut own = prefix;
        own[PREFIX_CRC_AT..PREFIX_CRC_AT + 4].copy_from_slice(&sum.to_le_bytes());
        self.memory.store(at + UNIT_BYTES, &own[PREFIX_OWN_AT..])?;
        // Stores past the cache must be ordered before the commit: no other process can flush them for this one.
        self.memory.fence();
        Ok(true)
    }

    /// Makes the processor fetch the memory of the next records, except beyond the ring's end.
    ///
    /// The ring is larger than the caches, and a record would wait for memory longer than for anything else.
    fn expect_next(&self, reserved: &Reserved) {
        let bytes = reserved.slot.units * UNIT_BYTES;
        let next = self.ahead.after(reserved.end.0, bytes);
        let length = next.end.min(self.ready.load(Ordering::Relaxed)).saturating_sub(next.start);
        self.memory.expect_store(reserved.at + bytes + (next.start - reserved.end.0), length);
    }

    /// Commits a filled slot and makes it durable; returns false if another process or thread has voided it.
    pub(crate) fn commit(&self, reserved: &Reserved) -> Result<bool, AppendError> {
        let Reserved { slot, at, mark, .. } = *reserved;
        let committed = LogSlot { state: SlotState::Committed, ..slot };
        if !self.swap_slot(slot, committed)? {
            return Ok(false);
        }
        self.memory.store_u64(at, mark)?;
        let bytes = slot.units * UNIT_BYTES;
        let body_bytes = bytes - HEADER_BYTES;
        // A large body was flushed as it was stored.
        self.persist_at(at, if body_bytes as usize > SMALL_BODY_BYTES { HEADER_BYTES } else { bytes })?;
        // A failure means that a waiter for this slot has made it durable.
        self.swap_slot(committed, LogSlot { state: SlotState::Durable, ..slot })?;
        Ok(true)
    }

    /// Settles every slot up to this one, which is settled.
    pub(crate) fn settle_before(&self, number: u32) -> Result<(), AppendError> {
        let mut earlier = self.first_doubtful(number);
        while (number.wrapping_sub(earlier) as i32) > 0 {
            self.settle(earlier, Undecided::Wait)?;
            earlier = earlier.wrapping_add(1);
        }
        self.record_settled(number.wrapping_add(1));
        Ok(())
    }
}

/// A large body that is being stored.
///
/// The checksum is that of the stored bytes: the caller's memory may change between two reads.
struct Body<'a, M> {
    log: &'a Log<M>,
    slot: LogSlot,
    /// The offset of the next bytes, without those in `gathered`.
    to: u64,
    /// Whether the slot's memory was fetched ahead.
    is_fetched: bool,
    sum: Crc32c,
    /// The beginning of a line, and in the end the bytes behind the body.
    gathered: StackBuffer<{ LINE_BYTES + UNIT_BYTES as usize }>,
}

impl<'a, M: Persistent> Body<'a, M> {
    fn new(log: &'a Log<M>, slot: LogSlot, to: u64, prefix: &[u8], is_fetched: bool) -> Self {
        let mut sum = Crc32c::default();
        sum.update(prefix);
        Self { log, slot, to, is_fetched, sum, gathered: StackBuffer::new() }
    }

    /// Stores a part, without the beginning of a line at its end; false if the slot was voided meanwhile.
    fn push(&mut self, part: &[u8]) -> Result<bool, AppendError> {
        let within = (self.to as usize + self.gathered.len()) % LINE_BYTES;
        let missing = if within == 0 { 0 } else { LINE_BYTES - within };
        let (head, rest) = part.split_at(missing.min(part.len()));
        self.gathered.push(head);
        if head.len() < missing {
            return Ok(true);
        }
        self.store_gathered()?;
        let (lines, tail) = rest.split_at(rest.len() - rest.len() % LINE_BYTES);
        for chunk in lines.chunks(CHUNK_BYTES) {
            self.log.memory.store_summed(self.to, chunk, &mut self.sum, self.is_fetched)?;
            self.to += chunk.len() as u64;
            if self.log.load_slot(self.slot.number)? != self.slot {
                return Ok(false);
            }
        }
        self.gathered.push(tail);
        Ok(true)
    }

    fn store_gathered(&mut self) -> Result<(), AppendError> {
        self.sum.update(self.gathered.bytes());
        self.log.memory.store_flushed(self.to, self.gathered.bytes())?;
        self.to += self.gathered.len() as u64;
        self.gathered.clear();
        Ok(())
    }

    /// Stores the rest, and zeros up to `end`. Returns the checksum.
    fn finish(mut self, end: u64) -> Result<u32, AppendError> {
        self.sum.update(self.gathered.bytes());
        let unused = (end - self.to) as usize - self.gathered.len();
        self.gathered.push(&ZEROS[..unused]);
        self.log.memory.store_flushed(self.to, self.gathered.bytes())?;
        Ok(self.sum.finish())
    }
}
