//! Retired sessions.
//!
//! A retired session has ended, and its files are kept for sessions to come.
//!
//! Purpose: most of the time of a session's beginning and end goes into making and removing its files. The syncs of a
//! disk take most of that. A program that follows another one of the same user gets the files of its predecessor: the
//! session's number, files and SharedFS's mappings of them. The log goes on where it ended. So beginning and end cost
//! no more than a few words in memory, and the log has its pages.
//!
//! Invariants:
//! - All that the session has logged is committed, and its row in the shared area stays up to there. A position in its
//!   log means one record for ever.
//! - No process that had the files can write to them any more. No thread of SharedFS serves the ended process, and no
//!   other process has the files open or mapped. Pages that the kernel has pinned for another process (for an
//!   `io_uring`) can't be seen. So the files pass only to a process of the same user and groups. The ended process
//!   could do worse to such a process anyway, and such a process may know all that the ended one knew.
//! - Until a process takes the files they have no owner: a start removes them.
//! - No process waits for this: the thread that prepares sessions does it ([`crate::session_pool`]).
//!
//! Non-goals: sessions of mounts, which last; sessions that had more than most, or had something mapped.

use std::sync::Arc;

use ashlar_pmem::{Arena, SessionFile, SharedMemory};
use ashlar_types::{Credentials, LogPosition, SessionId};
use ashlar_wire::{CONTROL_BYTES, CONTROL_ROOM, LeaseTable};

use ashlar_node::sessions::session::{Control, LogRoom, ServedSession, SessionLog};
use ashlar_node::sessions::session_page::SessionPage;

/// A retired session.
pub struct RetiredSession {
    /// Its number.
    pub id: SessionId,
    /// The user and groups of the session, and of the next process that may take it.
    pub owner: Credentials,
    /// The log.
    pub log: Arc<SessionLog>,
    /// The log's memory.
    pub log_memory: Arc<SharedMemory>,
    /// Bytes of the log's file.
    pub log_room: LogRoom,
    /// Its control page.
    pub control: Arc<Control>,
    /// Its lease table.
    pub leases: LeaseTable<Arc<SharedMemory>>,
    /// The lease table's first page.
    pub page: SessionPage,
    /// The last slot of the lease table that was used.
    pub lease_top: u32,
    /// Where its log ends.
    pub end: LogPosition,
}

impl RetiredSession {
    /// Makes a retired session of one whose log ends at `end`.
    pub fn of(session: ServedSession, end: LogPosition) -> Self {
        let ServedSession {
            id, credentials: owner, log, log_memory, log_room, control, leases, page, lease_top, ..
        } = session;
        Self { id, owner, log, log_memory, log_room, control, leases, page, lease_top, end }
    }

    /// Returns whether no process uses the files any more, and they are whole.
    ///
    /// They must still have their room. The process that had them could truncate them.
    pub fn is_free(&self, arena: &Arena) -> bool {
        let [near, locks] = CONTROL_ROOM;
        let room = near.end + (locks.end - locks.start);
        let is_whole = |memory: &SharedMemory, bytes: u64, allocated: u64| {
            let found = memory.mapping().map(|memory| rustix::fs::fstat(memory.file()));
            found.is_some_and(|found| {
                found.is_ok_and(|file| file.st_size as u64 == bytes && file.st_blocks as u64 * 512 >= allocated)
            })
        };
        // A thread may have made a table of mapped segments while the session ended.
        arena.open_session_file(self.id, SessionFile::Mapped).is_err()
            && Arc::strong_count(&self.control) == 1
            && Arc::strong_count(&self.log) == 1
            && [&self.log_memory, self.control.memory(), self.page.memory()]
                .into_iter()
                .all(|memory| memory.mapping().is_some_and(|memory| memory.is_alone().unwrap_or(false)))
            && is_whole(&self.log_memory, self.log_room.bytes, self.log_room.allocated)
            && is_whole(self.control.memory(), CONTROL_BYTES, room)
    }
}
