//! Invariants that are checked at the boundary of calls.
//!
//! A broken invariant is a defect, whatever sessions do. So the process ends before the state is used any more, and the
//! next start recovers from the logs.

use ashlar_types::SessionId;

use crate::leases::leasing::Ancestors;
use crate::node_core::NodeCore;

/// The lease manager's own check follows once in so many decisions.
const SAMPLE: u32 = 1 << 14;
/// It takes time in proportion to the leases: with more than these, only the first decision after a start is checked.
const SAMPLED_LEASES_MAX: u64 = 4096;

/// Checks the leases after some of the lease manager's decisions, and after the first one of a start.
///
/// # Panics
/// If an invariant is broken.
pub fn check_decision(state: &mut NodeCore) {
    let is_first = state.decisions == 0;
    let is_sampled = state.decisions.is_multiple_of(SAMPLE) && count_leases(state) <= SAMPLED_LEASES_MAX;
    state.decisions = state.decisions.wrapping_add(1);
    if is_first || is_sampled {
        check_leases(state);
    }
}

fn count_leases(state: &NodeCore) -> u64 {
    state.leasing.manager.stats().entries
}

/// Checks all sessions, as after a commit.
///
/// # Panics
/// If an invariant is broken.
pub fn check_sessions(state: &mut NodeCore) {
    let ids: Vec<_> = state.sessions.keys().copied().collect();
    ids.into_iter().for_each(|id| check_session(state, id));
}

/// Checks a session, as after a call that concerns it.
///
/// # Panics
/// If an invariant is broken.
pub fn check_session(state: &mut NodeCore, id: SessionId) {
    let (applied, committed) = (state.store.applied(id), state.store.committed(id));
    let Some(session) = state.sessions.get_mut(&id) else { return };
    assert!(committed <= applied, "session {id}: {committed} is committed, and only {applied} applied");
    assert!(session.checked <= applied, "session {id}: {} was applied, and now only {applied}", session.checked);
    session.checked = applied;
    let (used, granted) = (session.account.used, session.account.granted);
    let is_paid = used.blocks <= granted.blocks && used.metadata_bytes <= granted.metadata_bytes;
    // After a loss of power, the page may be older than the log.
    assert!(is_paid || !session.is_whole, "session {id}: it used {used:?} of a credit of {granted:?}");
}

fn check_leases(state: &NodeCore) {
    if let Err(wrong) = state.leasing.manager.check(&Ancestors(&state.store)) {
        panic!("the leases are inconsistent: {wrong}");
    }
}
