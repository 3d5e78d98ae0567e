//! Locks and counts that cost next to nothing in a single-threaded process.
//!
//! An atomic exchange takes as long as a third of a small write's other work. An operation takes several locks. In a
//! single-threaded process no other thread can hold a lock. `ashlar-preload` sees the calls that start threads: it
//! declares the process single-threaded, and withdraws that before the second thread runs. Meanwhile a lock is a plain
//! word beside the real lock. A thread that unlocks finds out which of the two it holds. So the declaration may change
//! while a lock is held.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

static IS_SINGLE_THREADED: AtomicBool = AtomicBool::new(false);

/// Declares the process single-threaded.
///
/// # Safety
/// The process has one thread, and no signal handler that re-enters LibFS interrupts LibFS. Before another thread
/// starts, the only thread calls [`end_single_threaded`], outside of LibFS.
pub unsafe fn begin_single_threaded() {
    IS_SINGLE_THREADED.store(true, Ordering::Relaxed);
}

/// Withdraws the declaration: from now on there may be other threads.
pub fn end_single_threaded() {
    IS_SINGLE_THREADED.store(false, Ordering::Relaxed);
}

/// Returns whether the process is declared single-threaded.
#[must_use]
#[inline]
pub fn is_single_threaded() -> bool {
    IS_SINGLE_THREADED.load(Ordering::Relaxed)
}

/// Adds to a word that only threads of this process change; returns its old value.
#[inline]
pub fn add(word: &AtomicU32, amount: u32, order: Ordering) -> u32 {
    if !is_single_threaded() {
        return word.fetch_add(amount, order);
    }
    let before = word.load(Ordering::Relaxed);
    word.store(before.wrapping_add(amount), Ordering::Relaxed);
    before
}

/// Exchanges a word that only threads of this process change, if it has the value `current`.
///
/// # Errors
/// The word's value, if it is another one.
#[inline]
pub fn exchange(word: &AtomicU32, current: u32, new: u32) -> Result<u32, u32> {
    if !is_single_threaded() {
        return word.compare_exchange(current, new, Ordering::AcqRel, Ordering::Acquire);
    }
    let before = word.load(Ordering::Relaxed);
    if before != current {
        return Err(before);
    }
    word.store(new, Ordering::Relaxed);
    Ok(before)
}

/// Replaces the value of a word that only threads of this process change; returns its old value.
#[inline]
pub fn swap(word: &AtomicU32, new: u32) -> u32 {
    if !is_single_threaded() {
        return word.swap(new, Ordering::SeqCst);
    }
    let before = word.load(Ordering::Relaxed);
    word.store(new, Ordering::Relaxed);
    before
}

/// In the plain word: a writer holds the lock. Lower numbers count the readers.
const WRITER: u32 = u32::MAX;

/// A reader-writer lock: a plain word while the process is single-threaded, else a real lock.
pub struct RawRwLock {
    plain: AtomicU32,
    shared: rustix_futex_sync::RawRwLock,
}

impl RawRwLock {
    /// Tries to take the plain word. `None` if the process isn't single-threaded.
    #[inline]
    fn try_plain(&self, write: bool) -> Option<bool> {
        if !is_single_threaded() {
            return None;
        }
        let held = self.plain.load(Ordering::Relaxed);
        let is_free = if write { held == 0 } else { held < WRITER - 1 };
        if is_free {
            self.plain.store(if write { WRITER } else { held + 1 }, Ordering::Relaxed);
        }
        Some(is_free)
    }
}

/// Panics when a single thread waits for itself: a defect, which fails this call and spares the program.
#[cold]
fn panic_self_deadlock() -> ! {
    panic!("a lock of LibFS is held by the thread that asks for it")
}

// SAFETY: while there is one thread, the plain word says how the lock is held. Unlocking reads it before the shared
// lock. No thread holds the plain word when a second thread starts ([`begin_single_threaded`]). From then on the shared
// lock excludes.
unsafe impl lock_api::RawRwLock for RawRwLock {
    #[allow(clippy::declare_interior_mutable_const, reason = "the initial value of each lock")]
    const INIT: Self = Self { plain: AtomicU32::new(0), shared: rustix_futex_sync::RawRwLock::INIT };
    type GuardMarker = <rustix_futex_sync::RawRwLock as lock_api::RawRwLock>::GuardMarker;

    #[inline]
    fn lock_shared(&self) {
        match self.try_plain(false) {
            Some(true) => {}
            Some(false) => panic_self_deadlock(),
            None => self.shared.lock_shared(),
        }
    }

    #[inline]
    fn try_lock_shared(&self) -> bool {
        self.try_plain(false).unwrap_or_else(|| self.shared.try_lock_shared())
    }

    #[inline]
    unsafe fn unlock_shared(&self) {
        let held = self.plain.load(Ordering::Relaxed);
        if held != 0 {
            self.plain.store(held - 1, Ordering::Relaxed);
        } else {
            // SAFETY: the caller holds the lock, and not by the plain word.
            unsafe { self.shared.unlock_shared() };
        }
    }

