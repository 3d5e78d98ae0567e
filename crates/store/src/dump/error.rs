//! Errors of dumps.

use std::io;

use thiserror::Error;

use crate::StoreError;

/// Why a dump can't be written, or two can't be compared.
#[derive(Debug, Error)]
pub enum DumpError {
    /// The store can't be read.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The lines can't be read or written.
    #[error("the dump cannot be read or written: {0}")]
    Io(#[from] io::Error),
    /// A line is no dump's.
    #[error("line {number} of the dump is not understood: {text}")]
    Malformed {
        /// Its number, from 1 on.
        number: u64,
        /// Its beginning.
        text: String,
    },
    /// A line stands before one that it must follow.
    #[error("line {number} of the dump is out of order")]
    Disordered {
        /// Its number, from 1 on.
        number: u64,
    },
    /// The dump was written by a release that this one does not understand.
    #[error("the dump has version {found}; this release reads version {supported}")]
    Version {
        /// The version found.
        found: String,
        /// The version that this release writes.
        supported: u32,
    },
    /// The last line is missing.
    #[error("the dump is cut off after {lines} lines")]
    CutOff {
        /// The lines that are there.
        lines: u64,
    },
    /// The lines are not those that were written.
    #[error("the dump's lines do not have the hash in its last line")]
    WrongHash,
}
