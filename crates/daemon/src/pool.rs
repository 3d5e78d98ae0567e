//! Prepares sessions before a process asks for one.
//!
//! Most of a session's beginning goes into files that are the same for all. A [`Blank`] has a number and all its files,
//! and no owner. Some are new, and for any process. The others are retired sessions ([`crate::ended`]); a process of
//! the same user takes those first. After a kill of SharedFS, a prepared session looks like one whose making was cut
//! short: files without an identity, which the next start removes ([`Session::take_up`]).
//!
//! SharedFS prepares sessions after the first process has asked for one; on a machine that uses mounts only, it
//! prepares none.
//!
//! [`Session::take_up`]: crate::session::Session::take_up

use std::collections::VecDeque;
use std::time::Duration;

use ashlar_types::Credentials;
use parking_lot::{Condvar, Mutex};

use crate::ended::{self, Ended};
use crate::session::{Blank, LogRoom};
use crate::sessions;
use crate::shared::Shared;

/// The most prepared sessions that are for any process.
///
/// Each takes as much room as a session's beginning, and a third of a millisecond to make. Programs that begin together
/// find one each, and a longer row of programs is not faster than that.
const BLANKS_MAX: usize = 4;
/// The most retired sessions that wait to be prepared, and the most prepared ones made of them.
///
/// That is as many programs as run at once on most machines.
const ENDED_MAX: usize = 8;
/// The most of these whose logs have more room than a new one: memory that a machine keeps for programs to come.
const LARGE_MAX: usize = 2;
/// How long these stay if nothing else happens.
const ENDED_KEPT: Duration = Duration::from_secs(60);

/// The prepared sessions and the retired ones.
#[derive(Default)]
pub struct Pool {
    blanks: Mutex<Blanks>,
    changed: Condvar,
}

#[derive(Default)]
struct Blanks {
    made: VecDeque<Blank>,
    /// Retired sessions that can be prepared.
    ended: Vec<Ended>,
    /// A session was asked for since the last one failed to be made.
    is_wanted: bool,
    is_ending: bool,
}

impl Pool {
    /// Takes a prepared session for a process, if there is one, and preferably one that only its user may take.
    pub fn take(&self, whom: &Credentials) -> Option<Blank> {
        let made = &mut self.blanks.lock().made;
        let is_first = |wanted: Option<&Credentials>| made.iter().position(|blank| blank.only_for.as_ref() == wanted);
        let index = is_first(Some(whom)).or_else(|| is_first(None))?;
        made.remove(index)
    }

    /// Asks for new ones in place of those that were taken.
    pub fn refill(&self) {
        self.blanks.lock().is_wanted = true;
        self.changed.notify_all();
    }

    /// Keeps a retired session to prepare another of it; returns it if there are enough.
    pub fn keep(&self, ended: Ended) -> Option<Ended> {
        let mut blanks = self.blanks.lock();
        let large = || blanks.ended.iter().filter(|ended| is_large(ended.log_room)).count();
        let is_full = blanks.ended.len() == ENDED_MAX || is_large(ended.log_room) && large() == LARGE_MAX;
        if blanks.is_ending || is_full {
            return Some(ended);
        }
        blanks.ended.push(ended);
        self.changed.notify_all();
        None
    }

    /// Removes all retired sessions, as their room is wanted; returns whether there were any.
    pub fn give_up_kept(&self, shared: &Shared) -> bool {
        let (made, ended) = {
            let mut blanks = self.blanks.lock();
            (blanks.take_used(), std::mem::take(&mut blanks.ended))
        };
        let were_any = !made.is_empty() || !ended.is_empty();
        made.iter().for_each(|blank| ended::remove(shared, blank.id));
        ended.iter().for_each(|ended| ended::remove(shared, ended.id));
        were_any
    }

    /// Stops the preparation.
    pub fn end(&self) {
        self.blanks.lock().is_ending = true;
        self.changed.notify_all();
    }

    /// Waits until there is something to do; returns `None` at the end.
    fn wait(&self) -> Option<Job> {
        let mut blanks = self.blanks.lock();
        loop {
            if blanks.is_ending {
                return None;
            }
            let for_all = blanks.made.iter().filter(|blank| blank.only_for.is_none()).count();
            let lacks = blanks.is_wanted && for_all < BLANKS_MAX;
            // If there is none, the process that begins next waits.
            if !(lacks && for_all < BLANKS_MAX / 2) {
                if let Some(ended) = blanks.ended.pop() {
                    return Some(Job::MakeOf(ended));
                }
            }
            if lacks {
                return Some(Job::Make);
            }
            if blanks.made.len() == for_all {
                self.changed.wait(&mut blanks);
            } else if self.changed.wait_for(&mut blanks, ENDED_KEPT).timed_out() {
                return Some(Job::Forget(blanks.take_used()));
            }
        }
    }

    /// Puts a session prepared of a retired one where it is taken first; returns one of those that exceeds their
    /// number.
    fn put_first(&self, blank: Blank) -> Option<Blank> {
        let made = &mut self.blanks.lock().made;
        made.push_front(blank);
        let nth =
            |most: usize, counts: &dyn Fn(&Blank) -> bool| (0..made.len()).filter(|&at| counts(&made[at])).nth(most);
        let is_large = |blank: &Blank| blank.only_for.is_some() && is_large(blank.log_room());
        let too_much = nth(LARGE_MAX, &is_large).or_else(|| nth(ENDED_MAX, &|blank| blank.only_for.is_some()))?;
        made.remove(too_much)
    }
}

impl Blanks {
    /// Takes the sessions that were prepared of retired ones.
    fn take_used(&mut self) -> Vec<Blank> {
        let (used, others) = std::mem::take(&mut self.made).into_iter().partition(|blank| blank.only_for.is_some());
        self.made = others;
        used.into()
    }
}

/// A task of the thread.
enum Job {
    Make,
    MakeOf(Ended),
    /// No process has taken these for a while.
    Forget(Vec<Blank>),
}

/// Returns whether a log has more room than a new one.
fn is_large(room: LogRoom) -> bool {
    room.allocated > sessions::LOG_BEGINNING
}

/// Runs the thread that prepares sessions, and removes those that no process has taken.
pub fn fill_thread(shared: &Shared) {
    let pool = &shared.pool;
    while let Some(job) = pool.wait() {
        match job {
            Job::Make => match sessions::blank(shared) {
                Ok(blank) => pool.blanks.lock().made.push_back(blank),
                Err(reason) => {
                    tracing::debug!(reason, "no session can be made in advance");
                    // The process that asks next receives the reason.
                    pool.blanks.lock().is_wanted = false;
                }
            },
            Job::MakeOf(ended) => {
                let too_much = ended.clean(shared).and_then(|blank| pool.put_first(blank));
                too_much.iter().for_each(|blank| ended::remove(shared, blank.id));
            }
            Job::Forget(made) => made.iter().for_each(|blank| ended::remove(shared, blank.id)),
        }
    }
    let made = std::mem::take(&mut pool.blanks.lock().made);
    made.iter().for_each(|blank| ended::remove(shared, blank.id));
    pool.give_up_kept(shared);
}
