//! The recycled descriptor: the number closed last, kept for the next open.
//!
//! A program that opens one file after the other makes no system call for it.
//!
//! The program must not see this: for the program the number is free, and the lowest free one. So it is closed before
//! any call reaches the kernel that could show it. While a number is recycled, the entry lets only calls past that have
//! nothing to do with which numbers are free ([`calls::ignores_free_numbers`]).

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use rustix_futex_sync::{Mutex, MutexGuard};

use crate::calls;
use crate::entry::arch::{DESCRIPTORS, Frame};
use crate::entry::{hook, signals};
use crate::files::descriptors;

/// The recycled number (`encode`), or one that is being closed ([`IS_CLOSING`]), or 0.
///
/// The entry reads it.
pub(crate) static ASHLAR_RECYCLED: AtomicU32 = AtomicU32::new(0);

/// All numbers below this one are in use, as far as the library has seen.
///
/// Only the lowest free number is recycled.
///
/// The entry reads it. If threads open and close at the same time, it may be too high: a number that is closed while
/// another one is taken is missed.
pub(crate) static ASHLAR_LOWEST: AtomicU32 = AtomicU32::new(0);

/// Whether no number is recycled any more.
static IS_STOPPED: AtomicBool = AtomicBool::new(false);

/// Added to the code of a number that is being closed.
///
/// Until it is closed, no thread takes it or sees another number as the lowest.
const IS_CLOSING: u32 = 1 << 31;
const _: () = assert!((DESCRIPTORS as u32) << 1 < IS_CLOSING);

/// Held by the thread that closes the recycled number: others wait for that.
///
/// No other lock is taken under it.
static CLOSING: Mutex<()> = Mutex::new(());

/// Programs close lower numbers to reuse them for the next open, maybe past the library.
const LOWEST_RECYCLED: i32 = 3;

/// Encodes a number and its close-on-exec flag; the code is never 0.
fn encode(descriptor: i32, cloexec: bool) -> u32 {
    (descriptor as u32) << 1 | u32::from(cloexec)
}

fn decode_number(code: u32) -> i32 {
    ((code & !IS_CLOSING) >> 1) as i32
}

/// Recycles a number that leads nowhere any more, instead of closing it.
///
/// Returns `false` if it must be closed.
pub(crate) fn recycle(descriptor: i32, cloexec: bool) -> bool {
    // If a number is recycled already, that one is lower.
    if descriptor < LOWEST_RECYCLED || ASHLAR_LOWEST.load(Ordering::Relaxed) < descriptor as u32 {
        return false;
    }
    close_recycled();
    record_freed(descriptor as u32);
    descriptors::record_internal(descriptor);
    let recycled =
        ASHLAR_RECYCLED.compare_exchange(0, encode(descriptor, cloexec), Ordering::AcqRel, Ordering::Acquire);
    if recycled.is_err() {
        // Another thread was faster.
        descriptors::forget_internal(descriptor);
    }
    if IS_STOPPED.load(Ordering::SeqCst) {
        close_recycled();
    }
    recycled.is_ok()
}

/// Recycles no more numbers: the kernel serves the process.
pub(crate) fn stop_recycling() {
    IS_STOPPED.store(true, Ordering::SeqCst);
    close_recycled();
}

/// Discards the recycled number and the lowest one after a handler of the program's.
///
/// The interrupted call goes on after its check by the entry, and the numbers may have changed since.
pub(crate) fn reset_after_handler() {
    if hook::has_lent_memory() {
        // The number is the lender's, and so is the record of the lowest one.
        return;
    }
    if ASHLAR_RECYCLED.load(Ordering::Relaxed) != 0 {
        // The program is in no call of the library, so another handler could come in the middle, and open a file.
        let mask = signals::block_all();
        close_recycled();
        signals::set_mask(mask);
    }
    ASHLAR_LOWEST.store(0, Ordering::Relaxed);
}

/// Takes the recycled number for a new descriptor; after `None`, none is recycled.
///
/// If another thread was about to close the number, it has done so by then.
pub(crate) fn take_number(cloexec: bool) -> Option<i32> {
    let recycled = ASHLAR_RECYCLED.load(Ordering::Relaxed);
    if recycled == 0 {
        return None;
    }
    let (number, is_closing) = (decode_number(recycled), recycled & IS_CLOSING != 0);
    // A lower number may be free by now.
    let is_lowest = ASHLAR_LOWEST.load(Ordering::Relaxed) >= number as u32;
    let is_it = !is_closing && is_lowest && recycled & 1 == u32::from(cloexec);
    if !is_it || ASHLAR_RECYCLED.compare_exchange(recycled, 0, Ordering::AcqRel, Ordering::Acquire).is_err() {
        close_recycled();
        return None;
    }
    descriptors::forget_internal(number);
    record_lowest(number);
    Some(number)
}

/// Records that the lowest free number was taken.
pub(crate) fn record_lowest(descriptor: i32) {
    ASHLAR_LOWEST.store(descriptor as u32 + 1, Ordering::Relaxed);
}

/// Records that a number may be free from now on.
pub(crate) fn record_freed(descriptor: u32) {
    if descriptor < ASHLAR_LOWEST.load(Ordering::Relaxed) {
        ASHLAR_LOWEST.fetch_min(descriptor, Ordering::Relaxed);
    }
}

/// Checks a call that the kernel serves without the library.
pub(crate) fn check_kernel_call(call: &Frame) {
    if call.rax as i64 == libc::SYS_close {
        record_freed(call.arguments[0] as u32);
    }
}

/// Closes the recycled number, if there is one.
///
/// Afterwards none from before is left.
///
/// If another thread closes it, this one waits: the program may have closed it here, and be about to open a file.
pub(crate) fn close_recycled() {
    if ASHLAR_RECYCLED.load(Ordering::SeqCst) == 0 {
        return;
    }
    let _one_at_a_time = CLOSING.lock();
    loop {
        let recycled = ASHLAR_RECYCLED.load(Ordering::Acquire);
        if recycled == 0 {
            return;
        }
        // Another thread may take it, and recycle another one.
        if ASHLAR_RECYCLED
            .compare_exchange(recycled, recycled | IS_CLOSING, Ordering::AcqRel, Ordering::Acquire)
            .is_ok()
        {
            descriptors::forget_internal(decode_number(recycled));
            descriptors::close_number(decode_number(recycled));
            ASHLAR_RECYCLED.store(0, Ordering::Release);
            return;
        }
    }
}

/// Keeps other threads from being in the middle of closing it over a fork.
pub(crate) fn hold_closing() -> MutexGuard<'static, ()> {
    CLOSING.lock()
}

/// Prepares a call that the library serves: closes the recycled number if the call could show it.
#[inline]
pub(crate) fn prepare_call(call: &Frame) {
    let recycled = ASHLAR_RECYCLED.load(Ordering::Relaxed);
    if recycled != 0 && !calls::keeps_recycled(call, decode_number(recycled)) {
        close_recycled();
    }
}

/// Returns whether a number is recycled that must be closed before the kernel serves a call.
#[inline]
pub(crate) fn must_close_before(call: &Frame) -> bool {
    ASHLAR_RECYCLED.load(Ordering::Relaxed) != 0 && !calls::ignores_free_numbers(call.rax as i64)
}
