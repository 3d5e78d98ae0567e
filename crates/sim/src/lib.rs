//! The deterministic simulator: one machine, or one with a replica, under faults, all from one seed.
//!
//! Purpose: SharedFS's decisions ([`ashlar_node`]) run over a store and sessions in memory that know which states a
//! crash may leave. Scripted clients play LibFS: they ask for leases, check them, log updates, sync and end. One event
//! queue with virtual time decides what happens when. Processes die and stop, SharedFS is killed and started again, the
//! machine loses its power, and commits are slow, refused or cut. Checkers compare everything with a history of all
//! updates. A replica follows the node's journal over a link that delays, damages and cuts, and has equal trees at
//! equal positions.
//!
//! Invariants:
//! - A seed gives the same run, event by event: there is no clock, thread, file or other source of randomness.
//! - A client does nothing that LibFS does not do. So a fenced session is a defect.
//! - Planted bugs ([`faults::SimBug`]) stand in this crate alone.
//!
//! Non-goals: sockets, kernel mounts and real files (`tests/` runs whole processes), other nodes that write.
//!
//! Source: `docs/testing.md`, section "The simulator".
#![forbid(unsafe_code)]

pub mod client;
pub mod client_locks;
pub mod faults;
pub mod history;
pub mod intent;
mod journal_plants;
pub mod machine;
pub mod minimize;
pub mod quota_balances;
pub mod random;
pub mod replica_machine;
pub mod simulation;
pub mod tree_picture;
