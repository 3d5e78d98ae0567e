//! Record locks (`fcntl`) and `flock` locks.
//!
//! Record locks belong to an owner (a process, or an open file description), cover ranges of bytes, and split and merge
//! as POSIX says. `flock` locks belong to an open file description and cover the file. The two kinds do not interact.
//!
//! Invariants:
//! - No byte is write-locked by one owner and locked in any mode by another.
//! - An owner's spans on a file don't overlap, and adjacent spans of one mode are merged.
//! - A request that waits conflicts with a held lock.
//! - No wait for a record lock closes a circle of owners that wait for each other.
//!
//! A lock that is free is granted even though other owners wait for more, as on Linux. Waiting owners are served in the
//! order of their requests.
//!
//! If no other session has record locks on a file, a session may have them delegated. Then it changes them alone, in
//! memory that it shares with SharedFS. The table receives them when another owner asks ([`Delegations`]).
//!
//! Source: `fcntl(2)`, `flock(2)`, POSIX.1-2024 `fcntl`.

mod delegations;
mod spans;
mod table;
#[cfg(test)]
mod tests;

pub use delegations::{DelegationSlots, Delegations};
pub use table::{HeldLock, LockLimits, LockOutcome, LockOwner, LockRequest, LockTable, WaiterId, Woken};
