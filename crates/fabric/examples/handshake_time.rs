//! Measures how long a handshake keeps the thread that polls busy, on both sides, with TLS and without.
//!
//! One thread polls both fabrics in turn, and never waits. So the sum of a side's polls, from `connect` to the link, is
//! the time that the handshake takes from all other links of that side.
//! `cargo run --release -p ashlar-fabric --example handshake_time`
#![forbid(unsafe_code)]

use std::time::{Duration, Instant};

use ashlar_fabric::{ClusterAuthority, Event, Fabric, FabricIdentity, Member, Security, TcpFabric};
use ashlar_types::{ArenaId, Epoch, FileSystemId, NodeNumber, VersionRange};

const CLUSTER: FileSystemId = FileSystemId(1);
const HANDSHAKES: usize = 500;

/// One node, and the time that its polls took.
struct TimedNode {
    fabric: TcpFabric,
    events: Vec<Event>,
    /// All polls of the handshake.
    total: Duration,
    /// The longest poll.
    longest: Duration,
}

impl TimedNode {
    fn new(number: u16, security: &Security) -> Self {
        let fabric = TcpFabric::new(identity(number), security).expect("a fabric");
        Self { fabric, events: Vec::new(), total: Duration::ZERO, longest: Duration::ZERO }
    }

    fn poll(&mut self) {
        let begin = Instant::now();
        self.fabric.poll(Some(Duration::ZERO), &mut self.events);
        let taken = begin.elapsed();
        self.total += taken;
        self.longest = self.longest.max(taken);
    }

    fn is_up(&self) -> bool {
        self.events.iter().any(|event| matches!(event, Event::Up { .. }))
    }

    fn is_down(&self) -> bool {
        self.events.iter().any(|event| matches!(event, Event::Down { .. }))
    }

    /// Returns the times of the handshake, and forgets them.
    fn take_times(&mut self) -> [Duration; 2] {
        self.events.clear();
        [std::mem::take(&mut self.total), std::mem::take(&mut self.longest)]
    }
}

fn identity(number: u16) -> FabricIdentity {
    let node = NodeNumber::new(number).expect("no zero");
    let (arena, versions) = (ArenaId(u64::from(number)), VersionRange::new(1, 1));
    FabricIdentity { cluster: CLUSTER, node, arena, epoch: Epoch::default(), versions }
}

fn member(number: u16, address: &str) -> Member {
    let FabricIdentity { node, arena, epoch, .. } = identity(number);
    Member { node, arena, address: address.to_owned(), oldest_epoch: epoch }
}

fn measure(name: &str, securities: [Security; 2]) {
    let [mut near, mut far] = [TimedNode::new(1, &securities[0]), TimedNode::new(2, &securities[1])];
    far.fabric.set_members(vec![member(1, "")]);
    near.fabric.set_members(vec![member(2, &far.fabric.listen("127.0.0.1:0").expect("an address"))]);
    let (mut connecting, mut accepting) = (Vec::new(), Vec::new());
    for _ in 0..HANDSHAKES {
        near.take_times();
        far.take_times();
        let link = near.fabric.connect(identity(2).node).expect("a member");
        while !(near.is_up() && far.is_up()) {
            near.poll();
            far.poll();
        }
        connecting.push(near.take_times());
        accepting.push(far.take_times());
        near.fabric.close(link);
        while !far.is_down() {
            near.poll();
            far.poll();
        }
    }
    for (side, mut times) in [("connecting", connecting), ("accepting", accepting)] {
        let [total, longest] = [0, 1].map(|column| {
            times.sort_by_key(|times| times[column]);
            [times.len() / 2, times.len() * 99 / 100].map(|at| times[at][column].as_micros())
        });
        println!(
            "{name:<6} {side:<10}  all polls: p50 {} us, p99 {} us; longest poll: p50 {} us, p99 {} us",
            total[0], total[1], longest[0], longest[1]
        );
    }
}

fn main() {
    let authority = ClusterAuthority::create(CLUSTER).expect("an authority");
    measure("plain", [Security::Plain, Security::Plain]);
    measure("TLS", [1, 2].map(|number| Security::Tls(authority.issue(identity(number).node).expect("a certificate"))));
}
