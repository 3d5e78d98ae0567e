//! Records as they stand in the ring.
//!
//! ```text
//! offset size
//!      0    8  mark: bits 0–25 length of the slot in units of 8 bytes, this header included; 26–27 verdict (1 record,
//!              2 void); 28–35 lowest bits of the generation; 36–63 check
//!      8    8  bits 0–2 unused bytes at the slot's end; the rest of 0–55 the record's position (a multiple of 8);
//!              56–63 kind
//!     16    4  CRC32C of key, mark, the second word, generation, and body
//!     20    4  generation
//!     24    …  body, then up to 7 zero bytes
//! ```
//! The mark is written only once a slot's fate is decided, and only with the one value that follows from it. So any
//! thread that finds the decision may write the mark, and a stalled owner can never undo a void. Its check is bound to
//! the log's key, the generation, the slot's position and length. A program that merely gets bytes into a record's body
//! does not know the key, so stale bytes of an earlier lap cannot be made to look like a record.
//!
//! A record never wraps. One that does not fit before the ring's end stands at the ring's start. Its *position* is
//! still where its slot begins, before the skipped bytes. A reader that finds nothing at a position reads the ring's
//! start, for a record that claims that very position. So skipped bytes need no mark of their own.

use ashlar_types::{LogGeneration, LogPosition};

/// Bytes of a record's header.
pub(crate) const HEADER_BYTES: u64 = 24;
/// Slots are a multiple of this.
pub(crate) const UNIT_BYTES: u64 = 8;
/// The most units of one slot.
pub(crate) const UNITS_MAX: u64 = (1 << UNIT_BITS) - 1;
/// Positions stay below this: 64 PiB written through one log.
pub(crate) const POSITION_MAX: u64 = 1 << 56;

const UNIT_BITS: u32 = 26;
const VERDICT_SHIFT: u32 = 26;
const GENERATION_SHIFT: u32 = 28;
const CHECK_SHIFT: u32 = 36;

/// The verdict on a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SlotVerdict {
    Record = 1,
    Void = 2,
}

/// The values that all of a slot's checks are bound to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stamp {
    pub key: u64,
    pub generation: LogGeneration,
    pub position: LogPosition,
}

/// A mark that proved to be genuine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mark {
    pub verdict: SlotVerdict,
    pub units: u64,
    pub generation: LogGeneration,
}

impl Stamp {
    /// The mark of a slot.
    pub(crate) fn mark(&self, verdict: SlotVerdict, units: u64) -> u64 {
        let bare = units | (verdict as u64) << VERDICT_SHIFT | u64::from(self.generation.0 & 0xff) << GENERATION_SHIFT;
        bare | self.check(bare) << CHECK_SHIFT
    }

    fn check(&self, bare: u64) -> u64 {
        mix(mix(self.key ^ self.position.0) ^ u64::from(self.generation.0).rotate_left(40) ^ bare) >> CHECK_SHIFT
    }

    /// Reads a mark. The generation is the newest one, not above the stamp's, that has the mark's lowest bits.
    pub(crate) fn read_mark(&self, word: u64) -> Option<Mark> {
        let low = (word >> GENERATION_SHIFT) as u8;
        let age = (self.generation.0 as u8).wrapping_sub(low);
        let generation = LogGeneration(self.generation.0.checked_sub(u32::from(age))?);
        let units = word & UNITS_MAX;
        let verdict = match (word >> VERDICT_SHIFT) & 3 {
            1 => SlotVerdict::Record,
            2 => SlotVerdict::Void,
            _ => return None,
        };
        let written = Self { generation, ..*self };
        (written.mark(verdict, units) == word).then_some(Mark { verdict, units, generation })
    }

    /// The bytes that the checksum covers before the body, with zeros for the checksum itself: key, mark, second word,
    /// checksum, generation. From byte 16 on they are the record's own.
    pub(crate) fn prefix(&self, units: u64, kind: u8, body_bytes: u64) -> [u8; PREFIX_BYTES] {
        self.prefix_with(self.mark(SlotVerdict::Record, units), units, kind, body_bytes)
    }

