//! How two nodes prove to each other that they may have a link. No socket here.
//!
//! The side that connects sends its Hello. The other side checks it, and answers with its own Hello and a proof, or
//! with a refusal. The first side checks both, and sends its proof, or a refusal. A proof is a hash of both Hellos.
//! Each has a fresh nonce, so the answer that was recorded in another handshake is wrong.
//!
//! A side that was refused learns the reason and no more. If it is a member of the cluster, it also learns the
//! refusing side's epoch. `docs/format-link.md` has the bytes.

use ashlar_types::{ArenaId, Epoch, FileSystemId, NodeNumber, VersionRange};
use sha2::{Digest, Sha256};

use crate::error::LinkRefusal;
use crate::event::PeerIdentity;
use crate::member::{FabricIdentity, Member};

/// Versions of the link protocol that this program speaks.
pub(crate) const LINK_VERSIONS: VersionRange = VersionRange::new(1, 1);
/// The first byte of all that a node sends without TLS. No record of TLS begins with it.
pub(crate) const FIRST_BYTE: u8 = b'A';
/// Bytes of a Hello.
const HELLO_BYTES: usize = 72;
const PROOF_BYTES: usize = 40;
const REFUSAL_BYTES: usize = 32;
const MAGIC_BYTES: usize = 8;
const HELLO_MAGIC: &[u8; MAGIC_BYTES] = b"ASHLRLNK";
const PROOF_MAGIC: &[u8; MAGIC_BYTES] = b"ASHLRPRF";
const REFUSAL_MAGIC: &[u8; MAGIC_BYTES] = b"ASHLRREF";
/// Bytes of a Hello that every version has: the magic, and the versions of the link protocol.
const PREFIX_BYTES: usize = 16;

/// One side's account of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LinkHello {
    pub(crate) link: VersionRange,
    pub(crate) identity: FabricIdentity,
    pub(crate) nonce: [u8; 16],
}

impl LinkHello {
    pub(crate) const fn new(identity: FabricIdentity, nonce: [u8; 16]) -> Self {
        Self { link: LINK_VERSIONS, identity, nonce }
    }

    pub(crate) fn to_bytes(&self) -> [u8; HELLO_BYTES] {
        let identity = &self.identity;
        let mut bytes = [0; HELLO_BYTES];
        bytes[..8].copy_from_slice(HELLO_MAGIC);
        put_range(&mut bytes[8..16], self.link);
        bytes[16..32].copy_from_slice(&identity.cluster.0.to_le_bytes());
        bytes[32..40].copy_from_slice(&identity.arena.0.to_le_bytes());
        put_epoch(&mut bytes[40..46], identity.epoch);
        bytes[46..48].copy_from_slice(&identity.node.get().to_le_bytes());
        put_range(&mut bytes[48..56], identity.versions);
        bytes[56..].copy_from_slice(&self.nonce);
        bytes
    }

    /// `None` if a node's number is none.
    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let identity = FabricIdentity {
            cluster: FileSystemId(u128::from_le_bytes(array(bytes, 16))),
            arena: ArenaId(u64::from_le_bytes(array(bytes, 32))),
            epoch: epoch_at(bytes, 40)?,
            node: NodeNumber::new(u16::from_le_bytes(array(bytes, 46)))?,
            versions: range_at(bytes, 48),
        };
        Some(Self { link: range_at(bytes, 8), identity, nonce: array(bytes, 56) })
    }
}

/// Decides whether a peer may have a link: the one place for all fabrics.
///
/// `expected` is the node that this one asked for; `certificate` says whether the peer's certificate names a node of
/// this cluster. The order is part of the protocol: reasons that strangers may learn come first.
pub(crate) fn check_peer(
    theirs: &LinkHello,
    own: &FabricIdentity,
    members: &[Member],
    expected: Option<NodeNumber>,
    certificate: impl FnOnce(NodeNumber) -> Result<(), String>,
) -> Result<PeerIdentity, LinkRefusal> {
    check_link_version(theirs.link)?;
    let peer = &theirs.identity;
    if peer.cluster != own.cluster {
        return Err(LinkRefusal::ForeignCluster(peer.cluster));
    }
    let member = members.iter().find(|member| member.node == peer.node && peer.node != own.node);
    let member = member.filter(|member| expected.is_none_or(|expected| expected == member.node));
    let member = member.ok_or(LinkRefusal::UnexpectedNode(peer.node))?;
    if peer.arena != member.arena {
        return Err(LinkRefusal::ForeignArena(peer.arena));
    }
    certificate(peer.node).map_err(LinkRefusal::Certificate)?;
    if peer.epoch.number < member.oldest_epoch.number {
        return Err(LinkRefusal::StaleEpoch { theirs: peer.epoch, oldest: member.oldest_epoch });
    }
    let version = own.versions.negotiate(peer.versions);
    let version = version.ok_or(LinkRefusal::Version { theirs: peer.versions, ours: own.versions })?;
    Ok(PeerIdentity { node: peer.node, arena: peer.arena, epoch: peer.epoch, version })
}

