//! Opens files on mounts for sessions.
//!
//! SharedFS hands over the session's own socket and never gets the opened file: closing it takes an answer of the
//! mount's process as well. If SharedFS is gone, the session asks the next one.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use ashlar_types::{Errno, InodeId};
use ashlar_wire::{Connection, HELPER_FLAG, Reply};
use rustix::fs::{Mode, OFlags};

use crate::errand::{Descriptors, start_errand};

/// `FILEID_INO64_GEN`: the kind of handle that FUSE makes of an inode without its directory.
const HANDLE_KIND: i32 = 0x81;
/// The generation that mounts report for every inode: numbers are never used twice.
const GENERATION: u32 = 0;

/// An inode, flags of open(2), and a name in a directory under which the kernel is to know the open file.
type OpenRequest = (InodeId, u32, Option<(InodeId, Vec<u8>)>);

/// Receives a report: an errno, or 0. The first 0 says that the session is about to be answered; the second, that it
/// has been.
pub(crate) fn receive_report(report: &mut UnixStream) -> io::Result<i32> {
    let mut word = [0; 4];
    report.read_exact(&mut word)?;
    Ok(i32::from_le_bytes(word))
}

/// Sends a report. If SharedFS is gone, the report has no reader.
fn send_report(report: &mut UnixStream, errno: i32) {
    let _ = report.write_all(&errno.to_le_bytes());
}

/// Starts a thread that opens a file.
pub(crate) fn begin_open(wanted: OpenRequest, mut report: UnixStream, mut descriptors: Descriptors) {
    let (Some(mount), Some(session)) = (descriptors.next(), descriptors.next()) else {
        // The kernel leaves out descriptors for which there is no room.
        send_report(&mut report, Errno::EMFILE.0);
        return;
    };
    let Ok(mut spare) = report.try_clone() else {
        send_report(&mut report, Errno::EMFILE.0);
        return;
    };
    if !start_errand("open", move || open_and_answer(wanted, report, mount, session.into())) {
        send_report(&mut spare, Errno::EAGAIN.0);
    }
}

fn open_and_answer(wanted: OpenRequest, mut report: UnixStream, mount: OwnedFd, session: UnixStream) {
    match open_inode(mount.as_fd(), wanted) {
        Ok(opened) => {
            send_report(&mut report, 0);
            // A session that is gone needs no answer.
            let _ = Connection::from_socket(session).send(&Reply::Done, &[opened.as_fd()]);
            // Before the session is served again, nothing here keeps the mount busy.
            drop((opened, mount));
            send_report(&mut report, 0);
        }
        Err(error) => send_report(&mut report, Errno::from(error).0),
    }
}

fn open_inode(mount: BorrowedFd<'_>, (inode, flags, entry): OpenRequest) -> io::Result<OwnedFd> {
    // A process that may not list the directory has only an `O_PATH` descriptor of it. The kernel takes no such
    // descriptor for a mount.
    let is_path = rustix::fs::fcntl_getfl(mount)?.contains(OFlags::PATH);
    let how = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let opened = if is_path { Some(rustix::fs::openat(mount, c".", how, Mode::empty())?) } else { None };
    let mount = opened.as_ref().map_or(mount, AsFd::as_fd);
    // While the name is held, the kernel opens the inode under it. Without a name, watches of the directory get no
    // events of the file.
    let _named = entry.and_then(|(directory, name)| open_name(mount, directory, &name).ok());
    let opened = ashlar_pmem::open_by_handle(mount, HANDLE_KIND, &handle(inode), flags as i32 | HELPER_FLAG)?;
    let wanted = OFlags::from_bits_retain(flags);
    if !wanted.intersects(OFlags::PATH | OFlags::NONBLOCK) {
        rustix::fs::fcntl_setfl(&opened, wanted)?;
    }
    Ok(opened)
}

/// Opens a name in a directory as an `O_PATH` descriptor.
fn open_name(mount: BorrowedFd<'_>, directory: InodeId, name: &[u8]) -> io::Result<OwnedFd> {
    let how = OFlags::PATH | OFlags::CLOEXEC;
    let directory = ashlar_pmem::open_by_handle(mount, HANDLE_KIND, &handle(directory), how.bits() as i32)?;
    Ok(rustix::fs::openat(&directory, name, how | OFlags::NOFOLLOW, Mode::empty())?)
}

/// Returns the handle that the kernel's FUSE makes of an inode: words of four bytes in the machine's order, the upper
/// half of the number first.
fn handle(inode: InodeId) -> [u8; 12] {
    let words = [(inode.0 >> 32) as u32, inode.0 as u32, GENERATION];
    let mut bytes = [0; 12];
    for (place, word) in bytes.chunks_exact_mut(4).zip(words) {
        place.copy_from_slice(&word.to_ne_bytes());
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::errand::Errand;

    #[test]
    fn handle_has_the_upper_half_first() {
        let words = [1u32, 2, 0].map(u32::to_ne_bytes).concat();
        assert_eq!(handle(InodeId(1 << 32 | 2))[..], words);
    }

    #[test]
    fn failed_open_is_reported_and_session_gets_no_answer() {
        let (line, theirs) = UnixStream::pair().expect("sockets");
        let helper = std::thread::spawn(move || crate::run(theirs));
        let mut line = Connection::from_socket(line);
        let (mut report, their_report) = UnixStream::pair().expect("sockets");
        let (mut session, their_session) = UnixStream::pair().expect("sockets");
        let no_directory = tempfile::tempfile().expect("a file");
        let errand = Errand::Open { inode: InodeId(77), flags: 0, entry: None };
        let descriptors = [their_report.as_fd(), no_directory.as_fd(), their_session.as_fd()];
        line.send(&errand, &descriptors).expect("sent");
        assert_ne!(receive_report(&mut report).expect("a report"), 0);
        line.send(&errand, &[their_report.as_fd()]).expect("sent");
        assert_eq!(receive_report(&mut report).expect("a report"), Errno::EMFILE.0);
        drop((line, their_session));
        helper.join().expect("it ends with SharedFS");
        assert_eq!(session.read(&mut [0]).expect("the end"), 0);
    }
}
