//! The process of a session: the process that opened it, and no child.
//!
//! The kernel wipes one page of memory in every child, however the child is made (`MADV_WIPEONFORK`). The page holds
//! the process's token. So a call only loads one word; asking the kernel for the process's number would cost as much as
//! a read.
//!
//! A child may give up its parent's rights. LibFS keeps a session's memory from children. A child that libc forks also
//! closes the session's descriptors before any code of the program runs. One that is made in another way keeps them
//! until it runs another program.

use std::os::fd::RawFd;
use std::ptr::{NonNull, null_mut};
use std::sync::Once;
use std::sync::atomic::{AtomicPtr, AtomicU64, AtomicUsize, Ordering};

use ashlar_types::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

const PAGE: usize = 4096;

/// The page's first word. The page is mapped once, and stays.
static WORD: AtomicPtr<AtomicU64> = AtomicPtr::new(null_mut());
/// The last token. Children inherit it, so that no process has the token of an ancestor.
static LAST: AtomicU64 = AtomicU64::new(0);

/// A process, as its sessions remember it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Token(u64);

impl Token {
    /// Returns the token of this process.
    ///
    /// # Errors
    /// `ENOMEM` if the page can't be mapped.
    pub(crate) fn of_process() -> Result<Self, Errno> {
        let word = match word() {
            Some(word) => word,
            None => map()?,
        };
        let known = word.load(Ordering::Acquire);
        if known != 0 {
            return Ok(Self(known));
        }
        let new = LAST.fetch_add(1, Ordering::Relaxed) + 1;
        match word.compare_exchange(0, new, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => Ok(Self(new)),
            Err(first) => Ok(Self(first)),
        }
    }

    /// Whether this is still that process.
    pub(crate) fn is_here(self) -> bool {
        word().is_some_and(|word| word.load(Ordering::Relaxed) == self.0)
    }
}

/// Descriptors whose closing in children can be recorded: those of processes that may have a million.
const NUMBERS: usize = 1 << 20;
/// The sessions' descriptors, by bit.
static DESCRIPTORS: [AtomicU64; NUMBERS / 64] = [const { AtomicU64::new(0) }; NUMBERS / 64];
/// The words of [`DESCRIPTORS`] that were ever used are below this one.
static DESCRIPTORS_END: AtomicUsize = AtomicUsize::new(0);

/// Records a session's descriptor, which children of this process close.
pub(crate) fn record_descriptor(number: RawFd) {
    if let Some(word) = DESCRIPTORS.get(number as usize / 64) {
        word.fetch_or(1 << (number % 64), Ordering::AcqRel);
        DESCRIPTORS_END.fetch_max(number as usize / 64 + 1, Ordering::AcqRel);
    }
}

/// Removes the record of a descriptor that is about to be closed.
pub(crate) fn forget_descriptor(number: RawFd) {
    if let Some(word) = DESCRIPTORS.get(number as usize / 64) {
        word.fetch_and(!(1 << (number % 64)), Ordering::AcqRel);
    }
}

/// Makes each child that libc forks close the sessions' descriptors.
pub(crate) fn watch_forks() {
    static WATCHED: Once = Once::new();
    // SAFETY: the function calls only what may be called in a forked child of a process with threads.
    WATCHED.call_once(|| _ = unsafe { libc::pthread_atfork(None, None, Some(close_descriptors)) });
}

/// Closes the descriptors of all sessions, which are the parent's.
unsafe extern "C" fn close_descriptors() {
    let end = DESCRIPTORS_END.load(Ordering::Acquire);
    for (first, word) in (0..).step_by(64).zip(&DESCRIPTORS[..end]) {
        let mut left = word.swap(0, Ordering::AcqRel);
        while left != 0 {
            // SAFETY: the descriptor is the library's, and sessions of the parent are not used here.
            unsafe { libc::close(first + left.trailing_zeros() as RawFd) };
            left &= left - 1;
        }
    }
}

fn word() -> Option<&'static AtomicU64> {
    // SAFETY: the pointer is null, or leads to a page that was mapped for reading and writing and is never unmapped.
    unsafe { WORD.load(Ordering::Acquire).as_ref() }
}

fn map() -> Result<&'static AtomicU64, Errno> {
    // SAFETY: a new mapping at an address of the kernel's choice touches no existing memory, and `madvise` only
    // advises.
    let page = unsafe {
        let page = mmap_anonymous(null_mut(), PAGE, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
        let page = page.map_err(|error| Errno(error.raw_os_error()))?;
        madvise(page, PAGE, Advice::LinuxWipeOnFork).map_err(|error| Errno(error.raw_os_error()))?;
        page
    };
    let first = WORD.compare_exchange(null_mut(), page.cast(), Ordering::AcqRel, Ordering::Acquire);
    let word = match first {
        Ok(_) => page.cast(),
        Err(other) => {
            // SAFETY: only this thread knows of the page. If it stays mapped, one page is lost.
            let _ = unsafe { munmap(page, PAGE) };
            other
        }
    };
    NonNull::new(word)
        // SAFETY: this page counts from now on; it is aligned, and zeros are a valid word.
        .map(|word| unsafe { word.as_ref() })
        .ok_or(Errno::ENOMEM)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forked_child_is_another_process() {
        let parent = Token::of_process().expect("a token");
        assert!(parent.is_here());
        assert_eq!(Token::of_process(), Ok(parent), "a process has one token");
        // SAFETY: the child only loads and stores words, and exits.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let is_stranger = !parent.is_here();
            let has_another = Token::of_process().is_ok_and(|token| token != parent && token.is_here());
            // SAFETY: it takes a number, and runs no code of this process.
            unsafe { libc::_exit(i32::from(!(is_stranger && has_another))) };
        }
        let mut status = -1;
        // SAFETY: the status is a local variable.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0, "the child took itself for its parent");
        assert!(parent.is_here());
    }
}
