//! The file `ARENA`: what an arena is, in 88 bytes.
//!
//! ```text
//! offset size
//!      0    8  magic, "ASHLARNA"
//!      8    4  format version (2)
//!     12    4  oldest format version whose programs understand the arena (2)
//!     16    4  flags; bit 0: flush instructions are emulated on memory
//!     20    4  node number, below 4096
//!     24    8  arena id, random
//!     32   16  file system id
//!     48   16  key of the name hash
//!     64    8  size of the arena's data, in bytes
//!     72    8  size of one segment's data at most, in bytes
//!     80    4  CRC32C of bytes 0 to 79
//!     84    4  zero
//! ```
//! Numbers are little-endian. The file is replaced as a whole: written under another name, synced, renamed, and the
//! directory synced, so a crash leaves the old one or the new one.
//!
//! The file system's id and the key of its name hash are the same in all arenas of a file system; the arena's id is its
//! own.

use ashlar_types::{FileSystemId, FileSystemIdentity, NameHashKey, NodeNumber, VersionRange};

use crate::{ArenaError, Crc32c};

const MAGIC: [u8; 8] = *b"ASHLARNA";
/// The format versions that this program reads; it writes the newest.
pub(crate) const VERSIONS: VersionRange = VersionRange::new(2, 2);
/// The first format version that says which is the oldest to understand it.
const FIRST_WITH_RANGE: u32 = 2;
const FLAG_EMULATED: u32 = 1;

const BYTES: usize = 88;
const AT_VERSION: usize = 8;
const AT_OLDEST: usize = 12;
const AT_FLAGS: usize = 16;
const AT_NODE: usize = 20;
const AT_ID: usize = 24;
const AT_FILE_SYSTEM: usize = 32;
const AT_HASH_KEY: usize = 48;
const AT_SIZE: usize = 64;
const AT_SEGMENT: usize = 72;
const AT_CRC: usize = 80;

const _: () = {
    assert!(AT_VERSION == 8 && AT_OLDEST == AT_VERSION + 4 && AT_FLAGS == AT_OLDEST + 4 && AT_NODE == AT_FLAGS + 4);
    assert!(AT_ID == AT_NODE + 4 && AT_FILE_SYSTEM == AT_ID + 8 && AT_HASH_KEY == AT_FILE_SYSTEM + 16);
    assert!(AT_SIZE == AT_HASH_KEY + 16 && AT_SEGMENT == AT_SIZE + 8 && AT_CRC == AT_SEGMENT + 8);
    assert!(BYTES == AT_CRC + 8);
};

/// The content of an arena's superblock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArenaSummary {
    /// The arena's own random number, which distinguishes a moved or restored arena.
    pub id: u64,
    /// The node of the arena, by which it gives out numbers.
    pub node: NodeNumber,
    /// The file system that the arena belongs to.
    pub file_system: FileSystemIdentity,
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
        let mut put = |at: usize, field: &[u8]| bytes[at..at + field.len()].copy_from_slice(field);
        put(0, &MAGIC);
        put(AT_VERSION, &VERSIONS.current.to_le_bytes());
        put(AT_OLDEST, &VERSIONS.oldest.to_le_bytes());
        put(AT_FLAGS, &if self.emulated { FLAG_EMULATED } else { 0 }.to_le_bytes());
        put(AT_NODE, &u32::from(self.node.get()).to_le_bytes());
        put(AT_ID, &self.id.to_le_bytes());
        put(AT_FILE_SYSTEM, &self.file_system.id.0.to_le_bytes());
        put(AT_HASH_KEY, &self.file_system.hash_key.0);
        put(AT_SIZE, &self.size_bytes.to_le_bytes());
        put(AT_SEGMENT, &self.segment_bytes.to_le_bytes());
        let crc = Crc32c::of(&bytes[..AT_CRC]);
        bytes[AT_CRC..AT_CRC + 4].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, ArenaError> {
        if bytes.len() < AT_FLAGS || bytes[..AT_VERSION] != MAGIC {
            return Err(ArenaError::NotAnArena);
        }
        // The versions come before all else, since they say where all else stands.
        let current = word32(bytes, AT_VERSION);
        let oldest = if current < FIRST_WITH_RANGE { current } else { word32(bytes, AT_OLDEST) };
        let found = VersionRange::new(oldest, current);
        if VERSIONS.negotiate(found).is_none() {
            return Err(ArenaError::WrongVersion { found, supported: VERSIONS });
        }
        if bytes.len() != BYTES || word32(bytes, AT_CRC) != Crc32c::of(&bytes[..AT_CRC]) {
            return Err(ArenaError::DamagedSuperblock);
        }
        let node = u16::try_from(word32(bytes, AT_NODE)).ok().and_then(NodeNumber::new);
        Ok(Self {
            id: word64(bytes, AT_ID),
            node: node.ok_or(ArenaError::DamagedSuperblock)?,
            file_system: FileSystemIdentity {
                id: FileSystemId(u128::from_le_bytes(array(bytes, AT_FILE_SYSTEM))),
                hash_key: NameHashKey(array(bytes, AT_HASH_KEY)),
            },
            size_bytes: word64(bytes, AT_SIZE),
            segment_bytes: word64(bytes, AT_SEGMENT),
            emulated: word32(bytes, AT_FLAGS) & FLAG_EMULATED != 0,
        })
    }
}

