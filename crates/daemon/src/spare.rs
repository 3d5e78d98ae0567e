//! Logs of sessions that have ended, for sessions to come.
//!
//! Purpose: a program that writes much fills pages of its log that nobody has used yet, and has each of them found and cleared by the kernel: on
//! the machine that this was measured on a tenth of what SQLite takes for a large transaction. What a program has left of such pages the next
//! one goes on with.
//!
//! Invariants:
//! - Nobody learns from a log what was in it before: it's made zero, as far as it was used, before it is another's.
//! - Nobody who had it can write to it any more: no other process has it open or mapped. What the kernel has pinned of it for another (for an
//!   `io_uring`) can't be seen; so it goes to a process of the same user and groups only, to whom that one might do worse.
//! - Neither takes anybody's time: the thread that makes sessions in advance does it ([`crate::pool`]).
//!
//! Non-goals: logs on a disk, which the kernel would write back once more for their zeros, and the logs of mounts, which have all their room
//! from the beginning.

use std::time::Duration;

use ashlar_pmem::MediumKind;
use ashlar_types::{Credentials, SessionId};
use ashlar_wire::SessionKind;

use crate::session::{LogRoom, Session};
use crate::shared::Shared;

/// The most logs that wait to be made fit, and the most that are: what a machine keeps of memory for programs to come.
pub const SPARES_MAX: usize = 2;
/// A process that has said goodbye has its log mapped until it ends: so often, and so long each time, it's waited for.
const TRIES: u32 = 5;
const PAUSE: Duration = Duration::from_millis(2);

/// The log of a session that is no more.
#[derive(Debug)]
pub struct Spare {
    /// The session whose log it was.
    pub of: SessionId,
    /// Whose session that was, and whose the next one must be.
    pub owner: Credentials,
    /// Its file.
    pub room: LogRoom,
    /// So many of its first bytes may have been written.
    used: u64,
}

impl Spare {
    /// Takes the log of a session that is about to be removed, if it is worth keeping: it has more room than a new one's beginning.
    pub fn of(shared: &Shared, session: &Session, beginning: u64) -> Option<Self> {
        let is_fit = shared.arena.medium().kind == MediumKind::Memory
            && session.identity.kind == SessionKind::Process
            && session.fenced.is_none()
            && !session.is_torn();
        let room = session.log_room;
        if !is_fit || room.allocated <= beginning || !shared.pool.has_room_for_spare() {
            return None;
        }
        if let Err(error) = shared.arena.make_log_spare(session.id) {
            tracing::debug!(session = session.id.0, %error, "a log can't be kept");
            return None;
        }
        let before_ring = room.bytes - session.log.capacity();
        let used = session.log.tail().0.saturating_add(before_ring).min(room.bytes);
        Some(Self { of: session.id, owner: session.credentials.clone(), room, used })
    }

    /// Makes it fit for another session; what can't be made so is removed.
    pub fn clean(self, shared: &Shared) -> Option<Self> {
        for attempt in 0..TRIES {
            match shared.arena.clean_spare(self.of, self.used) {
                Ok(true) => return Some(self),
                Ok(false) if attempt + 1 < TRIES => std::thread::sleep(PAUSE),
                Ok(false) => break,
                Err(error) => {
                    tracing::debug!(session = self.of.0, %error, "a log can't be used again");
                    break;
                }
            }
        }
        self.remove(shared);
        None
    }

    /// Removes it.
    pub fn remove(&self, shared: &Shared) {
        // What can't be removed now goes at the next start.
        let _ = shared.arena.remove_spare(self.of);
    }
}
