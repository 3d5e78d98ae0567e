//! A frame's header, and its checksum.
//!
//! ```text
//! offset  size
//!      0     1  kind
//!      1     1  flags: 1 in Records, if the batch continues in the session's next Records frame
//!      2     2  session: the lowest 16 bits of the session id, 0 if the body names none
//!      4     4  length of the body
//!      8     8  position of this frame
//!     16     4  checksum
//!     20     4  number of the epoch in which the frame was written
//!     24     …  body, then up to 7 zero bytes
//! ```
//!
//! The checksum is the CRC32C of the checksum of the frame before, the header with zero in place of the checksum, the
//! body, and the zero bytes. A session id does not fit the header; its lowest bits let a reader pass over frames of
//! other sessions. `docs/format-journal.md`, section "Frame", says why no table of sessions stands in its place.

use ashlar_pmem::Crc32c;
use ashlar_types::{JournalPosition, SessionId};

use crate::{FrameBody, FrameError};

/// Bytes of a frame's header.
pub const FRAME_HEADER_BYTES: u64 = 24;
/// The most bytes of a frame, header and zero bytes included: short enough that bulk data delay no `fsync` for long.
pub const FRAME_BYTES_MAX: u64 = 256 << 10;
/// Frames begin at multiples of this.
pub(crate) const FRAME_UNIT_BYTES: u64 = 8;
/// Where the checksum stands in the header.
pub(crate) const CHECKSUM_AT: usize = 16;
/// The flag of a Records frame whose batch continues in the session's next one.
pub(crate) const FLAG_CONTINUES: u8 = 1;

const HEADER: usize = FRAME_HEADER_BYTES as usize;

/// The kind of a frame. The numbers stand on media; a number is never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum FrameKind {
    /// A session began.
    Began = 1,
    /// Records of a session's log.
    Records = 2,
    /// The node's verdict on a session's batches.
    Verdict = 3,
    /// An act of SharedFS itself.
    Own = 4,
    /// Another journal must be applied first.
    After = 5,
    /// A session ended.
    Ended = 6,
    /// A successor ends a dead node's journal.
    Adopt = 7,
}

impl FrameKind {
    /// Returns the kind of this number.
    #[must_use]
    pub const fn from_u8(number: u8) -> Option<Self> {
        Some(match number {
            1 => Self::Began,
            2 => Self::Records,
            3 => Self::Verdict,
            4 => Self::Own,
            5 => Self::After,
            6 => Self::Ended,
            7 => Self::Adopt,
            _ => return None,
        })
    }
}

/// A frame's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameHeader {
    /// The kind's number; it may be one that this program does not know.
    pub kind: u8,
    /// Flags.
    pub flags: u8,
    /// The lowest bits of the session's id.
    pub session: u16,
    /// Bytes of the body.
    pub length: u32,
    /// The frame's position.
    pub position: JournalPosition,
    /// The checksum.
    pub checksum: u32,
    /// The number of the epoch in which the frame was written.
    pub epoch: u32,
}

impl FrameHeader {
    /// Reads a header; every 24 bytes are one.
    #[must_use]
    pub fn from_bytes(bytes: &[u8; HEADER]) -> Self {
        let [kind, flags, s0, s1, l0, l1, l2, l3, ..] = *bytes;
        Self {
            kind,
            flags,
            session: u16::from_le_bytes([s0, s1]),
            length: u32::from_le_bytes([l0, l1, l2, l3]),
            position: JournalPosition(word64(bytes, 8)),
            checksum: word32(bytes, CHECKSUM_AT),
            epoch: word32(bytes, 20),
        }
    }

    /// Returns the header's bytes.
    #[must_use]
    pub fn to_bytes(self) -> [u8; HEADER] {
        let mut bytes = [0; HEADER];
        bytes[0] = self.kind;
        bytes[1] = self.flags;
        bytes[2..4].copy_from_slice(&self.session.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.length.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.position.0.to_le_bytes());
        bytes[CHECKSUM_AT..20].copy_from_slice(&self.checksum.to_le_bytes());
        bytes[20..].copy_from_slice(&self.epoch.to_le_bytes());
        bytes
    }

    /// Returns the bytes of the whole frame: header, body, and zero bytes.
    #[must_use]
    pub const fn frame_bytes(&self) -> u64 {
        frame_bytes(self.length as u64)
    }

