//! Tasks that may wait for the kernel, on a thread of their own.
//!
//! Four cases need this thread:
//!
//! - A lease may be lost between an operation and its reply. SharedFS then made the kernel forget an answer that it did
//!   not have yet.
//! - An append may go to another offset than the kernel expected. The kernel's pages are then wrong.
//! - A write past the kernel's pages is answered only when no older page is left ([`Fills`](crate::fills::Fills)).
//! - A hole is named only when the kernel has written back its pages of it
//!   ([`MappableFiles`](crate::mappable::MappableFiles)).
//!
//! Notifications that may wait for a request in flight go by the helper, so that this process can be killed meanwhile.

use std::collections::{HashSet, VecDeque};
use std::os::fd::AsFd;

use ashlar_libfs::Seek;
use ashlar_types::InodeId;
use parking_lot::{Condvar, Mutex};

use crate::file_system::FileSystem;
use crate::notify::{self, Pages};
use crate::proto::OffsetOut;
use crate::reply::Reply;
use crate::route::Route;
use crate::server::Server;

/// The most notifications that wait. At most one arises for a request in flight, save for listings, so this is a
/// hundred large listings. If more arise, all names are invalidated at once instead.
const WAITING_MAX: usize = 65_536;

/// Something that the kernel is to forget.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Stale {
    /// Attributes of an inode, and some of its pages.
    Inode(InodeId, Pages),
    /// A name.
    Entry(InodeId, Box<[u8]>),
    /// All names.
    Names,
}

/// A task of the thread.
#[derive(Debug)]
pub(crate) enum Task {
    /// Make the kernel forget something.
    Forget(Stale),
    /// Drop all pages of an inode, and then send this reply.
    Answer(InodeId, Route, Box<[u8]>),
    /// Have pages written back, and then answer LSEEK.
    Seek(SeekAsked),
}

/// A request for data or a hole of a file whose pages may be dirty.
#[derive(Debug)]
pub(crate) struct SeekAsked {
    pub(crate) inode: InodeId,
    pub(crate) what: Seek,
    pub(crate) offset: u64,
    /// The request's number.
    pub(crate) unique: u64,
    pub(crate) route: Route,
}

/// The queue of the thread. Adding a task never waits for the kernel.
#[derive(Debug, Default)]
pub(crate) struct Invalidations {
    queue: Mutex<Queue>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Queue {
    order: VecDeque<Task>,
    waiting: HashSet<Stale>,
    closed: bool,
}

impl Invalidations {
    /// Makes the kernel forget something, soon.
    pub(crate) fn push(&self, stale: Stale) {
        let mut queue = self.queue.lock();
        let stale = if queue.order.len() < WAITING_MAX { stale } else { Stale::Names };
        if queue.waiting.insert(stale.clone()) {
            queue.order.push_back(Task::Forget(stale));
            self.changed.notify_one();
        }
    }

    /// Makes the kernel drop all pages of `inode`, and then sends `reply`. At most as many of these tasks exist as the
    /// kernel has requests in flight.
    pub(crate) fn answer_without_pages(&self, inode: InodeId, route: &Route, reply: &[u8]) {
        self.queue.lock().order.push_back(Task::Answer(inode, route.clone(), reply.into()));
        self.changed.notify_one();
    }

    /// Answers LSEEK when the kernel has written pages back. At most as many of these tasks exist as the kernel has
    /// requests in flight.
    pub(crate) fn answer_seek(&self, asked: SeekAsked) {
        self.queue.lock().order.push_back(Task::Seek(asked));
        self.changed.notify_one();
    }

    /// Ends the thread.
    pub(crate) fn close(&self) {
        self.queue.lock().closed = true;
        self.changed.notify_one();
    }

    /// Carries out the tasks of the queue until it is closed.
    pub(crate) fn run(&self, mut carry_out: impl FnMut(Task)) {
        while let Some(task) = self.next() {
            carry_out(task);
        }
    }

