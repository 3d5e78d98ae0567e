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

/// Why a file was not opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HelperOpenError {
    /// Nothing was opened. The error of the opening; `EOPNOTSUPP` without a helper, `EIO` if it can't be started or has
    /// died.
    Refused(Errno),
    /// The helper died while it answered: the session may have got the file.
    Unknown,
}

impl From<Errno> for HelperOpenError {
    fn from(errno: Errno) -> Self {
        Self::Refused(errno)
    }
}

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

    /// Opens an inode, with flags of open(2), on the mount of a directory, and sends it over the socket of a session.
    /// If `entry`, a name in a directory, leads to the inode, the kernel knows the open file by that name.
    ///
    /// # Errors
    /// [`HelperOpenError`].
    pub fn open(
        &self,
        (inode, flags): (InodeId, u32),
        entry: Option<(InodeId, Vec<u8>)>,
        mount: BorrowedFd<'_>,
        session: BorrowedFd<'_>,
    ) -> Result<(), HelperOpenError> {
        let (mut report, theirs) = UnixStream::pair().map_err(Errno::from)?;
        self.send(Errand::Open { inode, flags, entry }, &[theirs.as_fd(), mount, session])?;
        drop(theirs);
        match receive_report(&mut report) {
            Ok(0) => {}
            Ok(errno) => {
                self.log_once(Errno(errno));
                return Err(Errno(errno).into());
            }
            Err(_) => return Err(Errno::EIO.into()),
        }
        receive_report(&mut report).map(drop).map_err(|_| HelperOpenError::Unknown)
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
        let (one, two) = UnixStream::pair().expect("sockets");
        let open = |words: &[&str]| {
            let command = words.iter().map(OsString::from).collect();
            Helper::new(command).open((InodeId::ROOT, 0), None, one.as_fd(), two.as_fd())
        };
        assert_eq!(open(&[]), Err(HelperOpenError::Refused(Errno::EOPNOTSUPP)));
        assert_eq!(open(&["/nowhere"]), Err(HelperOpenError::Refused(Errno::EIO)));
        // It reads the errand, can't parse it, and dies.
        assert_eq!(open(&["head", "-c", "1"]), Err(HelperOpenError::Refused(Errno::EIO)));
        let none = Helper::new(Vec::new());
        for _ in 0..2 {
            let refused = none.open((InodeId::ROOT, 0), None, one.as_fd(), two.as_fd());
            assert_eq!(refused, Err(HelperOpenError::Refused(Errno::EOPNOTSUPP)), "the same each time");
        }
    }
}
