//! An allocator that counts what each thread takes.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    /// Bytes that this thread has allocated and not freed, and the most of them so far.
    static ALLOCATED: Cell<(usize, usize)> = const { Cell::new((0, 0)) };
}

/// The system's allocator, with a count for each thread.
struct CountingAllocator;

fn record_change(more: usize, less: usize) {
    let (now, most) = ALLOCATED.get();
    let now = (now + more).saturating_sub(less);
    ALLOCATED.set((now, most.max(now)));
}

// SAFETY: the system's allocator does all the work, and counting allocates nothing.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        record_change(layout.size(), 0);
        // SAFETY: the caller's promises are those of this call.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, place: *mut u8, layout: Layout) {
        record_change(0, layout.size());
        // SAFETY: the caller's promises are those of this call.
        unsafe { System.dealloc(place, layout) }
    }

    unsafe fn realloc(&self, place: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        record_change(size, layout.size());
        // SAFETY: the caller's promises are those of this call.
        unsafe { System.realloc(place, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// Returns the result of `act`, and the most bytes that this thread held during it, besides those from before.
pub fn most_taken<T>(act: impl FnOnce() -> T) -> (T, usize) {
    let (before, _) = ALLOCATED.get();
    ALLOCATED.set((before, before));
    let result = act();
    let (_, most) = ALLOCATED.get();
    (result, most - before)
}
