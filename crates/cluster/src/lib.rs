//! The members of a cluster, and what a node may do.
//!
//! Purpose: the *document* says which arenas are members, which of them is the writer, and in which epoch
//! ([`ClusterDocument`]). The *hard state* of a node says what it has seen and promised ([`HardState`]). From both, and
//! from the state of the link, [`WriterAuthority`] decides whether the writer serves, and how many copies an
//! acknowledgement needs. [`check_promotion`] decides whether a replica may take over.
//!
//! Invariants:
//! - One writer of the truth: a node that was the writer serves only after its replica has confirmed the epoch in this
//!   run, or if *alone* was recorded before, or by force.
//! - An acknowledgement without the replica follows a durable hard state that says so.
//! - The hard state with *alone* is removed, durably, before the replica learns that it is in sync.
//! - An epoch's number only grows. A node that has seen a newer epoch, in which it is not the writer, never serves
//!   again.
//! - A node number is given once, and so is an arena id.
//!
//! [`chain`] has both sides of the link between a writer and its replica.
//!
//! Not here: files, sockets and clocks; the journal and its copy (`ashlar_node::journal`); leases between nodes.
//!
//! Source: `docs/replication.md`; Assise §3.4 (cluster manager, fail-over).
#![forbid(unsafe_code)]

mod authority;
pub mod chain;
mod coordinator;
mod document;
mod hard_state;
mod promotion;
#[cfg(test)]
mod tests;
mod text;

pub use authority::{AuthorityEffect, CopiesNeeded, Standing, WriterAuthority};
pub use coordinator::{Coordinator, CoordinatorError, DocumentVersion};
pub use document::{ClusterDocument, DocumentError, DocumentMember, MemberRole, NODES_MAX};
pub use hard_state::{AloneSince, HardState};
pub use promotion::{LinkEvidence, PromotionRefusal, check_promotion};
pub use text::TextError;
