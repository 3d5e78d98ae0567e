//! The network between nodes in memory: its time, its delays and its faults.

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use ashlar_types::NodeNumber;

use super::delivery::{Delivery, DeliveryBody, LinkEnd};
use super::node::TwinNode;
use crate::error::{CloseReason, FabricError, SendError};
use crate::event::{Event, LinkId, TransferId};
use crate::handshake::{HandshakeStep, LinkHello, check_peer};
use crate::member::{FabricIdentity, Member};
use crate::provider::QUEUE_BYTES_MAX;
use crate::region::RegionTable;
use crate::transfer_window::Transfer;

/// A handshake must end in this time, as over TCP.
const HANDSHAKE_TIME: Duration = Duration::from_secs(5);

/// The network between nodes in memory.
pub(super) struct NetworkState {
    now: Duration,
    random: u64,
    deliveries: u64,
    last_port: u16,
    nodes: Vec<TwinNode>,
    pub(super) delay: RangeInclusive<Duration>,
    pub(super) detection_time: Duration,
    /// Directions in which nothing is delivered.
    pub(super) cuts: BTreeSet<(NodeNumber, NodeNumber)>,
}

impl NetworkState {
    pub(super) fn new(seed: u64) -> Self {
        Self {
            now: Duration::ZERO,
            random: seed,
            deliveries: 0,
            last_port: 0,
            nodes: Vec::new(),
            delay: Duration::from_micros(20)..=Duration::from_micros(200),
            detection_time: Duration::from_millis(200),
            cuts: BTreeSet::new(),
        }
    }

    pub(super) fn add_node(
        &mut self,
        identity: FabricIdentity,
        members: Vec<Member>,
        regions: Arc<RegionTable>,
    ) -> usize {
        self.nodes.push(TwinNode::new(identity, members, regions));
        self.nodes.len() - 1
    }

    pub(super) fn node(&mut self, node: usize) -> &mut TwinNode {
        &mut self.nodes[node]
    }

    pub(super) const fn now(&self) -> Duration {
        self.now
    }

    pub(super) fn advance(&mut self, time: Duration) {
        self.now += time;
    }

    pub(super) fn set_frozen(&mut self, node: NodeNumber, is_frozen: bool) {
        self.nodes.iter_mut().filter(|other| other.identity.node == node).for_each(|node| node.is_frozen = is_frozen);
    }

    pub(super) fn crash(&mut self, number: NodeNumber) {
        for node in 0..self.nodes.len() {
            if self.nodes[node].identity.node != number || self.nodes[node].is_crashed {
                continue;
            }
            self.nodes[node].is_crashed = true;
            self.nodes[node].inbox.clear();
            for (link, end) in std::mem::take(&mut self.nodes[node].links) {
                if let Some(other) = end.other {
                    let at = end.arrival.max(self.now + self.detection_time);
                    self.put(at, other.node, Some(other.link), LinkEnd { node, link }, DeliveryBody::Reset);
                }
            }
        }
    }

    pub(super) fn listen(&mut self, node: usize, address: &str) -> Result<String, FabricError> {
        let failed = |kind: ErrorKind| FabricError::Listen { address: address.to_owned(), error: kind.into() };
        let (host, port) = address.rsplit_once(':').ok_or_else(|| failed(ErrorKind::InvalidInput))?;
        let taken = if port == "0" {
            self.last_port += 1;
            format!("{host}:{}", self.last_port)
        } else {
            address.to_owned()
        };
        if self.listening(&taken).is_some() {
            return Err(failed(ErrorKind::AddrInUse));
        }
        self.nodes[node].addresses.push(taken.clone());
        Ok(taken)
    }

    fn listening(&self, address: &str) -> Option<usize> {
        self.nodes.iter().position(|node| !node.is_crashed && node.addresses.iter().any(|other| other == address))
    }

