//! Moves links from phase to phase.
//!
//! Each function locks at most one link at a time. The table's and the event queue's locks are taken under it.

use std::fmt::Display;
use std::io::{self, ErrorKind, Read};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::rand::GetRandomFlags;

use super::epoll::Epoll;
use super::events::EventQueue;
use super::link::{LinkPhase, LinkState, TcpLink};
use super::refusal_log::RefusalLog;
use super::security::{LinkSecurity, TlsFailure, check_certificate, check_first_byte, tls_failure};
use super::socket::CountingSocket;
use super::table::LinkTable;
use super::traffic::Traffic;
use super::transport::{Transport, unless_blocked};
use super::waker::Waker;
use super::wire::Wire;
use crate::error::{CloseReason, FabricError, LinkRefusal};
use crate::event::{Event, LinkId};
use crate::handshake::{Handshake, HandshakeStep, LinkHello, LinkSeeds, refusal_bytes};
use crate::region::RegionTable;

/// A connection is made, and both sides have proved themselves, within twice this.
pub(super) const HANDSHAKE_TIME: Duration = Duration::from_secs(5);
/// The last bytes of a closed link are sent for so long.
const LINGER_TIME: Duration = Duration::from_secs(1);
/// Reads of one link before others have their turn.
const READS_MAX: usize = 8;

/// All that links share.
pub(super) struct LinkDriver {
    pub(super) table: LinkTable,
    pub(super) epoll: Epoll,
    pub(super) events: EventQueue,
    pub(super) regions: RegionTable,
    pub(super) waker: Arc<Waker>,
    pub(super) security: LinkSecurity,
    pub(super) log: RefusalLog,
}

impl LinkDriver {
    /// Begins to connect, to the first address that does not refuse at once.
    pub(super) fn connect(&self, link: &TcpLink, addresses: io::Result<Vec<SocketAddr>>) {
        let mut state = link.state.lock();
        if !matches!(state.phase, LinkPhase::Connecting(_)) {
            return;
        }
        match addresses {
            Ok(addresses) => {
                state.phase = LinkPhase::Connecting(addresses.into());
                self.connect_next(link, &mut state, ErrorKind::NotFound.into());
            }
            Err(error) => self.fail_to_connect(link, &mut state, error),
        }
    }

    /// Tries the addresses that are left; `error` is that of the one before.
    fn connect_next(&self, link: &TcpLink, state: &mut LinkState, mut error: io::Error) {
        state.wire = None;
        while let LinkPhase::Connecting(addresses) = &mut state.phase {
            let Some(address) = addresses.pop_front() else { return self.fail_to_connect(link, state, error) };
            let socket = CountingSocket::connect(address);
            match socket.and_then(|socket| self.epoll.add(&socket.stream, link.id.0, true).map(|()| socket)) {
                Ok(socket) => {
                    state.wire = Some(Wire::new(Transport::Plain(socket), true));
                    return;
                }
                Err(cause) => error = cause,
            }
        }
    }

    fn fail_to_connect(&self, link: &TcpLink, state: &mut LinkState, error: io::Error) {
        self.fail(link, state, FabricError::Connect { address: link.address.clone(), error });
    }

    /// Takes a connection that a peer has made.
    pub(super) fn accept(&self, stream: TcpStream, address: SocketAddr) {
        let (link, oldest) = self.table.add_incoming(address.to_string(), nonce(), Instant::now() + HANDSHAKE_TIME);
        if let Some(oldest) = oldest {
            self.take_down(&oldest, CloseReason::Broken("too many others came behind it".into()));
        }
        let mut state = link.state.lock();
        let socket = CountingSocket::new(stream);
        let wire = socket.and_then(|socket| {
            self.epoll.add(&socket.stream, link.id.0, false)?;
            Ok(Wire::new(self.security.wrap(socket, link.hello.identity.cluster, None)?, false))
        });
        match wire {
            Ok(wire) => state.wire = Some(wire),
            Err(error) => self.break_handshake(&link, &mut state, CloseReason::from(&error)),
        }
    }

    /// Does what a ready socket allows; says whether more is left to read.
    pub(super) fn handle_ready(&self, link: &TcpLink, is_writable: bool, buffer: &mut [u8]) -> bool {
        if is_writable {
            self.handle_writable(link);
        }
        self.shake_hands(link, buffer);
        self.receive(link, buffer)
    }

