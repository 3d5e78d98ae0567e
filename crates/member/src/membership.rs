//! The place of a node in its cluster, as its files say.

use std::io::ErrorKind;
use std::sync::Arc;

use ashlar_cluster::chain::{LinkProblem, PEER_VERSIONS};
use ashlar_cluster::{ClusterDocument, DocumentMember, HardState, MemberRole};
use ashlar_fabric::{Fabric, FabricError, FabricIdentity, Member, NodeCredentials, Security, TcpFabric};
use ashlar_pmem::Arena;
use ashlar_replica::mirror::ClusterFiles;
use ashlar_types::{ArenaId, Epoch, NodeNumber};
use ashlar_wire::{ClusterReport, MemberReport, NodeStanding};

use crate::error::MemberError;

/// The next commands for an administrator of a node that was replaced.
pub const MAKE_ANEW: &str = "there, run 'ashlar node add', and here 'ashlar node join' with a new arena";

/// Returns why a link is down; `else_cause` if it was not up yet.
pub fn describe_cause(problem: Option<&LinkProblem>, else_cause: &str) -> String {
    problem.map_or_else(|| else_cause.to_owned(), LinkProblem::to_string)
}

/// A node's place in its cluster.
#[derive(Clone, Debug)]
pub struct Membership {
    /// Its files.
    pub files: ClusterFiles,
    /// The document.
    pub document: ClusterDocument,
    /// Its hard state: the epochs that it has seen, and its promises.
    pub state: HardState,
    /// The node.
    pub node: NodeNumber,
}

impl Membership {
    /// Reads it from an arena; `None` if the arena belongs to no cluster.
    ///
    /// # Errors
    /// [`MemberError`]: the files can't be read, or are of another file system or arena.
    pub fn open(arena: &Arena) -> Result<Option<Self>, MemberError> {
        let files = ClusterFiles::of(arena.dir());
        if !files.is_member() {
            return Ok(None);
        }
        let (document, summary) = (files.document()?, arena.summary());
        let path = files.directory().to_owned();
        if document.cluster != summary.file_system.id {
            let (found, expected) = (document.cluster, summary.file_system.id);
            return Err(MemberError::ForeignDocument { path, found, expected });
        }
        let id = ArenaId(summary.id);
        let member = document.member_of(id).ok_or(MemberError::NotAMember { path, arena: id })?;
        let node = member.node;
        let state = files.hard_state()?;
        Ok(Some(Self { files, document, state, node }))
    }

    /// Returns this member.
    ///
    /// # Panics
    /// Never: the document has it.
    #[must_use]
    pub fn own(&self) -> &DocumentMember {
        self.document.member(self.node).expect("the document was checked for it")
    }

    /// Returns its role. One that a newer epoch has replaced does not know it from its document.
    #[must_use]
    pub fn role(&self) -> MemberRole {
        let is_superseded = self.state.superseding(self.document.epoch).is_some();
        if is_superseded { MemberRole::Replaced } else { self.own().role }
    }

    /// Starts the fabric, which listens at the member's address.
    ///
    /// # Errors
    /// [`MemberError::Credentials`], [`MemberError::Fabric`].
    pub fn start_fabric(&self) -> Result<Arc<dyn Fabric>, MemberError> {
        let own = self.own();
        let identity = FabricIdentity {
            cluster: self.document.cluster,
            node: own.node,
            arena: own.arena,
            epoch: self.document.epoch,
            versions: PEER_VERSIONS,
        };
        let security = match self.document.tls {
            true => Security::Tls(NodeCredentials::load(self.files.directory())?),
            false => Security::Plain,
        };
        let fabric = TcpFabric::new(identity, &security)?;
        let others = self.document.members.iter().filter(|member| member.node != own.node);
        let members = others.map(|member| Member {
            node: member.node,
            arena: member.arena,
            address: member.address.clone(),
            // A replaced member must learn of it, by a link that carries nothing else.
            oldest_epoch: Epoch::default(),
        });
        fabric.set_members(members.collect());
        fabric.listen(&own.address).map_err(|error| self.describe_listen(error))?;
        Ok(Arc::new(fabric))
    }

    /// Names the arena and the remedy if another program listens at the node's address.
    fn describe_listen(&self, error: FabricError) -> MemberError {
        match error {
            FabricError::Listen { address, error } if error.kind() == ErrorKind::AddrInUse => {
                let arena = self.files.directory().parent().unwrap_or(self.files.directory()).to_owned();
                MemberError::AddressInUse { arena, node: self.node, address }
            }
            error => error.into(),
        }
    }

    /// Returns the report of a node that was replaced. Another node fills in what it knows besides.
    #[must_use]
    pub fn report(&self) -> ClusterReport {
        // The document of a node that was replaced may be older than that. A newer epoch is that of its successor.
        let newer = self.state.superseding(self.document.epoch);
        let role_of = |member: &DocumentMember| match newer {
            _ if member.node == self.node => self.role(),
            Some(epoch) if member.node == epoch.node => MemberRole::Writer,
            _ => member.role,
        };
        let members = self.document.members.iter().map(|member| MemberReport {
            node: member.node.get(),
            address: member.address.clone(),
            role: role_of(member).name().to_owned(),
        });
        ClusterReport {
            cluster: self.document.cluster.to_string(),
            node: self.node.get(),
            epoch: (self.document.epoch.number, self.document.epoch.node.get()),
            min_replicas: self.document.min_replicas,
            members: members.collect(),
            standing: NodeStanding::Replaced,
            is_linked: false,
            in_sync: false,
            is_alone: false,
            journal_end: None,
            replication: None,
            copied_bytes: None,
            problems: Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use ashlar_types::FileSystemId;

    use super::*;

    /// The node that has replaced this one may be on the same machine, at the same address.
    #[test]
    fn used_address_names_arena_address_and_remedy() {
        let other = TcpListener::bind("127.0.0.1:0").expect("a port");
        let (node, address) = (NodeNumber::FIRST, other.local_addr().expect("an address").to_string());
        let own = DocumentMember { node, arena: ArenaId(1), address: address.clone(), role: MemberRole::Writer };
        let document = ClusterDocument::new(FileSystemId(7), own, false).expect("a document");
        let files = ClusterFiles::of("/srv/arena".as_ref());
        let place = Membership { files, document, state: HardState::default(), node };
        let error = place.start_fabric().map(drop).expect_err("the address is in use");
        assert!(error.is_temporary());
        let said = error.to_string();
        for words in ["arena /srv/arena is node 0", &address, "remove this arena or move it away"] {
            assert!(said.contains(words), "{said}");
        }
    }
}
