//! Sessions that have ended, whose files are for sessions to come.
//!
//! Purpose: most of what the beginning and the end of a session take is the making and the removal of its files, the syncs of a disk above all. A
//! program that follows another one of the same user has what that one has left: number, files and SharedFS's mappings, and the log goes on where it
//! ended. So neither costs more than a few words in memory, and the log has its pages.
//!
//! Invariants:
//! - All that the session has logged is committed, and up to there its row in the shared area stays: a position in its log means one record for ever.
//! - Nobody who had the files can write to them any more: no thread of SharedFS serves the one that has ended, and no other process has them open
//!   or mapped. What the kernel has pinned of them for another (for an `io_uring`) can't be seen; so they go to a process of the same user and groups
//!   only, to whom that one might do worse, and who may know all that it knew.
//! - Until somebody has them they are nobody's: a start removes them.
//! - It takes nobody's time: the thread that makes sessions in advance does it ([`crate::pool`]).
//!
//! Non-goals: the sessions of mounts, which last; those that had more than most, or had something mapped.

use std::sync::Arc;
use std::time::Duration;

use ashlar_pmem::{Mapping, SessionFile};
use ashlar_types::{Credentials, LogPosition, SessionId};
use ashlar_wire::{CONTROL_BYTES, CONTROL_ROOM, LeaseTable, SessionKind};

use crate::session::{Blank, Control, LogRoom, Session, SessionLog};
use crate::shared::Shared;
use crate::state::State;

/// A process that has said goodbye has its files mapped until it ends: so often, and so long each time, it's waited for.
const TRIES: u32 = 5;
const PAUSE: Duration = Duration::from_millis(2);

/// What a session has left.
pub struct Ended {
    /// Its number.
    pub id: SessionId,
    /// Whose session it was, and whose the next one must be.
    pub owner: Credentials,
    /// Its log …
    pub log: Arc<SessionLog>,
    /// … and that log's memory.
    pub log_memory: Arc<Mapping>,
    /// Bytes of the log's file.
    pub log_room: LogRoom,
    /// Its control page.
    pub control: Arc<Control>,
    /// Its lease table.
    pub leases: LeaseTable<Arc<Mapping>>,
    /// The lease table's first page.
    pub page: Arc<Mapping>,
    /// The last slot of the lease table that was used.
    pub lease_top: u32,
    /// Where its log ends.
    pub end: LogPosition,
}

impl Ended {
    /// Whether the files of a session that is committed as a whole may be another's.
    pub fn is_fit(state: &State, session: &Session) -> bool {
        session.identity.kind == SessionKind::Process
            && session.fenced.is_none()
            && session.is_whole
            && !session.is_cut
            && !session.is_torn()
            && session.mapped.is_none()
            // Of one that an earlier SharedFS made it's not known.
            && session.log_room.allocated > 0
            && state.leasing.manager.has_ended(session.id)
    }

    /// What such a session leaves, whose log ends here.
    pub fn of(session: Session, end: LogPosition) -> Self {
        let Session { id, credentials: owner, log, log_memory, log_room, control, leases, page, lease_top, .. } =
            session;
        Self { id, owner, log, log_memory, log_room, control, leases, page, lease_top, end }
    }

    /// Makes a session of it that is nobody's; what is good for none is removed.
    pub fn clean(self, shared: &Shared) -> Option<Blank> {
        let id = self.id;
        for attempt in 0..TRIES {
            if attempt > 0 {
                std::thread::sleep(PAUSE);
            }
            if self.is_free(shared) {
                match Blank::of_ended(self) {
                    Ok(blank) => return Some(blank),
                    Err(error) => {
                        tracing::debug!(session = id.0, %error, "what a session has left can't be used again")
                    }
                }
                break;
            }
        }
        remove(shared, id);
        None
    }

    /// Whether nobody uses it any more, and it has the room that it was given: who had it could cut it.
    fn is_free(&self, shared: &Shared) -> bool {
        let [near, locks] = CONTROL_ROOM;
        let room = near.end + (locks.end - locks.start);
        let is_whole = |memory: &Mapping, bytes: u64, allocated: u64| {
            let found = rustix::fs::fstat(memory.file());
            found.is_ok_and(|file| file.st_size as u64 == bytes && file.st_blocks as u64 * 512 >= allocated)
        };
        // A table of what it has mapped may have been made while it was ended.
        shared.arena.open_session_file(self.id, SessionFile::Mapped).is_err()
            && Arc::strong_count(&self.control) == 1
            && Arc::strong_count(&self.log) == 1
            && [&*self.log_memory, self.control.memory(), &*self.page]
                .into_iter()
                .all(|memory| memory.is_alone().unwrap_or(false))
            && is_whole(&self.log_memory, self.log_room.bytes, self.log_room.allocated)
            && is_whole(self.control.memory(), CONTROL_BYTES, room)
    }
}

/// Removes what a session has left that is nobody's. Nobody waits for the disk meanwhile.
pub fn remove(shared: &Shared, id: SessionId) {
    if has_removed_files(shared, id) {
        shared.lock().store.remove_session(id);
    }
}

/// As [`remove`].
pub fn remove_with(shared: &Shared, state: &mut State, id: SessionId) {
    if has_removed_files(shared, id) {
        state.store.remove_session(id);
    }
}

/// The files go before the row does: files without a row would look like a new session's, and be applied again.
fn has_removed_files(shared: &Shared, id: SessionId) -> bool {
    let removed = shared.arena.remove_session(id);
    removed
        .inspect_err(|error| {
            tracing::error!(session = id.0, %error, "an ended session's files can't be removed; the next start does it");
        })
        .is_ok()
}
