//! The account of a journal's room.
//!
//! Arithmetic alone. It keeps `used + promised + reserve left ≤ capacity`, so whatever was promised, and whatever the
//! reserve is for, finds room in the ring. The caller decides what it promises, and to which frames it gives the
//! reserve.

use thiserror::Error;

use crate::body::{RECORDS_BYTES_MAX, RECORDS_FIELDS_BYTES_MAX};
use crate::frame::frame_bytes;

/// The most bytes of a number on media.
const NUMBER_BYTES_MAX: u64 = 10;
/// The most bytes of a verdict's body without its lists' elements: four numbers, nanoseconds and an option, a flag, and
/// the lengths of three lists.
const VERDICT_FIELDS_BYTES_MAX: u64 = 4 * NUMBER_BYTES_MAX + 6 + 1 + 3 * 3;
/// The most bytes of an element of a verdict's lists: a position with a reason.
const VERDICT_ELEMENT_BYTES_MAX: u64 = NUMBER_BYTES_MAX + 1;

/// The most bytes of an Ended frame.
pub const ENDED_BYTES_MAX: u64 = frame_bytes(NUMBER_BYTES_MAX);

/// Returns the most bytes of the frames that hold a batch of so many bytes of records.
///
/// The ring's limit on frames must be [`crate::FRAME_BYTES_MAX`].
#[must_use]
pub const fn records_bytes_max(record_bytes: u64) -> u64 {
    let (whole, rest) = (record_bytes / RECORDS_BYTES_MAX, record_bytes % RECORDS_BYTES_MAX);
    let last = if rest == 0 && whole > 0 { 0 } else { frame_bytes(RECORDS_FIELDS_BYTES_MAX + rest) };
    whole * frame_bytes(RECORDS_FIELDS_BYTES_MAX + RECORDS_BYTES_MAX) + last
}

/// Returns the most bytes of a verdict with so many elements in its three lists together.
///
/// A record makes at most one: it is refused, ignored, or takes an inode's last name.
#[must_use]
pub const fn verdict_bytes_max(elements: u64) -> u64 {
    frame_bytes(VERDICT_FIELDS_BYTES_MAX + elements * VERDICT_ELEMENT_BYTES_MAX)
}

/// A frame or a promise that the account does not cover.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum RoomError {
    /// There is not so much room that is neither used, nor promised, nor reserved.
    #[error("the journal has no room; {needed} more bytes must become free")]
    Lacking {
        /// Bytes that must become free.
        needed: u64,
    },
    /// The frame is longer than what was promised for it, or the promise was never made.
    #[error("a frame of {bytes} bytes does not fit the {promised} bytes promised")]
    NotPromised {
        /// Bytes of the frame, or of the promise that is given up.
        bytes: u64,
        /// Bytes promised.
        promised: u64,
    },
}

/// The account of a journal's room, in bytes.
///
/// A *promise* is room for frames to come: for what a session's log may hold and is not journalled yet, for the end of
/// a session that has begun, for the freeing of a kept inode. The *reserve* is room for verdicts, acts of SharedFS and
/// session ends that nothing was promised for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JournalRoom {
    capacity: u64,
    used: u64,
    promised: u64,
    reserve: u64,
    reserve_left: u64,
}

impl JournalRoom {
    /// Returns the account of a ring of which `used` bytes are used.
    ///
    /// If less than the reserve is free, the rest of the reserve is filled as space becomes free, before anything else.
    #[must_use]
    pub fn new(capacity: u64, used: u64, reserve: u64) -> Self {
        let used = used.min(capacity);
        let reserve = reserve.min(capacity);
        Self { capacity, used, promised: 0, reserve, reserve_left: reserve.min(capacity - used) }
    }

    /// Returns the bytes of the ring.
    #[must_use]
    pub const fn capacity(&self) -> u64 {
        self.capacity
    }

    /// Returns the bytes between the ring's head and its end.
    #[must_use]
    pub const fn used(&self) -> u64 {
        self.used
    }

    /// Returns the bytes that are promised and not used.
    #[must_use]
    pub const fn promised(&self) -> u64 {
        self.promised
    }

    /// Returns what is left of the reserve.
    #[must_use]
    pub const fn reserve_left(&self) -> u64 {
        self.reserve_left
    }

    /// Returns the bytes that may be promised.
    #[must_use]
    pub const fn unassigned(&self) -> u64 {
        self.capacity - self.used - self.promised - self.reserve_left
    }

    /// Promises room for frames to come.
    ///
    /// # Errors
    /// [`RoomError::Lacking`]; nothing is promised then.
    pub fn promise(&mut self, bytes: u64) -> Result<(), RoomError> {
        self.check_unassigned(bytes)?;
        self.promised += bytes;
        Ok(())
    }

    /// Takes back a promise for frames that will not come.
    ///
    /// # Errors
    /// [`RoomError::NotPromised`]; nothing changes then.
    pub fn withdraw(&mut self, bytes: u64) -> Result<(), RoomError> {
        self.check_promised(bytes)?;
        self.promised -= bytes;
        self.fill_reserve();
        Ok(())
    }

    /// Records a frame that is appended, for which `promise` bytes were promised; what it does not need becomes free.
    ///
    /// # Errors
    /// [`RoomError::NotPromised`] if the frame is longer, or the promise was not made; nothing changes then.
    pub fn append_promised(&mut self, promise: u64, frame_bytes: u64) -> Result<(), RoomError> {
        self.check_promised(promise)?;
        if frame_bytes > promise {
            return Err(RoomError::NotPromised { bytes: frame_bytes, promised: promise });
        }
        self.promised -= promise;
        self.used += frame_bytes;
        self.fill_reserve();
        Ok(())
    }

    /// Records a frame that is appended and for which nothing was promised, from room that nothing else is for.
    ///
    /// # Errors
    /// [`RoomError::Lacking`]; nothing changes then.
    pub fn append_free(&mut self, frame_bytes: u64) -> Result<(), RoomError> {
        self.check_unassigned(frame_bytes)?;
        self.used += frame_bytes;
        Ok(())
    }

    /// Records a frame that is appended and that the reserve is for. It takes other room first.
    ///
    /// # Errors
    /// [`RoomError::Lacking`] if more of them came than the reserve was made for; nothing changes then.
    pub fn append_reserved(&mut self, frame_bytes: u64) -> Result<(), RoomError> {
        let from_reserve = frame_bytes.saturating_sub(self.unassigned());
        if from_reserve > self.reserve_left {
            return Err(RoomError::Lacking { needed: from_reserve - self.reserve_left });
        }
        self.reserve_left -= from_reserve;
        self.used += frame_bytes;
        Ok(())
    }

    /// Records that space of the ring is free for reuse. It fills the reserve first.
    ///
    /// # Panics
    /// If more becomes free than was used.
    pub fn truncate(&mut self, bytes: u64) {
        assert!(bytes <= self.used, "{bytes} bytes become free, and {} are used", self.used);
        self.used -= bytes;
        self.fill_reserve();
    }

    fn fill_reserve(&mut self) {
        self.reserve_left = self.reserve.min(self.capacity - self.used - self.promised);
    }

    fn check_unassigned(&self, bytes: u64) -> Result<(), RoomError> {
        match bytes.saturating_sub(self.unassigned()) {
            0 => Ok(()),
            needed => Err(RoomError::Lacking { needed }),
        }
    }

    fn check_promised(&self, bytes: u64) -> Result<(), RoomError> {
        let promised = self.promised;
        if bytes > promised { Err(RoomError::NotPromised { bytes, promised }) } else { Ok(()) }
    }
}
