//! Bytes of a connection, with TLS or without.

use std::io::{self, BufReader, ErrorKind, IoSlice, Read, Write};

use rustls::Connection;
use rustls::pki_types::CertificateDer;

use super::socket::CountingSocket;

/// Received bytes that wait for TLS. It reads four KiB at a time by itself, which takes 256 system calls for a MiB.
const TLS_READ_BYTES: usize = 64 << 10;
/// Bytes that TLS encrypts ahead of the socket.
const TLS_SEND_BYTES: usize = 256 << 10;

/// Bytes of a connection. No function waits: an error of kind `WouldBlock` says that the network takes or has no more.
pub(super) enum Transport {
    /// As they are.
    Plain(CountingSocket),
    /// Encrypted.
    Tls(Box<TlsTransport>),
}

/// A connection with TLS.
pub(super) struct TlsTransport {
    connection: Connection,
    socket: BufReader<CountingSocket>,
}

impl TlsTransport {
    fn flush(&mut self) -> io::Result<()> {
        while self.connection.wants_write() {
            if self.connection.write_tls(self.socket.get_mut())? == 0 {
                return Err(ErrorKind::WriteZero.into());
            }
        }
        Ok(())
    }

    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            match self.connection.reader().read(buffer) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                result => return result,
            }
            self.connection.read_tls(&mut self.socket)?;
            let processed = self.connection.process_new_packets();
            // The next step of its handshake, or the alert that tells the peer of the error.
            let flushed = unless_blocked(self.flush());
            processed.map_err(|error| io::Error::new(ErrorKind::InvalidData, error))?;
            flushed?;
        }
    }
}

impl Transport {
    pub(super) fn tls(socket: CountingSocket, mut connection: Connection) -> Self {
        connection.set_buffer_limit(Some(TLS_SEND_BYTES));
        Self::Tls(Box::new(TlsTransport { connection, socket: BufReader::with_capacity(TLS_READ_BYTES, socket) }))
    }

    pub(super) fn socket(&self) -> &CountingSocket {
        match self {
            Self::Plain(socket) => socket,
            Self::Tls(tls) => tls.socket.get_ref(),
        }
    }

    pub(super) fn socket_mut(&mut self) -> &mut CountingSocket {
        match self {
            Self::Plain(socket) => socket,
            Self::Tls(tls) => tls.socket.get_mut(),
        }
    }

    /// Gives TLS up, before a byte was sent.
    pub(super) fn into_plain(self) -> Self {
        match self {
            Self::Tls(tls) => Self::Plain(tls.socket.into_inner()),
            plain @ Self::Plain(_) => plain,
        }
    }

    pub(super) const fn is_tls(&self) -> bool {
        matches!(self, Self::Tls(_))
    }

    /// The peer's certificate, which the cluster's authority has signed.
    pub(super) fn certificate(&self) -> Option<&CertificateDer<'static>> {
        match self {
            Self::Plain(_) => None,
            Self::Tls(tls) => tls.connection.peer_certificates().and_then(<[_]>::first),
        }
    }

    /// Bytes that were written wait for the socket.
    pub(super) fn has_unsent(&self) -> bool {
        matches!(self, Self::Tls(tls) if tls.connection.wants_write())
    }

    pub(super) fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Plain(socket) => socket.read(buffer),
            Self::Tls(tls) => tls.read(buffer),
        }
    }

    /// Writes some of the bytes.
    pub(super) fn write(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        match self {
            Self::Plain(socket) => socket.write_vectored(slices),
            Self::Tls(tls) => {
                tls.flush()?;
                let count = tls.connection.writer().write_vectored(slices)?;
                unless_blocked(tls.flush())?;
                // While TLS shakes hands it keeps bytes, up to its limit.
                if count == 0 { Err(ErrorKind::WouldBlock.into()) } else { Ok(count) }
            }
        }
    }

    /// Hands all that was written to the socket.
    pub(super) fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::Plain(_) => Ok(()),
            Self::Tls(tls) => tls.flush(),
        }
    }

    /// Ends the sending direction, when all was flushed.
    pub(super) fn finish_sending(&mut self) -> io::Result<()> {
        if let Self::Tls(tls) = self {
            tls.connection.send_close_notify();
            tls.flush()?;
        }
        self.socket().finish_sending();
        Ok(())
    }
}

/// Takes an operation that the network did not let go on for one that succeeded.
pub(super) fn unless_blocked(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(()),
        result => result,
    }
}
