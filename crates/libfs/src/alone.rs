//! Locks that cost next to nothing in a process with one thread.
//!
//! An exchange takes the processor as long as a third of a small write's other work, and an operation takes several locks. Where a program
//! has one thread only, nobody can be in the way. Who knows that (`ashlar-preload` sees the calls that make threads) says so, and
//! says it no longer holds before the second thread runs. Meanwhile a lock is a plain word. It is kept beside the real one, so it
//! doesn't matter which of the two was in use when a lock was taken: who lets it go finds it in the one or the other.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

static IS_ALONE: AtomicBool = AtomicBool::new(false);

/// Says that the process has one thread only.
///
/// # Safety
/// It has, and nothing that LibFS does is interrupted by a handler of a signal that comes back into LibFS. [`end_alone`] is
/// called before there is another thread, by the one that there is, outside of LibFS.
pub unsafe fn begin_alone() {
    IS_ALONE.store(true, Ordering::Relaxed);
}

/// Says that there may be other threads from now on.
pub fn end_alone() {
    IS_ALONE.store(false, Ordering::Relaxed);
}

/// Whether the process has one thread only.
#[must_use]
#[inline]
pub fn is_alone() -> bool {
    IS_ALONE.load(Ordering::Relaxed)
}

/// Adds to a word that only threads of this process change; returns what it was.
#[inline]
pub fn add(word: &AtomicU32, amount: u32, order: Ordering) -> u32 {
    if !is_alone() {
        return word.fetch_add(amount, order);
    }
    let before = word.load(Ordering::Relaxed);
    word.store(before.wrapping_add(amount), Ordering::Relaxed);
    before
}

/// Exchanges a word that only threads of this process change, if it is as expected; returns what it was.
///
/// # Errors
/// What it was, where that was not as expected.
#[inline]
pub fn exchange(word: &AtomicU32, current: u32, new: u32) -> Result<u32, u32> {
    if !is_alone() {
        return word.compare_exchange(current, new, Ordering::AcqRel, Ordering::Acquire);
    }
    let before = word.load(Ordering::Relaxed);
    if before != current {
        return Err(before);
    }
    word.store(new, Ordering::Relaxed);
    Ok(before)
}

/// Puts another value into a word that only threads of this process change; returns what it was.
#[inline]
pub fn swap(word: &AtomicU32, new: u32) -> u32 {
    if !is_alone() {
        return word.swap(new, Ordering::SeqCst);
    }
    let before = word.load(Ordering::Relaxed);
    word.store(new, Ordering::Relaxed);
    before
}

/// In the plain word: held by who changes what it guards. Lower numbers count those who only look.
const WRITER: u32 = u32::MAX;

/// A lock for one who changes or many who look.
pub struct RawRwLock {
    plain: AtomicU32,
    shared: rustix_futex_sync::RawRwLock,
}

impl RawRwLock {
    /// Takes the plain word, where the process is alone and the word is as it must be.
    #[inline]
    fn try_plain(&self, write: bool) -> Option<bool> {
        if !is_alone() {
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

/// A thread that is alone waits for itself: a defect, which costs the one call and not the program.
#[cold]
fn stuck() -> ! {
    panic!("a lock of LibFS is held by the thread that asks for it")
}

// SAFETY: while there is one thread, the plain word says who holds the lock, and is looked at before the shared lock by who lets go;
// nothing holds it when a second thread begins ([`begin_alone`]). From then on the shared lock is a lock.
unsafe impl lock_api::RawRwLock for RawRwLock {
    #[allow(clippy::declare_interior_mutable_const, reason = "it is what each lock begins as")]
    const INIT: Self = Self { plain: AtomicU32::new(0), shared: rustix_futex_sync::RawRwLock::INIT };
    type GuardMarker = <rustix_futex_sync::RawRwLock as lock_api::RawRwLock>::GuardMarker;

    #[inline]
    fn lock_shared(&self) {
        match self.try_plain(false) {
            Some(true) => {}
            Some(false) => stuck(),
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
            Some(false) => stuck(),
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

/// A lock for one at a time.
pub struct RawMutex {
    plain: AtomicU32,
    shared: rustix_futex_sync::RawMutex,
}

impl RawMutex {
    #[inline]
    fn try_plain(&self) -> Option<bool> {
        if !is_alone() {
            return None;
        }
        let is_free = self.plain.load(Ordering::Relaxed) == 0;
        if is_free {
            self.plain.store(WRITER, Ordering::Relaxed);
        }
        Some(is_free)
    }
}

// SAFETY: as for the other lock.
unsafe impl lock_api::RawMutex for RawMutex {
    #[allow(clippy::declare_interior_mutable_const, reason = "it is what each lock begins as")]
    const INIT: Self = Self { plain: AtomicU32::new(0), shared: rustix_futex_sync::RawMutex::INIT };
    type GuardMarker = <rustix_futex_sync::RawMutex as lock_api::RawMutex>::GuardMarker;

    #[inline]
    fn lock(&self) {
        match self.try_plain() {
            Some(true) => {}
            Some(false) => stuck(),
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

/// A value that one at a time may look at.
pub type Mutex<T> = lock_api::Mutex<RawMutex, T>;
/// Its holder's way to it.
pub type MutexGuard<'a, T> = lock_api::MutexGuard<'a, RawMutex, T>;
/// A value that many may look at, or one may change.
pub(crate) type RwLock<T> = lock_api::RwLock<RawRwLock, T>;
pub(crate) type RwLockReadGuard<'a, T> = lock_api::RwLockReadGuard<'a, RawRwLock, T>;
pub(crate) type MappedRwLockReadGuard<'a, T> = lock_api::MappedRwLockReadGuard<'a, RawRwLock, T>;

#[cfg(test)]
mod tests {
    use lock_api::{RawMutex as _, RawRwLock as _};

    use super::*;

    #[test]
    fn a_lock_that_was_taken_in_one_way_is_let_go_in_that_way() {
        let raw = RawRwLock::INIT;
        let mutex = RawMutex::INIT;
        // By the words themselves: the process is not alone, since tests are threads of it.
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
        // And now the shared ones.
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
    fn words_change_as_they_are_told() {
        let word = AtomicU32::new(5);
        assert_eq!(add(&word, 3, Ordering::AcqRel), 5);
        assert_eq!(exchange(&word, 7, 9), Err(8));
        assert_eq!(exchange(&word, 8, 9), Ok(8));
        assert_eq!(swap(&word, 7), 9);
        assert_eq!(word.into_inner(), 7);
    }
}
