//! The connection to the kernel: `/dev/fuse`.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use ashlar_wire::BusyWait;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use crate::proto::{InHeader, WriteIn};

/// The most bytes that one READ or WRITE carries. A larger size no longer makes large transfers cheaper.
pub(crate) const TRANSFER_BYTES: usize = 1 << 20;
/// The largest request, and so the smallest buffer that the kernel accepts for reading one.
pub(crate) const REQUEST_BYTES: usize = TRANSFER_BYTES + 4096;
const _: () = assert!(REQUEST_BYTES >= TRANSFER_BYTES + size_of::<InHeader>() + size_of::<WriteIn>());

/// The open device. All threads that serve share one open file: a file for each takes an ioctl without a safe wrapper
/// (`FUSE_DEV_IOC_CLONE`), and showed no gain above the noise on two cores.
#[derive(Debug)]
pub(crate) struct FuseDevice(OwnedFd);

/// The kernel's answer to a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SendOutcome {
    /// The kernel has it.
    Taken,
    /// No process waits for it any more: the request was aborted.
    Unwanted,
}

impl FuseDevice {
    /// Opens the device, not yet connected to a mount.
    pub(crate) fn open() -> Result<Self, Errno> {
        rustix::fs::open("/dev/fuse", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).map(Self)
    }

    /// Makes reads of the device return at once if no request waits, so that [`FuseDevice::receive`] can watch.
    pub(crate) fn set_nonblocking(&self) -> Result<(), Errno> {
        let flags = rustix::fs::fcntl_getfl(&self.0)?;
        rustix::fs::fcntl_setfl(&self.0, flags | OFlags::NONBLOCK)
    }

    /// Waits for a request; returns `None` when the mount is gone. While it watches for one, it yields the core to any
    /// other thread: it may be bound to its client's core.
    pub(crate) fn receive(&self, buffer: &mut [u8], watch: &mut BusyWait) -> Result<Option<usize>, Errno> {
        watch.begin_wait(None);
        loop {
            match rustix::io::read(&self.0, &mut *buffer) {
                Ok(count) => {
                    watch.end_wait();
                    return Ok(Some(count));
                }
                Err(Errno::AGAIN) if watch.check_again() => rustix::thread::sched_yield(),
                Err(Errno::AGAIN) => self.sleep()?,
                // ENOENT: the request was interrupted before it could be read.
                Err(Errno::INTR | Errno::NOENT) => {}
                Err(Errno::NODEV | Errno::CONNABORTED) => return Ok(None),
                Err(errno) => return Err(errno),
            }
        }
    }

    /// Sleeps until there is a request, or the mount is gone.
    fn sleep(&self) -> Result<(), Errno> {
        let mut this = [PollFd::new(&self.0, PollFlags::IN)];
        match poll(&mut this, None) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(errno) => Err(errno),
        }
    }

    /// Whether a request waits to be received.
    pub(crate) fn has_request(&self) -> bool {
        let mut this = [PollFd::new(&self.0, PollFlags::IN)];
        poll(&mut this, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
    }

    /// Sends a reply.
    pub(crate) fn send(&self, reply: &[u8]) -> Result<SendOutcome, Errno> {
        loop {
            match rustix::io::write(&self.0, reply) {
                Ok(_) => return Ok(SendOutcome::Taken),
                Err(Errno::INTR) => {}
                Err(Errno::NOENT | Errno::NODEV | Errno::CONNABORTED) => return Ok(SendOutcome::Unwanted),
                Err(errno) => return Err(errno),
            }
        }
    }

    /// Returns another descriptor of the same open file.
    pub(crate) fn duplicate(&self) -> Result<OwnedFd, Errno> {
        rustix::io::fcntl_dupfd_cloexec(&self.0, 3)
    }
}

impl AsFd for FuseDevice {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
