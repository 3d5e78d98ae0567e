//! Notes the record locks of a session's process where a restarted SharedFS finds them.
//!
//! Purpose: SharedFS's lock table is lost when SharedFS is killed. A process's copy of its locks is a claim, and a
//! hostile one would take a lock that another process has. So SharedFS notes the locks that it has granted behind the
//! words of the session's lease table, which the session can only read.
//!
//! Invariant: the notes equal the table for the process's own record locks, before any answer about them is sent. A
//! lock that is not noted, since there was no room, is lost with this SharedFS.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ashlar_pmem::SharedMemory;
use ashlar_types::{InodeId, LockedRange};
use ashlar_wire::{LOCK_SLOTS_BYTES, LockNotes};

use crate::sessions::kept_rights::RIGHTS_END;

type Notes = LockNotes<Arc<SharedMemory>, LEASES_FILE_BYTES>;

/// Bytes of a lease table's file, with all that stands behind the slots.
pub const LEASES_FILE_BYTES: u64 = RIGHTS_END + LOCK_SLOTS_BYTES;

/// The notes of one session.
#[derive(Debug)]
pub struct NotedLocks {
    notes: Notes,
    table: Arc<SharedMemory>,
    /// Whether the file has room for them.
    has_room: AtomicBool,
}

impl NotedLocks {
    /// Takes the notes behind a lease table; `None` if its file is too short.
    pub fn new(table: &Arc<SharedMemory>) -> Option<Self> {
        let notes = Notes::new(Arc::clone(table))?;
        Some(Self { notes, table: Arc::clone(table), has_room: AtomicBool::new(false) })
    }

    /// Notes all locks that the process has on a file.
    pub fn set(&self, inode: InodeId, locks: &[LockedRange]) {
        let is_noted = self.make_room() && self.notes.set(inode, locks.iter().copied());
        if !is_noted && !locks.is_empty() {
            tracing::debug!(%inode, "no room to note record locks: they are lost if the daemon is killed");
        }
    }

    /// Returns the noted files, with their locks.
    pub fn all(&self) -> Vec<(InodeId, Vec<LockedRange>)> {
        self.notes.all()
    }

    /// Removes all notes.
    pub fn clear(&self) {
        self.notes.clear();
    }

    fn make_room(&self) -> bool {
        if !self.has_room.load(Ordering::Relaxed) {
            let has_room = self.table.allocate(RIGHTS_END..LEASES_FILE_BYTES).is_ok();
            self.has_room.store(has_room, Ordering::Relaxed);
        }
        self.has_room.load(Ordering::Relaxed)
    }
}
