//! Errors of frames and of the journal.

use std::io;

use ashlar_pmem::OutOfBounds;
use ashlar_types::{Epoch, FileSystemId, JournalPosition, NodeNumber};
use thiserror::Error;

/// The reason why a body can't be encoded, or bytes are no frame of this format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum FrameError {
    /// The frame would be longer than [`crate::FRAME_BYTES_MAX`], or the body's length is not the header's.
    #[error("a frame of {bytes} bytes has a wrong length")]
    Length {
        /// Bytes of the frame.
        bytes: u64,
    },
    /// A later program wrote the frame.
    #[error("frames of kind {0} are not known")]
    Kind(u8),
    /// The flags mean nothing for this kind.
    #[error("the flags {0:#x} are not known")]
    Flags(u8),
    /// The header's hint is not that of the body's session.
    #[error("the frame's header names another session than its body")]
    Session,
    /// The body can't be read, or the encoder would have written it otherwise.
    #[error("the frame's body can't be read")]
    Malformed,
    /// A value of the body is outside its bounds, or a list is not in order.
    #[error("a value in the frame's body is out of bounds")]
    OutOfBounds,
}

/// The reason why no frame begins at a position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrameFault {
    /// The header has another position.
    Position,
    /// The frame is longer than a frame may be, or than what is left of the ring or of the bytes.
    Length,
    /// The epoch is not the one that the lineage has there.
    Epoch,
    /// The checksum is wrong, or a byte behind the body is not zero.
    Checksum,
}

/// Frames that were checked before can't be read any more: the memory is damaged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("the journal is damaged at position {position} ({fault:?})")]
pub struct JournalDamaged {
    /// The position of the fault.
    pub position: JournalPosition,
    /// The fault.
    pub fault: FrameFault,
}

/// The reason why bytes from another copy were not stored. The whole frames before `position` were.
#[derive(Debug, Error)]
pub enum CopyError {
    /// The bytes at this position are not the next frame.
    #[error("the bytes for position {position} are not the next frame ({fault:?})")]
    NotNext {
        /// The position at which a frame was expected.
        position: JournalPosition,
        /// The fault.
        fault: FrameFault,
    },
    /// The journal itself refused the frame.
    #[error(transparent)]
    Journal(#[from] JournalError),
}

/// The reason why the journal refused an operation. It is as it was before.
#[derive(Debug, Error)]
pub enum JournalError {
    /// The ring has no room for the frame.
    #[error("the journal is full; {needed} more bytes must become free")]
    Full {
        /// Bytes that must become free.
        needed: u64,
    },
    /// The frame is no frame.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// The frame is longer than a quarter of this ring.
    #[error("a frame of {bytes} bytes does not fit a journal of this size")]
    TooLong {
        /// Bytes of the frame.
        bytes: u64,
    },
    /// No frame begins or ends there.
    #[error("no frame ends at position {0}")]
    NoBoundary(JournalPosition),
    /// The position is before the head or behind the end.
    #[error("position {position} is not between the journal's head {head} and its end {end}")]
    Outside {
        /// The position asked for.
        position: JournalPosition,
        /// The head.
        head: JournalPosition,
        /// The end.
        end: JournalPosition,
    },
    /// The space is not flushed yet.
    #[error("the journal is flushed up to {flushed} only")]
    NotFlushed {
        /// The flushed position.
        flushed: JournalPosition,
    },
    /// The epoch does not follow the journal's last one.
    #[error("epoch {epoch} does not follow epoch {last}")]
    StaleEpoch {
        /// The epoch asked for.
        epoch: Epoch,
        /// The last one.
        last: Epoch,
    },
    /// The journal was opened, and neither an epoch was begun nor the last one resumed.
    #[error("the journal was opened, and no epoch has begun since")]
    EpochNotBegun,
    /// The lineage does not agree with the frames that are to stay.
    #[error("the lineage does not agree with the frames before position {0}")]
    WrongLineage(JournalPosition),
    /// The table of epochs is full. Space must be reused first, so that old epochs may be forgotten.
    #[error("the journal holds frames of too many epochs")]
    LineageFull,
    /// A [`crate::TruncateJob`] has begun and not finished.
    #[error("the journal's head is being moved")]
    Busy,
    /// The medium failed before. The journal must be opened anew.
    #[error("the journal's medium has failed")]
    Failed,
    /// The medium failed now.
    #[error("the journal could not be made durable: {0}")]
    System(#[from] io::Error),
    /// The frames can't be read any more.
    #[error(transparent)]
    Damaged(#[from] JournalDamaged),
    /// The memory is shorter than it was.
    #[error(transparent)]
    Memory(#[from] OutOfBounds),
}

/// The reason why memory can't be formatted or opened as a journal.
#[derive(Debug, Error)]
pub enum JournalOpenError {
    /// The memory is smaller than the smallest journal.
    #[error("{available} bytes are too few for a journal; {needed} are needed")]
    TooSmall {
        /// Bytes of the memory.
        available: u64,
        /// Bytes of the smallest journal.
        needed: u64,
    },
    /// The memory does not begin with a journal's identity.
    #[error("this is no journal")]
    NotAJournal,
    /// The journal was made by a program that this one does not understand.
    #[error("the journal has format version {found} and needs {needed}; this program reads {oldest} to {newest}")]
    WrongVersion {
        /// The journal's version.
        found: u32,
        /// The oldest version that can read it.
        needed: u32,
        /// The oldest version that this program reads.
        oldest: u32,
        /// The program's version.
        newest: u32,
    },
    /// It is the journal of another node or of another file system.
    #[error("this is the journal of node {node} of file system {file_system}")]
    OtherJournal {
        /// The file system found.
        file_system: FileSystemId,
        /// The node found.
        node: NodeNumber,
    },
    /// Identity or state does not match its checksum, or holds impossible values.
    #[error("the journal's header is damaged")]
    DamagedHeader,
    /// The memory could not be made durable.
    #[error("the journal could not be made durable: {0}")]
    System(#[from] io::Error),
    /// The lineage or the position at which the journal is to begin is impossible.
    #[error("a journal can't begin at position {0} with this lineage")]
    WrongBegin(JournalPosition),
}

impl JournalOpenError {
    pub(crate) const fn other(file_system: FileSystemId, node: NodeNumber) -> Self {
        Self::OtherJournal { file_system, node }
    }
}

impl From<OutOfBounds> for JournalOpenError {
    fn from(_: OutOfBounds) -> Self {
        Self::DamagedHeader
    }
}
