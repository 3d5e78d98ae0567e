//! The connection to the kernel: `/dev/fuse`.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use crate::proto::{InHeader, WriteIn};

/// The most bytes that one READ or WRITE carries. More than this no longer makes large transfers cheaper.
pub(crate) const TRANSFER_BYTES: usize = 1 << 20;
/// The largest request, and so the smallest buffer that the kernel accepts for reading one.
pub(crate) const REQUEST_BYTES: usize = TRANSFER_BYTES + 4096;
const _: () = assert!(REQUEST_BYTES >= TRANSFER_BYTES + size_of::<InHeader>() + size_of::<WriteIn>());

/// How long the next request is watched out for, before the thread sleeps: about twice what it takes to wake a program on
/// a sleeping core of a virtual machine, so that it covers the program's next step.
const WATCH: Duration = Duration::from_micros(50);
/// After so many requests in a row that came later than that, nothing is watched until one comes sooner.
const MISSES_MAX: u32 = 4;

/// The device, open. All threads that serve share one open file: a file for each takes an ioctl without a safe wrapper
/// (`FUSE_DEV_IOC_CLONE`), and showed no gain above the noise on two cores.
#[derive(Debug)]
pub(crate) struct Device(OwnedFd);

/// What became of a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sent {
    /// The kernel has it.
    Taken,
    /// Nobody waits for it any more: the request was aborted.
    Unwanted,
}

/// Looks out for the next request before going to sleep: a program that makes one request makes another one soon, and waking
/// a sleeping thread on a sleeping core costs several times what the request does. Where the next one keeps coming later,
/// nothing is watched.
#[derive(Debug, Default)]
pub(crate) struct Watch {
    since: Option<Instant>,
    /// How many requests in a row came too late.
    missed: u32,
}

impl Watch {
    /// Watches for a short time, if that has been worthwhile.
    fn watch(&mut self, is_there: impl Fn() -> bool) {
        let since = Instant::now();
        self.since = Some(since);
        if self.missed >= MISSES_MAX {
            return;
        }
        // Other threads that want the core get it: what is spent here is only what nobody else needs.
        while !is_there() && since.elapsed() < WATCH {
            std::thread::yield_now();
        }
    }

    /// A request has come.
    fn end(&mut self) {
        let in_time = self.since.take().is_some_and(|since| since.elapsed() < WATCH);
        self.missed = if in_time { 0 } else { self.missed.saturating_add(1) };
    }
}

impl Device {
    /// Opens the device, not yet connected to a mount.
    pub(crate) fn open() -> Result<Self, Errno> {
        rustix::fs::open("/dev/fuse", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).map(Self)
    }

    /// Waits for a request; `None` when the mount is gone. One thread at a time.
    pub(crate) fn receive(&self, buffer: &mut [u8], watch: &mut Watch) -> Result<Option<usize>, Errno> {
        watch.watch(|| self.has_request());
        loop {
            match rustix::io::read(&self.0, &mut *buffer) {
                Ok(count) => {
                    watch.end();
                    return Ok(Some(count));
                }
                // ENOENT: the request was interrupted before it could be read.
                Err(Errno::INTR | Errno::AGAIN | Errno::NOENT) => {}
                Err(Errno::NODEV | Errno::CONNABORTED) => return Ok(None),
                Err(errno) => return Err(errno),
            }
        }
    }

    /// Whether a request waits to be received.
    pub(crate) fn has_request(&self) -> bool {
        let mut this = [PollFd::new(&self.0, PollFlags::IN)];
        poll(&mut this, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
    }

    /// Sends a reply.
    pub(crate) fn send(&self, reply: &[u8]) -> Result<Sent, Errno> {
        loop {
            match rustix::io::write(&self.0, reply) {
                Ok(_) => return Ok(Sent::Taken),
                Err(Errno::INTR) => {}
                Err(Errno::NOENT | Errno::NODEV | Errno::CONNABORTED) => return Ok(Sent::Unwanted),
                Err(errno) => return Err(errno),
            }
        }
    }

    /// Another descriptor of the same open file.
    pub(crate) fn duplicate(&self) -> Result<OwnedFd, Errno> {
        rustix::io::fcntl_dupfd_cloexec(&self.0, 3)
    }
}

impl AsFd for Device {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn watching_ends_with_a_request_or_in_time() {
        let looks = Cell::new(0);
        let mut watch = Watch::default();
        watch.watch(|| looks.replace(looks.get() + 1) == 1);
        assert_eq!(looks.get(), 2);
        let started = Instant::now();
        watch.watch(|| false);
        assert!(started.elapsed() >= WATCH);
    }

    #[test]
    fn nothing_is_watched_where_requests_come_late() {
        let mut watch = Watch::default();
        for _ in 0..MISSES_MAX {
            watch.since = None;
            watch.end();
        }
        watch.watch(|| panic!("it has not been worthwhile"));
        watch.since = Some(Instant::now() + WATCH);
        watch.end();
        let looks = Cell::new(0);
        watch.watch(|| looks.replace(1) == 1);
        assert_eq!(looks.get(), 1, "one came soon");
    }
}