fn check_link_version(theirs: VersionRange) -> Result<(), LinkRefusal> {
    let common = LINK_VERSIONS.negotiate(theirs);
    common.map(|_| ()).ok_or(LinkRefusal::LinkVersion { theirs, ours: LINK_VERSIONS })
}

/// The seeds of the two directions' checksums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LinkSeeds {
    pub(crate) sent: u64,
    pub(crate) received: u64,
}

/// The next act of a side in its handshake.
#[derive(Debug)]
pub(crate) enum HandshakeStep {
    /// More bytes must arrive.
    Wait,
    /// These bytes are sent; then more must arrive.
    Send(Vec<u8>),
    /// The peer is proved. These bytes are sent, and frames follow.
    Done { send: Vec<u8>, hello: LinkHello, seeds: LinkSeeds },
    /// This side refuses the peer, with this answer.
    Refuse { reason: LinkRefusal, answer: Vec<u8> },
    /// The peer refuses this side.
    Refused { reason: LinkRefusal, epoch: Option<Epoch> },
}

/// One side of a handshake.
#[derive(Debug)]
pub(crate) struct Handshake {
    own: LinkHello,
    is_outgoing: bool,
    input: Vec<u8>,
    /// The peer's Hello, which was checked.
    peer: Option<LinkHello>,
}

impl Handshake {
    pub(crate) const fn new(own: LinkHello, is_outgoing: bool) -> Self {
        Self { own, is_outgoing, input: Vec::new(), peer: None }
    }

    /// The bytes with which a side that connects begins.
    pub(crate) fn greeting(&self) -> Vec<u8> {
        self.own.to_bytes().to_vec()
    }

    /// How many bytes the next call of [`Handshake::handle_bytes`] takes at most. No byte of a frame is among them.
    pub(crate) fn wanted(&self) -> usize {
        let have = self.input.len();
        let Some(magic) = self.input.first_chunk::<MAGIC_BYTES>() else { return MAGIC_BYTES - have };
        let whole = match magic {
            HELLO_MAGIC if have < PREFIX_BYTES => PREFIX_BYTES,
            HELLO_MAGIC if check_link_version(range_at(&self.input, 8)).is_ok() => HELLO_BYTES,
            PROOF_MAGIC => PROOF_BYTES,
            REFUSAL_MAGIC => REFUSAL_BYTES,
            _ => have,
        };
        whole - have
    }

    /// Takes bytes of the peer, as many as there are.
    pub(crate) fn handle_message(
        &mut self,
        mut bytes: &[u8],
        check: impl Fn(&LinkHello) -> Result<PeerIdentity, LinkRefusal>,
    ) -> HandshakeStep {
        loop {
            let (now, rest) = bytes.split_at(self.wanted().min(bytes.len()));
            bytes = rest;
            let step = self.handle_bytes(now, &check);
            if bytes.is_empty() || !matches!(step, HandshakeStep::Wait) {
                return step;
            }
        }
    }

    /// Takes bytes of the peer, no more than [`Handshake::wanted`]; `check` is [`check_peer`] with this side's
    /// knowledge.
    pub(crate) fn handle_bytes(
        &mut self,
        bytes: &[u8],
        check: impl FnOnce(&LinkHello) -> Result<PeerIdentity, LinkRefusal>,
    ) -> HandshakeStep {
        self.input.extend_from_slice(bytes);
        if self.wanted() > 0 {
            return HandshakeStep::Wait;
        }
        let input = std::mem::take(&mut self.input);
        match (input.first_chunk::<MAGIC_BYTES>(), &self.peer) {
            (Some(HELLO_MAGIC), None) => self.handle_hello(&input, check),
            (Some(PROOF_MAGIC), Some(hello)) => self.handle_proof(&input, hello),
            (Some(REFUSAL_MAGIC), _) => self.handle_refusal(&input),
            _ => self.refuse(LinkRefusal::NotALink),
        }
    }