    /// As [`Self::prefix`], for a caller that has made the mark already.
    #[inline]
    pub(crate) fn prefix_with(&self, mark: u64, units: u64, kind: u8, body_bytes: u64) -> [u8; PREFIX_BYTES] {
        let unused = units * UNIT_BYTES - HEADER_BYTES - body_bytes;
        let mut prefix = [0; PREFIX_BYTES];
        prefix[..8].copy_from_slice(&self.key.to_le_bytes());
        prefix[8..16].copy_from_slice(&mark.to_le_bytes());
        prefix[16..24].copy_from_slice(&(u64::from(kind) << 56 | self.position.0 | unused).to_le_bytes());
        prefix[28..].copy_from_slice(&self.generation.0.to_le_bytes());
        prefix
    }
}

/// Bytes before the body that the checksum covers: the header, and the key in front of it.
pub(crate) const PREFIX_BYTES: usize = 32;
/// Where the checksum stands in them.
pub(crate) const PREFIX_CRC_AT: usize = 24;
/// Where what the owner writes to the ring begins in them: all but key and mark.
pub(crate) const PREFIX_OWN_AT: usize = 16;

/// A bijection that spreads every bit over all (the finisher of MurmurHash3).
fn mix(mut value: u64) -> u64 {
    value = (value ^ (value >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    value = (value ^ (value >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    value ^ (value >> 33)
}

/// Units of a slot whose record has a body of this many bytes.
pub(crate) fn units_for(body_bytes: u64) -> u64 {
    (HEADER_BYTES + body_bytes).div_ceil(UNIT_BYTES)
}

/// Where a slot stands: where its record begins, and where the next slot begins.
pub(crate) fn place(start: LogPosition, units: u64, capacity: u64) -> (LogPosition, LogPosition) {
    let bytes = units * UNIT_BYTES;
    let offset = start.0 % capacity;
    let record = if offset + bytes <= capacity { start.0 } else { start.0 - offset + capacity };
    (LogPosition(record), LogPosition(record + bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stamp(generation: u32) -> Stamp {
        Stamp { key: 0x1234_5678_9abc_def0, generation: LogGeneration(generation), position: LogPosition(4096) }
    }

    #[test]
    fn mark_is_valid_only_in_its_own_log() {
        for verdict in [SlotVerdict::Record, SlotVerdict::Void] {
            let word = stamp(7).mark(verdict, 19);
            let mark = Mark { verdict, units: 19, generation: LogGeneration(7) };
            assert_eq!(stamp(7).read_mark(word), Some(mark));
            assert_eq!(stamp(200).read_mark(word), Some(mark));
            assert_eq!(stamp(6).read_mark(word), None);
            assert_eq!(Stamp { key: 1, ..stamp(7) }.read_mark(word), None);
            assert_eq!(Stamp { position: LogPosition(4104), ..stamp(7) }.read_mark(word), None);
            for bit in 0..64 {
                assert_eq!(stamp(7).read_mark(word ^ 1 << bit), None, "bit {bit}");
            }
        }
        assert_eq!(stamp(7).read_mark(0), None);
    }

    #[test]
    fn records_never_wrap() {
        assert_eq!(place(LogPosition(0), 4, 1024), (LogPosition(0), LogPosition(32)));
        assert_eq!(place(LogPosition(992), 4, 1024), (LogPosition(992), LogPosition(1024)));
        assert_eq!(place(LogPosition(1000), 4, 1024), (LogPosition(1024), LogPosition(1056)));
        assert_eq!(place(LogPosition(1024 * 5 + 1016), 3, 1024), (LogPosition(1024 * 6), LogPosition(1024 * 6 + 24)));
    }

    #[test]
    fn a_write_of_128_bytes_costs_at_most_192_bytes_of_log() {
        assert!(units_for(30 + 128) * UNIT_BYTES <= 192);
    }
}
