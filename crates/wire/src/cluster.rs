//! Commands about a cluster, and its state, for the command line.

use serde::{Deserialize, Serialize};

/// A command for a node of a cluster.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ClusterCommand {
    /// Adds a replica. The answer is its invitation.
    AddReplica {
        /// Its address.
        address: String,
        /// It takes the place of the present replica.
        replaces: bool,
    },
    /// Lets a replica take over.
    Promote {
        /// The administrator gives up updates that the replica may lack.
        force: bool,
    },
    /// Lets a writer go on without its replica.
    Force,
}

/// A member of a cluster, for people.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemberReport {
    /// The node.
    pub node: u16,
    /// Its address.
    pub address: String,
    /// Its role: `writer`, `replica` or `replaced`.
    pub role: String,
}

/// How far the replica is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReplicationReport {
    /// The end of the journal, or of its copy.
    pub end: u64,
    /// The position up to which the replica's copy is durable.
    pub durable: u64,
    /// The position up to which the replica has applied it; 0 if that is not known here.
    pub applied: u64,
    /// The position up to which the replica has committed it.
    pub committed: u64,
    /// Milliseconds for which the oldest frame has waited for its acknowledgement.
    pub lag_ms: u64,
}

/// The state of a cluster, as one node knows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClusterReport {
    /// The cluster.
    pub cluster: String,
    /// This node.
    pub node: u16,
    /// The epoch's number, and the node that made it.
    pub epoch: (u32, u16),
    /// Copies that an acknowledgement needs.
    pub min_replicas: u8,
    /// The members.
    pub members: Vec<MemberReport>,
    /// The standing of this node: `serving`, `waiting`, `following`, `copying`, `away` or `replaced`.
    pub standing: String,
    /// The link to the other member is up.
    pub is_linked: bool,
    /// The replica is in sync.
    pub in_sync: bool,
    /// The writer acknowledges without its replica.
    pub is_alone: bool,
    /// How far the replica is, while that is known.
    pub replication: Option<ReplicationReport>,
    /// Bytes of a copy of the whole file system that were sent or taken so far, while one is made.
    pub copied_bytes: Option<u64>,
    /// Problems, each with the next command.
    pub problems: Vec<String>,
}
