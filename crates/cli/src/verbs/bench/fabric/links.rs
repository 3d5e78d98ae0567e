//! Links of the fabric, with TLS or without.
//!
//! The thread that sends also polls. So a message and its answer wake one thread at each end, as on a plain socket.

use std::io;

use ashlar_fabric::{Event, Fabric, FabricError, FabricIdentity, LinkId, Member, Security, SendError, TcpFabric};
use ashlar_types::{ArenaId, Epoch, FileSystemId, NodeNumber, VersionRange};

use super::case::{CarrierEnd, PATIENCE, TurnPlan};

/// The cluster of the two nodes.
pub const CLUSTER: FileSystemId = FileSystemId(0xbe7c);
/// The node of this process.
pub const NEAR: NodeNumber = node(1);
/// The node of the peer.
pub const PEER: NodeNumber = node(2);

const fn node(number: u16) -> NodeNumber {
    NodeNumber::new(number).expect("the number is no zero")
}

fn identity(node: NodeNumber) -> FabricIdentity {
    let (arena, epoch, versions) = (ArenaId(u64::from(node.get())), Epoch::default(), VersionRange::new(1, 1));
    FabricIdentity { cluster: CLUSTER, node, arena, epoch, versions }
}

fn member(node: NodeNumber, address: &str) -> Member {
    let FabricIdentity { arena, epoch, .. } = identity(node);
    Member { node, arena, address: address.to_owned(), oldest_epoch: epoch }
}

fn failed(error: FabricError) -> io::Error {
    io::Error::other(error)
}

/// This process's end of a link.
pub struct BenchLink {
    fabric: TcpFabric,
    link: LinkId,
    events: Vec<Event>,
}

impl BenchLink {
    /// Connects to the peer, and waits until the link is up.
    pub fn connect(security: &Security, address: &str) -> io::Result<Self> {
        let fabric = TcpFabric::new(identity(NEAR), security).map_err(failed)?;
        fabric.set_members(vec![member(PEER, address)]);
        let link = fabric.connect(PEER).map_err(failed)?;
        let mut end = Self { fabric, link, events: Vec::new() };
        end.wait_for(|event| matches!(event, Event::Up { .. }))?;
        Ok(end)
    }

    /// Waits for an event. Others are dropped, except those that end the link.
    fn wait_for(&mut self, is_wanted: impl Fn(&Event) -> bool) -> io::Result<()> {
        loop {
            self.fabric.poll(Some(PATIENCE), &mut self.events);
            if self.events.is_empty() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            let mut is_found = false;
            for event in self.events.drain(..) {
                match event {
                    Event::Down { reason, .. } => return Err(io::Error::other(reason)),
                    Event::Failed { error, .. } => return Err(failed(error)),
                    Event::Refused { reason, .. } => return Err(io::Error::other(reason)),
                    event => is_found |= is_wanted(&event),
                }
            }
            if is_found {
                return Ok(());
            }
        }
    }

    /// Sends a message, and waits for room if the link is full.
    fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        loop {
            match self.fabric.send(self.link, &[bytes]) {
                Ok(()) => return Ok(()),
                Err(SendError::Full) => self.wait_for(|event| matches!(event, Event::Drained { .. }))?,
                Err(error) => return Err(io::Error::other(error)),
            }
        }
    }
}

impl CarrierEnd for BenchLink {
    fn begin_turn(&mut self, plan: TurnPlan) -> io::Result<()> {
        self.send(&plan.to_bytes())
    }

    fn exchange(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.send(bytes)?;
        self.wait_for(|event| matches!(event, Event::Message { .. }))
    }

    fn stream(&mut self, bytes: &[u8], count: usize) -> io::Result<()> {
        (0..count).try_for_each(|_| self.send(bytes))?;
        self.wait_for(|event| matches!(event, Event::Message { .. }))
    }
}

/// The peer's fabric.
pub struct LinkServer {
    fabric: TcpFabric,
    /// The turn under way, and the messages that are left of it.
    turn: Option<(TurnPlan, u32)>,
}

impl LinkServer {
    /// Begins to listen; returns the address too.
    pub fn listen(security: &Security) -> io::Result<(Self, String)> {
        let fabric = TcpFabric::new(identity(PEER), security).map_err(failed)?;
        // This node never connects.
        fabric.set_members(vec![member(NEAR, "")]);
        let address = fabric.listen("127.0.0.1:0").map_err(failed)?;
        Ok((Self { fabric, turn: None }, address))
    }

    /// Answers messages.
    pub fn serve(&mut self) -> io::Result<()> {
        let mut events = Vec::new();
        loop {
            self.fabric.poll(None, &mut events);
            for event in events.drain(..) {
                match event {
                    Event::Message { link, bytes } => self.handle_message(link, &bytes)?,
                    Event::Down { .. } => self.turn = None,
                    _ => {}
                }
            }
        }
    }

    fn handle_message(&mut self, link: LinkId, bytes: &[u8]) -> io::Result<()> {
        let Some((plan, left)) = &mut self.turn else {
            let plan = TurnPlan::from_bytes(bytes)?;
            self.turn = Some((plan, plan.count));
            return Ok(());
        };
        *left -= 1;
        let (is_last, is_stream) = (*left == 0, plan.is_stream);
        if is_last {
            self.turn = None;
        }
        match is_stream {
            true if !is_last => Ok(()),
            true => self.fabric.send(link, &[&[1]]),
            false => self.fabric.send(link, &[bytes]),
        }
        .map_err(io::Error::other)
    }
}

#[cfg(test)]
mod tests {
    use ashlar_fabric::ClusterAuthority;

    use super::*;

    #[test]
    fn turns_follow_each_other_on_one_link() {
        let authority = ClusterAuthority::create(CLUSTER).expect("made");
        let tls = |node| Security::Tls(authority.issue(node).expect("issued"));
        for (own, theirs) in [(Security::Plain, Security::Plain), (tls(NEAR), tls(PEER))] {
            let (mut server, address) = LinkServer::listen(&theirs).expect("bound");
            std::thread::spawn(move || server.serve());
            let mut end = BenchLink::connect(&own, &address).expect("connected");
            for (is_stream, length, count) in [(false, 10, 1), (true, 1 << 20, 20), (false, 3, 1)] {
                end.begin_turn(TurnPlan { is_stream, length, count }).expect("begun");
                let bytes = vec![9; length as usize];
                match is_stream {
                    true => end.stream(&bytes, count as usize).expect("all are there"),
                    false => end.exchange(&bytes).expect("an echo"),
                }
            }
        }
    }
}
