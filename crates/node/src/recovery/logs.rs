//! Recovery: applies what all sessions have logged, after a start.
//!
//! A kill at any point of it changes nothing: the next start begins again at the committed state.
//!
//! A record that no SharedFS has seen may be forged, and after a loss of power no lease tells. Numbers and credit stand
//! in the session's lease table, which LibFS makes last before its log. So a record that uses more ends its log. Logs
//! of ordinary users are applied behind those of the super-user and of mounts, but for what these depend on: a forged
//! record takes no name from those.
//!
//! Handles show the present, and logs an earlier time: an inode that lost its last name may have been open then, and
//! written to. So nothing that another session may have used is freed until all logs are applied.

use std::collections::BTreeMap;

use ashlar_store::{Store, StoreError};
use ashlar_types::{LogPosition, SessionId};

use crate::blame;
use crate::digest::commit::{AwaitCopy, commit_with};
use crate::digest::freed_blocks::{release_blocks, take_unreleased_blocks};
use crate::digest::orphans::free_orphans;
use crate::invariants::check_sessions;
use crate::journal::NodeJournal;
use crate::node_core::NodeCore;
use crate::records::apply::{Slice, apply_log};
use crate::records::logs::{cut_log, fence_session, find_settled};
use crate::records::validate::Violation;
use crate::recovery::state::{RecoveryPhase, UnmetDependency};
use crate::sessions::session_table::SessionTable;

/// Why logs can't be recovered.
#[derive(Debug)]
pub enum RecoveryFailure {
    /// SharedFS panicked at this session's log. The node is half changed, and must be given up.
    Panic(SessionId),
    /// The shared area failed.
    Store(StoreError),
}

impl From<StoreError> for RecoveryFailure {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}

/// Runs a step that reads one session's log.
///
/// # Errors
/// [`RecoveryFailure::Panic`] if it panics. The node may then be half changed.
fn guard_session<T>(id: SessionId, step: impl FnOnce() -> T) -> Result<T, RecoveryFailure> {
    blame::contain(step).map_err(|_| RecoveryFailure::Panic(id))
}

/// Applies what all sessions have logged, and commits it.
///
/// # Errors
/// [`RecoveryFailure`].
pub fn recover_logs(state: &mut NodeCore, await_copy: &mut AwaitCopy<'_>) -> Result<(), RecoveryFailure> {
    let mut bounds = Vec::new();
    for id in state.live_ids() {
        let end = guard_session(id, || seal_log(state, id))?;
        bounds.extend(end.map(|end| (id, applicable_end(&state.sessions, id, end))));
    }
    // First the records that were validated before, then the rest under the leases that stand: the leases describe the
    // state between the two.
    let validated: Vec<_> = bounds.iter().map(|&(id, end)| (id, validated_end(&mut state.sessions, id, end))).collect();
    apply_in_order(state, &validated, await_copy)?;
    let NodeCore { store, leasing, sessions, .. } = &mut *state;
    leasing.restore(store, sessions.all_live().filter(|session| session.is_whole));
    apply_in_order(state, &bounds, await_copy)?;
    while make_room(state, await_copy)? {
        apply_in_order(state, &bounds, await_copy)?;
    }
    cut_unmet(state, &bounds, await_copy)?;
    fence_barred(state);
    state.recovery.phase = RecoveryPhase::Running;
    commit_with(state, await_copy)?;
    check_sessions(state);
    Ok(())
}

/// Seals a session's log and returns the end of its records.
///
/// The seal voids records that are half done. A dead process has left them so, and a living one appends them again. The
/// living process checks its leases before that, as before all later appends. SharedFS may have been killed between
/// taking a lease and sealing the log. A process that had checked before that could still append.
fn seal_log(state: &mut NodeCore, id: SessionId) -> Option<LogPosition> {
    let has_journal = state.journal.is_some();
    let session = state.sessions.get_mut(&id).filter(|session| session.fenced.is_none())?;
    // An earlier SharedFS had promised room in its journal, or had none.
    let sealed = if has_journal {
        session.lower_limit()
    } else {
        session.log.set_limit(None);
        session.log.seal().map(|(_, end)| end)
    };
    state.counters.seals += 1;
    match sealed {
        // Whether the log is truncated, or goes backwards.
        Ok(end) => find_settled(state, id).map(|_| end),
        Err(damaged) => {
            fence_session(state, id, &Violation::Log(damaged.to_string()));
            None
        }
    }
}

/// Returns the end of the records that may be applied.
///
/// An earlier SharedFS has panicked at those behind it, or at a request of the session.
fn applicable_end(sessions: &SessionTable, id: SessionId, end: LogPosition) -> LogPosition {
    let barred = sessions.live(id).and_then(|session| session.page.barred());
    barred.map_or(end, |barred| barred.min(end))
}

/// Fences the sessions that made an earlier SharedFS panic.
fn fence_barred(state: &mut NodeCore) {
    for id in state.live_ids() {
        if state.live(id).is_some_and(|session| session.page.barred().is_some()) {
            fence_session(state, id, &Violation::Panicked);
        }
    }
}

