//! Reference counting and held lock guards, cheaper than `Arc` in one thread.
//!
//! In a single-threaded process a count costs no atomic exchange ([`crate::single_threaded`]). An operation on a name
//! changes counts ten times. A guard keeps its value alive.

use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering, fence};

use crate::single_threaded::{RwLock, add};

struct CountedInner<T> {
    count: AtomicU32,
    value: T,
}

/// A reference-counted value; the last reference drops it.
pub(crate) struct Counted<T> {
    inner: NonNull<CountedInner<T>>,
    holds: PhantomData<CountedInner<T>>,
}

// SAFETY: as for `Arc`: all references share the value, and the thread that drops the last one drops it.
unsafe impl<T: Send + Sync> Send for Counted<T> {}
// SAFETY: as above.
unsafe impl<T: Send + Sync> Sync for Counted<T> {}

impl<T> Counted<T> {
    pub(crate) fn new(value: T) -> Self {
        let inner = Box::leak(Box::new(CountedInner { count: AtomicU32::new(1), value }));
        Self { inner: inner.into(), holds: PhantomData }
    }

    /// Returns whether this is the only reference.
    ///
    /// If no thread can get at the value except through this reference, the answer stays true.
    pub(crate) fn is_sole(&self) -> bool {
        self.inner().count.load(Ordering::Acquire) == 1
    }

    fn inner(&self) -> &CountedInner<T> {
        // SAFETY: the allocation lives as long as a reference to it.
        unsafe { self.inner.as_ref() }
    }
}

impl<T: Default> Default for Counted<T> {
    fn default() -> Self {
        Self::new(T::default())
    }
}

impl<T> Clone for Counted<T> {
    #[inline]
    fn clone(&self) -> Self {
        let before = add(&self.inner().count, 1, Ordering::Relaxed);
        // Only a caller that forgets references without end gets here.
        assert!(before < u32::MAX / 2, "too many references to one value");
        Self { inner: self.inner, holds: PhantomData }
    }
}

impl<T> Drop for Counted<T> {
    #[inline]
    fn drop(&mut self) {
        if add(&self.inner().count, 1_u32.wrapping_neg(), Ordering::Release) != 1 {
            return;
        }
        fence(Ordering::Acquire);
        // SAFETY: the pointer came from a box, and this was the last reference.
        drop(unsafe { Box::from_raw(self.inner.as_ptr()) });
    }
}

impl<T> Deref for Counted<T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        &self.inner().value
    }
}

impl<T: std::fmt::Debug> std::fmt::Debug for Counted<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        (**self).fmt(f)
    }
}

impl<T> Counted<RwLock<T>> {
    /// Locks the value for reading.
    #[inline]
    pub(crate) fn read_held(self) -> ReadGuard<T> {
        std::mem::forget(self.read());
        HeldGuard { lock: self }
    }

    /// As [`Self::read_held`], if that needs no waiting.
    #[inline]
    pub(crate) fn try_read_held(&self) -> Option<ReadGuard<T>> {
        std::mem::forget(self.try_read()?);
        Some(HeldGuard { lock: self.clone() })
    }

    /// Locks the value for writing.
    #[inline]
    pub(crate) fn write_held(self) -> WriteGuard<T> {
        std::mem::forget(self.write());
        HeldGuard { lock: self }
    }

    /// As [`Self::write_held`], if that needs no waiting.
    #[inline]
    pub(crate) fn try_write_held(&self) -> Option<WriteGuard<T>> {
        std::mem::forget(self.try_write()?);
        Some(HeldGuard { lock: self.clone() })
    }
}

/// Holds a value's lock, for reading or (`CHANGES`) writing, and keeps the value alive.
#[derive(Debug)]
pub(crate) struct HeldGuard<T, const CHANGES: bool> {
    lock: Counted<RwLock<T>>,
}

pub(crate) type ReadGuard<T> = HeldGuard<T, false>;
pub(crate) type WriteGuard<T> = HeldGuard<T, true>;

impl<T, const CHANGES: bool> Deref for HeldGuard<T, CHANGES> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: the guard's constructor locked the value, and it stays locked until the guard is dropped.
        unsafe { &*self.lock.data_ptr() }
    }
}

impl<T> DerefMut for WriteGuard<T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: the guard's constructor locked the value for writing, and it stays locked until the guard is dropped.
        unsafe { &mut *self.lock.data_ptr() }
    }
}

impl<T, const CHANGES: bool> Drop for HeldGuard<T, CHANGES> {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: the guard's constructor locked the value in this way.
        unsafe { if CHANGES { self.lock.force_unlock_write() } else { self.lock.force_unlock_read() } };
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn last_reference_drops_the_value() {
        let shared = Arc::new(());
        let one = Counted::new(Arc::clone(&shared));
        assert!(one.is_sole());
        let two = one.clone();
        assert!(!one.is_sole() && !two.is_sole());
        drop(one);
        assert!(two.is_sole());
        assert_eq!(Arc::strong_count(&shared), 2);
        drop(two);
        assert_eq!(Arc::strong_count(&shared), 1);
    }

    #[test]
    fn guard_locks_the_value_and_keeps_it_alive() {
        let lock = Counted::new(RwLock::new(5));
        let (one, two) = (lock.clone().read_held(), lock.try_read_held().expect("free to read"));
        assert!(lock.try_write_held().is_none() && (*one, *two) == (5, 5));
        drop((one, two));
        let mut writer = lock.try_write_held().expect("free");
        *writer += 1;
        assert!(lock.try_read_held().is_none());
        let other = lock.clone();
        drop(lock);
        drop(writer);
        assert_eq!(*other.clone().write_held(), 6);
        assert!(other.is_sole());
    }

    #[test]
    fn many_threads_count_one_value() {
        let shared = Arc::new(());
        let lock = Counted::new(RwLock::new((0, Arc::clone(&shared))));
        std::thread::scope(|scope| {
            for _ in 0..4 {
                let lock = lock.clone();
                scope.spawn(move || {
                    for _ in 0..10_000 {
                        lock.clone().write_held().0 += 1;
                        std::hint::black_box(lock.clone().read_held().0);
                    }
                });
            }
        });
        assert_eq!(lock.read().0, 40_000);
        assert!(lock.is_sole());
        drop(lock);
        assert_eq!(Arc::strong_count(&shared), 1);
    }
}
