//! Framed messages with descriptors over a unix stream socket.
//!
//! ```text
//! length:4 (little-endian, bytes that follow)  postcard bytes…
//! ```
//! Descriptors travel as `SCM_RIGHTS` with the first byte of their message.
//!
//! A receiver that does not trust the other side takes no descriptor that its message does not need. To close a file
//! can wait for the file's server, for ever and in the kernel, where no signal ends it; and any user can serve files.
//! So the kernel refuses them where it can (Linux 6.16, `SO_PASSRIGHTS`). Elsewhere the receiver looks at the bytes in
//! the queue first (`MSG_PEEK`, without room for descriptors), which shows whether any come with them, and leaves those
//! in the queue.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ashlar_pmem::set_descriptors_pass;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt::{Timeout, set_socket_timeout, socket_peercred};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, Shutdown, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, recv,
    recvmsg, sendmsg, shutdown, socket_with,
};
use rustix::process::geteuid;
use serde::Serialize;
use serde::de::DeserializeOwned;
use thiserror::Error;

use crate::BusyWait;

/// The longest message, in bytes: a directory's entries or a file's extents with room to spare.
pub const MESSAGE_BYTES_MAX: usize = 64 << 20;

/// A buffer longer than this is freed after its message: long messages are rare, and connections are many.
const BUFFER_BYTES_KEPT: usize = 128 << 10;

/// Connections that wait to be accepted; the system may allow fewer.
const BACKLOG: i32 = 1024;

/// The most descriptors in one message, which is the number that a welcome carries.
const DESCRIPTORS_MAX: usize = 6;

/// Spins between two polls of the socket: some hundred nanoseconds, so that the socket is not always locked.
const SPINS_BETWEEN_POLLS: u32 = 20;

/// Returns the default path of the socket on which an arena's daemon listens.
#[must_use]
pub fn socket_of(arena: &Path) -> PathBuf {
    arena.join("socket")
}

/// Reasons why a message did not get through.
#[derive(Debug, Error)]
pub enum WireError {
    /// The peer is gone.
    #[error("the other side has closed the connection")]
    Closed,
    /// Nothing has arrived for as long as the connection waits.
    #[error("the other side does not answer")]
    Silent,
    /// The process that listens there is neither root's nor the caller's own.
    #[error("the process that listens there belongs to user {0}; only one of root or of the caller is trusted")]
    ForeignServer(u32),
    /// The socket reported an error.
    #[error("the connection failed: {0}")]
    Io(#[from] io::Error),
    /// The bytes are not a message.
    #[error("the other side sent bytes that are no message of this protocol")]
    Malformed,
    /// The message is longer than [`MESSAGE_BYTES_MAX`], or longer than the receiver accepts.
    #[error("a message of {0} bytes is too long")]
    TooLong(usize),
    /// Descriptors came that the receiver does not take. They may still be in the queue.
    #[error("the other side sent descriptors that no message takes")]
    Descriptors,
}

/// The messages that a receiver takes from a side that it does not trust.
#[derive(Clone, Copy, Debug)]
pub struct ReceiveLimits {
    /// The longest message, in bytes.
    pub bytes_max: usize,
    /// How long the other side may be silent before its message begins; `None`: for ever.
    pub silence_max: Option<Duration>,
    /// How long a message may take once it has begun.
    pub message_max: Duration,
    /// Whether descriptors may come with it.
    pub takes_descriptors: bool,
}

/// One connection, on which requests and replies take turns.
#[derive(Debug)]
pub struct Connection {
    socket: UnixStream,
    watch: BusyWait,
    buffer: Vec<u8>,
    /// The kernel refuses descriptors that are sent to it.
    is_guarded: bool,
    /// How long a message may take to be sent.
    sending_max: Option<Duration>,
}

/// Returns a message as it is sent, in memory that is given.
pub(crate) fn encode_message<M: Serialize>(message: &M, mut buffer: Vec<u8>) -> Result<Vec<u8>, WireError> {
    buffer.clear();
    buffer.extend_from_slice(&[0; 4]);
    let mut buffer = postcard::to_extend(message, buffer).map_err(|_| WireError::Malformed)?;
    let length = buffer.len() - 4;
    if length > MESSAGE_BYTES_MAX {
        return Err(WireError::TooLong(length));
    }
    buffer[..4].copy_from_slice(&(length as u32).to_le_bytes());
    Ok(buffer)
}

impl AsRawFd for Connection {
    fn as_raw_fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }
}