/// Returns the position up to which a session's records were validated.
///
/// If SharedFS was killed while it took one of the session's leases, all present records were written before the
/// session could know. The ones not validated yet are applied under the leases that stand. Their inodes and moves
/// change these leases, but the leases do not decide on them.
fn validated_end(sessions: &mut SessionTable, id: SessionId, end: LogPosition) -> LogPosition {
    let Some(session) = sessions.get_mut(&id) else { return end };
    if session.page.is_revoking() {
        session.trusted = end;
    }
    session.validated = session.validated.min(end);
    session.validated
}

/// Applies logs up to their bounds, those of ordinary users last.
///
/// Each log is applied only as far as its dependencies are. `RecoveryState::unmet` then holds the conditions that are
/// missing.
fn apply_in_order(
    state: &mut NodeCore,
    bounds: &[(SessionId, LogPosition)],
    await_copy: &mut AwaitCopy<'_>,
) -> Result<(), RecoveryFailure> {
    // As much of each log as is applied now: at first all of the privileged ones, and what these depend on.
    let is_privileged = |id: &SessionId| state.sessions.get(id).is_some_and(|s| s.credentials.is_privileged());
    let mut enough: BTreeMap<SessionId, LogPosition> =
        bounds.iter().filter(|(id, _)| is_privileged(id)).copied().collect();
    loop {
        let before: Vec<_> = bounds.iter().map(|(id, _)| state.store.applied(*id)).collect();
        state.recovery.unmet.clear();
        for &(id, end) in bounds {
            if let Some(&enough) = enough.get(&id) {
                apply_through(state, id, (end, enough), await_copy)?;
            }
        }
        let mut is_more = bounds.iter().zip(before).any(|((id, _), before)| state.store.applied(*id) != before);
        for unmet in state.recovery.unmet.values() {
            if let UnmetDependency::Session(other, position) = *unmet {
                let enough = enough.entry(other).or_default();
                is_more |= position > *enough;
                *enough = position.max(*enough);
            }
        }
        if !is_more || state.recovery.unmet.is_empty() {
            if bounds.iter().all(|(id, end)| enough.get(id).is_some_and(|enough| enough >= end)) {
                return Ok(());
            }
            enough = bounds.iter().copied().collect();
        }
    }
}

/// Applies a log up to `end`, as far as it goes, or until `enough` of it is applied.
///
/// Whenever the journal is short of room, it commits what is applied.
fn apply_through(
    state: &mut NodeCore,
    id: SessionId,
    (end, enough): (LogPosition, LogPosition),
    await_copy: &mut AwaitCopy<'_>,
) -> Result<(), RecoveryFailure> {
    loop {
        if state.journal.as_ref().is_some_and(NodeJournal::is_short) {
            commit_with(state, await_copy)?;
        }
        let is_over = guard_session(id, || apply_log(state, id, end, Slice::BatchThrough(enough)))?;
        if is_over || state.store.applied(id) >= enough {
            return Ok(());
        }
    }
}

/// Makes room for logs that stopped for lack of it.
///
/// Nothing else lets them go on. It frees inodes that have no link and are open in no session, and commits what has
/// been freed. Returns whether there is more room now.
fn make_room(state: &mut NodeCore, await_copy: &mut AwaitCopy<'_>) -> Result<bool, StoreError> {
    if !state.recovery.unmet.values().any(|unmet| *unmet == UnmetDependency::Room) {
        return Ok(false);
    }
    let room = |store: &Store| (store.space().blocks_free, store.space().metadata_bytes_used);
    let (free, used) = room(&state.store);
    free_orphans(state);
    commit_with(state, await_copy)?;
    // Extents from before the start are void, so no session reads freed blocks by them.
    release_blocks(&mut state.store, &state.sessions);
    take_unreleased_blocks(&mut state.store, &state.sessions);
    let (free_now, used_now) = room(&state.store);
    Ok(free_now > free || used_now < used)
}

/// Gives up missing dependencies of logs.
///
/// It cuts the depending logs, unless the other log is at fault.
fn cut_unmet(
    state: &mut NodeCore,
    bounds: &[(SessionId, LogPosition)],
    await_copy: &mut AwaitCopy<'_>,
) -> Result<(), RecoveryFailure> {
    let unmet = std::mem::take(&mut state.recovery.unmet);
    for (id, unmet) in unmet {
        let UnmetDependency::Session(other, _) = unmet else { continue };
        let position = state.store.applied(id);
        let this_boot = state.live(id).is_some_and(|session| session.is_whole);
        if this_boot {
            state.counters.logs_cut += 1;
            // Memory has lost nothing: the other session has destroyed its own log, and this one must not suffer for
            // that.
            tracing::error!(session = id.0, other = other.0, %position, "a log that this one depends on is damaged");
            state.recovery.lost.insert(other);
        } else {
            tracing::warn!(session = id.0, other = other.0, %position, "the log is cut: its further records depend on lost updates");
            cut_log(state, id);
        }
    }
    let rest: Vec<_> =
        bounds.iter().copied().filter(|(id, _)| state.sessions.get(id).is_some_and(|s| !s.is_ending)).collect();
    if rest.iter().any(|&(id, end)| state.live(id).is_some() && state.store.applied(id) < end) {
        state.recovery.phase = RecoveryPhase::Salvaging;
        for (id, end) in rest {
            apply_through(state, id, (end, end), await_copy)?;
        }
        state.recovery.phase = RecoveryPhase::Recovering;
    }
    Ok(())
}
