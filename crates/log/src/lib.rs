//! The update log: a session's private, persistent operation log.
//!
//! Purpose: a session's threads append records without a lock and without a system call. SharedFS seals and reads the
//! log while the session continues. After any crash, recovery finds the valid prefix.
//!
//! # Invariants
//! * **Order**: records have one order, that of their reservations. An append returns only when every slot before its
//!   own is durable as a record or as a void. So the survivors of a crash are a prefix, and it holds every append that
//!   returned.
//! * **A stopped thread blocks no other**: any thread that needs a slot decided may void it after its time. The owner
//!   finds out and retries. An append in a signal handler gets past the append that it interrupted.
//! * **Sealing is a point in the order**: an append made under an older seal count is before it, or fails.
//! * **Nothing stale or torn is a record**: a mark is written only after its slot's fate is decided. Mark and checksum
//!   are bound to the log's key, the generation, and the position. From the recovered end on, a recovered log takes
//!   only records of its new generation.
//! * **The other side is not trusted**: every value from shared memory is bounded before use, every loop ends, and
//!   records are copied before they are verified.
//!
//! One fence persists a small record. A record costs 24 bytes beside its body, rounded up to 8 bytes.
//!
//! Not here: the meaning of records (`ashlar-update`), the right to append (leases), when to digest.
//!
//! The format stands in `layout` and `record`, the protocol in `slots`, reuse of space in `pins`.
//!
//! Source: `docs/design.md`, section "Data path"; the log of Assise (OSDI 2020), §3.2.

mod append;
mod daemon;
mod error;
mod layout;
mod pins;
mod record;
mod recover;
mod scan;
mod slots;
mod stack_buffer;
#[cfg(test)]
mod tests;

use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use ashlar_pmem::{FetchedAhead, OutOfBounds, Persistent};
use ashlar_types::{LogGeneration, LogPosition, SealCount};

pub use append::Appended;
pub use error::{AppendError, Corrupt, Damaged, Fault, LogOpenError};
pub use pins::Pin;
pub use scan::{Record, RecordAt, RecordRef, Scanner};

use layout::{FENCED_AT, HEAD_AT, Header, RING_AT, RING_BYTES_MIN};
use pins::Pins;
use record::{HEADER_BYTES, POSITION_MAX, UNIT_BYTES, UNITS_MAX};
use slots::Tail;

/// An update log in shared, persistent memory.
///
/// The session that owns it and SharedFS each have one of these over the same memory; each method names its side.
/// Threads share it freely.
pub struct Log<M> {
    memory: M,
    header: Header,
    pins: Pins,
    /// Every slot before this one is known to be settled.
    settled: AtomicU32,
    /// The position up to which this process refers to no bytes any more.
    released: AtomicU64,
    /// Space up to this position is known to be free for reuse.
    reusable: AtomicU64,
    /// The position behind which no append goes: the file may have no room there yet.
    ready: AtomicU64,
    /// The positions whose memory was fetched for records to come.
    ahead: FetchedAhead,
    /// Held by SharedFS while it settles slots or moves the head, so that it never writes a mark into reused space.
    daemon_lock: Mutex<()>,
    #[cfg(test)]
    bug: Bug,
}

/// Faults that tests plant to show that their checkers detect them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(test), allow(dead_code))]
pub(crate) enum Bug {
    /// No fault.
    None,
    /// Records and voids are not flushed.
    SkipFlush,
    /// Checksums are not verified.
    SkipChecksum,
    /// An append does not wait for the slots before its own.
    SkipOrder,
    /// Recovery keeps the generation.
    SkipGeneration,
    /// A mark is written before the slot's fate is decided.
    MarkFirst,
    /// Space is reused although it is pinned.
    IgnorePins,
}

impl<M: Persistent> Log<M> {
    /// Returns the bytes of memory that a log with a ring of this size needs.
    #[must_use]
    pub const fn bytes_for(ring_bytes: u64) -> u64 {
        RING_AT + if ring_bytes < RING_BYTES_MIN { RING_BYTES_MIN } else { ring_bytes }
    }

