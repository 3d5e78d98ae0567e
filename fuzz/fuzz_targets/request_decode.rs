//! Arbitrary bytes in the place of a message of the session protocol.
//!
//! The bytes cross a socket, and SharedFS's and LibFS's own functions receive them. A decoded message is encoded to
//! bytes that decode to an equal message. No decoding takes more memory than its message's length allows.
#![no_main]

mod counting_allocator;

use std::fmt::Debug;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use ashlar_wire::{Connection, ReceiveLimits, Reply, Request, WireError};
use counting_allocator::most_taken;
use libfuzzer_sys::fuzz_target;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Bytes of memory that a byte of a message may take, and what any message may take.
///
/// A byte may stand for an element of a list, and a list that grows is copied to twice its room. A reply's element has
/// the attributes of an inode.
const REQUEST_MEMORY_PER_BYTE: usize = 128;
const REPLY_MEMORY_PER_BYTE: usize = 1024;
const MEMORY_ANY: usize = 64 << 10;
/// The longest message of a session, and the part of it that is sent here.
const REQUEST_BYTES_MAX: usize = 64 << 10;
const SENT_BYTES_MAX: usize = 32 << 10;

/// Returns a connection at whose other end these bytes stand, behind this length.
fn connection_with(length: u32, bytes: &[u8]) -> Connection {
    let (mut sender, receiver) = UnixStream::pair().expect("sockets");
    // Both fit into the socket's buffer.
    sender.write_all(&length.to_le_bytes()).and_then(|()| sender.write_all(bytes)).expect("room in the socket");
    Connection::from_socket(receiver)
}

/// Receives a message, and checks how much memory that takes.
fn receive<M>(
    bytes: &[u8],
    memory_per_byte: usize,
    receive: impl FnOnce(&mut Connection) -> Result<(M, Vec<OwnedFd>), WireError>,
) -> Option<M> {
    let mut connection = connection_with(bytes.len() as u32, bytes);
    let (received, taken) = most_taken(|| receive(&mut connection));
    assert!(taken <= MEMORY_ANY + memory_per_byte * bytes.len(), "{} bytes took {taken} of memory", bytes.len());
    match received {
        Ok((message, descriptors)) => {
            assert!(descriptors.is_empty());
            Some(message)
        }
        Err(error) => {
            assert!(matches!(error, WireError::Malformed), "{error}");
            None
        }
    }
}

/// Checks that a decoded message is encoded to bytes that decode to an equal one.
fn check_encoding<M: Serialize + DeserializeOwned + Debug>(message: &M) {
    let (one, other) = UnixStream::pair().expect("sockets");
    let (mut sender, mut receiver) = (Connection::from_socket(one), Connection::from_socket(other));
    sender.send(message, &[]).expect("sent");
    let (again, _) = receiver.receive::<M>().expect("a message");
    // The messages have no equality of their own, and print all of their fields.
    assert_eq!(format!("{message:?}"), format!("{again:?}"));
}

fuzz_target!(|data: &[u8]| {
    let data = &data[..data.len().min(SENT_BYTES_MAX)];
    let limits = ReceiveLimits {
        bytes_max: REQUEST_BYTES_MAX,
        silence_max: Some(Duration::from_secs(1)),
        message_max: Duration::from_secs(1),
        takes_descriptors: false,
    };
    // SharedFS receives requests, and LibFS receives replies.
    let request = |connection: &mut Connection| connection.receive_bounded::<Request>(&limits);
    if let Some(request) = receive(data, REQUEST_MEMORY_PER_BYTE, request) {
        check_encoding(&request);
    }
    if let Some(reply) = receive(data, REPLY_MEMORY_PER_BYTE, Connection::receive::<Reply>) {
        check_encoding(&reply);
    }
    // A length that its message does not have: too long, or cut off.
    if let Some((length, bytes)) = data.split_first_chunk() {
        let mut connection = connection_with(u32::from_le_bytes(*length), bytes);
        let length = u32::from_le_bytes(*length) as usize;
        let received = connection.receive_bounded::<Request>(&limits);
        match received {
            Err(WireError::TooLong(said)) => assert!(said == length && length > REQUEST_BYTES_MAX),
            Err(error) => assert!(matches!(error, WireError::Malformed | WireError::Closed), "{error}"),
            Ok(_) => assert!(length <= bytes.len()),
        }
    }
});
