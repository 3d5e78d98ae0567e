//! Strangers, liars and broken networks: other links stay, nothing is delivered, and the log has one line.

mod cluster;

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use ashlar_fabric::{
    CloseReason, ClusterAuthority, Event, FabricError, FabricIdentity, LinkId, LinkRefusal, Member, NodeCredentials,
    RegionRange, Security, TcpFabric,
};
use ashlar_types::FileSystemId;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};

use self::cluster::{CLUSTER, Cluster, LogCapture, Plain, Provider, TestNode, TestRegion, Tls, identity, node};

/// Two nodes with a link between them, which every attack must leave alone.
struct Witness<P> {
    cluster: Cluster<P>,
    link: (LinkId, LinkId),
    log: LogCapture,
    events: usize,
}

impl<P: Provider> Witness<P> {
    fn new() -> Self {
        let mut cluster = Cluster::new(2);
        let link = cluster.link();
        let events = cluster.nodes[1].events.len();
        Self { cluster, link, log: LogCapture::begin(), events }
    }

    /// Connects to the second node as a stranger.
    fn stranger(&self) -> TcpStream {
        let stream = TcpStream::connect(&self.cluster.nodes[1].address).unwrap();
        stream.set_read_timeout(Some(Duration::from_millis(1))).unwrap();
        stream
    }

    /// Lets the nodes work until the second has ended a stranger's connection; returns the bytes that it sent.
    fn until_ended(&mut self, stream: &mut TcpStream) -> Vec<u8> {
        let mut received = Vec::new();
        self.cluster.until("the stranger's end", |_| {
            let mut buffer = [0; 4096];
            match stream.read(&mut buffer) {
                Ok(0) => true,
                Ok(count) => {
                    received.extend_from_slice(&buffer[..count]);
                    false
                }
                Err(error) => !matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut),
            }
        });
        received
    }

    /// Checks that nothing came of the attack but one line.
    fn check(&mut self, line: &str) {
        self.cluster.until("a line", |_| !self.log.lines().is_empty());
        self.cluster.settle();
        assert_eq!(self.cluster.nodes[1].events.len(), self.events, "{:?}", self.cluster.nodes[1].events.last());
        self.log.check_only_line(line);
        self.cluster.check_link(self.link);
    }
}

#[test]
fn garbage_is_refused_with_code_alone() {
    fn check<P: Provider>(garbage: &[u8]) {
        let mut witness = Witness::<P>::new();
        let mut stream = witness.stranger();
        stream.write_all(garbage).unwrap();
        let answer = witness.until_ended(&mut stream);
        // A reset may overtake the answer.
        assert!(
            answer.is_empty() || (answer.starts_with(b"ASHLRREF\x01") && answer[9..].iter().all(|byte| *byte == 0))
        );
        witness.check("does not speak");
    }
    for garbage in [&b"GET / HTTP/1.1\r\nHost: ashlar\r\n\r\n"[..], &[0; 65_536], &[0xff; 8]] {
        check::<Plain>(garbage);
        check::<Tls>(garbage);
    }
    check::<Plain>(b"ASHLRPRFa proof without a Hello before: it has forty bytes");
}

/// Has a node of one security connect to one of the other.
fn check_mixed(own: &Security, other: &Security) {
    let mut cluster = Cluster::<Plain>::new(0);
    for (number, security) in [(1, own), (2, other)] {
        cluster.add_fabric(identity(number), Arc::new(TcpFabric::new(identity(number), security).unwrap()));
    }
    cluster.introduce();
    let log = LogCapture::begin();
    cluster.nodes[0].fabric.connect(node(2)).unwrap();
    cluster.until("the refusal", |nodes| !nodes[0].refused().is_empty());
    assert_eq!(cluster.nodes[0].refused(), [(LinkRefusal::Security, None)]);
    cluster.settle();
    assert!(cluster.nodes[1].events.is_empty());
    log.check_only_line("one side uses TLS and the other does not");
}

fn tls_of(authority: &ClusterAuthority, number: u16) -> Security {
    Security::Tls(authority.issue(node(number)).unwrap())
}

