//! Holds the inode of a path that a thread opens again after `ESTALE`.
//!
//! The first time, the inode was gone when the kernel used it, since another process put another file in its place. On
//! a kernel's own file systems a path can be opened however soon its inode loses its name. Here the kernel looks the
//! name up, and opens the inode (or changes its mode, and so on) by another request. If that fails with `ESTALE`, the
//! kernel retries once, and then reports the error to the program. So the inode that the same thread looks up the
//! second time is held as an open file is, until the thread has used it.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use ashlar_types::InodeId;
use parking_lot::Mutex;

/// Threads that are known at once; one more takes the place of the first.
const KNOWN_MAX: usize = 64;
/// A thread that has not retried by then has given up, or was refused.
const PATIENCE: Duration = Duration::from_secs(1);

#[derive(Debug)]
struct Try {
    thread: u32,
    since: Instant,
    held: Option<InodeId>,
}

/// The threads that retry after `ESTALE`.
#[derive(Debug, Default)]
pub(crate) struct Again {
    tries: Mutex<Vec<Try>>,
    count: AtomicUsize,
}

impl Again {
    /// Whether any thread retries: most of the time none does.
    pub(crate) fn is_any(&self) -> bool {
        self.count.load(Ordering::Relaxed) > 0
    }

    /// Records that a thread got `ESTALE`. The returned inodes are held no more, and the caller closes them.
    #[must_use]
    pub(crate) fn note(&self, thread: u32) -> Vec<InodeId> {
        let mut tries = self.tries.lock();
        let mut closed = end(&mut tries, thread);
        if tries.len() == KNOWN_MAX {
            closed.extend(tries.remove(0).held);
        }
        tries.push(Try { thread, since: Instant::now(), held: None });
        self.count.store(tries.len(), Ordering::Relaxed);
        closed
    }

    /// Holds an inode that a thread has looked up and the caller has opened, if the thread retries. The caller closes
    /// the returned inode.
    #[must_use]
    pub(crate) fn hold(&self, thread: u32, inode: InodeId) -> Option<InodeId> {
        let mut tries = self.tries.lock();
        match tries.iter_mut().find(|one| one.thread == thread) {
            Some(one) => one.held.replace(inode),
            None => Some(inode),
        }
    }

    /// Ends a thread's retry. The caller closes the returned inodes.
    #[must_use]
    pub(crate) fn end(&self, thread: u32) -> Vec<InodeId> {
        let mut tries = self.tries.lock();
        let closed = end(&mut tries, thread);
        self.count.store(tries.len(), Ordering::Relaxed);
        closed
    }
}

/// Forgets a thread, and those that did not retry in time; returns the inodes that were held for them.
fn end(tries: &mut Vec<Try>, thread: u32) -> Vec<InodeId> {
    let is_over = |one: &mut Try| one.thread == thread || one.since.elapsed() > PATIENCE;
    tries.extract_if(.., is_over).filter_map(|one| one.held).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_looked_up_again_is_held_until_it_is_opened() {
        let again = Again::default();
        assert!(!again.is_any());
        assert_eq!(again.hold(1, InodeId(7)), Some(InodeId(7)), "nobody has failed");
        assert!(again.note(1).is_empty() && again.is_any());
        assert_eq!(again.hold(2, InodeId(8)), Some(InodeId(8)), "another thread");
        assert_eq!(again.hold(1, InodeId(7)), None);
        assert_eq!(again.hold(1, InodeId(9)), Some(InodeId(7)), "it was looked up once more");
        assert!(again.end(2).is_empty());
        assert_eq!(again.end(1), [InodeId(9)]);
        assert!(!again.is_any());
    }

    #[test]
    fn not_more_is_held_than_for_some_threads() {
        let again = Again::default();
        for thread in 0..=KNOWN_MAX as u32 {
            let closed = again.note(thread);
            assert_eq!(closed, if thread as usize == KNOWN_MAX { vec![InodeId(0)] } else { vec![] });
            assert_eq!(again.hold(thread, InodeId(thread.into())), None);
        }
    }
}
