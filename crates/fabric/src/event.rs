//! Events of a fabric.

use ashlar_types::{ArenaId, Epoch, NodeNumber};

use crate::error::{CloseReason, FabricError, LinkRefusal};

/// A link of a node. A node gives out each number once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LinkId(pub u64);

/// A one-sided write or read under way. A link gives out each number once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TransferId(pub u64);

/// The other side of a link, as the handshake has proved it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerIdentity {
    /// The node.
    pub node: NodeNumber,
    /// Its arena.
    pub arena: ArenaId,
    /// The newest epoch that it knew when the link came up.
    pub epoch: Epoch,
    /// The version of the protocol above the fabric that both sides speak.
    pub version: u32,
}

/// An event of a fabric. Those of one link come in the order in which they happened.
#[derive(Debug)]
pub enum Event {
    /// A link is up: one that this node asked for (`is_outgoing`), or one that the peer asked for.
    Up {
        /// The link.
        link: LinkId,
        /// The peer.
        peer: PeerIdentity,
        /// This node has asked for the link.
        is_outgoing: bool,
    },
    /// A link that this node asked for did not come up.
    Failed {
        /// The link.
        link: LinkId,
        /// The node that it was to lead to.
        node: NodeNumber,
        /// The cause.
        error: FabricError,
    },
    /// The peer refused a link that this node asked for. If its epoch is newer, a successor may have replaced this
    /// node.
    Refused {
        /// The link.
        link: LinkId,
        /// The node that refused.
        node: NodeNumber,
        /// Its reason.
        reason: LinkRefusal,
        /// The newest epoch that the peer knows; `None` if it did not say so, since it took this node for a stranger.
        epoch: Option<Epoch>,
    },
    /// A message has arrived.
    Message {
        /// The link.
        link: LinkId,
        /// The message.
        bytes: Vec<u8>,
    },
    /// A one-sided write has landed at the peer, or the bytes of a read are here.
    Transferred {
        /// The link.
        link: LinkId,
        /// The transfer.
        transfer: TransferId,
        /// The bytes read; none for a write.
        bytes: Vec<u8>,
    },
    /// A link that was full takes messages again.
    Drained {
        /// The link.
        link: LinkId,
    },
    /// A link is down. Its memory is not written any more, and no event of it follows.
    Down {
        /// The link.
        link: LinkId,
        /// The cause.
        reason: CloseReason,
    },
}

impl Event {
    /// Returns the link that the event is about.
    #[must_use]
    pub const fn link(&self) -> LinkId {
        match self {
            Self::Up { link, .. }
            | Self::Failed { link, .. }
            | Self::Refused { link, .. }
            | Self::Message { link, .. }
            | Self::Transferred { link, .. }
            | Self::Drained { link }
            | Self::Down { link, .. } => *link,
        }
    }

    /// Whether the event came from something that a link carried.
    pub(crate) const fn is_traffic(&self) -> bool {
        matches!(self, Self::Message { .. } | Self::Transferred { .. } | Self::Drained { .. })
    }
}
