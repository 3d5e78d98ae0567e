//! Notifications: messages that make a kernel forget cached items.
//!
//! They are written to a mount's `/dev/fuse` descriptor: by SharedFS when it takes a lease from the mount's session, by
//! the mount itself, and by the helper for either.
//!
//! Which of them may wait, and for what:
//! - [`inval_inode`] with [`Pages::Keep`], and [`inc_epoch`], never wait. These two are all that a lease's move needs:
//!   with the attributes, the kernel's pages are in doubt (`AUTO_INVAL_DATA`). It asks for the attributes before it
//!   next reads from the pages, and drops them if the time of modification has changed.
//! - [`inval_inode`] with pages waits for every page of the range that a READ or WRITE in flight has locked. That
//!   request may wait for the very lease that moves. Two mounts that write one file would then wait for each other (a
//!   test of this crate found that out). So pages are dropped after a lease's move. No thread waits for that, or not
//!   for long; only shared mappings need it.
//! - [`inval_entry`] and [`expire_entries`] wait for the directory's lock, which an operation in flight may hold.
//! - `ask_kernel` waits for nothing.
//!
//! For the same reason a thread that serves requests must write none but the first two and the last. Notifications that
//! may wait go by the helper ([`ashlar_helper`]). Otherwise a mount's process that is killed while it waits for a
//! request in flight could not end: no other process answers that request.

use std::os::fd::BorrowedFd;

use ashlar_helper::Notified;
pub use ashlar_helper::{Pages, inval_inode};
use ashlar_types::InodeId;
use rustix::io::Errno;
use zerocopy::IntoBytes;

use crate::proto::{NotifyInvalEntry, NotifyRetrieve, OutHeader};

const NOTIFY_INVAL_ENTRY: i32 = 3;
const NOTIFY_RETRIEVE: i32 = 5;
const NOTIFY_INC_EPOCH: i32 = 8;
/// The kernel sends requested bytes with numbers from here on, which its own numbers do not reach. They are even, as
/// all are.
const FIRST_RETRIEVE_NUMBER: u64 = 1 << 63;
/// A flag of [`NotifyInvalEntry`].
const EXPIRE_ONLY: u32 = 1;

/// Makes the kernel forget where `name` in `directory` leads, or that it leads nowhere.
///
/// # Errors
/// `ENODEV` and the like, if the mount is gone.
pub fn inval_entry(kernel: &impl Notified, directory: InodeId, name: &[u8]) -> Result<(), Errno> {
    // The kernel answers ENOTEMPTY, EBUSY or EINVAL for directories that are in use below: it has marked them for a
    // fresh look-up all the same.
    match kernel.notify(&entry_message(directory, name, 0)?) {
        Err(Errno::NOTEMPTY | Errno::BUSY | Errno::NOTDIR) => Ok(()),
        result => result,
    }
}

/// Makes the kernel look names up before it uses them again. A process that uses an inode behind such a name keeps it.
/// For kernels that offer this (`HAS_EXPIRE_ONLY`).
///
/// # Errors
/// `ENODEV` and the like, if the mount is gone.
pub fn expire_entries<'a>(
    kernel: &impl Notified,
    entries: impl IntoIterator<Item = (InodeId, &'a [u8])>,
) -> Result<(), Errno> {
    let entries = entries.into_iter().map(|(directory, name)| entry_message(directory, name, EXPIRE_ONLY));
    let messages = entries.collect::<Result<Vec<_>, _>>()?;
    if messages.is_empty() { Ok(()) } else { kernel.notify(&messages.concat()) }
}

fn entry_message(directory: InodeId, name: &[u8], flags: u32) -> Result<Vec<u8>, Errno> {
    let namelen = u32::try_from(name.len()).map_err(|_| Errno::NAMETOOLONG)?;
    let body = NotifyInvalEntry { parent: directory.0, namelen, flags };
    Ok(notification(NOTIFY_INVAL_ENTRY, &[body.as_bytes(), name, b"\0"]))
}

