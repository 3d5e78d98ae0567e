//! Record locks (`fcntl`) and `flock` locks.
//!
//! Record locks belong to an owner (a process, or an open file description), cover ranges of bytes, and split and
//! merge as POSIX says; `flock` locks belong to an open file description and cover the file. The two don't see each
//! other.
//!
//! Invariants: no byte is locked to write by one owner and locked at all by another; an owner's spans on a file don't
//! overlap, and neighbours of one mode are one; a request that waits conflicts with a held lock; no wait for a record
//! lock closes a circle of owners that wait for each other.
//!
//! A lock that can be had is given even though others wait for more, as Linux does; those who wait are served in the
//! order in which they came.
//!
//! A session may have a file's record locks delegated, where nobody else has any: then it changes them alone, in memory that it shares with
//! SharedFS, and the table learns of them when somebody else asks ([`Delegations`]).
//!
//! Source: `fcntl(2)`, `flock(2)`, POSIX.1-2024 `fcntl`.

mod delegations;
mod spans;
mod table;
#[cfg(test)]
mod tests;

pub use delegations::{Delegations, Slots};
pub use spans::ByteRange;
pub use table::{
    HeldLock, LockAction, LockKind, LockLimits, LockMode, LockOutcome, LockOwner, LockRequest, LockTable, WaiterId,
    Woken,
};
