//! Stacks for calls, one for each thread that uses LibFS files.

use std::sync::Mutex;

use crate::entry::arch::system_call;

/// Enough for LibFS, which keeps pages of data on it, and for a message to SharedFS.
const STACK_BYTES: u64 = 256 << 10;
/// Below the stack, so that an overflow faults.
const GUARD_BYTES: u64 = 4096;
/// Stacks of ended threads, for later threads. More are given back to the system.
const SPARE_MAX: usize = 64;

/// Ends of spare stacks.
static SPARE: Mutex<([usize; SPARE_MAX], usize)> = Mutex::new(([0; SPARE_MAX], 0));

/// Returns a stack's end; null if there is no memory.
pub(crate) fn take_stack() -> *mut u8 {
    if let Ok(mut spare) = SPARE.try_lock() {
        if spare.1 > 0 {
            spare.1 -= 1;
            return spare.0[spare.1] as *mut u8;
        }
    }
    let protection = (libc::PROT_READ | libc::PROT_WRITE) as u64;
    let flags = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_STACK) as u64;
    // SAFETY: new memory, at an address that the kernel chooses.
    let start =
        unsafe { system_call(libc::SYS_mmap as u64, [0, STACK_BYTES + GUARD_BYTES, protection, flags, u64::MAX, 0]) };
    if start < 0 {
        return std::ptr::null_mut();
    }
    // SAFETY: it is the first page of the new mapping.
    unsafe { system_call(libc::SYS_mprotect as u64, [start as u64, GUARD_BYTES, 0, 0, 0, 0]) };
    (start as u64 + GUARD_BYTES + STACK_BYTES) as *mut u8
}

/// Gives back a stack that is not in use any more.
pub(crate) fn give_back_stack(end: *mut u8) {
    if end.is_null() {
        return;
    }
    if let Ok(mut spare) = SPARE.try_lock() {
        let count = spare.1;
        if count < SPARE_MAX {
            spare.0[count] = end as usize;
            spare.1 = count + 1;
            return;
        }
    }
    let start = end as u64 - STACK_BYTES - GUARD_BYTES;
    // SAFETY: no thread runs on it.
    unsafe { system_call(libc::SYS_munmap as u64, [start, STACK_BYTES + GUARD_BYTES, 0, 0, 0, 0]) };
}
