//! The layout of a log's memory.
//!
//! ```text
//! offset  size
//!      0     8  magic, "ASHLRLOG"
//!      8     4  format version (1)
//!     12     4  zero
//!     16     8  bytes of the ring
//!     24     8  key: random; checksums of this log are bound to it
//!     32     8  CRC32C of bytes 0 to 31, in the lower half
//!     64    16  incarnation, of even generation (below)
//!    128    16  incarnation, of odd generation
//!    192     8  tail: number of the next slot (upper half), seal count (lower half)
//!    256     8  head: position up to which SharedFS has committed
//!    264     8  limit: position behind which no append goes, and 1; 0: there is none
//!    320     8  1 if the log is fenced
//!   4096  4096  slot table: 256 slots of 16 bytes (see `slots`)
//!   8192     …  ring: the byte at position p stands at 8192 + p mod (bytes of the ring)
//! ```
//!
//! An incarnation is two words. The first is the generation (upper half) with the CRC32C of key, generation and
//! boundary (lower half). The second is the boundary: the position from which every record must be of this generation.
//! Recovery writes the incarnation that is not in force, so that a crash leaves one of the two whole. Of the whole
//! ones, the one with the higher generation is in force.
//!
//! All numbers are little-endian. The tail and the slot table matter only while the machine is up. After a power loss,
//! the ring, the header and the committed position in the metadata store suffice.

use ashlar_pmem::{Crc32c, Persistent};
use ashlar_types::{LogGeneration, LogPosition};

use crate::LogOpenError;

pub(crate) const MAGIC: u64 = u64::from_le_bytes(*b"ASHLRLOG");
pub(crate) const VERSION: u32 = 1;

const MAGIC_AT: u64 = 0;
const VERSION_AT: u64 = 8;
const CAPACITY_AT: u64 = 16;
const KEY_AT: u64 = 24;
const CRC_AT: u64 = 32;
const INCARNATIONS_AT: [u64; 2] = [64, 128];
pub(crate) const TAIL_AT: u64 = 192;
pub(crate) const HEAD_AT: u64 = 256;
/// In the line of the head: an append reads both, and both change seldom.
pub(crate) const LIMIT_AT: u64 = 264;
pub(crate) const FENCED_AT: u64 = 320;
pub(crate) const SLOTS_AT: u64 = 4096;
pub(crate) const RING_AT: u64 = 8192;

/// Slots in the table, which limit the appends in flight at once.
///
/// The number is far above the threads that a process runs at once, and small enough for SharedFS to walk when it
/// seals.
pub(crate) const SLOTS: u32 = 256;
pub(crate) const SLOT_BYTES: u64 = 16;
/// The ring is a multiple of this, so that it begins and ends with whole cache lines.
const RING_UNIT_BYTES: u64 = 64;
/// The smallest ring; it holds four records of the largest size that such a log takes.
pub(crate) const RING_BYTES_MIN: u64 = 1024;

const _: () = assert!(SLOTS_AT + SLOTS as u64 * SLOT_BYTES == RING_AT);
const _: () = assert!(FENCED_AT + 8 <= SLOTS_AT);

/// A log's header, read once, since a session may overwrite it later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub capacity: u64,
    pub key: u64,
    pub generation: LogGeneration,
    pub boundary: LogPosition,
}

impl Header {
    /// Makes the header of a new log in `available` bytes.
    pub(crate) fn new(available: u64, generation: LogGeneration, key: u64) -> Result<Self, LogOpenError> {
        let capacity = available.saturating_sub(RING_AT) / RING_UNIT_BYTES * RING_UNIT_BYTES;
        if capacity < RING_BYTES_MIN {
            return Err(LogOpenError::TooSmall { available, needed: RING_AT + RING_BYTES_MIN });
        }
        Ok(Self { capacity, key, generation, boundary: LogPosition(0) })
    }

    pub(crate) fn write(&self, memory: &impl Persistent) -> Result<(), LogOpenError> {
        memory.store_u64(MAGIC_AT, MAGIC)?;
        memory.store_u64(VERSION_AT, u64::from(VERSION))?;
        memory.store_u64(CAPACITY_AT, self.capacity)?;
        memory.store_u64(KEY_AT, self.key)?;
        memory.store_u64(CRC_AT, u64::from(static_crc(self.capacity, self.key)))?;
        // An incarnation left here could be taken for a newer one of this log.
        for at in INCARNATIONS_AT {
            memory.store_u64(at, 0)?;
            memory.store_u64(at + 8, 0)?;
        }
        memory.flush(0, TAIL_AT)?;
        self.write_incarnation(memory)
    }

    /// Writes generation and boundary, over the incarnation that is not in force.
    pub(crate) fn write_incarnation(&self, memory: &impl Persistent) -> Result<(), LogOpenError> {
        let at = INCARNATIONS_AT[self.generation.0 as usize % 2];
        let crc = incarnation_crc(self.key, self.generation, self.boundary);
        memory.store_u64(at, u64::from(self.generation.0) << 32 | u64::from(crc))?;
        memory.store_u64(at + 8, self.boundary.0)?;
        memory.flush(at, 16)?;
        memory.fence();
        Ok(())
    }

    pub(crate) fn read(memory: &impl Persistent) -> Result<Self, LogOpenError> {
        let available = memory.len();
        if available < RING_AT + RING_BYTES_MIN {
            return Err(LogOpenError::TooSmall { available, needed: RING_AT + RING_BYTES_MIN });
        }
        if memory.load_u64(MAGIC_AT)? != MAGIC {
            return Err(LogOpenError::NotALog);
        }
        let found = memory.load_u64(VERSION_AT)?;
        if found != u64::from(VERSION) {
            return Err(LogOpenError::WrongVersion { found: found as u32, supported: VERSION });
        }
        let capacity = memory.load_u64(CAPACITY_AT)?;
        let key = memory.load_u64(KEY_AT)?;
        if memory.load_u64(CRC_AT)? != u64::from(static_crc(capacity, key))
            || capacity < RING_BYTES_MIN
            || capacity % RING_UNIT_BYTES != 0
            || capacity > available - RING_AT
        {
            return Err(LogOpenError::DamagedHeader);
        }
        let mut incarnations = Vec::new();
        for at in INCARNATIONS_AT {
            let (word, boundary) = (memory.load_u64(at)?, LogPosition(memory.load_u64(at + 8)?));
            let generation = LogGeneration((word >> 32) as u32);
            if word as u32 == incarnation_crc(key, generation, boundary) {
                incarnations.push((generation, boundary));
            }
        }
        let (generation, boundary) = incarnations.into_iter().max().ok_or(LogOpenError::DamagedHeader)?;
        Ok(Self { capacity, key, generation, boundary })
    }
}

fn static_crc(capacity: u64, key: u64) -> u32 {
    crc_of([MAGIC, u64::from(VERSION), capacity, key])
}

fn incarnation_crc(key: u64, generation: LogGeneration, boundary: LogPosition) -> u32 {
    crc_of([key, u64::from(generation.0), boundary.0, 0])
}

fn crc_of(words: [u64; 4]) -> u32 {
    let mut bytes = [0; 32];
    for (chunk, word) in bytes.chunks_mut(8).zip(words) {
        chunk.copy_from_slice(&word.to_le_bytes());
    }
    Crc32c::of(&bytes)
}
