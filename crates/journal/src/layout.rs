//! The layout of a journal's memory.
//!
//! ```text
//! offset  size
//!      0     8  magic, "ASHLRJNL"
//!      8     4  format version (1)
//!     12     4  the oldest version whose programs can read this journal (1)
//!     16     8  bytes of the ring
//!     24    16  file system id
//!     40     2  node: the writing node, also in a copy
//!     42     6  zero
//!     48     4  CRC32C of bytes 0 to 47
//!   4096  4096  state page, of even sequence
//!   8192  4096  state page, of odd sequence
//!  12288     …  ring: the byte at position p stands at 12288 + p mod (bytes of the ring)
//! ```
//!
//! A state page:
//!
//! ```text
//!      0     8  sequence
//!      8     8  head: the position of the oldest frame
//!     16     4  checksum of the frame before the head; the origin if there was none
//!     20     4  number of lineage entries
//!     24     8  cut from (both 0: no cut is under way)
//!     32     8  cut upto
//!     40     4  CRC32C of the origin (4), bytes 0 to 39, and the entries
//!     44     4  zero
//!     48  16 n  lineage entries: begin 8, epoch number 4, epoch's node 2, zero 2
//! ```
//!
//! A page is written in the place of the older one. Of the whole pages, the one with the higher sequence is in force.

use std::io;
use std::ops::Range;

use ashlar_pmem::{Crc32c, Persistent};
use ashlar_types::{Epoch, FileSystemId, JournalPosition, NodeNumber};

use crate::JournalOpenError;
use crate::frame::{FRAME_UNIT_BYTES, word32, word64};
use crate::lineage::{LINEAGE_ENTRIES_MAX, Lineage, LineageEntry};
use crate::ring::JournalCursor;

const MAGIC: [u8; 8] = *b"ASHLRJNL";
/// The format version that this program writes.
const VERSION: u32 = 1;
/// The oldest version that this program reads.
const VERSION_OLDEST: u32 = 1;
/// The oldest version whose programs can read what this program writes.
const VERSION_NEEDED: u32 = 1;

const IDENTITY_BYTES: usize = 52;
const IDENTITY_CRC_AT: usize = 48;
const PAGE_BYTES: u64 = 4096;
pub(crate) const STATE_AT: u64 = PAGE_BYTES;
pub(crate) const RING_AT: u64 = 3 * PAGE_BYTES;
/// The ring is a multiple of this, so that it begins and ends with whole cache lines.
const RING_UNIT_BYTES: u64 = 64;
/// The smallest ring; it holds four frames of the largest size that it takes.
pub(crate) const RING_BYTES_MIN: u64 = 1024;
/// Positions stay below this, so that sums of them never overflow.
pub(crate) const POSITION_MAX: u64 = 1 << 62;

const ENTRIES_AT: usize = 48;
const ENTRY_BYTES: usize = 16;
const STATE_CRC_AT: usize = 40;

const _: () = assert!(ENTRIES_AT + LINEAGE_ENTRIES_MAX * ENTRY_BYTES <= PAGE_BYTES as usize);

/// The journal's own identity: that of all its copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JournalIdentity {
    /// The file system.
    pub file_system: FileSystemId,
    /// The writing node.
    pub node: NodeNumber,
}

impl JournalIdentity {
    /// Reads which journal memory holds.
    ///
    /// # Errors
    /// [`JournalOpenError`].
    pub fn read(memory: &impl Persistent) -> Result<Self, JournalOpenError> {
        read_identity(memory).map(|(identity, _)| identity)
    }

    /// Returns the origin: it stands for the checksum of the frame before the first one.
    #[must_use]
    pub fn origin(&self) -> u32 {
        let mut sum = Crc32c::default();
        sum.update(&self.file_system.0.to_le_bytes());
        sum.update(&self.node.get().to_le_bytes());
        sum.finish()
    }
}

/// Returns the bytes of the ring in memory of this length.
pub(crate) fn ring_bytes(available: u64) -> Result<u64, JournalOpenError> {
    let capacity = available.saturating_sub(RING_AT) / RING_UNIT_BYTES * RING_UNIT_BYTES;
    if capacity < RING_BYTES_MIN {
        return Err(JournalOpenError::TooSmall { available, needed: RING_AT + RING_BYTES_MIN });
    }
    Ok(capacity)
}

