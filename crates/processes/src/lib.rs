//! The processes behind sessions, and the machine's clocks, as the kernel shows them.
//!
//! Purpose: a node without I/O asks by a trait whether a process is gone, and takes the time from outside. This crate
//! answers on Linux: it identifies the peer of a socket, finds processes, and reports their ends.
//!
//! Invariants:
//! - The number of a process never passes to another one unnoticed: a descriptor of the process comes first.
//!
//! Not here: decisions on sessions ([`ashlar_node`]).
#![forbid(unsafe_code)]

pub mod clock;
pub mod process;
pub mod process_watcher;