    fn handle_writable(&self, link: &TcpLink) {
        let mut guard = link.state.lock();
        let state = &mut *guard;
        let Some(wire) = &mut state.wire else { return };
        if matches!(state.phase, LinkPhase::Connecting(_)) {
            return match wire.transport.socket().stream.take_error() {
                Ok(None) => self.begin_handshake(link, state),
                Ok(Some(error)) | Err(error) => self.connect_next(link, state, error),
            };
        }
        if wire.flush().and_then(|()| wire.arm(&self.epoll, link.id)).is_err() {
            // The read that follows finds the cause.
            return wire.transport.socket().cut();
        }
        match &mut state.phase {
            LinkPhase::Up(traffic) => traffic.report_drained(wire, link.id, &self.events),
            _ => self.finish_closing(link, state),
        }
    }

    fn begin_handshake(&self, link: &TcpLink, state: &mut LinkState) {
        let Some(Wire { transport, .. }) = state.wire.take() else { return };
        let Transport::Plain(socket) = transport else { return };
        let handshake = Handshake::new(link.hello.clone(), true);
        let begun = self.security.wrap(socket, link.hello.identity.cluster, link.expected).and_then(|transport| {
            let mut wire = Wire::new(transport, true);
            wire.send(&[&handshake.greeting()])?;
            // TLS keeps the greeting, and has a record of its own to send.
            wire.flush()?;
            wire.arm(&self.epoll, link.id)?;
            Ok(wire)
        });
        match begun {
            Ok(wire) => {
                state.wire = Some(wire);
                state.phase = LinkPhase::Handshake { handshake, is_first_byte_known: false };
                self.table.set_deadline(link.id, Instant::now() + HANDSHAKE_TIME);
            }
            Err(error) => self.break_handshake(link, state, CloseReason::from(&error)),
        }
    }

    fn shake_hands(&self, link: &TcpLink, buffer: &mut [u8]) {
        loop {
            let mut state = link.state.lock();
            let step = match self.next_step(link, &mut state, buffer) {
                Ok(Some(step)) => step,
                Ok(None) => return,
                Err(error) => return self.handle_error(link, &mut state, &error),
            };
            let sent = match step {
                HandshakeStep::Wait => continue,
                HandshakeStep::Send(bytes) => self.send_raw(link, &mut state, &bytes),
                HandshakeStep::Done { send, hello, seeds, .. } => match self.send_raw(link, &mut state, &send) {
                    Ok(()) => {
                        drop(state);
                        return self.establish(link, &hello, seeds);
                    }
                    failed => failed,
                },
                HandshakeStep::Refuse { reason, answer } => return self.refuse(link, &mut state, reason, &answer),
                HandshakeStep::Refused { reason, epoch } => {
                    return match link.expected {
                        Some(node) => {
                            self.end(link, &mut state, Some(Event::Refused { link: link.id, node, reason, epoch }));
                        }
                        None => self.end_incoming(link, &mut state, &format!("it refuses this node: {reason}")),
                    };
                }
            };
            if let Err(error) = sent {
                return self.break_handshake(link, &mut state, CloseReason::from(&error));
            }
        }
    }

