//! How long each side of a link waits, and what it has heard and sent.

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

/// How long a side may be silent while a whole file system is copied: it may wait for a disk.
const COPY_SILENCE: Duration = Duration::from_secs(15);

/// An act that is due on a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PulseEvent {
    /// The peer has been silent for too long.
    Silent,
    /// This side has sent nothing for a while, and sends a beat.
    Beat,
}

/// When a side of a link has heard of its peer, and sent something, last.
#[derive(Clone, Copy, Debug)]
pub(super) struct LinkPulse {
    timing: ChainTiming,
    pub heard_at: Duration,
    pub sent_at: Duration,
    /// How long the peer may be silent.
    silence: Duration,
}

impl LinkPulse {
    /// Begins with a link.
    pub(super) const fn new(timing: ChainTiming, now: Duration) -> Self {
        Self { timing, heard_at: now, sent_at: now, silence: timing.silence }
    }

    /// Begins anew, with another link.
    pub(super) const fn restart(&mut self, now: Duration) {
        *self = Self::new(self.timing, now);
    }

    /// Lets the peer be silent for longer, on this link: it empties or fills a store.
    pub(super) const fn allow_silence(&mut self) {
        self.silence = COPY_SILENCE;
    }

    /// Returns what is due. A beat counts as sent.
    pub(super) fn poll(&mut self, now: Duration) -> Option<PulseEvent> {
        if now >= self.heard_at + self.silence {
            return Some(PulseEvent::Silent);
        }
        if now >= self.sent_at + self.timing.beat {
            self.sent_at = now;
            return Some(PulseEvent::Beat);
        }
        None
    }

    /// Returns when something is due.
    pub(super) fn deadline(&self) -> Duration {
        (self.sent_at + self.timing.beat).min(self.heard_at + self.silence)
    }
}