#[test]
fn tls_and_plain_sides_refuse_each_other() {
    let authority = ClusterAuthority::create(CLUSTER).unwrap();
    check_mixed(&tls_of(&authority, 1), &Security::Plain);
    check_mixed(&Security::Plain, &tls_of(&authority, 2));
}

#[test]
fn certificate_of_other_authority_is_refused() {
    let authority = ClusterAuthority::create(CLUSTER).unwrap();
    // It knows the right authority, and has its own certificate from another one.
    let forged = ClusterAuthority::create(CLUSTER).unwrap().issue(node(1)).unwrap();
    let forged = NodeCredentials { ca: authority.issue(node(1)).unwrap().ca, ..forged };
    let mut cluster = Cluster::<Plain>::new(0);
    for (number, security) in [(1, Security::Tls(forged)), (2, tls_of(&authority, 2)), (3, tls_of(&authority, 3))] {
        cluster.add_fabric(identity(number), Arc::new(TcpFabric::new(identity(number), &security).unwrap()));
    }
    cluster.introduce();
    let log = LogCapture::begin();
    cluster.nodes[0].fabric.connect(node(2)).unwrap();
    cluster.until("the refusal", |nodes| !nodes[0].refused().is_empty());
    assert!(matches!(cluster.nodes[0].refused()[..], [(LinkRefusal::Certificate(_), None)]));
    log.check_only_line("no valid certificate of this cluster");
    // The other way round, the side that connects refuses.
    cluster.nodes[2].fabric.connect(node(1)).unwrap();
    cluster.until("the failure", |nodes| !nodes[2].failed().is_empty());
    let failed = cluster.nodes[2].failed();
    assert!(matches!(failed[..], [FabricError::Refused { reason: LinkRefusal::Certificate(_), .. }]), "{failed:?}");
    cluster.settle();
    assert!(cluster.nodes[1].events.is_empty() && cluster.nodes.iter().all(|node| node.ups().is_empty()));
}

#[test]
fn certificate_of_other_node_is_no_identity() {
    let authority = ClusterAuthority::create(CLUSTER).unwrap();
    let credentials = authority.issue(node(3)).unwrap();
    let own = TcpFabric::new(identity(1), &Security::Tls(credentials.clone()));
    assert!(matches!(own, Err(FabricError::Credentials(_))));
    let other = ClusterAuthority::create(FileSystemId(1)).unwrap().issue(node(1)).unwrap();
    assert!(matches!(TcpFabric::new(identity(1), &Security::Tls(other)), Err(FabricError::Credentials(_))));

    let mut witness = Witness::<Tls>::new();
    let credentials = witness.cluster.provider.authority(CLUSTER).issue(node(3)).unwrap();
    let stream = witness.stranger();
    let liar = thread::spawn(move || {
        stream.set_read_timeout(None).unwrap();
        let mut tls = StreamOwned::new(tls_client(&credentials, 2), stream);
        tls.write_all(&hello_of(&identity(1))).unwrap();
        let mut answer = Vec::new();
        // The end may come without TLS's own.
        let _ = tls.read_to_end(&mut answer);
        answer
    });
    witness.check("it does not name node-1.");
    let answer = liar.join().unwrap();
    assert!(answer.starts_with(b"ASHLRREF\x06") && answer[9..].iter().all(|byte| *byte == 0), "{answer:?}");
}

fn tls_client(credentials: &NodeCredentials, to: u16) -> ClientConnection {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(credentials.ca.as_bytes()).unwrap()).unwrap();
    let certificate = CertificateDer::from_pem_slice(credentials.certificate.as_bytes()).unwrap();
    let key = PrivateKeyDer::from_pem_slice(credentials.key.as_bytes()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
    let config = config.with_root_certificates(roots).with_client_auth_cert(vec![certificate], key).unwrap();
    let name = ServerName::try_from(format!("node-{to}.{CLUSTER}.ashlar")).unwrap();
    ClientConnection::new(Arc::new(config), name).unwrap()
}