/// Makes the kernel look up every cached name afresh before it is used again. Returns `false` if the kernel cannot
/// (before Linux 6.16): the caller then waits until the cached names have expired.
///
/// # Errors
/// `ENODEV` and the like, if the mount is gone.
pub fn inc_epoch(device: BorrowedFd<'_>) -> Result<bool, Errno> {
    match device.notify(&notification(NOTIFY_INC_EPOCH, &[])) {
        Ok(()) => Ok(true),
        Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => Ok(false),
        Err(errno) => Err(errno),
    }
}

/// Makes the kernel send a request without effect, by the queue of the core that the caller runs on. That request also
/// brings those that wait there for an entry. It asks about `inode`, which must be a regular file that the kernel
/// knows.
///
/// # Errors
/// `EINVAL` for another inode; `ENODEV` and the like, if the mount is gone.
pub(crate) fn ask_kernel(device: BorrowedFd<'_>, number: u64, inode: InodeId) -> Result<(), Errno> {
    let body = NotifyRetrieve {
        notify_unique: FIRST_RETRIEVE_NUMBER | number << 1,
        nodeid: inode.0,
        ..NotifyRetrieve::default()
    };
    device.notify(&notification(NOTIFY_RETRIEVE, &[body.as_bytes()]))
}

/// Lays out one notification. Its longest part is a name.
fn notification(code: i32, parts: &[&[u8]]) -> Vec<u8> {
    let length = size_of::<OutHeader>() + parts.iter().map(|part| part.len()).sum::<usize>();
    let header = OutHeader { len: length as u32, error: code, unique: 0 };
    let mut message = Vec::with_capacity(length);
    message.extend_from_slice(header.as_bytes());
    parts.iter().for_each(|part| message.extend_from_slice(part));
    message
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    /// Returns the bytes of a notification, as written to a descriptor that isn't `/dev/fuse`.
    fn notification_bytes(write: impl FnOnce(BorrowedFd<'_>)) -> Vec<u8> {
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        write(writer.as_fd());
        let mut bytes = [0; 256];
        let count = rustix::io::read(&reader, &mut bytes).unwrap();
        bytes[..count].to_vec()
    }

    fn words(bytes: &[u8]) -> Vec<u32> {
        bytes.chunks_exact(4).map(|word| u32::from_ne_bytes(word.try_into().unwrap())).collect()
    }

    #[test]
    fn attributes_alone_have_a_negative_offset() {
        let bytes = notification_bytes(|fd| inval_inode(&fd, InodeId(7), Pages::Keep).unwrap());
        assert_eq!(words(&bytes), [40, 2, 0, 0, 7, 0, u32::MAX, u32::MAX, 0, 0]);
    }

    #[test]
    fn page_range_is_given_in_bytes() {
        let pages = Pages::Range { offset: 4096, length: 10 };
        let bytes = notification_bytes(|fd| inval_inode(&fd, InodeId(7), pages).unwrap());
        assert_eq!(words(&bytes), [40, 2, 0, 0, 7, 0, 4096, 0, 10, 0]);
    }

    #[test]
    fn name_ends_with_an_uncounted_nul() {
        let bytes = notification_bytes(|fd| inval_entry(&fd, InodeId(1), b"name").unwrap());
        assert_eq!(words(&bytes[..32]), [37, 3, 0, 0, 1, 0, 4, 0]);
        assert_eq!(&bytes[32..], b"name\0");
    }

    #[test]
    fn expired_name_has_the_expire_flag() {
        let bytes = notification_bytes(|fd| expire_entries(&fd, [(InodeId(1), &b"name"[..])]).unwrap());
        assert_eq!(words(&bytes[..32]), [37, 3, 0, 0, 1, 0, 4, 1]);
    }

    #[test]
    fn epoch_notification_is_a_header_alone() {
        let bytes = notification_bytes(|fd| assert!(inc_epoch(fd).unwrap()));
        assert_eq!(words(&bytes), [16, 8, 0, 0]);
    }
}