    pub(super) fn connect(&mut self, node: usize, wanted: NodeNumber) -> Result<LinkId, FabricError> {
        let member = self.nodes[node].members.iter().find(|member| member.node == wanted);
        let address = member.ok_or(FabricError::NotAMember(wanted))?.address.clone();
        let nonce = self.nonce();
        let target = self.listening(&address);
        let link = self.nodes[node].add_link(Some(wanted), address, nonce, None);
        let from = LinkEnd { node, link };
        self.put(self.now + HANDSHAKE_TIME, node, Some(link), from, DeliveryBody::Timeout);
        let at = self.arrival();
        match target {
            Some(target) => {
                let body =
                    DeliveryBody::Handshake(LinkHello::new(self.nodes[node].identity, nonce).to_bytes().to_vec());
                self.count_sent(node, link, body.wire_bytes());
                self.put(at, target, None, from, body);
            }
            None => self.put(at, node, Some(link), from, DeliveryBody::Unreachable),
        }
        Ok(link)
    }

    /// Sends a message or begins a transfer on a link that is up.
    pub(super) fn submit(
        &mut self,
        node: usize,
        id: LinkId,
        transfer: Option<Transfer>,
        body: impl FnOnce(u64) -> DeliveryBody,
    ) -> Result<TransferId, SendError> {
        let link = self.nodes[node].links.get_mut(&id).filter(|link| link.handshake.is_none());
        let link = link.ok_or(SendError::Down)?;
        let number = transfer.map_or(0, |_| link.window.next());
        let body = body(number);
        let has_room = transfer.is_none_or(|transfer| link.window.has_room(transfer));
        if !has_room || link.unread_bytes + body.wire_bytes() > QUEUE_BYTES_MAX {
            link.is_full = true;
            return Err(SendError::Full);
        }
        transfer.into_iter().for_each(|transfer| link.window.begin(transfer));
        self.send(node, id, body);
        Ok(TransferId(number))
    }

    pub(super) fn close(&mut self, node: usize, link: LinkId) {
        self.send(node, link, DeliveryBody::Close);
        self.nodes[node].links.remove(&link);
        self.nodes[node].inbox.retain(|_, delivery| delivery.to != Some(link));
        self.nodes[node].forget(link, false);
    }

    /// Ends a link at once, for the layers above and for the peer.
    pub(super) fn take_down(&mut self, node: usize, link: LinkId, reason: CloseReason) {
        self.send(node, link, DeliveryBody::Reset);
        self.nodes[node].forget(link, true);
        self.nodes[node].end(link, reason);
    }

    /// Sends something to a link's other end, behind all that was sent before.
    fn send(&mut self, node: usize, id: LinkId, body: DeliveryBody) {
        let at = self.arrival();
        let Some(link) = self.nodes[node].links.get_mut(&id) else { return };
        let Some(other) = link.other else { return };
        link.arrival = link.arrival.max(at);
        let at = link.arrival;
        self.count_sent(node, id, body.wire_bytes());
        self.put(at, other.node, Some(other.link), LinkEnd { node, link: id }, body);
    }

    fn count_sent(&mut self, node: usize, id: LinkId, bytes: usize) {
        if let Some(link) = self.nodes[node].links.get_mut(&id) {
            link.unread_bytes += bytes;
            link.usage.sent += bytes as u64;
        }
    }

    fn put(&mut self, at: Duration, node: usize, to: Option<LinkId>, from: LinkEnd, body: DeliveryBody) {
        if !self.nodes[node].is_crashed {
            self.deliveries += 1;
            self.nodes[node].inbox.insert((at, self.deliveries), Delivery { from, to, body });
        }
    }

    pub(super) fn poll(&mut self, node: usize, wait: Option<Duration>, events: &mut Vec<Event>) {
        self.deliver_due(node);
        if self.nodes[node].events.is_empty() && !self.nodes[node].is_woken {
            let end = wait.map(|wait| self.now.saturating_add(wait));
            let next = self.next_delivery().into_iter().chain(end).min();
            self.now = next.unwrap_or(self.now);
            self.deliver_due(node);
        }
        self.nodes[node].is_woken = false;
        if !self.nodes[node].is_frozen {
            events.extend(self.nodes[node].events.drain(..));
        }
    }

    /// The time of the next delivery to any node.
    fn next_delivery(&self) -> Option<Duration> {
        let running = (0..self.nodes.len()).filter(|node| !self.nodes[*node].is_frozen);
        let later = |node: usize| {
            let mut inbox = self.nodes[node].inbox.iter();
            inbox.find(|((at, _), delivery)| *at > self.now && !self.is_cut(node, delivery)).map(|((at, _), _)| *at)
        };
        running.filter_map(later).min()
    }

