//! Opens files on mounts for sessions.
//!
//! The session sends a directory on the mount over a socket, and gets the opened file there. SharedFS, which has
//! decided that the session may have the file, gets neither: closing a file can take an answer of the file's server. If
//! SharedFS is gone, the session asks the next one.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use ashlar_types::{Errno, InodeId};
use ashlar_wire::{Connection, HELPER_FLAG, ReceiveLimits, Reply};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, StatxFlags};

use crate::errand::{Descriptors, start_errand};

/// A session sends a directory, soon, with a message of no bytes.
const LIMITS: ReceiveLimits =
    ReceiveLimits { bytes_max: 0, silence_max: Some(PATIENCE), message_max: PATIENCE, takes_descriptors: true };
/// How long a session may take to send a directory, and to take the answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// `FILEID_INO64_GEN`: the kind of handle that FUSE makes of an inode without its directory.
const HANDLE_KIND: i32 = 0x81;
/// The generation that mounts report for every inode: numbers are never used twice.
const GENERATION: u32 = 0;

/// An inode, flags of open(2), and a name in a directory under which the kernel is to know the open file.
type OpenRequest = (InodeId, u32, Option<(InodeId, Vec<u8>)>);

/// Receives a report, when the session has been answered: an errno, or 0.
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
pub(crate) fn begin_open(wanted: OpenRequest, devices: Vec<u64>, mut report: UnixStream, mut descriptors: Descriptors) {
    let (Some(session), Ok(mut spare)) = (descriptors.next(), report.try_clone()) else {
        // The kernel leaves out descriptors for which there is no room.
        send_report(&mut report, Errno::EMFILE.0);
        return;
    };
    if !start_errand("open", move || open_and_answer(wanted, &devices, report, session.into())) {
        send_report(&mut spare, Errno::EAGAIN.0);
    }
}

fn open_and_answer(wanted: OpenRequest, devices: &[u64], mut report: UnixStream, session: UnixStream) {
    let mut session = Connection::from_socket(session);
    let opened = receive_directory(&mut session, devices)
        .and_then(|mount| open_inode(mount.as_fd(), wanted).map_err(Errno::from).map(|file| (file, mount)));
    let errno = opened.as_ref().err().map_or(0, |errno| errno.0);
    // A session that is gone, or takes no answer, needs none.
    let _ = session.limit_sending(PATIENCE).map_err(Into::into).and_then(|()| match &opened {
        Ok((file, _)) => session.send(&Reply::Done, &[file.as_fd()]),
        Err(errno) => session.send(&Reply::Error(*errno), &[]),
    });
    // Before the session sees the end of its socket, nothing here keeps the mount busy.
    drop(opened);
    drop(session);
    send_report(&mut report, errno);
}

/// Receives a directory on one of the mounts with these devices.
fn receive_directory(session: &mut Connection, devices: &[u64]) -> Result<OwnedFd, Errno> {
    let ((), descriptors) = session.receive_bounded(&LIMITS).map_err(|_| Errno::EINVAL)?;
    let directory = descriptors.into_iter().next().ok_or(Errno::EINVAL)?;
    if devices.contains(&device_of(&directory)?) { Ok(directory) } else { Err(Errno::EINVAL) }
}

/// Returns the number of the device that a directory is on, as the kernel knows it.
///
/// That asks no file system, which might not answer.
fn device_of(directory: &OwnedFd) -> Result<u64, Errno> {
    let system = |errno: rustix::io::Errno| Errno(errno.raw_os_error());
    let how = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    let found = rustix::fs::statx(directory, c"", how, StatxFlags::TYPE).map_err(system)?;
    if FileType::from_raw_mode(found.stx_mode.into()) != FileType::Directory {
        return Err(Errno::EINVAL);
    }
    Ok(rustix::fs::makedev(found.stx_dev_major, found.stx_dev_minor))
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
    fn device_of_non_directory_is_refused() {
        let open = |path: &str, flags| rustix::fs::open(path, flags | OFlags::CLOEXEC, Mode::empty()).expect("opened");
        let found = device_of(&open("/", OFlags::RDONLY));
        assert!(found.is_ok_and(|number| number != 0));
        assert_eq!(device_of(&open("/", OFlags::PATH)), found, "also by an O_PATH descriptor");
        for flags in [OFlags::RDONLY, OFlags::PATH] {
            assert_eq!(device_of(&open("/proc/self/stat", flags)), Err(Errno::EINVAL));
        }
    }

    /// Asks a helper to open an inode on the mount of a directory with one of these devices; returns the error.
    fn refusal(sent: &impl AsFd, devices: Vec<u64>) -> Option<Errno> {
        let (line, theirs) = UnixStream::pair().expect("sockets");
        let helper = std::thread::spawn(move || crate::run(theirs));
        let mut line = Connection::from_socket(line);
        let (mut report, their_report) = UnixStream::pair().expect("sockets");
        let (session, their_session) = UnixStream::pair().expect("sockets");
        let errand = Errand::Open { inode: InodeId(77), flags: 0, entry: None, devices };
        line.send(&errand, &[their_report.as_fd(), their_session.as_fd()]).expect("sent");
        drop(their_session);
        let mut session = Connection::from_socket(session);
        let (answer, descriptors) = session.call::<_, Reply>(&(), &[sent.as_fd()]).expect("answered");
        assert!(descriptors.is_empty());
        let Reply::Error(errno) = answer else { panic!("{answer:?}") };
        assert!(session.receive::<Reply>().is_err(), "the socket is closed");
        assert_eq!(receive_report(&mut report).expect("a report"), errno.0);
        line.send(&errand, &[their_report.as_fd()]).expect("sent");
        assert_eq!(receive_report(&mut report).expect("a report"), Errno::EMFILE.0);
        drop(line);
        helper.join().expect("it ends with SharedFS");
        Some(errno)
    }

    #[test]
    fn failed_open_is_reported_and_answered() {
        let directory = rustix::fs::open("/proc", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).expect("opened");
        let device = device_of(&directory).expect("a device");
        assert_eq!(refusal(&tempfile::tempfile().expect("a file"), vec![device]), Some(Errno::EINVAL));
        assert_eq!(refusal(&directory, vec![device + 1]), Some(Errno::EINVAL));
        // The file system of processes opens no such handle.
        assert_ne!(refusal(&directory, vec![device]), Some(Errno::EINVAL));
    }
}