impl Connection {
    /// Connects to SharedFS's socket.
    ///
    /// The path may be another user's choice, as the source of a mount is. So a server is trusted only if it is root's
    /// or the caller's own: it serves the contents of files, and the memory that the caller maps.
    ///
    /// # Errors
    /// [`WireError::Io`] if no process listens there, [`WireError::ForeignServer`] if another user's does.
    pub fn connect(path: &Path) -> Result<Self, WireError> {
        Self::to_trusted_server(UnixStream::connect(path)?)
    }

    /// Connects like [`Self::connect`], with a descriptor numbered `least` or higher.
    ///
    /// If the process may have no such number, the descriptor keeps a lower one. The other side may be silent for
    /// `silence` at a time: see [`Self::call_watched`].
    ///
    /// # Errors
    /// As [`Self::connect`].
    pub fn connect_above(path: &Path, least: i32, silence: Duration) -> Result<Self, WireError> {
        let kind = SocketFlags::CLOEXEC;
        let mut socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, kind, None).map_err(io::Error::from)?;
        // Move the descriptor at once: another thread may be about to get its number. If the process has lowered its
        // limit since, no higher numbers may exist any more.
        if socket.as_raw_fd() < least
            && let Ok(moved) = rustix::io::fcntl_dupfd_cloexec(&socket, least)
        {
            socket = moved;
        }
        for direction in [Timeout::Recv, Timeout::Send] {
            set_socket_timeout(&socket, direction, Some(silence)).map_err(io::Error::from)?;
        }
        // A listener that accepts nothing has room for some connections only. Then this call waits too.
        connect(&socket, &SocketAddrUnix::new(path).map_err(io::Error::from)?).map_err(io::Error::from)?;
        Self::to_trusted_server(UnixStream::from(socket))
    }

    /// Wraps a socket that is connected to a server.
    fn to_trusted_server(socket: UnixStream) -> Result<Self, WireError> {
        let server = socket_peercred(&socket).map_err(io::Error::from)?.uid;
        if !server.is_root() && server != geteuid() {
            return Err(WireError::ForeignServer(server.as_raw()));
        }
        Ok(Self::from_socket(socket))
    }

    /// Wraps a connected socket.
    #[must_use]
    pub fn from_socket(socket: UnixStream) -> Self {
        Self { socket, watch: BusyWait::default(), buffer: Vec::new(), is_guarded: false, sending_max: None }
    }

    /// Lets the other side send descriptors, which a listener's connections refuse at first.
    ///
    /// # Errors
    /// The system's.
    pub fn let_descriptors_pass(&mut self) -> io::Result<()> {
        if std::mem::take(&mut self.is_guarded) { set_descriptors_pass(self.socket.as_fd(), true) } else { Ok(()) }
    }

    /// Limits how long messages wait until the other side takes them.
    ///
    /// It may take nothing for a part of `most`. After that, [`Self::send`] fails with [`WireError::Silent`].
    ///
    /// # Errors
    /// The system's.
    pub fn limit_sending(&mut self, most: Duration) -> io::Result<()> {
        self.sending_max = Some(most);
        Ok(set_socket_timeout(&self.socket, Timeout::Send, Some(most / 3))?)
    }

    /// Returns the socket, for `poll` and for peer credentials.
    #[must_use]
    pub fn socket(&self) -> &UnixStream {
        &self.socket
    }

    /// Sends a message with descriptors.
    ///
    /// # Errors
    /// [`WireError`] if the peer is gone or the message is too long.
    pub fn send<M: Serialize>(&mut self, message: &M, descriptors: &[BorrowedFd<'_>]) -> Result<(), WireError> {
        let buffer = encode_message(message, std::mem::take(&mut self.buffer))?;
        let result = self.send_all(&buffer, descriptors);
        self.keep_buffer(buffer);
        result
    }

    fn send_all(&self, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> Result<(), WireError> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
            return Err(WireError::Malformed);
        }
        let (mut sent, mut begun) = (0, None);
        while sent < bytes.len() {
            match sendmsg(&self.socket, &[IoSlice::new(&bytes[sent..])], &mut control, SendFlags::NOSIGNAL) {
                Ok(count) => {
                    sent += count;
                    control.clear();
                    let is_late = |most| sent < bytes.len() && begun.get_or_insert_with(Instant::now).elapsed() > most;
                    if self.sending_max.is_some_and(is_late) {
                        return Err(WireError::Silent);
                    }
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => return Err(WireError::Silent),
                Err(rustix::io::Errno::PIPE | rustix::io::Errno::CONNRESET) => return Err(WireError::Closed),
                Err(error) => return Err(WireError::Io(error.into())),
            }
        }
        Ok(())
    }

    /// Returns another handle of the socket, by which another thread sends a reply ([`crate::send_reply_now`]).
    ///
    /// # Errors
    /// The system's.
    pub fn reply_socket(&self) -> io::Result<UnixStream> {
        self.socket.try_clone()
    }

    /// Receives a message and its descriptors.
    ///
    /// # Errors
    /// [`WireError`] if the peer is gone or has sent something else.
    pub fn receive<M: DeserializeOwned>(&mut self) -> Result<(M, Vec<OwnedFd>), WireError> {
        self.receive_watched(MESSAGE_BYTES_MAX, &mut || Err(WireError::Silent))
    }

    /// Receives like [`Self::receive`], but only within limits.
    ///
    /// No memory is allocated for a refused message, and the connection is unusable afterwards.
    ///
    /// # Errors
    /// [`WireError`] if the peer is gone, was silent for too long, or has sent something else or too much.
    pub fn receive_bounded<M: DeserializeOwned>(
        &mut self,
        limits: &ReceiveLimits,
    ) -> Result<(M, Vec<OwnedFd>), WireError> {
        let mut descriptors = Vec::new();
        if let Some(silence_max) = limits.silence_max {
            self.await_bytes(Instant::now() + silence_max)?;
        }
        let (mut header, mut deadline) = ([0; 4], None);
        let first = self.take_bytes(&mut header, RecvFlags::empty(), limits, &mut descriptors)?;
        self.fill_bytes(&mut header[first..], limits, &mut descriptors, &mut deadline)?;
        let length = u32::from_le_bytes(header) as usize;
        if length > limits.bytes_max.min(MESSAGE_BYTES_MAX) {
            return Err(WireError::TooLong(length));
        }
        let mut buffer = std::mem::take(&mut self.buffer);
        buffer.clear();
        buffer.resize(length, 0);
        let received = self.fill_bytes(&mut buffer, limits, &mut descriptors, &mut deadline);
        let message = received.and_then(|()| postcard::from_bytes(&buffer).map_err(|_| WireError::Malformed));
        self.keep_buffer(buffer);
        Ok((message?, descriptors))
    }

    /// Ends the receiving, and returns whether descriptors are left in the queue.
    ///
    /// The last copy of the socket that is closed closes them too.
    #[must_use]
    pub fn has_queued_descriptors(&self) -> bool {
        if self.is_guarded {
            return false;
        }
        // From here on nothing more gets into the queue. This fails only if the other side is gone.
        let _ = shutdown(&self.socket, Shutdown::Read);
        let none =
            ReceiveLimits { bytes_max: 0, silence_max: None, message_max: Duration::ZERO, takes_descriptors: false };
        let mut bytes = [0; 4096];
        loop {
            match self.take_bytes(&mut bytes, RecvFlags::DONTWAIT, &none, &mut Vec::new()) {
                Ok(_) => {}
                Err(error) => return matches!(error, WireError::Descriptors),
            }
        }
    }

    /// Fills a buffer with bytes of a message that has begun.
    fn fill_bytes(
        &self,
        bytes: &mut [u8],
        limits: &ReceiveLimits,
        descriptors: &mut Vec<OwnedFd>,
        deadline: &mut Option<Instant>,
    ) -> Result<(), WireError> {
        let mut filled = 0;
        while filled < bytes.len() {
            match self.take_bytes(&mut bytes[filled..], RecvFlags::DONTWAIT, limits, descriptors) {
                Ok(count) => filled += count,
                // Messages come whole as a rule, so the clock is read only here.
                Err(WireError::Silent) => {
                    self.await_bytes(*deadline.get_or_insert_with(|| Instant::now() + limits.message_max))?;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Waits until there are bytes to receive, or the other side is gone.
    fn await_bytes(&self, deadline: Instant) -> Result<(), WireError> {
        loop {
            let left = deadline.checked_duration_since(Instant::now()).ok_or(WireError::Silent)?;
            let left = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
            match poll(&mut [PollFd::new(&self.socket, PollFlags::IN)], Some(&left)) {
                Ok(0) | Err(rustix::io::Errno::INTR) => {}
                Ok(_) => return Ok(()),
                Err(error) => return Err(WireError::Io(error.into())),
            }
        }
    }

    /// Takes bytes from the queue, and descriptors only if the limits allow that.
    ///
    /// Returns [`WireError::Silent`] if it may not wait and there are none.
    fn take_bytes(
        &self,
        bytes: &mut [u8],
        flags: RecvFlags,
        limits: &ReceiveLimits,
        descriptors: &mut Vec<OwnedFd>,
    ) -> Result<usize, WireError> {
        if limits.takes_descriptors {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let all = flags | RecvFlags::CMSG_CLOEXEC;
            let count = retry_interrupted(|| {
                let message = recvmsg(&self.socket, &mut [IoSliceMut::new(bytes)], &mut control, all)?;
                Ok(message.bytes)
            })?;
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(received) = message {
                    descriptors.extend(received);
                }
            }
            return if descriptors.len() > DESCRIPTORS_MAX { Err(WireError::Descriptors) } else { Ok(count) };
        }
        if self.is_guarded {
            return retry_interrupted(|| recv(&self.socket, &mut *bytes, flags).map(|(count, _)| count));
        }
        let (count, found) = retry_interrupted_with(|| {
            let mut none = RecvAncillaryBuffer::default();
            let parts = &mut [IoSliceMut::new(bytes)];
            let message = recvmsg(&self.socket, parts, &mut none, flags | RecvFlags::PEEK)?;
            Ok((message.bytes, message.flags))
        })?;
        if found.contains(ReturnFlags::CTRUNC) {
            return Err(WireError::Descriptors);
        }
        // The bytes that were seen are the first in the queue, and this thread alone takes any.
        retry_interrupted(|| recv(&self.socket, &mut bytes[..count], RecvFlags::DONTWAIT).map(|(count, _)| count))
    }

    fn receive_watched<M: DeserializeOwned>(
        &mut self,
        bytes_max: usize,
        watch: &mut dyn FnMut() -> Result<(), WireError>,
    ) -> Result<(M, Vec<OwnedFd>), WireError> {
        let mut descriptors = Vec::new();
        let mut header = [0; 4];
        self.receive_all(&mut header, &mut descriptors, watch)?;
        let length = u32::from_le_bytes(header) as usize;
        if length > bytes_max.min(MESSAGE_BYTES_MAX) {
            return Err(WireError::TooLong(length));
        }
        let mut buffer = std::mem::take(&mut self.buffer);
        buffer.clear();
        buffer.resize(length, 0);
        let received = self.receive_all(&mut buffer, &mut descriptors, watch);
        let message = received.and_then(|()| postcard::from_bytes(&buffer).map_err(|_| WireError::Malformed));
        self.keep_buffer(buffer);
        Ok((message?, descriptors))
    }

    /// Watches for the next message for a moment, without yielding the core.
    ///
    /// A thread that yields a core on which others have work gets it back only after their time slice. A sleeping
    /// thread is woken at once. `other` looks for other work, does it, and returns whether it did any; then the moment
    /// begins anew. `known` is the length of the moment, if the caller knows it.
    pub fn watch(&mut self, known: Option<Duration>, other: &mut dyn FnMut() -> bool) {
        let Self { socket, watch, .. } = self;
        watch.begin_wait(known);
        let mut awaited = [PollFd::new(&*socket, PollFlags::IN)];
        while poll(&mut awaited, Some(&Timespec::default())) == Ok(0) {
            if other() {
                watch.end_wait();
                watch.begin_wait(known);
            } else if !watch.check_again() {
                return;
            }
            (0..SPINS_BETWEEN_POLLS).for_each(|_| std::hint::spin_loop());
        }
        watch.end_wait();
    }

    /// Whether the other side has closed the connection, when no message is due.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        let found = poll(&mut [PollFd::new(&self.socket, PollFlags::IN)], Some(&Timespec::default()));
        !matches!(found, Ok(0) | Err(rustix::io::Errno::INTR))
    }

    /// Keeps a buffer for the next message, unless it's long.
    fn keep_buffer(&mut self, buffer: Vec<u8>) {
        if buffer.capacity() <= BUFFER_BYTES_KEPT {
            self.buffer = buffer;
        }
    }

    fn receive_all(
        &self,
        bytes: &mut [u8],
        descriptors: &mut Vec<OwnedFd>,
        watch: &mut dyn FnMut() -> Result<(), WireError>,
    ) -> Result<(), WireError> {
        let mut received = 0;
        while received < bytes.len() {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let mut parts = [IoSliceMut::new(&mut bytes[received..])];
            match recvmsg(&self.socket, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC) {
                Ok(message) if message.bytes == 0 => return Err(WireError::Closed),
                Ok(message) => received += message.bytes,
                Err(rustix::io::Errno::INTR) => continue,
                Err(rustix::io::Errno::AGAIN) => {
                    watch()?;
                    continue;
                }
                Err(rustix::io::Errno::CONNRESET) => return Err(WireError::Closed),
                Err(error) => return Err(WireError::Io(error.into())),
            }
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(received) = message {
                    descriptors.extend(received);
                }
            }
        }
        Ok(())
    }

    /// Sends a message and waits for the reply.
    ///
    /// # Errors
    /// [`WireError`] if the peer is gone or has sent something else.
    pub fn call<M: Serialize, R: DeserializeOwned>(
        &mut self,
        message: &M,
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<(R, Vec<OwnedFd>), WireError> {
        self.send(message, descriptors)?;
        self.receive()
    }

    /// Sends a message and waits for the reply, asking `watch` at each timeout.
    ///
    /// Each time that nothing has arrived for as long as the connection may be silent, `watch` decides whether to wait
    /// on. Its error ends the call, and then the connection is unusable.
    ///
    /// # Errors
    /// As [`Self::call`], and those of `watch`.
    pub fn call_watched<M: Serialize, R: DeserializeOwned>(
        &mut self,
        message: &M,
        descriptors: &[BorrowedFd<'_>],
        watch: &mut dyn FnMut() -> Result<(), WireError>,
    ) -> Result<(R, Vec<OwnedFd>), WireError> {
        self.send(message, descriptors)?;
        self.receive_reply(watch)
    }

    /// Waits for the reply to a message that was sent: the second half of [`Self::call_watched`].
    ///
    /// # Errors
    /// As [`Self::call_watched`].
    pub fn receive_reply<R: DeserializeOwned>(
        &mut self,
        watch: &mut dyn FnMut() -> Result<(), WireError>,
    ) -> Result<(R, Vec<OwnedFd>), WireError> {
        self.watch(None, &mut || false);
        self.receive_watched(MESSAGE_BYTES_MAX, watch)
    }
}

/// Receives bytes by a call, also after signals; the end of the connection is an error.
fn retry_interrupted(mut receive: impl FnMut() -> rustix::io::Result<usize>) -> Result<usize, WireError> {
    retry_interrupted_with(|| Ok((receive()?, ReturnFlags::empty()))).map(|(count, _)| count)
}

/// Does so by a call that returns flags too.
fn retry_interrupted_with(
    mut receive: impl FnMut() -> rustix::io::Result<(usize, ReturnFlags)>,
) -> Result<(usize, ReturnFlags), WireError> {
    loop {
        match receive() {
            Ok((0, _)) | Err(rustix::io::Errno::CONNRESET) => return Err(WireError::Closed),
            Err(rustix::io::Errno::INTR) => {}
            Err(rustix::io::Errno::AGAIN) => return Err(WireError::Silent),
            result => return Ok(result.map_err(io::Error::from)?),
        }
    }
}

/// The socket on which SharedFS waits for sessions.
#[derive(Debug)]
pub struct Listener {
    socket: Arc<UnixListener>,
    /// The kernel refuses descriptors that are sent to its connections.
    is_guarded: bool,
    path: PathBuf,
    /// The device and inode number of the socket's file.
    file: (u64, u64),
}

fn identity(path: &Path) -> io::Result<(u64, u64)> {
    std::fs::symlink_metadata(path).map(|file| (file.dev(), file.ino()))
}

impl Listener {
    /// Listens at `path`, and replaces a socket that a dead daemon has left there.
    ///
    /// Its connections take no descriptors before [`Connection::let_descriptors_pass`].
    ///
    /// # Errors
    /// The errors of the socket.
    pub fn bind(path: &Path) -> io::Result<Self> {
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        let is_guarded = set_descriptors_pass(socket.as_fd(), false).is_ok();
        bind(&socket, &SocketAddrUnix::new(path)?)?;
        listen(&socket, BACKLOG)?;
        let socket = Arc::new(UnixListener::from(socket));
        Ok(Self { socket, is_guarded, path: path.to_owned(), file: identity(path)? })
    }

    /// Returns a handle for threads that wait for connections.
    #[must_use]
    pub fn acceptor(&self) -> Acceptor {
        Acceptor { socket: Arc::clone(&self.socket), is_guarded: self.is_guarded }
    }

    /// Ends the waiting of all acceptors, for good.
    pub fn stop_accepting(&self) {
        // This fails only if the descriptor is not a socket.
        let _ = shutdown(&*self.socket, Shutdown::Both);
    }
}

/// A handle that waits for connections at a [`Listener`].
#[derive(Clone, Debug)]
pub struct Acceptor {
    socket: Arc<UnixListener>,
    is_guarded: bool,
}

impl Acceptor {
    /// Waits for the next connection; of several acceptors, one receives it.
    ///
    /// # Errors
    /// The errors of the socket, of kind [`io::ErrorKind::InvalidInput`] after [`Listener::stop_accepting`].
    pub fn accept(&self) -> io::Result<Connection> {
        let connection = Connection::from_socket(self.socket.accept()?.0);
        Ok(Connection { is_guarded: self.is_guarded, ..connection })
    }
}

impl Drop for Listener {
    /// Removes the socket's file, unless another socket has replaced it.
    ///
    /// An arena may be removed and created anew while the old arena's daemon still runs. As long as this socket is
    /// open, the number of its file is not used again.
    fn drop(&mut self) {
        if identity(&self.path).is_ok_and(|file| file == self.file) {
            // If the file stays, the next daemon replaces it.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Reply, Request};

    fn lookup(bytes: usize) -> Request {
        let (directory, name) = (ashlar_types::InodeId::ROOT, vec![7; bytes]);
        Request::Lookup { directory, name, within: None, makes: false, write: false, need: crate::Need::default() }
    }

    #[test]
    fn messages_and_descriptors_arrive_whole() {
        let (a, b) = UnixStream::pair().expect("a pair of sockets");
        let (mut a, mut b) = (Connection::from_socket(a), Connection::from_socket(b));
        let file = tempfile::tempfile().expect("a file");
        let sender = std::thread::spawn(move || {
            a.send(&lookup(3 << 20), &[file.as_fd()]).expect("sent");
            a
        });
        let (message, descriptors) = b.receive::<Request>().expect("received");
        assert!(matches!(message, Request::Lookup { name, .. } if name.len() == 3 << 20));
        assert_eq!(descriptors.len(), 1);
        let a = sender.join().expect("no panic");
        assert_eq!((a.buffer.capacity(), b.buffer.capacity()), (0, 0), "long buffers are not kept");
        drop(a);
        assert!(matches!(b.receive::<Reply>(), Err(WireError::Closed)));
    }

    #[test]
    fn listener_removes_only_its_own_socket() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("socket");
        let old = Listener::bind(&path).expect("bound");
        let new = Listener::bind(&path).expect("bound in its place");
        drop(old);
        assert!(UnixStream::connect(&path).is_ok(), "the new one can be reached");
        drop(new);
        assert!(!path.exists());
    }

    /// The socket of a mount's source may be any user's.
    #[test]
    fn server_of_another_user_is_refused() {
        if !geteuid().is_root() {
            return;
        }
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("socket");
        let listener = Listener::bind(&path).expect("bound");
        assert!(Connection::connect(&path).is_ok(), "root's own");
        // The kernel notes the user that begins to listen.
        let stranger = rustix::process::Uid::from_raw(65534);
        std::thread::scope(|scope| {
            let listening = scope.spawn(|| {
                rustix::thread::set_thread_res_uid(stranger, stranger, stranger).expect("another user");
                rustix::net::listen(&*listener.socket, 5).expect("listening");
            });
            listening.join().expect("no panic");
        });
        for connected in [Connection::connect(&path), Connection::connect_above(&path, 0, Duration::from_secs(1))] {
            assert!(matches!(connected, Err(WireError::ForeignServer(65534))), "{connected:?}");
        }
    }

    const LIMITS: ReceiveLimits = ReceiveLimits {
        bytes_max: 1000,
        silence_max: Some(Duration::from_secs(10)),
        message_max: Duration::from_secs(10),
        takes_descriptors: false,
    };

    #[test]
    fn receiver_refuses_messages_over_its_limit() {
        let (a, b) = UnixStream::pair().expect("a pair of sockets");
        let (mut a, mut b) = (Connection::from_socket(a), Connection::from_socket(b));
        a.send(&lookup(900), &[]).expect("sent");
        assert!(b.receive_bounded::<Request>(&LIMITS).is_ok());
        a.send(&lookup(1001), &[]).expect("sent");
        assert!(matches!(b.receive_bounded::<Request>(&LIMITS), Err(WireError::TooLong(length)) if length > 1000));
    }

    #[test]
    fn receiver_gives_silent_side_only_so_long() {
        let (a, b) = UnixStream::pair().expect("a pair of sockets");
        let mut b = Connection::from_socket(b);
        let soon = Duration::from_millis(30);
        let limits = ReceiveLimits { silence_max: Some(soon), ..LIMITS };
        assert!(matches!(b.receive_bounded::<Request>(&limits), Err(WireError::Silent)), "before a message");
        let limits = ReceiveLimits { silence_max: None, message_max: soon, ..LIMITS };
        for part in [&[3, 0][..], &[0, 0, 1]] {
            std::io::Write::write_all(&mut &a, part).expect("written");
            let begun = Instant::now();
            assert!(matches!(b.receive_bounded::<Request>(&limits), Err(WireError::Silent)), "in the middle of one");
            assert!(begun.elapsed() >= soon);
        }
    }

    /// Looks by another descriptor of a connection whether a descriptor is still in its queue.
    fn has_queued_descriptor(queue: &UnixStream) -> bool {
        let (mut byte, mut none) = ([0], RecvAncillaryBuffer::default());
        let found = recvmsg(queue, &mut [IoSliceMut::new(&mut byte)], &mut none, RecvFlags::PEEK).expect("bytes");
        found.flags.contains(ReturnFlags::CTRUNC)
    }

    /// A descriptor of a file whose server does not answer must not be closed by the receiver.
    #[test]
    fn descriptors_that_no_message_takes_stay_in_the_queue() {
        let file = tempfile::tempfile().expect("a file");
        let (a, b) = UnixStream::pair().expect("a pair of sockets");
        let queue = b.try_clone().expect("a copy");
        let (mut a, mut b) = (Connection::from_socket(a), Connection::from_socket(b));
        a.send(&lookup(20), &[]).expect("sent");
        assert!(b.receive_bounded::<Request>(&LIMITS).is_ok(), "messages without any arrive");
        a.send(&lookup(20), &[file.as_fd()]).expect("sent");
        assert!(matches!(b.receive_bounded::<Request>(&LIMITS), Err(WireError::Descriptors)));
        assert!(has_queued_descriptor(&queue));
        assert!(b.has_queued_descriptors() && has_queued_descriptor(&queue));
        let (a, b) = UnixStream::pair().expect("a pair of sockets");
        let (mut a, b) = (Connection::from_socket(a), Connection::from_socket(b));
        a.send(&lookup(9000), &[]).expect("sent");
        assert!(!b.has_queued_descriptors());
        assert!(a.send(&lookup(20), &[file.as_fd()]).is_err(), "nothing more is received");
    }

    #[test]
    fn message_brings_no_more_descriptors_than_any_takes() {
        let file = tempfile::tempfile().expect("a file");
        let (a, b) = UnixStream::pair().expect("a pair of sockets");
        let (a, mut b) = (Connection::from_socket(a), Connection::from_socket(b));
        let limits = ReceiveLimits { takes_descriptors: true, ..LIMITS };
        let five = [file.as_fd(); 5];
        a.send_all(&900u32.to_le_bytes(), &five).expect("sent");
        a.send_all(&[0], &five).expect("sent");
        assert!(matches!(b.receive_bounded::<Request>(&limits), Err(WireError::Descriptors)));
    }

    #[test]
    fn listener_refuses_descriptors_until_allowed() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("socket");
        let listener = Listener::bind(&path).expect("bound");
        let file = tempfile::tempfile().expect("a file");
        let mut near = Connection::connect(&path).expect("connected");
        let mut far = listener.acceptor().accept().expect("accepted");
        let sent = near.send(&lookup(20), &[file.as_fd()]);
        if listener.is_guarded {
            assert!(matches!(sent, Err(WireError::Io(error)) if error.raw_os_error() == Some(libc::EPERM)));
        } else {
            assert!(matches!(far.receive_bounded::<Request>(&LIMITS), Err(WireError::Descriptors)));
            return;
        }
        far.let_descriptors_pass().expect("allowed");
        near.send(&lookup(20), &[file.as_fd()]).expect("sent");
        let limits = ReceiveLimits { takes_descriptors: true, ..LIMITS };
        assert_eq!(far.receive_bounded::<Request>(&limits).expect("received").1.len(), 1);
    }

    #[test]
    fn message_that_the_other_side_does_not_take_is_given_up() {
        let (a, b) = UnixStream::pair().expect("a pair of sockets");
        let mut a = Connection::from_socket(a);
        a.limit_sending(Duration::from_millis(60)).expect("limited");
        assert!(matches!(a.send(&lookup(3 << 20), &[]), Err(WireError::Silent)));
        drop(b);
    }

    #[test]
    fn silent_side_is_noticed_within_a_message() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("socket");
        let listener = Listener::bind(&path).expect("bound");
        let mut near = Connection::connect_above(&path, 0, Duration::from_millis(20)).expect("connected");
        let mut far = listener.acceptor().accept().expect("accepted");
        // A message that arrives in two parts, with silence between them.
        let (mut turns, far_end) = (0, far.socket().try_clone().expect("a copy"));
        let whole = [&[3, 0, 0, 0][..], &postcard::to_allocvec(&b"ab"[..]).expect("bytes")].concat();
        std::io::Write::write_all(&mut &far_end, &whole[..5]).expect("written");
        let answer = near.call_watched::<_, Vec<u8>>(&Request::Digest, &[], &mut || {
            turns += 1;
            if turns == 3 {
                std::io::Write::write_all(&mut &far_end, &whole[5..]).expect("written");
            }
            Ok(())
        });
        assert_eq!((answer.expect("answered").0, turns), (b"ab".to_vec(), 3));
        assert!(matches!(far.receive::<Request>(), Ok((Request::Digest, _))));
        let silent = near.call_watched::<_, Reply>(&Request::Digest, &[], &mut || Err(WireError::Silent));
        assert!(matches!(silent, Err(WireError::Silent)));
    }

    #[test]
    fn garbage_gives_an_error_and_no_panic() {
        let (a, b) = UnixStream::pair().expect("a pair of sockets");
        let mut b = Connection::from_socket(b);
        std::io::Write::write_all(&mut &a, &[3, 0, 0, 0, 0xff, 0xff, 0xff]).expect("written");
        assert!(matches!(b.receive::<Request>(), Err(WireError::Malformed)));
        std::io::Write::write_all(&mut &a, &[0xff; 4]).expect("written");
        assert!(matches!(b.receive::<Request>(), Err(WireError::TooLong(_))));
    }
}
