//! Detects a single-threaded program, in which LibFS needs no locks.
//!
//! libc has a byte that says so, and changes it before it makes a thread. The library reads it whenever a call enters
//! LibFS. A thread is never made in the middle of such a call, so no call without locks meets one that needs them
//! (`ashlar_libfs::single_threaded`).
//! Threads made past libc's own functions, by calls that the library sees (`calls::process`), end the state as well.

use std::sync::atomic::{AtomicPtr, AtomicU8, Ordering};

use ashlar_libfs::single_threaded;

use crate::sessions::session;

/// In place of libc's byte, if there is none: there may be threads.
static UNKNOWN: AtomicU8 = AtomicU8::new(0);
/// libc's byte: not 0 while there is one thread.
static IS_SINGLE: AtomicPtr<u8> = AtomicPtr::new(UNKNOWN.as_ptr());

/// Looks for libc's byte, before the program begins. glibc before 2.32 has none.
pub(crate) fn begin_detection() {
    // SAFETY: the name is a string.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"__libc_single_threaded".as_ptr()) };
    if !found.is_null() {
        IS_SINGLE.store(found.cast(), Ordering::Relaxed);
    }
    if libc_says_single() {
        // SAFETY: from here on `check_threads` is called before each use of LibFS, and no signal handler enters LibFS
        // while it is in use (`hook`).
        unsafe { single_threaded::begin_single_threaded() };
    }
}

/// Checks whether there may be another thread by now.
#[inline]
pub(crate) fn check_threads() {
    if single_threaded::is_single_threaded() && !libc_says_single() {
        single_threaded::end_single_threaded();
    }
}

/// Returns whether the process has only one thread.
///
/// A thread that has just ended may still count.
pub(crate) fn is_single_thread() -> bool {
    single_threaded::is_single_threaded() || thread_ids().len() == 1
}

/// Returns the ids of its threads.
pub(crate) fn thread_ids() -> Vec<i32> {
    session::numbers_in_directory(c"/proc/self/task")
}

#[inline]
fn libc_says_single() -> bool {
    // SAFETY: it is a byte of libc's or of this library, and lives as long as the process. libc changes it only while
    // there is one thread.
    unsafe { IS_SINGLE.load(Ordering::Relaxed).read_volatile() != 0 }
}
