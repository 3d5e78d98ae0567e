//! Notifications for a mount's kernel, and the line to the helper that sends them.
//!
//! They are messages as `/dev/fuse` takes them, `length:4 code:4 unique:8 (0)` and a body.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use ashlar_types::InodeId;
use ashlar_wire::Connection;
use parking_lot::Mutex;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags};

use crate::client::Helper;
use crate::errand::{Descriptors, Errand, start_errand};

/// The header of each message.
const HEADER_BYTES: usize = 16;
/// `FUSE_NOTIFY_INVAL_INODE`.
const INVAL_INODE: i32 = 2;

/// A sender of notifications to a kernel.
pub trait Notified {
    /// Sends messages, one after the other; a failure of one does not stop the others. A notification about state that
    /// the kernel does not have is no error.
    ///
    /// # Errors
    /// The kernel's, for the last message that it did not take.
    fn notify(&self, messages: &[u8]) -> Result<(), Errno>;
}

/// Written by the caller itself, for messages that never wait.
impl Notified for BorrowedFd<'_> {
    fn notify(&self, messages: &[u8]) -> Result<(), Errno> {
        let (mut rest, mut result) = (messages, Ok(()));
        while let Some(length) = rest.first_chunk().map(|length| u32::from_ne_bytes(*length) as usize) {
            let Some((message, remainder)) = rest.split_at_checked(length).filter(|_| length >= HEADER_BYTES) else {
                return Err(Errno::INVAL);
            };
            result = write(*self, message).and(result);
            rest = remainder;
        }
        result
    }
}

fn write(device: BorrowedFd<'_>, message: &[u8]) -> Result<(), Errno> {
    loop {
        match rustix::io::write(device, message) {
            Err(Errno::INTR) => {}
            Err(Errno::NOENT) => return Ok(()),
            result => return result.map(drop),
        }
    }
}

/// The cached pages of a file that the kernel forgets, besides its attributes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Pages {
    /// None.
    Keep,
    /// Those that hold bytes from `offset` on, for `length` bytes; 0 means to the end.
    Range {
        /// First byte.
        offset: u64,
        /// Bytes.
        length: u64,
    },
}

impl Pages {
    /// All pages.
    pub const ALL: Self = Self::Range { offset: 0, length: 0 };
}

/// Makes the kernel forget the attributes of `inode`, and `pages` of its data. An inode that the kernel doesn't know is
/// no error: nothing of it is cached.
///
/// # Errors
/// `ENODEV` and the like, if the mount is gone.
pub fn inval_inode(kernel: &impl Notified, inode: InodeId, pages: Pages) -> Result<(), Errno> {
    let (offset, length) = match pages {
        Pages::Keep => (-1, 0),
        Pages::Range { offset, length } => {
            (i64::try_from(offset).unwrap_or(i64::MAX), i64::try_from(length).unwrap_or(i64::MAX))
        }
    };
    // The body: `inode:8 offset:8 length:8`.
    let mut message = [0; HEADER_BYTES + 24];
    let bytes = message.len() as u32;
    message[..4].copy_from_slice(&bytes.to_ne_bytes());
    message[4..8].copy_from_slice(&INVAL_INODE.to_ne_bytes());
    message[16..24].copy_from_slice(&inode.0.to_ne_bytes());
    message[24..32].copy_from_slice(&offset.to_ne_bytes());
    message[32..].copy_from_slice(&length.to_ne_bytes());
    kernel.notify(&message)
}

/// Sends messages that may have to wait in a mount's kernel, by the helper. It sends one after the other: a waiting
/// message delays those after it.
#[derive(Debug)]
pub struct Line {
    helper: Arc<Helper>,
    connection: Mutex<Option<Connection>>,
}

impl Line {
    /// Makes a line that begins with the first message.
    #[must_use]
    pub const fn new(helper: Arc<Helper>) -> Self {
        Self { helper, connection: Mutex::new(None) }
    }

    /// Returns the sender of messages to a device over this line. The device is always the same one.
    #[must_use]
    pub const fn to<'a>(&'a self, device: BorrowedFd<'a>) -> LineSender<'a> {
        LineSender { line: self, device }
    }

    fn open_connection(&self, device: BorrowedFd<'_>) -> Result<Connection, ashlar_types::Errno> {
        let (ours, theirs) = UnixStream::pair()?;
        self.helper.send(Errand::Notify, &[theirs.as_fd(), device])?;
        Ok(Connection::from_socket(ours))
    }
}

/// The sender that [`Line::to`] returns.
#[derive(Debug)]
pub struct LineSender<'a> {
    line: &'a Line,
    device: BorrowedFd<'a>,
}

