//! Failures of a metadata database, and those that a test plans.

use thiserror::Error;

/// Why a metadata database failed.
#[derive(Debug, Error)]
pub enum DatabaseError {
    /// Its map has no room for the rows. Nothing of the transaction is committed.
    #[error("it has no room for the commit; delete files or use a larger arena")]
    Full,
    /// A planned crash has ended it. Only its state after a crash can be used.
    #[error("it has crashed as planned")]
    Crashed,
    /// LMDB failed.
    #[error(transparent)]
    Lmdb(heed::Error),
}

/// A planned failure of a commit.
///
/// LMDB writes new pages first and its meta page last, so no crash leaves a mix of two states.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommitFault {
    /// The process crashes before the commit is durable: the state before it is left.
    Cut,
    /// The process crashes while the meta page is written: either page may win.
    Torn {
        /// The new page wins: the transaction is committed, and its writer never learns of it.
        is_new: bool,
    },
    /// The database reports that it is full. It goes on, with the state before.
    Full,
}
