//! Nodes of a small cluster on fabrics of one kind, driven by one thread.
#![allow(dead_code, reason = "each test program uses a part")]

use std::collections::HashMap;
use std::io::{self, Write};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ashlar_fabric::{
    ClusterAuthority, Event, Fabric, FabricError, FabricIdentity, LinkId, LinkRefusal, Member, RegionMemory, Security,
    TcpFabric, TwinNetwork,
};
use ashlar_types::{ArenaId, Epoch, FileSystemId, NodeNumber, VersionRange};
use tracing::subscriber::DefaultGuard;
use tracing_subscriber::fmt::MakeWriter;

pub const CLUSTER: FileSystemId = FileSystemId(0xa5);
/// Longer than anything takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

pub fn node(number: u16) -> NodeNumber {
    NodeNumber::new(number).unwrap()
}

pub fn epoch(number: u32) -> Epoch {
    Epoch { number, node: node(1) }
}

pub fn identity(number: u16) -> FabricIdentity {
    let arena = ArenaId(100 + u64::from(number));
    FabricIdentity { cluster: CLUSTER, node: node(number), arena, epoch: epoch(1), versions: VersionRange::new(1, 2) }
}

/// One kind of fabric.
pub trait Provider {
    /// Whether links are encrypted: certificates are then checked first.
    const IS_TLS: bool = false;
    fn new() -> Self;
    fn fabric(&mut self, identity: FabricIdentity) -> Arc<dyn Fabric>;
}

pub struct Twin(TwinNetwork);

impl Provider for Twin {
    fn new() -> Self {
        Self(TwinNetwork::new(7))
    }

    fn fabric(&mut self, identity: FabricIdentity) -> Arc<dyn Fabric> {
        Arc::new(self.0.fabric(identity, Vec::new()))
    }
}

pub struct Plain;

impl Provider for Plain {
    fn new() -> Self {
        Self
    }

    fn fabric(&mut self, identity: FabricIdentity) -> Arc<dyn Fabric> {
        Arc::new(TcpFabric::new(identity, &Security::Plain).unwrap())
    }
}

pub struct Tls(HashMap<FileSystemId, ClusterAuthority>);

impl Tls {
    pub fn authority(&mut self, cluster: FileSystemId) -> &ClusterAuthority {
        self.0.entry(cluster).or_insert_with(|| ClusterAuthority::create(cluster).unwrap())
    }
}

impl Provider for Tls {
    const IS_TLS: bool = true;

    fn new() -> Self {
        Self(HashMap::new())
    }

    fn fabric(&mut self, identity: FabricIdentity) -> Arc<dyn Fabric> {
        let credentials = self.authority(identity.cluster).issue(identity.node).unwrap();
        Arc::new(TcpFabric::new(identity, &Security::Tls(credentials)).unwrap())
    }
}

/// A node, and the events that it has found.
pub struct TestNode {
    pub fabric: Arc<dyn Fabric>,
    pub identity: FabricIdentity,
    pub address: String,
    pub events: Vec<Event>,
}

impl TestNode {
    pub fn member(&self) -> Member {
        let FabricIdentity { node, arena, .. } = self.identity;
        Member { node, arena, address: self.address.clone(), oldest_epoch: epoch(0) }
    }

    pub fn messages(&self, wanted: LinkId) -> Vec<&[u8]> {
        let message = |event| match event {
            &Event::Message { link, ref bytes } if link == wanted => Some(&bytes[..]),
            _ => None,
        };
        self.events.iter().filter_map(message).collect()
    }

    /// The links that came up, in order, and whether this node asked for them.
    pub fn ups(&self) -> Vec<(LinkId, bool)> {
        let up = |event: &Event| match event {
            Event::Up { link, is_outgoing, .. } => Some((*link, *is_outgoing)),
            _ => None,
        };
        self.events.iter().filter_map(up).collect()
    }

    pub fn is_down(&self, wanted: LinkId) -> bool {
        self.events.iter().any(|event| matches!(event, Event::Down { link, .. } if *link == wanted))
    }

    pub fn transferred(&self) -> usize {
        self.events.iter().filter(|event| matches!(event, Event::Transferred { .. })).count()
    }

    /// Why the peer refused this node's links.
    pub fn refused(&self) -> Vec<(LinkRefusal, Option<Epoch>)> {
        let refused = |event: &Event| match event {
            Event::Refused { reason, epoch, .. } => Some((reason.clone(), *epoch)),
            _ => None,
        };
        self.events.iter().filter_map(refused).collect()
    }

    /// Why this node gave links up that it had asked for.
    pub fn failed(&self) -> Vec<&FabricError> {
        fn failed(event: &Event) -> Option<&FabricError> {
            match event {
                Event::Failed { error, .. } => Some(error),
                _ => None,
            }
        }
        self.events.iter().filter_map(failed).collect()
    }
}

