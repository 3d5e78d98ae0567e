//! Reports the ends of sessions' processes.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;

use ashlar_types::SessionId;
use parking_lot::Mutex;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::event::{EventfdFlags, eventfd};

/// The most ends that are reported at once.
const ENDS_MAX: usize = 64;
/// The number of the descriptor that wakes a waiting thread. No process has it.
const WAKER: u64 = 0;

/// The watched processes. Adding and removing one does not wake the waiting thread.
#[derive(Debug)]
pub struct ProcessWatcher {
    processes: Mutex<WatchedProcesses>,
    ends: OwnedFd,
    waker: OwnedFd,
}

/// The watched processes, each with a number of its own.
///
/// By the time that an end is reported, its session's number may be another's.
#[derive(Debug, Default)]
struct WatchedProcesses {
    watched: BTreeMap<SessionId, (u64, OwnedFd)>,
    last: u64,
}

impl ProcessWatcher {
    /// Returns a watcher without processes.
    ///
    /// # Errors
    /// The system's, if there is no descriptor left.
    pub fn new() -> io::Result<Self> {
        let ends = epoll::create(CreateFlags::CLOEXEC)?;
        let waker = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        epoll::add(&ends, &waker, EventData::new_u64(WAKER), EventFlags::IN)?;
        Ok(Self { processes: Mutex::default(), ends, waker })
    }

    /// Watches a session's process.
    ///
    /// # Errors
    /// The system's, if it can watch no more.
    pub fn add(&self, session: SessionId, process: OwnedFd) -> io::Result<()> {
        let mut processes = self.processes.lock();
        let number = processes.last + 1;
        epoll::add(&self.ends, &process, EventData::new_u64(number), EventFlags::IN)?;
        processes.last = number;
        processes.watched.insert(session, (number, process));
        Ok(())
    }

    /// Stops watching a session's process.
    pub fn remove(&self, session: SessionId) {
        let mut processes = self.processes.lock();
        if let Some((_, process)) = processes.watched.remove(&session) {
            // It fails only if the process is not watched.
            let _ = epoll::delete(&self.ends, &process);
        }
    }

    /// Makes a waiting [`Self::wait`] return.
    ///
    /// So its thread sees the end of SharedFS.
    pub fn wake(&self) {
        // A counter that is full has woken the thread already.
        let _ = rustix::io::write(&self.waker, &1u64.to_ne_bytes());
    }

    /// Waits for the ends of processes, and returns their sessions.
    ///
    /// [`Self::wake`] ends the wait too. Those are watched no longer.
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
        // Another thread has ended a session that is watched no longer.
        let mut processes = self.processes.lock();
        let has_ended = |watched: &(&SessionId, &(u64, OwnedFd))| numbers.contains(&watched.1.0);
        let ended: Vec<_> = processes.watched.iter().filter(has_ended).map(|(session, _)| *session).collect();
        for (_, process) in ended.iter().filter_map(|session| processes.watched.remove(session)) {
            let _ = epoll::delete(&self.ends, &process);
        }
        Ok(ended)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::find_open;

    fn start() -> (std::process::Child, OwnedFd) {
        let child = std::process::Command::new("/bin/sleep").arg("100").spawn().expect("a child");
        let (_, pidfd) = find_open(child.id()).expect("its descriptor");
        (child, pidfd)
    }

    #[test]
    fn process_end_is_not_reported_for_reused_session() {
        let watcher = ProcessWatcher::new().expect("a watcher");
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
    fn process_end_is_reported_once() {
        let watcher = ProcessWatcher::new().expect("a watcher");
        let ((mut child, pidfd), (mut other, another)) = (start(), start());
        watcher.add(SessionId(5), pidfd).expect("watched");
        watcher.add(SessionId(6), another).expect("watched");
        watcher.remove(SessionId(6));
        other.kill().and_then(|()| other.wait()).expect("ended, and not reported");
        child.kill().expect("killed");
        assert_eq!(watcher.wait().expect("woken by the end"), [SessionId(5)]);
        watcher.wake();
        assert_eq!(watcher.wait().expect("woken"), []);
        child.wait().expect("reaped");
    }
}
