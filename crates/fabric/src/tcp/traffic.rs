//! The frames of a link that is up.

use std::collections::VecDeque;
use std::io;

use super::events::EventQueue;
use super::wire::Wire;
use crate::error::{CloseReason, SendError};
use crate::event::{Event, LinkId, TransferId};
use crate::frame::{FrameSeal, LINK_HEADER_BYTES, LinkFrame, LinkFrameKind, LinkParser, split_range};
use crate::handshake::LinkSeeds;
use crate::provider::{MESSAGE_BYTES_MAX, QUEUE_BYTES_MAX, READ_BYTES_MAX, TRANSFERS_MAX};
use crate::region::RegionTable;
use crate::transfer_window::{Transfer, TransferWindow};

/// The frames of a link that is up, in both directions.
///
/// A side has a bounded number of transfers under way. So the answers that wait at its peer are bounded, and the peer
/// never has to stop reading: two sides that both stop would wait for each other for ever.
pub(super) struct Traffic {
    seal: FrameSeal,
    parser: LinkParser,
    window: TransferWindow,
    /// Answers that wait to be sent: where each ends in the queue, and its bytes.
    answers: VecDeque<(u64, usize)>,
    answer_bytes: usize,
    /// A sender was turned away and waits for [`Event::Drained`].
    is_full: bool,
}

impl Traffic {
    pub(super) fn new(seeds: LinkSeeds) -> Self {
        Self {
            seal: FrameSeal::new(seeds.sent),
            parser: LinkParser::new(seeds.received),
            window: TransferWindow::default(),
            answers: VecDeque::new(),
            answer_bytes: 0,
            is_full: false,
        }
    }

    /// Sends a message.
    pub(super) fn send_message(&mut self, wire: &mut Wire, parts: &[&[u8]]) -> Result<(), SendError> {
        self.check_room(wire, parts, true)?;
        self.send(wire, LinkFrameKind::Message, 0, parts).map_err(|error| broken(wire, &error))
    }

    /// Begins a transfer.
    pub(super) fn send_transfer(
        &mut self,
        wire: &mut Wire,
        transfer: Transfer,
        parts: &[&[u8]],
    ) -> Result<TransferId, SendError> {
        self.check_room(wire, parts, self.window.has_room(transfer))?;
        let kind = if transfer == Transfer::Write { LinkFrameKind::Write } else { LinkFrameKind::Read };
        let number = self.window.next();
        self.send(wire, kind, number, parts).map_err(|error| broken(wire, &error))?;
        self.window.begin(transfer);
        Ok(TransferId(number))
    }

    /// Sends the last frame.
    pub(super) fn send_close(&mut self, wire: &mut Wire) -> io::Result<()> {
        self.send(wire, LinkFrameKind::Close, 0, &[])
    }

    fn send(&mut self, wire: &mut Wire, kind: LinkFrameKind, transfer: u64, parts: &[&[u8]]) -> io::Result<()> {
        let header = self.seal.seal(kind, transfer, parts);
        let mut all = Vec::with_capacity(parts.len() + 1);
        all.push(&header[..]);
        all.extend_from_slice(parts);
        wire.send(&all)
    }

    fn check_room(&mut self, wire: &Wire, parts: &[&[u8]], has_room: bool) -> Result<(), SendError> {
        let length = LINK_HEADER_BYTES + parts.iter().map(|part| part.len()).sum::<usize>();
        if has_room && wire.queue.bytes() + length <= QUEUE_BYTES_MAX {
            return Ok(());
        }
        self.is_full = true;
        Err(SendError::Full)
    }

    /// Takes bytes that arrived.
    pub(super) fn receive(
        &mut self,
        wire: &mut Wire,
        mut bytes: &[u8],
        link: LinkId,
        regions: &RegionTable,
        events: &EventQueue,
    ) -> Result<(), CloseReason> {
        loop {
            match self.parser.parse(&mut bytes) {
                Ok(None) => return Ok(()),
                Ok(Some(frame)) => self.handle_frame(wire, frame, link, regions, events)?,
                Err(error) => return Err(CloseReason::Invalid(error.to_string())),
            }
        }
    }

    fn handle_frame(
        &mut self,
        wire: &mut Wire,
        frame: LinkFrame,
        link: LinkId,
        regions: &RegionTable,
        events: &EventQueue,
    ) -> Result<(), CloseReason> {
        let LinkFrame { kind, transfer, body: bytes } = frame;
        match kind {
            LinkFrameKind::Message => events.push(Event::Message { link, bytes }),
            LinkFrameKind::Write => {
                let (target, bytes) = split_range(&bytes);
                regions.store(target, bytes).map_err(CloseReason::Invalid)?;
                self.answer(wire, LinkFrameKind::Written, transfer, &[])?;
            }
            LinkFrameKind::Read => {
                let (source, length) = split_range(&bytes);
                let length = u32::from_le_bytes(length.try_into().expect("the parser checks the length")) as usize;
                if length > MESSAGE_BYTES_MAX {
                    return Err(CloseReason::Invalid(format!("a read asks for {length} bytes")));
                }
                let bytes = regions.load(source, length).map_err(CloseReason::Invalid)?;
                self.answer(wire, LinkFrameKind::ReadAnswer, transfer, &bytes)?;
            }
            LinkFrameKind::Written | LinkFrameKind::ReadAnswer => {
                let answered = match kind {
                    LinkFrameKind::Written => Transfer::Write,
                    _ => Transfer::Read { length: bytes.len() },
                };
                if !self.window.finish(transfer, answered) {
                    return Err(CloseReason::Invalid("an answer belongs to no transfer".into()));
                }
                events.push(Event::Transferred { link, transfer: TransferId(transfer), bytes });
            }
            LinkFrameKind::Close => return Err(CloseReason::ClosedByPeer),
        }
        Ok(())
    }

    fn answer(&mut self, wire: &mut Wire, kind: LinkFrameKind, transfer: u64, bytes: &[u8]) -> Result<(), CloseReason> {
        self.forget_sent_answers(wire);
        if self.answers.len() == TRANSFERS_MAX || self.answer_bytes + bytes.len() > READ_BYTES_MAX {
            return Err(CloseReason::Invalid("more transfers are under way than are allowed".into()));
        }
        self.send(wire, kind, transfer, &[bytes]).map_err(|error| CloseReason::from(&error))?;
        if !wire.queue.is_empty() {
            self.answers.push_back((wire.queue.end(), bytes.len()));
            self.answer_bytes += bytes.len();
        }
        Ok(())
    }

    fn forget_sent_answers(&mut self, wire: &Wire) {
        while let Some((end, bytes)) = self.answers.front().copied()
            && end <= wire.queue.sent()
        {
            self.answers.pop_front();
            self.answer_bytes -= bytes;
        }
    }

    /// Reports once that a full link takes messages again.
    pub(super) fn report_drained(&mut self, wire: &Wire, link: LinkId, events: &EventQueue) {
        if self.is_full && wire.queue.bytes() <= QUEUE_BYTES_MAX / 2 && self.window.is_roomy() {
            self.is_full = false;
            events.push(Event::Drained { link });
        }
    }
}

/// Leaves it to the polling thread to report the end, behind all that arrived before it.
fn broken(wire: &Wire, error: &io::Error) -> SendError {
    tracing::debug!("sending failed: {error}");
    wire.transport.socket().cut();
    SendError::Down
}
