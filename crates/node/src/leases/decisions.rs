//! Performs the lease manager's decisions.

use ashlar_lease::{Command, RevokeReason, SlotWord};
use ashlar_types::{InodeId, LeaseScope, SessionId};

use crate::access::open_handles::note_opened;
use crate::effects::NodeEffect;
use crate::invariants::check_decision;
use crate::leases::grant_cache::GrantPublisher;
use crate::leases::invalidation::{begin_invalidation, queue_invalidation};
use crate::leases::leasing::Ancestors;
use crate::leases::states::store_answer;
use crate::node_core::NodeCore;
use crate::records::logs::seal_log;
use crate::records::sealed_logs::apply_sealed;

/// Performs the lease manager's commands, and applies one batch of the logs that they seal.
///
/// Returns whether they are performed as a whole. Nothing may rely on the leases before.
pub fn decide_batch(state: &mut NodeCore) -> bool {
    loop {
        if perform_commands(state) {
            state.effects.push(NodeEffect::WakeGrants);
        }
        match apply_sealed(state) {
            None => break,
            Some(true) => {}
            Some(false) => return false,
        }
    }
    for session in state.sessions.values() {
        if session.page.is_revoking() {
            session.page.set_revoking(false);
        }
    }
    check_decision(state);
    true
}

/// Performs all of the lease manager's commands, and applies all logs that they seal.
pub fn decide_all(state: &mut NodeCore) {
    while !decide_batch(state) {}
}

/// Performs the lease manager's commands until there is none; returns whether requests were answered.
fn perform_commands(state: &mut NodeCore) -> bool {
    let mut answered = false;
    loop {
        let now_us = state.now.since_boot_us();
        let NodeCore { leasing, store, sessions, .. } = state;
        let is_using = |id: SessionId| sessions.get(&id).is_some_and(|session| session.control.is_using());
        match leasing.manager.poll_command(now_us, &Ancestors(store), &is_using) {
            Some(Command::Grant { session, request, grants, dependencies }) => {
                answered = true;
                store_answer(state, session, request, &grants, dependencies);
            }
            Some(command) => perform_command(state, &command),
            None => match state.leasing.take_dropped() {
                Some(fenced) => {
                    state.store.release_all(fenced);
                    state.leasing.manager.handle_session_end(fenced);
                }
                None => return answered,
            },
        }
    }
}

/// Takes all leases of a session that is over.
pub fn end_leases(state: &mut NodeCore, id: SessionId) {
    state.leasing.manager.handle_session_end(id);
    decide_all(state);
}

fn perform_command(state: &mut NodeCore, command: &Command) {
    match command {
        Command::Revoke { word, reason: RevokeReason::Folded | RevokeReason::Ended } => take_word(state, word),
        Command::Revoke { word, .. } => take_word_and_notify(state, word, word.inode, word.scope),
        Command::Downgrade { word } => take_word(state, word),
        Command::Split { word, hole: Some(hole) } if !hole.keeps_read => {
            take_word_and_notify(state, word, hole.inode, hole.scope);
        }
        Command::Split { word, .. } => take_word(state, word),
        Command::Attach { word } => state.lease_tables().write_word(word),
        Command::SealAndApply { session } => seal_log(state, *session),
        Command::Grant { .. } | Command::Wait { .. } => {}
    }
}

/// Writes a word that takes something from its session.
///
/// From here until its log is applied, the log may hold records that are valid under the old word. A restart must know
/// that.
fn take_word(state: &mut NodeCore, word: &SlotWord) {
    if let Some(session) = state.sessions.get_mut(&word.session) {
        state.counters.leases_revoked += 1;
        session.leases_revoked += 1;
        session.page.set_revoking(true);
    }
    state.lease_tables().write_word(word);
    // No handle is opened under the lease from here on.
    let holder = state.grant_cache.as_ref().map(GrantPublisher::holder);
    note_opened(&state.store, &mut state.sessions, (word.session, holder), word.inode, word.scope);
}

/// Writes such a word also for a mount, and queues a notification of its kernel.
fn take_word_and_notify(state: &mut NodeCore, word: &SlotWord, inode: InodeId, scope: LeaseScope) {
    begin_invalidation(state.sessions.get(&word.session));
    take_word(state, word);
    let Some(session) = state.sessions.get(&word.session) else { return };
    if let Some(ticket) = queue_invalidation(&state.store, session, inode, scope) {
        state.counters.invalidations += 1;
        state.leasing.add_ticket(ticket);
    }
}
