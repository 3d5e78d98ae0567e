//! Says whether the program has one thread: then no other thread can change a descriptor in the middle of a call.
//!
//! libc has a byte that says so, and changes it before it makes a thread. Threads made past libc's own functions, by
//! calls that the library sees (`calls::process`), end the state for good.

use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU8, Ordering};

use crate::sessions::session;

/// In place of libc's byte, if there is none: there may be threads.
static UNKNOWN: AtomicU8 = AtomicU8::new(0);
/// libc's byte: not 0 while there is one thread.
static LIBC_SAYS_SINGLE: AtomicPtr<u8> = AtomicPtr::new(UNKNOWN.as_ptr());
/// There may be threads that libc does not know.
static MAY_HAVE_OTHERS: AtomicBool = AtomicBool::new(false);

/// Looks for libc's byte, before the program begins. glibc before 2.32 has none.
pub(crate) fn begin_detection() {
    // SAFETY: the name is a string.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"__libc_single_threaded".as_ptr()) };
    if !found.is_null() {
        LIBC_SAYS_SINGLE.store(found.cast(), Ordering::Relaxed);
    }
}

/// Records that libc no longer knows every thread.
pub(crate) fn end_detection() {
    MAY_HAVE_OTHERS.store(true, Ordering::Relaxed);
}

/// Returns whether the process is known to have one thread, at no cost.
#[inline]
pub(crate) fn is_known_single() -> bool {
    // SAFETY: it is a byte of libc's or of this library, and lives as long as the process. libc changes it only while
    // there is one thread.
    !MAY_HAVE_OTHERS.load(Ordering::Relaxed) && unsafe { LIBC_SAYS_SINGLE.load(Ordering::Relaxed).read_volatile() != 0 }
}

/// Returns whether the process has only one thread.
///
/// A thread that has just ended may still count.
pub(crate) fn is_single_thread() -> bool {
    is_known_single() || thread_ids().len() == 1
}

/// Returns the ids of its threads.
pub(crate) fn thread_ids() -> Vec<i32> {
    session::numbers_in_directory(c"/proc/self/task")
}
