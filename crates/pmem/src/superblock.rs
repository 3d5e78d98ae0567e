//! The file `ARENA`: what an arena is, in 48 bytes.
//!
//! ```text
//! offset size
//!      0    8  magic, "ASHLARNA"
//!      8    4  format version (1)
//!     12    4  flags; bit 0: flush instructions are emulated on memory
//!     16    8  arena id, random
//!     24    8  size of the arena's data, in bytes
//!     32    8  size of one segment's data at most, in bytes
//!     40    4  CRC32C of bytes 0 to 39
//!     44    4  zero
//! ```
//! Numbers are little-endian. The file is replaced as a whole: written under another name, synced, renamed, and the
//! directory synced, so a crash leaves the old one or the new one.

use crate::{ArenaError, Crc32c};

const MAGIC: [u8; 8] = *b"ASHLARNA";
/// The format version that this program writes, and the only one that it reads.
pub(crate) const VERSION: u32 = 1;
const FLAG_EMULATED: u32 = 1;
const BYTES: usize = 48;
const CRC_OFFSET: usize = 40;

const _: () = assert!(CRC_OFFSET + 8 == BYTES && CRC_OFFSET == 8 + 4 + 4 + 8 + 8 + 8);

/// The content of an arena's superblock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArenaSummary {
    /// The arena's own random number, which distinguishes a moved or restored arena.
    pub id: u64,
    /// Bytes of data that the arena is meant to hold.
    pub size_bytes: u64,
    /// Bytes of data in one segment, at most.
    pub segment_bytes: u64,
    /// Whether flush instructions are emulated on memory.
    pub emulated: bool,
}

impl ArenaSummary {
    pub(crate) fn encode(&self) -> [u8; BYTES] {
        let mut bytes = [0; BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        bytes[12..16].copy_from_slice(&if self.emulated { FLAG_EMULATED } else { 0 }.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.id.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.size_bytes.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.segment_bytes.to_le_bytes());
        let crc = Crc32c::of(&bytes[..CRC_OFFSET]);
        bytes[CRC_OFFSET..CRC_OFFSET + 4].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, ArenaError> {
        if bytes.len() < 12 || bytes[..8] != MAGIC {
            return Err(ArenaError::NotAnArena);
        }
        // The version comes before all else, since it says where all else stands.
        let found = word32(bytes, 8);
        if found != VERSION {
            return Err(ArenaError::WrongVersion { found, supported: VERSION });
        }
        if bytes.len() != BYTES || word32(bytes, CRC_OFFSET) != Crc32c::of(&bytes[..CRC_OFFSET]) {
            return Err(ArenaError::DamagedSuperblock);
        }
        Ok(Self {
            id: word64(bytes, 16),
            size_bytes: word64(bytes, 24),
            segment_bytes: word64(bytes, 32),
            emulated: word32(bytes, 12) & FLAG_EMULATED != 0,
        })
    }
}

fn word32(bytes: &[u8], offset: usize) -> u32 {
    bytes[offset..offset + 4].iter().rev().fold(0, |value, &byte| value << 8 | u32::from(byte))
}

fn word64(bytes: &[u8], offset: usize) -> u64 {
    bytes[offset..offset + 8].iter().rev().fold(0, |value, &byte| value << 8 | u64::from(byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SUMMARY: ArenaSummary =
        ArenaSummary { id: 0x0123_4567_89ab_cdef, size_bytes: 1 << 40, segment_bytes: 1 << 28, emulated: true };

    #[test]
    fn superblock_is_decoded_as_encoded() {
        assert_eq!(ArenaSummary::decode(&SUMMARY.encode()).unwrap(), SUMMARY);
    }

    #[test]
    fn every_damaged_byte_is_noticed() {
        for index in 0..CRC_OFFSET + 4 {
            let mut bytes = SUMMARY.encode();
            bytes[index] ^= 0x10;
            let error = ArenaSummary::decode(&bytes).unwrap_err();
            match index {
                0..8 => assert!(matches!(error, ArenaError::NotAnArena)),
                8..12 => assert!(matches!(error, ArenaError::WrongVersion { supported: 1, .. })),
                _ => assert!(matches!(error, ArenaError::DamagedSuperblock)),
            }
        }
        assert!(matches!(ArenaSummary::decode(&SUMMARY.encode()[..47]), Err(ArenaError::DamagedSuperblock)));
        assert!(matches!(ArenaSummary::decode(b""), Err(ArenaError::NotAnArena)));
    }
}
