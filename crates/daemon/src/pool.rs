//! Sessions that are made before anybody asks for one: most of what a beginning takes is files that are the same for all.
//!
//! A [`Blank`] has a number and all its files, and no owner. What is in the files was never anybody else's, or was made zero: the log may be
//! one that a session has left ([`crate::spare`]). When SharedFS is killed it is what
//! is left of a session whose making was cut: files without an identity, which the next start removes ([`Session::take_up`]).
//!
//! There are some from the first process on that asks; a machine on which all go through mounts has none. Those with a log that has memory
//! already, of a process of the same user, are taken first: who will write much is not known.
//!
//! [`Session::take_up`]: crate::session::Session::take_up

use std::collections::VecDeque;
use std::time::Duration;

use ashlar_types::Credentials;
use parking_lot::{Condvar, Mutex};

use crate::session::Blank;
use crate::sessions;
use crate::shared::Shared;
use crate::spare::{SPARES_MAX, Spare};

/// The most blanks at once that are for all. Each takes as much room as a session's beginning, and a third of a millisecond to make:
/// programs that begin together find one each, and a long row of them is not faster than that.
const BLANKS_MAX: usize = 4;
/// How long a blank that was made of a log that was there stays where nothing else happens: it has memory.
const SPARES_KEPT: Duration = Duration::from_secs(60);

/// Blanks.
#[derive(Default)]
pub struct Pool {
    blanks: Mutex<Blanks>,
    changed: Condvar,
}

#[derive(Default)]
struct Blanks {
    made: VecDeque<Blank>,
    /// Logs that blanks can be made of.
    spares: Vec<Spare>,
    /// One was asked for since they could last not be made.
    is_wanted: bool,
    is_ending: bool,
}

impl Pool {
    /// Takes a blank for somebody, if there is one: the oldest of those that are for all, as sessions begin nearly in the order of their numbers,
    /// by which those that were fenced longest ago are told.
    pub fn take(&self, whom: &Credentials) -> Option<Blank> {
        let made = &mut self.blanks.lock().made;
        let is_first = |wanted: Option<&Credentials>| made.iter().position(|blank| blank.only_for.as_ref() == wanted);
        let index = is_first(Some(whom)).or_else(|| is_first(None))?;
        made.remove(index)
    }

    /// Has others be made in place of those that were taken.
    pub fn refill(&self) {
        self.blanks.lock().is_wanted = true;
        self.changed.notify_all();
    }

    /// Whether one more log is worth keeping.
    pub fn has_room_for_spare(&self) -> bool {
        let blanks = self.blanks.lock();
        !blanks.is_ending && blanks.spares.len() < SPARES_MAX
    }

    /// Has a blank be made of such a log; it comes back where that is too late.
    pub fn keep(&self, spare: Spare) -> Option<Spare> {
        let mut blanks = self.blanks.lock();
        if blanks.is_ending {
            return Some(spare);
        }
        blanks.spares.push(spare);
        self.changed.notify_all();
        None
    }

    /// Removes the logs that are kept, and what was made of them: their memory is wanted. Whether there were any.
    pub fn give_up_spares(&self, shared: &Shared) -> bool {
        let (made, spares) = {
            let mut blanks = self.blanks.lock();
            (blanks.take_made_of_spares(), std::mem::take(&mut blanks.spares))
        };
        let were_any = !made.is_empty() || !spares.is_empty();
        made.iter().for_each(|blank| remove(shared, blank));
        spares.iter().for_each(|spare| spare.remove(shared));
        were_any
    }

    /// No more are made.
    pub fn end(&self) {
        self.blanks.lock().is_ending = true;
        self.changed.notify_all();
    }

    /// Waits until there is something to do; `None` at the end.
    fn wait(&self) -> Option<Job> {
        let mut blanks = self.blanks.lock();
        loop {
            if blanks.is_ending {
                return None;
            }
            let for_all = blanks.made.iter().filter(|blank| blank.only_for.is_none()).count();
            let lacks = blanks.is_wanted && for_all < BLANKS_MAX;
            // Whoever begins next waits if there is none.
            if !(lacks && for_all < BLANKS_MAX / 2) {
                if let Some(spare) = blanks.spares.pop() {
                    return Some(Job::MakeOf(spare));
                }
            }
            if lacks {
                return Some(Job::Make);
            }
            if blanks.made.len() == for_all {
                self.changed.wait(&mut blanks);
            } else if self.changed.wait_for(&mut blanks, SPARES_KEPT).timed_out() {
                return Some(Job::Forget(blanks.take_made_of_spares()));
            }
        }
    }

    /// Puts a blank that was made of a log where it is taken first, and returns one that is too much of those.
    fn put_first(&self, blank: Blank) -> Option<Blank> {
        let made = &mut self.blanks.lock().made;
        made.push_front(blank);
        let mut of_spares = (0..made.len()).filter(|&index| made[index].only_for.is_some());
        let oldest = of_spares.nth(SPARES_MAX)?;
        made.remove(oldest)
    }
}

impl Blanks {
    fn take_made_of_spares(&mut self) -> Vec<Blank> {
        let (of_spares, others) =
            std::mem::take(&mut self.made).into_iter().partition(|blank| blank.only_for.is_some());
        self.made = others;
        of_spares.into()
    }
}

/// What there is to do.
enum Job {
    Make,
    MakeOf(Spare),
    /// Nobody has taken these for a while.
    Forget(Vec<Blank>),
}

/// What can't be removed now goes at the next start.
fn remove(shared: &Shared, blank: &Blank) {
    let _ = shared.arena.remove_session(blank.id);
}

/// The thread that makes blanks, and removes those that nobody has taken.
pub fn fill_thread(shared: &Shared) {
    let pool = &shared.pool;
    while let Some(job) = pool.wait() {
        match job {
            Job::Make => match sessions::blank(shared, None) {
                Ok(blank) => pool.blanks.lock().made.push_back(blank),
                Err(reason) => {
                    tracing::debug!(reason, "no session can be made in advance");
                    // Whoever asks next hears why.
                    pool.blanks.lock().is_wanted = false;
                }
            },
            Job::MakeOf(spare) => {
                let Some(spare) = spare.clean(shared) else { continue };
                match sessions::blank(shared, Some(&spare)) {
                    Ok(blank) => pool.put_first(blank).iter().for_each(|blank| remove(shared, blank)),
                    Err(reason) => {
                        tracing::debug!(reason, "no session can be made of a log that is there");
                        spare.remove(shared);
                    }
                }
            }
            Job::Forget(made) => made.iter().for_each(|blank| remove(shared, blank)),
        }
    }
    let made = std::mem::take(&mut pool.blanks.lock().made);
    made.iter().for_each(|blank| remove(shared, blank));
    pool.give_up_spares(shared);
}
