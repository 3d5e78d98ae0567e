//! Parked numbers: that of the descriptor that was closed last stays with the kernel for the file that is opened next. Who opens one file after
//! the other makes no system call for it.
//!
//! The program must not see that: the number is free, and the lowest one that is. So it is closed before any call reaches the kernel that could
//! tell: the entry lets none past while a number is parked but those that have nothing to do with which numbers are free ([`calls::is_apart`]).

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use ashlar_libfs::alone;

use crate::arch::{DESCRIPTORS, Frame};
use crate::{calls, descriptors, hook, signals};

/// The parked number (`code`), or one that is being closed ([`IS_CLOSING`]), or 0. The entry looks at it.
pub(crate) static ASHLAR_RECYCLED: AtomicU32 = AtomicU32::new(0);

/// All numbers below this one are in use, as far as we have seen: only the lowest free one is parked. The entry looks at it. Where threads open and
/// close at the same time it may say too much: those that are closed while another one is taken are not seen.
pub(crate) static ASHLAR_LOWEST: AtomicU32 = AtomicU32::new(0);

/// Whether nothing is parked any more.
static IS_OVER: AtomicBool = AtomicBool::new(false);

/// Beside the code of a number that is being closed: nobody takes it, and nobody is told of another one as the lowest, before it is.
const IS_CLOSING: u32 = 1 << 31;
const _: () = assert!((DESCRIPTORS as u32) << 1 < IS_CLOSING);

/// Held by who closes the parked number: others wait for that. Nothing else is taken under it.
static CLOSING: alone::Mutex<()> = alone::Mutex::new(());

/// Lower ones programs give up in order to get them for what they open next, maybe past the library.
const LOWEST_RECYCLED: i32 = 3;

/// A number, and whether the kernel closes it where another program is run: never 0.
fn code(descriptor: i32, cloexec: bool) -> u32 {
    (descriptor as u32) << 1 | u32::from(cloexec)
}

fn number_of(code: u32) -> i32 {
    ((code & !IS_CLOSING) >> 1) as i32
}

/// Parks a number that leads nowhere any more, rather than to close it. `false` where it must be closed.
pub(crate) fn park(descriptor: i32, cloexec: bool) -> bool {
    // Where one is parked already, that one is lower.
    if descriptor < LOWEST_RECYCLED || ASHLAR_LOWEST.load(Ordering::Relaxed) < descriptor as u32 {
        return false;
    }
    end();
    note_freed(descriptor as u32);
    descriptors::note_internal(descriptor);
    let recycled = alone::exchange(&ASHLAR_RECYCLED, 0, code(descriptor, cloexec));
    if recycled.is_err() {
        // Another thread was faster.
        descriptors::forget_internal(descriptor);
    }
    if IS_OVER.load(Ordering::SeqCst) {
        end();
    }
    recycled.is_ok()
}

/// Parks nothing any more: the kernel serves the process.
pub(crate) fn stop() {
    IS_OVER.store(true, Ordering::SeqCst);
    end();
}

/// Behind a handler of the program's: the call that it has interrupted goes on from where the entry has let it past, and what was known of the
/// numbers may have been before it.
pub(crate) fn begin_again() {
    if hook::is_lent() {
        // The number is the lender's, and so is what is known of them.
        return;
    }
    if ASHLAR_RECYCLED.load(Ordering::Relaxed) != 0 {
        // The program is in no call of ours, so that another handler would come in the middle, and might open a file.
        let mask = signals::block();
        end();
        signals::set_mask(mask);
    }
    ASHLAR_LOWEST.store(0, Ordering::Relaxed);
}

/// Takes the parked number for a new descriptor. Where there is `None`, none is parked, and another thread that was about to close it has done so.
pub(crate) fn take(cloexec: bool) -> Option<i32> {
    let recycled = ASHLAR_RECYCLED.load(Ordering::Relaxed);
    if recycled == 0 {
        return None;
    }
    let (number, is_closing) = (number_of(recycled), recycled & IS_CLOSING != 0);
    // A lower one may be free since.
    let is_lowest = ASHLAR_LOWEST.load(Ordering::Relaxed) >= number as u32;
    let is_it = !is_closing && is_lowest && recycled & 1 == u32::from(cloexec);
    if !is_it || alone::exchange(&ASHLAR_RECYCLED, recycled, 0).is_err() {
        end();
        return None;
    }
    descriptors::forget_internal(number);
    note_lowest(number);
    Some(number)
}

/// Notes that a number was the lowest one that was free, and has been taken.
pub(crate) fn note_lowest(descriptor: i32) {
    ASHLAR_LOWEST.store(descriptor as u32 + 1, Ordering::Relaxed);
}

/// Notes that a number may be free from now on.
pub(crate) fn note_freed(descriptor: u32) {
    if descriptor < ASHLAR_LOWEST.load(Ordering::Relaxed) {
        ASHLAR_LOWEST.fetch_min(descriptor, Ordering::Relaxed);
    }
}

/// Looks at a call that the kernel serves without us.
pub(crate) fn look(call: &Frame) {
    if call.rax as i64 == libc::SYS_close {
        note_freed(call.arguments[0] as u32);
    }
}

/// Closes the parked number, if there is one; behind it none is that was before. Where another thread closes it this one waits: the program may have closed
/// it here, and be about to open a file.
pub(crate) fn end() {
    if ASHLAR_RECYCLED.load(Ordering::SeqCst) == 0 {
        return;
    }
    let _one_at_a_time = CLOSING.lock();
    loop {
        let recycled = ASHLAR_RECYCLED.load(Ordering::Acquire);
        if recycled == 0 {
            return;
        }
        // Another thread may take it, and park another one.
        if alone::exchange(&ASHLAR_RECYCLED, recycled, recycled | IS_CLOSING).is_ok() {
            descriptors::forget_internal(number_of(recycled));
            descriptors::close_number(number_of(recycled));
            ASHLAR_RECYCLED.store(0, Ordering::Release);
            return;
        }
    }
}

/// Keeps other threads from being in the middle of closing it: over a fork, in which they have no part.
pub(crate) fn hold() -> alone::MutexGuard<'static, ()> {
    CLOSING.lock()
}

/// Before a call is served that concerns us.
#[inline]
pub(crate) fn before(call: &Frame) {
    let recycled = ASHLAR_RECYCLED.load(Ordering::Relaxed);
    if recycled != 0 && !calls::keeps_recycled(call, number_of(recycled)) {
        end();
    }
}

/// Whether a number is parked that must be closed before the kernel serves a call.
#[inline]
pub(crate) fn is_in_the_way(call: &Frame) -> bool {
    ASHLAR_RECYCLED.load(Ordering::Relaxed) != 0 && !calls::is_apart(call.rax as i64)
}
