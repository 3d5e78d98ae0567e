//! All links of a node, its identity, and the members.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use ashlar_types::{Epoch, NodeNumber};
use parking_lot::Mutex;

use super::link::{LinkPhase, LinkState, TcpLink};
use crate::error::LinkRefusal;
use crate::event::{LinkId, PeerIdentity};
use crate::handshake::{Handshake, LinkHello, check_peer};
use crate::member::{FabricIdentity, Member};

/// Incoming connections that have not become links, at most. Strangers can cause no more.
pub(super) const INCOMING_MAX: usize = 64;

/// All links of a node, its identity, and the members. Its lock is taken under a link's lock, never around one.
pub(super) struct LinkTable {
    state: Mutex<TableState>,
}

struct TableState {
    identity: FabricIdentity,
    members: Vec<Member>,
    links: HashMap<LinkId, Arc<TcpLink>>,
    last_link: u64,
    /// Incoming connections that have not become links, the oldest first.
    incoming: VecDeque<LinkId>,
    deadlines: HashMap<LinkId, Instant>,
}

impl TableState {
    fn add(&mut self, expected: Option<NodeNumber>, address: String, nonce: [u8; 16], until: Instant) -> Arc<TcpLink> {
        self.last_link += 1;
        let (id, hello) = (LinkId(self.last_link), LinkHello::new(self.identity, nonce));
        let phase = match expected {
            Some(_) => LinkPhase::Connecting(VecDeque::new()),
            None => {
                LinkPhase::Handshake { handshake: Handshake::new(hello.clone(), false), is_first_byte_known: false }
            }
        };
        let state = Mutex::new(LinkState { phase, wire: None });
        let link = Arc::new(TcpLink { id, expected, address, hello, peer: OnceLock::new(), state });
        self.links.insert(id, Arc::clone(&link));
        self.deadlines.insert(id, until);
        link
    }
}

impl LinkTable {
    pub(super) fn new(identity: FabricIdentity) -> Self {
        let state = TableState {
            identity,
            members: Vec::new(),
            links: HashMap::new(),
            last_link: 0,
            incoming: VecDeque::new(),
            deadlines: HashMap::new(),
        };
        Self { state: Mutex::new(state) }
    }

    pub(super) fn identity(&self) -> FabricIdentity {
        self.state.lock().identity
    }

    pub(super) fn link(&self, id: LinkId) -> Option<Arc<TcpLink>> {
        self.state.lock().links.get(&id).cloned()
    }

    /// Adds a link to a member; `None` if the node is none.
    pub(super) fn add_outgoing(&self, node: NodeNumber, nonce: [u8; 16], until: Instant) -> Option<Arc<TcpLink>> {
        let mut state = self.state.lock();
        let address = state.members.iter().find(|member| member.node == node)?.address.clone();
        Some(state.add(Some(node), address, nonce, until))
    }

    /// Adds a connection that a peer has made. If there are too many, the oldest one must go: it is returned.
    pub(super) fn add_incoming(
        &self,
        address: String,
        nonce: [u8; 16],
        until: Instant,
    ) -> (Arc<TcpLink>, Option<Arc<TcpLink>>) {
        let mut state = self.state.lock();
        let is_full = state.incoming.len() == INCOMING_MAX;
        let oldest = if is_full { state.incoming.pop_front() } else { None };
        let oldest = oldest.and_then(|id| state.links.get(&id).cloned());
        let link = state.add(None, address, nonce, until);
        state.incoming.push_back(link.id);
        (link, oldest)
    }

    pub(super) fn remove(&self, id: LinkId) {
        let mut state = self.state.lock();
        state.links.remove(&id);
        state.deadlines.remove(&id);
        state.incoming.retain(|incoming| *incoming != id);
    }

    /// Checks a peer's Hello.
    pub(super) fn check(
        &self,
        theirs: &LinkHello,
        expected: Option<NodeNumber>,
        certificate: impl FnOnce(NodeNumber) -> Result<(), String>,
    ) -> Result<PeerIdentity, LinkRefusal> {
        let state = self.state.lock();
        check_peer(theirs, &state.identity, &state.members, expected, certificate)
    }

    /// Records a link's peer, whose certificate was checked before. Members or epochs may have changed since, so the
    /// Hello is checked again. Returns the links of the same direction with the same node that this one replaces.
    pub(super) fn admit(&self, link: &TcpLink, theirs: &LinkHello) -> Result<Vec<Arc<TcpLink>>, LinkRefusal> {
        let mut state = self.state.lock();
        let peer = check_peer(theirs, &state.identity, &state.members, link.expected, |_| Ok(()))?;
        let is_replaced = |other: &&Arc<TcpLink>| {
            let is_same = other.peer.get().is_some_and(|known| known.node == peer.node);
            other.id != link.id && other.is_outgoing() == link.is_outgoing() && is_same
        };
        let replaced = state.links.values().filter(is_replaced).cloned().collect();
        let _ = link.peer.set(peer);
        state.deadlines.remove(&link.id);
        state.incoming.retain(|incoming| *incoming != link.id);
        Ok(replaced)
    }

    /// Replaces the members; returns the links to peers that are none any more.
    pub(super) fn set_members(&self, members: Vec<Member>) -> Vec<Arc<TcpLink>> {
        let mut state = self.state.lock();
        state.members = members;
        let is_member = |peer: &PeerIdentity| {
            state.members.iter().any(|member| member.node == peer.node && member.arena == peer.arena)
        };
        state.links.values().filter(|link| link.peer.get().is_some_and(|peer| !is_member(peer))).cloned().collect()
    }

    /// Begins an epoch, unless a newer one has begun; returns the links of older ones.
    pub(super) fn set_epoch(&self, epoch: Epoch) -> Vec<Arc<TcpLink>> {
        let mut state = self.state.lock();
        if epoch.number < state.identity.epoch.number {
            return Vec::new();
        }
        state.identity.epoch = epoch;
        let is_old = |link: &&Arc<TcpLink>| link.hello.identity.epoch.number < epoch.number;
        state.links.values().filter(is_old).cloned().collect()
    }

    pub(super) fn set_deadline(&self, id: LinkId, until: Instant) {
        let mut state = self.state.lock();
        if state.links.contains_key(&id) {
            state.deadlines.insert(id, until);
        }
    }

    pub(super) fn next_deadline(&self) -> Option<Instant> {
        self.state.lock().deadlines.values().min().copied()
    }

    pub(super) fn expired(&self, now: Instant) -> Vec<Arc<TcpLink>> {
        let state = self.state.lock();
        let ids = state.deadlines.iter().filter(|(_, until)| **until <= now).map(|(id, _)| id);
        ids.filter_map(|id| state.links.get(id).cloned()).collect()
    }
}
