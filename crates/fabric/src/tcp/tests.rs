//! A member that breaks the protocol behind a valid handshake.

use std::io::{self, Read, Write};
use std::net::TcpStream;

use ashlar_types::{ArenaId, FileSystemId, VersionRange};

use super::*;
use crate::frame::{FrameSeal, LinkFrameKind};
use crate::handshake::{Handshake, HandshakeStep, LinkHello, check_peer};

struct ZeroMemory;

impl RegionMemory for ZeroMemory {
    fn size_bytes(&self) -> u64 {
        MESSAGE_BYTES_MAX as u64
    }

    fn store(&self, _: u64, _: &[u8]) -> io::Result<()> {
        Ok(())
    }

    fn load(&self, _: u64, _: &mut [u8]) -> io::Result<()> {
        Ok(())
    }
}

fn identity(number: u16) -> FabricIdentity {
    FabricIdentity {
        cluster: FileSystemId(1),
        node: NodeNumber::new(number).unwrap(),
        arena: ArenaId(u64::from(number)),
        epoch: Epoch::default(),
        versions: VersionRange::new(1, 1),
    }
}

fn member(number: u16) -> Member {
    let FabricIdentity { node, arena, epoch, .. } = identity(number);
    Member { node, arena, address: String::new(), oldest_epoch: epoch }
}

/// A fabric with a region, and a member that speaks to it by hand.
struct Misbehaviour {
    fabric: TcpFabric,
    region: RegionId,
    stream: TcpStream,
    seal: FrameSeal,
    events: Vec<Event>,
}

impl Misbehaviour {
    fn begin() -> Self {
        Self::begin_with(|_| ())
    }

    /// Does something to the fabric between its check of the Hello and the proof.
    fn begin_with(interfere: impl FnOnce(&TcpFabric)) -> Self {
        let fabric = TcpFabric::new(identity(2), &Security::Plain).unwrap();
        fabric.set_members(vec![member(1)]);
        let region = fabric.register(Arc::new(ZeroMemory));
        let mut stream = TcpStream::connect(fabric.listen("127.0.0.1:0").unwrap()).unwrap();
        stream.set_read_timeout(Some(Duration::from_millis(1))).unwrap();
        let mut side = Handshake::new(LinkHello::new(identity(1), [1; 16]), true);
        stream.write_all(&side.greeting()).unwrap();
        let mut events = Vec::new();
        let seeds = loop {
            fabric.poll(Some(Duration::from_millis(1)), &mut events);
            let mut buffer = vec![0; side.wanted()];
            let Ok(count) = stream.read(&mut buffer) else { continue };
            let check = |hello: &LinkHello| check_peer(hello, &identity(1), &[member(2)], None, |_| Ok(()));
            if let HandshakeStep::Done { send, seeds, .. } = side.handle_bytes(&buffer[..count], check) {
                interfere(&fabric);
                let _ = stream.write_all(&send);
                break seeds;
            }
        };
        Self { fabric, region, stream, seal: FrameSeal::new(seeds.sent), events }
    }

    fn send(&mut self, kind: LinkFrameKind, transfer: u64, parts: &[&[u8]]) {
        let header = self.seal.seal(kind, transfer, parts);
        // The fabric may have closed the link.
        let _ = self.stream.write_all(&[&header[..], &parts.concat()].concat());
    }

    fn read(&mut self, transfer: u64, length: usize) {
        let range = range_bytes(RegionRange { region: self.region, offset: 0 });
        self.send(LinkFrameKind::Read, transfer, &[&range, &(length as u32).to_le_bytes()]);
        self.fabric.poll(Some(Duration::ZERO), &mut self.events);
    }

    fn check_invalid(&mut self, wanted: &str) {
        let end = Instant::now() + Duration::from_secs(60);
        while !matches!(self.events.last(), Some(Event::Down { .. })) {
            assert!(Instant::now() < end, "the link stays: {:?}", self.events.last());
            self.fabric.poll(Some(Duration::from_millis(1)), &mut self.events);
        }
        let Some(Event::Down { reason: CloseReason::Invalid(reason), .. }) = self.events.last() else {
            panic!("{:?}", self.events.last());
        };
        assert!(reason.contains(wanted), "{reason}");
    }
}

/// Checks that the proof of a peer, whose Hello was accepted before, brings no link up.
fn check_no_link(interfere: impl FnOnce(&TcpFabric)) {
    let mut member = Misbehaviour::begin_with(interfere);
    let end = Instant::now() + Duration::from_secs(60);
    while !matches!(member.stream.read(&mut [0; 64]), Ok(0)) {
        assert!(Instant::now() < end, "the connection stays");
        member.fabric.poll(Some(Duration::from_millis(1)), &mut member.events);
    }
    assert!(member.events.is_empty(), "{:?}", member.events);
}

#[test]
fn change_of_members_or_epoch_ends_open_handshake() {
    check_no_link(|fabric| fabric.set_members(Vec::new()));
    check_no_link(|fabric| fabric.set_epoch(Epoch { number: 1, ..Epoch::default() }));
    check_no_link(|fabric| {
        let oldest_epoch = Epoch { number: 1, ..Epoch::default() };
        fabric.set_members(vec![Member { oldest_epoch, ..member(1) }]);
    });
}

#[test]
fn answer_without_transfer_closes_link() {
    let mut member = Misbehaviour::begin();
    member.send(LinkFrameKind::Written, 1, &[]);
    member.check_invalid("belongs to no transfer");
}

#[test]
fn read_of_more_than_message_closes_link() {
    let mut member = Misbehaviour::begin();
    member.read(1, MESSAGE_BYTES_MAX + 1);
    member.check_invalid("a read asks for");
}

#[test]
fn reader_of_nothing_gets_bounded_answers() {
    let mut member = Misbehaviour::begin();
    // The kernel holds some MiB, and the link eight; then it ends.
    (1..=100).for_each(|transfer| member.read(transfer, MESSAGE_BYTES_MAX));
    member.check_invalid("more transfers are under way");
}
