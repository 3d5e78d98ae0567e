//! Non-blocking sockets that count their bytes.

use std::io::{self, IoSlice, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, connect, ipproto, socket_with};

/// A non-blocking socket that counts its bytes.
pub(super) struct CountingSocket {
    pub(super) stream: TcpStream,
    pub(super) sent: u64,
    pub(super) received: u64,
}

impl CountingSocket {
    /// Takes a socket over.
    pub(super) fn new(stream: TcpStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        Ok(Self { stream, sent: 0, received: 0 })
    }

    /// Begins to connect; the socket becomes writable when that has ended.
    pub(super) fn connect(address: SocketAddr) -> io::Result<Self> {
        let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let socket = socket_with(family, SocketType::STREAM, flags, Some(ipproto::TCP))?;
        match connect(&socket, &address) {
            Ok(()) | Err(Errno::INPROGRESS | Errno::INTR) => Self::new(TcpStream::from(socket)),
            Err(error) => Err(error.into()),
        }
    }

    /// Looks at the first byte without taking it; `None` at the end of the stream.
    pub(super) fn peek(&self) -> io::Result<Option<u8>> {
        let mut first = [0];
        Ok((self.stream.peek(&mut first)? > 0).then_some(first[0]))
    }

    /// Ends the sending direction. An error means that the connection has ended already.
    pub(super) fn finish_sending(&self) {
        let _ = self.stream.shutdown(Shutdown::Write);
    }

    /// Ends both directions, so that the polling thread finds the end.
    pub(super) fn cut(&self) {
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}

impl Read for CountingSocket {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.stream.read(buffer)?;
        self.received += count as u64;
        Ok(count)
    }
}

impl Write for CountingSocket {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        self.write_vectored(&[IoSlice::new(buffer)])
    }

    fn write_vectored(&mut self, buffers: &[IoSlice<'_>]) -> io::Result<usize> {
        let count = self.stream.write_vectored(buffers)?;
        self.sent += count as u64;
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
