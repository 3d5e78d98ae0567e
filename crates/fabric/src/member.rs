//! The nodes of a cluster, as a fabric needs to know them.

use ashlar_types::{ArenaId, Epoch, FileSystemId, NodeNumber, VersionRange};

/// This side of all of a node's links.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FabricIdentity {
    /// The cluster: it serves one file system.
    pub cluster: FileSystemId,
    /// The node.
    pub node: NodeNumber,
    /// The node's arena.
    pub arena: ArenaId,
    /// The newest epoch that the node knows.
    pub epoch: Epoch,
    /// The versions of the protocol above the fabric that the node speaks.
    pub versions: VersionRange,
}

/// Another node of the cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// The node.
    pub node: NodeNumber,
    /// Its arena. A node with another one is refused.
    pub arena: ArenaId,
    /// Its address, `HOST:PORT`.
    pub address: String,
    /// The oldest epoch in which it may connect: a node that a successor has replaced has an older one.
    pub oldest_epoch: Epoch,
}