/// Writes the identity, durably. The pages and the ring must be durable before.
pub(crate) fn write_identity(
    memory: &impl Persistent,
    identity: &JournalIdentity,
    capacity: u64,
) -> Result<(), JournalOpenError> {
    let mut bytes = [0; IDENTITY_BYTES];
    bytes[..8].copy_from_slice(&MAGIC);
    bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
    bytes[12..16].copy_from_slice(&VERSION_NEEDED.to_le_bytes());
    bytes[16..24].copy_from_slice(&capacity.to_le_bytes());
    bytes[24..40].copy_from_slice(&identity.file_system.0.to_le_bytes());
    bytes[40..42].copy_from_slice(&identity.node.get().to_le_bytes());
    let crc = Crc32c::of(&bytes[..IDENTITY_CRC_AT]);
    bytes[IDENTITY_CRC_AT..].copy_from_slice(&crc.to_le_bytes());
    memory.store(0, &bytes)?;
    persist(memory, std::iter::once(0..IDENTITY_BYTES as u64))
}

/// Clears the identity and the state pages, durably: a crash while the rest is written leaves no journal.
pub(crate) fn clear_header(memory: &impl Persistent) -> Result<(), JournalOpenError> {
    memory.store(0, &[0; IDENTITY_BYTES])?;
    persist(memory, std::iter::once(0..IDENTITY_BYTES as u64))?;
    memory.store(STATE_AT, &[0; 2 * PAGE_BYTES as usize])?;
    persist(memory, std::iter::once(STATE_AT..RING_AT))
}

/// Reads the identity; returns it with the bytes of the ring.
pub(crate) fn read_identity(memory: &impl Persistent) -> Result<(JournalIdentity, u64), JournalOpenError> {
    let available = memory.len();
    ring_bytes(available)?;
    let mut bytes = [0; IDENTITY_BYTES];
    memory.load(0, &mut bytes)?;
    if bytes[..8] != MAGIC {
        return Err(JournalOpenError::NotAJournal);
    }
    // The versions come before all else, since they say where all else stands.
    let (found, needed) = (word32(&bytes, 8), word32(&bytes, 12));
    if found < VERSION_OLDEST || needed > VERSION {
        return Err(JournalOpenError::WrongVersion { found, needed, oldest: VERSION_OLDEST, newest: VERSION });
    }
    let capacity = word64(&bytes, 16);
    if word32(&bytes, IDENTITY_CRC_AT) != Crc32c::of(&bytes[..IDENTITY_CRC_AT])
        || capacity < RING_BYTES_MIN
        || capacity % RING_UNIT_BYTES != 0
        || capacity > available - RING_AT
    {
        return Err(JournalOpenError::DamagedHeader);
    }
    let file_system = FileSystemId(u128::from(word64(&bytes, 32)) << 64 | u128::from(word64(&bytes, 24)));
    let node = node_at(&bytes, 40).ok_or(JournalOpenError::DamagedHeader)?;
    Ok((JournalIdentity { file_system, node }, capacity))
}

/// The journal's durable state, beside the frames.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct JournalState {
    pub sequence: u64,
    pub head: JournalCursor,
    /// A cut that is under way: the bytes that it clears.
    pub cut: Option<Range<JournalPosition>>,
    pub lineage: Lineage,
}

impl JournalState {
    /// Stores the state in its page, durably.
    pub(crate) fn write(&self, memory: &impl Persistent, origin: u32) -> io::Result<()> {
        let entries = self.lineage.entries();
        let mut bytes = vec![0; ENTRIES_AT + entries.len() * ENTRY_BYTES];
        bytes[..8].copy_from_slice(&self.sequence.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.head.position.0.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.head.seed.to_le_bytes());
        bytes[20..24].copy_from_slice(&(entries.len() as u32).to_le_bytes());
        if let Some(cut) = &self.cut {
            bytes[24..32].copy_from_slice(&cut.start.0.to_le_bytes());
            bytes[32..40].copy_from_slice(&cut.end.0.to_le_bytes());
        }
        for (entry, at) in entries.iter().zip((ENTRIES_AT..).step_by(ENTRY_BYTES)) {
            bytes[at..at + 8].copy_from_slice(&entry.begin.0.to_le_bytes());
            bytes[at + 8..at + 12].copy_from_slice(&entry.epoch.number.to_le_bytes());
            bytes[at + 12..at + 14].copy_from_slice(&entry.epoch.node.get().to_le_bytes());
        }
        let crc = state_crc(&bytes, origin);
        bytes[STATE_CRC_AT..STATE_CRC_AT + 4].copy_from_slice(&crc.to_le_bytes());
        let at = page_at(self.sequence);
        memory.store(at, &bytes).map_err(io::Error::other)?;
        persist_io(memory, std::iter::once(at..at + bytes.len() as u64))
    }

