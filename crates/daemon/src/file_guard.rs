//! Keeps the files of sessions as long as SharedFS made them.
//!
//! A process writes its log and its control page in memory, and has a descriptor of each for that. By a descriptor it
//! can also make the file longer, which would take the arena's room without any account. Nothing in the kernel forbids
//! that: only files that no path leads to can be sealed, and those would not outlive SharedFS. So a thread looks at the
//! lengths, cuts what is too long, and fences the session.
//!
//! Invariants:
//! - A file is guarded from the session's beginning until no process has it open or mapped, whether or not the session
//!   has ended.
//! - Cutting may wait for a call of the process on the same file, so no lock is held meanwhile.
//!
//! Non-goals: files that a process makes shorter ([`ServedSession::is_truncated`]).

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::time::Duration;

use ashlar_pmem::is_only_user;
use ashlar_types::SessionId;
use ashlar_wire::CONTROL_BYTES;
use parking_lot::{Condvar, Mutex};

use crate::session_files::mapping_of;
use ashlar_node::sessions::session::ServedSession;

/// The files of all sessions that any process may have.
#[derive(Default)]
pub struct FileGuard {
    sessions: Mutex<GuardedSessions>,
    changed: Condvar,
}

#[derive(Default)]
struct GuardedSessions {
    files: Vec<Arc<GuardedFiles>>,
    is_ending: bool,
}

/// The files of a session that its process can write.
pub struct GuardedFiles {
    /// The session.
    pub session: SessionId,
    /// The session's secret: its number may be another's later.
    pub token: u64,
    user: u32,
    /// Log and control page, with their lengths.
    files: [(File, u64); 2],
    /// The number of the log's inode.
    inode: u64,
}

impl FileGuard {
    /// Guards the files of a session that is among the state's.
    ///
    /// # Errors
    /// Those of duplicating descriptors.
    pub fn watch(&self, session: &ServedSession) -> io::Result<()> {
        let log = File::from(mapping_of(&session.log_memory)?.file().try_clone_to_owned()?);
        let control = mapping_of(session.control.memory())?.file().try_clone_to_owned()?.into();
        let inode = log.metadata()?.ino();
        let guarded = GuardedFiles {
            session: session.id,
            token: session.token,
            user: session.identity.uid,
            files: [(log, session.log_room.bytes), (control, CONTROL_BYTES)],
            inode,
        };
        let files = &mut self.sessions.lock().files;
        // The files of a retired session: the process that had them has none of them any more.
        files.retain(|files| files.inode != inode);
        files.push(Arc::new(guarded));
        self.changed.notify_all();
        Ok(())
    }

    /// Ends the checks.
    pub fn end(&self) {
        self.sessions.lock().is_ending = true;
        self.changed.notify_all();
    }

    /// Waits until the next check is due; returns the files to check, or `None` at the end.
    pub fn wait(&self, pause: Duration) -> Option<Vec<Arc<GuardedFiles>>> {
        let mut sessions = self.sessions.lock();
        while sessions.files.is_empty() && !sessions.is_ending {
            self.changed.wait(&mut sessions);
        }
        if !sessions.is_ending {
            self.changed.wait_for(&mut sessions, pause);
        }
        (!sessions.is_ending).then(|| sessions.files.clone())
    }

    /// Returns the files of a user's sessions.
    pub fn files_of(&self, user: u32) -> Vec<Arc<GuardedFiles>> {
        self.sessions.lock().files.iter().filter(|files| files.user == user).cloned().collect()
    }

    /// Forgets files that no process has any more.
    pub fn forget(&self, free: &[Arc<GuardedFiles>]) {
        self.sessions.lock().files.retain(|files| !free.iter().any(|other| Arc::ptr_eq(files, other)));
    }
}

impl GuardedFiles {
    /// Cuts files that are too long; returns whether there was any.
    pub fn cut(&self) -> bool {
        let mut has_grown = false;
        for (file, bytes) in &self.files {
            if !file.metadata().is_ok_and(|metadata| metadata.len() > *bytes) {
                continue;
            }
            has_grown = true;
            if let Err(error) = file.set_len(*bytes) {
                tracing::error!(session = self.session.0, %error, "a session's file that is too long can't be cut");
            }
        }
        has_grown
    }

    /// Returns whether no process but SharedFS has the files.
    pub fn is_free(&self) -> bool {
        self.files.iter().all(|(file, _)| is_only_user(file.as_fd()).unwrap_or(true))
    }
}
