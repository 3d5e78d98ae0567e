//! One node of a network in memory.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use ashlar_types::{Epoch, NodeNumber};

use super::delivery::{Delivery, LinkEnd};
use crate::error::{CloseReason, FabricError};
use crate::event::{Event, LinkId, PeerIdentity};
use crate::handshake::{Handshake, LinkHello};
use crate::member::{FabricIdentity, Member};
use crate::provider::{LinkUsage, QUEUE_BYTES_MAX};
use crate::region::RegionTable;
use crate::transfer_window::TransferWindow;

/// One node of a network in memory.
pub(super) struct TwinNode {
    pub(super) identity: FabricIdentity,
    pub(super) members: Vec<Member>,
    pub(super) addresses: Vec<String>,
    pub(super) regions: Arc<RegionTable>,
    pub(super) links: BTreeMap<LinkId, TwinLink>,
    /// Deliveries by time and number.
    pub(super) inbox: BTreeMap<(Duration, u64), Delivery>,
    pub(super) events: VecDeque<Event>,
    pub(super) is_frozen: bool,
    pub(super) is_crashed: bool,
    pub(super) is_woken: bool,
    last_link: u64,
}

/// One end of a link.
pub(super) struct TwinLink {
    /// The node that was asked for; `None` if the peer has connected.
    pub(super) expected: Option<NodeNumber>,
    pub(super) address: String,
    pub(super) hello: LinkHello,
    /// The other end; the first answer names its link.
    pub(super) other: Option<LinkEnd>,
    /// `None` when the link is up.
    pub(super) handshake: Option<Handshake>,
    pub(super) peer: Option<PeerIdentity>,
    /// When the delivery that was sent last arrives: none overtakes it.
    pub(super) arrival: Duration,
    /// Bytes that the peer has not taken.
    pub(super) unread_bytes: usize,
    pub(super) is_full: bool,
    pub(super) window: TransferWindow,
    pub(super) usage: LinkUsage,
}

impl TwinLink {
    /// Says once that a full link takes messages again.
    pub(super) fn take_drained(&mut self) -> bool {
        let is_drained = self.is_full && self.unread_bytes <= QUEUE_BYTES_MAX / 2 && self.window.is_roomy();
        self.is_full &= !is_drained;
        is_drained
    }
}

impl TwinNode {
    pub(super) fn new(identity: FabricIdentity, members: Vec<Member>, regions: Arc<RegionTable>) -> Self {
        Self {
            identity,
            members,
            addresses: Vec::new(),
            regions,
            links: BTreeMap::new(),
            inbox: BTreeMap::new(),
            events: VecDeque::new(),
            is_frozen: false,
            is_crashed: false,
            is_woken: false,
            last_link: 0,
        }
    }

    pub(super) fn add_link(
        &mut self,
        expected: Option<NodeNumber>,
        address: String,
        nonce: [u8; 16],
        other: Option<LinkEnd>,
    ) -> LinkId {
        self.last_link += 1;
        let hello = LinkHello::new(self.identity, nonce);
        let handshake = Some(Handshake::new(hello.clone(), expected.is_some()));
        let link = TwinLink {
            expected,
            address,
            hello,
            other,
            handshake,
            peer: None,
            arrival: Duration::ZERO,
            unread_bytes: 0,
            is_full: false,
            window: TransferWindow::default(),
            usage: LinkUsage::default(),
        };
        self.links.insert(LinkId(self.last_link), link);
        LinkId(self.last_link)
    }

    pub(super) fn usage(&self, link: LinkId) -> Option<LinkUsage> {
        self.links.get(&link).filter(|link| link.handshake.is_none()).map(|link| link.usage)
    }

    /// Replaces the members; returns the links to peers that are none any more.
    pub(super) fn set_members(&mut self, members: Vec<Member>) -> Vec<LinkId> {
        self.members = members;
        let is_member = |peer: &PeerIdentity| {
            self.members.iter().any(|member| (member.node, member.arena) == (peer.node, peer.arena))
        };
        let removed = self.links.iter().filter(|(_, link)| link.peer.as_ref().is_some_and(|peer| !is_member(peer)));
        removed.map(|(id, _)| *id).collect()
    }

    /// Begins an epoch, unless a newer one has begun; returns the links of older ones.
    pub(super) fn set_epoch(&mut self, epoch: Epoch) -> Vec<LinkId> {
        if epoch.number < self.identity.epoch.number {
            return Vec::new();
        }
        self.identity.epoch = epoch;
        let old = self.links.iter().filter(|(_, link)| link.hello.identity.epoch.number < epoch.number);
        old.map(|(id, _)| *id).collect()
    }

    /// Drops the events of a link; with `traffic_only` those that say whether it is up stay.
    pub(super) fn forget(&mut self, link: LinkId, traffic_only: bool) {
        self.events.retain(|event| event.link() != link || (traffic_only && !event.is_traffic()));
    }

    /// Ends a link, and says why to the layers above.
    pub(super) fn end(&mut self, id: LinkId, reason: CloseReason) {
        self.inbox.retain(|_, delivery| delivery.to != Some(id));
        match self.links.remove(&id) {
            Some(TwinLink { handshake: None, address, .. }) => {
                if matches!(reason, CloseReason::Invalid(_)) {
                    tracing::warn!("the peer at {address} is refused: {reason}");
                }
                self.events.push_back(Event::Down { link: id, reason });
            }
            Some(TwinLink { expected: Some(node), address, .. }) => {
                let error = FabricError::Handshake { address, reason };
                self.events.push_back(Event::Failed { link: id, node, error });
            }
            _ => {}
        }
    }
}
