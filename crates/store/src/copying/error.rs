//! Errors of a full copy.

use thiserror::Error;

use crate::StoreError;

/// Why a copy can't go on. It must be begun anew.
#[derive(Debug, Error)]
pub enum FullCopyError {
    /// The bytes are no items of this version.
    #[error("the copy of the file system can't be read: {0}")]
    Encoding(&'static str),
    /// An item says what no store holds.
    #[error("the copy of the file system has something that no store holds: {0}")]
    Item(&'static str),
    /// An item was not stored, so the copy can never be whole.
    #[error("a part of the copy was not stored; the copy must be begun anew")]
    Failed,
    /// Rows are missing at the end, or too many.
    #[error("the copy of the file system has {found} {what}, and the writer has {expected}")]
    Incomplete {
        /// Inodes or entries.
        what: &'static str,
        /// How many the copy has.
        found: u64,
        /// How many the writer has.
        expected: u64,
    },
    /// The writer has changed more rows than it notes.
    #[error("more than {0} rows have changed since a pass of the copy began; the copy must be begun anew")]
    TooManyTouched(usize),
    /// A store failed: the writer's can't be read, or the replica's can't be written.
    #[error(transparent)]
    Store(#[from] StoreError),
}
