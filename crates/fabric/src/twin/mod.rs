//! Fabrics in memory, in virtual time, with faults. No thread and no clock here.
//!
//! A network's time moves by [`TwinNetwork::advance`], and by [`Fabric::poll`]: a node that waits while nothing is due
//! moves it to the next delivery, at most as far as it would wait. One seed gives one course of events.

mod delivery;
mod network;
mod node;

use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use ashlar_types::{Epoch, NodeNumber};
use parking_lot::{Mutex, MutexGuard};

use self::delivery::DeliveryBody;
use self::network::NetworkState;
use crate::error::{CloseReason, FabricError, SendError};
use crate::event::{Event, LinkId, TransferId};
use crate::member::{FabricIdentity, Member};
use crate::provider::{Fabric, LinkUsage, MESSAGE_BYTES_MAX};
use crate::region::{RegionId, RegionMemory, RegionRange, RegionTable};
use crate::transfer_window::Transfer;

/// A network between fabrics in memory.
#[derive(Clone)]
pub struct TwinNetwork {
    state: Arc<Mutex<NetworkState>>,
}

impl TwinNetwork {
    /// Makes a network whose delays follow from a seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self { state: Arc::new(Mutex::new(NetworkState::new(seed))) }
    }

    /// Adds a node. One with the number of a crashed node is that node, restarted.
    #[must_use]
    pub fn fabric(&self, identity: FabricIdentity, members: Vec<Member>) -> TwinFabric {
        let regions = Arc::new(RegionTable::default());
        let node = self.state.lock().add_node(identity, members, Arc::clone(&regions));
        TwinFabric { network: self.clone(), node, regions }
    }

    /// Returns the time since the network was made.
    #[must_use]
    pub fn now(&self) -> Duration {
        self.state.lock().now()
    }

    /// Lets time pass.
    pub fn advance(&self, time: Duration) {
        self.state.lock().advance(time);
    }

    /// Sets how long deliveries take from now on.
    pub fn set_delay(&self, delay: RangeInclusive<Duration>) {
        self.state.lock().delay = delay;
    }

    /// Sets after which time peers learn that a node has crashed.
    pub fn set_detection_time(&self, time: Duration) {
        self.state.lock().detection_time = time;
    }

    /// Cuts two nodes off from each other. Their deliveries wait until [`TwinNetwork::heal`].
    pub fn cut(&self, a: NodeNumber, b: NodeNumber) {
        self.state.lock().cuts.extend([(a, b), (b, a)]);
    }

    /// Cuts one direction.
    pub fn cut_one_way(&self, from: NodeNumber, to: NodeNumber) {
        self.state.lock().cuts.insert((from, to));
    }

    /// Ends the cuts between two nodes.
    pub fn heal(&self, a: NodeNumber, b: NodeNumber) {
        self.state.lock().cuts.retain(|cut| *cut != (a, b) && *cut != (b, a));
    }

    /// Stops a node: it finds nothing by [`Fabric::poll`], and nothing lands in its memory.
    pub fn freeze(&self, node: NodeNumber) {
        self.state.lock().set_frozen(node, true);
    }

    /// Lets a node go on.
    pub fn thaw(&self, node: NodeNumber) {
        self.state.lock().set_frozen(node, false);
    }

    /// Crashes a node: deliveries to it are lost, and its links go down at the peers after the detection time.
    pub fn crash(&self, node: NodeNumber) {
        self.state.lock().crash(node);
    }
}

/// A node of a [`TwinNetwork`].
pub struct TwinFabric {
    network: TwinNetwork,
    node: usize,
    regions: Arc<RegionTable>,
}

impl TwinFabric {
    fn state(&self) -> MutexGuard<'_, NetworkState> {
        self.network.state.lock()
    }
}

impl Fabric for TwinFabric {
    fn set_members(&self, members: Vec<Member>) {
        let mut state = self.state();
        for link in state.node(self.node).set_members(members) {
            state.take_down(self.node, link, CloseReason::Removed);
        }
    }

    fn set_epoch(&self, epoch: Epoch) {
        let mut state = self.state();
        for link in state.node(self.node).set_epoch(epoch) {
            state.take_down(self.node, link, CloseReason::OldEpoch);
        }
    }

    fn listen(&self, address: &str) -> Result<String, FabricError> {
        self.state().listen(self.node, address)
    }

    fn connect(&self, node: NodeNumber) -> Result<LinkId, FabricError> {
        self.state().connect(self.node, node)
    }

    fn send(&self, link: LinkId, parts: &[&[u8]]) -> Result<(), SendError> {
        let bytes = parts.concat();
        if bytes.len() > MESSAGE_BYTES_MAX {
            return Err(SendError::TooLong);
        }
        self.state().submit(self.node, link, None, |_| DeliveryBody::Message(bytes)).map(|_| ())
    }

    fn register(&self, memory: Arc<dyn RegionMemory>) -> RegionId {
        self.regions.register(memory)
    }

    fn deregister(&self, region: RegionId) {
        self.regions.deregister(region);
    }

    fn write(&self, link: LinkId, target: RegionRange, bytes: &[u8]) -> Result<TransferId, SendError> {
        if bytes.len() > MESSAGE_BYTES_MAX {
            return Err(SendError::TooLong);
        }
        let body = |transfer| DeliveryBody::Write { transfer, target, bytes: bytes.to_vec() };
        self.state().submit(self.node, link, Some(Transfer::Write), body)
    }

    fn read(&self, link: LinkId, source: RegionRange, length: usize) -> Result<TransferId, SendError> {
        if length > MESSAGE_BYTES_MAX {
            return Err(SendError::TooLong);
        }
        let body = |transfer| DeliveryBody::Read { transfer, source, length };
        self.state().submit(self.node, link, Some(Transfer::Read { length }), body)
    }

    fn close(&self, link: LinkId) {
        self.state().close(self.node, link);
    }

    fn usage(&self, link: LinkId) -> Option<LinkUsage> {
        self.state().node(self.node).usage(link)
    }

    fn poll(&self, wait: Option<Duration>, events: &mut Vec<Event>) {
        self.state().poll(self.node, wait, events);
    }

    fn wake(&self) {
        self.state().node(self.node).is_woken = true;
    }
}
