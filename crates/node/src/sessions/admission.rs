//! Decides which users may have a session.

use ashlar_types::{Credentials, Errno, SessionId};
use ashlar_wire::{Admission, Peer, SessionKind};

use crate::access::open_rights::find_mount;
use crate::access::ways::Viewer;
use crate::node_core::NodeCore;
use crate::sessions::identity::SessionIdentity;
use crate::sessions::session::ServedSession;
use crate::sessions::session_table::SessionTable;

/// Returns whether a user that has `own` places may have one more.
///
/// It may have at most `own_max`. All users besides root leave `free` places.
pub fn has_room(own: usize, own_max: usize, free: usize) -> bool {
    own < own_max && free > 0 && own < (free / 2).max(1)
}

/// The most sessions at once: each has a log in the arena.
///
/// One ordinary user gets a part of them, and leaves half of what others left. All ordinary users together leave some
/// to root, as which mounts run: no user can keep others out.
const SESSIONS_MAX: usize = 256;
const SESSIONS_OF_USER_MAX: usize = 32;
/// How many ending sessions of a user do not count for that part.
///
/// They are removed with the next commit, and programs that follow one another end faster than batches are committed.
/// All of them count for the whole, so that there are never more logs.
const SESSIONS_OF_USER_ENDING: usize = 32;
const SESSIONS_OF_ROOT: usize = 64;

/// Why a session can't begin.
#[derive(Debug)]
pub enum Refused {
    /// A sentence for people.
    Because(String),
    /// An error number for programs.
    Errno(Errno),
}

/// Fails unless the user may have a session by a mount, or, with `beside` 0, by none.
///
/// `own_uid` is the user that runs SharedFS.
///
/// The session says by which mount it comes, and may name any. So a mount admits the users that it names, however they
/// come, and a read-only mount admits none.
pub fn check_admission(
    sessions: &SessionTable,
    without_mount: &Admission,
    identity: &SessionIdentity,
    beside: u64,
    own_uid: u32,
) -> Result<(), Refused> {
    let admission = match (identity.kind, beside) {
        (SessionKind::Mount, _) => return Ok(()),
        (SessionKind::Process, 0) => without_mount,
        (SessionKind::Process, device) => {
            // The kernel shows a mount without a server, and so knows nothing of it: open files could not be handed
            // over to the kernel.
            let mount = find_mount(sessions, device).ok_or_else(|| {
                Refused::Because("no process serves the mount any more; unmount it, and mount it again".into())
            })?;
            if mount.mount_terms.read_only {
                return Err(Refused::Errno(Errno::EROFS));
            }
            &mount.mount_terms.sessions
        }
    };
    if identity.uid == own_uid || admission.admits(&identity.credentials()) {
        Ok(())
    } else {
        Err(Refused::Errno(Errno::EPERM))
    }
}

/// Returns a session's user, and whether the session is ending.
pub fn user_of(session: &ServedSession) -> (u32, bool) {
    (session.identity.uid, session.is_ending)
}

/// Checks whether a user may have one more session.
///
/// `sessions` gives the user of each, and whether it's ending.
pub fn check_room(sessions: impl Iterator<Item = (u32, bool)>, user: u32) -> Result<(), Refused> {
    let (mut all, mut own, mut ending) = (0, 0, 0_usize);
    for (other, is_ending) in sessions {
        all += 1;
        own += usize::from(other == user && !is_ending);
        ending += usize::from(other == user && is_ending);
    }
    own += ending.saturating_sub(SESSIONS_OF_USER_ENDING);
    let most = if user == 0 { SESSIONS_MAX } else { SESSIONS_MAX - SESSIONS_OF_ROOT };
    if all >= most {
        return Err(Refused::Because(format!("there are {all} sessions already; end some of them")));
    }
    if user != 0 && !has_room(own, SESSIONS_OF_USER_MAX, most - all) {
        return Err(Refused::Because(format!("user {user} has {own} sessions already; end some of them")));
    }
    Ok(())
}

