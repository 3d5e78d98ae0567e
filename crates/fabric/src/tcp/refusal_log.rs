//! Lines of the log about refused peers: an attacker must not fill it.

use std::fmt::Display;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// The shortest time between two lines.
const INTERVAL: Duration = Duration::from_secs(1);

/// Writes a line for each refused peer, and counts those that come too fast.
#[derive(Default)]
pub(super) struct RefusalLog {
    state: Mutex<(Option<Instant>, u64)>,
}

impl RefusalLog {
    /// Writes that something of a peer was refused.
    pub(super) fn warn(&self, address: &str, reason: &dyn Display) {
        let suppressed = {
            let (last, suppressed) = &mut *self.state.lock();
            if last.is_some_and(|last| last.elapsed() < INTERVAL) {
                *suppressed += 1;
                return;
            }
            *last = Some(Instant::now());
            std::mem::take(suppressed)
        };
        if suppressed == 0 {
            tracing::warn!("the peer at {address} is refused: {reason}");
        } else {
            tracing::warn!("the peer at {address} is refused: {reason} ({suppressed} more before it)");
        }
    }
}
