//! The beginning of a session, and its return after a restart of SharedFS.

use std::sync::Arc;

use ashlar_types::{Errno, InodeId, LogPosition};
use ashlar_wire::{CreditKind, Peer, SessionKind};

use crate::journal::NodeJournal;
use crate::journal::acts::{journal_inodes, journal_session};
use crate::journal::log_limits::raise_limit;
use crate::node_core::NodeCore;
use crate::pending::FIRST_RANGE;
use crate::sessions::admission::{Refused, admit_to_reserved, admit_user, check_room, find_session, user_of};
use crate::sessions::identity::SessionIdentity;
use crate::sessions::session::{Control, ServedSession};
use crate::space::credit;

/// A session that has just begun.
pub struct BegunSession {
    /// The first inode number that it may use at once, and how many there are.
    pub inodes: (InodeId, u64),
    /// Sole mounts that have become shared, each with the number of the change that its kernel must follow.
    pub disturbed: Vec<(Arc<Control>, u64)>,
}

/// Begins a session whose memory has an owner.
///
/// `yields_to_kernel` says whether the kernel serves its process what SharedFS refuses.
///
/// # Errors
/// [`Refused`] if its user may have no more sessions, or if the journal is full. Then nothing has changed.
pub fn begin_session(
    state: &mut NodeCore,
    mut session: ServedSession,
    yields_to_kernel: bool,
) -> Result<BegunSession, Refused> {
    check_room(state.sessions.values().map(user_of), session.identity.uid)?;
    if state.journal.as_ref().is_some_and(NodeJournal::is_nearly_full) {
        return Err(Refused::Because("the journal is full; the replica is away or slow".into()));
    }
    let id = session.id;
    if state.store.has_quota_limits() {
        session.raise_quota_version(true);
    }
    // A retired session's row stays for the next one.
    if !state.store.has_session(id) {
        state.store.set_session(id, session.log.generation(), LogPosition(0));
    }
    journal_session(state, &session);
    state.counters.sessions_opened += 1;
    let inodes = begin_with_means(state, &mut session);
    admit_user(state, &session.credentials);
    (session.yields_to_kernel, session.ways_from) = (yields_to_kernel, state.ways.version());
    if state.sessions.is_empty() {
        // There was nothing to check before.
        state.request_digest();
    }
    state.leasing.take_up(&session);
    admit_to_reserved(state, id, yields_to_kernel);
    let tail = session.log.tail();
    if state.journal.is_some() {
        session.limit_appends(tail);
    }
    state.sessions.insert(id, ServedSession { is_connected: true, ..session });
    raise_limit(state, id, tail);
    Ok(BegunSession { inodes, disturbed: state.publish_sharing() })
}

/// Gives a process's session inode numbers and credit at once.
///
/// Nearly every session that makes or writes anything asks for them. If there are none, the session asks, and receives
/// the error.
fn begin_with_means(state: &mut NodeCore, session: &mut ServedSession) -> (InodeId, u64) {
    let none = (InodeId(0), 0);
    if session.identity.kind == SessionKind::Mount {
        return none;
    }
    session.grant_credit(credit::initial_credit(&state.store, &state.sessions), CreditKind::Common);
    let Ok(range) = state.store.allocate_inodes(FIRST_RANGE) else { return none };
    let first = InodeId(range.start);
    journal_inodes(state, session.id, first, FIRST_RANGE);
    session.ranges.add(&session.page, first, FIRST_RANGE);
    (first, FIRST_RANGE)
}

/// Resumes the session that a connection proves to belong to.
///
/// # Errors
/// `ESTALE` if there is none; `EIO` if it is fenced or another process's.
pub fn resume_session(
    state: &mut NodeCore,
    peer: Peer,
    identity: &SessionIdentity,
    yields_to_kernel: bool,
) -> Result<(), Errno> {
    let session = find_session(&state.sessions, peer).ok_or(Errno::ESTALE)?;
    if session.fenced.is_some() || session.identity.process != identity.process {
        return Err(Errno::EIO);
    }
    let user = session.credentials.clone();
    admit_user(state, &user);
    if let Some(session) = state.sessions.get_mut(&peer.session) {
        session.yields_to_kernel = yields_to_kernel;
    }
    state.counters.sessions_resumed += 1;
    admit_to_reserved(state, peer.session, yields_to_kernel);
    if identity.credentials().is_privileged() {
        state.locking.record_reclaim(state.now.since_boot);
    }
    Ok(())
}