/// Nodes that know each other.
pub struct Cluster<P> {
    pub provider: P,
    pub nodes: Vec<TestNode>,
}

impl<P: Provider> Cluster<P> {
    /// Nodes 1 to `count`, which know each other.
    pub fn new(count: u16) -> Self {
        let mut cluster = Self { provider: P::new(), nodes: Vec::new() };
        (1..=count).for_each(|number| cluster.add(identity(number)));
        cluster.introduce();
        cluster
    }

    pub fn add(&mut self, identity: FabricIdentity) {
        let fabric = self.provider.fabric(identity);
        self.add_fabric(identity, fabric);
    }

    pub fn add_fabric(&mut self, identity: FabricIdentity, fabric: Arc<dyn Fabric>) {
        let address = fabric.listen("127.0.0.1:0").unwrap();
        self.nodes.push(TestNode { fabric, identity, address, events: Vec::new() });
    }

    /// Makes all nodes members.
    pub fn introduce(&self) {
        let members: Vec<Member> = self.nodes.iter().map(TestNode::member).collect();
        self.nodes.iter().for_each(|node| node.fabric.set_members(members.clone()));
    }

    /// Lets all nodes work until a condition is met.
    pub fn until(&mut self, wanted: &str, mut is_met: impl FnMut(&[TestNode]) -> bool) {
        let begin = Instant::now();
        while !is_met(&self.nodes) {
            assert!(begin.elapsed() < PATIENCE, "never: {wanted}");
            for node in &mut self.nodes {
                node.fabric.poll(Some(Duration::from_millis(1)), &mut node.events);
            }
        }
    }

    /// Lets all nodes work until nothing has been on the way for a while.
    pub fn settle(&mut self) {
        let (mut quiet, mut seen) = (0, 0);
        self.until("silence", |nodes| {
            let now = nodes.iter().map(|node| node.events.len()).sum();
            quiet = if now == seen { quiet + 1 } else { 0 };
            seen = now;
            quiet > 25
        });
    }

    /// Connects the first node to the second; returns both ends.
    pub fn link(&mut self) -> (LinkId, LinkId) {
        let before = self.nodes[1].ups().len();
        let link = self.nodes[0].fabric.connect(self.nodes[1].identity.node).unwrap();
        self.until("both ends are up", |nodes| nodes[0].ups().contains(&(link, true)) && nodes[1].ups().len() > before);
        (link, self.nodes[1].ups()[before].0)
    }

    /// Checks that a link carries messages.
    pub fn check_link(&mut self, (near, far): (LinkId, LinkId)) {
        let before = self.nodes[1].messages(far).len();
        self.nodes[0].fabric.send(near, &[b"still", b"here"]).unwrap();
        self.until("a message", |nodes| nodes[1].messages(far).len() > before);
        assert_eq!(self.nodes[1].messages(far)[before], b"stillhere");
    }
}

/// Memory that peers may reach.
pub struct TestRegion(pub Mutex<Vec<u8>>);

impl TestRegion {
    pub fn new(size: usize) -> Arc<Self> {
        Arc::new(Self(Mutex::new(vec![0; size])))
    }

    pub fn bytes(&self) -> Vec<u8> {
        self.0.lock().unwrap().clone()
    }
}

impl RegionMemory for TestRegion {
    fn size_bytes(&self) -> u64 {
        self.0.lock().unwrap().len() as u64
    }

    fn store(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.0.lock().unwrap()[offset as usize..][..bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    fn load(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        bytes.copy_from_slice(&self.0.lock().unwrap()[offset as usize..][..bytes.len()]);
        Ok(())
    }
}

/// The lines that this thread logs, while it lives.
pub struct LogCapture {
    text: LogText,
    _guard: DefaultGuard,
}

#[derive(Clone, Default)]
struct LogText(Arc<Mutex<Vec<u8>>>);

impl LogCapture {
    pub fn begin() -> Self {
        let text = LogText::default();
        let subscriber = tracing_subscriber::fmt().with_writer(text.clone()).with_ansi(false).finish();
        Self { text, _guard: tracing::subscriber::set_default(subscriber) }
    }

    pub fn lines(&self) -> Vec<String> {
        String::from_utf8_lossy(&self.text.0.lock().unwrap()).lines().map(str::to_owned).collect()
    }

    /// Checks that there is one line, and that it says this.
    pub fn check_only_line(&self, wanted: &str) {
        let lines = self.lines();
        assert!(lines.len() == 1 && lines[0].contains(wanted) && lines[0].contains("WARN"), "{wanted}: {lines:#?}");
    }
}

impl Write for LogText {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl MakeWriter<'_> for LogText {
    type Writer = Self;

    fn make_writer(&self) -> Self {
        self.clone()
    }
}
