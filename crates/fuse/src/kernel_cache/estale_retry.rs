//! Holds the inode of a path that a thread opens again after `ESTALE`.
//!
//! The first time, the inode was gone when the kernel used it, since another process put another file in its place. On
//! a kernel's own file systems a path can be opened however soon its inode loses its name. Here the kernel looks the
//! name up, and opens the inode (or changes its mode, and so on) by another request. If that fails with `ESTALE`, the
//! kernel retries once, and then reports the error to the program. So the inode of the second look-up is held as an
//! open file is, until the same thread has used it.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use ashlar_types::InodeId;
use parking_lot::Mutex;

/// Threads that are known at once; one more takes the place of the first.
const THREADS_MAX: usize = 64;
/// A thread that has not retried by then has given up, or was refused.
const RETRY_TTL: Duration = Duration::from_secs(1);

#[derive(Debug)]
struct Retry {
    thread: u32,
    since: Instant,
    held: Option<InodeId>,
}

/// The threads that retry after `ESTALE`.
#[derive(Debug, Default)]
pub(crate) struct EstaleRetries {
    retries: Mutex<Vec<Retry>>,
    count: AtomicUsize,
}

impl EstaleRetries {
    /// Whether any thread retries: most of the time none does.
    pub(crate) fn is_any(&self) -> bool {
        self.count.load(Ordering::Relaxed) > 0
    }

    /// Records that a thread got `ESTALE`. The returned inodes are held no more, and the caller closes them.
    #[must_use]
    pub(crate) fn record_estale(&self, thread: u32) -> Vec<InodeId> {
        let mut retries = self.retries.lock();
        let mut closed = remove_ended(&mut retries, thread);
        if retries.len() == THREADS_MAX {
            closed.extend(retries.remove(0).held);
        }
        retries.push(Retry { thread, since: Instant::now(), held: None });
        self.count.store(retries.len(), Ordering::Relaxed);
        closed
    }

    /// Holds an inode that a thread has looked up and the caller has opened, if the thread retries. The caller closes
    /// the returned inode.
    #[must_use]
    pub(crate) fn hold_inode(&self, thread: u32, inode: InodeId) -> Option<InodeId> {
        let mut retries = self.retries.lock();
        match retries.iter_mut().find(|retry| retry.thread == thread) {
            Some(retry) => retry.held.replace(inode),
            None => Some(inode),
        }
    }

    /// Ends a thread's retry. The caller closes the returned inodes.
    #[must_use]
    pub(crate) fn end_retry(&self, thread: u32) -> Vec<InodeId> {
        let mut retries = self.retries.lock();
        let closed = remove_ended(&mut retries, thread);
        self.count.store(retries.len(), Ordering::Relaxed);
        closed
    }
}

/// Forgets a thread, and those that did not retry in time; returns the inodes that were held for them.
fn remove_ended(retries: &mut Vec<Retry>, thread: u32) -> Vec<InodeId> {
    let is_over = |retry: &mut Retry| retry.thread == thread || retry.since.elapsed() > RETRY_TTL;
    retries.extract_if(.., is_over).filter_map(|retry| retry.held).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retried_inode_is_held_until_it_is_opened() {
        let retries = EstaleRetries::default();
        assert!(!retries.is_any());
        assert_eq!(retries.hold_inode(1, InodeId(7)), Some(InodeId(7)), "no thread has failed");
        assert!(retries.record_estale(1).is_empty() && retries.is_any());
        assert_eq!(retries.hold_inode(2, InodeId(8)), Some(InodeId(8)), "another thread");
        assert_eq!(retries.hold_inode(1, InodeId(7)), None);
        assert_eq!(retries.hold_inode(1, InodeId(9)), Some(InodeId(7)), "it was looked up once more");
        assert!(retries.end_retry(2).is_empty());
        assert_eq!(retries.end_retry(1), [InodeId(9)]);
        assert!(!retries.is_any());
    }

    #[test]
    fn held_inodes_are_bounded_by_threads() {
        let retries = EstaleRetries::default();
        for thread in 0..=THREADS_MAX as u32 {
            let closed = retries.record_estale(thread);
            assert_eq!(closed, if thread as usize == THREADS_MAX { vec![InodeId(0)] } else { vec![] });
            assert_eq!(retries.hold_inode(thread, InodeId(thread.into())), None);
        }
    }
}
