//! Links over TCP, with TLS or without.
//!
//! A caller's thread writes to the socket itself, so that a message leaves without waking another thread. The thread
//! that polls reads all sockets, and sends the rest of what the network did not take at once.

mod driver;
mod epoll;
mod events;
mod link;
mod poller;
mod queue;
mod refusal_log;
mod security;
mod socket;
mod table;
mod traffic;
mod transport;
mod waker;
mod wire;

#[cfg(test)]
mod tests;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ashlar_types::{Epoch, NodeNumber};
use parking_lot::Mutex;

use self::driver::{HANDSHAKE_TIME, LinkDriver, nonce};
use self::epoll::Epoll;
use self::events::EventQueue;
use self::link::{LinkPhase, LinkState};
use self::poller::{Listeners, Poller, WAKE_TOKEN};
use self::refusal_log::RefusalLog;
use self::security::LinkSecurity;
use self::table::LinkTable;
use self::traffic::Traffic;
use self::waker::Waker;
use self::wire::Wire;
use crate::error::{CloseReason, FabricError, SendError};
use crate::event::{Event, LinkId, TransferId};
use crate::frame::range_bytes;
use crate::member::{FabricIdentity, Member};
use crate::provider::{Fabric, LinkUsage, MESSAGE_BYTES_MAX};
use crate::region::{RegionId, RegionMemory, RegionRange, RegionTable};
use crate::transfer_window::Transfer;

pub use self::security::Security;

/// A fabric over TCP.
pub struct TcpFabric {
    driver: LinkDriver,
    listeners: Listeners,
    poller: Mutex<Poller>,
}

impl TcpFabric {
    /// Makes a fabric without members, which listens nowhere.
    ///
    /// # Errors
    /// [`FabricError::Credentials`] if the certificate does not serve this node; [`FabricError::System`].
    pub fn new(identity: FabricIdentity, security: &Security) -> Result<Self, FabricError> {
        let failed = |error| FabricError::System { what: "cannot wait for sockets", error };
        let driver = LinkDriver {
            table: LinkTable::new(identity),
            epoll: Epoll::new().map_err(failed)?,
            events: EventQueue::default(),
            regions: RegionTable::default(),
            waker: Arc::new(Waker::new().map_err(failed)?),
            security: LinkSecurity::new(security, &identity)?,
            log: RefusalLog::default(),
        };
        driver.epoll.add(&driver.waker.event, WAKE_TOKEN, false).map_err(failed)?;
        Ok(Self { driver, listeners: Listeners::default(), poller: Mutex::new(Poller::new()) })
    }

    fn with_traffic<R>(
        &self,
        link: LinkId,
        run: impl FnOnce(&mut Traffic, &mut Wire) -> Result<R, SendError>,
    ) -> Result<R, SendError> {
        let link = self.driver.table.link(link).ok_or(SendError::Down)?;
        let mut guard = link.state.lock();
        let LinkState { phase: LinkPhase::Up(traffic), wire: Some(wire) } = &mut *guard else {
            return Err(SendError::Down);
        };
        let result = run(traffic, wire)?;
        wire.arm(&self.driver.epoll, link.id).map_err(|_| SendError::Down)?;
        Ok(result)
    }
}

impl Fabric for TcpFabric {
    fn set_members(&self, members: Vec<Member>) {
        for link in self.driver.table.set_members(members) {
            self.driver.take_down(&link, CloseReason::Removed);
        }
        self.driver.waker.notify();
    }

    fn set_epoch(&self, epoch: Epoch) {
        for link in self.driver.table.set_epoch(epoch) {
            self.driver.take_down(&link, CloseReason::OldEpoch);
        }
        self.driver.waker.notify();
    }

    fn listen(&self, address: &str) -> Result<String, FabricError> {
        self.listeners
            .add(&self.driver.epoll, address)
            .map_err(|error| FabricError::Listen { address: address.to_owned(), error })
    }

    fn connect(&self, node: NodeNumber) -> Result<LinkId, FabricError> {
        let link = self.driver.table.add_outgoing(node, nonce(), Instant::now() + HANDSHAKE_TIME);
        let link = link.ok_or(FabricError::NotAMember(node))?;
        match link.address.parse::<SocketAddr>() {
            Ok(address) => self.driver.connect(&link, Ok(vec![address])),
            Err(_) => self.driver.waker.look_up(link.id, link.address.clone()),
        }
        self.driver.waker.notify();
        Ok(link.id)
    }

    fn send(&self, link: LinkId, parts: &[&[u8]]) -> Result<(), SendError> {
        check_length(parts.iter().map(|part| part.len()).sum())?;
        self.with_traffic(link, |traffic, wire| traffic.send_message(wire, parts))
    }

    fn register(&self, memory: Arc<dyn RegionMemory>) -> RegionId {
        self.driver.regions.register(memory)
    }

    fn deregister(&self, region: RegionId) {
        self.driver.regions.deregister(region);
    }

    fn write(&self, link: LinkId, target: RegionRange, bytes: &[u8]) -> Result<TransferId, SendError> {
        check_length(bytes.len())?;
        let range = range_bytes(target);
        self.with_traffic(link, |traffic, wire| traffic.send_transfer(wire, Transfer::Write, &[&range, bytes]))
    }

    fn read(&self, link: LinkId, source: RegionRange, length: usize) -> Result<TransferId, SendError> {
        check_length(length)?;
        let (range, asked) = (range_bytes(source), (length as u32).to_le_bytes());
        let transfer = Transfer::Read { length };
        self.with_traffic(link, |traffic, wire| traffic.send_transfer(wire, transfer, &[&range, &asked]))
    }

    fn close(&self, link: LinkId) {
        self.driver.close(link);
    }

    fn usage(&self, link: LinkId) -> Option<LinkUsage> {
        let link = self.driver.table.link(link)?;
        let state = link.state.lock();
        let (LinkPhase::Up(_), Some(wire)) = (&state.phase, &state.wire) else { return None };
        let socket = wire.transport.socket();
        Some(LinkUsage { sent: socket.sent, received: socket.received })
    }

    fn poll(&self, wait: Option<Duration>, events: &mut Vec<Event>) {
        self.poller.lock().run(&self.driver, &self.listeners, wait, events);
    }

    fn wake(&self) {
        self.driver.waker.wake();
    }
}

fn check_length(length: usize) -> Result<(), SendError> {
    if length > MESSAGE_BYTES_MAX { Err(SendError::TooLong) } else { Ok(()) }
}
