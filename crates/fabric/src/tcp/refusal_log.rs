//! Lines of the log about refused peers: an attacker must not fill it.

use std::fmt::Display;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::reason_filter::ReasonFilter;

/// The shortest time between two lines.
const INTERVAL: Duration = Duration::from_secs(1);

/// Writes a line for each host and reason, and counts those that repeat it or come too fast.
#[derive(Default)]
pub(super) struct RefusalLog {
    state: Mutex<RefusalState>,
}

#[derive(Default)]
struct RefusalState {
    last: Option<Instant>,
    suppressed: u64,
    filter: ReasonFilter,
}

impl RefusalLog {
    /// Writes that something of a peer was refused.
    pub(super) fn warn(&self, address: &str, reason: &dyn Display) {
        let now = Instant::now();
        // The peer connects from another port each time.
        let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
        let suppressed = {
            let RefusalState { last, suppressed, filter } = &mut *self.state.lock();
            let is_soon = last.is_some_and(|last| now < last + INTERVAL);
            if is_soon || !filter.admit(&format!("{host} {reason}"), now) {
                *suppressed += 1;
                return;
            }
            *last = Some(now);
            std::mem::take(suppressed)
        };
        if suppressed == 0 {
            tracing::warn!("the peer at {address} is refused: {reason}");
        } else {
            tracing::warn!("the peer at {address} is refused: {reason} ({suppressed} more before it)");
        }
    }
}