    /// Reads the state that is in force.
    pub(crate) fn read(memory: &impl Persistent, origin: u32) -> Result<Self, JournalOpenError> {
        let mut newest: Option<Self> = None;
        for parity in 0..2 {
            let mut bytes = vec![0; PAGE_BYTES as usize];
            memory.load(page_at(parity), &mut bytes)?;
            let found = Self::decode(&bytes, origin).filter(|state| state.sequence % 2 == parity);
            newest = newest.into_iter().chain(found).max_by_key(|state| state.sequence);
        }
        newest.ok_or(JournalOpenError::DamagedHeader)
    }

    /// Makes the page in force durable, and clears the other one.
    ///
    /// The page may have been read from caches, and must not be lost for the older one. The other page may hold parts
    /// of a state that a crash kept from being written. With words of the next state, they could become whole.
    pub(crate) fn settle(&self, memory: &impl Persistent) -> io::Result<()> {
        let page = |sequence| page_at(sequence)..page_at(sequence) + PAGE_BYTES;
        persist_io(memory, std::iter::once(page(self.sequence)))?;
        clear_bytes(memory, std::iter::once(page(self.sequence + 1)))
    }

    fn decode(bytes: &[u8], origin: u32) -> Option<Self> {
        let count = word32(bytes, 20) as usize;
        if count > LINEAGE_ENTRIES_MAX {
            return None;
        }
        let bytes = &bytes[..ENTRIES_AT + count * ENTRY_BYTES];
        if word32(bytes, STATE_CRC_AT) != state_crc(bytes, origin) {
            return None;
        }
        let entry = |bytes: &[u8]| {
            let epoch = Epoch { number: word32(bytes, 8), node: node_at(bytes, 12)? };
            Some(LineageEntry { begin: JournalPosition(word64(bytes, 0)), epoch })
        };
        let entries = bytes[ENTRIES_AT..].chunks_exact(ENTRY_BYTES).map(entry).collect::<Option<_>>()?;
        let lineage = Lineage::from_entries(entries)?;
        let (head, from, upto) = (word64(bytes, 8), word64(bytes, 24), word64(bytes, 32));
        let cut = (from != upto).then_some(JournalPosition(from)..JournalPosition(upto));
        let is_fit = |position: u64| position < POSITION_MAX && position % FRAME_UNIT_BYTES == 0;
        let fits = is_fit(head)
            && word64(bytes, 0) < POSITION_MAX
            && cut.as_ref().is_none_or(|cut| head <= from && cut.start < cut.end && is_fit(from) && is_fit(upto))
            && lineage.epoch_at(JournalPosition(head)).is_some();
        let head = JournalCursor { position: JournalPosition(head), seed: word32(bytes, 16) };
        fits.then_some(Self { sequence: word64(bytes, 0), head, cut, lineage })
    }
}

/// Returns the node whose number stands here; `None` if it is that of no node.
fn node_at(bytes: &[u8], at: usize) -> Option<NodeNumber> {
    NodeNumber::new(u16::from_le_bytes([bytes[at], bytes[at + 1]]))
}

const fn page_at(sequence: u64) -> u64 {
    STATE_AT + sequence % 2 * PAGE_BYTES
}

fn state_crc(bytes: &[u8], origin: u32) -> u32 {
    let mut sum = Crc32c::default();
    sum.update(&origin.to_le_bytes());
    sum.update(&bytes[..STATE_CRC_AT]);
    sum.update(&bytes[ENTRIES_AT..]);
    sum.finish()
}

/// Makes ranges of the memory durable.
pub(crate) fn persist_io(memory: &impl Persistent, parts: impl Iterator<Item = Range<u64>>) -> io::Result<()> {
    for part in parts {
        memory.flush(part.start, part.end - part.start).map_err(io::Error::other)?;
    }
    memory.fence();
    memory.sync()
}

/// Writes zeros where there are other bytes, durably.
pub(crate) fn clear_bytes(memory: &impl Persistent, parts: impl Iterator<Item = Range<u64>> + Clone) -> io::Result<()> {
    const PIECE: usize = 4096;
    let mut piece = [0; PIECE];
    for part in parts.clone() {
        for at in part.clone().step_by(PIECE) {
            let piece = &mut piece[..(part.end - at).min(PIECE as u64) as usize];
            memory.load(at, piece).map_err(io::Error::other)?;
            if piece.iter().any(|byte| *byte != 0) {
                piece.fill(0);
                memory.store(at, piece).map_err(io::Error::other)?;
            }
        }
    }
    persist_io(memory, parts)
}

fn persist(memory: &impl Persistent, parts: impl Iterator<Item = Range<u64>>) -> Result<(), JournalOpenError> {
    Ok(persist_io(memory, parts)?)
}
