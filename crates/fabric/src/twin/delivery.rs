//! Bytes on the way between two nodes.

use crate::event::LinkId;
use crate::frame::{LINK_HEADER_BYTES, RANGE_BYTES};
use crate::region::RegionRange;

/// One end of a link: the node's place in the network, and its link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LinkEnd {
    pub(super) node: usize,
    pub(super) link: LinkId,
}

/// Something on the way to a link's end.
#[derive(Debug)]
pub(super) struct Delivery {
    pub(super) from: LinkEnd,
    /// The receiving link; `None` for a connection that begins.
    pub(super) to: Option<LinkId>,
    pub(super) body: DeliveryBody,
}

#[derive(Debug)]
pub(super) enum DeliveryBody {
    /// Bytes of the handshake.
    Handshake(Vec<u8>),
    Message(Vec<u8>),
    Write {
        transfer: u64,
        target: RegionRange,
        bytes: Vec<u8>,
    },
    Read {
        transfer: u64,
        source: RegionRange,
        length: usize,
    },
    Written {
        transfer: u64,
    },
    ReadAnswer {
        transfer: u64,
        bytes: Vec<u8>,
    },
    /// The peer has closed the link.
    Close,
    /// The connection has ended otherwise.
    Reset,
    /// The receiver's own deadline for a handshake.
    Timeout,
    /// No node listens at the address.
    Unreachable,
}

impl DeliveryBody {
    /// Bytes that a link would carry.
    pub(super) fn wire_bytes(&self) -> usize {
        match self {
            Self::Handshake(bytes) => bytes.len(),
            Self::Message(bytes) | Self::ReadAnswer { bytes, .. } => LINK_HEADER_BYTES + bytes.len(),
            Self::Write { bytes, .. } => LINK_HEADER_BYTES + RANGE_BYTES + bytes.len(),
            Self::Read { .. } => LINK_HEADER_BYTES + RANGE_BYTES + 4,
            Self::Written { .. } | Self::Close => LINK_HEADER_BYTES,
            Self::Reset | Self::Timeout | Self::Unreachable => 0,
        }
    }
}
