//! Reading frames, and what makes bytes a frame.

use ashlar_pmem::Persistent;
use ashlar_types::JournalPosition;

use crate::frame::{FRAME_HEADER_BYTES, FrameHeader, StoredFrame};
use crate::ring::PlantedBug;
use crate::{FrameFault, JournalCursor, JournalDamaged, JournalError, JournalRing};

impl StoredFrame<'_> {
    /// Returns the place behind the frame.
    #[must_use]
    pub const fn next(&self) -> JournalCursor {
        JournalCursor { position: self.end(), seed: self.header.checksum }
    }
}

impl<M: Persistent> JournalRing<M> {
    /// Reads the frame at a place into `buffer`, and checks it. Returns `None` at the journal's end.
    ///
    /// The next place is [`StoredFrame::next`]. Frames that are not durable yet are read as well.
    ///
    /// # Errors
    /// [`JournalError::Outside`] if the space was reused, [`JournalError::Damaged`] if the frame is not valid, or the
    /// cursor is none of this journal.
    pub fn read_frame<'b>(
        &self,
        cursor: JournalCursor,
        buffer: &'b mut Vec<u8>,
    ) -> Result<Option<StoredFrame<'b>>, JournalError> {
        let position = cursor.position;
        self.check_inside(position)?;
        if position == self.end() {
            return Ok(None);
        }
        match self.check_frame(cursor, self.end(), buffer) {
            Ok(frame) => Ok(Some(frame)),
            Err(fault) => Err(JournalDamaged { position, fault }.into()),
        }
    }

    /// Returns the place behind the frame at a place. Returns `None` at the journal's end.
    ///
    /// It reads the header alone: for a sender, which looks for the end of a whole frame.
    ///
    /// # Errors
    /// As [`Self::read_frame`].
    pub fn skip_frame(&self, cursor: JournalCursor) -> Result<Option<JournalCursor>, JournalError> {
        let position = cursor.position;
        self.check_inside(position)?;
        if position == self.end() {
            return Ok(None);
        }
        let damaged = |fault| JournalDamaged { position, fault };
        let header = self.load_header(position, self.end()).map_err(damaged)?;
        Ok(Some(JournalCursor { position: position.plus(header.frame_bytes()), seed: header.checksum }))
    }

    /// Returns the place at a position: a walk over all headers before it.
    ///
    /// # Errors
    /// [`JournalError::NoBoundary`] if no frame ends there; as [`Self::skip_frame`].
    pub fn cursor_at(&self, position: JournalPosition) -> Result<JournalCursor, JournalError> {
        self.check_inside(position)?;
        let mut cursor = self.head_cursor();
        while cursor.position < position {
            cursor = self.skip_frame(cursor)?.ok_or(JournalError::NoBoundary(position))?;
        }
        if cursor.position == position { Ok(cursor) } else { Err(JournalError::NoBoundary(position)) }
    }

    /// Copies bytes out of the journal, as another copy stores them.
    ///
    /// # Errors
    /// [`JournalError::Outside`] if the bytes are not all between head and end.
    pub fn read_bytes(&self, from: JournalPosition, into: &mut [u8]) -> Result<(), JournalError> {
        self.check_inside(from)?;
        self.check_inside(JournalPosition(from.0.saturating_add(into.len() as u64)))?;
        Ok(self.load(from, into)?)
    }

    fn check_inside(&self, position: JournalPosition) -> Result<(), JournalError> {
        let (head, end) = (self.head(), self.end());
        if (head..=end).contains(&position) { Ok(()) } else { Err(JournalError::Outside { position, head, end }) }
    }

    /// Reads the bytes at a place into `buffer`, and checks that they are the next frame and end before `limit`.
    pub(crate) fn check_frame<'b>(
        &self,
        cursor: JournalCursor,
        limit: JournalPosition,
        buffer: &'b mut Vec<u8>,
    ) -> Result<StoredFrame<'b>, FrameFault> {
        let header = self.load_header(cursor.position, limit)?;
        buffer.resize((header.frame_bytes() - FRAME_HEADER_BYTES) as usize, 0);
        self.load(cursor.position.plus(FRAME_HEADER_BYTES), buffer).map_err(|_| FrameFault::Length)?;
        self.check_body(&header, cursor, buffer)?;
        Ok(StoredFrame { header, body: &buffer[..header.length as usize] })
    }

    fn load_header(&self, position: JournalPosition, limit: JournalPosition) -> Result<FrameHeader, FrameFault> {
        let mut bytes = [0; FRAME_HEADER_BYTES as usize];
        if position.plus(FRAME_HEADER_BYTES) > limit {
            return Err(FrameFault::Length);
        }
        self.load(position, &mut bytes).map_err(|_| FrameFault::Length)?;
        let header = FrameHeader::from_bytes(&bytes);
        self.check_header(&header, position)?;
        if position.plus(header.frame_bytes()) > limit { Err(FrameFault::Length) } else { Ok(header) }
    }

    /// Checks a header that should stand at this position.
    pub(crate) fn check_header(&self, header: &FrameHeader, position: JournalPosition) -> Result<(), FrameFault> {
        if header.position != position {
            return Err(FrameFault::Position);
        }
        if header.frame_bytes() > self.frame_bytes_max() {
            return Err(FrameFault::Length);
        }
        let is_of_epoch = self.lineage().epoch_at(position).is_some_and(|epoch| epoch.number == header.epoch);
        if is_of_epoch || self.planted(PlantedBug::SkipEpoch) { Ok(()) } else { Err(FrameFault::Epoch) }
    }

    /// Checks body and zero bytes of the frame with this header at a place.
    pub(crate) fn check_body(
        &self,
        header: &FrameHeader,
        cursor: JournalCursor,
        rest: &[u8],
    ) -> Result<(), FrameFault> {
        let are_zeros = rest.iter().skip(header.length as usize).all(|byte| *byte == 0);
        let is_whole = are_zeros && header.sum(self.seed(cursor), &[rest]) == header.checksum;
        if is_whole || self.planted(PlantedBug::SkipChecksum) { Ok(()) } else { Err(FrameFault::Checksum) }
    }
}
