//! The slot table: reservations and their verdicts.
//!
//! # Protocol
//! Slots are numbered in the order of reservation (32 bits, wrapping). Slot *s* uses entry *s* mod 256 of the table,
//! two words:
//!
//! * **state**: number (upper half), state (3 bits), length in units of 8 bytes (26 bits);
//! * **start**: the position at which the slot begins.
//!
//! The tail word holds the number of the next slot and the seal count.
//!
//! * *Reserve* slot s: compare-and-swap its state word from (s − 256, settled) to (s, reserved, length). That one step
//!   takes the slot **and** states its length, so no thread ever meets a slot of unknown length. Then the tail moves
//!   from s to s + 1. Any thread that finds slot s taken may move it, because the new values follow from the table.
//!   Before it moves, the next slot's entry must be settled, and gets its start.
//! * *Seal*: take the next slot with length zero. The tail's seal count goes up as the tail moves past such a slot. A
//!   reservation that was begun under the old count is still trying to take this same slot, and fails.
//! * *Commit*: compare-and-swap (s, reserved) to (s, committed). *Void*: to (s, void). The first exchange decides.
//! * *Settle*: any thread that finds a slot decided may write its mark in the ring, flush, fence, and then swap the
//!   state to durable or voided. Normally a record's owner does it. An append returns when every slot up to its own is
//!   settled.
//!
//! # Why stale words do no harm
//! State words carry the slot's number and are changed by compare-and-swap only. A start is overwritten only once its
//! slot is settled, and only by a larger one. So a start belongs to a slot if it is read between two equal reads of
//! the slot's unsettled state word. For the tail's slot, it is read between two equal reads of the tail. The ring is
//! written only by the owner of an unsettled slot, or (its mark) by settlers. All of them hold a pin (`pins`), so they
//! never write into space that has been given to another slot.

use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use ashlar_pmem::Persistent;
use ashlar_types::{LogPosition, SealCount};

use crate::layout::{RING_AT, SLOT_BYTES, SLOTS, SLOTS_AT, TAIL_AT};
use crate::record::{POSITION_MAX, SlotVerdict, Stamp, UNIT_BYTES, UNITS_MAX, place};
use crate::{Damaged, Log};

/// How often a step is tried while others keep winning. Each loss means that another thread succeeded, so only forged
/// words that change all the time reach it.
pub(crate) const TRIES_MAX: u32 = 1 << 20;
/// Checks of a slot before the clock is looked at: about a microsecond, longer than a small append takes.
const SPINS: u32 = 200;
/// How long an owner may take over a slot, apart from copying: several times a context switch.
const STALL_BASE: Duration = Duration::from_micros(200);
/// How long an owner may take to copy a byte: ten times slower than the slowest medium we know.
const STALL_NS_PER_BYTE: u64 = 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum SlotState {
    Reserved = 0,
    Committed = 1,
    Void = 2,
    Durable = 3,
    Voided = 4,
}

/// A state word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LogSlot {
    pub number: u32,
    pub state: SlotState,
    pub units: u64,
}

const STATE_SHIFT: u32 = 29;

impl LogSlot {
    pub(crate) const fn pack(self) -> u64 {
        (self.number as u64) << 32 | (self.state as u64) << STATE_SHIFT | self.units
    }

    fn unpack(word: u64) -> Result<Self, Damaged> {
        let state = match (word >> STATE_SHIFT) & 7 {
            0 => SlotState::Reserved,
            1 => SlotState::Committed,
            2 => SlotState::Void,
            3 => SlotState::Durable,
            4 => SlotState::Voided,
            _ => return Err(Damaged),
        };
        let slot = Self { number: (word >> 32) as u32, state, units: word & UNITS_MAX };
        // Bits that mean nothing must be zero, or a swap that expects the packed word could never succeed.
        if slot.pack() == word { Ok(slot) } else { Err(Damaged) }
    }