    /// Makes an empty log, durably. Earlier content of the memory does not become part of it.
    ///
    /// # Errors
    /// [`LogOpenError::TooSmall`], [`LogOpenError::System`].
    pub fn format(memory: M, generation: LogGeneration) -> Result<Self, LogOpenError> {
        use std::hash::{BuildHasher, Hasher, RandomState};
        // The standard library seeds its hashers from the system's random generator.
        Self::format_with_key(memory, generation, RandomState::new().build_hasher().finish())
    }

    /// Makes an empty log with a given key, for runs that must have the same result each time.
    ///
    /// # Errors
    /// As [`Self::format`].
    pub fn format_with_key(memory: M, generation: LogGeneration, key: u64) -> Result<Self, LogOpenError> {
        let header = Header::new(memory.len(), generation, key)?;
        header.write(&memory)?;
        let log = Self::over(memory, header, LogPosition(0));
        log.memory.store_u64(FENCED_AT, 0)?;
        log.set_limit(None);
        log.store_head(LogPosition(0))?;
        log.reset_slots(Tail { number: 0, seal: SealCount(0) }, LogPosition(0))
            .map_err(|_| LogOpenError::DamagedHeader)?;
        log.memory.flush(0, RING_AT)?;
        log.memory.fence();
        log.memory.sync()?;
        Ok(log)
    }

    /// Attaches to a log that is in use or was left by a process that died.
    ///
    /// After a power loss, use [`Self::recover`] instead.
    ///
    /// # Errors
    /// [`LogOpenError`].
    pub fn open(memory: M) -> Result<Self, LogOpenError> {
        let header = Header::read(&memory)?;
        let head = LogPosition(memory.load_u64(HEAD_AT)?);
        let log = Self::over(memory, header, head);
        // This is the oldest slot that may be unsettled. A nonsensical value shows at the first use.
        if let Ok(tail) = log.load_tail() {
            log.settled.store(tail.number.wrapping_sub(layout::SLOTS), Ordering::Relaxed);
        }
        Ok(log)
    }

    fn over(memory: M, header: Header, head: LogPosition) -> Self {
        Self {
            memory,
            header,
            pins: Pins::new(),
            settled: AtomicU32::new(0),
            released: AtomicU64::new(head.0),
            reusable: AtomicU64::new(head.0),
            ready: AtomicU64::new(u64::MAX),
            ahead: FetchedAhead::default(),
            daemon_lock: Mutex::new(()),
            #[cfg(test)]
            bug: Bug::None,
        }
    }

    /// Returns the memory of the log.
    #[must_use]
    pub fn memory(&self) -> &M {
        &self.memory
    }

    /// Returns the generation under which records are appended.
    #[must_use]
    pub fn generation(&self) -> LogGeneration {
        self.header.generation
    }

    /// Returns the bytes of the ring.
    #[must_use]
    pub fn capacity(&self) -> u64 {
        self.header.capacity
    }

    /// Returns the longest body of a record: a quarter of the ring, so that no record waits for a whole lap.
    #[must_use]
    pub fn body_bytes_max(&self) -> u64 {
        (self.header.capacity / 4).min(UNITS_MAX * UNIT_BYTES) / UNIT_BYTES * UNIT_BYTES - HEADER_BYTES
    }

    /// Limits appends to a position, before the first append: the file must get room behind it first.
    pub fn set_ready(&self, upto: LogPosition) {
        self.ready.store(upto.0, Ordering::Release);
    }

    /// Raises the position up to which appends may go.
    pub fn record_ready(&self, upto: LogPosition) {
        self.ready.fetch_max(upto.0, Ordering::AcqRel);
    }

    /// Returns the position up to which appends may go.
    #[must_use]
    pub fn ready(&self) -> LogPosition {
        LogPosition(self.ready.load(Ordering::Acquire))
    }

    /// Returns the ranges of memory between two positions, which are at most one lap apart.
    ///
    /// The second range holds the part behind the ring's end.
    #[must_use]
    pub fn parts(&self, from: LogPosition, to: LogPosition) -> [Range<u64>; 2] {
        let (first, end) = (self.ring_offset(from), RING_AT + self.header.capacity);
        let behind = first + to.0.saturating_sub(from.0).min(self.header.capacity);
        [first..behind.min(end), RING_AT..RING_AT + behind.saturating_sub(end)]
    }

