//! Performs the lease manager's decisions.

use std::io;
use std::time::Duration;

use ashlar_lease::{Command, RevokeReason, SlotWord};
use ashlar_types::{InodeId, LeaseScope, SessionId};
use ashlar_wire::LeaseWord;

use crate::effects::NodeEffect;
use crate::leases::invalidation;
use crate::leases::leasing::Ancestors;
use crate::leases::states::store_answer;
use crate::node::Node;

/// How long a request that must wait pauses before it checks again.
const PAUSE_MIN: Duration = Duration::from_micros(20);
const PAUSE_MAX: Duration = Duration::from_millis(10);
/// The same while it waits for a session to use its fresh grant.
///
/// That rarely takes longer.
const PAUSE_IN_USE: Duration = Duration::from_micros(50);

impl Node {
    /// Performs the lease manager's commands, and applies one batch of the logs that they seal.
    ///
    /// Returns whether there is none left. Otherwise it must be called again before anything else relies on the leases.
    pub fn decide_some(&mut self) -> bool {
        loop {
            if perform_commands(self) {
                self.effects.push(NodeEffect::WakeGrants);
            }
            match self.apply_sealed() {
                None => break,
                Some(true) => {}
                Some(false) => return false,
            }
        }
        for session in self.sessions.values() {
            if session.page.is_revoking() {
                session.page.set_revoking(false);
            }
        }
        true
    }

    /// Performs all of the lease manager's commands, and applies all logs that they seal.
    pub fn decide_all(&mut self) {
        while !self.decide_some() {}
    }

    /// Returns when a request that waits for a grant must be advanced at the latest.
    #[must_use]
    pub fn next_decision(&self) -> Duration {
        let pause = |until: u64| {
            Duration::from_micros(until.saturating_sub(self.now.since_boot_us())).clamp(PAUSE_MIN, PAUSE_IN_USE)
        };
        self.now.since_boot + self.leasing.manager.next_time_us().map_or(PAUSE_MAX, pause)
    }
}

/// Performs the lease manager's commands until there is none; returns whether requests were answered.
fn perform_commands(state: &mut Node) -> bool {
    let mut answered = false;
    loop {
        let now_us = state.now.since_boot_us();
        let Node { leasing, store, sessions, .. } = state;
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
pub fn end_leases(state: &mut Node, id: SessionId) {
    state.leasing.manager.handle_session_end(id);
    state.decide_all();
}

fn perform_command(state: &mut Node, command: &Command) {
    match command {
        Command::Revoke { word, reason: RevokeReason::Folded | RevokeReason::Ended } => take_word(state, word),
        Command::Revoke { word, .. } => take_word_and_notify(state, word, word.inode, word.scope),
        Command::Downgrade { word } => take_word(state, word),
        Command::Split { word, hole: Some(hole) } if !hole.keeps_read => {
            take_word_and_notify(state, word, hole.inode, hole.scope);
        }
        Command::Split { word, .. } => take_word(state, word),
        Command::Attach { word } => write_word(state, word),
        Command::SealAndApply { session } => state.seal(*session),
        Command::Grant { .. } | Command::Wait { .. } => {}
    }
}

/// Writes a word that takes something from its session.
///
/// From here until its log is applied, the log may hold records that are valid under the old word. A restart must know
/// that.
fn take_word(state: &mut Node, word: &SlotWord) {
    if let Some(session) = state.sessions.get_mut(&word.session) {
        state.counters.leases_revoked += 1;
        session.leases_revoked += 1;
        session.page.set_revoking(true);
    }
    write_word(state, word);
    // No handle is opened under the lease from here on.
    state.note_opened(word.session, word.inode, word.scope);
}

/// Writes such a word also for a mount, and queues a notification of its kernel.
fn take_word_and_notify(state: &mut Node, word: &SlotWord, inode: InodeId, scope: LeaseScope) {
    invalidation::begin_invalidation(state, word.session);
    take_word(state, word);
    invalidation::queue_invalidation(state, word.session, inode, scope);
}

/// Writes down leases that sessions hold without having been sent them.
///
/// That must happen before SharedFS publishes the position up to which it has validated their records. After a restart
/// in between, SharedFS would otherwise validate later records by a table that lacks these leases.
pub fn write_attached(state: &mut Node) {
    loop {
        let words: Vec<_> = state.leasing.manager.take_attached().collect();
        if words.is_empty() {
            return;
        }
        // If a table grows for one word, further words have room in it.
        words.iter().for_each(|word| write_word(state, word));
    }
}

/// Returns the lease word for a slot word.
pub fn lease_word(word: &SlotWord) -> LeaseWord {
    match word.mode {
        None => LeaseWord::revoked(word.generation),
        Some(mode) => LeaseWord::new(word.generation, word.scope, mode.is_write()),
    }
}

/// Writes a lease word into the table of its session, or into the grant cache.
pub fn write_word(state: &mut Node, word: &SlotWord) {
    let is_recorded = word.slot != SlotWord::UNRECORDED;
    if is_recorded && state.leasing.manager.is_superseded(word) {
        return;
    }
    if let Some(session) = state.sessions.get_mut(&word.session) {
        if is_recorded {
            session.set_lease(word.slot, lease_word(word), word.inode);
        }
        // If there was no room a moment ago, the next request tries again.
        if !session.lacks_lease_room {
            let slot = if is_recorded { word.slot } else { session.lease_room };
            let _ = make_lease_room(state, word.session, slot);
        }
    } else if let Some(grant_cache) = state.grant_cache.as_ref().filter(|_| is_recorded) {
        grant_cache.write_word(word);
    }
}

/// Gives a session's lease table more room, if this slot is near its end.
///
/// # Errors
/// Those of [`ServedSession::make_lease_room`](crate::sessions::session::ServedSession::make_lease_room).
pub fn make_lease_room(state: &mut Node, id: SessionId, slot: u32) -> io::Result<()> {
    let Some(session) = state.sessions.get_mut(&id) else { return Ok(()) };
    let before = session.lease_room;
    let made = session.make_lease_room(slot);
    let after = session.lease_room;
    if after != before {
        state.leasing.manager.set_table_slots(id, after);
    }
    made
}