    pub(crate) const fn is_settled(self) -> bool {
        matches!(self.state, SlotState::Durable | SlotState::Voided)
    }

    const fn with(self, state: SlotState) -> Self {
        Self { state, ..self }
    }
}

/// The tail word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tail {
    pub number: u32,
    pub seal: SealCount,
}

impl Tail {
    pub(crate) const fn pack(self) -> u64 {
        (self.number as u64) << 32 | self.seal.0 as u64
    }

    const fn unpack(word: u64) -> Self {
        Self { number: (word >> 32) as u32, seal: SealCount(word as u32) }
    }
}

/// The action on a slot that its owner has not decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Undecided {
    /// Leave it.
    Leave,
    /// Give the owner its time, then void it.
    Wait,
    /// Void it at once.
    Void,
}

/// Where a slot's two words stand.
const fn state_at(number: u32) -> u64 {
    SLOTS_AT + (number % SLOTS) as u64 * SLOT_BYTES
}

const fn start_at(number: u32) -> u64 {
    state_at(number) + 8
}

impl<M: Persistent> Log<M> {
    /// Empties the table: every entry settled, the tail's slot at `start`.
    pub(crate) fn reset_slots(&self, tail: Tail, start: LogPosition) -> Result<(), Damaged> {
        for ahead in 0..SLOTS {
            let number = tail.number.wrapping_add(ahead);
            let before = LogSlot { number: number.wrapping_sub(SLOTS), state: SlotState::Voided, units: 0 };
            self.memory.store_u64(state_at(number), before.pack())?;
            self.memory.store_u64(start_at(number), start.0)?;
        }
        self.memory.store_u64(TAIL_AT, tail.pack())?;
        self.settled.store(tail.number, Ordering::Release);
        Ok(())
    }

    #[inline]
    pub(crate) fn load_tail(&self) -> Result<Tail, Damaged> {
        Ok(Tail::unpack(self.memory.load_u64(TAIL_AT)?))
    }

    #[inline]
    pub(crate) fn load_slot(&self, number: u32) -> Result<LogSlot, Damaged> {
        LogSlot::unpack(self.memory.load_u64(state_at(number))?)
    }

    #[inline]
    pub(crate) fn load_start(&self, number: u32) -> Result<LogPosition, Damaged> {
        let start = self.memory.load_u64(start_at(number))?;
        if start % UNIT_BYTES != 0 || start >= POSITION_MAX {
            return Err(Damaged);
        }
        Ok(LogPosition(start))
    }

    /// Changes a slot's state word; false where it was not as expected.
    #[inline]
    pub(crate) fn swap_slot(&self, from: LogSlot, to: LogSlot) -> Result<bool, Damaged> {
        Ok(self.memory.compare_exchange_u64(state_at(to.number), from.pack(), to.pack())?.is_ok())
    }

    /// The tail, and the position at which its slot begins.
    pub(crate) fn load_tail_start(&self) -> Result<(Tail, LogPosition), Damaged> {
        for _ in 0..TRIES_MAX {
            let tail = self.load_tail()?;
            let start = self.memory.load_u64(start_at(tail.number))?;
            if self.load_tail()? == tail {
                return if start % UNIT_BYTES == 0 && start < POSITION_MAX {
                    Ok((tail, LogPosition(start)))
                } else {
                    Err(Damaged)
                };
            }
        }
        Err(Damaged)
    }

    /// The entry that the tail's slot will take, if it is free to be taken. None where the tail has moved, or was moved
    /// here.
    pub(crate) fn free_entry(&self, tail: Tail, undecided: Undecided) -> Result<Option<LogSlot>, Damaged> {
        let entry = self.load_slot(tail.number)?;
        if entry.number == tail.number {
            self.advance(tail, undecided)?;
            return Ok(None);
        }
        if entry.number == tail.number.wrapping_sub(SLOTS) && entry.is_settled() {
            return Ok(Some(entry));
        }
        // The tail reaches a slot only after its entry was settled, so the words contradict each other unless it moved
        // on.
        if self.load_tail()? == tail { Err(Damaged) } else { Ok(None) }
    }

