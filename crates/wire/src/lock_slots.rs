//! Record locks in shared memory: a session that alone locks a file needs no message.
//!
//! A session's control page has some slots. Each slot holds the record locks of the session's process on one file:
//!
//! ```text
//!    0  16 headers of word:8 inode:8          word = generation << 8 | active list << 2 | state
//!  256  16 times 2 lists of count:8, 8 bytes unused, 31 times (write << 63 | first):8 last:8
//! ```
//!
//! The state says which side decides about these locks:
//!
//! - *free*: no file uses the slot. The session claims a free slot (→ shared), and frees an empty one (→ free).
//! - *shared*: SharedFS's table decides. The slot holds a copy, by which the session knows what it has locked.
//! - *delegated*: the slot itself decides. No other session has a record lock on the file, or waits for one.
//!
//! A side that changes a list writes the inactive one, and then activates it by a compare-and-swap of the word.
//!
//! SharedFS delegates (shared → delegated) in answer to a request of the session. The session leaves the slot unchanged
//! until the answer. The request names the slot's word, so that a late request delegates nothing.
//!
//! SharedFS recalls (delegated → shared) at any time, and then reads the active list. Neither side writes to that list:
//! a change that the session has begun goes to the other list, and fails. If the word has changed during the reading,
//! the session has unlocked something in its copy, and SharedFS reads the list again. So a list is never taken in part,
//! and neither side waits for the other.
//!
//! The session can write all of it. SharedFS reads there only the locks of files that it has delegated. All others it
//! notes where no session can write ([`LockNotes`]), and a restarted SharedFS believes the notes alone.

use ashlar_pmem::{CheckedMemory, PartAt, Persistent, RowsAt, WordAt};
use ashlar_types::{ByteRange, InodeId, LockAction, LockMode, LockedRange, change_range};

use crate::LockSlot;

/// Slots of one session: files that it locks at the same time without messages. Databases use two or three.
pub const LOCK_SLOTS: u32 = 16;
/// Ranges for which a slot has room. SQLite uses three.
pub const LOCK_RANGES_MAX: usize = 31;
/// The owner of a process's own record locks in its session. No other owner in a session has this number.
pub const LOCK_OWNER_PROCESS: u64 = u64::MAX;
/// The last byte that can be locked.
pub const LOCK_LAST: u64 = i64::MAX as u64;

/// Bytes that the slots take.
pub const LOCK_SLOTS_BYTES: u64 = LISTS + LOCK_SLOTS as u64 * 2 * LIST_BYTES;
const HEADER_BYTES: u64 = 16;
const LISTS: u64 = LOCK_SLOTS as u64 * HEADER_BYTES;
const LIST_BYTES: u64 = 16 + LOCK_RANGES_MAX as u64 * 16;
const HEADER_ROWS: RowsAt<LOCK_SLOTS_BYTES, HEADER_BYTES> = RowsAt::new(0, LOCK_SLOTS as u64);
const LIST_ROWS: RowsAt<LOCK_SLOTS_BYTES, LIST_BYTES> = RowsAt::new(LISTS, 2 * LOCK_SLOTS as u64);
const RANGE_ROWS: RowsAt<LIST_BYTES, 16> = RowsAt::new(16, LOCK_RANGES_MAX as u64);
const COUNT: WordAt<LIST_BYTES> = WordAt::new(0);
/// The first and the second word of a header or of a range.
const FIRST: WordAt<16> = WordAt::new(0);
const SECOND: WordAt<16> = WordAt::new(8);
const WRITE: u64 = 1 << 63;
/// How often SharedFS tries to recall or to read a slot.
///
/// A session that changes the slot each time does so on purpose, and harms only itself by the result.
const TRIES: u32 = 1000;

const _: () = assert!(LISTS == 256 && LIST_BYTES == 512);

/// The side that decides about a slot's locks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LockSlotState {
    /// No file uses the slot.
    Free,
    /// SharedFS's table decides.
    Shared,
    /// The slot itself decides.
    Delegated,
}

