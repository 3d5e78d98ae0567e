//! Prepares sessions before a process asks for one.
//!
//! Most of a session's beginning goes into files that are the same for all. A [`PreparedSession`] has a number and all
//! its files, and no owner. Some are new, and for any process. The others are retired sessions ([`crate::retired`]); a
//! process of the same user takes those first. After a kill of SharedFS, a prepared session looks like one whose making
//! was cut short: files without an identity, which the next start removes ([`take_up_session`]).
//!
//! SharedFS prepares sessions after the first process has asked for one; on a machine that uses mounts only, it
//! prepares none.
//!
//! [`take_up_session`]: crate::session_files::take_up_session

use std::collections::VecDeque;
use std::time::Duration;

use ashlar_node::sessions::session::LogRoom;
use ashlar_types::{Credentials, SessionId};
use parking_lot::{Condvar, Mutex};

use crate::retired::RetiredSession;
use crate::session_files::PreparedSession;

/// Bytes of a process's log that have room in the arena when it begins.
pub const LOG_BEGINNING: u64 = 64 << 10;
/// The most prepared sessions that are for any process.
///
/// Each takes as much room as a session's beginning, and a third of a millisecond to make. Programs that begin together
/// find one each, and a longer row of programs is not faster than that.
const PREPARED_MAX: usize = 4;
/// The most retired sessions that wait, and the most prepared ones made of them.
///
/// That is as many programs as run at once on most machines.
const RETIRED_MAX: usize = 8;
/// The most of these whose logs have more room than a new one.
///
/// A machine keeps so much memory for programs to come.
const LARGE_MAX: usize = 2;
/// How long these stay if nothing else happens.
const RETIRED_KEPT: Duration = Duration::from_secs(60);

/// The prepared sessions and the retired ones.
#[derive(Default)]
pub struct SessionPool {
    sessions: Mutex<PreparedSessions>,
    changed: Condvar,
}

#[derive(Default)]
struct PreparedSessions {
    made: VecDeque<PreparedSession>,
    /// Retired sessions that can be prepared.
    retired: Vec<RetiredSession>,
    /// A session was asked for since the last one failed to be made.
    is_wanted: bool,
    is_ending: bool,
}

impl SessionPool {
    /// Takes a prepared session for a process, if there is one.
    ///
    /// It prefers one that only the process's user may take.
    pub fn take(&self, user: &Credentials) -> Option<PreparedSession> {
        let made = &mut self.sessions.lock().made;
        let is_first =
            |wanted: Option<&Credentials>| made.iter().position(|prepared| prepared.only_for.as_ref() == wanted);
        let index = is_first(Some(user)).or_else(|| is_first(None))?;
        made.remove(index)
    }

    /// Asks for new ones in place of those that were taken.
    pub fn refill(&self) {
        self.sessions.lock().is_wanted = true;
        self.changed.notify_all();
    }

    /// Keeps a retired session to prepare another of it.
    ///
    /// Returns it if there are enough.
    pub fn keep(&self, retired: RetiredSession) -> Option<RetiredSession> {
        let mut sessions = self.sessions.lock();
        let large = || sessions.retired.iter().filter(|retired| is_large(retired.log_room)).count();
        let is_full = sessions.retired.len() == RETIRED_MAX || is_large(retired.log_room) && large() == LARGE_MAX;
        if sessions.is_ending || is_full {
            return Some(retired);
        }
        sessions.retired.push(retired);
        self.changed.notify_all();
        None
    }

    /// Takes all retired sessions, prepared again or not; returns their numbers.
    ///
    /// Their room is wanted.
    pub fn take_kept(&self) -> Vec<SessionId> {
        let (made, retired) = {
            let mut sessions = self.sessions.lock();
            (sessions.take_reused(), std::mem::take(&mut sessions.retired))
        };
        made.iter().map(|prepared| prepared.id).chain(retired.iter().map(|retired| retired.id)).collect()
    }

    /// Stops the preparation.
    pub fn end(&self) {
        self.sessions.lock().is_ending = true;
        self.changed.notify_all();
    }

    /// Waits until there is something to do; returns `None` at the end.
    pub fn wait(&self) -> Option<PoolJob> {
        let mut sessions = self.sessions.lock();
        loop {
            if sessions.is_ending {
                return None;
            }
            let for_all = sessions.made.iter().filter(|prepared| prepared.only_for.is_none()).count();
            let lacks = sessions.is_wanted && for_all < PREPARED_MAX;
            // If there is none, the process that begins next waits.
            if !(lacks && for_all < PREPARED_MAX / 2) {
                if let Some(retired) = sessions.retired.pop() {
                    return Some(PoolJob::MakeOf(retired));
                }
            }
            if lacks {
                return Some(PoolJob::Make);
            }
            if sessions.made.len() == for_all {
                self.changed.wait(&mut sessions);
            } else if self.changed.wait_for(&mut sessions, RETIRED_KEPT).timed_out() {
                return Some(PoolJob::Forget(sessions.take_reused()));
            }
        }
    }

    /// Adds a new session, for any process.
    pub fn add_prepared(&self, prepared: PreparedSession) {
        self.sessions.lock().made.push_back(prepared);
    }

    /// Records that no session can be made. The process that asks next receives the reason.
    pub fn record_failure(&self) {
        self.sessions.lock().is_wanted = false;
    }

    /// Takes all prepared sessions.
    pub fn take_made(&self) -> VecDeque<PreparedSession> {
        std::mem::take(&mut self.sessions.lock().made)
    }

    /// Puts a reused session where it is taken first.
    ///
    /// Returns one of the reused ones that exceeds their number.
    pub fn put_first(&self, prepared: PreparedSession) -> Option<PreparedSession> {
        let made = &mut self.sessions.lock().made;
        made.push_front(prepared);
        let nth = |most: usize, counts: &dyn Fn(&PreparedSession) -> bool| {
            (0..made.len()).filter(|&at| counts(&made[at])).nth(most)
        };
        let is_large = |prepared: &PreparedSession| prepared.only_for.is_some() && is_large(prepared.log_room());
        let too_much =
            nth(LARGE_MAX, &is_large).or_else(|| nth(RETIRED_MAX, &|prepared| prepared.only_for.is_some()))?;
        made.remove(too_much)
    }
}

impl PreparedSessions {
    /// Takes the sessions that were prepared of retired ones.
    fn take_reused(&mut self) -> Vec<PreparedSession> {
        let (used, others) =
            std::mem::take(&mut self.made).into_iter().partition(|prepared| prepared.only_for.is_some());
        self.made = others;
        used.into()
    }
}

/// A task of the thread.
pub enum PoolJob {
    /// Make a new session.
    Make,
    /// Prepare this one again.
    MakeOf(RetiredSession),
    /// No process has taken these for a while.
    Forget(Vec<PreparedSession>),
}

/// Returns whether a log has more room than a new one.
fn is_large(room: LogRoom) -> bool {
    room.allocated > LOG_BEGINNING
}