impl Notified for LineSender<'_> {
    fn notify(&self, messages: &[u8]) -> Result<(), Errno> {
        let mut connection = self.line.connection.lock();
        // If the helper was killed meanwhile, it has a successor, to which all messages are sent again.
        for _ in 0..2 {
            let Some(mut open) = connection.take().or_else(|| self.line.open_connection(self.device).ok()) else {
                return self.device.notify(messages);
            };
            let answer = open.send(&messages, &[]).and_then(|()| open.receive::<i32>());
            if let Ok((errno, _)) = answer {
                *connection = Some(open);
                return if errno == 0 { Ok(()) } else { Err(Errno::from_raw_os_error(errno)) };
            }
        }
        self.line.helper.pause_errands();
        self.device.notify(messages)
    }
}

/// Starts the thread for the helper's end of a line.
pub(crate) fn begin_notify(line: UnixStream, mut descriptors: Descriptors) {
    // If a descriptor is missing, the line is closed, which the other side notices.
    if let Some(device) = descriptors.next() {
        start_errand("notify", move || forward_messages(Connection::from_socket(line), &device));
    }
}

fn forward_messages(mut line: Connection, device: &OwnedFd) {
    while let Ok((messages, _)) = line.receive::<Vec<u8>>() {
        let errno = device.as_fd().notify(&messages).err().map_or(0, Errno::raw_os_error);
        if line.send(&errno, &[]).is_err() {
            return;
        }
    }
}

/// Ends the connection of the mount whose files show a device number, whichever processes hold its device.
///
/// Requests that wait for an answer fail, and so do all later ones. The kernel reuses the number of a mount that is
/// gone.
///
/// # Errors
/// The system's; `ENOENT` if there is no such connection.
pub fn end_connection(device_number: u64) -> rustix::io::Result<()> {
    // A connection has the number of that device, which has no other part.
    let number = rustix::fs::minor(device_number);
    // The control file system is not mounted everywhere, so it is opened without being mounted.
    let context = rustix::mount::fsopen("fusectl", FsOpenFlags::FSOPEN_CLOEXEC)?;
    rustix::mount::fsconfig_create(&context)?;
    let control = rustix::mount::fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty())?;
    let file =
        rustix::fs::openat(&control, format!("{number}/abort"), OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())?;
    rustix::io::write(&file, b"1").map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::OsString;

    fn message(body: &[u8]) -> Vec<u8> {
        let length = (16 + body.len()) as u32;
        [&length.to_ne_bytes()[..], &[0; 12], body].concat()
    }

    fn received(reader: &OwnedFd) -> Vec<u8> {
        let mut bytes = [0; 256];
        let count = rustix::io::read(reader, &mut bytes).expect("read");
        bytes[..count].to_vec()
    }

    #[test]
    fn each_message_is_one_write() {
        let (reader, writer) = rustix::net::socketpair(
            rustix::net::AddressFamily::UNIX,
            rustix::net::SocketType::SEQPACKET,
            rustix::net::SocketFlags::CLOEXEC,
            None,
        )
        .expect("sockets");
        let (one, two) = (message(b"one"), message(b"second"));
        let (ours, theirs) = UnixStream::pair().expect("sockets");
        let end = std::thread::spawn(move || forward_messages(Connection::from_socket(theirs), &writer));
        let mut line = Connection::from_socket(ours);
        line.send(&[&one[..], &two].concat(), &[]).expect("sent");
        assert_eq!(line.receive::<i32>().expect("answered").0, 0);
        assert_eq!(received(&reader), one);
        assert_eq!(received(&reader), two);
        line.send(&vec![3u8, 0, 0, 0], &[]).expect("sent");
        assert_eq!(line.receive::<i32>().expect("answered").0, Errno::INVAL.raw_os_error());
        // If it were only dropped, it could still be open in a child that another test starts just now.
        rustix::net::shutdown(&reader, rustix::net::Shutdown::Both).expect("shut down");
        line.send(&one, &[]).expect("sent");
        assert_eq!(line.receive::<i32>().expect("answered").0, Errno::PIPE.raw_os_error());
        drop(line);
        end.join().expect("it ends with its line");
    }

    #[test]
    fn without_a_helper_messages_are_written_by_their_sender() {
        for words in [&[][..], &["/nowhere"], &["true"]] {
            let (reader, writer) = rustix::pipe::pipe().expect("a pipe");
            let line = Line::new(Arc::new(Helper::new(words.iter().map(OsString::from).collect())));
            line.to(writer.as_fd()).notify(&message(b"name")).expect("written");
            assert_eq!(received(&reader), message(b"name"));
        }
    }
}
