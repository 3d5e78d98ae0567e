//! Timestamps: the exact time for changes, the time of the system's last tick where seconds are enough.

use ashlar_types::Timestamp;
use rustix::time::{ClockId, clock_gettime};

use crate::LibFs;

fn read_clock(clock: ClockId) -> Timestamp {
    let now = clock_gettime(clock);
    Timestamp { seconds: now.tv_sec, nanoseconds: now.tv_nsec as u32 }
}

impl LibFs {
    /// Returns the exact time, for an operation that runs now.
    pub(crate) fn now() -> Timestamp {
        read_clock(ClockId::Realtime)
    }

    /// Returns the time of the system's last tick, a few milliseconds old at most, for a fraction of the cost.
    #[inline]
    pub(crate) fn coarse_now() -> Timestamp {
        read_clock(ClockId::RealtimeCoarse)
    }
}
