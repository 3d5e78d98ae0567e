//! The frames of a link that is up, as bytes. No socket here.
//!
//! ```text
//! offset  size
//!      0     4  length of the body
//!      4     1  kind
//!      5     3  zero
//!      8     4  checksum
//!     12     8  number of the transfer; 0 if the frame belongs to none
//!     20     …  body
//! ```
//!
//! The checksum is the CRC32C of the direction's seed (8), the count of frames before this one (8), the header with
//! zero in place of the checksum, and the body. The seed comes from both sides' nonces. So a frame that was repeated,
//! left out, moved, or recorded on another link is invalid. A checksum protects from accidents; TLS from attackers.

use ashlar_pmem::Crc32c;
use thiserror::Error;

use crate::provider::MESSAGE_BYTES_MAX;
use crate::region::{RegionId, RegionRange};

/// Bytes of a frame's header.
pub(crate) const LINK_HEADER_BYTES: usize = 20;
/// Bytes of a range in a body.
pub(crate) const RANGE_BYTES: usize = 16;
/// Bytes of a read's body: the range, and the length.
const READ_BODY_BYTES: usize = RANGE_BYTES + 4;
const CHECKSUM_AT: usize = 8;

/// The kind of a frame. A number is never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum LinkFrameKind {
    /// A message.
    Message = 1,
    /// Bytes for a region of the receiver: the range, and the bytes.
    Write = 2,
    /// Asks for bytes of a region of the receiver: the range, and the length.
    Read = 3,
    /// The bytes that a read asked for.
    ReadAnswer = 4,
    /// A write has landed.
    Written = 5,
    /// The sender closes the link; no frame follows.
    Close = 6,
}

impl LinkFrameKind {
    const fn from_u8(number: u8) -> Option<Self> {
        Some(match number {
            1 => Self::Message,
            2 => Self::Write,
            3 => Self::Read,
            4 => Self::ReadAnswer,
            5 => Self::Written,
            6 => Self::Close,
            _ => return None,
        })
    }

    /// The least and the most bytes of a body.
    const fn body_bytes(self) -> (usize, usize) {
        match self {
            Self::Message | Self::ReadAnswer => (0, MESSAGE_BYTES_MAX),
            Self::Write => (RANGE_BYTES, RANGE_BYTES + MESSAGE_BYTES_MAX),
            Self::Read => (READ_BODY_BYTES, READ_BODY_BYTES),
            Self::Written | Self::Close => (0, 0),
        }
    }
}

/// A frame that has arrived whole.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct LinkFrame {
    pub(crate) kind: LinkFrameKind,
    pub(crate) transfer: u64,
    pub(crate) body: Vec<u8>,
}

/// Bytes that are no frame.
#[derive(Debug, PartialEq, Eq, Error)]
pub(crate) enum LinkFrameError {
    #[error("no frame has kind {0}")]
    Kind(u8),
    #[error("a frame of kind {kind:?} has no {length} bytes")]
    Length { kind: LinkFrameKind, length: u32 },
    #[error("a header has bits that are none")]
    Reserved,
    #[error("a frame's checksum is wrong")]
    Checksum,
}

/// Writes a range as a body begins with it.
pub(crate) fn range_bytes(range: RegionRange) -> [u8; RANGE_BYTES] {
    let mut bytes = [0; RANGE_BYTES];
    bytes[..8].copy_from_slice(&range.region.0.to_le_bytes());
    bytes[8..].copy_from_slice(&range.offset.to_le_bytes());
    bytes
}

/// Splits the body of a write or a read, whose length the parser has checked.
pub(crate) fn split_range(body: &[u8]) -> (RegionRange, &[u8]) {
    let (range, rest) = body.split_at(RANGE_BYTES);
    (RegionRange { region: RegionId(word64(range, 0)), offset: word64(range, 8) }, rest)
}

/// The running checksum of one direction of a link.
#[derive(Clone, Debug)]
pub(crate) struct FrameSeal {
    seed: u64,
    frames: u64,
}

