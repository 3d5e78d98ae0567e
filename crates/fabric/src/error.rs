//! Why a link does not come up, or goes down.

use std::io::{self, ErrorKind};

use ashlar_types::{ArenaId, Epoch, FileSystemId, NodeNumber, VersionRange};
use thiserror::Error;

use crate::certificates::CredentialsError;

/// Why a fabric can't do something.
#[derive(Debug, Error)]
pub enum FabricError {
    /// The address is none, or can't be listened on.
    #[error("cannot listen on {address}: {error}")]
    Listen {
        /// The address.
        address: String,
        /// The cause.
        error: io::Error,
    },
    /// The peer can't be reached.
    #[error("cannot reach {address}: {error}")]
    Connect {
        /// The address.
        address: String,
        /// The cause.
        error: io::Error,
    },
    /// The node is no member of the cluster.
    #[error("node {0} is no member of this cluster")]
    NotAMember(NodeNumber),
    /// The peer answered, and is not the member that was expected.
    #[error("the peer at {address} is refused: {reason}")]
    Refused {
        /// The address.
        address: String,
        /// The reason.
        reason: LinkRefusal,
    },
    /// The connection broke in the handshake.
    #[error("the handshake with {address} failed: {reason}")]
    Handshake {
        /// The address.
        address: String,
        /// The cause.
        reason: CloseReason,
    },
    /// The node's own certificate or key does not serve.
    #[error(transparent)]
    Credentials(#[from] CredentialsError),
    /// The operating system refuses something.
    #[error("{what}: {error}")]
    System {
        /// The attempt that failed.
        what: &'static str,
        /// The cause.
        error: io::Error,
    },
}

/// Why one side refuses the other: "it" is the refused side, and "this node" the refusing one.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum LinkRefusal {
    /// The bytes are no handshake of this protocol.
    #[error("it does not speak Ashlar's link protocol")]
    NotALink,
    /// The link protocol has no common version.
    #[error("it speaks link protocol {theirs}, this node {ours}")]
    LinkVersion {
        /// The peer's versions.
        theirs: VersionRange,
        /// This node's.
        ours: VersionRange,
    },
    /// The protocol above has no common version.
    #[error("it speaks {theirs} of the protocol between nodes, this node {ours}")]
    Version {
        /// The peer's versions.
        theirs: VersionRange,
        /// This node's.
        ours: VersionRange,
    },
    /// It belongs to another cluster.
    #[error("it belongs to cluster {0}")]
    ForeignCluster(FileSystemId),
    /// It is no member, or another one than was expected.
    #[error("node {0} is not expected here")]
    UnexpectedNode(NodeNumber),
    /// Its arena is not the member's.
    #[error("its arena {0} is not that of the member")]
    ForeignArena(ArenaId),
    /// It has an older epoch than a successor accepts.
    #[error("its epoch {theirs} is older than {oldest}: another node has taken over")]
    StaleEpoch {
        /// The peer's epoch.
        theirs: Epoch,
        /// The oldest that is accepted.
        oldest: Epoch,
    },
    /// Its certificate does not prove what it says, or it has none.
    #[error("it has no valid certificate of this cluster: {0}")]
    Certificate(String),
    /// One side encrypts, and the other does not.
    #[error("one side uses TLS and the other does not")]
    Security,
    /// An answer to the challenge of another handshake: a recording.
    #[error("it repeats an old handshake")]
    Replay,
    /// The peer gave a reason that this version does not know.
    #[error("for a reason that this version does not know ({0})")]
    Unknown(u8),
}

/// Why a link went down.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum CloseReason {
    /// The peer closed it in order.
    #[error("the peer closed the connection")]
    ClosedByPeer,
    /// The connection ended without a last frame: the peer was killed, or could not go on.
    #[error("the peer closed the connection")]
    PeerGone,
    /// The connection broke.
    #[error("the connection broke: {0}")]
    Broken(String),
    /// Bytes arrived that are not valid.
    #[error("invalid bytes arrived: {0}")]
    Invalid(String),
    /// The peer did not end its handshake in time.
    #[error("the handshake took too long")]
    HandshakeTimeout,
    /// The node has begun an epoch since the link came up.
    #[error("the link belongs to an older epoch")]
    OldEpoch,
    /// The peer is no member any more.
    #[error("the peer is no member any more")]
    Removed,
    /// A newer link in the same direction between the same nodes has come up.
    #[error("a newer link has replaced this one")]
    Replaced,
}

impl From<&io::Error> for CloseReason {
    /// TLS has a text of its own for the end of a stream, which is of no use to an administrator.
    fn from(error: &io::Error) -> Self {
        match error.kind() {
            ErrorKind::UnexpectedEof
            | ErrorKind::ConnectionReset
            | ErrorKind::ConnectionAborted
            | ErrorKind::BrokenPipe => Self::PeerGone,
            _ => Self::Broken(error.to_string()),
        }
    }
}

/// Why a message was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum SendError {
    /// The link's queue is full; [`Event::Drained`](crate::Event::Drained) follows.
    #[error("the link is full")]
    Full,
    /// The link is down, or was never up.
    #[error("the link is down")]
    Down,
    /// The message is longer than [`MESSAGE_BYTES_MAX`](crate::MESSAGE_BYTES_MAX).
    #[error("the message is too long")]
    TooLong,
}
