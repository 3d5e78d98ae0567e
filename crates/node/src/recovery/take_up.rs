//! Takes up the sessions that an earlier SharedFS has left.

use std::collections::BTreeMap;

use ashlar_store::MappedRun;
use ashlar_types::{LogPosition, SessionId};

use crate::journal::acts::remove_session_row;
use crate::node_core::NodeCore;
use crate::sessions::mapped_table::MappedTable;
use crate::sessions::session::ServedSession;

/// A session's memory as the shell has found it.
pub enum FoundSession {
    /// It can be used.
    Sound {
        /// The session.
        session: Box<ServedSession>,
        /// The files that its process has mapped, if it lives and has mapped any.
        mapped: Option<(MappedTable, Vec<MappedRun>)>,
    },
    /// The session has no owner, or its memory is damaged.
    ///
    /// On a disk, a session without an owner may still have had a process that made nothing persistent. Updates that
    /// other sessions based on it are lost then.
    Lost,
}

/// Takes up the sessions that have left memory.
pub fn take_up_sessions(state: &mut NodeCore, found: BTreeMap<SessionId, FoundSession>) {
    for (id, _) in state.store.sessions() {
        if id != SessionId::SHARED_FS && !found.contains_key(&id) {
            // Its memory was removed first when it ended.
            remove_session_row(state, id);
        }
    }
    for (id, found) in found {
        match found {
            FoundSession::Sound { session, mapped } => take_up_session(state, *session, mapped),
            FoundSession::Lost => _ = state.recovery.lost.insert(id),
        }
    }
}

fn take_up_session(state: &mut NodeCore, mut session: ServedSession, mapped: Option<(MappedTable, Vec<MappedRun>)>) {
    let id = session.id;
    // This comes first: from here on its process no longer uses block addresses that an earlier SharedFS sent.
    session.control.raise_segment_version();
    if !state.store.has_session(id) {
        state.store.set_session(id, session.log.generation(), LogPosition(0));
    }
    state.ways.add_user(&session.credentials);
    // Before any block is given out.
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
