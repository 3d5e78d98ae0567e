//! The messages between a writing node and its replica, for the copy of the journal.
//!
//! A replica that connects says what it has ([`CopyState`]). The writing node says where the copy goes on
//! ([`CopyPlan`]) and then sends frames ([`CopyPart`]). The replica acknowledges a position up to which its copy is
//! durable; that covers every position before.

use ashlar_journal::{JournalCursor, Lineage};
use ashlar_types::JournalPosition;

use crate::journal::applier::ReplayError;
use crate::journal::writer::NodeJournal;

/// A replica's copy of the journal, as the replica says it when it connects.
#[derive(Clone, Debug)]
pub struct CopyState {
    /// The epochs of its frames.
    pub lineage: Lineage,
    /// Its end.
    pub end: JournalPosition,
}

/// Where a copy goes on. The rest of it is cut.
#[derive(Clone, Debug)]
pub struct CopyPlan {
    /// The epochs of the writing node's frames.
    pub lineage: Lineage,
    /// The position of the first frame that is sent.
    pub from: JournalPosition,
}

/// Whole frames for a copy.
#[derive(Clone, Debug)]
pub struct CopyPart {
    /// The frames, as they stand in the journal; none if only `durable` is news.
    pub bytes: Vec<u8>,
    /// The position of the frame that follows them.
    pub end: JournalPosition,
    /// The position up to which the journal is durable at the writing node.
    pub durable: JournalPosition,
}

/// Sends the frames of a journal to one copy, in their order.
#[derive(Debug)]
pub struct CopySender {
    /// Where the next frame stands.
    cursor: JournalCursor,
    /// The durable position that was sent last.
    durable: JournalPosition,
}

impl CopySender {
    /// Decides where a copy goes on, and begins to send.
    ///
    /// From here on the node commits nothing that this replica has not made durable.
    ///
    /// # Errors
    /// [`ReplayError::OtherCopy`] if the copy lacks frames that the journal no longer has, or is none of this journal.
    pub fn begin(journal: &mut NodeJournal, copy: &CopyState) -> Result<(CopyPlan, Self), ReplayError> {
        let ring = journal.ring();
        let common = ring.lineage().last_common(ring.end(), &copy.lineage, copy.end);
        let Some(from) = common.filter(|from| *from >= ring.head()) else {
            let (head, end) = (ring.head(), ring.end());
            tracing::warn!(?common, %head, %end, lineage = ?ring.lineage(), ?copy, "a copy does not fit");
            return Err(ReplayError::OtherCopy);
        };
        let lineage = ring.lineage().clone();
        let sender = Self::from_position(journal, from)?;
        journal.set_replica(Some(from));
        Ok((CopyPlan { lineage, from }, sender))
    }

    /// Begins to send at a position.
    ///
    /// # Errors
    /// Those of the journal: the frames before the position are no longer there, for one.
    pub fn from_position(journal: &NodeJournal, from: JournalPosition) -> Result<Self, ReplayError> {
        Ok(Self { cursor: journal.ring().cursor_at(from)?, durable: JournalPosition(0) })
    }

    /// Returns the next frames, at most so many bytes but for the first frame; `None` if there is nothing new.
    ///
    /// # Errors
    /// Those of the journal.
    pub fn next_part(&mut self, journal: &NodeJournal, bytes_max: usize) -> Result<Option<CopyPart>, ReplayError> {
        let (ring, from) = (journal.ring(), self.cursor.position);
        let mut end = self.cursor;
        while let Some(next) = ring.skip_frame(end)? {
            if end.position > from && next.position.0 - from.0 > bytes_max as u64 {
                break;
            }
            end = next;
        }
        if end.position == from && ring.flushed() == self.durable {
            return Ok(None);
        }
        let mut bytes = vec![0; (end.position.0 - from.0) as usize];
        ring.read_bytes(from, &mut bytes)?;
        (self.cursor, self.durable) = (end, ring.flushed());
        Ok(Some(CopyPart { bytes, end: end.position, durable: self.durable }))
    }
}
