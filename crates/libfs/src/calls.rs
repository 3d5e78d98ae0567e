//! Calls to SharedFS: a pool of connections, and patience while SharedFS restarts.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ashlar_types::Errno;
use ashlar_wire::{Connection, Hello, PROTOCOL_VERSION, Peer, Reply, Request, SessionKind, Welcome, WireError};
use rustix_futex_sync::Mutex;

use crate::api::{ConnectError, Options};

/// Idle connections that are kept. More threads than this may call at once; they open and close their own.
const IDLE_MAX: usize = 8;
/// How long to wait before asking again whether SharedFS is back.
const RETRY: Duration = Duration::from_millis(5);

/// Locks that the session holds, to be asked for again where SharedFS has forgotten them.
pub(crate) trait Reclaim: Send + Sync {
    /// The requests that bring a new SharedFS up to date.
    fn requests(&self) -> Vec<Request>;
}

#[derive(Debug)]
struct Pool {
    idle: Vec<Connection>,
    /// Counts resumptions, so that a thread whose connection broke knows whether another has resumed already.
    era: u64,
}

/// A mount as SharedFS is told of it: the request, and the kernel's device that goes with it.
type Registration = (Request, OwnedFd);

/// The session's line to SharedFS.
#[derive(Debug)]
pub(crate) struct Calls {
    socket: PathBuf,
    kind: SessionKind,
    label: String,
    patience: Duration,
    descriptors_from: i32,
    peer: Peer,
    pool: Mutex<Pool>,
    resuming: Mutex<()>,
    mount: Mutex<Option<Arc<Registration>>>,
}

impl Calls {
    /// Opens a session; returns what SharedFS said, and the descriptors that came with it.
    pub(crate) fn open(options: &Options) -> Result<(Self, Welcome, Vec<OwnedFd>), ConnectError> {
        let no_daemon = |reason: String| ConnectError::NoDaemon { path: options.socket.clone(), reason };
        let connection = Connection::connect_above(&options.socket, options.descriptors_from);
        let mut connection = connection.map_err(|error| no_daemon(error.to_string()))?;
        let hello = Hello { version: PROTOCOL_VERSION, kind: options.kind, resume: None, label: options.label.clone() };
        let answer = connection.call(&Request::Hello(hello), &[]).map_err(|error| no_daemon(error.to_string()))?;
        let (welcome, descriptors) = match answer {
            (Reply::Welcome(welcome), descriptors) => (*welcome, descriptors),
            (Reply::Refused(reason), _) => return Err(ConnectError::Refused(reason)),
            (Reply::Error(errno), _) => return Err(ConnectError::Refused(errno.to_string())),
            _ => return Err(ConnectError::Refused("it answered something else".into())),
        };
        let calls = Self {
            socket: options.socket.clone(),
            kind: options.kind,
            label: options.label.clone(),
            patience: Duration::from_millis(options.patience_ms),
            descriptors_from: options.descriptors_from,
            peer: welcome.peer,
            pool: Mutex::new(Pool { idle: vec![connection], era: 0 }),
            resuming: Mutex::new(()),
            mount: Mutex::new(None),
        };
        Ok((calls, welcome, descriptors))
    }

    /// Keeps the mount's device and its number, and tells SharedFS of them.
    pub(crate) fn register_mount(&self, device: OwnedFd, number: u64, reclaim: &dyn Reclaim) -> Result<(), Errno> {
        let mount = Arc::new((Request::RegisterMount { device: number }, device));
        *self.mount.lock() = Some(Arc::clone(&mount));
        self.call_with(&mount.0, &[mount.1.as_fd()], reclaim).map(drop)
    }

    /// Calls SharedFS, and waits for it while it restarts.
    pub(crate) fn call(&self, request: &Request, reclaim: &dyn Reclaim) -> Result<Reply, Errno> {
        self.call_with(request, &[], reclaim).map(|(reply, _)| reply)
    }