    /// Moves the tail past its slot, if that is taken; does nothing if another thread has moved it.
    pub(crate) fn advance(&self, tail: Tail, undecided: Undecided) -> Result<(), Damaged> {
        let slot = self.load_slot(tail.number)?;
        let start = self.memory.load_u64(start_at(tail.number))?;
        let next = tail.number.wrapping_add(1);
        let entry = self.load_slot(next)?;
        if entry.number == next.wrapping_sub(SLOTS) && !entry.is_settled() {
            self.settle(entry.number, undecided)?;
        }
        if slot.number != tail.number || self.load_tail()? != tail {
            return Ok(());
        }
        if start % UNIT_BYTES != 0 || start >= POSITION_MAX {
            return Err(Damaged);
        }
        let (_, end) = place(LogPosition(start), slot.units, self.header.capacity);
        self.move_tail(tail, slot.units, end)
    }

    /// Moves the tail past its slot of so many units, which ends there. The next slot's entry is settled.
    #[inline]
    fn move_tail(&self, tail: Tail, units: u64, end: LogPosition) -> Result<(), Damaged> {
        let next = tail.number.wrapping_add(1);
        let old = self.memory.load_u64(start_at(next))?;
        if old < end.0 {
            // A failure means that another thread stored the same value, or that the tail has gone further.
            let _ = self.memory.compare_exchange_u64(start_at(next), old, end.0)?;
        }
        let sealed = u32::from(units == 0);
        let moved = Tail { number: next, seal: SealCount(tail.seal.0.wrapping_add(sealed)) };
        let _ = self.memory.compare_exchange_u64(TAIL_AT, tail.pack(), moved.pack())?;
        Ok(())
    }

    /// As [`Self::advance`], for a caller that has just taken the tail's slot and so knows its length and end.
    #[inline]
    pub(crate) fn advance_past(&self, tail: Tail, units: u64, end: LogPosition) -> Result<(), Damaged> {
        let next = tail.number.wrapping_add(1);
        let entry = self.load_slot(next)?;
        if entry.number == next.wrapping_sub(SLOTS) && !entry.is_settled() {
            self.settle(entry.number, Undecided::Wait)?;
        }
        self.move_tail(tail, units, end)
    }

    /// Brings a slot to its end, durably; false where its owner has not decided and `undecided` says to leave it.
    pub(crate) fn settle(&self, number: u32, undecided: Undecided) -> Result<bool, Damaged> {
        let mut waited = false;
        for _ in 0..TRIES_MAX {
            let slot = self.load_slot(number)?;
            if slot.number != number {
                // The entry has a later slot, so this one was settled; an earlier slot there cannot be.
                return if (slot.number.wrapping_sub(number) as i32) > 0 { Ok(true) } else { Err(Damaged) };
            }
            match slot.state {
                SlotState::Durable | SlotState::Voided => return Ok(true),
                SlotState::Reserved if undecided == Undecided::Leave => return Ok(false),
                SlotState::Reserved if undecided == Undecided::Wait && !waited => {
                    self.wait_for_owner(slot)?;
                    waited = true;
                }
                SlotState::Reserved => {
                    self.swap_slot(slot, slot.with(SlotState::Void))?;
                }
                SlotState::Committed => {
                    if undecided == Undecided::Wait {
                        self.spin_while(slot, SPINS)?;
                    }
                    self.finish(slot, SlotVerdict::Record, SlotState::Durable)?;
                }
                SlotState::Void => self.finish(slot, SlotVerdict::Void, SlotState::Voided)?,
            }
        }
        Err(Damaged)
    }

