//! The opener: a process that opens files on mounts, since SharedFS must not do that itself.
//!
//! Opening a file on a mount takes answers of the mount's process, and that may need an answer of SharedFS first. A SharedFS that is
//! killed in between could not end: its thread waits for the mount's process, and the kernel lets no signal end that wait; the mount's
//! process waits for SharedFS, whose sockets stay open as long as that thread is there. Closing such a file takes an answer as well. So
//! all of it is done by a process that nobody waits for: SharedFS hands it the session's own socket, never sees what was opened, and
//! can be killed at any moment. The opener ends when SharedFS is gone, and the session asks the next one.
//!
//! It is started when it's first needed, and again where it was killed.

use std::ffi::OsString;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};

use ashlar_types::{Errno, InodeId};
use ashlar_wire::{Connection, OPENER_FLAG, Reply};
use parking_lot::Mutex;
use rustix::fs::{Mode, OFlags};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde::{Deserialize, Serialize};

use crate::shared::Shared;

/// `FILEID_INO64_GEN`: the kind of handle that FUSE makes of an inode without its directory.
const HANDLE_KIND: i32 = 0x81;
/// The generation that mounts tell of every inode: numbers are never used twice.
const GENERATION: u32 = 0;
/// Stack of a thread that opens one file.
const STACK_BYTES: usize = 128 << 10;

/// What to open. Three descriptors come with it: a socket for the report, a directory on the mount, and the socket of the session that
/// the answer goes to.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Errand {
    /// Which inode.
    pub inode: InodeId,
    /// Flags of open(2).
    pub flags: u32,
}

/// SharedFS's side of the opener.
#[derive(Debug)]
pub struct Opener {
    command: Vec<OsString>,
    process: Mutex<Option<Process>>,
    has_complained: AtomicBool,
}

#[derive(Debug)]
struct Process {
    child: Child,
    line: Connection,
}

impl Opener {
    /// An opener that `command` starts; without one there is none.
    pub fn new(command: Vec<OsString>) -> Self {
        Self { command, process: Mutex::default(), has_complained: AtomicBool::new(false) }
    }

    /// Opens a file and has the session answered with it. After an error that is not [`Shared::ENDING`] nothing was answered.
    ///
    /// # Errors
    /// What opening it gave; `EOPNOTSUPP` where there is no opener, `EIO` where it can't be started or has died.
    /// [`Shared::ENDING`] where it died while it answered: what the session has got is not known.
    pub fn open(&self, errand: Errand, mount: BorrowedFd<'_>, session: BorrowedFd<'_>) -> Result<(), Errno> {
        let (mut report, theirs) = UnixStream::pair()?;
        self.send(errand, &[theirs.as_fd(), mount, session])?;
        drop(theirs);
        match receive_report(&mut report) {
            Ok(0) => {}
            Ok(errno) => {
                self.complain_of(Errno(errno));
                return Err(Errno(errno));
            }
            Err(_) => return Err(Errno::EIO),
        }
        receive_report(&mut report).map(drop).map_err(|_| Shared::ENDING)
    }