    /// Returns whether the frame may be one of this session.
    #[must_use]
    pub const fn may_be_of(&self, session: SessionId) -> bool {
        self.session == session_hint(session)
    }

    /// Returns the checksum of the frame with this header, behind a frame with the checksum `seed`.
    ///
    /// The parts are the body, and the zero bytes if it has some.
    pub(crate) fn sum(self, seed: u32, parts: &[&[u8]]) -> u32 {
        let mut sum = Crc32c::default();
        sum.update(&seed.to_le_bytes());
        sum.update(&Self { checksum: 0, ..self }.to_bytes());
        parts.iter().for_each(|part| sum.update(part));
        sum.finish()
    }
}

/// Returns the bytes of a frame with a body of this length.
#[must_use]
pub const fn frame_bytes(body_bytes: u64) -> u64 {
    (FRAME_HEADER_BYTES + body_bytes).div_ceil(FRAME_UNIT_BYTES) * FRAME_UNIT_BYTES
}

pub(crate) const fn session_hint(session: SessionId) -> u16 {
    session.0 as u16
}

/// Reads a little-endian number; the bytes must be there.
pub(crate) fn word32(bytes: &[u8], offset: usize) -> u32 {
    bytes[offset..offset + 4].iter().rev().fold(0, |value, &byte| value << 8 | u32::from(byte))
}

/// Reads a little-endian number; the bytes must be there.
pub(crate) fn word64(bytes: &[u8], offset: usize) -> u64 {
    bytes[offset..offset + 8].iter().rev().fold(0, |value, &byte| value << 8 | u64::from(byte))
}

/// A valid frame, in a caller's buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoredFrame<'a> {
    /// The header.
    pub header: FrameHeader,
    /// The body.
    pub body: &'a [u8],
}

impl<'a> StoredFrame<'a> {
    /// Returns the position of the next frame.
    #[must_use]
    pub const fn end(&self) -> JournalPosition {
        self.header.position.plus(self.header.frame_bytes())
    }

    /// Decodes the body.
    ///
    /// # Errors
    /// [`FrameError`] if the frame is not one that this program's encoder writes.
    pub fn decode(&self) -> Result<FrameBody<'a>, FrameError> {
        FrameBody::decode(&self.header, self.body)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn header_is_read_as_written() {
        let header = FrameHeader {
            kind: 2,
            flags: 1,
            session: 0x0304,
            length: 0x0506_0708,
            position: JournalPosition(0x090a_0b0c_0d0e_0f10),
            checksum: 0x1112_1314,
            epoch: 0x1516_1718,
        };
        let bytes = header.to_bytes();
        assert_eq!(FrameHeader::from_bytes(&bytes), header);
        assert_eq!(bytes[..8], [2, 1, 4, 3, 8, 7, 6, 5]);
        assert_eq!((bytes[8], bytes[16], bytes[20]), (0x10, 0x14, 0x18));
        assert_eq!(session_hint(SessionId(0xabc_0000_1304)), 0x1304);
    }

    #[test]
    fn checksum_covers_seed_header_and_body() {
        let header = FrameHeader {
            kind: 1,
            flags: 0,
            session: 7,
            length: 3,
            position: JournalPosition(64),
            checksum: 9,
            epoch: 2,
        };
        let sum = header.sum(5, &[b"abc"]);
        // The place of the checksum itself does not count.
        assert_eq!(FrameHeader { checksum: 1, ..header }.sum(5, &[b"a", b"bc"]), sum);
        for other in [
            FrameHeader { kind: 2, ..header },
            FrameHeader { flags: 1, ..header },
            FrameHeader { session: 8, ..header },
            FrameHeader { length: 4, ..header },
            FrameHeader { position: JournalPosition(65), ..header },
            FrameHeader { epoch: 3, ..header },
        ] {
            assert_ne!(other.sum(5, &[b"abc"]), sum);
        }
        assert_ne!(header.sum(6, &[b"abc"]), sum);
        assert_ne!(header.sum(5, &[b"abd"]), sum);
    }

    #[test]
    fn frames_are_whole_units() {
        assert_eq!([0, 1, 8, 9].map(frame_bytes), [24, 32, 32, 40]);
    }
}
