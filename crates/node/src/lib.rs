//! SharedFS without I/O: all decisions of a node, as a state machine.
//!
//! Purpose: the same code decides in the daemon, in the simulator and in a replica. Events go in (`handle_*`,
//! [`Node::begin_request`]), answers and effects come out ([`Node::advance`], [`NodeCore::poll_effect`]). A shell
//! performs the effects and reports the time. A request that can't be answered yet is a row in the table of pending
//! requests. It waits for an event or for a time, and no thread waits in here.
//!
//! Invariants:
//! - The node knows no clock, thread, lock, file, socket or randomness. The shell reports the time ([`NodeTime`]) and
//!   lends memory that it has mapped.
//! - A record is validated and applied from one private copy. A session that changes its log meanwhile changes nothing.
//! - A forged record fences its own session and no other one. Being slow or stopped is no violation.
//! - Identity, leases, inode ranges and credit of a session stand in memory that SharedFS alone writes and that
//!   outlives it. So a kill at any instruction loses nothing.
//!
//! Non-goals: the meaning of updates (`ashlar-update`), media (`ashlar-store`), sockets, files and threads
//! (`ashlar-daemon`), other nodes.
//!
//! Source: `docs/format-session.md`; Assise §3 (SharedFS).
#![forbid(unsafe_code)]

pub mod access;
pub mod blame;
pub mod counters;
pub mod digest;
pub mod effects;
#[cfg(fuzzing)]
pub mod fuzzing;
#[cfg(all(test, not(fuzzing)))]
mod fuzzing;
pub mod invariants;
pub mod journal;
pub mod leases;
pub mod limits;
pub mod locks;
pub mod node;
pub mod node_core;
pub mod pending;
pub mod records;
pub mod recovery;
pub mod sessions;
pub mod space;
pub mod time;

pub use effects::NodeEffect;
pub use limits::NodeLimits;
pub use node::Node;
pub use node_core::NodeCore;
pub use recovery::state::RecoveryPhase;
pub use time::NodeTime;
