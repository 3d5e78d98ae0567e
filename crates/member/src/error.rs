//! Why a member can't run.

use std::io;
use std::path::PathBuf;

use ashlar_cluster::{CoordinatorError, DocumentError};
use ashlar_fabric::{CredentialsError, FabricError};
use ashlar_node::journal::ReplayError;
use ashlar_pmem::ArenaError;
use ashlar_replica::ReplicaError;
use ashlar_replica::mirror::ClusterFilesError;
use ashlar_store::StoreError;
use ashlar_types::{ArenaId, FileSystemId, NodeNumber};
use thiserror::Error;

/// Why a member can't run.
#[derive(Debug, Error)]
pub enum MemberError {
    /// A file of the cluster can't be used.
    #[error(transparent)]
    Files(#[from] ClusterFilesError),
    /// The document can't be changed.
    #[error(transparent)]
    Coordinator(#[from] CoordinatorError),
    /// The document is of another file system.
    #[error("{path} is of cluster {found}, and the arena belongs to file system {expected}; restore the right file")]
    ForeignDocument {
        /// The document's directory.
        path: PathBuf,
        /// The document's cluster.
        found: FileSystemId,
        /// The arena's file system.
        expected: FileSystemId,
    },
    /// The arena is not among the members.
    #[error(
        "arena {arena} is no member of the cluster in {path}; add it with 'ashlar node add', or remove the directory"
    )]
    NotAMember {
        /// The document's directory.
        path: PathBuf,
        /// The arena.
        arena: ArenaId,
    },
    /// The arena belongs to a cluster already.
    #[error("{path} is there already: the arena belongs to a cluster; see 'ashlar status'")]
    IsMember {
        /// The document's directory.
        path: PathBuf,
    },
    /// The arena belongs to no cluster.
    #[error("arena {path} belongs to no cluster; make one with 'ashlar cluster init'")]
    NoCluster {
        /// The arena.
        path: PathBuf,
    },
    /// The cluster has a replica.
    #[error(
        "node {replica} is the replica already; if it is lost for good, add another one in its place with --replace"
    )]
    HasReplica {
        /// The replica.
        replica: NodeNumber,
    },
    /// Another node serves.
    #[error("node {writer} is the writer; run this there")]
    NotTheWriter {
        /// The writer.
        writer: NodeNumber,
    },
    /// A document can't be.
    #[error(transparent)]
    Document(#[from] DocumentError),
    /// An invitation can't be read.
    #[error("{path} is no invitation: {problem}; make one with 'ashlar node add'")]
    Invitation {
        /// The file.
        path: PathBuf,
        /// The problem.
        problem: String,
    },
    /// The store can't be opened.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The certificates can't be used.
    #[error(transparent)]
    Credentials(#[from] CredentialsError),
    /// Another program listens at the node's address: often the node that has replaced this one.
    #[error(
        "arena {arena} is node {node}, and another program listens at its address {address}; if that is the node that \
         has replaced this one, remove this arena or move it away, otherwise end that program"
    )]
    AddressInUse {
        /// The arena.
        arena: PathBuf,
        /// The node.
        node: NodeNumber,
        /// Its address.
        address: String,
    },
    /// The fabric can't be started.
    #[error(transparent)]
    Fabric(#[from] FabricError),
    /// The replica can't begin.
    #[error(transparent)]
    Replica(#[from] ReplicaError),
    /// The replica has run, and can't go on.
    #[error("the replica can't go on: {0}")]
    Failed(#[source] ReplicaError),
    /// The arena can't be opened.
    #[error(transparent)]
    Arena(#[from] ArenaError),
    /// The operating system refuses something.
    #[error("{what}: {error}")]
    System {
        /// The attempt that failed.
        what: &'static str,
        /// The cause.
        error: io::Error,
    },
}

impl MemberError {
    /// Returns whether another start may succeed a while later: the system lacks something at the moment.
    #[must_use]
    pub fn is_temporary(&self) -> bool {
        match self {
            Self::Store(StoreError::Io { .. })
            | Self::Replica(ReplicaError::Store(StoreError::Io { .. }) | ReplicaError::System { .. })
            | Self::Replica(ReplicaError::Journal(ReplayError::Store(StoreError::Io { .. })))
            | Self::Fabric(FabricError::Listen { .. })
            | Self::AddressInUse { .. }
            | Self::System { .. } => true,
            Self::Arena(error) | Self::Replica(ReplicaError::Arena(error)) => {
                matches!(error, ArenaError::InUse { .. } | ArenaError::Io { .. } | ArenaError::NoSpace { .. })
            }
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn full_disk_is_temporary_and_foreign_journal_is_not() {
        let source = || io::Error::from(io::ErrorKind::StorageFull);
        let full = StoreError::Io { what: "no room for metadata", source: source() };
        assert!(MemberError::from(ReplicaError::from(ReplayError::from(full))).is_temporary());
        let listen = FabricError::Listen { address: "10.0.0.1:7900".into(), error: source() };
        assert!(MemberError::from(listen).is_temporary());
        assert!(!MemberError::from(ReplicaError::from(ReplayError::OtherCopy)).is_temporary());
    }
}