fn array<const N: usize>(bytes: &[u8], offset: usize) -> [u8; N] {
    std::array::from_fn(|index| bytes[offset + index])
}

fn word32(bytes: &[u8], offset: usize) -> u32 {
    u32::from_le_bytes(array(bytes, offset))
}

fn word64(bytes: &[u8], offset: usize) -> u64 {
    u64::from_le_bytes(array(bytes, offset))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SUMMARY: ArenaSummary = ArenaSummary {
        id: 0x0123_4567_89ab_cdef,
        node: NodeNumber::MAX,
        file_system: FileSystemIdentity { id: FileSystemId(7 << 64 | 9), hash_key: NameHashKey(*b"0123456789abcdef") },
        size_bytes: 1 << 40,
        segment_bytes: 1 << 28,
        emulated: true,
    };

    #[test]
    fn superblock_is_decoded_as_encoded() {
        assert_eq!(ArenaSummary::decode(&SUMMARY.encode()).unwrap(), SUMMARY);
    }

    #[test]
    fn every_damaged_byte_is_noticed() {
        for index in 0..AT_CRC + 4 {
            let mut bytes = SUMMARY.encode();
            bytes[index] ^= 0x10;
            let error = ArenaSummary::decode(&bytes).unwrap_err();
            match index {
                0..AT_VERSION => assert!(matches!(error, ArenaError::NotAnArena)),
                // An older version may still understand a newer one's arena: then the checksum shows the damage.
                AT_VERSION..AT_FLAGS => assert!(matches!(
                    error,
                    ArenaError::WrongVersion { supported: VERSIONS, .. } | ArenaError::DamagedSuperblock
                )),
                _ => assert!(matches!(error, ArenaError::DamagedSuperblock)),
            }
        }
        assert!(matches!(ArenaSummary::decode(&SUMMARY.encode()[..BYTES - 1]), Err(ArenaError::DamagedSuperblock)));
        assert!(matches!(ArenaSummary::decode(b""), Err(ArenaError::NotAnArena)));
    }

    #[test]
    fn arena_of_other_versions_is_refused_by_their_range() {
        let refused = |current: u32, oldest: u32| {
            let mut bytes = SUMMARY.encode();
            bytes[AT_VERSION..AT_OLDEST].copy_from_slice(&current.to_le_bytes());
            bytes[AT_OLDEST..AT_FLAGS].copy_from_slice(&oldest.to_le_bytes());
            match ArenaSummary::decode(&bytes).unwrap_err() {
                ArenaError::WrongVersion { found, .. } => Some(found),
                _ => None,
            }
        };
        assert_eq!(refused(9, 8), Some(VersionRange::new(8, 9)));
        assert_eq!(refused(1, 77), Some(VersionRange::new(1, 1)), "version 1 has no oldest version there");
        assert_eq!(refused(9, VERSIONS.current), None, "a newer program's arena that this one understands");
    }
}
