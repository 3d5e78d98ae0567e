//! Signals that end the benchmark, as events to wait for beside others.
//!
//! So the benchmark removes everything before it ends.

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::low_level::pipe;

use crate::error::CliError;

/// Whether a signal that ends programs has come.
#[derive(Debug)]
pub struct Interrupt {
    /// Signals write a byte into the other end. Nothing reads it, so the first one counts for good.
    came: UnixStream,
}

impl Interrupt {
    /// Catches the signals from now on.
    pub fn catch() -> Result<Self, CliError> {
        let failed = || CliError::system("watching signals");
        let (came, end) = UnixStream::pair().map_err(failed())?;
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            pipe::register(signal, end.try_clone().map_err(failed())?).map_err(failed())?;
        }
        Ok(Self { came })
    }

    /// Fails if a signal came.
    pub fn check(&self) -> Result<(), CliError> {
        let mut events = [PollFd::new(&self.came, PollFlags::IN)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        match poll(&mut events, Some(&now)) {
            Ok(0) | Err(_) => Ok(()),
            Ok(_) => Err(CliError::Interrupted),
        }
    }

    /// Waits until some of the descriptors have something to read, or have ended; returns which ones. Fails if a signal
    /// comes first.
    pub fn wait_for(&self, descriptors: &[impl AsFd]) -> Result<Vec<bool>, CliError> {
        loop {
            self.check()?;
            let watched = descriptors.iter().map(|descriptor| PollFd::new(descriptor, PollFlags::IN));
            let mut events: Vec<_> = watched.chain([PollFd::new(&self.came, PollFlags::IN)]).collect();
            match poll(&mut events, None) {
                Ok(_) => {}
                Err(rustix::io::Errno::INTR) => continue,
                Err(error) => return Err(CliError::system("waiting for a worker")(error)),
            }
            let ready: Vec<_> = events[..descriptors.len()].iter().map(|event| !event.revents().is_empty()).collect();
            if ready.contains(&true) {
                return Ok(ready);
            }
        }
    }
}