    /// Writes the mark of a decided slot, makes the slot durable, and says so. Nothing where it is done already.
    fn finish(&self, slot: LogSlot, verdict: SlotVerdict, settled: SlotState) -> Result<(), Damaged> {
        // A thread that settles another's slot on the way to its own has exchanged nothing yet that made its pin known
        // (`pins`).
        fence(Ordering::SeqCst);
        let start = self.memory.load_u64(start_at(slot.number))?;
        if self.load_slot(slot.number)? != slot {
            return Ok(());
        }
        let bytes = slot.units * UNIT_BYTES;
        if start % UNIT_BYTES != 0 || start >= POSITION_MAX || bytes > self.header.capacity {
            return Err(Damaged);
        }
        let start = LogPosition(start);
        let (record, _) = place(start, slot.units, self.header.capacity);
        // A record's content may still be in its owner's caches as far as persistence goes, so all of it is flushed.
        let flushed = if verdict == SlotVerdict::Record { bytes } else { UNIT_BYTES };
        self.write_mark(start, record, verdict, slot.units)?;
        self.persist(record, flushed)?;
        self.swap_slot(slot, slot.with(settled))?;
        Ok(())
    }

    /// Writes a decided slot's mark.
    #[inline]
    pub(crate) fn write_mark(
        &self,
        start: LogPosition,
        record: LogPosition,
        verdict: SlotVerdict,
        units: u64,
    ) -> Result<(), Damaged> {
        let mark = self.stamp(start).mark(verdict, units);
        Ok(self.memory.store_u64(self.ring_offset(record), mark)?)
    }

    /// Flushes and fences part of the ring.
    #[inline]
    pub(crate) fn persist(&self, from: LogPosition, bytes: u64) -> Result<(), Damaged> {
        self.persist_at(self.ring_offset(from), bytes)
    }

    /// As [`Self::persist`], by the place in the memory.
    #[inline]
    pub(crate) fn persist_at(&self, at: u64, bytes: u64) -> Result<(), Damaged> {
        if !self.planted(crate::Bug::SkipFlush) {
            self.memory.flush(at, bytes)?;
        }
        self.memory.fence();
        Ok(())
    }

    /// Where in the memory the byte at a position lies.
    #[must_use]
    #[inline]
    pub fn ring_offset(&self, position: LogPosition) -> u64 {
        RING_AT + position.0 % self.header.capacity
    }

    /// The values that the checks of the slot at `position` are bound to.
    #[inline]
    pub(crate) fn stamp(&self, position: LogPosition) -> Stamp {
        Stamp { key: self.header.key, generation: self.header.generation, position }
    }

    fn spin_while(&self, slot: LogSlot, spins: u32) -> Result<bool, Damaged> {
        for _ in 0..spins {
            if self.load_slot(slot.number)? != slot {
                return Ok(false);
            }
            std::hint::spin_loop();
        }
        Ok(true)
    }

    /// Waits for as long as an owner that runs needs for its slot, or until it is decided.
    fn wait_for_owner(&self, slot: LogSlot) -> Result<(), Damaged> {
        if !self.spin_while(slot, SPINS)? {
            return Ok(());
        }
        let deadline = Instant::now() + STALL_BASE + Duration::from_nanos(slot.units * UNIT_BYTES * STALL_NS_PER_BYTE);
        while self.load_slot(slot.number)? == slot && Instant::now() < deadline {
            std::thread::yield_now();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_decoded_as_encoded() {
        use SlotState::{Committed, Durable, Reserved, Void, Voided};
        for state in [Reserved, Committed, Void, Durable, Voided] {
            for (number, units) in [(0, 0), (u32::MAX, UNITS_MAX), (7, 3)] {
                let slot = LogSlot { number, state, units };
                assert_eq!(LogSlot::unpack(slot.pack()), Ok(slot));
            }
        }
        assert_eq!(LogSlot::unpack(7 << STATE_SHIFT), Err(Damaged));
        assert_eq!(LogSlot::unpack(1 << 27), Err(Damaged));
        let tail = Tail { number: u32::MAX, seal: SealCount(5) };
        assert_eq!(Tail::unpack(tail.pack()), tail);
    }
}
