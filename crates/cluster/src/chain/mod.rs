//! The chain of two: how a writer and its replica agree where the copy of the journal goes on, and keep it level.
//!
//! ```text
//! replica                     writer
//!   Follow  ────────────────→          epoch, min_replicas, lineage and end of the copy
//!           ←────────────────   Lead   whether it is alone, its lineage, where the copy goes on
//!   Ready   ────────────────→          the rest of the copy is cut
//!           ←────────────────   Frames …
//!   Ack …   ────────────────→          durable, committed
//!           ←────────────────   InSync all that was acknowledged to sessions is there
//!           ←────────────────   Stopped, the writer ends in order
//!   StopNoted ──────────────→
//! ```
//!
//! Both send a `Beat` when they have sent nothing else for a while. A peer that is silent for too long, or that leaves
//! frames without an acknowledgement, counts as away: the link is closed, and the replica connects again.

mod follower;
mod leader;
mod messages;
mod problem;
mod timing;

pub use follower::{CopyView, Follower, FollowerEffect};
pub use leader::{FramesWanted, JournalView, Leader, LeaderEffect, ReplicaProgress};
pub use messages::{
    CopyOffer, CopyRoom, CopyTarget, FRAMES_BYTES_MAX, Follow, Lead, MessageError, PEER_VERSIONS, PeerMessage,
    RefusedLead,
};
pub use problem::LinkProblem;
pub use timing::ChainTiming;