/// The result of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LockChange {
    /// The change was made.
    Done,
    /// The list has no room for so many ranges. Nothing has changed.
    Full,
    /// The slot is no longer in that state, or no longer that file's. Nothing has changed.
    Moved,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Word(u64);

impl Word {
    fn state(self) -> LockSlotState {
        match self.0 & 3 {
            1 => LockSlotState::Shared,
            2 => LockSlotState::Delegated,
            _ => LockSlotState::Free,
        }
    }

    fn active(self) -> u64 {
        self.0 >> 2 & 1
    }

    /// Returns the word that follows, with this state and this active list.
    fn next(self, state: LockSlotState, active: u64) -> Self {
        let state = match state {
            LockSlotState::Free => 0,
            LockSlotState::Shared => 1,
            LockSlotState::Delegated => 2,
        };
        Self(((self.0 >> 8).wrapping_add(1)) << 8 | active << 2 | state)
    }
}

/// A process's record locks on one file.
///
/// The ranges are sorted and disjoint. Adjacent ranges of one mode are merged.
#[derive(Clone, Debug)]
pub struct LockList {
    ranges: [LockedRange; LOCK_RANGES_MAX],
    count: usize,
}

impl Default for LockList {
    fn default() -> Self {
        Self { ranges: [LockedRange::default(); LOCK_RANGES_MAX], count: 0 }
    }
}

impl LockList {
    /// Returns the ranges.
    #[must_use]
    pub fn ranges(&self) -> &[LockedRange] {
        &self.ranges[..self.count]
    }

    /// Whether the list has no ranges.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Whether any byte of a range is locked.
    #[must_use]
    pub fn overlaps(&self, range: ByteRange) -> bool {
        self.ranges().iter().any(|held| held.range.overlaps(range))
    }

    /// Locks or unlocks a range; `false` if the list has no room for the result, and then it stays unchanged.
    #[must_use]
    pub fn set(&mut self, range: ByteRange, action: LockAction) -> bool {
        let mut new = Self::default();
        let has_room = change_range(self.ranges(), range, action, |held| new.push(held));
        if has_room {
            *self = new;
        }
        has_room
    }

    /// Makes the locks in a range no stronger than `mode`; a list that has no room for the result stays unchanged.
    ///
    /// It holds what an owner has for certain while it is unknown whether a request for such a lock was served.
    pub fn weaken(&mut self, range: ByteRange, mode: LockMode) {
        let mut new = self.clone();
        let has_room = self.ranges().iter().filter(|held| held.mode > mode && held.range.overlaps(range)).all(|held| {
            let first = held.range.first.max(range.first);
            new.set(ByteRange { first, last: held.range.last.min(range.last) }, mode.into())
        });
        if has_room {
            *self = new;
        }
    }

    /// Appends a range behind all others; `false` if the list has no room.
    fn push(&mut self, held: LockedRange) -> bool {
        if self.ranges[..self.count].last_mut().is_some_and(|before| before.extend(&held)) {
            return true;
        }
        let Some(place) = self.ranges.get_mut(self.count) else { return false };
        *place = held;
        self.count += 1;
        true
    }
}

/// SharedFS's notes of the record locks that a session's process has in the table.
///
/// They have the form of slots, in memory that only SharedFS writes: the last [`LOCK_SLOTS_BYTES`] of a file of `END`
/// bytes. A kill in the middle of a change leaves the list from before it.
#[derive(Debug)]
pub struct LockNotes<M, const END: u64>(CheckedMemory<M, END>);

impl<M: Persistent, const END: u64> LockNotes<M, END> {
    const AT: PartAt<END, LOCK_SLOTS_BYTES> = PartAt::new(END - LOCK_SLOTS_BYTES);

    /// Takes the last bytes of memory; `None` if it is too short, or read-only.
    pub fn new(memory: M) -> Option<Self> {
        CheckedMemory::new(memory).ok().map(Self)
    }

