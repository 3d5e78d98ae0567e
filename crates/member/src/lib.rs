//! A member of a cluster: what it is at a start, and its life while it serves no sessions.
//!
//! Purpose: an arena that has a document is a member ([`Membership`]). Its node is the writer, which `ashlar-daemon`
//! runs with a [`ashlar_replica::mirror::LeaderService`]; or it serves no sessions ([`run_standby`]): a replica follows
//! its writer, and a replaced node waits to be made anew. A writer that may not serve yet waits too
//! ([`StandbyServer`]).
//!
//! Invariants:
//! - A process that asks for a session at such a node gets a sentence that names the serving node and the next command.
//! - A promotion is durable in the document before the node serves.
//!
//! Not here: sessions, and what may be promoted (`ashlar_cluster`).
//!
//! Source: `docs/replication.md`.
#![forbid(unsafe_code)]

mod error;
mod invitation;
mod leading_report;
mod membership;
mod replica_process;
mod standby;
mod standby_report;
mod standby_server;

pub use error::MemberError;
pub use invitation::{Invitation, found_cluster};
pub use leading_report::report_leading;
pub use membership::Membership;
pub use replica_process::{StandbyEnd, run_standby};
pub use standby_server::{StandbyNode, StandbyServer};
