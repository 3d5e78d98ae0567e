//! Closes descriptors that a session sent and SharedFS does not take.
//!
//! To close a file may wait for the file's server, for ever, and any user can serve files.

use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;

use rustix::net::{RecvAncillaryBuffer, RecvFlags, recvmsg};

use crate::errand::start_errand;

/// As many descriptors as the kernel lets through with one message (`SCM_MAX_FD`).
const DESCRIPTORS_MAX: usize = 253;
/// Bytes to take from the queue at a time.
const BYTES: usize = 4096;

/// Starts a thread that empties the queue of a socket.
pub(crate) fn begin_close(socket: UnixStream) {
    // If there is no thread, the socket is closed here, and the queue with it.
    start_errand("close", move || {
        // Nothing more gets into the queue. A socket whose other side is gone takes nothing anyway.
        let _ = socket.shutdown(Shutdown::Both);
        while let Ok(true) = close_some(&socket) {}
    });
}

/// Takes some bytes from the queue, and closes the descriptors that come with them; returns whether there were any.
fn close_some(socket: &UnixStream) -> io::Result<bool> {
    let (mut bytes, mut space) = ([0; BYTES], [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))]);
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    match recvmsg(socket, &mut [IoSliceMut::new(&mut bytes)], &mut control, flags) {
        Err(rustix::io::Errno::INTR) => Ok(true),
        received => Ok(received?.bytes > 0),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::fd::AsFd;

    use ashlar_wire::Connection;

    use super::*;

    #[test]
    fn queued_descriptors_are_closed() {
        let (near, far) = UnixStream::pair().expect("sockets");
        let mut near = Connection::from_socket(near);
        // A socket whose other end sees when it is closed.
        let (mut watched, sent) = UnixStream::pair().expect("sockets");
        for _ in 0..3 {
            near.send(&vec![7u8; 3000], &[sent.as_fd(); 5]).expect("sent");
        }
        drop(sent);
        let ours = far.try_clone().expect("a copy");
        begin_close(far);
        assert_eq!(watched.read(&mut [0]).expect("the end"), 0);
        assert!(!close_some(&ours).unwrap_or(false), "the queue is empty");
    }
}