    fn slots(&self) -> LockSlots<'_, M, END> {
        LockSlots { memory: &self.0, at: Self::AT }
    }

    /// Notes all locks that the process has on a file; `false` if there is no room for them.
    pub fn set(&self, inode: InodeId, ranges: impl ExactSizeIterator<Item = LockedRange>) -> bool {
        let slots = self.slots();
        let found = slots.find_slot(inode);
        if ranges.len() == 0 {
            return found.is_none_or(|slot| slots.free(slot));
        }
        let Some(slot) = found.or_else(|| slots.claim(inode)) else { return false };
        let mut ranges = ranges;
        let set = |list: &mut LockList| {
            *list = LockList::default();
            ranges.all(|range| list.push(range))
        };
        slots.change(slot, inode, LockSlotState::Shared, set) == LockChange::Done
    }

    /// Returns the noted files, with their locks.
    pub fn all(&self) -> Vec<(InodeId, Vec<LockedRange>)> {
        self.slots().claimed().into_iter().map(|(_, inode, _, ranges)| (inode, ranges)).collect()
    }

    /// Removes all notes.
    pub fn clear(&self) {
        self.0.clear(Self::AT);
    }
}

/// The slots of one session, in a part of its control page.
#[derive(Debug)]
pub(crate) struct LockSlots<'a, M, const BYTES: u64> {
    pub(crate) memory: &'a CheckedMemory<M, BYTES>,
    pub(crate) at: PartAt<BYTES, LOCK_SLOTS_BYTES>,
}