    /// Sends an errand, to a new opener where the old one is gone.
    fn send(&self, errand: Errand, descriptors: &[BorrowedFd<'_>]) -> Result<(), Errno> {
        let mut process = self.process.lock();
        for _ in 0..2 {
            let mut running = match process.take() {
                Some(running) => running,
                None => self.start()?,
            };
            if running.line.send(&errand, descriptors).is_ok() {
                *process = Some(running);
                return Ok(());
            }
            // It has let go of its socket, so it is as good as gone.
            let _ = running.child.wait();
        }
        tracing::error!("the process that opens files for sessions dies at once");
        Err(Errno::EIO)
    }

    fn start(&self) -> Result<Process, Errno> {
        let [program, arguments @ ..] = &self.command[..] else { return Err(Errno::EOPNOTSUPP) };
        let (ours, theirs) = UnixStream::pair()?;
        let mut command = Command::new(program);
        command.args(arguments).stdin(OwnedFd::from(theirs)).stdout(Stdio::null());
        let child = command.spawn().map_err(|error| {
            tracing::error!(%error, "no process can be started that opens files for sessions");
            Errno::EIO
        })?;
        Ok(Process { child, line: Connection::from_socket(ours) })
    }

    /// Says once what an administrator can mend.
    fn complain_of(&self, errno: Errno) {
        if errno == Errno::EPERM && !self.has_complained.swap(true, Ordering::Relaxed) {
            tracing::error!(
                "the kernel does not let SharedFS open files for sessions (open_by_handle_at); give the daemon CAP_DAC_READ_SEARCH"
            );
        }
    }
}

/// An errno, or 0: the session is about to be answered, and, when it comes for the second time, it has been.
fn receive_report(report: &mut UnixStream) -> io::Result<i32> {
    let mut word = [0; 4];
    report.read_exact(&mut word)?;
    Ok(i32::from_le_bytes(word))
}

/// SharedFS may be gone, and then nobody listens.
fn send_report(report: &mut UnixStream, errno: i32) {
    let _ = report.write_all(&errno.to_le_bytes());
}

/// The opener's process: opens what comes over `line`, each file in a thread of its own, as long as SharedFS is there. SharedFS's
/// connections limit the threads: each asks for one file at a time.
pub fn run_opener(line: UnixStream) {
    raise_descriptor_limit();
    let mut line = Connection::from_socket(line);
    while let Ok((errand, descriptors)) = line.receive::<Errand>() {
        let mut descriptors = descriptors.into_iter();
        let Some(mut report) = descriptors.next().map(UnixStream::from) else { continue };
        let (Some(mount), Some(session)) = (descriptors.next(), descriptors.next()) else {
            // The kernel leaves out those for which there is no room.
            send_report(&mut report, Errno::EMFILE.0);
            continue;
        };
        let Ok(spare) = report.try_clone() else {
            send_report(&mut report, Errno::EMFILE.0);
            continue;
        };
        let thread = std::thread::Builder::new().name("open".into()).stack_size(STACK_BYTES);
        if thread.spawn(move || run_errand(errand, report, mount, session.into())).is_err() {
            send_report(&mut { spare }, Errno::EAGAIN.0);
        }
    }
}

fn run_errand(errand: Errand, mut report: UnixStream, mount: OwnedFd, session: UnixStream) {
    match open_inode(mount.as_fd(), errand) {
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

fn open_inode(mount: BorrowedFd<'_>, errand: Errand) -> io::Result<OwnedFd> {
    // A path alone is what who may not list the directory has of it. The kernel takes no such thing for a mount.
    let is_path = rustix::fs::fcntl_getfl(mount)?.contains(OFlags::PATH);
    let how = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let opened = if is_path { Some(rustix::fs::openat(mount, c".", how, Mode::empty())?) } else { None };
    let mount = opened.as_ref().map_or(mount, AsFd::as_fd);
    let opened =
        ashlar_pmem::open_by_handle(mount, HANDLE_KIND, &handle(errand.inode), errand.flags as i32 | OPENER_FLAG)?;
    let wanted = OFlags::from_bits_retain(errand.flags);
    if !wanted.intersects(OFlags::PATH | OFlags::NONBLOCK) {
        rustix::fs::fcntl_setfl(&opened, wanted)?;
    }
    Ok(opened)
}

/// The handle that the kernel's FUSE makes of an inode: words of four bytes in the machine's order, the upper half of the number first.
fn handle(inode: InodeId) -> [u8; 12] {
    let words = [(inode.0 >> 32) as u32, inode.0 as u32, GENERATION];
    let mut bytes = [0; 12];
    for (place, word) in bytes.chunks_exact_mut(4).zip(words) {
        place.copy_from_slice(&word.to_ne_bytes());
    }
    bytes
}

/// A session takes five descriptors, and each connection two. An errand takes five while it lasts, and there may be as many errands as SharedFS has
/// connections.
pub fn raise_descriptor_limit() {
    let maximum = getrlimit(Resource::Nofile).maximum;
    // With the limit as it is, less is open at once.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_has_the_upper_half_first() {
        let words = [1u32, 2, 0].map(u32::to_ne_bytes).concat();
        assert_eq!(handle(InodeId(1 << 32 | 2))[..], words);
    }

    #[test]
    fn an_opener_reports_what_went_wrong_and_answers_nobody() {
        let (line, theirs) = UnixStream::pair().expect("sockets");
        let opener = std::thread::spawn(move || run_opener(theirs));
        let mut line = Connection::from_socket(line);
        let (mut report, their_report) = UnixStream::pair().expect("sockets");
        let (mut session, their_session) = UnixStream::pair().expect("sockets");
        let no_directory = tempfile::tempfile().expect("a file");
        let errand = Errand { inode: InodeId(77), flags: 0 };
        let descriptors = [their_report.as_fd(), no_directory.as_fd(), their_session.as_fd()];
        line.send(&errand, &descriptors).expect("sent");
        assert_ne!(receive_report(&mut report).expect("a report"), 0);
        line.send(&errand, &[their_report.as_fd()]).expect("sent");
        assert_eq!(receive_report(&mut report).expect("a report"), Errno::EMFILE.0);
        drop((line, their_session));
        opener.join().expect("it ends with SharedFS");
        assert_eq!(session.read(&mut [0]).expect("the end"), 0);
    }

    #[test]
    fn without_a_command_there_are_no_descriptors() {
        let (one, two) = UnixStream::pair().expect("sockets");
        let errand = Errand { inode: InodeId::ROOT, flags: 0 };
        let open = |words: &[&str]| {
            let command = words.iter().map(OsString::from).collect();
            Opener::new(command).open(errand, one.as_fd(), two.as_fd())
        };
        assert_eq!(open(&[]), Err(Errno::EOPNOTSUPP));
        assert_eq!(open(&["/nowhere"]), Err(Errno::EIO));
        // It reads the errand, understands nothing of it, and dies.
        assert_eq!(open(&["head", "-c", "1"]), Err(Errno::EIO));
    }
}
