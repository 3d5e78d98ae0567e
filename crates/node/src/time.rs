//! The time that a node knows: its shell reports it with each event.

use std::time::Duration;

use ashlar_types::Timestamp;

/// The machine's clocks, read by the shell.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct NodeTime {
    /// The time since the machine's start.
    ///
    /// It runs through suspension, is the same for all processes, and never goes backwards.
    pub since_boot: Duration,
    /// The time of day.
    pub wall: Timestamp,
}

impl NodeTime {
    /// Returns the microseconds since the machine's start.
    #[must_use]
    pub fn since_boot_us(&self) -> u64 {
        self.since_boot.as_micros() as u64
    }
}
