//! The kernel's list of sockets that are waited for.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::time::Timespec;

/// Events that one call returns, at most.
const EVENTS_MAX: usize = 64;

/// The kernel's list of sockets that are waited for. Each has a number, and never that of a socket closed before.
pub(super) struct Epoll(OwnedFd);

/// A socket that is ready.
#[derive(Clone, Copy)]
pub(super) struct ReadySocket {
    pub(super) token: u64,
    pub(super) is_writable: bool,
}

impl Epoll {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self(epoll::create(CreateFlags::CLOEXEC)?))
    }

    /// Adds a socket; closing it removes it.
    pub(super) fn add(&self, socket: impl AsFd, token: u64, waits_to_write: bool) -> io::Result<()> {
        Ok(epoll::add(&self.0, socket, EventData::new_u64(token), flags(waits_to_write))?)
    }

    pub(super) fn modify(&self, socket: impl AsFd, token: u64, waits_to_write: bool) -> io::Result<()> {
        Ok(epoll::modify(&self.0, socket, EventData::new_u64(token), flags(waits_to_write))?)
    }

    pub(super) fn remove(&self, socket: impl AsFd) -> io::Result<()> {
        Ok(epoll::delete(&self.0, socket)?)
    }

    /// Waits for sockets. A signal ends the wait, too.
    pub(super) fn wait(&self, timeout: Option<Duration>) -> Vec<ReadySocket> {
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        let mut events = Vec::with_capacity(EVENTS_MAX);
        // An error leaves the list empty; only a signal gives one.
        let _ = epoll::wait(&self.0, rustix::buffer::spare_capacity(&mut events), timeout.as_ref());
        let ready = |event: &epoll::Event| {
            // The structure is packed.
            let (data, flags) = (event.data, event.flags);
            let is_writable = flags.intersects(EventFlags::OUT | EventFlags::ERR | EventFlags::HUP);
            ReadySocket { token: data.u64(), is_writable }
        };
        events.iter().map(ready).collect()
    }
}

fn flags(waits_to_write: bool) -> EventFlags {
    if waits_to_write { EventFlags::IN | EventFlags::OUT } else { EventFlags::IN }
}
