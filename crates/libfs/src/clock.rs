//! The times of changes.
//!
//! The exact time costs as much as a fifth of a small write, the time of the system's last tick next to nothing. Two changes may have the
//! same time only if nobody has looked in between, and none may have an earlier time than one that its writer could know of. So a
//! write into a file has the time of the tick, unless somebody may have looked at the file since its last change; and never less than the
//! latest time that this process has given or was told. Linux's own file systems do so since 6.13.

use std::sync::atomic::{AtomicU64, Ordering};

use ashlar_types::Timestamp;
use rustix::time::{ClockId, clock_gettime};

use crate::LibFs;
use crate::alone;

const SECOND_NS: u64 = 1_000_000_000;
/// No tick is longer; a time that is further ahead is from before the clock was set back.
const TICK_NS: u64 = SECOND_NS / 100;

/// The latest exact time that was given or told, in nanoseconds.
static LATEST: AtomicU64 = AtomicU64::new(0);

fn of(clock: ClockId) -> Timestamp {
    let now = clock_gettime(clock);
    Timestamp { seconds: now.tv_sec, nanoseconds: now.tv_nsec as u32 }
}

fn nanoseconds(time: Timestamp) -> u64 {
    u64::try_from(time.seconds).unwrap_or(0).saturating_mul(SECOND_NS).saturating_add(time.nanoseconds.into())
}

/// Notes a time behind which none may stay that comes later.
pub(crate) fn note(time: Timestamp) {
    let time = nanoseconds(time);
    if LATEST.load(Ordering::Relaxed) >= time {
        return;
    }
    if alone::is_alone() {
        LATEST.store(time, Ordering::Relaxed);
    } else {
        LATEST.fetch_max(time, Ordering::Relaxed);
    }
}

/// The tick's time, or the latest one, if that is less than a tick ahead.
fn not_before(tick: Timestamp, latest: u64) -> Timestamp {
    match latest.checked_sub(nanoseconds(tick)) {
        Some(ahead) if ahead > 0 && ahead <= TICK_NS => {
            Timestamp { seconds: (latest / SECOND_NS) as i64, nanoseconds: (latest % SECOND_NS) as u32 }
        }
        _ => tick,
    }
}

impl LibFs {
    /// The time at which an operation runs.
    pub(crate) fn now() -> Timestamp {
        let now = of(ClockId::Realtime);
        note(now);
        now
    }

    /// The time of the system's last tick, a few milliseconds old at the most: where that is good enough, it costs a fraction.
    #[inline]
    pub(crate) fn about_now() -> Timestamp {
        of(ClockId::RealtimeCoarse)
    }

    /// The time of a change of what nobody has looked at since its last one.
    #[inline]
    pub(crate) fn now_unseen() -> Timestamp {
        not_before(Self::about_now(), LATEST.load(Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tick_is_never_behind_what_was_given_before_it() {
        let tick = Timestamp { seconds: 7, nanoseconds: 996_000_000 };
        let after = |ns: u64| not_before(tick, 7_996_000_000 + ns);
        assert_eq!(not_before(tick, 0), tick);
        assert_eq!(after(0), tick);
        assert_eq!(after(3_999_999), Timestamp { seconds: 7, nanoseconds: 999_999_999 });
        assert_eq!(after(4_000_001), Timestamp { seconds: 8, nanoseconds: 1 });
        assert_eq!(after(TICK_NS + 1), tick, "the clock was set back");
        for _ in 0..1000 {
            let exact = LibFs::now();
            assert!(LibFs::now_unseen() >= exact);
        }
    }
}
