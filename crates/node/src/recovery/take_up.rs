//! Takes up the sessions that an earlier SharedFS has left.

use std::collections::BTreeMap;
use std::sync::Arc;

use ashlar_log::Log;
use ashlar_store::MappedRun;
use ashlar_types::{LogPosition, SessionId};

use crate::journal::ReplayError;
use crate::journal::acts::remove_session_row;
use crate::node_core::NodeCore;
use crate::sessions::mapped_table::MappedTable;
use crate::sessions::session::ServedSession;

/// A session whose memory can be used.
pub struct SoundSession {
    /// The session.
    pub session: ServedSession,
    /// The files that its process has mapped, if it lives and has mapped any.
    pub mapped: Option<(MappedTable, Vec<MappedRun>)>,
}

/// A session's memory as the shell has found it.
pub enum FoundSession {
    /// It can be used.
    Sound(Box<SoundSession>),
    /// The session has no owner, or its memory is damaged.
    ///
    /// On a disk, a session without an owner may still have had a process that made nothing persistent. Updates that
    /// other sessions based on it are lost then.
    Lost,
}

/// Takes up the sessions that have left memory, and applies the journal's frames that the store lacks.
///
/// # Errors
/// [`ReplayError`]; the node must then be given up.
pub fn take_up_sessions(state: &mut NodeCore, found: BTreeMap<SessionId, FoundSession>) -> Result<(), ReplayError> {
    // This comes first: from here on no process uses block addresses that an earlier SharedFS sent, and no mapped block
    // is given out.
    for (id, found) in found {
        match found {
            FoundSession::Sound(sound) => take_up_session(state, *sound),
            FoundSession::Lost => _ = state.recovery.lost.insert(id),
        }
    }
    replay_journal(state)?;
    continue_shorter_logs(state);
    for (id, _) in state.store.sessions() {
        let is_there = state.sessions.contains_key(&id) || state.recovery.lost.contains(&id);
        if id != SessionId::SHARED_FS && !is_there {
            // Its memory was removed first when it ended.
            remove_session_row(state, id);
        }
    }
    let NodeCore { store, sessions, .. } = state;
    for session in sessions.values() {
        if !store.has_session(session.id) {
            store.set_session(session.id, session.log.generation(), LogPosition(0));
        }
    }
    Ok(())
}

/// Applies the journal's frames that the store lacks: their order and their verdicts stand.
fn replay_journal(state: &mut NodeCore) -> Result<(), ReplayError> {
    let NodeCore { store, journal, sessions, orphans, .. } = state;
    let Some(journal) = journal else { return Ok(()) };
    for (id, cost) in journal.replay(store)? {
        if let Some(session) = sessions.get_mut(&id) {
            // The records were admitted: a session that had not paid would have been refused.
            session.account.spend(cost);
        }
    }
    *orphans = store.orphans()?.into_iter().collect();
    Ok(())
}

/// Lets a log go on where the journal has applied it.
///
/// After a loss of power, the medium may have lost records of a log that were durable in the journal: a commit makes
/// the journal durable first.
fn continue_shorter_logs(state: &mut NodeCore) {
    let NodeCore { store, sessions, .. } = state;
    for session in sessions.values_mut().filter(|session| !session.is_whole) {
        let applied = store.applied(session.id);
        if session.log.tail() >= applied {
            continue;
        }
        // A log that is damaged is fenced when it is read.
        if let Ok((log, _)) = Log::recover(Arc::clone(&session.log_memory), applied) {
            session.log = Arc::new(log);
        }
    }
}

fn take_up_session(state: &mut NodeCore, SoundSession { mut session, mapped }: SoundSession) {
    let id = session.id;
    session.control.raise_segment_version();
    state.ways.add_user(&session.credentials);
    if let Some((table, runs)) = mapped {
        session.mapped = Some(table);
        for run in runs {
            if !state.store.take_up_mapped(id, &run) {
                tracing::error!(session = id.0, ?run, "the blocks that a session has mapped are not there");
            }
        }
    }
    state.sessions.insert(id, session);
}
