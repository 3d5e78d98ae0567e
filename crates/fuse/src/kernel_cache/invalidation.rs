//! Tasks that may wait for the kernel, on a thread of their own.
//!
//! Four cases need this thread:
//!
//! - A lease may be lost between an operation and its reply. SharedFS then made the kernel forget an answer that it did
//!   not have yet.
//! - An append may go to another offset than the kernel expected. The kernel's pages are then wrong.
//! - A write past the kernel's pages is answered only when no older page is left
//!   ([`PageFills`](crate::kernel_cache::page_fills::PageFills)).
//! - A hole is named only when the kernel has written back its pages of it
//!   ([`MappableFiles`](crate::kernel_cache::mappable::MappableFiles)).
//!
//! Notifications that may wait for a request in flight go by the helper, so that this process can be killed meanwhile.

use std::collections::{HashSet, VecDeque};

use ashlar_libfs::Seek;
use ashlar_types::InodeId;
use parking_lot::{Condvar, Mutex};

use crate::connection::notify::Pages;
use crate::connection::reply_route::ReplyRoute;

/// The most notifications that wait. At most one arises for a request in flight, save for listings, so this is a
/// hundred large listings. If more arise, all names are invalidated at once instead.
const WAITING_MAX: usize = 65_536;

/// Something that the kernel is to forget.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum StaleItem {
    /// Attributes of an inode, and some of its pages.
    Inode(InodeId, Pages),
    /// A name.
    Entry(InodeId, Box<[u8]>),
    /// All names.
    Names,
}

/// A task of the thread.
#[derive(Debug)]
pub(crate) enum KernelTask {
    /// Make the kernel forget something.
    Forget(StaleItem),
    /// Drop all pages of an inode, and then send this reply.
    DropPagesAndSend(InodeId, ReplyRoute, Box<[u8]>),
    /// Have pages written back, and then answer LSEEK.
    WriteBackAndSeek(SeekRequest),
}

/// A request for data or a hole of a file whose pages may be dirty.
#[derive(Debug)]
pub(crate) struct SeekRequest {
    pub(crate) inode: InodeId,
    pub(crate) what: Seek,
    pub(crate) offset: u64,
    /// The request's number.
    pub(crate) unique: u64,
    pub(crate) route: ReplyRoute,
}

/// The queue of the thread. Adding a task never waits for the kernel.
#[derive(Debug, Default)]
pub(crate) struct Invalidations {
    queue: Mutex<Queue>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Queue {
    order: VecDeque<KernelTask>,
    waiting: HashSet<StaleItem>,
    closed: bool,
}

impl Invalidations {
    /// Makes the kernel forget something, soon.
    pub(crate) fn push_stale(&self, stale: StaleItem) {
        let mut queue = self.queue.lock();
        let stale = if queue.order.len() < WAITING_MAX { stale } else { StaleItem::Names };
        if queue.waiting.insert(stale.clone()) {
            queue.order.push_back(KernelTask::Forget(stale));
            self.changed.notify_one();
        }
    }

    /// Makes the kernel drop all pages of `inode`, and then sends `reply`. At most as many of these tasks exist as the
    /// kernel has requests in flight.
    pub(crate) fn answer_without_pages(&self, inode: InodeId, route: &ReplyRoute, reply: &[u8]) {
        self.queue.lock().order.push_back(KernelTask::DropPagesAndSend(inode, route.clone(), reply.into()));
        self.changed.notify_one();
    }

    /// Answers LSEEK when the kernel has written pages back. At most as many of these tasks exist as the kernel has
    /// requests in flight.
    pub(crate) fn answer_seek(&self, asked: SeekRequest) {
        self.queue.lock().order.push_back(KernelTask::WriteBackAndSeek(asked));
        self.changed.notify_one();
    }

    /// Ends the thread.
    pub(crate) fn close(&self) {
        self.queue.lock().closed = true;
        self.changed.notify_one();
    }

    /// Carries out the tasks of the queue until it is closed.
    pub(crate) fn run_tasks(&self, mut carry_out: impl FnMut(KernelTask)) {
        while let Some(task) = self.next_task() {
            carry_out(task);
        }
    }

    /// Waits for the next task; returns `None` once the queue is closed.
    fn next_task(&self) -> Option<KernelTask> {
        let mut queue = self.queue.lock();
        loop {
            if queue.closed {
                return None;
            }
            if let Some(task) = queue.order.pop_front() {
                // It leaves the set before it is carried out: an answer that becomes stale from here on needs another
                // notification.
                if let KernelTask::Forget(stale) = &task {
                    queue.waiting.remove(stale);
                }
                return Some(task);
            }
            self.changed.wait(&mut queue);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn next_stale(invalidations: &Invalidations) -> Option<StaleItem> {
        invalidations.next_task().map(|task| match task {
            KernelTask::Forget(stale) => stale,
            KernelTask::DropPagesAndSend(..) | KernelTask::WriteBackAndSeek(_) => panic!("{task:?}"),
        })
    }

    #[test]
    fn same_notification_waits_once() {
        let invalidations = Invalidations::default();
        let one = StaleItem::Inode(InodeId(20), Pages::Keep);
        let two = StaleItem::Entry(InodeId(1), Box::from(&b"name"[..]));
        for stale in [&one, &two, &one] {
            invalidations.push_stale(stale.clone());
        }
        assert_eq!(next_stale(&invalidations), Some(one.clone()));
        invalidations.push_stale(one.clone());
        assert_eq!(next_stale(&invalidations), Some(two));
        assert_eq!(next_stale(&invalidations), Some(one));
        invalidations.close();
        assert_eq!(next_stale(&invalidations), None);
    }

    #[test]
    fn too_many_notifications_become_one_for_all_names() {
        let invalidations = Invalidations::default();
        for inode in 0..WAITING_MAX as u64 + 10 {
            invalidations.push_stale(StaleItem::Inode(InodeId(inode), Pages::Keep));
        }
        let queue = invalidations.queue.lock();
        assert_eq!(queue.order.len(), WAITING_MAX + 1);
        assert!(matches!(queue.order.back(), Some(KernelTask::Forget(StaleItem::Names))));
    }
}
