//! The trait of all fabrics.

use std::sync::Arc;
use std::time::Duration;

use ashlar_types::{Epoch, NodeNumber};

use crate::error::{FabricError, SendError};
use crate::event::{Event, LinkId, TransferId};
use crate::member::Member;
use crate::region::{RegionId, RegionMemory, RegionRange};

/// Bytes of a message, of a one-sided write and of a read, at most: several frames of a journal.
pub const MESSAGE_BYTES_MAX: usize = 1 << 20;
/// Bytes that wait to be sent on a link, at most. Replication has less than this unacknowledged.
pub const QUEUE_BYTES_MAX: usize = 8 << 20;
/// One-sided writes and reads of a link that are under way, at most. Their answers wait at the peer.
pub const TRANSFERS_MAX: usize = 1024;
/// Bytes that a link's reads under way ask for, at most. They wait at the peer beside its messages.
pub const READ_BYTES_MAX: usize = 8 << 20;

/// Bytes that a link has carried, headers and encryption included.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkUsage {
    /// Bytes sent to the peer.
    pub sent: u64,
    /// Bytes received.
    pub received: u64,
}

/// One node's side of all its links.
///
/// One thread calls [`Fabric::poll`]. Any thread may call the other functions; none of them waits for the peer. A
/// message is written to the network by the calling thread where the network takes it, so that a sender needs no
/// other thread to wake up.
pub trait Fabric: Send + Sync {
    /// Replaces the members that may connect. Links to arenas that are none any more go down.
    fn set_members(&self, members: Vec<Member>);

    /// Begins an epoch: links of older epochs are closed before anything more that they carried is read. Handshakes
    /// carry the new one.
    fn set_epoch(&self, epoch: Epoch);

    /// Accepts links at an address, `HOST:PORT`; returns the address with the port that was taken if it was 0.
    ///
    /// # Errors
    /// [`FabricError::Listen`].
    fn listen(&self, address: &str) -> Result<String, FabricError>;

    /// Begins to connect to a member. One of [`Event::Up`], [`Event::Failed`] and [`Event::Refused`] follows.
    ///
    /// # Errors
    /// [`FabricError::NotAMember`].
    fn connect(&self, node: NodeNumber) -> Result<LinkId, FabricError>;

    /// Sends a message, given in parts. [`Event::Drained`] follows [`SendError::Full`] when half of the room is free.
    ///
    /// # Errors
    /// [`SendError`]: nothing of the message is sent.
    fn send(&self, link: LinkId, parts: &[&[u8]]) -> Result<(), SendError>;

    /// Lets peers write to memory and read it.
    fn register(&self, memory: Arc<dyn RegionMemory>) -> RegionId;

    /// Ends that. After it returns nothing lands in the region. A peer that asks for it later is disconnected.
    fn deregister(&self, region: RegionId);

    /// Writes to a peer's region. [`Event::Transferred`] follows when the bytes are there; they need not be durable.
    ///
    /// # Errors
    /// [`SendError`]: nothing is written.
    fn write(&self, link: LinkId, target: RegionRange, bytes: &[u8]) -> Result<TransferId, SendError>;

    /// Reads from a peer's region. [`Event::Transferred`] follows with the bytes.
    ///
    /// # Errors
    /// [`SendError`].
    fn read(&self, link: LinkId, source: RegionRange, length: usize) -> Result<TransferId, SendError>;

    /// Closes a link. After it returns nothing of it lands in memory, and no call of [`Fabric::poll`] that has not
    /// returned yet adds an event of it. Messages that were sent before are delivered if the peer takes them within a
    /// second, in which [`Fabric::poll`] must be called.
    fn close(&self, link: LinkId);

    /// Returns the bytes that a link has carried; `None` if it is down.
    fn usage(&self, link: LinkId) -> Option<LinkUsage>;

    /// Waits for events, for at most so long (`None`: for ever), and adds them to the list. Returns without one when
    /// [`Fabric::wake`] was called, or when the time is over.
    fn poll(&self, wait: Option<Duration>, events: &mut Vec<Event>);

    /// Ends the wait of [`Fabric::poll`], or the next one if none is under way.
    fn wake(&self);
}
