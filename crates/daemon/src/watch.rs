//! Tells when sessions' processes end.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;

use ashlar_types::SessionId;
use parking_lot::Mutex;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::event::{EventfdFlags, eventfd};

/// The most ends that are told at once.
const ENDS_MAX: usize = 64;
/// No session has this number: it is that of whoever wakes a waiting thread.
const WAKER: u64 = 0;

/// The processes that are watched. Those that come and go while a thread waits do not wake it.
#[derive(Debug)]
pub struct Watcher {
    processes: Mutex<BTreeMap<SessionId, OwnedFd>>,
    ends: OwnedFd,
    waker: OwnedFd,
}

impl Watcher {
    /// Watches nobody yet.
    ///
    /// # Errors
    /// The system's, where there is no descriptor to be had.
    pub fn new() -> io::Result<Self> {
        let ends = epoll::create(CreateFlags::CLOEXEC)?;
        let waker = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        epoll::add(&ends, &waker, EventData::new_u64(WAKER), EventFlags::IN)?;
        Ok(Self { processes: Mutex::default(), ends, waker })
    }

    /// Watches a session's process.
    ///
    /// # Errors
    /// The system's, where it can watch no more.
    pub fn add(&self, session: SessionId, process: OwnedFd) -> io::Result<()> {
        let mut processes = self.processes.lock();
        epoll::add(&self.ends, &process, EventData::new_u64(session.0), EventFlags::IN)?;
        processes.insert(session, process);
        Ok(())
    }

    /// Watches it no longer.
    pub fn remove(&self, session: SessionId) {
        let mut processes = self.processes.lock();
        if let Some(process) = processes.remove(&session) {
            // It fails only for what is not watched.
            let _ = epoll::delete(&self.ends, &process);
        }
    }

    /// Makes a waiting [`Self::wait`] return, so that it may see that all is over.
    pub fn wake(&self) {
        // A counter that is full has woken the thread already.
        let _ = rustix::io::write(&self.waker, &1u64.to_ne_bytes());
    }

    /// Waits until processes end or it is woken; returns the sessions whose processes have ended, which are watched no longer.
    ///
    /// # Errors
    /// The system's.
    pub fn wait(&self) -> io::Result<Vec<SessionId>> {
        let mut events = Vec::with_capacity(ENDS_MAX);
        match epoll::wait(&self.ends, rustix::buffer::spare_capacity(&mut events), None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let mut count = [0; 8];
        let _ = rustix::io::read(&self.waker, &mut count);
        let ended = events.iter().map(|event: &Event| event.data.u64()).filter(|number| *number != WAKER);
        let ended: Vec<_> = ended.map(SessionId).collect();
        ended.iter().for_each(|session| self.remove(*session));
        Ok(ended)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::identity::Process;

    #[test]
    fn the_end_of_a_process_is_told_once() {
        let watcher = Watcher::new().expect("a watcher");
        let start = || {
            let child = std::process::Command::new("/bin/sleep").arg("100").spawn().expect("a child");
            let (_, pidfd) = Process::find_open(child.id()).expect("its descriptor");
            (child, pidfd)
        };
        let ((mut child, pidfd), (mut other, another)) = (start(), start());
        watcher.add(SessionId(5), pidfd).expect("watched");
        watcher.add(SessionId(6), another).expect("watched");
        watcher.remove(SessionId(6));
        other.kill().and_then(|()| other.wait()).expect("ended, and nobody is told");
        child.kill().expect("killed");
        assert_eq!(watcher.wait().expect("woken by the end"), [SessionId(5)]);
        watcher.wake();
        assert_eq!(watcher.wait().expect("woken"), []);
        child.wait().expect("reaped");
    }
}