    /// Returns the bytes of memory, from its beginning, that the first appends up to a position write.
    #[must_use]
    pub fn bytes_upto(&self, upto: LogPosition) -> u64 {
        RING_AT + upto.0.min(self.header.capacity)
    }

    /// Returns the position that SharedFS has last published as committed; 0 if the memory is gone.
    #[must_use]
    pub fn head(&self) -> LogPosition {
        LogPosition(self.memory.load_u64(HEAD_AT).unwrap_or(0))
    }

    /// Returns the position at which the next slot will begin, or the head if the log's words contradict each other.
    #[must_use]
    pub fn tail(&self) -> LogPosition {
        self.load_tail_start().map_or_else(|_| self.head(), |(_, start)| start)
    }

    /// Returns the bytes between head and tail.
    #[must_use]
    pub fn used(&self) -> u64 {
        let head = self.head();
        self.tail().0.saturating_sub(head.0)
    }

    /// Returns how often the log has been sealed.
    ///
    /// A session reads the count before it checks its leases, and appends under it.
    #[must_use]
    pub fn seal_count(&self) -> SealCount {
        self.load_tail().map_or(SealCount(u32::MAX), |tail| tail.seal)
    }

    /// Whether the log is fenced.
    #[must_use]
    pub fn is_fenced(&self) -> bool {
        self.memory.load_u64(FENCED_AT).unwrap_or(1) != 0
    }

    /// Copies bytes out of a record's body.
    ///
    /// They are the record's only if the caller has not released that part of the log, so that it is not reused.
    ///
    /// # Errors
    /// [`OutOfBounds`] if the bytes leave the ring, which no record's body does.
    #[inline]
    pub fn read(&self, position: LogPosition, into: &mut [u8]) -> Result<(), OutOfBounds> {
        let (offset, length) = (position.0 % self.header.capacity, into.len() as u64);
        if length > self.header.capacity - offset {
            return Err(OutOfBounds { offset, length, available: self.header.capacity });
        }
        self.memory.load(RING_AT + offset, into)
    }

    fn store_head(&self, head: LogPosition) -> Result<(), OutOfBounds> {
        self.memory.store_u64(HEAD_AT, head.0)?;
        self.memory.flush(HEAD_AT, 8)?;
        self.memory.fence();
        Ok(())
    }

    fn load_head(&self) -> Result<LogPosition, Damaged> {
        let head = self.memory.load_u64(HEAD_AT)?;
        if head < POSITION_MAX { Ok(LogPosition(head)) } else { Err(Damaged) }
    }

    /// Moves the mark before which every slot is settled.
    ///
    /// The slower of two threads may move it back a little. Slots behind it are then checked once more, which costs
    /// less than an exchange at every append.
    #[inline]
    fn record_settled(&self, before: u32) {
        if self.settled.load(Ordering::Relaxed).wrapping_sub(before) > layout::SLOTS {
            self.settled.store(before, Ordering::Release);
        }
    }

    /// Returns the first slot before `number` that may be unsettled: no slot more than a table's length back can be.
    fn first_doubtful(&self, number: u32) -> u32 {
        let oldest = number.wrapping_sub(layout::SLOTS);
        let known = self.settled.load(Ordering::Acquire);
        // Other threads are at most a table's length ahead of this one.
        if known.wrapping_sub(oldest) <= 2 * layout::SLOTS { known } else { oldest }
    }

    #[cfg(test)]
    fn planted(&self, bug: Bug) -> bool {
        self.bug == bug
    }

    #[cfg(not(test))]
    #[inline(always)]
    #[allow(clippy::unused_self)]
    const fn planted(&self, _bug: Bug) -> bool {
        false
    }
}

impl<M> std::fmt::Debug for Log<M> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Log")
            .field("capacity", &self.header.capacity)
            .field("generation", &self.header.generation)
            .finish_non_exhaustive()
    }
}
