//! A memory reserve for when the system gives no more memory.
//!
//! The cause may be `RLIMIT_AS`, `RLIMIT_DATA`, or the largest number of mappings of a process. Without memory, Rust
//! ends the program, which by itself would have got an error, or gone on without. The reserve suffices to hand all open
//! files over to the kernel (`calls::give_up_sessions`).
//!
//! A little is there from the start: zeros of the library itself, whose pages are loaded only when they are used. While
//! there are sessions, whose lists double their length at once, address space is reserved as well.

use std::cell::{Cell, UnsafeCell};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use crate::entry::arch::system_call;
use crate::sessions::session;

/// Room for handing some thousand files over to the kernel.
const OWN_BYTES: usize = 1 << 20;
/// Bytes reserved beside sessions: twice the longest list of changes that a log has room for.
const ROOM_BYTES: u64 = 64 << 20;
/// If address space is limited, at most this part of it is reserved, as a divisor.
const ROOM_PART: u64 = 16;
/// Bytes of it that are memory from the start.
///
/// They can be used even if the limits of data or of mappings are reached. A system that promises no more memory than
/// it has would commit all of the reserve, so only this part is memory.
const READY_BYTES: usize = 4 << 20;
const PAGE: usize = 4096;

/// The library's own memory.
#[repr(align(4096))]
struct OwnReserve(UnsafeCell<[u8; OWN_BYTES]>);

// SAFETY: each part of it is given away once.
unsafe impl Sync for OwnReserve {}

static OWN: OwnReserve = OwnReserve(UnsafeCell::new([0; OWN_BYTES]));
/// Bytes of it that are given away.
static OWN_GIVEN: AtomicUsize = AtomicUsize::new(0);

/// Whether the reserve was needed since the last hand-over.
static IS_SHORT: AtomicBool = AtomicBool::new(false);

/// Returns whether the system had no memory for the library.
#[inline]
pub(crate) fn is_memory_short() -> bool {
    IS_SHORT.load(Ordering::Relaxed)
}

/// Records that the hand-over is done.
pub(crate) fn record_hand_over() {
    IS_SHORT.store(false, Ordering::Relaxed);
}

/// Returns the bytes given away after another `size` of them.
///
/// Returns `None` if so many are not left.
fn end_after(given: usize, size: usize, bytes: usize) -> Option<usize> {
    given.checked_add(size.checked_next_multiple_of(PAGE)?).filter(|&end| end <= bytes)
}

/// Reserved address space.
pub(crate) struct MemoryReserve {
    start: Cell<usize>,
    bytes: Cell<usize>,
    /// Bytes of it that are memory.
    ready: Cell<usize>,
    /// Bytes of it that are given away.
    given: Cell<usize>,
}

impl MemoryReserve {
    pub(crate) const fn new() -> Self {
        Self { start: Cell::new(0), bytes: Cell::new(0), ready: Cell::new(0), given: Cell::new(0) }
    }

    /// Returns memory, all zeros, that is never given back; null if so much is not left.
    pub(crate) fn take(&self, size: usize) -> *mut u8 {
        IS_SHORT.store(true, Ordering::Relaxed);
        let own = |given: usize| end_after(given, size, OWN_BYTES);
        if let Ok(at) = OWN_GIVEN.fetch_update(Ordering::Relaxed, Ordering::Relaxed, own) {
            return OWN.0.get().cast::<u8>().wrapping_add(at);
        }
        let (at, Some(end)) = (self.given.get(), end_after(self.given.get(), size, self.bytes.get())) else {
            return std::ptr::null_mut();
        };
        if end > self.ready.get() && !self.make_ready(end) {
            return std::ptr::null_mut();
        }
        self.given.set(end);
        std::ptr::with_exposed_provenance_mut(self.start.get() + at)
    }

    /// Makes so many bytes of it memory, if the system allows that.
    fn make_ready(&self, bytes: usize) -> bool {
        let (start, more) = (self.start.get() + self.ready.get(), bytes - self.ready.get());
        let protection = (libc::PROT_READ | libc::PROT_WRITE) as u64;
        // SAFETY: it was mapped for this, and is not given away yet.
        let is_ready =
            unsafe { system_call(libc::SYS_mprotect as u64, [start as u64, more as u64, protection, 0, 0, 0]) } == 0;
        if is_ready {
            self.ready.set(bytes);
        }
        is_ready
    }

    /// Reserves address space when a session begins, if there is none yet.
    pub(crate) fn reserve_space(&self) {
        if self.bytes.get() > 0 {
            return;
        }
        let bytes = ROOM_BYTES.min(session::address_space() / ROOM_PART) / PAGE as u64 * PAGE as u64;
        let flags = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE) as u64;
        // SAFETY: it replaces no mapping.
        let start =
            unsafe { system_call(libc::SYS_mmap as u64, [0, bytes, libc::PROT_NONE as u64, flags, u64::MAX, 0]) };
        if start > 0 {
            self.start.set(start as usize);
            self.bytes.set(bytes as usize);
            self.ready.set(0);
            self.given.set(0);
            self.make_ready(READY_BYTES.min(bytes as usize));
        }
    }

    /// Releases the address space that the program needs, if none of it is given away.
    pub(crate) fn release_space(&self) {
        if self.bytes.get() > 0 && self.given.get() == 0 {
            // SAFETY: none of it is given away.
            unsafe {
                system_call(libc::SYS_munmap as u64, [self.start.get() as u64, self.bytes.get() as u64, 0, 0, 0, 0])
            };
            self.bytes.set(0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reserve_gives_each_part_once() {
        let room = MemoryReserve::new();
        room.reserve_space();
        let mut taken = Vec::new();
        for size in [1, PAGE, 3 * PAGE + 1, OWN_BYTES, OWN_BYTES / 2, 7 << 20, 1] {
            let at = room.take(size);
            assert!(!at.is_null(), "{size}");
            // SAFETY: it is as long as that.
            let bytes = unsafe { std::slice::from_raw_parts_mut(at, size) };
            assert!(bytes.iter().all(|byte| *byte == 0), "{size}");
            bytes.fill(taken.len() as u8 + 1);
            taken.push(bytes);
        }
        for (number, bytes) in (1..).zip(&taken) {
            assert!(bytes.iter().all(|byte| *byte == number), "part {number}");
        }
        assert!(is_memory_short());
        assert!(room.take(ROOM_BYTES as usize).is_null() && room.take(usize::MAX).is_null());
        room.release_space();
        assert!(room.bytes.get() > 0, "a part is given away");
        let other = MemoryReserve::new();
        assert!(other.take(OWN_BYTES + 1).is_null());
        other.reserve_space();
        other.release_space();
        assert_eq!(other.bytes.get(), 0);
    }
}