/// Admits a session to reserved inodes, if the kernel can't serve it instead.
pub fn admit_to_reserved(state: &mut NodeCore, id: SessionId, yields_to_kernel: bool) {
    if !yields_to_kernel {
        state.leasing.manager.admit_to_reserved(id);
    }
}

/// Registers the user of a session that is about to map the grant cache.
///
/// From now on, that holds only what this user may see, too.
pub fn admit_user(state: &mut NodeCore, user: &Credentials) {
    if user.is_privileged() {
        return;
    }
    let NodeCore { sessions, grant_cache, ways, .. } = state;
    let is_of_session = |known: &Viewer| {
        sessions.values().any(|session| matches!(known, Viewer::User(user) if *user == session.credentials))
    };
    ways.keep_viewers(|known| grant_cache.as_ref().is_some_and(|cache| cache.is_for(known)) || is_of_session(known));
    ways.add_user(user);
    if let Some(grant_cache) = grant_cache {
        grant_cache.admit(user);
    }
}

/// Records that a resumed session has repeated all that an earlier SharedFS knew.
pub fn record_return(state: &mut NodeCore, id: SessionId) {
    if let Some(session) = state.sessions.get_mut(&id) {
        session.is_connected = true;
    }
    state.locking.record_return(id, state.now.since_boot);
}

/// Returns the session to which a connection proves to belong.
pub fn find_session(sessions: &SessionTable, peer: Peer) -> Option<&ServedSession> {
    sessions.get(&peer.session).filter(|session| session.token == peer.token)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns how many sessions of a user find room beside others.
    fn fitting(user: u32, mut sessions: Vec<(u32, bool)>) -> usize {
        let before = sessions.len();
        while check_room(sessions.iter().copied(), user).is_ok() {
            sessions.push((user, false));
        }
        sessions.len() - before
    }

    #[test]
    fn user_cannot_take_sessions_of_others() {
        assert_eq!(fitting(7, Vec::new()), SESSIONS_OF_USER_MAX);
        assert_eq!(fitting(8, vec![(7, false); SESSIONS_OF_USER_MAX]), SESSIONS_OF_USER_MAX);
        let crowd: Vec<(u32, bool)> =
            (1..=1000).map(|user| (user, user % 2 == 0)).take(SESSIONS_MAX - SESSIONS_OF_ROOT).collect();
        assert_eq!(fitting(2000, crowd.clone()), 0);
        assert_eq!(fitting(0, crowd), SESSIONS_OF_ROOT);
        assert_eq!(fitting(0, Vec::new()), SESSIONS_MAX);
    }

    /// Six users once took all sessions of ordinary users.
    #[test]
    fn six_users_leave_sessions_to_the_next_ones() {
        let mut sessions = Vec::new();
        for user in 1..=6 {
            let more = fitting(user, sessions.clone());
            sessions.extend(vec![(user, false); more]);
        }
        assert!(fitting(7, sessions.clone()) >= 8);
        assert_eq!(fitting(0, sessions.clone()), SESSIONS_MAX - sessions.len());
    }

    /// Ending sessions do not use up their user's share.
    ///
    /// A user's thirty-third program in a moment was once refused, though none of the others ran any more.
    #[test]
    fn ending_sessions_leave_their_user_limited_room() {
        let ending = |count| vec![(7, true); count];
        assert_eq!(fitting(7, ending(SESSIONS_OF_USER_ENDING)), SESSIONS_OF_USER_MAX);
        assert_eq!(fitting(7, ending(SESSIONS_OF_USER_ENDING + 5)), SESSIONS_OF_USER_MAX - 5);
        assert_eq!(fitting(7, ending(SESSIONS_OF_USER_ENDING + SESSIONS_OF_USER_MAX)), 0);
        assert_eq!(fitting(8, ending(SESSIONS_OF_USER_ENDING + SESSIONS_OF_USER_MAX)), SESSIONS_OF_USER_MAX);
    }
}
