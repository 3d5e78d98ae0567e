//! How long each side of a link waits.

use std::time::Duration;

/// The times of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChainTiming {
    /// A side that has sent nothing for so long sends a beat.
    pub beat: Duration,
    /// A peer that has sent nothing for so long is away.
    pub silence: Duration,
    /// A replica that leaves frames without an acknowledgement for so long is away, at the writer's.
    pub stall: Duration,
}

impl Default for ChainTiming {
    /// With `min_replicas = 1` a writer goes on alone 500 ms after its replica was heard of last.
    fn default() -> Self {
        Self {
            beat: Duration::from_millis(100),
            silence: Duration::from_millis(500),
            stall: Duration::from_millis(500),
        }
    }
}
