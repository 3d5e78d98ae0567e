//! A node's journal and its replica, in arenas of one machine or of two.
//!
//! Purpose: the node decides which frames there are ([`ashlar_node::journal`]). This crate gives them memory: the file
//! of the journal in an arena, and a replica that has an arena of its own ([`Shadow`]). [`mirror`] carries the journal
//! to a replica on another machine. A replica without a tree gets a full copy ([`begin_full_copy`]).
//!
//! Invariants:
//! - A journal's file is there whole or not at all, after a crash too.
//! - A replica applies, and so commits, nothing that is not durable on both sides.
//! - A start applies the journal's frames before the sessions' logs.
//!
//! Not here: what a writer and its replica may do (`ashlar_cluster`), and sockets (`ashlar_fabric`).
//!
//! Source: `docs/format-journal.md`; Assise §3.2 (replication).
#![forbid(unsafe_code)]

mod error;
mod full_copy;
mod journal_file;
pub mod mirror;
mod shadow;

pub use error::ReplicaError;
pub use full_copy::{CopyOrigin, begin_full_copy, finish_full_copy};
pub use journal_file::{forget_journal, open_copy, open_journal};
pub use shadow::Shadow;
