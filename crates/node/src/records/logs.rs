//! Logs as a whole: fenced, cut and sealed.

use ashlar_types::{LogPosition, SessionId};

use crate::blame::Blame;
use crate::effects::NodeEffect;
use crate::node_core::NodeCore;
use crate::records::validate::Violation;

/// Cuts the log of a session whose process is gone: nothing more of it is applied.
pub fn cut_log(state: &mut NodeCore, id: SessionId) {
    if let Some(session) = state.sessions.get_mut(&id) {
        (session.is_ending, session.is_cut) = (true, true);
        state.counters.logs_cut += 1;
    }
}

/// Fences a session: nothing more of its log is taken, and all its calls fail.
///
/// Its leases are taken after the current step.
pub fn fence_session(state: &mut NodeCore, id: SessionId, violation: &Violation) {
    let Some(session) = state.sessions.get_mut(&id) else { return };
    if session.fenced.is_some() {
        return;
    }
    let violation = if session.is_truncated() { &Violation::Truncated } else { violation };
    let (pid, uid, label) = (session.identity.process.pid, session.identity.uid, &session.identity.label);
    tracing::error!(session = id.0, pid, uid, %label, reason = %violation, "session fenced for a forged log");
    session.fenced = Some(violation.to_string());
    // A log that is damaged is fenced all the same.
    let _ = session.log.fence_session();
    session.control.set_fenced();
    session.account.granted = session.account.used;
    session.outstanding.clear();
    session.page.clear_delegated();
    session.noted_locks.clear();
    state.counters.sessions_fenced += 1;
    state.request_commit();
    state.effects.push(NodeEffect::WakeDigests);
    state.effects.push(NodeEffect::WakeLocks);
    state.leasing.drop_leases_later(id);
    state.reservations.end_session(id, &mut state.leasing, &state.store);
    state.locking.end_session(id);
}

/// Returns the end of the settled part of a session's log.
///
/// There, every slot is committed or void. A log that contradicts itself fences its session.
pub fn find_settled(state: &mut NodeCore, id: SessionId) -> Option<LogPosition> {
    let session = state.live(id)?;
    let _blame = Blame::for_records(session, state.store.applied(id));
    let reason = match session.log.settled() {
        Ok(_) if session.is_truncated() => "it is truncated".to_owned(),
        Ok(settled) if settled >= state.store.applied(id) => return Some(settled),
        Ok(_) => "it goes backwards".to_owned(),
        Err(damaged) => damaged.to_string(),
    };
    fence_session(state, id, &Violation::Log(reason));
    None
}

/// Seals a session's log, which is then to be applied up to there (`apply_sealed`).
///
/// A lease of the session moves only afterwards.
pub fn seal_log(state: &mut NodeCore, id: SessionId) {
    let Some(session) = state.live(id) else {
        state.sealed.push_back((id, LogPosition(0)));
        return;
    };
    let _blame = Blame::for_records(session, state.store.applied(id));
    let sealed = session.log.seal();
    state.counters.seals += 1;
    let end = match sealed {
        Ok((_, end)) => end,
        Err(damaged) => {
            fence_session(state, id, &Violation::Log(damaged.to_string()));
            LogPosition(0)
        }
    };
    state.sealed.push_back((id, end));
}