    fn is_cut(&self, node: usize, delivery: &Delivery) -> bool {
        let (from, to) = (self.nodes[delivery.from.node].identity.node, self.nodes[node].identity.node);
        self.cuts.contains(&(from, to))
    }

    fn deliver_due(&mut self, node: usize) {
        while !self.nodes[node].is_frozen {
            let due = self.nodes[node].inbox.range(..=(self.now, u64::MAX));
            let mut due = due.filter(|(_, delivery)| !self.is_cut(node, delivery)).map(|(key, _)| *key);
            let Some(key) = due.next() else { return };
            let Some(delivery) = self.nodes[node].inbox.remove(&key) else { return };
            self.deliver(node, delivery);
        }
    }

    fn deliver(&mut self, node: usize, Delivery { from, to, body }: Delivery) {
        let link = to.unwrap_or_else(|| {
            let nonce = self.nonce();
            let link = self.nodes[node].add_link(None, format!("node-{}", from.node), nonce, Some(from));
            self.put(self.now + HANDSHAKE_TIME, node, Some(link), LinkEnd { node, link }, DeliveryBody::Timeout);
            link
        });
        let bytes = body.wire_bytes();
        if from.node != node {
            let Some(end) = self.nodes[node].links.get_mut(&link) else {
                if !matches!(body, DeliveryBody::Reset) {
                    let at = self.arrival();
                    self.put(at, from.node, Some(from.link), LinkEnd { node, link }, DeliveryBody::Reset);
                }
                return;
            };
            end.other = Some(from);
            end.usage.received += bytes as u64;
            if let Some(sender) = self.nodes[from.node].links.get_mut(&from.link) {
                sender.unread_bytes = sender.unread_bytes.saturating_sub(bytes);
            }
            self.report_drained(from);
        }
        if let Err(reason) = self.handle(node, link, body) {
            self.take_down(node, link, reason);
        }
    }

    fn report_drained(&mut self, end: LinkEnd) {
        let node = &mut self.nodes[end.node];
        if node.links.get_mut(&end.link).is_some_and(|link| link.take_drained()) {
            node.events.push_back(Event::Drained { link: end.link });
        }
    }

    /// Does what arrived; an error takes the link down.
    fn handle(&mut self, node: usize, link: LinkId, body: DeliveryBody) -> Result<(), CloseReason> {
        let receiver = &mut self.nodes[node];
        let is_up = receiver.links.get(&link).is_some_and(|link| link.handshake.is_none());
        match body {
            DeliveryBody::Handshake(bytes) if !is_up => self.shake_hands(node, link, &bytes),
            DeliveryBody::Handshake(_) => return Err(CloseReason::Invalid("a second handshake".into())),
            DeliveryBody::Message(bytes) => receiver.events.push_back(Event::Message { link, bytes }),
            DeliveryBody::Write { transfer, target, bytes } => {
                receiver.regions.store(target, &bytes).map_err(CloseReason::Invalid)?;
                self.send(node, link, DeliveryBody::Written { transfer });
            }
            DeliveryBody::Read { transfer, source, length } => {
                let bytes = receiver.regions.load(source, length).map_err(CloseReason::Invalid)?;
                self.send(node, link, DeliveryBody::ReadAnswer { transfer, bytes });
            }
            DeliveryBody::Written { transfer } => self.finish(node, link, transfer, Transfer::Write, Vec::new())?,
            DeliveryBody::ReadAnswer { transfer, bytes } => {
                self.finish(node, link, transfer, Transfer::Read { length: bytes.len() }, bytes)?;
            }
            DeliveryBody::Close => receiver.end(link, CloseReason::ClosedByPeer),
            DeliveryBody::Reset => receiver.end(link, CloseReason::Broken("the peer has ended it".into())),
            DeliveryBody::Timeout if !is_up => return Err(CloseReason::HandshakeTimeout),
            DeliveryBody::Timeout => {}
            DeliveryBody::Unreachable => {
                let removed = receiver.links.remove(&link);
                receiver.inbox.retain(|_, delivery| delivery.to != Some(link));
                if let Some((wanted, address)) = removed.and_then(|link| Some((link.expected?, link.address))) {
                    let error = FabricError::Connect { address, error: ErrorKind::ConnectionRefused.into() };
                    receiver.events.push_back(Event::Failed { link, node: wanted, error });
                }
            }
        }
        Ok(())
    }

