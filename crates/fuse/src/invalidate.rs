//! What this mount itself has its kernel forget, on a thread of its own.
//!
//! Three things need it. A lease may be lost between an operation and its reply: SharedFS had the kernel forget what it did
//! not have yet. An append may land elsewhere than the kernel thought, whose pages are then wrong. And a write past the kernel's
//! pages is answered only when no older page is left ([`Fills`]).
//!
//! What of it may wait for a request in flight goes by the helper, so that this process can be killed meanwhile.

use std::collections::{HashSet, VecDeque};
use std::os::fd::AsFd;

use ashlar_helper::Line;
use ashlar_types::InodeId;
use parking_lot::{Condvar, Mutex};

use crate::device::Device;
use crate::fills::Fills;
use crate::notify::{self, Pages};
use crate::route::Route;

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

/// What the thread does.
#[derive(Debug)]
enum Task {
    Forget(Stale),
    /// Drop all pages of an inode, and then send this reply.
    Answer(InodeId, Route, Box<[u8]>),
}

/// The queue in front of the thread. Putting something in never waits for the kernel.
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
    /// Has the kernel forget something, soon.
    pub(crate) fn push(&self, stale: Stale) {
        let mut queue = self.queue.lock();
        let stale = if queue.order.len() < WAITING_MAX { stale } else { Stale::Names };
        if queue.waiting.insert(stale.clone()) {
            queue.order.push_back(Task::Forget(stale));
            self.changed.notify_one();
        }
    }

    /// Has the kernel drop all pages of `inode`, and then have `reply`. There are at most as many of these as the kernel
    /// has requests in flight.
    pub(crate) fn answer_without_pages(&self, inode: InodeId, route: &Route, reply: &[u8]) {
        self.queue.lock().order.push_back(Task::Answer(inode, route.clone(), reply.into()));
        self.changed.notify_one();
    }

    /// Ends the thread.
    pub(crate) fn close(&self) {
        self.queue.lock().closed = true;
        self.changed.notify_one();
    }

    /// The thread: works the queue off until it's closed.
    pub(crate) fn run(&self, device: &Device, line: &Line, fills: &Fills) {
        while let Some(task) = self.next() {
            match task {
                Task::Forget(stale) => forget(device, line, &stale),
                Task::Answer(inode, route, reply) => {
                    let began = fills.begin_drop();
                    forget(device, line, &Stale::Inode(inode, Pages::ALL));
                    fills.end_drop(inode, began);
                    if let Err(errno) = route.send(device, &reply) {
                        tracing::error!(inode = inode.0, %errno, "the kernel took no answer to a write");
                    }
                }
            }
        }
    }

    /// Waits for the next; `None` once the queue is closed.
    fn next(&self) -> Option<Task> {
        let mut queue = self.queue.lock();
        loop {
            if queue.closed {
                return None;
            }
            if let Some(task) = queue.order.pop_front() {
                // It leaves the set before it's carried out: what becomes stale from here on needs another notification.
                if let Task::Forget(stale) = &task {
                    queue.waiting.remove(stale);
                }
                return Some(task);
            }
            self.changed.wait(&mut queue);
        }
    }
}

fn forget(device: &Device, line: &Line, stale: &Stale) {
    let device = device.as_fd();
    let result = match stale {
        Stale::Inode(inode, Pages::Keep) => notify::inval_inode(&device, *inode, Pages::Keep),
        Stale::Inode(inode, pages) => notify::inval_inode(&line.to(device), *inode, *pages),
        Stale::Entry(directory, name) => notify::inval_entry(&line.to(device), *directory, name),
        // A kernel without epochs forgets by itself when the validity that it was told runs out.
        Stale::Names => notify::inc_epoch(device).map(|_| ()),
    };
    if let Err(errno) = result {
        tracing::debug!(?stale, %errno, "the kernel took no notification");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn next(invalidations: &Invalidations) -> Option<Stale> {
        invalidations.next().map(|task| match task {
            Task::Forget(stale) => stale,
            Task::Answer(..) => panic!("{task:?}"),
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
