//! A link's state.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::OnceLock;

use ashlar_types::NodeNumber;
use parking_lot::Mutex;

use super::traffic::Traffic;
use super::wire::Wire;
use crate::event::{LinkId, PeerIdentity};
use crate::handshake::{Handshake, LinkHello};

/// A link, from its first byte to its last.
pub(super) struct TcpLink {
    pub(super) id: LinkId,
    /// The node that this one asked for; `None` if the peer has connected.
    pub(super) expected: Option<NodeNumber>,
    /// The peer's address.
    pub(super) address: String,
    /// This side's Hello: it says in which epoch the link began.
    pub(super) hello: LinkHello,
    /// The peer, once it is proved. Written under the table's lock, so that changes of members miss no link.
    pub(super) peer: OnceLock<PeerIdentity>,
    pub(super) state: Mutex<LinkState>,
}

impl TcpLink {
    pub(super) const fn is_outgoing(&self) -> bool {
        self.expected.is_some()
    }
}

/// The part of a link that changes.
pub(super) struct LinkState {
    pub(super) phase: LinkPhase,
    /// The connection; none before there is an address, and none when the link is down.
    pub(super) wire: Option<Wire>,
}

/// How far a link is.
pub(super) enum LinkPhase {
    /// The connection is being made; further addresses are left to try.
    Connecting(VecDeque<SocketAddr>),
    /// Both sides prove themselves.
    Handshake { handshake: Handshake, is_first_byte_known: bool },
    /// Frames are carried.
    Up(Box<Traffic>),
    /// The link is closed for the layers above; the last bytes are being sent.
    Closing { is_finished: bool },
    /// The connection is gone.
    Down,
}