/// A Hello, as docs/format-link.md has it.
fn hello_of(identity: &FabricIdentity) -> Vec<u8> {
    let mut bytes = b"ASHLRLNK\x01\0\0\0\x01\0\0\0".to_vec();
    bytes.extend(identity.cluster.0.to_le_bytes());
    bytes.extend(identity.arena.0.to_le_bytes());
    bytes.extend(identity.epoch.number.to_le_bytes());
    bytes.extend(identity.epoch.node.get().to_le_bytes());
    bytes.extend(identity.node.get().to_le_bytes());
    bytes.extend(identity.versions.oldest.to_le_bytes());
    bytes.extend(identity.versions.current.to_le_bytes());
    bytes.extend([7; 16]);
    bytes
}

/// Something that a relay does to the next bytes of the connecting side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum Harm {
    None,
    FlipBit,
    HugeLength,
    CutShort,
    Reset,
}

/// A relay in front of a node, which records the connecting side's bytes and harms them.
struct Relay {
    address: String,
    harm: Arc<AtomicU8>,
    recorded: Arc<Mutex<Vec<u8>>>,
}

impl Relay {
    /// Relays one connection to an address.
    fn start(target: String) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let (harm, recorded) = (Arc::new(AtomicU8::new(0)), Arc::new(Mutex::new(Vec::new())));
        let relay = Self { address, harm: Arc::clone(&harm), recorded: Arc::clone(&recorded) };
        thread::spawn(move || {
            let near = listener.accept().unwrap().0;
            let far = TcpStream::connect(target).unwrap();
            let (mut from, mut to) = (far.try_clone().unwrap(), near.try_clone().unwrap());
            thread::spawn(move || {
                let _ = std::io::copy(&mut from, &mut to);
                let _ = to.shutdown(Shutdown::Both);
            });
            forward(&near, &far, &harm, &recorded);
            let _ = far.shutdown(Shutdown::Both);
            let _ = near.shutdown(Shutdown::Both);
        });
        relay
    }

    fn harm(&self, harm: Harm) {
        self.harm.store(harm as u8, Ordering::Release);
    }
}

fn forward(mut near: &TcpStream, mut far: &TcpStream, harm: &AtomicU8, recorded: &Mutex<Vec<u8>>) {
    let mut buffer = [0; 4096];
    while let Ok(count @ 1..) = near.read(&mut buffer) {
        let bytes = &mut buffer[..count];
        recorded.lock().unwrap().extend_from_slice(bytes);
        match harm.swap(Harm::None as u8, Ordering::AcqRel) {
            harm if harm == Harm::FlipBit as u8 => bytes[count / 2] ^= 1,
            harm if harm == Harm::HugeLength as u8 => bytes[..4].fill(0xff),
            harm if harm == Harm::CutShort as u8 => return drop(far.write_all(&bytes[..count / 2])),
            harm if harm == Harm::Reset as u8 => {
                for stream in [near, far] {
                    rustix::net::sockopt::set_socket_linger(stream, Some(Duration::ZERO)).unwrap();
                }
                return;
            }
            _ => {}
        }
        if far.write_all(bytes).is_err() {
            return;
        }
    }
}

/// A third node beside the witness, whose link to the second leads through a relay.
fn relayed<P: Provider>(witness: &mut Witness<P>) -> (Relay, LinkId, LinkId) {
    witness.cluster.add(identity(3));
    witness.cluster.introduce();
    let relay = Relay::start(witness.cluster.nodes[1].address.clone());
    let member = Member { address: relay.address.clone(), ..witness.cluster.nodes[1].member() };
    witness.cluster.nodes[2].fabric.set_members(vec![member]);
    let near = witness.cluster.nodes[2].fabric.connect(node(2)).unwrap();
    let before = witness.cluster.nodes[1].ups().len();
    witness
        .cluster
        .until("the relayed link", |nodes| nodes[1].ups().len() > before && nodes[2].ups().contains(&(near, true)));
    (relay, near, witness.cluster.nodes[1].ups()[before].0)
}

