//! Arbitrary bytes in the place of a journal's frames and memory.
//!
//! Other nodes send frames, and a crash leaves memory in any state. A decoded frame is encoded to the same bytes. No
//! decoding takes more memory than its frame's length allows, and damage never makes a frame.
#![no_main]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use libfuzzer_sys::fuzz_target;

#[path = "../../crates/journal/tests/script/mod.rs"]
mod script;

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

/// Bytes of memory that a byte of a frame may take, and what any frame may take.
///
/// A byte may stand for an element of a list, and a list that grows is copied to twice its room.
const MEMORY_PER_BYTE: usize = 64;
const MEMORY_ANY: usize = 4 << 10;

fuzz_target!(|data: &[u8]| {
    let (before, _) = ALLOCATED.get();
    ALLOCATED.set((before, before));
    let decoded = script::decode(data);
    let (_, most) = ALLOCATED.get();
    let taken = most - before;
    assert!(taken <= MEMORY_ANY + MEMORY_PER_BYTE * data.len(), "{} bytes took {taken} of memory", data.len());
    if let Err(broken) = decoded.and_then(|_| script::damage(data)) {
        panic!("{broken}");
    }
});
