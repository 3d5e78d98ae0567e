//! Sessions that are made before anybody asks for one: most of what a beginning takes is files that are the same for all.
//!
//! A [`Blank`] has a number and all its files, and no owner. What is in the files was never anybody else's. When SharedFS is killed it is what
//! is left of a session whose making was cut: files without an identity, which the next start removes ([`Session::take_up`]).
//!
//! There are some from the first process on that asks; a machine on which all go through mounts has none.
//!
//! [`Session::take_up`]: crate::session::Session::take_up

use std::collections::VecDeque;

use parking_lot::{Condvar, Mutex};

use crate::session::Blank;
use crate::sessions;
use crate::shared::Shared;

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
    /// One was asked for since they could last not be made.
    is_wanted: bool,
    is_ending: bool,
}

impl Pool {
    /// Takes the oldest blank, if there is one: sessions begin nearly in the order of their numbers, by which those that were fenced longest ago
    /// are told.
    pub fn take(&self) -> Option<Blank> {
        self.blanks.lock().made.pop_front()
    }

    /// Has others be made in place of those that were taken.
    pub fn refill(&self) {
        self.blanks.lock().is_wanted = true;
        self.changed.notify_all();
    }

    /// No more are made.
    pub fn end(&self) {
        self.blanks.lock().is_ending = true;
        self.changed.notify_all();
    }

    /// Waits until one is to be made; `false` at the end.
    fn wait(&self) -> bool {
        let mut blanks = self.blanks.lock();
        let is_idle = |blanks: &Blanks| !blanks.is_wanted || blanks.made.len() >= BLANKS_MAX;
        while !blanks.is_ending && is_idle(&blanks) {
            self.changed.wait(&mut blanks);
        }
        !blanks.is_ending
    }
}

/// The thread that makes blanks, and removes those that nobody has taken.
pub fn fill_thread(shared: &Shared) {
    let pool = &shared.pool;
    while pool.wait() {
        match sessions::blank(shared) {
            Ok(blank) => pool.blanks.lock().made.push_back(blank),
            Err(reason) => {
                tracing::debug!(reason, "no session can be made in advance");
                // Whoever asks next hears why.
                pool.blanks.lock().is_wanted = false;
            }
        }
    }
    for blank in std::mem::take(&mut pool.blanks.lock().made) {
        // What can't be removed now goes at the next start.
        let _ = shared.arena.remove_session(blank.id);
    }
}