fn check_harm<P: Provider>(harm: Harm, is_right: impl Fn(&CloseReason) -> bool, line: Option<&str>) {
    let mut witness = Witness::<P>::new();
    let (relay, near, far) = relayed(&mut witness);
    let memory = TestRegion::new(100);
    let region = witness.cluster.nodes[1].fabric.register(memory.clone());
    relay.harm(harm);
    witness.cluster.nodes[2].fabric.write(near, RegionRange { region, offset: 0 }, &[1; 100]).unwrap();
    witness.cluster.until("both ends are down", |nodes| nodes[1].is_down(far) && nodes[2].is_down(near));
    let reason = |event: &Event| match event {
        Event::Down { link, reason } if *link == far => Some(reason.clone()),
        _ => None,
    };
    let reason = witness.cluster.nodes[1].events.iter().find_map(reason).unwrap();
    assert!(is_right(&reason), "{harm:?}: {reason}");
    assert_eq!(memory.bytes(), [0; 100], "{harm:?}");
    witness.events = witness.cluster.nodes[1].events.len();
    match line {
        Some(line) => witness.check(line),
        None => {
            witness.cluster.settle();
            assert_eq!(witness.log.lines(), [""; 0]);
            witness.cluster.check_link(witness.link);
        }
    }
}

#[test]
fn harmed_frame_closes_link_and_changes_nothing() {
    let is_invalid = |reason: &CloseReason| matches!(reason, CloseReason::Invalid(_));
    let is_gone = |reason: &CloseReason| reason.to_string() == "the peer closed the connection";
    check_harm::<Plain>(Harm::FlipBit, is_invalid, Some("a frame's checksum is wrong"));
    check_harm::<Tls>(Harm::FlipBit, is_invalid, Some("invalid bytes arrived"));
    check_harm::<Plain>(Harm::HugeLength, is_invalid, Some("has no 4294967295 bytes"));
    check_harm::<Tls>(Harm::HugeLength, is_invalid, Some("invalid bytes arrived"));
    for harm in [Harm::CutShort, Harm::Reset] {
        check_harm::<Plain>(harm, is_gone, None);
        check_harm::<Tls>(harm, is_gone, None);
    }
}

fn check_replay<P: Provider>(line: &str) {
    let mut witness = Witness::<P>::new();
    let (relay, near, far) = relayed(&mut witness);
    witness.cluster.nodes[2].fabric.send(near, &[b"transfer 100"]).unwrap();
    witness.cluster.until("the message", |nodes| !nodes[1].messages(far).is_empty());
    witness.cluster.nodes[2].fabric.close(near);
    witness.cluster.until("the end", |nodes| nodes[1].is_down(far));
    witness.events = witness.cluster.nodes[1].events.len();
    let recorded = relay.recorded.lock().unwrap().clone();
    let mut stream = witness.stranger();
    stream.write_all(&recorded).unwrap();
    witness.until_ended(&mut stream);
    witness.check(line);
}

#[test]
fn replayed_session_is_refused() {
    check_replay::<Plain>("it repeats an old handshake");
    check_replay::<Tls>("does not speak");
}

/// How many of the connections the other side has ended.
fn ended(streams: &[TcpStream]) -> usize {
    let is_ended = |mut stream: &TcpStream| match stream.read(&mut [0; 64]) {
        Ok(count) => count == 0,
        Err(error) => error.kind() != ErrorKind::WouldBlock,
    };
    streams.iter().filter(|stream| is_ended(stream)).count()
}

fn check_silence<P: Provider>() {
    let mut witness = Witness::<P>::new();
    let memory = resident_bytes();
    let mut streams = Vec::new();
    for _ in 0..200 {
        let stream = witness.stranger();
        stream.set_nonblocking(true).unwrap();
        streams.push(stream);
        witness.cluster.nodes.iter_mut().for_each(|node| node.fabric.poll(Some(Duration::ZERO), &mut node.events));
    }
    witness.cluster.until("the oldest are dropped", |_| ended(&streams) >= 136);
    assert!(witness.log.lines()[0].contains("too many others"), "{:?}", witness.log.lines());
    witness.cluster.check_link(witness.link);
    let second = witness.cluster.link();
    assert!(resident_bytes().saturating_sub(memory) < 64 << 20, "silent connections take much memory");
    witness.cluster.until("the rest is dropped", |_| ended(&streams) == 200);
    let lines = witness.log.lines();
    assert!(lines.iter().all(|line| line.contains("is refused")) && lines.len() < 100, "{lines:#?}");
    witness.cluster.check_link(second);
}

fn resident_bytes() -> u64 {
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
    pages.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
}

#[test]
fn silent_connections_are_bounded_and_dropped() {
    check_silence::<Plain>();
    check_silence::<Tls>();
}

