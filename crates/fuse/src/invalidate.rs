//! What this mount itself has its kernel forget, on a thread of its own.
//!
//! Two things need it. A lease may be lost between an operation and its reply: SharedFS had the kernel forget what it did
//! not have yet. And an append may land elsewhere than the kernel thought, whose pages are then wrong.

use std::collections::{HashSet, VecDeque};
use std::os::fd::BorrowedFd;

use ashlar_types::InodeId;
use parking_lot::{Condvar, Mutex};

use crate::notify::{self, Pages};

/// The most notifications that wait. One arises for a request in flight at most, save for listings, so this is a hundred
/// large listings; behind it, all names are invalidated at once instead.
const WAITING_MAX: usize = 65_536;

/// What is to be forgotten.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Stale {
    /// Attributes of an inode, and some of its pages.
    Inode(InodeId, Pages),
    /// A name.
    Entry(InodeId, Box<[u8]>),
    /// All names.
    Names,
}

/// The queue in front of the thread. Putting something in never waits for the kernel.
#[derive(Debug, Default)]
pub(crate) struct Invalidations {
    queue: Mutex<Queue>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Queue {
    order: VecDeque<Stale>,
    waiting: HashSet<Stale>,
    closed: bool,
}

impl Invalidations {
    /// Has the kernel forget something, soon.
    pub(crate) fn push(&self, stale: Stale) {
        let mut queue = self.queue.lock();
        let stale = if queue.order.len() < WAITING_MAX { stale } else { Stale::Names };
        if queue.waiting.insert(stale.clone()) {
            queue.order.push_back(stale);
            self.changed.notify_one();
        }
    }

    /// Ends the thread.
    pub(crate) fn close(&self) {
        self.queue.lock().closed = true;
        self.changed.notify_one();
    }

    /// The thread: works the queue off until it's closed.
    pub(crate) fn run(&self, device: BorrowedFd<'_>) {
        while let Some(stale) = self.next() {
            let result = match &stale {
                Stale::Inode(inode, pages) => notify::inval_inode(device, *inode, *pages),
                Stale::Entry(directory, name) => notify::inval_entry(device, *directory, name),
                // A kernel without epochs forgets by itself when the validity that it was told runs out.
                Stale::Names => notify::inc_epoch(device).map(|_| ()),
            };
            if let Err(errno) = result {
                tracing::debug!(?stale, %errno, "the kernel took no notification");
            }
        }
    }

    /// Waits for the next; `None` once the queue is closed.
    fn next(&self) -> Option<Stale> {
        let mut queue = self.queue.lock();
        loop {
            if queue.closed {
                return None;
            }
            if let Some(stale) = queue.order.pop_front() {
                // It leaves the set before it's carried out: what becomes stale from here on needs another notification.
                queue.waiting.remove(&stale);
                return Some(stale);
            }
            self.changed.wait(&mut queue);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_thing_waits_only_once() {
        let invalidations = Invalidations::default();
        let one = Stale::Inode(InodeId(20), Pages::Keep);
        let two = Stale::Entry(InodeId(1), Box::from(&b"name"[..]));
        for stale in [&one, &two, &one] {
            invalidations.push(stale.clone());
        }
        assert_eq!(invalidations.next(), Some(one.clone()));
        invalidations.push(one.clone());
        assert_eq!(invalidations.next(), Some(two));
        assert_eq!(invalidations.next(), Some(one));
        invalidations.close();
        assert_eq!(invalidations.next(), None);
    }

    #[test]
    fn too_many_become_one_for_all_names() {
        let invalidations = Invalidations::default();
        for inode in 0..WAITING_MAX as u64 + 10 {
            invalidations.push(Stale::Inode(InodeId(inode), Pages::Keep));
        }
        let queue = invalidations.queue.lock();
        assert_eq!(queue.order.len(), WAITING_MAX + 1);
        assert_eq!(queue.order.back(), Some(&Stale::Names));
    }
}
