//! The network in memory: its time, its faults, and that one seed gives one course of events.

mod cluster;

use std::sync::Arc;
use std::time::Duration;

use ashlar_fabric::{Event, Fabric, FabricIdentity, LinkId, Member, TwinFabric, TwinNetwork};
use ashlar_types::ArenaId;

use self::cluster::{epoch, identity, node};

const MILLISECOND: Duration = Duration::from_millis(1);

struct TwinPair {
    network: TwinNetwork,
    nodes: Vec<Arc<TwinFabric>>,
    events: [Vec<Event>; 2],
}

fn member(number: u16, address: String) -> Member {
    let FabricIdentity { node, arena, .. } = identity(number);
    Member { node, arena, address, oldest_epoch: epoch(0) }
}

impl TwinPair {
    fn new(seed: u64) -> Self {
        let network = TwinNetwork::new(seed);
        let nodes: Vec<_> = (1..=2).map(|number| Arc::new(network.fabric(identity(number), Vec::new()))).collect();
        let members: Vec<_> =
            nodes.iter().zip(1..).map(|(node, number)| member(number, node.listen("twin:0").unwrap())).collect();
        nodes.iter().for_each(|node| node.set_members(members.clone()));
        Self { network, nodes, events: [Vec::new(), Vec::new()] }
    }

    /// Lets both nodes find what is due within a time.
    fn run(&mut self, time: Duration) {
        let end = self.network.now() + time;
        while self.network.now() < end {
            self.network.advance(MILLISECOND / 10);
            for (node, events) in self.nodes.iter().zip(&mut self.events) {
                node.poll(Some(Duration::ZERO), events);
            }
        }
    }

    fn link(&mut self) -> LinkId {
        let link = self.nodes[0].connect(node(2)).unwrap();
        self.run(10 * MILLISECOND);
        assert!(matches!(self.events[1][..], [.., Event::Up { .. }]), "{:?}", self.events);
        self.events.iter_mut().for_each(Vec::clear);
        link
    }
}

#[test]
fn same_seed_gives_same_course() {
    let course = |seed| {
        let mut pair = TwinPair::new(seed);
        let link = pair.link();
        let mut course = Vec::new();
        for round in 0..50_u8 {
            pair.nodes[0].send(link, &[&[round]]).unwrap();
            pair.nodes[1].poll(Some(MILLISECOND), &mut pair.events[1]);
            course.push((pair.network.now(), format!("{:?}", pair.events[1])));
        }
        course
    };
    assert_eq!(course(1), course(1));
    assert_ne!(course(1), course(2));
}

#[test]
fn cut_holds_messages_until_healed() {
    let mut pair = TwinPair::new(1);
    let link = pair.link();
    pair.network.cut_one_way(node(1), node(2));
    pair.nodes[0].send(link, &[b"held"]).unwrap();
    pair.nodes[1].send(LinkId(1), &[b"passes"]).unwrap();
    pair.run(100 * MILLISECOND);
    assert!(matches!(&pair.events[0][..], [Event::Message { bytes, .. }] if bytes == b"passes"));
    assert!(pair.events[1].is_empty());
    pair.network.cut(node(1), node(2));
    pair.network.heal(node(1), node(2));
    pair.run(10 * MILLISECOND);
    assert!(matches!(&pair.events[1][..], [Event::Message { bytes, .. }] if bytes == b"held"));
}

#[test]
fn cut_off_member_fails_after_timeout() {
    let mut pair = TwinPair::new(1);
    pair.network.cut(node(1), node(2));
    pair.nodes[0].connect(node(2)).unwrap();
    pair.run(Duration::from_secs(4));
    assert!(pair.events[0].is_empty());
    pair.run(Duration::from_secs(2));
    assert!(matches!(pair.events[0][..], [Event::Failed { .. }]), "{:?}", pair.events[0]);
}

#[test]
fn frozen_node_finds_everything_after_thaw() {
    let mut pair = TwinPair::new(1);
    let link = pair.link();
    pair.network.freeze(node(2));
    (0..3).for_each(|round: u8| pair.nodes[0].send(link, &[&[round]]).unwrap());
    pair.run(100 * MILLISECOND);
    assert!(pair.events[1].is_empty());
    pair.network.thaw(node(2));
    pair.run(MILLISECOND);
    let bytes = pair.events[1].iter().map(|event| match event {
        Event::Message { bytes, .. } => bytes[0],
        _ => panic!("{event:?}"),
    });
    assert_eq!(bytes.collect::<Vec<_>>(), [0, 1, 2]);
}

#[test]
fn crash_takes_links_down_after_detection_time() {
    let mut pair = TwinPair::new(1);
    let link = pair.link();
    pair.network.set_detection_time(50 * MILLISECOND);
    pair.nodes[0].send(link, &[b"lost"]).unwrap();
    pair.network.crash(node(2));
    pair.run(45 * MILLISECOND);
    assert!(pair.events[0].is_empty());
    pair.run(10 * MILLISECOND);
    assert!(matches!(pair.events[0][..], [Event::Down { .. }]), "{:?}", pair.events[0]);
    assert!(pair.events[1].is_empty());
    // It restarts with an empty arena, which is no member.
    let restarted = FabricIdentity { arena: ArenaId(7), ..identity(2) };
    let restarted = pair.network.fabric(restarted, vec![member(1, "twin:1".into())]);
    restarted.listen("twin:2").unwrap();
    restarted.connect(node(1)).unwrap();
    pair.nodes[1] = Arc::new(restarted);
    pair.run(10 * MILLISECOND);
    assert!(matches!(pair.events[1][..], [Event::Refused { .. }]), "{:?}", pair.events[1]);
}

#[test]
fn deliveries_of_a_link_never_overtake() {
    let mut pair = TwinPair::new(3);
    pair.network.set_delay(Duration::ZERO..=50 * MILLISECOND);
    let link = pair.nodes[0].connect(node(2)).unwrap();
    pair.run(300 * MILLISECOND);
    pair.events[1].clear();
    for round in 0..100_u8 {
        pair.nodes[0].send(link, &[&[round]]).unwrap();
        pair.run(MILLISECOND);
    }
    pair.run(100 * MILLISECOND);
    let bytes = pair.events[1].iter().map(|event| match event {
        Event::Message { bytes, .. } => bytes[0],
        _ => panic!("{event:?}"),
    });
    assert!(bytes.eq(0..100));
}