impl FrameSeal {
    pub(crate) const fn new(seed: u64) -> Self {
        Self { seed, frames: 0 }
    }

    /// Returns the header of the next frame, whose body is given in parts.
    pub(crate) fn seal(&mut self, kind: LinkFrameKind, transfer: u64, parts: &[&[u8]]) -> [u8; LINK_HEADER_BYTES] {
        let length = parts.iter().map(|part| part.len()).sum::<usize>() as u32;
        let mut header = [0; LINK_HEADER_BYTES];
        header[..4].copy_from_slice(&length.to_le_bytes());
        header[4] = kind as u8;
        header[12..].copy_from_slice(&transfer.to_le_bytes());
        let checksum = self.checksum(&header, parts);
        header[CHECKSUM_AT..12].copy_from_slice(&checksum.to_le_bytes());
        header
    }

    fn checksum(&mut self, header: &[u8; LINK_HEADER_BYTES], parts: &[&[u8]]) -> u32 {
        let mut checksum = Crc32c::default();
        checksum.update(&self.seed.to_le_bytes());
        checksum.update(&self.frames.to_le_bytes());
        checksum.update(&header[..CHECKSUM_AT]);
        checksum.update(&[0; 4]);
        checksum.update(&header[12..]);
        parts.iter().for_each(|part| checksum.update(part));
        self.frames += 1;
        checksum.finish()
    }
}

/// Finds the frames in bytes that arrive in any pieces. It holds one frame's bytes at most.
#[derive(Debug)]
pub(crate) struct LinkParser {
    seal: FrameSeal,
    header: [u8; LINK_HEADER_BYTES],
    header_bytes: usize,
    body: Vec<u8>,
}

impl LinkParser {
    pub(crate) const fn new(seed: u64) -> Self {
        Self { seal: FrameSeal::new(seed), header: [0; LINK_HEADER_BYTES], header_bytes: 0, body: Vec::new() }
    }

    /// Takes bytes from the front of those that arrived; returns a frame when it is whole, `None` when none is left.
    pub(crate) fn parse(&mut self, bytes: &mut &[u8]) -> Result<Option<LinkFrame>, LinkFrameError> {
        let taken = bytes.len().min(LINK_HEADER_BYTES - self.header_bytes);
        self.header[self.header_bytes..self.header_bytes + taken].copy_from_slice(&bytes[..taken]);
        self.header_bytes += taken;
        *bytes = &bytes[taken..];
        if self.header_bytes < LINK_HEADER_BYTES {
            return Ok(None);
        }
        let (kind, length) = self.checked_header()?;
        self.body.reserve_exact(length - self.body.len());
        let taken = bytes.len().min(length - self.body.len());
        self.body.extend_from_slice(&bytes[..taken]);
        *bytes = &bytes[taken..];
        if self.body.len() < length {
            return Ok(None);
        }
        if self.seal.checksum(&self.header, &[&self.body]).to_le_bytes() != self.header[CHECKSUM_AT..12] {
            return Err(LinkFrameError::Checksum);
        }
        self.header_bytes = 0;
        Ok(Some(LinkFrame { kind, transfer: word64(&self.header, 12), body: std::mem::take(&mut self.body) }))
    }

    fn checked_header(&self) -> Result<(LinkFrameKind, usize), LinkFrameError> {
        let [l0, l1, l2, l3, kind, zeros @ ..] = self.header;
        let kind = LinkFrameKind::from_u8(kind).ok_or(LinkFrameError::Kind(kind))?;
        if zeros[..3] != [0; 3] {
            return Err(LinkFrameError::Reserved);
        }
        let length = u32::from_le_bytes([l0, l1, l2, l3]);
        let (least, most) = kind.body_bytes();
        if (length as usize) < least || length as usize > most {
            return Err(LinkFrameError::Length { kind, length });
        }
        Ok((kind, length as usize))
    }
}

