//! Logs of sessions that are no more, kept for sessions to come: what has room and memory already costs nobody a page fault.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use ashlar_types::SessionId;

use super::{Arena, ArenaError, SessionFile, at, list, remove_file, sync_dir};

/// What every such file's name begins with.
const PREFIX: &str = "spare-";
/// Says which signal comes when a lease is to end.
const F_SETSIG: i32 = 10;
/// Bytes that are made zero at once.
static ZEROS: [u8; 64 << 10] = [0; 64 << 10];

impl Arena {
    /// Takes the log of a session that is no more away from it, under a name that no start takes for a session's. From now on it is the
    /// *spare* of this number.
    ///
    /// # Errors
    /// [`ArenaError::Io`].
    pub fn make_log_spare(&self, session: SessionId) -> Result<(), ArenaError> {
        let path = self.session_path(session, SessionFile::Log);
        fs::rename(&path, self.spare_path(session)).map_err(at(&path))
    }

    /// Makes a spare's first bytes zero, whatever its session has left there. `false` where somebody else has the file open or mapped still, who
    /// could write to it in another session's name: then it is good for nothing.
    ///
    /// # Errors
    /// [`ArenaError::Io`].
    pub fn clean_spare(&self, spare: SessionId, bytes: u64) -> Result<bool, ArenaError> {
        let path = self.spare_path(spare);
        let clean = || {
            let file = OpenOptions::new().read(true).write(true).open(&path)?;
            if !is_open_nowhere_else(&file)? {
                return Ok(false);
            }
            for offset in (0..bytes).step_by(ZEROS.len()) {
                file.write_all_at(&ZEROS[..ZEROS.len().min((bytes - offset) as usize)], offset)?;
            }
            Ok(true)
        };
        clean().map_err(at(&path))
    }

    /// Makes a spare the log of a session that has none, and opens it for reading and writing.
    ///
    /// # Errors
    /// [`ArenaError::Io`].
    pub fn give_spare(&self, spare: SessionId, session: SessionId) -> Result<File, ArenaError> {
        let path = self.session_path(session, SessionFile::Log);
        fs::rename(self.spare_path(spare), &path).map_err(at(&path))?;
        sync_dir(&self.dir.join("sessions"))?;
        self.open_session_file(session, SessionFile::Log)
    }

    /// Removes a spare, if there is one of this number.
    ///
    /// # Errors
    /// [`ArenaError::Io`].
    pub fn remove_spare(&self, spare: SessionId) -> Result<(), ArenaError> {
        remove_file(&self.spare_path(spare))
    }

    /// Removes what spares whoever had the arena open before has left.
    ///
    /// # Errors
    /// [`ArenaError::Io`].
    pub fn remove_spares(&self) -> Result<(), ArenaError> {
        let is_spare = |path: &PathBuf| {
            path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(PREFIX.as_bytes()))
        };
        list(&self.dir.join("sessions"))?.iter().filter(|path| is_spare(path)).try_for_each(|path| remove_file(path))
    }

    fn spare_path(&self, session: SessionId) -> PathBuf {
        self.dir.join("sessions").join(format!("{PREFIX}{session}.{}", SessionFile::Log.extension()))
    }
}

/// Whether this open file is the only one of its file, in all processes, mapped memory included. Only who finds the file by a path can open
/// it again.
fn is_open_nowhere_else(file: &File) -> io::Result<bool> {
    // The kernel gives a lease to write only where nobody else has the file open, and keeps none here. Should somebody open the file in between, it
    // sends a signal: one that nobody notices.
    let calls = [(F_SETSIG, libc::SIGURG), (libc::F_SETLEASE, libc::F_WRLCK), (libc::F_SETLEASE, libc::F_UNLCK)];
    for (command, value) in calls {
        // SAFETY: it takes two numbers, and the descriptor is valid.
        if unsafe { libc::fcntl(file.as_raw_fd(), command, value) } != 0 {
            let error = io::Error::last_os_error();
            return if error.raw_os_error() == Some(libc::EAGAIN) { Ok(false) } else { Err(error) };
        }
    }
    Ok(true)
}
