//! The open connections, and how many a user or a process may have.

use std::collections::BTreeMap;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ashlar_node::sessions::admission::has_room;
use ashlar_wire::Connection;
use parking_lot::{Condvar, Mutex};

/// The most connections at once, of one process, and of one ordinary user: each has a thread.
///
/// A process keeps a few, and one for each thread that waits for a lock or a commit. Ordinary users leave some to root.
const CONNECTIONS_MAX: usize = 2048;
const CONNECTIONS_OF_PROCESS_MAX: usize = 256;
const CONNECTIONS_OF_USER_MAX: usize = 512;
const CONNECTIONS_OF_ROOT: usize = 512;
/// How many threads wait for a connection, if the system has threads.
pub const ACCEPTORS: std::ops::RangeInclusive<usize> = 2..=4;
/// How long connections may take to end when SharedFS ends.
const PATIENCE: Duration = Duration::from_secs(2);

/// The process at the other end of a connection, when it connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectedProcess {
    /// Its number.
    pub pid: i32,
    /// Its effective user.
    pub uid: u32,
}

impl ConnectedProcess {
    /// Returns the process that connected a socket; `None` if the kernel does not say.
    pub fn of(connection: &Connection) -> Option<Self> {
        let peer = rustix::net::sockopt::socket_peercred(connection.socket()).ok()?;
        Some(Self { pid: peer.pid.as_raw_nonzero().get(), uid: peer.uid.as_raw() })
    }
}

/// The open connections.
#[derive(Debug, Default)]
pub struct Connections {
    open: Mutex<OpenConnections>,
    closed: Condvar,
}

#[derive(Debug, Default)]
struct OpenConnections {
    /// How many there were.
    count: u64,
    sockets: BTreeMap<u64, (ConnectedProcess, UnixStream)>,
    /// Threads that wait for a connection.
    acceptors: usize,
}

/// A connection that counts as open until this is dropped.
#[derive(Debug)]
pub struct RegisteredConnection {
    connections: Arc<Connections>,
    number: u64,
}

impl Drop for RegisteredConnection {
    fn drop(&mut self) {
        self.connections.open.lock().sockets.remove(&self.number);
        self.connections.closed.notify_all();
    }
}

impl Connections {
    /// Registers a connection; returns `None` if there are too many.
    pub fn register(self: &Arc<Self>, connection: &Connection, peer: ConnectedProcess) -> Option<RegisteredConnection> {
        let socket = connection.socket().try_clone().ok()?;
        let mut open = self.open.lock();
        if !may_connect(open.sockets.values().map(|(other, _)| *other), peer) {
            return None;
        }
        open.count += 1;
        let number = open.count;
        open.sockets.insert(number, (peer, socket));
        Some(RegisteredConnection { connections: Arc::clone(self), number })
    }

    /// Returns how many connections there ever were.
    pub fn count(&self) -> u64 {
        self.open.lock().count
    }

    /// Records that a thread is about to wait for a connection.
    ///
    /// Returns `false` if enough threads do.
    pub fn begin_waiting(&self) -> bool {
        let mut open = self.open.lock();
        let is_wanted = open.acceptors < *ACCEPTORS.end();
        open.acceptors += usize::from(is_wanted);
        is_wanted
    }

    /// Records that a thread no longer waits; returns how many others do.
    pub fn end_waiting(&self) -> usize {
        let mut open = self.open.lock();
        open.acceptors -= 1;
        open.acceptors
    }

    /// Ends all connections: requests under way are answered, and nothing more is read.
    pub fn end_all(&self) {
        let mut open = self.open.lock();
        for (_, socket) in open.sockets.values() {
            // A connection that is closed already needs no end.
            let _ = socket.shutdown(std::net::Shutdown::Read);
        }
        let deadline = Instant::now() + PATIENCE;
        while !open.sockets.is_empty() && !self.closed.wait_until(&mut open, deadline).timed_out() {}
    }
}

/// Returns whether a process may have one more connection beside the others.
fn may_connect(others: impl Iterator<Item = ConnectedProcess>, peer: ConnectedProcess) -> bool {
    let (mut all, mut ordinary, mut of_user, mut of_process) = (0, 0, 0, 0);
    for other in others {
        all += 1;
        ordinary += usize::from(other.uid != 0);
        of_user += usize::from(other.uid == peer.uid);
        of_process += usize::from(other == peer);
    }
    let left = CONNECTIONS_MAX.saturating_sub(all);
    let free = left.min((CONNECTIONS_MAX - CONNECTIONS_OF_ROOT).saturating_sub(ordinary));
    of_process < CONNECTIONS_OF_PROCESS_MAX
        && if peer.uid == 0 { left > 0 } else { has_room(of_user, CONNECTIONS_OF_USER_MAX, free) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Connects as processes of a user do that take all they can.
    fn take_all(open: &mut Vec<ConnectedProcess>, uid: u32, pids: std::ops::Range<i32>) -> usize {
        let before = open.len();
        for pid in pids {
            let peer = ConnectedProcess { pid, uid };
            while may_connect(open.iter().copied(), peer) {
                open.push(peer);
            }
        }
        open.len() - before
    }

    #[test]
    fn user_cannot_take_connections_of_others() {
        let mut open = Vec::new();
        assert_eq!(take_all(&mut open, 7, 0..1), CONNECTIONS_OF_PROCESS_MAX);
        assert_eq!(take_all(&mut open, 7, 1..20), CONNECTIONS_OF_USER_MAX - CONNECTIONS_OF_PROCESS_MAX);
        for uid in 8..14 {
            assert!(take_all(&mut open, uid, 20..40) >= 8);
        }
        assert!(take_all(&mut open, 0, 40..60) >= CONNECTIONS_OF_ROOT);
    }
}
