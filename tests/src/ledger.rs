//! The ledger: a random workload in one directory, whose every acknowledged update stands in a journal outside.
//!
//! The writer ([`writer`]) draws an operation, writes `begin N` to the journal, performs it, and writes `end N` when
//! the call has returned. Operations are drawn by a generator from a seed and the state so far, so that the checker
//! ([`checker`]) draws the same ones and knows the state after each of them without asking the file system.
//!
//! After a kill, what stands in the directory must be the state after the last acknowledged operation, or the one after
//! the operation that was under way: nothing acknowledged lost, no order changed, nothing half done. After a power cut
//! it may be any state from the last acknowledged fsync on, but always one of them: a prefix.

pub mod checker;
pub mod model;
pub mod writer;