    fn handle_hello(
        &mut self,
        input: &[u8],
        check: impl FnOnce(&LinkHello) -> Result<PeerIdentity, LinkRefusal>,
    ) -> HandshakeStep {
        if let Err(reason) = check_link_version(range_at(input, 8)) {
            return self.refuse(reason);
        }
        let Some(hello) = LinkHello::from_bytes(input) else { return self.refuse(LinkRefusal::NotALink) };
        match check(&hello) {
            Err(reason) => self.refuse(reason),
            Ok(_) => {
                self.peer = Some(hello);
                if self.is_outgoing {
                    return HandshakeStep::Wait;
                }
                HandshakeStep::Send([&self.own.to_bytes()[..], &self.proof(self.is_outgoing)].concat())
            }
        }
    }

    fn handle_proof(&self, input: &[u8], hello: &LinkHello) -> HandshakeStep {
        if input != self.proof(!self.is_outgoing) {
            return self.refuse(LinkRefusal::Replay);
        }
        let seed = |is_outgoing| u64::from_le_bytes(array(&self.digest(b"seed", is_outgoing), 0));
        let seeds = LinkSeeds { sent: seed(self.is_outgoing), received: seed(!self.is_outgoing) };
        let send = if self.is_outgoing { self.proof(true) } else { Vec::new() };
        HandshakeStep::Done { send, hello: hello.clone(), seeds }
    }

    /// Returns a side's proof.
    fn proof(&self, is_outgoing: bool) -> Vec<u8> {
        [&PROOF_MAGIC[..], &self.digest(b"proof", is_outgoing)].concat()
    }

    /// Hashes both Hellos, that of the connecting side first, for a purpose of one side.
    fn digest(&self, purpose: &[u8], is_outgoing: bool) -> [u8; 32] {
        let theirs = self.peer.as_ref().map(LinkHello::to_bytes).expect("the peer's Hello has been checked");
        let own = self.own.to_bytes();
        let (first, second) = if self.is_outgoing { (own, theirs) } else { (theirs, own) };
        let hash = Sha256::new().chain_update(first).chain_update(second).chain_update([u8::from(is_outgoing)]);
        hash.chain_update(purpose).finalize().into()
    }

    fn refuse(&self, reason: LinkRefusal) -> HandshakeStep {
        let answer = refusal_bytes(&reason, &self.own.identity);
        HandshakeStep::Refuse { reason, answer }
    }

    /// Restores the refusing side's reason: it has sent a code, and few details.
    fn handle_refusal(&self, bytes: &[u8]) -> HandshakeStep {
        let own = &self.own.identity;
        let (range, epoch, oldest) = (range_at(bytes, 16), epoch_at(bytes, 10), epoch_at(bytes, 24));
        let is_member = bytes[9] == 1;
        let reason = match bytes[8] {
            1 => LinkRefusal::NotALink,
            2 => LinkRefusal::LinkVersion { theirs: self.own.link, ours: range },
            3 => LinkRefusal::ForeignCluster(own.cluster),
            4 => LinkRefusal::UnexpectedNode(own.node),
            5 => LinkRefusal::ForeignArena(own.arena),
            6 => LinkRefusal::Certificate("its certificate names another node or cluster".into()),
            7 => LinkRefusal::StaleEpoch { theirs: own.epoch, oldest: oldest.unwrap_or_default() },
            8 => LinkRefusal::Version { theirs: own.versions, ours: range },
            9 => LinkRefusal::Security,
            10 => LinkRefusal::Replay,
            code => LinkRefusal::Unknown(code),
        };
        HandshakeStep::Refused { reason, epoch: epoch.filter(|_| is_member) }
    }
}

/// Returns the bytes that tell a peer why it is refused.
pub(crate) fn refusal_bytes(reason: &LinkRefusal, own: &FabricIdentity) -> Vec<u8> {
    let none = VersionRange::new(0, 0);
    let nothing = (false, none, Epoch::default());
    let (code, (is_member, range, oldest)) = match reason {
        LinkRefusal::NotALink => (1, nothing),
        // The versions of a release are no secret, and an upgrade that fails needs them.
        LinkRefusal::LinkVersion { ours, .. } => (2, (false, *ours, Epoch::default())),
        LinkRefusal::ForeignCluster(_) => (3, nothing),
        LinkRefusal::UnexpectedNode(_) => (4, nothing),
        LinkRefusal::ForeignArena(_) => (5, nothing),
        LinkRefusal::Certificate(_) => (6, nothing),
        LinkRefusal::StaleEpoch { oldest, .. } => (7, (true, none, *oldest)),
        LinkRefusal::Version { ours, .. } => (8, (true, *ours, Epoch::default())),
        LinkRefusal::Security => (9, nothing),
        LinkRefusal::Replay => (10, nothing),
        LinkRefusal::Unknown(code) => (*code, nothing),
    };
    let mut bytes = vec![0; REFUSAL_BYTES];
    bytes[..8].copy_from_slice(REFUSAL_MAGIC);
    bytes[8] = code;
    bytes[9] = u8::from(is_member);
    if is_member {
        put_epoch(&mut bytes[10..16], own.epoch);
    }
    put_range(&mut bytes[16..24], range);
    put_epoch(&mut bytes[24..30], oldest);
    bytes
}

