//! The ledger: a random workload in one directory, with a journal outside.
//!
//! The journal contains every acknowledged update. The writer ([`writer`]) draws an operation, writes `begin N` to the
//! journal, performs it, and writes `end N` when the call has returned. A generator draws operations from a seed and
//! the state so far. So the checker ([`checker`]) draws the same ones, and knows the state after each without asking
//! the file system.
//!
//! After a kill, the directory must hold the state after the last acknowledged operation, or after the operation that
//! was under way: nothing acknowledged is lost, no order changes, nothing is half done. After a power cut it may hold
//! any state from the last acknowledged fsync on, but always one of these states: a prefix.

pub mod checker;
pub mod model;
pub mod writer;
