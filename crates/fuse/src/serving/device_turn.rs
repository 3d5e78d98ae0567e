//! The turn to wait at the device: one thread has it, while the others stand by.
//!
//! The kernel wakes waiting threads in the order in which they came. So each request of a single client would go to the
//! thread that has slept longest, often on another core, with its buffers in no cache: a round trip then takes up to
//! three times as long. So a thread that has answered waits again, unless another one has taken the turn meanwhile.
//! Another thread joins in when it is called, because requests queue up or the one at work is held up.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use parking_lot::{Condvar, Mutex};

/// The turn, and the threads that stand by.
#[derive(Debug, Default)]
pub(crate) struct DeviceTurn {
    /// Whether a thread waits at the device.
    is_taken: AtomicBool,
    standing_by: AtomicUsize,
    bell: Mutex<Bell>,
    rung: Condvar,
}

#[derive(Debug, Default)]
struct Bell {
    /// How many of the threads that stand by are to come.
    wanted: usize,
    closed: bool,
}

impl DeviceTurn {
    /// Takes the turn. If another thread has it, stands by until it is called. Returns `false` when the mount is
    /// gone.
    pub(crate) fn take_turn(&self) -> bool {
        while self.is_taken.swap(true, Ordering::SeqCst) {
            if !self.stand_by() {
                return false;
            }
        }
        true
    }

    /// Gives the turn back: a request has come.
    pub(crate) fn give_back(&self) {
        self.is_taken.store(false, Ordering::SeqCst);
    }

    fn stand_by(&self) -> bool {
        let mut bell = self.bell.lock();
        self.standing_by.fetch_add(1, Ordering::SeqCst);
        while bell.wanted == 0 && !bell.closed {
            self.rung.wait(&mut bell);
        }
        self.standing_by.fetch_sub(1, Ordering::SeqCst);
        bell.wanted = bell.wanted.saturating_sub(1);
        !bell.closed
    }

    /// Makes one more thread come; returns `false` if none stands by.
    pub(crate) fn call_standby(&self) -> bool {
        if !self.has_standby() {
            return false;
        }
        let mut bell = self.bell.lock();
        if bell.wanted >= self.standing_by.load(Ordering::SeqCst) {
            return false;
        }
        bell.wanted += 1;
        drop(bell);
        self.rung.notify_one();
        true
    }

    /// Whether a thread waits at the device.
    pub(crate) fn is_taken(&self) -> bool {
        self.is_taken.load(Ordering::SeqCst)
    }

    /// Whether a thread stands by.
    pub(crate) fn has_standby(&self) -> bool {
        self.standing_by.load(Ordering::SeqCst) > 0
    }

    /// Returns how many threads are ready: the one that waits, and those that stand by.
    pub(crate) fn ready_count(&self) -> usize {
        self.standing_by.load(Ordering::SeqCst) + usize::from(self.is_taken())
    }

    /// Ends the waiting of all threads.
    pub(crate) fn close(&self) {
        self.bell.lock().closed = true;
        self.rung.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::thread;

    use super::*;

    fn wait_until(condition: impl Fn() -> bool) {
        while !condition() {
            thread::yield_now();
        }
    }

    #[test]
    fn one_thread_waits_and_standby_comes_when_called() {
        let turn = Arc::new(DeviceTurn::default());
        assert!(turn.take_turn());
        assert!(!turn.call_standby(), "no thread stands by");
        let second = thread::spawn({
            let turn = Arc::clone(&turn);
            move || turn.take_turn()
        });
        wait_until(|| turn.has_standby());
        assert_eq!(turn.ready_count(), 2);
        turn.give_back();
        assert!(!turn.is_taken(), "giving the turn back wakes no thread");
        assert!(turn.call_standby());
        assert!(second.join().unwrap());
        assert!(turn.is_taken());
        assert_eq!(turn.ready_count(), 1);
    }

    #[test]
    fn thread_called_too_late_stands_by_again() {
        let turn = Arc::new(DeviceTurn::default());
        assert!(turn.take_turn());
        let second = thread::spawn({
            let turn = Arc::clone(&turn);
            move || turn.take_turn()
        });
        wait_until(|| turn.has_standby());
        assert!(turn.call_standby());
        wait_until(|| turn.has_standby() && turn.bell.lock().wanted == 0);
        assert!(!second.is_finished(), "the turn is still taken");
        turn.close();
        assert!(!second.join().unwrap());
    }
}