fn word64(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SEED: u64 = 0x5eed;

    fn sealed(messages: &[Vec<u8>]) -> Vec<u8> {
        let mut seal = FrameSeal::new(SEED);
        let frame = |message: &Vec<u8>| [&seal.seal(LinkFrameKind::Message, 7, &[message])[..], message].concat();
        messages.iter().flat_map(frame).collect()
    }

    fn parsed(parser: &mut LinkParser, mut bytes: &[u8]) -> Result<Vec<Vec<u8>>, LinkFrameError> {
        let mut bodies = Vec::new();
        while let Some(frame) = parser.parse(&mut bytes)? {
            assert_eq!((frame.kind, frame.transfer), (LinkFrameKind::Message, 7));
            bodies.push(frame.body);
        }
        assert!(bytes.is_empty(), "the parser takes all bytes");
        Ok(bodies)
    }

    proptest! {
        #[test]
        fn frames_in_any_pieces_are_the_same(
            messages in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..200), 1..8),
            cuts in prop::collection::vec(1..60usize, 1..40),
        ) {
            let bytes = sealed(&messages);
            let (mut parser, mut found, mut at) = (LinkParser::new(SEED), Vec::new(), 0);
            for length in cuts.into_iter().cycle() {
                let end = bytes.len().min(at + length);
                found.extend(parsed(&mut parser, &bytes[at..end]).unwrap());
                at = end;
                if at == bytes.len() {
                    break;
                }
            }
            prop_assert_eq!(found, messages);
        }

        #[test]
        fn arbitrary_bytes_never_panic_nor_make_frame(
            mut bytes in prop::collection::vec(any::<u8>(), 0..300),
            length in any::<u8>(),
            kind in 0..8u8,
        ) {
            // The start of a plausible header, so that bodies are reached.
            let plausible = [length, 0, 0, 0, kind, 0, 0, 0];
            let covered = bytes.len().min(plausible.len());
            bytes[..covered].copy_from_slice(&plausible[..covered]);
            let mut parser = LinkParser::new(SEED);
            let result = parser.parse(&mut &bytes[..]);
            prop_assert!(!matches!(result, Ok(Some(_))), "{:?}", result);
            prop_assert!(parser.body.capacity() <= bytes.len() + MESSAGE_BYTES_MAX);
        }

        #[test]
        fn flipped_bit_is_never_delivered(bit in 0..(3 * (LINK_HEADER_BYTES + 10) * 8)) {
            let messages = vec![vec![1; 10], vec![2; 10], vec![3; 10]];
            let mut bytes = sealed(&messages);
            bytes[bit / 8] ^= 1 << (bit % 8);
            let (mut parser, mut rest, mut found) = (LinkParser::new(SEED), &bytes[..], 0);
            while let Ok(Some(frame)) = parser.parse(&mut rest) {
                prop_assert_eq!(&frame.body, &messages[found]);
                found += 1;
            }
            prop_assert!(found <= bit / 8 / (LINK_HEADER_BYTES + 10));
        }
    }

    #[test]
    fn repeated_moved_or_foreign_frame_is_invalid() {
        let first = sealed(&[vec![1; 30]]);
        let both = sealed(&[vec![1; 30], vec![2; 30]]);
        let repeated = [&first[..], &first].concat();
        assert_eq!(parsed(&mut LinkParser::new(SEED), &repeated), Err(LinkFrameError::Checksum));
        assert_eq!(parsed(&mut LinkParser::new(SEED), &both[first.len()..]), Err(LinkFrameError::Checksum));
        assert_eq!(parsed(&mut LinkParser::new(SEED + 1), &first), Err(LinkFrameError::Checksum));
    }

    #[test]
    fn huge_length_is_refused_before_its_bytes() {
        let mut parser = LinkParser::new(SEED);
        let header = [0xff, 0xff, 0xff, 0xff, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        assert!(matches!(parser.parse(&mut &header[..]), Err(LinkFrameError::Length { .. })));
        assert_eq!(parser.body.capacity(), 0);
    }
}
