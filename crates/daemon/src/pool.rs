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

use ashlar_types::Credentials;
use parking_lot::{Condvar, Mutex};

use crate::session::Blank;
use crate::sessions;
use crate::shared::Shared;
use crate::spare::{SPARES_MAX, Spare};

/// The most blanks at once. Each takes as much room as a session's beginning, and a third of a millisecond to make:
/// programs that begin together find one each, and a long row of them is not faster than that.
const BLANKS_MAX: usize = 4;

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
        self.blanks.lock().spares.len() < SPARES_MAX
    }

    /// Has a blank be made of such a log.
    pub fn keep(&self, spare: Spare) {
        self.blanks.lock().spares.push(spare);
        self.changed.notify_all();
    }

    /// No more are made.
    pub fn end(&self) {
        self.blanks.lock().is_ending = true;
        self.changed.notify_all();
    }

    /// Waits until one is to be made, and says of which log, if of one that there is; `None` at the end.
    fn wait(&self) -> Option<Option<Spare>> {
        let mut blanks = self.blanks.lock();
        loop {
            if blanks.is_ending {
                return None;
            }
            let lacks = blanks.is_wanted && blanks.made.len() < BLANKS_MAX;
            // Whoever begins next waits if there is none at all.
            if !(lacks && blanks.made.is_empty()) {
                if let Some(spare) = blanks.spares.pop() {
                    return Some(Some(spare));
                }
            }
            if lacks {
                return Some(None);
            }
            self.changed.wait(&mut blanks);
        }
    }

    /// Puts a blank where it is taken first, and returns one that is too much: the oldest of those like it, or of all.
    fn put_first(&self, blank: Blank) -> Option<Blank> {
        let made = &mut self.blanks.lock().made;
        made.push_front(blank);
        let mut of_spares = (0..made.len()).filter(|&index| made[index].only_for.is_some());
        match of_spares.nth(SPARES_MAX) {
            Some(oldest) => made.remove(oldest),
            None if made.len() > BLANKS_MAX => made.pop_back(),
            None => None,
        }
    }
}

/// The thread that makes blanks, and removes those that nobody has taken.
pub fn fill_thread(shared: &Shared) {
    let pool = &shared.pool;
    // What can't be removed now goes at the next start.
    let remove = |blank: Blank| drop(shared.arena.remove_session(blank.id));
    while let Some(spare) = pool.wait() {
        let Some(spare) = spare else {
            match sessions::blank(shared) {
                Ok(blank) => pool.blanks.lock().made.push_back(blank),
                Err(reason) => {
                    tracing::debug!(reason, "no session can be made in advance");
                    // Whoever asks next hears why.
                    pool.blanks.lock().is_wanted = false;
                }
            }
            continue;
        };
        let Some(spare) = spare.clean(shared) else { continue };
        match sessions::blank_of(shared, &spare) {
            Ok(blank) => drop(pool.put_first(blank).map(remove)),
            Err(reason) => {
                tracing::debug!(reason, "no session can be made of a log that is there");
                spare.remove(shared);
            }
        }
    }
    let Blanks { made, spares, .. } = std::mem::take(&mut *pool.blanks.lock());
    made.into_iter().for_each(remove);
    spares.into_iter().for_each(|spare| spare.remove(shared));
}
