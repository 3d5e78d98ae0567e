//! The document: the members of a cluster, their roles, and the epoch.

use std::collections::BTreeSet;

use ashlar_types::{ArenaId, Epoch, FileSystemId, NodeNumber};
use thiserror::Error;

/// Nodes that may hold a copy, at most: chains of three come later.
pub const NODES_MAX: usize = 2;

/// A member's part in the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemberRole {
    /// Its sessions work, and it writes the journal.
    Writer,
    /// It has a copy of the writer's journal and applies it.
    Replica,
    /// It was the writer, and another member has taken over. It is refused until its arena is made anew.
    Replaced,
}

impl MemberRole {
    const ALL: [Self; 3] = [Self::Writer, Self::Replica, Self::Replaced];

    /// Returns its name, as files and commands have it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Writer => "writer",
            Self::Replica => "replica",
            Self::Replaced => "replaced",
        }
    }

    /// Returns the role of this name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|role| role.name() == name)
    }
}

/// A member: an arena, and where its node listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DocumentMember {
    /// The node.
    pub node: NodeNumber,
    /// Its arena.
    pub arena: ArenaId,
    /// Its address, `HOST:PORT`.
    pub address: String,
    /// Its role.
    pub role: MemberRole,
}

/// Why a document can't be: each says what to do.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum DocumentError {
    /// No member is the writer, or several are.
    #[error("{0} members have the role 'writer'; give it to exactly one")]
    Writers(usize),
    /// Too many members hold a copy.
    #[error("{0} members hold a copy; this version has {NODES_MAX} at most: remove some")]
    TooManyMembers(usize),
    /// Two members have the same number.
    #[error("two members are node {0}; give each its own number")]
    SameNode(NodeNumber),
    /// Two members have the same arena.
    #[error("two members have arena {0}; a member is one arena")]
    SameArena(ArenaId),
    /// Two members have the same address.
    #[error("two members have the address {0}; give each its own")]
    SameAddress(String),
    /// An address is none.
    #[error("'{0}' is no address; write HOST:PORT, for example 10.0.0.1:7900 or [fd00::1]:7900")]
    Address(String),
    /// So many copies can't be had.
    #[error("min_replicas is {0}; write 1 or 2")]
    MinReplicas(u8),
    /// The epoch was made by a node that is no member.
    #[error("the epoch is of node {0}, which is no member")]
    EpochNode(NodeNumber),
    /// A number that a member has had is to be given again.
    #[error("next_node is {next}, but node {node} is a member; write {} or more", .node.get() + 1)]
    UsedNumber {
        /// The number that would be given next.
        next: u16,
        /// The member with this number or a larger one.
        node: NodeNumber,
    },
    /// All node numbers are used up.
    #[error("all node numbers are used up; they are never given twice")]
    NumbersExhausted,
    /// The node is no member.
    #[error("node {0} is no member of this cluster")]
    NotAMember(NodeNumber),
    /// The node has another role than the change needs.
    #[error("node {node} is {}; only a {} can do this", .role.name(), .needed.name())]
    WrongRole {
        /// The node.
        node: NodeNumber,
        /// Its role.
        role: MemberRole,
        /// The role that is needed.
        needed: MemberRole,
    },
}

/// The members of a cluster in one epoch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClusterDocument {
    /// The cluster: it serves one file system, and has its id.
    pub cluster: FileSystemId,
    /// The epoch. Each change of the document begins one.
    pub epoch: Epoch,
    /// How many persistent copies an acknowledgement needs.
    pub min_replicas: u8,
    /// Whether links are encrypted.
    pub tls: bool,
    /// The number of the next node that is added.
    pub next_node: u16,
    /// The members, by node.
    pub members: Vec<DocumentMember>,
}

impl ClusterDocument {
    /// Returns the document of a new cluster with one member, its writer.
    ///
    /// # Errors
    /// [`DocumentError::Address`].
    pub fn new(cluster: FileSystemId, writer: DocumentMember, tls: bool) -> Result<Self, DocumentError> {
        let node = writer.node;
        let writer = DocumentMember { role: MemberRole::Writer, ..writer };
        let document = Self {
            cluster,
            epoch: Epoch { number: 1, node },
            min_replicas: 2,
            tls,
            next_node: node.get() + 1,
            members: vec![writer],
        };
        document.check()?;
        Ok(document)
    }

    /// Checks that the document is one that a cluster can have.
    ///
    /// # Errors
    /// [`DocumentError`].
    pub fn check(&self) -> Result<(), DocumentError> {
        let writers = self.members.iter().filter(|member| member.role == MemberRole::Writer).count();
        if writers != 1 {
            return Err(DocumentError::Writers(writers));
        }
        let holders = self.members.iter().filter(|member| member.role != MemberRole::Replaced).count();
        if holders > NODES_MAX {
            return Err(DocumentError::TooManyMembers(holders));
        }
        let (mut nodes, mut arenas, mut addresses) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
        for member in &self.members {
            check_address(&member.address)?;
            if !nodes.insert(member.node) {
                return Err(DocumentError::SameNode(member.node));
            }
            if !arenas.insert(member.arena) {
                return Err(DocumentError::SameArena(member.arena));
            }
            // A replaced member's machine may be the new member's.
            if member.role != MemberRole::Replaced && !addresses.insert(&member.address) {
                return Err(DocumentError::SameAddress(member.address.clone()));
            }
            if member.node.get() >= self.next_node {
                return Err(DocumentError::UsedNumber { next: self.next_node, node: member.node });
            }
        }
        if !(1..=2).contains(&self.min_replicas) {
            return Err(DocumentError::MinReplicas(self.min_replicas));
        }
        match self.member(self.epoch.node) {
            Some(_) => Ok(()),
            None => Err(DocumentError::EpochNode(self.epoch.node)),
        }
    }