impl<M: Persistent, const BYTES: u64> LockSlots<'_, M, BYTES> {
    fn header(&self, slot: u32) -> PartAt<BYTES, HEADER_BYTES> {
        self.at.part(HEADER_ROWS.row(slot.into()))
    }

    fn list(&self, slot: u32, which: u64) -> PartAt<BYTES, LIST_BYTES> {
        self.at.part(LIST_ROWS.row(u64::from(slot) * 2 + which))
    }

    fn word(&self, slot: u32) -> Word {
        Word(self.memory.load(self.header(slot).word(FIRST)))
    }

    fn inode(&self, slot: u32) -> InodeId {
        InodeId(self.memory.load(self.header(slot).word(SECOND)))
    }

    fn exchange(&self, slot: u32, from: Word, to: Word) -> bool {
        self.memory.exchange(self.header(slot).word(FIRST), from.0, to.0).is_ok()
    }

    fn write(&self, slot: u32, which: u64, ranges: &[LockedRange]) {
        let list = self.list(slot, which);
        for (number, LockedRange { mode, range }) in (0..RANGE_ROWS.rows()).zip(ranges) {
            let row = list.part(RANGE_ROWS.row(number));
            self.memory.store(row.word(FIRST), range.first | if *mode == LockMode::Write { WRITE } else { 0 });
            self.memory.store(row.word(SECOND), range.last.min(LOCK_LAST));
        }
        self.memory.store(list.word(COUNT), ranges.len() as u64);
    }

    /// Returns the valid ranges of a list, whatever bytes stand there.
    fn read(&self, slot: u32, which: u64) -> impl Iterator<Item = LockedRange> + '_ {
        let list = self.list(slot, which);
        let count = self.memory.load(list.word(COUNT)).min(LOCK_RANGES_MAX as u64);
        let ranges = (0..count).map(move |number| {
            let row = list.part(RANGE_ROWS.row(number));
            let (first, last) = (self.memory.load(row.word(FIRST)), self.memory.load(row.word(SECOND)));
            let mode = if first & WRITE != 0 { LockMode::Write } else { LockMode::Read };
            LockedRange { mode, range: ByteRange { first: first & !WRITE, last: last.min(LOCK_LAST) } }
        });
        ranges.filter(|held| held.range.is_valid())
    }

    fn read_own(&self, slot: u32, which: u64) -> LockList {
        let mut list = LockList::default();
        for range in self.read(slot, which) {
            // The list has room for all ranges that were written.
            list.push(range);
        }
        list
    }

    pub(crate) fn find_slot(&self, inode: InodeId) -> Option<u32> {
        (0..LOCK_SLOTS).find(|&slot| self.inode(slot) == inode && self.word(slot).state() != LockSlotState::Free)
    }

    pub(crate) fn read_content(&self, slot: u32) -> (InodeId, LockSlotState, LockList) {
        let word = self.word(slot);
        (self.inode(slot), word.state(), self.read_own(slot, word.active()))
    }

    pub(crate) fn at_present(&self, slot: u32) -> LockSlot {
        LockSlot { number: slot, word: self.word(slot).0 }
    }

    pub(crate) fn claim(&self, inode: InodeId) -> Option<u32> {
        let slot = (0..LOCK_SLOTS).find(|&slot| self.word(slot).state() == LockSlotState::Free)?;
        let word = self.word(slot);
        self.memory.store(self.header(slot).word(SECOND), inode.0);
        self.write(slot, 0, &[]);
        self.exchange(slot, word, word.next(LockSlotState::Shared, 0)).then_some(slot)
    }

    pub(crate) fn free(&self, slot: u32) -> bool {
        let word = self.word(slot);
        word.state() == LockSlotState::Free || self.exchange(slot, word, word.next(LockSlotState::Free, 0))
    }

    pub(crate) fn change(
        &self,
        slot: u32,
        inode: InodeId,
        state: LockSlotState,
        change: impl FnOnce(&mut LockList) -> bool,
    ) -> LockChange {
        let word = self.word(slot);
        if word.state() != state || self.inode(slot) != inode {
            return LockChange::Moved;
        }
        let mut list = self.read_own(slot, word.active());
        if !change(&mut list) {
            return LockChange::Full;
        }
        let other = 1 - word.active();
        self.write(slot, other, list.ranges());
        if self.exchange(slot, word, word.next(state, other)) { LockChange::Done } else { LockChange::Moved }
    }

    pub(crate) fn delegate(&self, slot: LockSlot, inode: InodeId, ranges: &[LockedRange]) -> bool {
        let (slot, word) = (slot.number, Word(slot.word));
        if word != self.word(slot)
            || word.state() != LockSlotState::Shared
            || self.inode(slot) != inode
            || ranges.len() > LOCK_RANGES_MAX
        {
            return false;
        }
        let other = 1 - word.active();
        self.write(slot, other, ranges);
        self.exchange(slot, word, word.next(LockSlotState::Delegated, other))
    }

    pub(crate) fn recall(&self, slot: u32, inode: InodeId) -> Vec<LockedRange> {
        for tried in 1..=TRIES {
            let word = self.word(slot);
            if word.state() != LockSlotState::Delegated || self.inode(slot) != inode {
                return Vec::new();
            }
            let shared = word.next(LockSlotState::Shared, word.active());
            if tried == TRIES {
                self.memory.store(self.header(slot).word(FIRST), shared.0);
            } else if !self.exchange(slot, word, shared) {
                continue;
            }
            return self.read_settled(slot, inode);
        }
        Vec::new()
    }

    /// Returns the locks in a file's slot as they were at one moment.
    fn read_settled(&self, slot: u32, inode: InodeId) -> Vec<LockedRange> {
        let mut ranges = Vec::new();
        for _ in 0..TRIES {
            let word = self.word(slot);
            if word.state() == LockSlotState::Free || self.inode(slot) != inode {
                return Vec::new();
            }
            ranges = self.read(slot, word.active()).collect();
            if self.word(slot) == word {
                break;
            }
        }
        ranges
    }

    pub(crate) fn claimed(&self) -> Vec<(u32, InodeId, LockSlotState, Vec<LockedRange>)> {
        let claimed = |slot| {
            let (state, inode) = (self.word(slot).state(), self.inode(slot));
            (state != LockSlotState::Free).then(|| (slot, inode, state, self.read_settled(slot, inode)))
        };
        (0..LOCK_SLOTS).filter_map(claimed).collect()
    }
}

#[cfg(test)]
mod tests;