    /// Reads no more than the handshake needs; `None` if nothing is there, or the link is in another phase.
    fn next_step(&self, link: &TcpLink, state: &mut LinkState, buffer: &mut [u8]) -> io::Result<Option<HandshakeStep>> {
        let LinkState { phase: LinkPhase::Handshake { handshake, is_first_byte_known }, wire: Some(wire) } = state
        else {
            return Ok(None);
        };
        let identity = &link.hello.identity;
        let ended = || io::Error::from(ErrorKind::UnexpectedEof);
        if !*is_first_byte_known {
            let first = match wire.transport.socket().peek() {
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(None),
                first => first?.ok_or_else(ended)?,
            };
            if let Err(reason) = check_first_byte(first, wire.transport.is_tls()) {
                state.wire = state.wire.take().map(Wire::into_plain);
                if link.is_outgoing() && reason == LinkRefusal::Security {
                    return Ok(Some(HandshakeStep::Refused { reason, epoch: None }));
                }
                let answer = refusal_bytes(&reason, identity);
                return Ok(Some(HandshakeStep::Refuse { reason, answer }));
            }
            *is_first_byte_known = true;
        }
        let wanted = handshake.wanted().min(buffer.len());
        let count = match wire.transport.read(&mut buffer[..wanted]) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                wire.arm(&self.epoll, link.id)?;
                return Ok(None);
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => return Ok(Some(HandshakeStep::Wait)),
            count => count?,
        };
        if count == 0 {
            return Err(ended());
        }
        let step = handshake.handle_bytes(&buffer[..count], |hello| {
            self.table.check(hello, link.expected, |node| match wire.transport.is_tls() {
                true => check_certificate(wire.transport.certificate(), identity.cluster, node),
                false => Ok(()),
            })
        });
        Ok(Some(step))
    }

    fn send_raw(&self, link: &TcpLink, state: &mut LinkState, bytes: &[u8]) -> io::Result<()> {
        let Some(wire) = &mut state.wire else { return Ok(()) };
        wire.send(&[bytes])?;
        wire.arm(&self.epoll, link.id)
    }

    /// Handles an error in the handshake.
    fn handle_error(&self, link: &TcpLink, state: &mut LinkState, error: &io::Error) {
        match (tls_failure(error), link.expected) {
            (Some(TlsFailure::Refuse(reason)), _) => self.refuse(link, state, reason, &[]),
            (Some(TlsFailure::Refused(reason)), Some(node)) => {
                self.end(link, state, Some(Event::Refused { link: link.id, node, reason, epoch: None }));
            }
            (Some(TlsFailure::Refused(reason)), None) => {
                self.end_incoming(link, state, &format!("it refuses this node: {reason}"));
            }
            (None, _) => self.break_handshake(link, state, CloseReason::from(error)),
        }
    }

    /// Brings a link up whose peer has proved itself. An older link that it replaces goes down before.
    fn establish(&self, link: &TcpLink, theirs: &LinkHello, seeds: LinkSeeds) {
        match self.table.admit(link, theirs) {
            Ok(replaced) => replaced.iter().for_each(|old| self.take_down(old, CloseReason::Replaced)),
            Err(reason) => {
                let answer = refusal_bytes(&reason, &self.table.identity());
                return self.refuse(link, &mut link.state.lock(), reason, &answer);
            }
        }
        let mut state = link.state.lock();
        if let (LinkPhase::Handshake { .. }, Some(peer)) = (&state.phase, link.peer.get()) {
            state.phase = LinkPhase::Up(Box::new(Traffic::new(seeds)));
            self.events.push(Event::Up { link: link.id, peer: *peer, is_outgoing: link.is_outgoing() });
        }
    }

    /// Reads what has arrived on a link that is up or closing; says whether more may be there.
    fn receive(&self, link: &TcpLink, buffer: &mut [u8]) -> bool {
        for _ in 0..READS_MAX {
            // Senders have a turn between two reads.
            let mut state = link.state.lock();
            match self.receive_once(link, &mut state, buffer) {
                Ok(true) => {}
                Ok(false) => return false,
                Err(reason) => {
                    self.end_traffic(link, &mut state, reason);
                    return false;
                }
            }
        }
        true
    }

    fn receive_once(&self, link: &TcpLink, state: &mut LinkState, buffer: &mut [u8]) -> Result<bool, CloseReason> {
        let Some(wire) = &mut state.wire else { return Ok(false) };
        match &mut state.phase {
            LinkPhase::Up(traffic) => {
                let count = received(wire.transport.read(buffer))?;
                traffic.receive(wire, &buffer[..count], link.id, &self.regions, &self.events)?;
                traffic.report_drained(wire, link.id, &self.events);
                wire.arm(&self.epoll, link.id).map_err(|error| CloseReason::from(&error))?;
                Ok(count == buffer.len() || (count > 0 && wire.transport.is_tls()))
            }
            // Unread bytes would make the kernel reset the connection, and the peer lose the last messages.
            LinkPhase::Closing { .. } => Ok(received(wire.transport.socket_mut().read(buffer))? > 0),
            _ => Ok(false),
        }
    }

    /// Closes a link for the layers above, which want no event of it any more. Sent bytes are still delivered.
    pub(super) fn close(&self, id: LinkId) {
        if let Some(link) = self.table.link(id) {
            let mut guard = link.state.lock();
            let state = &mut *guard;
            match (&mut state.phase, &mut state.wire) {
                (LinkPhase::Up(traffic), Some(wire)) => match traffic.send_close(wire) {
                    Ok(()) => self.begin_closing(&link, state),
                    Err(_) => self.end(&link, state, None),
                },
                (LinkPhase::Closing { .. }, _) => {}
                _ => self.end(&link, state, None),
            }
        }
        // Its end may be waiting to be reported.
        self.events.forget(id);
        self.waker.notify();
    }

    /// Ends a link at once, whatever its phase.
    pub(super) fn take_down(&self, link: &TcpLink, reason: CloseReason) {
        let mut state = link.state.lock();
        match state.phase {
            LinkPhase::Connecting(_) | LinkPhase::Handshake { .. } => self.break_handshake(link, &mut state, reason),
            LinkPhase::Up(_) => {
                self.events.forget_traffic(link.id);
                self.end_traffic(link, &mut state, reason);
            }
            // Its last messages are still on the way.
            LinkPhase::Closing { .. } if reason == CloseReason::Replaced => {}
            LinkPhase::Closing { .. } | LinkPhase::Down => self.end(link, &mut state, None),
        }
    }

    /// Ends links whose time is over.
    pub(super) fn expire(&self, now: Instant) {
        for link in self.table.expired(now) {
            let mut state = link.state.lock();
            match state.phase {
                LinkPhase::Connecting(_) => self.fail_to_connect(&link, &mut state, ErrorKind::TimedOut.into()),
                LinkPhase::Handshake { .. } => {
                    self.break_handshake(&link, &mut state, CloseReason::HandshakeTimeout);
                }
                LinkPhase::Closing { .. } | LinkPhase::Down => self.end(&link, &mut state, None),
                LinkPhase::Up(_) => {}
            }
        }
    }

    /// Refuses a peer: says so in the log, to the layers above if they asked for the link, and to the peer.
    fn refuse(&self, link: &TcpLink, state: &mut LinkState, reason: LinkRefusal, answer: &[u8]) {
        if matches!(state.phase, LinkPhase::Closing { .. } | LinkPhase::Down) {
            return;
        }
        self.log.warn(&link.address, &reason);
        if let Some(node) = link.expected {
            let error = FabricError::Refused { address: link.address.clone(), reason };
            self.events.push(Event::Failed { link: link.id, node, error });
        }
        match self.send_raw(link, state, answer) {
            Ok(()) => self.begin_closing(link, state),
            Err(_) => self.end(link, state, None),
        }
    }

    fn begin_closing(&self, link: &TcpLink, state: &mut LinkState) {
        state.phase = LinkPhase::Closing { is_finished: false };
        self.table.set_deadline(link.id, Instant::now() + LINGER_TIME);
        self.finish_closing(link, state);
    }

    /// Says to the peer that nothing follows, once all is sent. The peer's end of the stream then ends the link.
    fn finish_closing(&self, link: &TcpLink, state: &mut LinkState) {
        let LinkState { phase: LinkPhase::Closing { is_finished }, wire: Some(wire) } = state else { return };
        let mut result = wire.flush();
        if result.is_ok() && !*is_finished && !wire.is_blocked() {
            *is_finished = true;
            result = unless_blocked(wire.transport.finish_sending());
        }
        if result.and_then(|()| wire.arm(&self.epoll, link.id)).is_err() {
            self.end(link, state, None);
        }
    }

    fn end_traffic(&self, link: &TcpLink, state: &mut LinkState, reason: CloseReason) {
        let event = match state.phase {
            LinkPhase::Up(_) => {
                if matches!(reason, CloseReason::Invalid(_)) {
                    self.log.warn(&link.address, &reason);
                }
                Some(Event::Down { link: link.id, reason })
            }
            _ => None,
        };
        self.end(link, state, event);
    }

    fn break_handshake(&self, link: &TcpLink, state: &mut LinkState, reason: CloseReason) {
        if link.is_outgoing() {
            let error = FabricError::Handshake { address: link.address.clone(), reason };
            return self.fail(link, state, error);
        }
        self.end_incoming(link, state, &reason);
    }

    fn fail(&self, link: &TcpLink, state: &mut LinkState, error: FabricError) {
        let event = link.expected.map(|node| Event::Failed { link: link.id, node, error });
        self.end(link, state, event);
    }

    fn end_incoming(&self, link: &TcpLink, state: &mut LinkState, reason: &dyn Display) {
        self.log.warn(&link.address, reason);
        self.end(link, state, None);
    }

    /// Drops the connection, and with it all that waits.
    fn end(&self, link: &TcpLink, state: &mut LinkState, event: Option<Event>) {
        state.phase = LinkPhase::Down;
        state.wire = None;
        // In this order: closing a link that is in no table takes back the events that are there.
        event.into_iter().for_each(|event| self.events.push(event));
        self.table.remove(link.id);
    }
}

/// Draws a number that no handshake had before.
pub(super) fn nonce() -> [u8; 16] {
    let mut nonce = [0; 16];
    // Without it no replay would be found, so there is nothing to go on with. The kernel gives so few bytes at once.
    let draw = || rustix::rand::getrandom(&mut nonce, GetRandomFlags::empty());
    let count = rustix::io::retry_on_intr(draw).expect("the kernel has random numbers");
    assert_eq!(count, nonce.len(), "the kernel gives few random bytes whole");
    nonce
}

/// Returns how many bytes a read of a link has given, or why the link ends.
fn received(read: io::Result<usize>) -> Result<usize, CloseReason> {
    match read {
        Ok(0) => Err(CloseReason::PeerGone),
        Ok(count) => Ok(count),
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(0),
        // An alert is the peer's complaint of invalid bytes.
        Err(error) => Err(match tls_failure(&error) {
            Some(TlsFailure::Refuse(_)) => CloseReason::Invalid(error.to_string()),
            Some(TlsFailure::Refused(_)) | None => CloseReason::from(&error),
        }),
    }
}