    /// Returns a member.
    #[must_use]
    pub fn member(&self, node: NodeNumber) -> Option<&DocumentMember> {
        self.members.iter().find(|member| member.node == node)
    }

    /// Returns the member with this arena.
    #[must_use]
    pub fn member_of(&self, arena: ArenaId) -> Option<&DocumentMember> {
        self.members.iter().find(|member| member.arena == arena)
    }

    /// Returns the writer.
    ///
    /// # Panics
    /// If the document was not checked.
    #[must_use]
    pub fn writer(&self) -> &DocumentMember {
        self.members.iter().find(|member| member.role == MemberRole::Writer).expect("a checked document has a writer")
    }

    /// Returns the replica, if there is one.
    #[must_use]
    pub fn replica(&self) -> Option<&DocumentMember> {
        self.members.iter().find(|member| member.role == MemberRole::Replica)
    }

    /// Returns the member at the other end of a member's link: its replica or its writer.
    #[must_use]
    pub fn peer_of(&self, node: NodeNumber) -> Option<&DocumentMember> {
        self.members.iter().find(|member| member.node != node && member.role != MemberRole::Replaced)
    }

    /// Returns the document with a further replica, in the next epoch. The writer proposes it.
    ///
    /// # Errors
    /// [`DocumentError::TooManyMembers`], [`DocumentError::NumbersExhausted`] and those of [`Self::check`].
    pub fn with_replica(&self, arena: ArenaId, address: String) -> Result<Self, DocumentError> {
        let node = NodeNumber::new(self.next_node).ok_or(DocumentError::NumbersExhausted)?;
        let mut next = self.next_epoch(self.writer().node);
        next.next_node += 1;
        next.members.push(DocumentMember { node, arena, address, role: MemberRole::Replica });
        next.check()?;
        Ok(next)
    }

    /// Returns the document with another replica in place of the present one, in the next epoch.
    ///
    /// # Errors
    /// As for [`Self::with_replica`].
    pub fn with_replacement(&self, arena: ArenaId, address: String) -> Result<Self, DocumentError> {
        let mut without = self.clone();
        let replicas = without.members.iter_mut().filter(|member| member.role == MemberRole::Replica);
        replicas.for_each(|member| member.role = MemberRole::Replaced);
        without.with_replica(arena, address)
    }

    /// Returns the document without a member that holds no copy that counts, in the next epoch.
    ///
    /// # Errors
    /// [`DocumentError::NotAMember`]; [`DocumentError::WrongRole`] for the writer.
    pub fn without_member(&self, node: NodeNumber) -> Result<Self, DocumentError> {
        let member = self.member(node).ok_or(DocumentError::NotAMember(node))?;
        if member.role == MemberRole::Writer {
            return Err(DocumentError::WrongRole { node, role: member.role, needed: MemberRole::Replica });
        }
        let mut next = self.next_epoch(self.writer().node);
        next.members.retain(|member| member.node != node);
        next.check()?;
        Ok(next)
    }

    /// Returns the document in which the replica is the writer and the writer is replaced, in the next epoch.
    ///
    /// # Errors
    /// [`DocumentError::NotAMember`], [`DocumentError::WrongRole`].
    pub fn with_promotion(&self, node: NodeNumber) -> Result<Self, DocumentError> {
        let member = self.member(node).ok_or(DocumentError::NotAMember(node))?;
        if member.role != MemberRole::Replica {
            return Err(DocumentError::WrongRole { node, role: member.role, needed: MemberRole::Replica });
        }
        let mut next = self.next_epoch(node);
        for member in &mut next.members {
            member.role = match member.role {
                MemberRole::Writer => MemberRole::Replaced,
                MemberRole::Replica if member.node == node => MemberRole::Writer,
                role => role,
            };
        }
        next.check()?;
        Ok(next)
    }

    /// Returns the document with another `min_replicas`, in the next epoch. The writer proposes it.
    ///
    /// # Errors
    /// [`DocumentError::MinReplicas`].
    pub fn with_min_replicas(&self, min_replicas: u8) -> Result<Self, DocumentError> {
        let next = Self { min_replicas, ..self.next_epoch(self.writer().node) };
        next.check()?;
        Ok(next)
    }

    fn next_epoch(&self, node: NodeNumber) -> Self {
        let number = self.epoch.number.checked_add(1).expect("epochs are made by hand, one at a time");
        Self { epoch: Epoch { number, node }, ..self.clone() }
    }
}

/// Checks that an address has a host and a port.
fn check_address(address: &str) -> Result<(), DocumentError> {
    let wrong = || DocumentError::Address(address.to_owned());
    let (host, port) = address.rsplit_once(':').ok_or_else(wrong)?;
    let is_bracketed = host.starts_with('[') && host.ends_with(']');
    let is_host = !host.is_empty()
        && (is_bracketed || !host.contains([':', '[', ']']))
        && host.bytes().all(|byte| byte.is_ascii_graphic());
    match port.parse::<u16>() {
        Ok(1..) if is_host && port.bytes().all(|byte| byte.is_ascii_digit()) => Ok(()),
        _ => Err(wrong()),
    }
}
