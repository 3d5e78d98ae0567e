//! A short busy wait before a thread sleeps.
//!
//! To send a thread to sleep and to wake it on another core takes an interrupt from core to core. That takes several
//! times as long as the work of most requests.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// How long a thread watches before it sleeps.
///
/// The time is longer than most requests take, and longer than a program takes before it asks again at once. It is no
/// longer than it takes to send a thread to sleep and to wake it.
const WATCH: Duration = Duration::from_micros(50);
/// After so many watches in vain, a thread watches less often.
const VAIN_MAX: u32 = 4;
/// After that, it watches only once in so many waits.
const TRIED_EVERY: u32 = 16;

/// Decides whether a waiting thread watches before it sleeps.
///
/// Watching pays only while the awaited event comes at once.
#[derive(Debug)]
pub struct BusyWait {
    /// Whether a second core exists, on which another thread may act meanwhile.
    is_possible: bool,
    vain: u32,
    /// The end of the current watch, if one is on.
    until: Option<Instant>,
}

static IS_POSSIBLE: OnceLock<bool> = OnceLock::new();

impl Default for BusyWait {
    fn default() -> Self {
        let has_cores = || rustix::thread::sched_getaffinity(None).is_ok_and(|cores| cores.count() > 1);
        Self { is_possible: *IS_POSSIBLE.get_or_init(has_cores), vain: 0, until: None }
    }
}

impl BusyWait {
    /// Disables watching if a quota limits the process to one core, though the machine has more.
    ///
    /// A server checks this once. The check reads some files, which takes too long for each program.
    pub fn respect_quota() {
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        // This is set before the first wait, or not at all.
        let _ = IS_POSSIBLE.set(cores > 1);
    }

    /// Makes a watch that never begins.
    #[must_use]
    pub const fn never() -> Self {
        Self { is_possible: false, vain: 0, until: None }
    }

    /// Begins a wait.
    ///
    /// A caller that knows how soon the event comes watches for that time, whatever earlier watches achieved.
    pub fn begin_wait(&mut self, known: Option<Duration>) {
        let is_tried = known.is_some() || self.vain < VAIN_MAX || self.vain % TRIED_EVERY == 0;
        self.until = (self.is_possible && is_tried).then(|| Instant::now() + known.unwrap_or(WATCH));
        if !is_tried {
            self.record_vain();
        }
    }

    fn record_vain(&mut self) {
        self.vain = self.vain.checked_add(1).unwrap_or(VAIN_MAX);
    }

    /// Returns whether to check again at once, after nothing has come yet.
    pub fn check_again(&mut self) -> bool {
        let may_go_on = self.until.is_some_and(|until| Instant::now() < until);
        if !may_go_on && self.until.take().is_some() {
            self.record_vain();
        }
        may_go_on
    }

    /// Ends a wait: the awaited event has come.
    pub fn end_wait(&mut self) {
        if self.until.take().is_some() {
            self.vain = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wait(watch: &mut BusyWait, comes_soon: bool) -> bool {
        watch.begin_wait(None);
        let watches = watch.until.is_some();
        if !comes_soon {
            watch.until = watch.until.and(Some(Instant::now()));
            assert!(!watch.check_again());
        }
        watch.end_wait();
        watches
    }

    #[test]
    fn vain_watches_become_rarer_until_one_pays() {
        let mut watch = BusyWait { is_possible: true, vain: 0, until: None };
        assert!((0..10).all(|_| wait(&mut watch, true)));
        assert!((0..VAIN_MAX).all(|_| wait(&mut watch, false)));
        let tried = (0..10 * TRIED_EVERY).filter(|_| wait(&mut watch, false)).count();
        assert!((9..=11).contains(&tried), "{tried}");
        while !wait(&mut watch, true) {}
        assert!((0..VAIN_MAX).all(|_| wait(&mut watch, false)), "it pays again");
        let mut sole = BusyWait { is_possible: false, ..BusyWait::default() };
        assert!(!wait(&mut sole, true));
        watch.begin_wait(Some(WATCH));
        assert!(watch.check_again(), "the caller knows the time");
        sole.begin_wait(Some(WATCH));
        assert!(!sole.check_again(), "there is no second core");
    }
}
