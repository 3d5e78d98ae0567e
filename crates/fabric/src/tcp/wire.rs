//! A connection and the bytes that wait for it.

use std::io::{self, ErrorKind, IoSlice};

use super::epoll::Epoll;
use super::queue::SendQueue;
use super::transport::{Transport, unless_blocked};
use crate::event::LinkId;

/// A connection and the bytes that wait for it.
pub(super) struct Wire {
    pub(super) transport: Transport,
    pub(super) queue: SendQueue,
    is_armed: bool,
}

impl Wire {
    /// Takes a connection over that is in the epoll's list.
    pub(super) fn new(transport: Transport, is_armed: bool) -> Self {
        Self { transport, queue: SendQueue::default(), is_armed }
    }

    /// Gives TLS up, with all that was to be sent.
    pub(super) fn into_plain(self) -> Self {
        Self { transport: self.transport.into_plain(), queue: SendQueue::default(), is_armed: self.is_armed }
    }

    /// Sends parts; those that the network does not take now wait.
    pub(super) fn send(&mut self, parts: &[&[u8]]) -> io::Result<()> {
        if !self.queue.is_empty() {
            self.queue.push(parts, 0);
            return Ok(());
        }
        let slices: Vec<IoSlice<'_>> = parts.iter().map(|part| IoSlice::new(part)).collect();
        let sent = match self.transport.write(&slices) {
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => 0,
            sent => sent?,
        };
        self.queue.push(parts, sent);
        if sent > 0 { self.flush() } else { Ok(()) }
    }

    /// Sends waiting bytes, as many as the network takes.
    pub(super) fn flush(&mut self) -> io::Result<()> {
        while !self.queue.is_empty() {
            let transport = &mut self.transport;
            match self.queue.with_slices(|slices| transport.write(slices)) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(count) => self.queue.advance(count),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        unless_blocked(self.transport.flush())
    }

    /// Bytes wait for the network.
    pub(super) fn is_blocked(&self) -> bool {
        !self.queue.is_empty() || self.transport.has_unsent()
    }

    /// Asks the kernel to say when the network takes bytes again, if some wait.
    pub(super) fn arm(&mut self, epoll: &Epoll, link: LinkId) -> io::Result<()> {
        let is_blocked = self.is_blocked();
        if is_blocked != self.is_armed {
            epoll.modify(&self.transport.socket().stream, link.0, is_blocked)?;
            self.is_armed = is_blocked;
        }
        Ok(())
    }
}