    #[inline]
    fn lock_exclusive(&self) {
        match self.try_plain(true) {
            Some(true) => {}
            Some(false) => panic_self_deadlock(),
            None => self.shared.lock_exclusive(),
        }
    }

    #[inline]
    fn try_lock_exclusive(&self) -> bool {
        self.try_plain(true).unwrap_or_else(|| self.shared.try_lock_exclusive())
    }

    #[inline]
    unsafe fn unlock_exclusive(&self) {
        if self.plain.load(Ordering::Relaxed) != 0 {
            self.plain.store(0, Ordering::Relaxed);
        } else {
            // SAFETY: as above.
            unsafe { self.shared.unlock_exclusive() };
        }
    }
}

/// A mutual exclusion lock: a plain word while the process is single-threaded, else a real lock.
pub struct RawMutex {
    plain: AtomicU32,
    shared: rustix_futex_sync::RawMutex,
}

impl RawMutex {
    #[inline]
    fn try_plain(&self) -> Option<bool> {
        if !is_single_threaded() {
            return None;
        }
        let is_free = self.plain.load(Ordering::Relaxed) == 0;
        if is_free {
            self.plain.store(WRITER, Ordering::Relaxed);
        }
        Some(is_free)
    }
}

// SAFETY: as for [`RawRwLock`].
unsafe impl lock_api::RawMutex for RawMutex {
    #[allow(clippy::declare_interior_mutable_const, reason = "the initial value of each lock")]
    const INIT: Self = Self { plain: AtomicU32::new(0), shared: rustix_futex_sync::RawMutex::INIT };
    type GuardMarker = <rustix_futex_sync::RawMutex as lock_api::RawMutex>::GuardMarker;

    #[inline]
    fn lock(&self) {
        match self.try_plain() {
            Some(true) => {}
            Some(false) => panic_self_deadlock(),
            None => self.shared.lock(),
        }
    }

    #[inline]
    fn try_lock(&self) -> bool {
        self.try_plain().unwrap_or_else(|| self.shared.try_lock())
    }

    #[inline]
    unsafe fn unlock(&self) {
        if self.plain.load(Ordering::Relaxed) != 0 {
            self.plain.store(0, Ordering::Relaxed);
        } else {
            // SAFETY: the caller holds the lock, and not by the plain word.
            unsafe { self.shared.unlock() };
        }
    }
}

/// A value that one thread at a time may access.
pub type Mutex<T> = lock_api::Mutex<RawMutex, T>;
/// Gives the lock's holder access to the value.
pub type MutexGuard<'a, T> = lock_api::MutexGuard<'a, RawMutex, T>;
/// A value that many threads may read, or one may change.
pub(crate) type RwLock<T> = lock_api::RwLock<RawRwLock, T>;
pub(crate) type RwLockReadGuard<'a, T> = lock_api::RwLockReadGuard<'a, RawRwLock, T>;
pub(crate) type MappedRwLockReadGuard<'a, T> = lock_api::MappedRwLockReadGuard<'a, RawRwLock, T>;

#[cfg(test)]
mod tests {
    use lock_api::{RawMutex as _, RawRwLock as _};

    use super::*;

    #[test]
    fn lock_taken_by_one_word_is_unlocked_by_that_word() {
        let raw = RawRwLock::INIT;
        let mutex = RawMutex::INIT;
        // Sets the words directly: tests are threads, so the process is not single-threaded.
        let plain = |write: bool| {
            let held = raw.plain.load(Ordering::Relaxed);
            raw.plain.store(if write { WRITER } else { held + 1 }, Ordering::Relaxed);
        };
        plain(false);
        plain(false);
        // SAFETY: both were taken by the plain word.
        unsafe {
            raw.unlock_shared();
            assert_eq!(raw.plain.load(Ordering::Relaxed), 1);
            raw.unlock_shared();
        }
        plain(true);
        mutex.plain.store(WRITER, Ordering::Relaxed);
        // SAFETY: as above.
        unsafe {
            raw.unlock_exclusive();
            mutex.unlock();
        }
        // The shared locks follow.
        raw.lock_shared();
        assert!(!raw.try_lock_exclusive() && raw.try_lock_shared());
        // SAFETY: both are held.
        unsafe {
            raw.unlock_shared();
            raw.unlock_shared();
        }
        raw.lock_exclusive();
        mutex.lock();
        assert!(!raw.try_lock_shared() && !mutex.try_lock());
        // SAFETY: as above.
        unsafe {
            raw.unlock_exclusive();
            mutex.unlock();
        }
        assert!(raw.try_lock_exclusive() && mutex.try_lock());
        assert_eq!((raw.plain.into_inner(), mutex.plain.into_inner()), (0, 0));
    }

    #[test]
    fn plain_words_change_like_atomic_ones() {
        let word = AtomicU32::new(5);
        assert_eq!(add(&word, 3, Ordering::AcqRel), 5);
        assert_eq!(exchange(&word, 7, 9), Err(8));
        assert_eq!(exchange(&word, 8, 9), Ok(8));
        assert_eq!(swap(&word, 7), 9);
        assert_eq!(word.into_inner(), 7);
    }
}
