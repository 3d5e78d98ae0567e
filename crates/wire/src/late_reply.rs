//! A reply that another thread sends than the one that serves the connection.

use std::os::unix::net::UnixStream;

use rustix::net::{SendFlags, send};
use serde::Serialize;

use crate::WireError;
use crate::connection::encode_message;

/// Sends a short reply without waiting, instead of the connection's own thread.
///
/// # Errors
/// [`WireError`] if the peer is gone, or has not read what was sent before: then the connection is of no use any more.
pub fn send_reply_now<M: Serialize>(socket: &UnixStream, reply: &M) -> Result<(), WireError> {
    let bytes = encode_message(reply, Vec::new())?;
    match send(socket, &bytes, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
        Ok(sent) if sent == bytes.len() => Ok(()),
        Ok(_) => Err(WireError::Silent),
        Err(error) => Err(WireError::Io(error.into())),
    }
}
