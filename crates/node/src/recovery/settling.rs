//! Lets sessions whose processes live go on after a start, and ends the others.

use std::time::Duration;

use ashlar_types::{QuotaVersion, SessionId};
use ashlar_wire::SessionKind;

use crate::access::open_handles::note_handles_found;
use crate::access::open_rights::is_mount;
use crate::leases::decisions::{decide_all, end_leases};
use crate::node_core::NodeCore;
use crate::space::quota_recall::invalidate_quota_balances;

/// Decides session by session, after all logs are recovered.
///
/// The shell says of each session whether its process lives, and then finishes.
#[derive(Debug, Default)]
pub struct SessionSettling {
    running: Vec<SessionId>,
    ended: Vec<SessionId>,
    dead_mounts: Vec<u64>,
}

/// A session that goes on.
#[derive(Clone, Copy, Debug)]
pub struct RunningSession {
    /// Until when a mount's kernel may believe stale state, since boot; `None` for a process.
    ///
    /// The shell gives a mount its notifier at once.
    pub mount_stale_until: Option<Duration>,
}

/// The outcome for all sessions.
#[derive(Debug)]
pub struct SettledSessions {
    /// Sessions that end.
    pub ended: Vec<SessionId>,
    /// Device numbers of mounts whose processes are gone, and that no other session serves.
    pub dead_mounts: Vec<u64>,
}

impl SessionSettling {
    /// Decides whether a session goes on; returns `None` if it ends.
    ///
    /// A mount's kernel may believe its cache for `cache_ttl`.
    pub fn settle_session(
        &mut self,
        state: &mut NodeCore,
        id: SessionId,
        is_alive: bool,
        cache_ttl: Duration,
    ) -> Option<RunningSession> {
        let now = state.now.since_boot;
        let session = state.sessions.get_mut(&id)?;
        let kind = session.identity.kind;
        if is_alive && session.fenced.is_none() && !session.is_ending {
            let stale_until = Duration::from_millis(session.page.stale_until_ms()).min(now + cache_ttl);
            state.not_before = state.not_before.max(stale_until);
            if session.page.has_other_locks() {
                state.locking.expect_reclaim(id, now);
            }
            self.running.push(id);
            let mount_stale_until = (kind == SessionKind::Mount).then_some(stale_until);
            return Some(RunningSession { mount_stale_until });
        }
        self.ended.push(id);
        if !is_alive && kind == SessionKind::Mount {
            self.dead_mounts.push(session.mount_device);
        }
        session.is_ending = true;
        end_leases(state, id);
        state.store.release_all(id);
        None
    }

    /// Takes up locks, handles and quota balances of the sessions that go on, and performs all decisions.
    ///
    /// From then on, none of the leases from before the start stands.
    pub fn finish(mut self, state: &mut NodeCore) -> SettledSessions {
        self.dead_mounts.retain(|device| !is_mount(&state.sessions, *device));
        let NodeCore { store, locking, sessions, .. } = &mut *state;
        locking.take_up(&self.running, sessions);
        note_handles_found(store, sessions);
        take_back_found_balances(state);
        decide_all(state);
        SettledSessions { ended: self.ended, dead_mounts: self.dead_mounts }
    }
}

/// Takes back the quota balances that an earlier SharedFS granted.
///
/// They have been used, or are asked for again.
fn take_back_found_balances(state: &mut NodeCore) {
    let has_limits = state.store.has_quota_limits();
    for id in state.live_ids() {
        let has_balances = |version: QuotaVersion| has_limits || version.has_limits();
        if state.live(id).is_some_and(|session| !session.is_ending && has_balances(session.quota_version)) {
            invalidate_quota_balances(state, id, has_limits);
        }
        if let Some(session) = state.sessions.get_mut(&id) {
            session.is_quota_validated = true;
        }
    }
}
