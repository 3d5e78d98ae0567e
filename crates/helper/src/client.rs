//! Starts the helper and sends errands to it.

use std::ffi::OsString;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ashlar_types::{Errno, InodeId};
use ashlar_wire::Connection;
use parking_lot::Mutex;

use crate::errand::Errand;
use crate::open::receive_report;

/// Its name in the list of processes.
const NAME: &str = "ashlar";
/// How long no helper is started after one that could not be started or died at once.
const PAUSE: Duration = Duration::from_secs(1);

/// A helper, whose process runs from its first errand on.
#[derive(Debug)]
pub struct Helper {
    command: Vec<OsString>,
    state: Mutex<State>,
    has_logged: AtomicBool,
}

#[derive(Debug, Default)]
struct State {
    process: Option<HelperProcess>,
    /// When a start failed last, or the started process died at once.
    failed: Option<Instant>,
}

#[derive(Debug)]
struct HelperProcess {
    child: Child,
    line: Connection,
}

/// A file that the helper opens for a session.
#[derive(Debug)]
pub struct FileOpening {
    /// The socket over which the session gets the file. The session gets it, and no other process keeps it.
    pub for_session: UnixStream,
    /// The report of the helper.
    pub report: FileReport,
}

/// The coming report on a file that the helper opens.
#[derive(Debug)]
pub struct FileReport(UnixStream);

impl HelperProcess {
    /// Drops the connection to the process. It may be waiting for a mount, so this thread does not wait for its end.
    fn reap_later(self) {
        let Self { mut child, line } = self;
        drop(line);
        // If no thread can be started, the process stays in the table of processes until this one ends.
        let _ = std::thread::Builder::new().name("reap".into()).spawn(move || child.wait());
    }
}

impl Helper {
    /// Makes a helper that `command` starts, which calls [`crate::run`] on its standard input. If the command is empty,
    /// no helper is started.
    #[must_use]
    pub const fn new(command: Vec<OsString>) -> Self {
        let state = State { process: None, failed: None };
        Self { command, state: Mutex::new(state), has_logged: AtomicBool::new(false) }
    }

    /// Begins to open an inode for a session, with flags of open(2).
    ///
    /// The session names the mount: it sends a directory on it over the socket that it gets. The files of that mount
    /// show one of the device numbers. If `entry`, a name in a directory, leads to the inode, the kernel knows the open
    /// file by that name.
    ///
    /// # Errors
    /// `EOPNOTSUPP` without a helper, `EIO` if it can't be started.
    pub fn open(
        &self,
        (inode, flags): (InodeId, u32),
        entry: Option<(InodeId, Vec<u8>)>,
        devices: Vec<u64>,
    ) -> Result<FileOpening, Errno> {
        let (report, their_report) = UnixStream::pair()?;
        let (for_session, for_helper) = UnixStream::pair()?;
        let errand = Errand::Open { inode, flags, entry, devices };
        self.send(errand, &[their_report.as_fd(), for_helper.as_fd()])?;
        Ok(FileOpening { for_session, report: FileReport(report) })
    }

    /// Waits until the helper is done with a file, whether or not it could open it.
    pub fn await_report(&self, FileReport(mut report): FileReport) {
        // A helper that has died is done, too. The session learns of that by the end of its socket.
        if let Ok(errno) = receive_report(&mut report) {
            self.log_once(Errno(errno));
        }
    }

    /// Closes the descriptors that wait in the queue of a socket.
    ///
    /// # Errors
    /// As [`Self::open`]; nothing is closed then.
    pub fn close_queued(&self, socket: BorrowedFd<'_>) -> Result<(), Errno> {
        self.send(Errand::Close, &[socket])
    }

    /// Sends an errand, to a new process if the old one is gone.
    pub(crate) fn send(&self, errand: Errand, descriptors: &[BorrowedFd<'_>]) -> Result<(), Errno> {
        if self.command.is_empty() {
            return Err(Errno::EOPNOTSUPP);
        }
        let mut state = self.state.lock();
        if state.failed.is_some_and(|failed| failed.elapsed() < PAUSE) {
            return Err(Errno::EIO);
        }
        for _ in 0..2 {
            let started = state.process.take().map_or_else(|| self.start_process(), Ok);
            let mut running = started.inspect_err(|_| state.failed = Some(Instant::now()))?;
            if running.line.send(&errand, descriptors).is_ok() {
                state.process = Some(running);
                return Ok(());
            }
            running.reap_later();
        }
        tracing::error!("the process that waits for mounts dies at once");
        state.failed = Some(Instant::now());
        Err(Errno::EIO)
    }

    /// Records that errands fail: for a moment no more are taken.
    pub(crate) fn pause_errands(&self) {
        self.state.lock().failed = Some(Instant::now());
    }

    fn start_process(&self) -> Result<HelperProcess, Errno> {
        let [program, arguments @ ..] = &self.command[..] else { return Err(Errno::EOPNOTSUPP) };
        let (ours, theirs) = UnixStream::pair()?;
        let mut command = Command::new(program);
        command.arg0(NAME).args(arguments).stdin(OwnedFd::from(theirs)).stdout(Stdio::null());
        let child = command.spawn().map_err(|error| {
            tracing::error!(%error, "no process can be started that waits for mounts");
            Errno::EIO
        })?;
        Ok(HelperProcess { child, line: Connection::from_socket(ours) })
    }

    /// Logs once an error that an administrator can correct.
    fn log_once(&self, errno: Errno) {
        if errno == Errno::EPERM && !self.has_logged.swap(true, Ordering::Relaxed) {
            tracing::error!(
                "the kernel does not let SharedFS open files for sessions (open_by_handle_at); give the daemon CAP_DAC_READ_SEARCH"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_command_there_are_no_descriptors() {
        let open = |words: &[&str]| {
            let command = words.iter().map(OsString::from).collect();
            Helper::new(command).open((InodeId::ROOT, 0), None, Vec::new()).err()
        };
        assert_eq!(open(&[]), Some(Errno::EOPNOTSUPP));
        assert_eq!(open(&["/nowhere"]), Some(Errno::EIO));
        // It takes the errand, and dies.
        let dying = Helper::new(["head", "-c", "1"].iter().map(OsString::from).collect());
        if let Ok(FileOpening { mut for_session, report }) = dying.open((InodeId::ROOT, 0), None, Vec::new()) {
            dying.await_report(report);
            assert_eq!(std::io::Read::read(&mut for_session, &mut [0]).expect("the end"), 0);
        }
        let none = Helper::new(Vec::new());
        for _ in 0..2 {
            let refused = none.open((InodeId::ROOT, 0), None, Vec::new()).err();
            assert_eq!(refused, Some(Errno::EOPNOTSUPP), "the same each time");
        }
    }
}
