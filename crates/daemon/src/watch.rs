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
/// No process has this number: it is that of whoever wakes a waiting thread.
const WAKER: u64 = 0;

/// The processes that are watched. Those that come and go while a thread waits do not wake it.
#[derive(Debug)]
pub struct Watcher {
    processes: Mutex<Processes>,
    ends: OwnedFd,
    waker: OwnedFd,
}

/// Each has a number of its own, since a session's may be another's when the end of the one before is told.
#[derive(Debug, Default)]
struct Processes {
    watched: BTreeMap<SessionId, (u64, OwnedFd)>,
    last: u64,
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
        let number = processes.last + 1;
        epoll::add(&self.ends, &process, EventData::new_u64(number), EventFlags::IN)?;
        processes.last = number;
        processes.watched.insert(session, (number, process));
        Ok(())
    }

    /// Watches it no longer.
    pub fn remove(&self, session: SessionId) {
        let mut processes = self.processes.lock();
        if let Some((_, process)) = processes.watched.remove(&session) {
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
        let numbers: Vec<_> = events.iter().map(|event: &Event| event.data.u64()).collect();
        // Who is watched no longer has been ended otherwise.
        let mut processes = self.processes.lock();
        let is_told = |watched: &(&SessionId, &(u64, OwnedFd))| numbers.contains(&watched.1.0);
        let ended: Vec<_> = processes.watched.iter().filter(is_told).map(|(session, _)| *session).collect();
        for (_, process) in ended.iter().filter_map(|session| processes.watched.remove(session)) {
            let _ = epoll::delete(&self.ends, &process);
        }
        Ok(ended)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::identity::Process;

    fn start() -> (std::process::Child, OwnedFd) {
        let child = std::process::Command::new("/bin/sleep").arg("100").spawn().expect("a child");
        let (_, pidfd) = Process::find_open(child.id()).expect("its descriptor");
        (child, pidfd)
    }

    #[test]
    fn the_end_of_one_is_not_that_of_the_next_with_its_session() {
        let watcher = Watcher::new().expect("a watcher");
        let ((mut one, first), (mut two, second)) = (start(), start());
        watcher.add(SessionId(5), first).expect("watched");
        one.kill().and_then(|()| one.wait()).expect("ended");
        watcher.remove(SessionId(5));
        watcher.add(SessionId(5), second).expect("watched");
        watcher.wake();
        assert_eq!(watcher.wait().expect("woken"), []);
        two.kill().expect("killed");
        assert_eq!(watcher.wait().expect("woken by the end"), [SessionId(5)]);
        two.wait().expect("reaped");
    }

    #[test]
    fn the_end_of_a_process_is_told_once() {
        let watcher = Watcher::new().expect("a watcher");
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
