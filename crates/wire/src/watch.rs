//! Watching for what is to come before one sleeps: to send a thread to sleep and to wake it on another core takes an interrupt from core to core, which
//! is several times as long as the work of most requests.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// How long a thread watches before it sleeps: longer than a program takes that asks again at once, or than most requests do, and no longer than
/// it takes to send a thread to sleep and to wake it.
const WATCH: Duration = Duration::from_micros(50);
/// After so many watches in vain …
const VAIN_MAX: u32 = 4;
/// … only one in so many is tried.
const TRIED_EVERY: u32 = 16;

/// Whether a thread that waits watches before it sleeps. That pays only while what it waits for comes at once.
#[derive(Debug)]
pub struct Watch {
    /// There is a second core, on which somebody may act meanwhile.
    is_possible: bool,
    vain: u32,
    /// Until when, if it's on.
    until: Option<Instant>,
}

static IS_POSSIBLE: OnceLock<bool> = OnceLock::new();

impl Default for Watch {
    fn default() -> Self {
        let has_cores = || rustix::thread::sched_getaffinity(None).is_ok_and(|cores| cores.count() > 1);
        Self { is_possible: *IS_POSSIBLE.get_or_init(has_cores), vain: 0, until: None }
    }
}

impl Watch {
    /// Takes a process that may not use more than one core at a time, though there are more, for one that has no other: a server looks once. To ask takes
    /// some files, which is too long for each program.
    pub fn respect_quota() {
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        // Said before the first wait, or not at all.
        let _ = IS_POSSIBLE.set(cores > 1);
    }

    /// One that never watches.
    #[must_use]
    pub const fn never() -> Self {
        Self { is_possible: false, vain: 0, until: None }
    }

    /// A wait begins. Who knows that others come so soon watches for so long, whatever came of it before.
    pub fn begin(&mut self, known: Option<Duration>) {
        let is_tried = known.is_some() || self.vain < VAIN_MAX || self.vain % TRIED_EVERY == 0;
        self.until = (self.is_possible && is_tried).then(|| Instant::now() + known.unwrap_or(WATCH));
        if !is_tried {
            self.note_vain();
        }
    }

    fn note_vain(&mut self) {
        self.vain = self.vain.checked_add(1).unwrap_or(VAIN_MAX);
    }

    /// Nothing has come yet: whether to look again at once.
    pub fn goes_on(&mut self) -> bool {
        let goes_on = self.until.is_some_and(|until| Instant::now() < until);
        if !goes_on && self.until.take().is_some() {
            self.note_vain();
        }
        goes_on
    }

    /// What was waited for has come.
    pub fn end(&mut self) {
        if self.until.take().is_some() {
            self.vain = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wait(watch: &mut Watch, comes_soon: bool) -> bool {
        watch.begin(None);
        let watches = watch.until.is_some();
        if !comes_soon {
            watch.until = watch.until.and(Some(Instant::now()));
            assert!(!watch.goes_on());
        }
        watch.end();
        watches
    }

    #[test]
    fn who_watches_in_vain_watches_less_until_it_pays_again() {
        let mut watch = Watch { is_possible: true, vain: 0, until: None };
        assert!((0..10).all(|_| wait(&mut watch, true)));
        assert!((0..VAIN_MAX).all(|_| wait(&mut watch, false)));
        let tried = (0..10 * TRIED_EVERY).filter(|_| wait(&mut watch, false)).count();
        assert!((9..=11).contains(&tried), "{tried}");
        while !wait(&mut watch, true) {}
        assert!((0..VAIN_MAX).all(|_| wait(&mut watch, false)), "it pays again");
        let mut alone = Watch { is_possible: false, ..Watch::default() };
        assert!(!wait(&mut alone, true));
        watch.begin(Some(WATCH));
        assert!(watch.goes_on(), "it knows better");
        alone.begin(Some(WATCH));
        assert!(!alone.goes_on(), "there is nobody else");
    }
}
