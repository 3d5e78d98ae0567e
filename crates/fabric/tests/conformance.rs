//! One suite for all fabrics: in memory, over TCP, over TCP with TLS.

mod cluster;

use std::thread;
use std::time::{Duration, Instant};

use ashlar_fabric::{
    CloseReason, Event, Fabric, FabricError, FabricIdentity, LinkId, LinkRefusal, MESSAGE_BYTES_MAX, Member,
    PeerIdentity, QUEUE_BYTES_MAX, RegionRange, SendError, TRANSFERS_MAX, TransferId,
};
use ashlar_types::{ArenaId, Epoch, FileSystemId, VersionRange};
use rustix::time::{ClockId, clock_gettime};

use self::cluster::{Cluster, LogCapture, Plain, Provider, TestNode, TestRegion, Tls, Twin, epoch, identity, node};

macro_rules! conformance {
    ($($name:ident),* $(,)?) => {
        conformance!(in twin: Twin, $($name)*);
        conformance!(in tcp_plain: Plain, $($name)*);
        conformance!(in tcp_tls: Tls, $($name)*);
    };
    (in $module:ident: $provider:ident, $($name:ident)*) => {
        mod $module {
            $(#[test] fn $name() { super::$name::<super::$provider>(); })*
        }
    };
}

conformance! {
    link_names_both_sides,
    messages_arrive_whole_and_in_order,
    both_directions_carry_at_once,
    full_link_drains_when_peer_reads,
    too_many_transfers_are_turned_away,
    write_lands_before_following_message,
    read_returns_bytes_of_peer,
    access_outside_region_closes_link,
    deregistered_region_takes_no_write,
    closed_link_lands_nothing_more,
    close_delivers_messages_sent_before,
    closed_link_gives_no_event,
    threads_send_while_links_come_and_go,
    wake_ends_wait,
    new_epoch_closes_older_links,
    removed_member_loses_its_link,
    stranger_is_refused,
    other_node_at_address_is_refused,
    foreign_cluster_is_refused,
    foreign_arena_is_refused,
    stale_epoch_is_refused_with_newest,
    missing_common_version_is_refused,
    unreachable_member_fails,
    link_comes_up_again_after_down,
    usage_counts_bytes,
    second_link_replaces_first,
    both_sides_may_connect_at_once,
}

fn pattern(length: usize, seed: usize) -> Vec<u8> {
    (0..length).map(|at| (at * 31 + at / 251 + seed) as u8).collect()
}

fn link_names_both_sides<P: Provider>() {
    let mut cluster = Cluster::<P>::new(2);
    cluster.link();
    let peer = |nodes: &[TestNode], at: usize| match nodes[at].events[0] {
        Event::Up { peer, .. } => peer,
        _ => panic!("{:?}", nodes[at].events),
    };
    for (own, other) in [(0, 2), (1, 1)] {
        let FabricIdentity { node, arena, epoch, .. } = identity(other);
        assert_eq!(peer(&cluster.nodes, own), PeerIdentity { node, arena, epoch, version: 2 });
    }
}

fn messages_arrive_whole_and_in_order<P: Provider>() {
    let mut cluster = Cluster::<P>::new(2);
    let (near, far) = cluster.link();
    let lengths = [0, 1, 19, 20, 21, 1000, 65_536, 300_000, MESSAGE_BYTES_MAX, 5];
    let sent: Vec<Vec<u8>> = lengths.iter().enumerate().map(|(at, length)| pattern(*length, at)).collect();
    for message in &sent {
        let (first, second) = message.split_at(message.len() / 3);
        cluster.nodes[0].fabric.send(near, &[first, &[], second]).unwrap();
    }
    cluster.until("all messages", |nodes| nodes[1].messages(far).len() == sent.len());
    assert_eq!(cluster.nodes[1].messages(far), sent);
    let long = vec![0; MESSAGE_BYTES_MAX];
    assert_eq!(cluster.nodes[0].fabric.send(near, &[&long, b"x"]), Err(SendError::TooLong));
    cluster.check_link((near, far));
}

fn both_directions_carry_at_once<P: Provider>() {
    let mut cluster = Cluster::<P>::new(2);
    let (near, far) = cluster.link();
    for round in 0..40 {
        cluster.nodes[0].fabric.send(near, &[&pattern(100_000, round)]).unwrap();
        cluster.nodes[1].fabric.send(far, &[&pattern(90_000, round)]).unwrap();
    }
    cluster.until("all messages", |nodes| nodes[0].messages(near).len() == 40 && nodes[1].messages(far).len() == 40);
    for round in 0..40 {
        assert_eq!(cluster.nodes[1].messages(far)[round], pattern(100_000, round));
        assert_eq!(cluster.nodes[0].messages(near)[round], pattern(90_000, round));
    }
}

fn full_link_drains_when_peer_reads<P: Provider>() {
    let mut cluster = Cluster::<P>::new(2);
    let (near, far) = cluster.link();
    let mut sent = 0;
    // The second node reads nothing meanwhile.
    let full = loop {
        match cluster.nodes[0].fabric.send(near, &[&pattern(64 << 10, sent)]) {
            Ok(()) => sent += 1,
            Err(error) => break error,
        }
        assert!(sent << 16 < 8 * QUEUE_BYTES_MAX, "the queue has no bound");
    };
    assert_eq!(full, SendError::Full);
    cluster.until("the link is drained", |nodes| {
        nodes[0].events.iter().any(|event| matches!(event, Event::Drained { link } if *link == near))
    });
    cluster.until("all messages", |nodes| nodes[1].messages(far).len() == sent);
    assert!(cluster.nodes[1].messages(far).iter().enumerate().all(|(at, bytes)| *bytes == pattern(64 << 10, at)));
    cluster.check_link((near, far));
    let drained = cluster.nodes[0].events.iter().filter(|event| matches!(event, Event::Drained { .. })).count();
    assert_eq!(drained, 1);
}

fn too_many_transfers_are_turned_away<P: Provider>() {
    let mut cluster = Cluster::<P>::new(2);
    let (near, _) = cluster.link();
    let region = cluster.nodes[1].fabric.register(TestRegion::new(8));
    let target = RegionRange { region, offset: 0 };
    for _ in 0..TRANSFERS_MAX {
        cluster.nodes[0].fabric.write(near, target, b"12345678").unwrap();
    }
    assert_eq!(cluster.nodes[0].fabric.write(near, target, b"x"), Err(SendError::Full));
    assert_eq!(cluster.nodes[0].fabric.read(near, target, 1), Err(SendError::Full));
    cluster.until("all writes", |nodes| nodes[0].transferred() == TRANSFERS_MAX);
    assert!(cluster.nodes[0].events.iter().any(|event| matches!(event, Event::Drained { .. })));
    // Eight MiB of reads, whose answers wait at the peer, and no more.
    let region = cluster.nodes[1].fabric.register(TestRegion::new(MESSAGE_BYTES_MAX));
    let source = RegionRange { region, offset: 0 };
    let reads = (0..9).map(|_| cluster.nodes[0].fabric.read(near, source, MESSAGE_BYTES_MAX)).filter(Result::is_ok);
    assert_eq!(reads.count(), 8);
    cluster.until("all reads", |nodes| nodes[0].transferred() == TRANSFERS_MAX + 8);
}

fn write_lands_before_following_message<P: Provider>() {
    let mut cluster = Cluster::<P>::new(2);
    let (near, far) = cluster.link();
    let memory = TestRegion::new(200_000);
    let region = cluster.nodes[1].fabric.register(memory.clone());
    let bytes = pattern(150_000, 3);
    let transfer = cluster.nodes[0].fabric.write(near, RegionRange { region, offset: 50 }, &bytes).unwrap();
    cluster.nodes[0].fabric.send(near, &[b"written"]).unwrap();
    cluster.until("the message", |nodes| !nodes[1].messages(far).is_empty());
    assert_eq!(&memory.bytes()[50..150_050], bytes);
    assert!(memory.bytes()[..50].iter().chain(&memory.bytes()[150_050..]).all(|byte| *byte == 0));
    cluster.until("the write's end", |nodes| nodes[0].transferred() == 1);
    let is_end = |event: &Event| {
        matches!(event, Event::Transferred { link, transfer: ended, bytes }
        if (*link, *ended) == (near, transfer) && bytes.is_empty())
    };
    assert!(cluster.nodes[0].events.iter().any(is_end));
}

fn read_returns_bytes_of_peer<P: Provider>() {
    let mut cluster = Cluster::<P>::new(2);
    let (near, _) = cluster.link();
    let memory = TestRegion::new(MESSAGE_BYTES_MAX + 10);
    *memory.0.lock().unwrap() = pattern(MESSAGE_BYTES_MAX + 10, 9);
    let region = cluster.nodes[1].fabric.register(memory.clone());
    let lengths = [MESSAGE_BYTES_MAX, 0, 10];
    for length in lengths {
        cluster.nodes[0].fabric.read(near, RegionRange { region, offset: 10 }, length).unwrap();
    }
    cluster.until("all reads", |nodes| nodes[0].transferred() == lengths.len());
    let read = |event: &Event| match event {
        Event::Transferred { bytes, .. } => Some(bytes.clone()),
        _ => None,
    };
    let read: Vec<Vec<u8>> = cluster.nodes[0].events.iter().filter_map(read).collect();
    assert_eq!(read, lengths.map(|length| memory.bytes()[10..10 + length].to_vec()));
}

/// Has the first node access a region of the second, which must take the link down.
fn check_violation<P: Provider>(
    cluster: &mut Cluster<P>,
    access: impl FnOnce(&dyn Fabric, LinkId) -> Result<TransferId, SendError>,
) {
    let log = LogCapture::begin();
    let (near, far) = cluster.link();
    access(cluster.nodes[0].fabric.as_ref(), near).unwrap();
    let _ = cluster.nodes[0].fabric.send(near, &[b"behind it"]);
    cluster.until("both ends are down", |nodes| nodes[0].is_down(near) && nodes[1].is_down(far));
    assert!(cluster.nodes[1].messages(far).is_empty());
    let is_invalid = |event: &Event| matches!(event, Event::Down { reason: CloseReason::Invalid(_), .. });
    assert!(cluster.nodes[1].events.iter().any(is_invalid));
    log.check_only_line("invalid bytes arrived");
}

fn access_outside_region_closes_link<P: Provider>() {
    let ranges = [(99, 2), (100, 1), (u64::MAX, 1), (0, 101)];
    for (offset, length) in ranges {
        let mut cluster = Cluster::<P>::new(2);
        let memory = TestRegion::new(100);
        let region = cluster.nodes[1].fabric.register(memory.clone());
        let range = RegionRange { region, offset };
        check_violation(&mut cluster, |fabric, link| fabric.write(link, range, &vec![1; length]));
        assert_eq!(memory.bytes(), [0; 100]);
        let mut cluster = Cluster::<P>::new(2);
        let region = cluster.nodes[1].fabric.register(memory);
        check_violation(&mut cluster, |fabric, link| fabric.read(link, RegionRange { region, offset }, length));
    }
}

fn deregistered_region_takes_no_write<P: Provider>() {
    let mut cluster = Cluster::<P>::new(2);
    let memory = TestRegion::new(100);
    let region = cluster.nodes[1].fabric.register(memory.clone());
    cluster.nodes[1].fabric.deregister(region);
    let range = RegionRange { region, offset: 0 };
    check_violation(&mut cluster, |fabric, link| fabric.write(link, range, b"late"));
    assert_eq!(memory.bytes(), [0; 100]);
}

fn closed_link_lands_nothing_more<P: Provider>() {
    let mut cluster = Cluster::<P>::new(2);
    let (near, far) = cluster.link();
    let memory = TestRegion::new(64 << 10);
    let region = cluster.nodes[1].fabric.register(memory.clone());
    for round in 1..=100_u8 {
        let target = RegionRange { region, offset: 0 };
        cluster.nodes[0].fabric.write(near, target, &vec![round; 64 << 10]).unwrap();
    }
    cluster.until("a write has landed", |_| memory.bytes()[0] > 0);
    cluster.nodes[1].fabric.close(far);
    let landed = memory.bytes();
    let before = cluster.nodes[1].events.len();
    cluster.until("the other end is down", |nodes| nodes[0].is_down(near));
    cluster.settle();
    assert!(memory.bytes() == landed, "a write landed behind the close");
    assert_eq!(cluster.nodes[1].events.len(), before, "an event followed the close");
    assert_eq!(cluster.nodes[1].fabric.send(far, &[]), Err(SendError::Down));
}

fn close_delivers_messages_sent_before<P: Provider>() {
    let mut cluster = Cluster::<P>::new(2);
    let (near, far) = cluster.link();
    // The peer sends meanwhile: unread bytes must not break the connection.
    cluster.nodes[1].fabric.send(far, &[&pattern(500_000, 1)]).unwrap();
    for round in 0..100 {
        cluster.nodes[0].fabric.send(near, &[&pattern(64 << 10, round)]).unwrap();
    }
    cluster.nodes[0].fabric.close(near);
    cluster.until("the other end is down", |nodes| nodes[1].is_down(far));
    assert_eq!(cluster.nodes[1].messages(far).len(), 100);
    assert!(cluster.nodes[1].messages(far).iter().enumerate().all(|(at, bytes)| *bytes == pattern(64 << 10, at)));
    let last = cluster.nodes[1].events.last();
    assert!(matches!(last, Some(Event::Down { reason: CloseReason::ClosedByPeer, .. })), "{last:?}");
}

fn closed_link_gives_no_event<P: Provider>() {
    let mut cluster = Cluster::<P>::new(2);
    let (near, far) = cluster.link();
    let (before_near, before_far) = (cluster.nodes[0].events.len(), cluster.nodes[1].events.len());
    cluster.nodes[0].fabric.send(near, &[b"unread"]).unwrap();
    // An event that waits is taken back, too.
    cluster.nodes[1].fabric.set_members(Vec::new());
    cluster.nodes[1].fabric.close(far);
    cluster.nodes[1].fabric.close(far);
    cluster.nodes[1].fabric.set_members(vec![cluster.nodes[0].member()]);
    // A link that is not up yet is closed likewise.
    let early = cluster.nodes[0].fabric.connect(node(2)).unwrap();
    cluster.nodes[0].fabric.close(early);
    cluster.until("the other end is down", |nodes| nodes[0].is_down(near));
    cluster.settle();
    assert_eq!(cluster.nodes[1].events.len(), before_far, "{:?}", cluster.nodes[1].events);
    assert_eq!(cluster.nodes[0].events.len(), before_near + 1, "{:?}", cluster.nodes[0].events);
}

fn threads_send_while_links_come_and_go<P: Provider>() {
    const THREADS: usize = 4;
    const MESSAGES: usize = 200;
    let mut cluster = Cluster::<P>::new(2);
    let mut link = cluster.link();
    for round in 0..3 {
        let senders: Vec<_> = (0..THREADS)
            .map(|sender| {
                let (fabric, near) = (cluster.nodes[0].fabric.clone(), link.0);
                let message = move |at: usize| pattern(at * 97 % 30_000, sender * MESSAGES + at);
                thread::spawn(move || {
                    let mut at = 0;
                    while at < MESSAGES {
                        match fabric.send(near, &[&[sender as u8], &message(at)]) {
                            Ok(()) => at += 1,
                            Err(SendError::Full) => thread::yield_now(),
                            // The link was closed in the middle.
                            Err(error) => return assert_eq!((round, error), (1, SendError::Down)),
                        }
                    }
                })
            })
            .collect();
        let wanted = if round == 1 { 20 } else { THREADS * MESSAGES };
        cluster.until("messages", |nodes| nodes[1].messages(link.1).len() >= wanted);
        cluster.nodes[round % 2].fabric.close([link.0, link.1][round % 2]);
        senders.into_iter().for_each(|sender| sender.join().unwrap());
        for sender in 0..THREADS {
            let received = cluster.nodes[1].messages(link.1).into_iter().filter(|bytes| bytes[0] == sender as u8);
            for (at, bytes) in received.enumerate() {
                assert_eq!(bytes[1..], pattern(at * 97 % 30_000, sender * MESSAGES + at));
            }
        }
        link = cluster.link();
    }
    cluster.check_link(link);
}

fn wake_ends_wait<P: Provider>() {
    let cluster = Cluster::<P>::new(1);
    let begin = Instant::now();
    let fabric = cluster.nodes[0].fabric.clone();
    let waker = thread::spawn(move || fabric.wake());
    let mut events = Vec::new();
    cluster.nodes[0].fabric.poll(Some(Duration::from_secs(300)), &mut events);
    waker.join().unwrap();
    assert!(events.is_empty() && begin.elapsed() < Duration::from_secs(100));
}

fn new_epoch_closes_older_links<P: Provider>() {
    let mut cluster = Cluster::<P>::new(2);
    let (near, far) = cluster.link();
    cluster.nodes[1].fabric.send(far, &[b"of the old epoch"]).unwrap();
    cluster.nodes[0].fabric.set_epoch(epoch(2));
    assert_eq!(cluster.nodes[0].fabric.send(near, &[b"x"]), Err(SendError::Down));
    cluster.until("both ends are down", |nodes| nodes[0].is_down(near) && nodes[1].is_down(far));
    assert!(cluster.nodes[0].messages(near).is_empty());
    let is_old = |event: &Event| matches!(event, Event::Down { reason: CloseReason::OldEpoch, .. });
    assert!(cluster.nodes[0].events.iter().any(is_old));
    let link = cluster.link();
    let newest = cluster.nodes[1].events.iter().rev().find_map(|event| match event {
        Event::Up { peer, .. } => Some(peer.epoch),
        _ => None,
    });
    assert_eq!(newest, Some(epoch(2)));
    // The same epoch once more changes nothing, nor does an older one.
    cluster.nodes[0].fabric.set_epoch(epoch(2));
    cluster.nodes[0].fabric.set_epoch(epoch(1));
    cluster.check_link(link);
}

fn removed_member_loses_its_link<P: Provider>() {
    let mut cluster = Cluster::<P>::new(2);
    let (near, far) = cluster.link();
    let other_arena = Member { arena: ArenaId(9), ..cluster.nodes[0].member() };
    cluster.nodes[1].fabric.set_members(vec![other_arena]);
    cluster.until("both ends are down", |nodes| nodes[0].is_down(near) && nodes[1].is_down(far));
    let is_removed = |event: &Event| matches!(event, Event::Down { reason: CloseReason::Removed, .. });
    assert!(cluster.nodes[1].events.iter().any(is_removed));
}

/// Has the second node refuse the first; checks the reason on both sides.
fn check_refusal<P: Provider>(cluster: &mut Cluster<P>, reason: &LinkRefusal, newest: Option<Epoch>) {
    let log = LogCapture::begin();
    cluster.nodes[0].fabric.connect(cluster.nodes[1].identity.node).unwrap();
    cluster.until("the refusal", |nodes| !nodes[0].refused().is_empty());
    cluster.settle();
    assert_eq!(cluster.nodes[0].refused(), [(reason.clone(), newest)]);
    assert!(cluster.nodes.iter().all(|node| node.events.iter().all(|event| matches!(event, Event::Refused { .. }))));
    log.check_only_line(&reason.to_string());
}

fn stranger_is_refused<P: Provider>() {
    let mut cluster = Cluster::<P>::new(2);
    cluster.nodes[1].fabric.set_members(vec![cluster.nodes[1].member()]);
    check_refusal(&mut cluster, &LinkRefusal::UnexpectedNode(node(1)), None);
}

/// Checks that the first node gives up a link to the second, and why.
fn check_failure<P: Provider>(cluster: &mut Cluster<P>, is_right: impl Fn(&LinkRefusal) -> bool) {
    cluster.nodes[0].fabric.connect(node(2)).unwrap();
    cluster.until("the failure", |nodes| !nodes[0].failed().is_empty());
    let failed = cluster.nodes[0].failed();
    assert!(matches!(failed[..], [FabricError::Refused { reason, .. }] if is_right(reason)), "{failed:?}");
    cluster.settle();
    assert!(cluster.nodes.iter().all(|node| node.ups().is_empty()));
}

fn other_node_at_address_is_refused<P: Provider>() {
    let mut cluster = Cluster::<P>::new(3);
    let wrong = Member { address: cluster.nodes[2].address.clone(), ..cluster.nodes[1].member() };
    cluster.nodes[0].fabric.set_members(vec![wrong, cluster.nodes[2].member()]);
    check_failure(&mut cluster, |reason| match P::IS_TLS {
        true => matches!(reason, LinkRefusal::Certificate(_)),
        false => *reason == LinkRefusal::UnexpectedNode(node(3)),
    });
}

fn foreign_cluster_is_refused<P: Provider>() {
    let mut cluster = Cluster::<P> { provider: P::new(), nodes: Vec::new() };
    cluster.add(FabricIdentity { cluster: FileSystemId(1), ..identity(1) });
    cluster.add(identity(2));
    cluster.introduce();
    if P::IS_TLS {
        // Each side has another authority, so the one that connects refuses the other first.
        return check_failure(&mut cluster, |reason| matches!(reason, LinkRefusal::Certificate(_)));
    }
    check_refusal(&mut cluster, &LinkRefusal::ForeignCluster(FileSystemId(1)), None);
}

fn foreign_arena_is_refused<P: Provider>() {
    let mut cluster = Cluster::<P>::new(2);
    cluster.nodes[1].fabric.set_members(vec![Member { arena: ArenaId(5), ..cluster.nodes[0].member() }]);
    check_refusal(&mut cluster, &LinkRefusal::ForeignArena(identity(1).arena), None);
    let mut cluster = Cluster::<P>::new(2);
    cluster.nodes[0].fabric.set_members(vec![Member { arena: ArenaId(5), ..cluster.nodes[1].member() }]);
    check_failure(&mut cluster, |reason| *reason == LinkRefusal::ForeignArena(identity(2).arena));
}

fn stale_epoch_is_refused_with_newest<P: Provider>() {
    let mut cluster = Cluster::<P>::new(2);
    cluster.nodes[1].fabric.set_epoch(epoch(8));
    cluster.nodes[1].fabric.set_members(vec![Member { oldest_epoch: epoch(5), ..cluster.nodes[0].member() }]);
    let reason = LinkRefusal::StaleEpoch { theirs: epoch(1), oldest: epoch(5) };
    check_refusal(&mut cluster, &reason, Some(epoch(8)));
}

fn missing_common_version_is_refused<P: Provider>() {
    let mut cluster = Cluster::<P>::new(0);
    let theirs = VersionRange::new(3, 4);
    cluster.add(FabricIdentity { versions: theirs, ..identity(1) });
    cluster.add(identity(2));
    cluster.introduce();
    check_refusal(&mut cluster, &LinkRefusal::Version { theirs, ours: identity(2).versions }, Some(epoch(1)));
}

fn unreachable_member_fails<P: Provider>() {
    let mut cluster = Cluster::<P>::new(2);
    // A port that was free a moment ago, under a name.
    let address = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let address = format!("localhost:{}", address.port());
    cluster.nodes[0].fabric.set_members(vec![Member { address, ..cluster.nodes[1].member() }]);
    cluster.nodes[0].fabric.connect(node(2)).unwrap();
    cluster.until("the failure", |nodes| !nodes[0].failed().is_empty());
    assert!(matches!(cluster.nodes[0].failed()[..], [FabricError::Connect { .. }]));
    assert!(matches!(cluster.nodes[0].fabric.connect(node(9)), Err(FabricError::NotAMember(_))));
}

fn link_comes_up_again_after_down<P: Provider>() {
    let mut cluster = Cluster::<P>::new(2);
    for _ in 0..3 {
        let (near, far) = cluster.link();
        cluster.check_link((near, far));
        cluster.nodes[1].fabric.close(far);
        cluster.until("the other end is down", |nodes| nodes[0].is_down(near));
    }
    let link = cluster.link();
    cluster.check_link(link);
}

fn usage_counts_bytes<P: Provider>() {
    let mut cluster = Cluster::<P>::new(2);
    let (near, far) = cluster.link();
    cluster.nodes[0].fabric.send(near, &[&pattern(MESSAGE_BYTES_MAX, 0)]).unwrap();
    cluster.until("the message", |nodes| !nodes[1].messages(far).is_empty());
    let (near_usage, far_usage) = (cluster.nodes[0].fabric.usage(near), cluster.nodes[1].fabric.usage(far));
    let (near_usage, far_usage) = (near_usage.unwrap(), far_usage.unwrap());
    assert_eq!((near_usage.sent, near_usage.received), (far_usage.received, far_usage.sent));
    let overhead = near_usage.sent - MESSAGE_BYTES_MAX as u64;
    assert!((20..100_000).contains(&overhead) && near_usage.received > 0, "{near_usage:?}");
    cluster.nodes[0].fabric.close(near);
    assert_eq!(cluster.nodes[0].fabric.usage(near), None);
}

fn second_link_replaces_first<P: Provider>() {
    let mut cluster = Cluster::<P>::new(2);
    let first = cluster.link();
    let second = cluster.link();
    cluster.until("the first is down", |nodes| nodes[0].is_down(first.0) && nodes[1].is_down(first.1));
    for (node, ends) in cluster.nodes.iter().zip([(first.0, second.0), (first.1, second.1)]) {
        let at = |is_wanted: &dyn Fn(&Event) -> bool| node.events.iter().position(is_wanted).unwrap();
        let down = at(&|event| matches!(event, Event::Down { link, .. } if *link == ends.0));
        let up = at(&|event| matches!(event, Event::Up { link, .. } if *link == ends.1));
        assert!(down < up, "{:?}", node.events);
    }
    cluster.check_link(second);
}

fn both_sides_may_connect_at_once<P: Provider>() {
    let mut cluster = Cluster::<P>::new(2);
    cluster.nodes[0].fabric.connect(node(2)).unwrap();
    cluster.nodes[1].fabric.connect(node(1)).unwrap();
    cluster.until("two links", |nodes| nodes.iter().all(|node| node.ups().len() == 2));
    cluster.settle();
    assert!(cluster.nodes.iter().all(|node| node.events.len() == 2));
    let near = cluster.nodes[0].ups().iter().find(|up| up.1).unwrap().0;
    let far = cluster.nodes[1].ups().iter().find(|up| !up.1).unwrap().0;
    cluster.check_link((near, far));
}

/// Returns the processor time of this thread.
fn thread_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

fn check_idle_wait<P: Provider>() {
    let mut cluster = Cluster::<P>::new(2);
    let link = cluster.link();
    cluster.settle();
    let (begin, used, mut events) = (Instant::now(), thread_time(), Vec::new());
    cluster.nodes[0].fabric.poll(Some(Duration::from_millis(400)), &mut events);
    assert!(begin.elapsed() >= Duration::from_millis(400), "the wait ended early");
    let used = thread_time() - used;
    assert!(used < Duration::from_millis(10), "an idle wait used {used:?}");
    cluster.check_link(link);
}

#[test]
fn idle_wait_uses_no_processor_time() {
    check_idle_wait::<Plain>();
    check_idle_wait::<Tls>();
}
