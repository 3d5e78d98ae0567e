//! Errors of a log.

use std::io;

use ashlar_pmem::OutOfBounds;
use ashlar_types::LogPosition;
use thiserror::Error;

/// The reason why an append failed. Nothing of the record is visible, now or after a crash.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum AppendError {
    /// SharedFS has sealed the log since the seal count was read. Leases may be lost: check them and try again.
    #[error("the log was sealed meanwhile")]
    Sealed,
    /// The log has no room: it must be digested, and its writer must release the bytes to which it still refers.
    #[error("the log is full; {needed} more bytes must become free")]
    Full {
        /// Bytes that must become free before the record fits; 0 if only a place for one more append is missing.
        needed: u64,
    },
    /// The log is not ready at the record's position ([`crate::Log::record_ready`]).
    #[error("the log is not ready up to {upto}")]
    Unready {
        /// The position up to which it must be ready.
        upto: LogPosition,
    },
    /// SharedFS allows no append so far ([`crate::Log::set_limit`]).
    #[error("the log is limited, and appends up to {upto} must be allowed")]
    Limited {
        /// The position up to which appends must be allowed.
        upto: LogPosition,
    },
    /// No log of this size can ever hold such a record.
    #[error("a record of this length does not fit this log")]
    TooLong,
    /// The log is fenced, for good.
    #[error("the log is fenced")]
    Fenced,
    /// The log's own words contradict each other: its session has overwritten them. Only SharedFS can repair that.
    #[error("the log is damaged")]
    Damaged,
}

/// The words that control a log contradict each other, so it can't be sealed or settled.
///
/// Only a faulty or hostile session writes such words.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("the log's slots or tail are damaged")]
pub struct Damaged;

impl From<OutOfBounds> for Damaged {
    fn from(_: OutOfBounds) -> Self {
        Self
    }
}

impl From<Damaged> for AppendError {
    fn from(_: Damaged) -> Self {
        Self::Damaged
    }
}

impl From<OutOfBounds> for AppendError {
    fn from(_: OutOfBounds) -> Self {
        Self::Damaged
    }
}

/// The reason why memory can't be formatted, opened or recovered as a log.
#[derive(Debug, Error)]
pub enum LogOpenError {
    /// The memory is smaller than the smallest log.
    #[error("{available} bytes are too few for a log; {needed} are needed")]
    TooSmall {
        /// Bytes of the memory.
        available: u64,
        /// Bytes of the smallest log.
        needed: u64,
    },
    /// The memory does not begin with a log's header.
    #[error("this is no update log")]
    NotALog,
    /// The log was made by another version of the program.
    #[error("the log has format version {found}, this program reads version {supported}")]
    WrongVersion {
        /// The version found.
        found: u32,
        /// The version that this program reads.
        supported: u32,
    },
    /// The header does not match its checksum, or holds impossible values.
    #[error("the log's header is damaged")]
    DamagedHeader,
    /// The memory could not be made durable.
    #[error("the log could not be made durable: {0}")]
    System(#[from] io::Error),
}

impl From<OutOfBounds> for LogOpenError {
    fn from(_: OutOfBounds) -> Self {
        Self::DamagedHeader
    }
}

/// Faults of the bytes at a position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// No record and no void slot of this log, position and generation begins there.
    NoRecord,
    /// The record's length leaves the requested range, or the ring.
    Length,
    /// The record was written under a generation that cannot stand there.
    Generation,
    /// The content does not match the checksum.
    Checksum,
    /// The requested range is longer than the log, or ends before it begins.
    Range,
}

/// A range of a log that should hold records does not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("the log is corrupt at position {position} ({fault:?})")]
pub struct Corrupt {
    /// The position of the fault.
    pub position: LogPosition,
    /// The fault.
    pub fault: Fault,
}
