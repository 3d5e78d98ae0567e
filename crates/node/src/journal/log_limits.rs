//! How far sessions may append: what is in their logs always has room in the journal.
//!
//! A lease move, a sync or the end of a session journals what a session has logged, and may wait for nothing. So
//! appends wait instead. SharedFS limits each log ([`ServedSession::append_limit`]), and promises room in the ring for
//! everything between what is applied and the limit. While a replica is away, the ring fills, limits are raised by less
//! and less, and in the end not at all.

use ashlar_types::{LogPosition, SessionId};

use crate::journal::NodeJournal;
use crate::node_core::NodeCore;
use crate::records::logs::fence_session;
use crate::records::validate::Violation;
use crate::sessions::session::ServedSession;

/// The part of the ring that may be promised.
const LOGS_PART: (u64, u64) = (3, 4);
/// The part of the room that is left which a session gets at once.
const WINDOW_PART: u64 = 8;
/// The bytes of a log for which thrice as much room is promised: each of their records may become a batch.
const SMALL_BATCHES_BYTES: u64 = 512 << 10;
/// No log is sealed for less room than that.
const KEPT_BYTES: u64 = 4096;

/// Returns the room in the journal that so many bytes of a log may need.
///
/// Frames of a large batch have about as many bytes as the log. A record that is a batch by itself needs thrice as much
/// and more, with its verdict; the part of the ring that is never promised is for the rest.
fn promise(bytes: u64) -> u64 {
    bytes.saturating_add(2 * bytes.min(SMALL_BATCHES_BYTES))
}

/// Returns the room that is promised to a session.
fn promised_to(session: &ServedSession, applied: LogPosition) -> u64 {
    let upto = match session.append_limit {
        Some(_) if session.fenced.is_some() || session.is_cut => return 0,
        Some(limit) if session.is_ending => limit.min(session.log.tail()),
        Some(limit) => limit,
        None => return 0,
    };
    promise(upto.0.saturating_sub(applied.0))
}

/// Lets a session append up to `need`, and further if there is room in the journal.
///
/// Returns whether it may append up to `need`. Without a journal, there is no limit.
pub fn raise_limit(state: &mut NodeCore, id: SessionId, need: LogPosition) -> bool {
    let NodeCore { journal: Some(journal), store, sessions, .. } = state else { return true };
    let others = sessions.values().filter(|session| session.id != id);
    let promised = others.fold(0u64, |sum, session| sum + promised_to(session, store.applied(session.id)));
    let left = journal.room_for_logs().saturating_sub(promised);
    let is_idle = promised == 0 && journal.is_unused();
    let applied = store.applied(id);
    let Some(session) = sessions.get_mut(&id).filter(|session| !session.is_ending) else { return true };
    let before = session.append_limit.unwrap_or(applied);
    let window = left / WINDOW_PART;
    let tail = session.log.tail().min(before).max(applied);
    if before >= need && before >= tail.plus(window / 2) {
        return true;
    }
    let fits = |upto: LogPosition| promise(upto.0.saturating_sub(applied.0)) <= left;
    let wanted = need.max(tail.plus(window));
    // A record for which even an unused journal has no room as promised is one batch.
    let limit = if fits(wanted) {
        wanted
    } else if fits(need) || is_idle {
        need
    } else {
        return before >= need;
    };
    session.limit_appends(limit.max(before));
    true
}

/// Takes room back from the other sessions, as far as they have not used it.
pub fn recall_room(state: &mut NodeCore, except: SessionId) {
    for id in state.live_ids() {
        let Some(session) = state.sessions.get_mut(&id).filter(|session| session.id != except) else { continue };
        let Some(limit) = session.append_limit.filter(|_| !session.is_ending) else { continue };
        if limit <= session.log.tail().plus(KEPT_BYTES) {
            continue;
        }
        if let Err(damaged) = session.lower_limit() {
            fence_session(state, id, &Violation::Log(damaged.to_string()));
        }
        state.counters.seals += 1;
    }
}

impl NodeJournal {
    /// Returns the bytes of the ring that records of logs may still use.
    fn room_for_logs(&self) -> u64 {
        (self.ring().capacity() / LOGS_PART.1 * LOGS_PART.0).saturating_sub(self.needed_bytes())
    }

    /// Returns whether no frame of the ring is needed.
    fn is_unused(&self) -> bool {
        self.needed_bytes() == 0
    }
}
