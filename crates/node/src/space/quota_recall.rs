//! Takes quota balances back, so that only real use counts.

use ashlar_journal::OwnAct;
use ashlar_types::{QuotaAmount, QuotaKey, QuotaLimits, SessionId};
use ashlar_wire::QuotaRequest;

use crate::journal::acts::journal_act;
use crate::node_core::NodeCore;
use crate::records::sealed_logs::seal_and_apply;
use crate::sessions::session::ServedSession;

/// Takes back all balances of a session.
///
/// It pays anew for later records, and its logged ones are applied.
pub fn invalidate_quota_balances(state: &mut NodeCore, id: SessionId, has_limits: bool) {
    let Some(session) = state.sessions.get_mut(&id).filter(|session| session.fenced.is_none()) else { return };
    session.raise_quota_version(has_limits);
    seal_and_apply(state, id);
    if let Some(session) = state.sessions.get_mut(&id) {
        session.outstanding.clear();
    }
}

/// Takes back the balances of all sessions that hold any of what is wanted.
pub fn take_back_balances(state: &mut NodeCore, wants: &[QuotaRequest]) {
    for id in state.live_ids() {
        let holds = |session: &ServedSession| {
            wants.iter().any(|want| session.outstanding.of(want.key) != QuotaAmount::default())
        };
        if state.live(id).is_some_and(holds) {
            let has_limits = state.store.has_quota_limits();
            invalidate_quota_balances(state, id, has_limits);
        }
    }
}

/// Sets or removes limits, after all logs were applied.
///
/// They hold from here on, for all sessions.
pub fn set_limits(state: &mut NodeCore, key: QuotaKey, limits: QuotaLimits) {
    let others = state.store.quotas().into_iter().any(|(other, _, limits)| other != key && !limits.is_none());
    for id in state.live_ids() {
        // Earlier records were not paid for under these limits, so they are applied before the limits hold.
        invalidate_quota_balances(state, id, others || !limits.is_none());
    }
    state.store.set_quota_limits(key, limits);
    journal_act(state, OwnAct::Limits { key, limits });
    state.commits.record_applied(state.now.since_boot);
}