fn put_range(bytes: &mut [u8], range: VersionRange) {
    bytes[..4].copy_from_slice(&range.oldest.to_le_bytes());
    bytes[4..8].copy_from_slice(&range.current.to_le_bytes());
}

fn range_at(bytes: &[u8], at: usize) -> VersionRange {
    VersionRange::new(u32::from_le_bytes(array(bytes, at)), u32::from_le_bytes(array(bytes, at + 4)))
}

fn put_epoch(bytes: &mut [u8], epoch: Epoch) {
    bytes[..4].copy_from_slice(&epoch.number.to_le_bytes());
    bytes[4..6].copy_from_slice(&epoch.node.get().to_le_bytes());
}

fn epoch_at(bytes: &[u8], at: usize) -> Option<Epoch> {
    let node = NodeNumber::new(u16::from_le_bytes(array(bytes, at + 4)))?;
    Some(Epoch { number: u32::from_le_bytes(array(bytes, at)), node })
}

fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    bytes[at..at + N].try_into().expect("the length was checked")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn identity(node: u16) -> FabricIdentity {
        let number = NodeNumber::new(node).unwrap();
        FabricIdentity {
            cluster: FileSystemId(77),
            node: number,
            arena: ArenaId(u64::from(node)),
            epoch: Epoch { number: 5, node: number },
            versions: VersionRange::new(1, 3),
        }
    }

    fn member(node: u16) -> Member {
        let FabricIdentity { node, arena, epoch, .. } = identity(node);
        Member { node, arena, address: String::new(), oldest_epoch: epoch }
    }

    fn check(own: u16, other: u16) -> impl Fn(&LinkHello) -> Result<PeerIdentity, LinkRefusal> {
        move |hello| check_peer(hello, &identity(own), &[member(other)], None, |_| Ok(()))
    }

    fn sides(nonces: (u8, u8)) -> (Handshake, Handshake) {
        let first = Handshake::new(LinkHello::new(identity(1), [nonces.0; 16]), true);
        (first, Handshake::new(LinkHello::new(identity(2), [nonces.1; 16]), false))
    }

    fn give(side: &mut Handshake, bytes: &[u8], own: u16, other: u16) -> HandshakeStep {
        side.handle_message(bytes, check(own, other))
    }

    #[test]
    fn two_members_agree_on_seeds() {
        let (mut first, mut second) = sides((1, 2));
        let HandshakeStep::Send(answer) = give(&mut second, &first.greeting(), 2, 1) else { panic!("no answer") };
        let HandshakeStep::Done { send, hello, seeds } = give(&mut first, &answer, 1, 2) else { panic!("no proof") };
        assert_eq!(hello.identity, identity(2));
        let HandshakeStep::Done { hello, seeds: other, .. } = give(&mut second, &send, 2, 1) else { panic!("no end") };
        assert_eq!(hello.identity, identity(1));
        assert_eq!((seeds.sent, seeds.received), (other.received, other.sent));
        assert_ne!(seeds.sent, seeds.received);
    }

    #[test]
    fn recorded_proof_is_refused_by_either_side() {
        let (mut first, mut second) = sides((1, 2));
        let HandshakeStep::Send(answer) = give(&mut second, &first.greeting(), 2, 1) else { panic!("no answer") };
        let HandshakeStep::Done { send, .. } = give(&mut first, &answer, 1, 2) else { panic!("no proof") };
        let (mut later_first, mut later_second) = sides((3, 4));
        let step = give(&mut later_first, &answer, 1, 2);
        assert!(matches!(step, HandshakeStep::Refuse { reason: LinkRefusal::Replay, .. }), "{step:?}");
        give(&mut later_second, &first.greeting(), 2, 1);
        let step = give(&mut later_second, &send, 2, 1);
        assert!(matches!(step, HandshakeStep::Refuse { reason: LinkRefusal::Replay, .. }), "{step:?}");
    }

    #[test]
    fn refusals_come_in_the_order_of_the_protocol() {
        let mut theirs = LinkHello::new(identity(1), [0; 16]);
        let check = |hello: &LinkHello, members: &[Member], expected, certificate: &str| {
            let result = if certificate.is_empty() { Ok(()) } else { Err(certificate.to_owned()) };
            check_peer(hello, &identity(2), members, expected, |_| result)
        };
        let newer = Member { oldest_epoch: Epoch { number: 6, ..identity(1).epoch }, ..member(1) };
        let moved = Member { arena: ArenaId(9), ..newer.clone() };
        theirs.identity.versions = VersionRange::new(4, 4);
        let reason = check(&theirs, &[member(1)], None, "").unwrap_err();
        assert!(matches!(reason, LinkRefusal::Version { .. }));
        assert!(matches!(
            check(&theirs, std::slice::from_ref(&newer), None, "").unwrap_err(),
            LinkRefusal::StaleEpoch { .. }
        ));
        assert!(matches!(check(&theirs, &[newer], None, "none").unwrap_err(), LinkRefusal::Certificate(_)));
        assert_eq!(check(&theirs, &[moved], None, "none").unwrap_err(), LinkRefusal::ForeignArena(ArenaId(1)));
        let unexpected = LinkRefusal::UnexpectedNode(identity(1).node);
        assert_eq!(check(&theirs, &[member(3)], None, "none").unwrap_err(), unexpected);
        assert_eq!(check(&theirs, &[member(1)], NodeNumber::new(3), "none").unwrap_err(), unexpected);
        theirs.identity.cluster = FileSystemId(1);
        assert_eq!(check(&theirs, &[], None, "").unwrap_err(), LinkRefusal::ForeignCluster(FileSystemId(1)));
        theirs.link = VersionRange::new(2, 2);
        assert!(matches!(check(&theirs, &[], None, "").unwrap_err(), LinkRefusal::LinkVersion { .. }));
    }

    #[test]
    fn stranger_learns_a_code_and_member_the_epoch() {
        let reasons = [
            LinkRefusal::NotALink,
            LinkRefusal::ForeignCluster(identity(1).cluster),
            LinkRefusal::UnexpectedNode(identity(1).node),
            LinkRefusal::ForeignArena(identity(1).arena),
            LinkRefusal::Security,
            LinkRefusal::Replay,
        ];
        for reason in reasons {
            let bytes = refusal_bytes(&reason, &identity(2));
            assert!(bytes[9..].iter().all(|byte| *byte == 0), "{reason} says more than its code");
            let (mut refused, _) = sides((1, 2));
            let step = give(&mut refused, &bytes, 1, 2);
            let HandshakeStep::Refused { reason: received, epoch: None } = step else { panic!("{step:?}") };
            assert_eq!(received, reason);
        }
        let reason = LinkRefusal::StaleEpoch { theirs: identity(1).epoch, oldest: identity(2).epoch };
        let (mut refused, _) = sides((1, 2));
        let step = give(&mut refused, &refusal_bytes(&reason, &identity(2)), 1, 2);
        let HandshakeStep::Refused { reason: received, epoch } = step else { panic!("{step:?}") };
        assert_eq!((received, epoch), (reason, Some(identity(2).epoch)));
    }

    #[test]
    fn hello_of_unknown_link_version_is_refused_early() {
        let (first, mut second) = sides((1, 2));
        let mut bytes = first.greeting();
        bytes[8..16].copy_from_slice(&[9, 0, 0, 0, 9, 0, 0, 0]);
        let step = give(&mut second, &bytes[..PREFIX_BYTES], 2, 1);
        assert!(matches!(step, HandshakeStep::Refuse { reason: LinkRefusal::LinkVersion { .. }, .. }), "{step:?}");
    }

    proptest! {
        #[test]
        fn arbitrary_handshakes_never_panic_nor_end_well(
            magic in 0..4usize,
            bytes in prop::collection::vec(any::<u8>(), 0..200),
        ) {
            let magics = [&HELLO_MAGIC[..], PROOF_MAGIC, REFUSAL_MAGIC, b""];
            let bytes = [magics[magic], &bytes].concat();
            let (mut first, mut second) = sides((1, 2));
            for (step, side) in [(give(&mut first, &bytes, 1, 2), &first), (give(&mut second, &bytes, 2, 1), &second)] {
                prop_assert!(!matches!(step, HandshakeStep::Done { .. }), "{:?}", step);
                prop_assert!(side.input.len() <= HELLO_BYTES);
            }
        }
    }
}