    fn finish(
        &mut self,
        node: usize,
        id: LinkId,
        number: u64,
        transfer: Transfer,
        bytes: Vec<u8>,
    ) -> Result<(), CloseReason> {
        let receiver = &mut self.nodes[node];
        if !receiver.links.get_mut(&id).is_some_and(|link| link.window.finish(number, transfer)) {
            return Err(CloseReason::Invalid("an answer belongs to no transfer".into()));
        }
        receiver.events.push_back(Event::Transferred { link: id, transfer: TransferId(number), bytes });
        self.report_drained(LinkEnd { node, link: id });
        Ok(())
    }

    fn shake_hands(&mut self, node: usize, id: LinkId, bytes: &[u8]) {
        let receiver = &mut self.nodes[node];
        let Some(link) = receiver.links.get_mut(&id) else { return };
        let (expected, address) = (link.expected, link.address.clone());
        let Some(handshake) = &mut link.handshake else { return };
        let (identity, members) = (&receiver.identity, &receiver.members);
        let check = |hello: &LinkHello| check_peer(hello, identity, members, expected, |_| Ok(()));
        match handshake.handle_message(bytes, check) {
            HandshakeStep::Wait => {}
            HandshakeStep::Send(bytes) => self.send(node, id, DeliveryBody::Handshake(bytes)),
            HandshakeStep::Done { send, hello, .. } => {
                if !send.is_empty() {
                    self.send(node, id, DeliveryBody::Handshake(send));
                }
                self.establish(node, id, &hello);
            }
            HandshakeStep::Refuse { reason, answer } => {
                tracing::warn!("the peer at {address} is refused: {reason}");
                self.send(node, id, DeliveryBody::Handshake(answer));
                let failed = expected.map(|node| Event::Failed {
                    link: id,
                    node,
                    error: FabricError::Refused { address, reason },
                });
                self.drop_link(node, id, failed);
            }
            HandshakeStep::Refused { reason, epoch } => {
                let refused = expected.map(|node| Event::Refused { link: id, node, reason, epoch });
                self.drop_link(node, id, refused);
            }
        }
    }

    fn drop_link(&mut self, node: usize, id: LinkId, event: Option<Event>) {
        self.nodes[node].links.remove(&id);
        self.nodes[node].inbox.retain(|_, delivery| delivery.to != Some(id));
        self.nodes[node].events.extend(event);
    }

    /// Brings a link up; members and epochs may have changed since the peer's Hello was checked.
    fn establish(&mut self, node: usize, id: LinkId, hello: &LinkHello) {
        let receiver = &self.nodes[node];
        let Some(link) = receiver.links.get(&id) else { return };
        let expected = link.expected;
        let Ok(peer) = check_peer(hello, &receiver.identity, &receiver.members, expected, |_| Ok(())) else {
            return self.take_down(node, id, CloseReason::Removed);
        };
        let replaced = receiver.links.iter().filter(|(other, link)| {
            let is_same = link.peer.is_some_and(|known| known.node == peer.node);
            **other != id && link.expected.is_some() == expected.is_some() && is_same
        });
        for old in replaced.map(|(other, _)| *other).collect::<Vec<_>>() {
            self.take_down(node, old, CloseReason::Replaced);
        }
        let receiver = &mut self.nodes[node];
        let is_timeout = |delivery: &Delivery| matches!(delivery.body, DeliveryBody::Timeout);
        receiver.inbox.retain(|_, delivery| delivery.to != Some(id) || !is_timeout(delivery));
        if let Some(link) = receiver.links.get_mut(&id) {
            (link.handshake, link.peer) = (None, Some(peer));
            receiver.events.push_back(Event::Up { link: id, peer, is_outgoing: expected.is_some() });
        }
    }

    /// When something that is sent now arrives.
    fn arrival(&mut self) -> Duration {
        let (least, most) = (*self.delay.start(), *self.delay.end());
        let range = (most.saturating_sub(least).as_nanos() as u64).saturating_add(1);
        self.now + least + Duration::from_nanos(self.draw() % range)
    }

    fn nonce(&mut self) -> [u8; 16] {
        let (first, second) = (u128::from(self.draw()), u128::from(self.draw()));
        (first << 64 | second).to_le_bytes()
    }

    /// The generator splitmix64.
    fn draw(&mut self) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.random ^ (self.random >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }
}
