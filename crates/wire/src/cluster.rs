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
        /// Gives up the updates that the replica may lack.
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

/// The standing of a node: whether it serves, and if not, its reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NodeStanding {
    /// A writer that serves sessions.
    Serving,
    /// A writer that serves none until its replica answers, which may have taken over.
    Waiting,
    /// A replica that takes its writer's frames.
    Following,
    /// A replica that takes a copy of the whole file system.
    Copying,
    /// A replica without a link to its writer.
    Away,
    /// A node that another one has replaced.
    Replaced,
}

impl NodeStanding {
    /// All of them.
    pub const ALL: [Self; 6] =
        [Self::Serving, Self::Waiting, Self::Following, Self::Copying, Self::Away, Self::Replaced];

    /// Returns its name, as in JSON.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Serving => "serving",
            Self::Waiting => "waiting",
            Self::Following => "following",
            Self::Copying => "copying",
            Self::Away => "away",
            Self::Replaced => "replaced",
        }
    }
}

/// How far the replica is. All positions are bytes of the journal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReplicationReport {
    /// The position up to which the replica's copy is durable.
    pub durable: u64,
    /// The position up to which the replica has applied it; a writer doesn't know.
    pub applied: Option<u64>,
    /// The position up to which the replica has committed it.
    pub committed: u64,
    /// Milliseconds for which the oldest frame has waited for its acknowledgement; a replica doesn't know.
    pub lag_ms: Option<u64>,
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
    /// The members. A node that was replaced shows itself as such, even if its document is older.
    pub members: Vec<MemberReport>,
    /// The standing of this node.
    pub standing: NodeStanding,
    /// The link to the other member is up.
    pub is_linked: bool,
    /// The replica is in sync.
    pub in_sync: bool,
    /// The writer acknowledges without its replica.
    pub is_alone: bool,
    /// The end of this node's journal, or of its copy; `None` at a node that was replaced.
    pub journal_end: Option<u64>,
    /// How far the replica is, while that is known.
    pub replication: Option<ReplicationReport>,
    /// Bytes of a copy of the whole file system that were sent or taken so far, while one is made.
    pub copied_bytes: Option<u64>,
    /// Problems, each with the next command.
    pub problems: Vec<String>,
}

impl ClusterReport {
    /// Returns this node's role: `writer`, `replica` or `replaced`.
    #[must_use]
    pub fn own_role(&self) -> &str {
        self.members.iter().find(|member| member.node == self.node).map_or("replaced", |member| &member.role)
    }

    /// Returns the bytes of a writer's journal that its replica has not made durable.
    ///
    /// Returns `None` while the replica is away, and at the replica, which doesn't know the writer's end.
    #[must_use]
    pub fn lag_bytes(&self) -> Option<u64> {
        let progress = self.replication.filter(|_| self.own_role() == "writer")?;
        Some(self.journal_end?.saturating_sub(progress.durable))
    }

    /// Returns the bytes of this node's journal, or of its copy, that the replica has not committed to its store.
    #[must_use]
    pub fn uncommitted_bytes(&self) -> Option<u64> {
        Some(self.journal_end?.saturating_sub(self.replication?.committed))
    }
}