    /// Waits for the next task; returns `None` once the queue is closed.
    fn next(&self) -> Option<Task> {
        let mut queue = self.queue.lock();
        loop {
            if queue.closed {
                return None;
            }
            if let Some(task) = queue.order.pop_front() {
                // It leaves the set before it is carried out: an answer that becomes stale from here on needs another
                // notification.
                if let Task::Forget(stale) = &task {
                    queue.waiting.remove(stale);
                }
                return Some(task);
            }
            self.changed.wait(&mut queue);
        }
    }
}

impl<F: FileSystem> Server<F> {
    /// Carries out a task that the thread has taken from the queue.
    pub(crate) fn carry_out_task(&self, task: Task) {
        match task {
            Task::Forget(stale) => self.forget_waiting(&stale),
            Task::Answer(inode, route, reply) => {
                let began = self.fills.begin_drop();
                self.forget_waiting(&Stale::Inode(inode, Pages::ALL));
                self.fills.end_drop(inode, began);
                self.answer_by(&route, inode, &reply);
            }
            Task::Seek(SeekAsked { inode, what, offset, unique, route }) => {
                let mut reply = Reply::new(size_of::<OffsetOut>());
                let found = self.seek_written_back(inode, what, offset);
                let result = found.and_then(|offset| reply.structure(&OffsetOut { offset }));
                self.answer_by(&route, inode, reply.seal(unique, result));
            }
        }
    }

    fn answer_by(&self, route: &Route, inode: InodeId, reply: &[u8]) {
        if let Err(errno) = route.send(&self.device, reply) {
            tracing::error!(inode = inode.0, %errno, "the kernel took no answer that waited for it");
        }
    }

    /// Makes the kernel forget something, and waits until it has.
    pub(crate) fn forget_waiting(&self, stale: &Stale) {
        let (device, line) = (self.device.as_fd(), &self.forgetting);
        let result = match stale {
            Stale::Inode(inode, Pages::Keep) => notify::inval_inode(&device, *inode, Pages::Keep),
            Stale::Inode(inode, pages) => notify::inval_inode(&line.to(device), *inode, *pages),
            Stale::Entry(directory, name) => notify::inval_entry(&line.to(device), *directory, name),
            // A kernel without epochs forgets names by itself when their validity ends.
            Stale::Names => notify::inc_epoch(device).map(|_| ()),
        };
        if let Err(errno) = result {
            tracing::debug!(?stale, %errno, "the kernel took no notification");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn next(invalidations: &Invalidations) -> Option<Stale> {
        invalidations.next().map(|task| match task {
            Task::Forget(stale) => stale,
            Task::Answer(..) | Task::Seek(_) => panic!("{task:?}"),
        })
    }

    #[test]
    fn the_same_thing_waits_only_once() {
        let invalidations = Invalidations::default();
        let one = Stale::Inode(InodeId(20), Pages::Keep);
        let two = Stale::Entry(InodeId(1), Box::from(&b"name"[..]));
        for stale in [&one, &two, &one] {
            invalidations.push(stale.clone());
        }
        assert_eq!(next(&invalidations), Some(one.clone()));
        invalidations.push(one.clone());
        assert_eq!(next(&invalidations), Some(two));
        assert_eq!(next(&invalidations), Some(one));
        invalidations.close();
        assert_eq!(next(&invalidations), None);
    }

    #[test]
    fn too_many_become_one_for_all_names() {
        let invalidations = Invalidations::default();
        for inode in 0..WAITING_MAX as u64 + 10 {
            invalidations.push(Stale::Inode(InodeId(inode), Pages::Keep));
        }
        let queue = invalidations.queue.lock();
        assert_eq!(queue.order.len(), WAITING_MAX + 1);
        assert!(matches!(queue.order.back(), Some(Task::Forget(Stale::Names))));
    }
}
