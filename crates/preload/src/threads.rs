//! Whether the program has one thread only: LibFS needs no locks then (`ashlar_libfs::alone`).
//!
//! libc has a byte that says so, and changes it before it makes a thread. It is looked at whenever a call gets into LibFS: a thread is never
//! made in the middle of one, so no call that has begun without locks meets one that needs them. Threads that are made past libc's own
//! functions, by calls that we see (`calls::process`), end it as well.

use std::sync::atomic::{AtomicPtr, AtomicU8, Ordering};

use ashlar_libfs::alone;

use crate::session;

/// In place of libc's byte, where there is none: there may be threads.
static UNKNOWN: AtomicU8 = AtomicU8::new(0);
/// libc's byte: not 0 while there is one thread.
static IS_SINGLE: AtomicPtr<u8> = AtomicPtr::new(UNKNOWN.as_ptr());

/// Looks for libc's byte, before the program begins. Before glibc 2.32 there is none.
pub(crate) fn begin() {
    // SAFETY: the name is a string.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"__libc_single_threaded".as_ptr()) };
    if !found.is_null() {
        IS_SINGLE.store(found.cast(), Ordering::Relaxed);
    }
    if is_single() {
        // SAFETY: from here on `look` is called before each use of LibFS, and no handler of a signal gets into it while it is in use (`hook`).
        unsafe { alone::begin_alone() };
    }
}

/// Looks whether there may be another thread by now.
#[inline]
pub(crate) fn look() {
    if alone::is_alone() && !is_single() {
        alone::end_alone();
    }
}

/// Whether the process has one thread only: one that has just ended may still count.
pub(crate) fn is_one() -> bool {
    alone::is_alone() || numbers().len() == 1
}

/// The numbers of its threads.
pub(crate) fn numbers() -> Vec<i32> {
    session::numbers_in(c"/proc/self/task")
}

#[inline]
fn is_single() -> bool {
    // SAFETY: it is a byte of libc's, or ours, and there as long as the process. libc changes it only while there is one thread.
    unsafe { IS_SINGLE.load(Ordering::Relaxed).read_volatile() != 0 }
}
