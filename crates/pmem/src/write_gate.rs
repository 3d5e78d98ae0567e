//! A gate for the writes of a simulated process, which ends the process between two of them.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// No end of the process is planned.
const OPEN: u64 = u64::MAX;

/// Lets the writes of a simulated process through, up to its planned end.
///
/// At that write it panics, which leaves the call that writes. From then on it drops all writes: code that catches the
/// panic changes nothing any more.
#[derive(Debug)]
pub struct WriteGate {
    left: AtomicU64,
    lost: AtomicU64,
    is_closed: AtomicBool,
}

impl Default for WriteGate {
    fn default() -> Self {
        Self { left: AtomicU64::new(OPEN), lost: AtomicU64::new(OPEN), is_closed: AtomicBool::new(false) }
    }
}

impl WriteGate {
    /// Plans the end of the process after so many writes.
    pub fn plan_end(&self, writes: u64) {
        self.left.store(writes, Ordering::Relaxed);
    }

    /// Plans the loss of a write, so many writes before the end: memory that no machine has.
    pub fn plan_loss(&self, writes: u64) {
        self.lost.store(writes, Ordering::Relaxed);
    }

    /// Whether the process has ended.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::Relaxed)
    }

    /// Lets all writes through again: those of another process.
    pub fn open(&self) {
        self.left.store(OPEN, Ordering::Relaxed);
        self.lost.store(OPEN, Ordering::Relaxed);
        self.is_closed.store(false, Ordering::Relaxed);
    }

    /// Returns whether a write takes place.
    ///
    /// # Panics
    /// At the planned end.
    pub(crate) fn admits(&self) -> bool {
        if self.is_closed() {
            return false;
        }
        let left = self.left.load(Ordering::Relaxed);
        if left == OPEN {
            return true;
        }
        if left == 0 {
            self.is_closed.store(true, Ordering::Relaxed);
            panic!("the simulated process ends here");
        }
        self.left.store(left - 1, Ordering::Relaxed);
        left != self.lost.load(Ordering::Relaxed)
    }
}
