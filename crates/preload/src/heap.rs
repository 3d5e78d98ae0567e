//! Memory of our own. The program's allocator may be in the middle of something when a signal's handler uses a file.

use std::alloc::{GlobalAlloc, Layout};
use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicU32, Ordering};

use ashlar_libfs::alone::is_alone;
use dlmalloc::Dlmalloc;

use crate::arch::system_call;

const FREE: u32 = 0;
const HELD: u32 = 1;
const WAITED_FOR: u32 = 2;
/// Looks at the lock before a thread sleeps: longer than an allocation takes.
const SPINS: u32 = 100;

/// The allocator, one thread at a time.
pub(crate) struct Heap {
    lock: AtomicU32,
    memory: UnsafeCell<Dlmalloc>,
}

// SAFETY: the lock keeps threads apart.
unsafe impl Sync for Heap {}

/// The right to use the heap.
pub(crate) struct Held<'a>(&'a Heap);

impl Drop for Held<'_> {
    #[inline]
    fn drop(&mut self) {
        // A thread that is alone has nobody to wake.
        if is_alone() && self.0.lock.load(Ordering::Relaxed) == HELD {
            self.0.lock.store(FREE, Ordering::Relaxed);
            return;
        }
        if self.0.lock.swap(FREE, Ordering::Release) == WAITED_FOR {
            let arguments =
                [self.0.lock.as_ptr() as u64, (libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG) as u64, 1, 0, 0, 0];
            // SAFETY: the word outlives the call.
            unsafe { system_call(libc::SYS_futex as u64, arguments) };
        }
    }
}

impl Heap {
    pub(crate) const fn new() -> Self {
        Self { lock: AtomicU32::new(FREE), memory: UnsafeCell::new(Dlmalloc::new()) }
    }

    /// Keeps all threads out.
    #[inline]
    pub(crate) fn hold(&self) -> Held<'_> {
        if is_alone() && self.lock.load(Ordering::Relaxed) == FREE {
            self.lock.store(HELD, Ordering::Relaxed);
            return Held(self);
        }
        self.hold_shared()
    }

    fn hold_shared(&self) -> Held<'_> {
        for _ in 0..SPINS {
            if self.lock.compare_exchange_weak(FREE, HELD, Ordering::Acquire, Ordering::Relaxed).is_ok() {
                return Held(self);
            }
            std::hint::spin_loop();
        }
        while self.lock.swap(WAITED_FOR, Ordering::Acquire) != FREE {
            let wait = (libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG) as u64;
            let arguments = [self.lock.as_ptr() as u64, wait, WAITED_FOR.into(), 0, 0, 0];
            // SAFETY: the word outlives the call.
            unsafe { system_call(libc::SYS_futex as u64, arguments) };
        }
        Held(self)
    }
}

// SAFETY: dlmalloc is an allocator, and the lock is held around each use.
unsafe impl GlobalAlloc for Heap {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let _held = self.hold();
        // SAFETY: the lock is held.
        unsafe { (*self.memory.get()).malloc(layout.size(), layout.align()) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        let _held = self.hold();
        // SAFETY: the lock is held, and the memory came from here.
        unsafe { (*self.memory.get()).free(at, layout.size(), layout.align()) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        let _held = self.hold();
        // SAFETY: the lock is held.
        unsafe { (*self.memory.get()).calloc(layout.size(), layout.align()) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        let _held = self.hold();
        // SAFETY: the lock is held, and the memory came from here.
        unsafe { (*self.memory.get()).realloc(at, layout.size(), layout.align(), size) }
    }
}
