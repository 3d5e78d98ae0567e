//! Timestamps of changes, from the coarse clock where that is enough.
//!
//! The exact time costs as much as a fifth of a small write; the time of the system's last tick costs next to nothing.
//! Two changes may have the same time only if no process has read the inode between them. No change may have an earlier
//! time than one that its writer could know of. So a write gets the tick's time only if two conditions hold. The file
//! was last changed in the same tick, and no process can have read it since. The write's time is never earlier than the
//! latest time that this process has used or received. Linux's own file systems do much the same since 6.13.

use std::sync::atomic::{AtomicU64, Ordering};

use ashlar_types::Timestamp;
use rustix::time::{ClockId, clock_gettime};

use crate::LibFs;
use crate::single_threaded;

const SECOND_NS: u64 = 1_000_000_000;
/// No tick is longer. A time further ahead dates from before the clock was set back.
const TICK_NS: u64 = SECOND_NS / 100;

/// The latest exact time that this process has used or received, in nanoseconds.
static LATEST: AtomicU64 = AtomicU64::new(0);

fn read_clock(clock: ClockId) -> Timestamp {
    let now = clock_gettime(clock);
    Timestamp { seconds: now.tv_sec, nanoseconds: now.tv_nsec as u32 }
}

fn nanoseconds(time: Timestamp) -> u64 {
    u64::try_from(time.seconds).unwrap_or(0).saturating_mul(SECOND_NS).saturating_add(time.nanoseconds.into())
}

/// Records a time that no later change of this process may precede.
pub(crate) fn record_time(time: Timestamp) {
    let time = nanoseconds(time);
    if LATEST.load(Ordering::Relaxed) >= time {
        return;
    }
    if single_threaded::is_single_threaded() {
        LATEST.store(time, Ordering::Relaxed);
    } else {
        LATEST.fetch_max(time, Ordering::Relaxed);
    }
}

/// Returns a timestamp from the coarse clock for a file that was last changed at `changed`.
///
/// It is the tick's time, or the latest time if that is less than a tick ahead. `None` if only the exact time will do.
/// Either the file's last change is longer ago, so that other processes may have changed files since. Or the latest
/// time is further ahead, since the tick is late or the clock was set back.
fn tick_not_before(tick: Timestamp, latest: u64, changed: Timestamp) -> Option<Timestamp> {
    let (tick_ns, changed_ns) = (nanoseconds(tick), nanoseconds(changed));
    if tick_ns.saturating_sub(changed_ns) > TICK_NS {
        return None;
    }
    let latest = latest.max(changed_ns);
    match latest.checked_sub(tick_ns) {
        Some(ahead) if ahead > TICK_NS => None,
        Some(ahead) if ahead > 0 => {
            Some(Timestamp { seconds: (latest / SECOND_NS) as i64, nanoseconds: (latest % SECOND_NS) as u32 })
        }
        _ => Some(tick),
    }
}

impl LibFs {
    /// Returns the exact time, for an operation that runs now.
    pub(crate) fn now() -> Timestamp {
        let now = read_clock(ClockId::Realtime);
        record_time(now);
        now
    }

    /// Returns the time of the system's last tick, a few milliseconds old at most, for a fraction of the cost.
    #[inline]
    pub(crate) fn coarse_now() -> Timestamp {
        read_clock(ClockId::RealtimeCoarse)
    }

    /// Returns the time for a change of a file that no process has read since its last change, at `changed`.
    #[inline]
    pub(crate) fn now_unseen(changed: Timestamp) -> Timestamp {
        tick_not_before(Self::coarse_now(), LATEST.load(Ordering::Relaxed), changed).unwrap_or_else(Self::now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn at(seconds: i64, nanoseconds: u32) -> Timestamp {
        Timestamp { seconds, nanoseconds }
    }

    #[test]
    fn tick_time_is_never_before_the_latest_time() {
        let tick = at(7, 996_000_000);
        let after = |ns: u64| tick_not_before(tick, 7_996_000_000 + ns, tick);
        assert_eq!(tick_not_before(tick, 0, tick), Some(tick));
        assert_eq!(after(0), Some(tick));
        assert_eq!(after(3_999_999), Some(at(7, 999_999_999)));
        assert_eq!(after(4_000_001), Some(at(8, 1)));
        assert_eq!(after(TICK_NS + 1), None, "the tick is late, or the clock was set back");
        assert_eq!(tick_not_before(tick, 0, at(8, 0)), Some(at(8, 0)), "the file's own last change counts");
        assert_eq!(tick_not_before(tick, 0, at(7, 985_999_999)), None, "others may have changed files since");
        for _ in 0..1000 {
            let exact = LibFs::now();
            assert!(LibFs::now_unseen(exact) >= exact);
        }
    }
}
