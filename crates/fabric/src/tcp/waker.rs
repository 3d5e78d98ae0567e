//! How other threads reach the one that polls: it is woken, or given the addresses of a name.

use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use parking_lot::Mutex;
use rustix::event::{EventfdFlags, eventfd};

use crate::event::LinkId;

/// Names that are looked up at a time, at most: each takes a thread, which the system's resolver may hold for long.
const LOOKUPS_MAX: usize = 8;

/// How other threads reach the one that polls.
pub(super) struct Waker {
    pub(super) event: OwnedFd,
    is_woken: AtomicBool,
    lookups: AtomicUsize,
    found: Mutex<Vec<(LinkId, io::Result<Vec<SocketAddr>>)>>,
}

impl Waker {
    pub(super) fn new() -> io::Result<Self> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let (is_woken, lookups) = (AtomicBool::new(false), AtomicUsize::new(0));
        Ok(Self { event, is_woken, lookups, found: Mutex::default() })
    }

    /// Makes the polling thread return.
    pub(super) fn wake(&self) {
        self.is_woken.store(true, Ordering::Release);
        self.notify();
    }

    /// Makes the polling thread look for new events and deadlines.
    pub(super) fn notify(&self) {
        // A full counter wakes as well.
        let _ = rustix::io::write(&self.event, &1_u64.to_ne_bytes());
    }

    /// Takes notice of a wake-up: before the flags are read, so that none is lost.
    pub(super) fn clear(&self) {
        let _ = rustix::io::read(&self.event, &mut [0; 8]);
    }

    pub(super) fn take_woken(&self) -> bool {
        self.is_woken.swap(false, Ordering::AcqRel)
    }

    pub(super) fn take_found(&self) -> Vec<(LinkId, io::Result<Vec<SocketAddr>>)> {
        std::mem::take(&mut *self.found.lock())
    }

    /// Looks a name up in a thread of its own, since the system's resolver waits.
    pub(super) fn look_up(self: &Arc<Self>, link: LinkId, address: String) {
        let waker = Arc::clone(self);
        let run = move || {
            waker.add_found(link, address.to_socket_addrs().map(Iterator::collect));
            waker.lookups.fetch_sub(1, Ordering::AcqRel);
        };
        let begun = if self.lookups.fetch_add(1, Ordering::AcqRel) < LOOKUPS_MAX {
            std::thread::Builder::new().name("ashlar-lookup".into()).spawn(run).map(|_| ())
        } else {
            Err(io::Error::other("too many names are being looked up"))
        };
        if let Err(error) = begun {
            self.lookups.fetch_sub(1, Ordering::AcqRel);
            self.add_found(link, Err(error));
        }
    }

    fn add_found(&self, link: LinkId, addresses: io::Result<Vec<SocketAddr>>) {
        self.found.lock().push((link, addresses));
        self.notify();
    }
}