/// Checks that the witness's link carries two messages while a slow peer is waited for; the scenario counts them.
///
/// A link that waits for the slow peer carries one, behind the slow peer's end. On a starved machine few messages fit
/// into a handshake's time, so the scenario has several attempts.
fn check_delays_no_other(scenario: fn() -> usize) {
    let mut counts = Vec::new();
    while counts.last().is_none_or(|exchanged| *exchanged < 2) {
        assert!(counts.len() < 5, "a slow peer holds a link up: {counts:?} messages");
        counts.push(scenario());
    }
}

fn exchanged_beside_slow_handshakes() -> usize {
    let mut witness = Witness::<Plain>::new();
    // A server that accepts and says nothing.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = silent.local_addr().unwrap().to_string();
    let silent_member = Member { address, ..witness.cluster.nodes[1].member() };
    witness.cluster.nodes[0].fabric.set_members(vec![silent_member]);
    witness.cluster.nodes[0].fabric.connect(node(2)).unwrap();
    let mut stream = witness.stranger();
    let hello = hello_of(&identity(1));
    let (mut sent, mut exchanged) = (0, 0);
    let mut is_ended = false;
    while !is_ended {
        if sent < hello.len() / 2 {
            is_ended |= stream.write_all(&hello[sent..=sent]).is_err();
            sent += 1;
        }
        witness.cluster.check_link(witness.link);
        exchanged += 1;
        is_ended |= matches!(stream.read(&mut [0; 64]), Ok(0));
    }
    witness.events = witness.cluster.nodes[1].events.len();
    witness.cluster.until("the failure", |nodes| !nodes[0].failed().is_empty());
    let failed: &TestNode = &witness.cluster.nodes[0];
    let is_timeout =
        |error: &&FabricError| matches!(error, FabricError::Handshake { reason: CloseReason::HandshakeTimeout, .. });
    assert!(failed.failed().iter().all(is_timeout), "{:?}", failed.failed());
    witness.check("the handshake took too long");
    exchanged
}

#[test]
fn slow_handshakes_end_and_delay_no_other() {
    check_delays_no_other(exchanged_beside_slow_handshakes);
}

/// A listener whose queue of connections is full: the kernel drops further requests, as a black hole does.
struct FullListener {
    listener: TcpListener,
    _waiting: Vec<TcpStream>,
}

impl FullListener {
    fn new() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        // The queue then holds one connection.
        rustix::net::listen(&listener, 0).unwrap();
        let address = listener.local_addr().unwrap();
        let connect = || TcpStream::connect_timeout(&address, Duration::from_secs(1));
        let mut waiting = Vec::new();
        let error = loop {
            match connect() {
                Ok(stream) => waiting.push(stream),
                Err(error) => break error,
            }
            assert!(waiting.len() < 100, "the queue is never full");
        };
        assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
        Self { listener, _waiting: waiting }
    }
}

fn exchanged_beside_black_hole() -> usize {
    let mut witness = Witness::<Plain>::new();
    let hole = FullListener::new();
    let address = hole.listener.local_addr().unwrap().to_string();
    let member = Member { address, ..witness.cluster.nodes[1].member() };
    witness.cluster.nodes[0].fabric.set_members(vec![member]);
    let begin = Instant::now();
    witness.cluster.nodes[0].fabric.connect(node(2)).unwrap();
    let mut exchanged = 0;
    while witness.cluster.nodes[0].failed().is_empty() {
        // The kernel gives up after two minutes by itself.
        assert!(begin.elapsed() < Duration::from_secs(60), "the connect never fails");
        witness.cluster.check_link(witness.link);
        exchanged += 1;
    }
    let failed = witness.cluster.nodes[0].failed();
    let [FabricError::Connect { error, .. }] = failed[..] else { panic!("{failed:?}") };
    assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
    // The next attempt is another link, and succeeds if the member is at its right address.
    witness.cluster.introduce();
    let link = witness.cluster.link();
    witness.cluster.check_link(link);
    assert!(witness.log.lines().is_empty(), "{:?}", witness.log.lines());
    exchanged
}

#[test]
fn unanswered_connect_fails_and_delays_no_other() {
    check_delays_no_other(exchanged_beside_black_hole);
}
