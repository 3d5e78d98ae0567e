//! How far sessions may append: what is in their logs always has room in the journal.
//!
//! A lease move, a sync or the end of a session journals what a session has logged, and may wait for nothing. So
//! appends wait instead. SharedFS limits each log ([`ServedSession::append_limit`]), and promises room in the ring for
//! everything between what is applied and the limit. While a replica is away, the ring fills, limits are raised by less
//! and less, and in the end not at all.

use ashlar_types::{LogPosition, SessionId};

use crate::node_core::NodeCore;
use crate::records::logs::fence_session;
use crate::records::validate::Violation;
use crate::sessions::session::ServedSession;

/// The part of the room that is left which a session gets at once, and the most bytes.
const WINDOW_PART: u64 = 8;
const WINDOW_BYTES_MAX: u64 = 8 << 20;
/// The bytes of a log for which thrice as much room is promised: each of their records may become a batch.
const SMALL_BATCHES_BYTES: u64 = 512 << 10;
/// No log is sealed for less room than that.
const KEPT_BYTES: u64 = 4096;
/// The most bytes of a log that a read may add though no more room may be promised.
const READ_BYTES: u64 = 512;

/// Returns the room in the journal that so many bytes of a log may need.
///
/// Frames of a large batch have about as many bytes as the log. A record that is a batch by itself needs thrice as much
/// and more, with its verdict; the part of the ring that is never promised is for the rest.
fn promise(bytes: u64) -> u64 {
    bytes.saturating_add(2 * bytes.min(SMALL_BATCHES_BYTES))
}

/// Returns the room that is promised to a session, of whose log so much is applied.
fn promised_to(session: &ServedSession, applied: LogPosition) -> u64 {
    let Some(limit) = session.append_limit.filter(|_| session.fenced.is_none() && !session.is_cut) else { return 0 };
    let upto = if session.is_ending { limit.min(session.log.tail()) } else { limit };
    // A hostile session can make its log's end any number.
    promise(upto.0.saturating_sub(applied.0).min(session.log.capacity()))
}

/// Lets a session append up to `need`, and further if there is room in the journal.
///
/// Returns whether it may append up to `need`. Without a journal, there is no limit.
pub fn raise_limit(state: &mut NodeCore, id: SessionId, need: LogPosition) -> bool {
    let NodeCore { journal: Some(journal), store, sessions, .. } = state else { return true };
    let applied = store.applied(id);
    let Some(session) = sessions.get(&id).filter(|session| !session.is_ending) else { return true };
    let before = session.append_limit.unwrap_or(applied);
    let tail = session.log.tail().min(before).max(applied);
    let has = |window: u64| before >= need && before >= tail.plus(window / 2);
    if has(WINDOW_BYTES_MAX) {
        return true;
    }
    let others = sessions.values().filter(|session| session.id != id);
    let promised = others.fold(0u64, |sum, session| {
        let promised = promised_to(session, store.applied(session.id));
        sum.saturating_add(promised)
    });
    let left = journal.room_for_logs().saturating_sub(promised);
    let window = (left / WINDOW_PART).min(WINDOW_BYTES_MAX);
    if has(window) {
        return true;
    }
    let bytes_to = |upto: LogPosition| upto.0.saturating_sub(applied.0);
    let fits = |upto: LogPosition| promise(bytes_to(upto)) <= left;
    // No journal has the room that such a record may need, if it is promised so. It is one batch.
    let is_huge = journal.needed_bytes() == 0 && bytes_to(need).saturating_add(promised) <= journal.room_for_logs();
    let wanted = need.max(tail.plus(window));
    let limit = if fits(wanted) {
        wanted
    } else if fits(need) || is_huge {
        need
    } else {
        return before >= need;
    };
    let limit = limit.max(before);
    sessions.entry(id).and_modify(|session| session.limit_appends(limit));
    true
}

/// Lets a session append the few bytes that a read needs, out of the room that is never promised.
///
/// Returns whether there was any. A session that has read another one's state notes that in its log.
pub fn raise_limit_for_read(state: &mut NodeCore, id: SessionId, need: LogPosition) -> bool {
    let NodeCore { journal: Some(journal), store, sessions, .. } = state else { return true };
    let has_room = need.0.saturating_sub(store.applied(id).0) <= READ_BYTES && !journal.is_nearly_full();
    if has_room {
        sessions.entry(id).and_modify(|session| session.limit_appends(need.max(session.append_limit.unwrap_or(need))));
    }
    has_room
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