    /// As [`Self::call`], with descriptors that go with the request, and those that come back.
    pub(crate) fn call_with(
        &self,
        request: &Request,
        descriptors: &[BorrowedFd<'_>],
        reclaim: &dyn Reclaim,
    ) -> Result<(Reply, Vec<OwnedFd>), Errno> {
        let deadline = Instant::now() + self.patience;
        loop {
            let era = self.pool.lock().era;
            match self.try_call(request, descriptors) {
                Ok((Reply::Error(errno), _)) => return Err(errno),
                Ok((Reply::Refused(_), _)) => return Err(Errno::EIO),
                Ok(answer) => return Ok(answer),
                Err(WireError::TooLong(_) | WireError::Malformed) => return Err(Errno::EIO),
                Err(WireError::Closed | WireError::Io(_)) => self.resume(era, deadline, reclaim)?,
            }
        }
    }

    fn try_call(&self, request: &Request, descriptors: &[BorrowedFd<'_>]) -> Result<(Reply, Vec<OwnedFd>), WireError> {
        let idle = self.pool.lock().idle.pop();
        let mut connection = match idle {
            Some(connection) => connection,
            None => self.attach()?,
        };
        let answer = connection.call(request, descriptors)?;
        let mut pool = self.pool.lock();
        if pool.idle.len() < IDLE_MAX {
            pool.idle.push(connection);
        }
        Ok(answer)
    }

    fn attach(&self) -> Result<Connection, WireError> {
        let mut connection = self.connect()?;
        match connection.call(&Request::Attach { version: PROTOCOL_VERSION, peer: self.peer }, &[])? {
            (Reply::Done, _) => Ok(connection),
            // A new SharedFS that does not know the session yet: it must be resumed first.
            _ => Err(WireError::Closed),
        }
    }

    /// Closes the connections that no call uses.
    pub(crate) fn hang_up(&self) {
        // In a forked process, another thread may have held the lock that is not there to let it go.
        if let Some(mut pool) = self.pool.try_lock() {
            pool.idle.clear();
        }
    }

    /// Connects to SharedFS, out of the way of the program's own descriptors.
    fn connect(&self) -> Result<Connection, WireError> {
        Connection::connect_above(&self.socket, self.descriptors_from)
    }

    /// Waits until SharedFS is back and knows the session again.
    fn resume(&self, era: u64, deadline: Instant, reclaim: &dyn Reclaim) -> Result<(), Errno> {
        let _one_at_a_time = self.resuming.lock();
        {
            let mut pool = self.pool.lock();
            if pool.era != era {
                return Ok(());
            }
            pool.idle.clear();
        }
        loop {
            match self.try_resume(reclaim) {
                Ok(connection) => {
                    let mut pool = self.pool.lock();
                    pool.era += 1;
                    pool.idle.push(connection);
                    return Ok(());
                }
                Err(Some(errno)) => return Err(errno),
                Err(None) if Instant::now() >= deadline => return Err(Errno::EIO),
                Err(None) => std::thread::sleep(RETRY),
            }
        }
    }

    /// `Err(None)`: not yet; `Err(Some)`: never.
    fn try_resume(&self, reclaim: &dyn Reclaim) -> Result<Connection, Option<Errno>> {
        let mut connection = self.connect().map_err(|_| None)?;
        let hello =
            Hello { version: PROTOCOL_VERSION, kind: self.kind, resume: Some(self.peer), label: self.label.clone() };
        match connection.call(&Request::Hello(hello), &[]) {
            Ok((Reply::Welcome(_), _)) => {}
            Ok((Reply::Error(errno), _)) => return Err(Some(errno)),
            Ok(_) => return Err(Some(Errno::EIO)),
            Err(_) => return Err(None),
        }
        let mount = self.mount.lock().clone();
        if let Some(mount) = mount {
            connection.call::<_, Reply>(&mount.0, &[mount.1.as_fd()]).map_err(|_| None)?;
        }
        for request in reclaim.requests() {
            connection.call::<_, Reply>(&request, &[]).map_err(|_| None)?;
        }
        Ok(connection)
    }
}
