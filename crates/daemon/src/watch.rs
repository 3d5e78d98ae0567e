//! Tells when sessions' processes end.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use ashlar_types::SessionId;
use parking_lot::Mutex;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};

/// The processes that are watched.
#[derive(Debug)]
pub struct Watcher {
    processes: Mutex<BTreeMap<SessionId, Arc<OwnedFd>>>,
    changed: OwnedFd,
}

impl Watcher {
    /// Watches nobody yet.
    ///
    /// # Errors
    /// The system's, where there is no descriptor to be had.
    pub fn new() -> io::Result<Self> {
        let changed = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { processes: Mutex::default(), changed })
    }

    /// Watches a session's process.
    pub fn add(&self, session: SessionId, process: OwnedFd) {
        self.processes.lock().insert(session, Arc::new(process));
        self.wake();
    }

    /// Watches it no longer.
    pub fn remove(&self, session: SessionId) {
        if self.processes.lock().remove(&session).is_some() {
            self.wake();
        }
    }

    /// Makes a waiting [`Self::wait`] return, so that it may see that all is over.
    pub fn wake(&self) {
        // A counter that is full has woken the thread already.
        let _ = rustix::io::write(&self.changed, &1u64.to_ne_bytes());
    }

    /// Waits until processes end or the set changes; returns the sessions whose processes have ended, which are watched
    /// no longer.
    ///
    /// # Errors
    /// The system's.
    pub fn wait(&self) -> io::Result<Vec<SessionId>> {
        let watched: Vec<_> = self.processes.lock().iter().map(|(&id, fd)| (id, Arc::clone(fd))).collect();
        let mut fds = vec![PollFd::new(&self.changed, PollFlags::IN)];
        fds.extend(watched.iter().map(|(_, fd)| PollFd::new(&**fd, PollFlags::IN)));
        match poll(&mut fds, None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        let mut count = [0; 8];
        let _ = rustix::io::read(&self.changed, &mut count);
        let ended: Vec<_> =
            watched.iter().zip(&ready[1..]).filter(|(_, ready)| **ready).map(|((id, _), _)| *id).collect();
        let mut processes = self.processes.lock();
        for session in &ended {
            processes.remove(session);
        }
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
        let mut child = std::process::Command::new("/bin/sleep").arg("100").spawn().expect("a child");
        let (_, pidfd) = Process::find_open(child.id()).expect("its descriptor");
        watcher.add(SessionId(5), pidfd);
        assert_eq!(watcher.wait().expect("woken by the change"), []);
        child.kill().expect("killed");
        assert_eq!(watcher.wait().expect("woken by the end"), [SessionId(5)]);
        watcher.wake();
        assert_eq!(watcher.wait().expect("woken"), []);
        child.wait().expect("reaped");
    }
}
