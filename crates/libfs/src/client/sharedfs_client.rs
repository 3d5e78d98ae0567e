//! Calls to SharedFS: connection pool, patience, and resuming the session.
//!
//! A call may take as long as its work does: a lock waits for its holder. So silence on one connection proves nothing.
//! When a call gets no answer for a while, LibFS checks on another connection whether SharedFS answers anything. If
//! SharedFS answers nothing for as long as the session's patience, the call fails. Later calls then fail sooner, until
//! SharedFS answers again.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ashlar_pmem::Mapping;
use ashlar_types::{Errno, SessionId};
use ashlar_wire::{
    Connection, ControlPage, Hello, MountTerms, PROTOCOL_VERSIONS, Peer, Reply, Request, SessionKind, Welcome,
    WireError,
};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix_futex_sync::Mutex;

use crate::api::{ConnectError, Options};
use crate::client::own_descriptors::{DescriptorPolicy, OwnDescriptor};
use crate::client::request_slot::{SlotClient, is_short};

/// Idle connections to keep. More threads than this may call at once; they open and close their own.
const IDLE_MAX: usize = 8;
/// How long to wait before the next attempt to reach SharedFS.
const RETRY_PAUSE: Duration = Duration::from_millis(5);
/// How long SharedFS may be silent before LibFS checks whether it answers, and before a person is warned. If a quarter
/// of the patience is less, that counts.
const SILENCE: Duration = Duration::from_secs(3);
/// How long a program waits for the answer to its session's first message: the kernel can serve the program as well.
const OPENING_MAX: Duration = Duration::from_secs(10);

/// Why a waiting thread woke up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WakeReason {
    /// There is something to read.
    Ready,
    /// Nothing came for the time that was asked for.
    Silent,
    /// A signal came.
    Interrupted,
}

/// The state that a restarted SharedFS lacks: the session's locks and reservations.
pub(crate) trait Reclaim: Send + Sync {
    /// Returns the requests that restore it.
    fn requests(&self) -> Vec<Request>;
}

#[derive(Debug)]
struct Pool {
    idle: Vec<OwnDescriptor<Connection>>,
    /// Counts resumptions. A thread whose connection broke sees by it whether another thread has resumed already.
    generation: u64,
}

/// LibFS's observations of a SharedFS that does not answer.
#[derive(Debug, Default)]
struct Absence {
    since: Option<Instant>,
    is_announced: bool,
    /// When a call last gave up waiting.
    given_up: Option<Instant>,
}

/// How long a call waits for an answer.
#[derive(Debug)]
struct CallWait {
    deadline: Instant,
    /// When to check again whether SharedFS answers.
    next_check: Instant,
}

/// A mount as registered with SharedFS: the request, and the kernel's device that is sent with it.
type Registration = (Request, OwnedFd);

/// The session's connection to SharedFS.
#[derive(Debug)]
pub(crate) struct SharedFsClient {
    socket: PathBuf,
    kind: SessionKind,
    label: String,
    yields_to_kernel: bool,
    patience: Duration,
    notice: fn(&str),
    descriptors: DescriptorPolicy,
    peer: Peer,
    /// The protocol's version that the session and SharedFS speak.
    version: AtomicU32,
    /// The session's request slot, for one thread at a time.
    slot_client: Mutex<SlotClient>,
    /// Whether `absence` holds anything, so that calls need not lock it.
    is_away: AtomicBool,
    absence: Mutex<Absence>,
    pool: Mutex<Pool>,
    resuming: Mutex<()>,
    /// How often the session has begun to resume.
    resumptions: AtomicU64,
    mount: Mutex<Option<Arc<Registration>>>,
}

impl SharedFsClient {
    /// Opens a session; returns SharedFS's welcome and the descriptors that came with it.
    pub(crate) fn open(options: &Options) -> Result<(Self, Welcome, Vec<OwnedFd>), ConnectError> {
        let no_daemon = |reason: String| ConnectError::NoDaemon { path: options.socket.clone(), reason };
        let patience = Duration::from_millis(options.patience_ms);
        let connection = Connection::connect_above(&options.socket, options.descriptors.from, silence_of(patience));
        let connection = connection.map_err(|error| no_daemon(error.to_string()))?;
        let mut connection = OwnDescriptor::new(connection, options.descriptors);
        let hello = Hello {
            versions: PROTOCOL_VERSIONS,
            kind: options.kind,
            resume: None,
            label: options.label.clone(),
            beside: options.beside,
            yields_to_kernel: options.yields_to_kernel,
        };
        let most = if options.kind == SessionKind::Process { patience.min(OPENING_MAX) } else { patience };
        let answer = connection.call_watched(&Request::Hello(hello), &[], &mut silence_until(Instant::now() + most));
        let answer = answer.map_err(|error| no_daemon(error.to_string()))?;
        let (welcome, descriptors) = match answer {
            (Reply::Welcome(welcome), descriptors) => (*welcome, descriptors),
            (Reply::Refused(reason), _) => return Err(ConnectError::Refused(reason)),
            (Reply::Error(Errno::EPERM), _) => return Err(ConnectError::NotAdmitted),
            (Reply::Error(Errno::EROFS), _) => return Err(ConnectError::ReadOnly),
            (Reply::Error(errno), _) => return Err(ConnectError::Refused(errno.to_string())),
            _ => return Err(ConnectError::Refused("it sent an unexpected answer".into())),
        };
        let client = Self {
            socket: options.socket.clone(),
            kind: options.kind,
            label: options.label.clone(),
            yields_to_kernel: options.yields_to_kernel,
            patience,
            notice: options.notice,
            descriptors: options.descriptors,
            peer: welcome.peer,
            version: AtomicU32::new(welcome.version),
            slot_client: Mutex::default(),
            is_away: AtomicBool::new(false),
            absence: Mutex::default(),
            pool: Mutex::new(Pool { idle: vec![connection], generation: 0 }),
            resuming: Mutex::new(()),
            resumptions: AtomicU64::new(0),
            mount: Mutex::new(None),
        };
        Ok((client, welcome, descriptors))
    }

    /// Returns the session's number.
    pub(crate) fn session(&self) -> SessionId {
        self.peer.session
    }

    /// Returns whether the kernel serves the process what SharedFS refuses.
    pub(crate) fn yields_to_kernel(&self) -> bool {
        self.yields_to_kernel
    }

    /// Keeps the mount's device and its number, and sends both to SharedFS.
    pub(crate) fn register_mount(
        &self,
        device: OwnedFd,
        number: u64,
        terms: MountTerms,
        reclaim: &dyn Reclaim,
    ) -> Result<(), Errno> {
        let mount = Arc::new((Request::RegisterMount { device: number, terms }, device));
        *self.mount.lock() = Some(Arc::clone(&mount));
        self.call_with(&mount.0, &[mount.1.as_fd()], reclaim).map(drop)
    }

    /// Sends a request and waits for the answer, also while SharedFS restarts.
    ///
    /// With `control`, a short request may take the request slot.
    pub(crate) fn call(
        &self,
        request: &Request,
        control: Option<&ControlPage<Mapping>>,
        reclaim: &dyn Reclaim,
    ) -> Result<Reply, Errno> {
        let control = control.filter(|control| is_short(request) && control.request_slot().is_listened_to());
        self.send_request(request, &[], control, reclaim).map(|(reply, _)| reply)
    }

    /// As [`Self::call`], with descriptors to send; also returns those that came back.
    pub(crate) fn call_with(
        &self,
        request: &Request,
        descriptors: &[BorrowedFd<'_>],
        reclaim: &dyn Reclaim,
    ) -> Result<(Reply, Vec<OwnedFd>), Errno> {
        self.send_request(request, descriptors, None, reclaim)
    }

    /// Shows a directory to SharedFS's helper, over a socket that came with an answer; returns the helper's answer.
    ///
    /// On return, nothing of the helper's keeps the directory's mount busy.
    ///
    /// # Errors
    /// [`WireError::Closed`] if the helper has died.
    pub(crate) fn call_helper(
        &self,
        socket: OwnedFd,
        directory: BorrowedFd<'_>,
    ) -> Result<(Reply, Vec<OwnedFd>), WireError> {
        let moved = self.move_up(socket);
        set_socket_timeout(&moved, Timeout::Recv, Some(silence_of(self.patience))).map_err(std::io::Error::from)?;
        let mut helper = OwnDescriptor::new(Connection::from_socket(moved.into()), self.descriptors);
        let mut wait = self.begin_waiting();
        let answer = helper.call_watched(&(), &[directory], &mut || self.check_presence(&mut wait))?;
        // The helper closes its end last.
        match helper.receive_reply::<Reply>(&mut || self.check_presence(&mut wait)) {
            Err(WireError::Closed) => Ok(answer),
            _ => Err(WireError::Malformed),
        }
    }

    /// Moves a descriptor to LibFS's numbers: the program's own ones are lower.
    ///
    /// The program may have lowered its limit below them, and have one number left, which the answer needs. Then the
    /// limit is raised for this moment. If that is not allowed, the descriptor stays.
    fn move_up(&self, socket: OwnedFd) -> OwnedFd {
        let duplicate = || rustix::io::fcntl_dupfd_cloexec(&socket, self.descriptors.from);
        let moved = duplicate().or_else(|error| {
            let limit = getrlimit(Resource::Nofile);
            setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit })?;
            let moved = duplicate();
            setrlimit(Resource::Nofile, limit)?;
            moved.map_err(|_| error)
        });
        moved.unwrap_or(socket)
    }

    fn send_request(
        &self,
        request: &Request,
        descriptors: &[BorrowedFd<'_>],
        control: Option<&ControlPage<Mapping>>,
        reclaim: &dyn Reclaim,
    ) -> Result<(Reply, Vec<OwnedFd>), Errno> {
        let mut wait = self.begin_waiting();
        loop {
            let generation = self.pool.lock().generation;
            let answer = self.try_call(request, descriptors, control, &mut wait);
            if answer.is_ok() {
                self.record_answer();
            }
            match answer {
                Ok((Reply::Error(errno), _)) => return Err(errno),
                Ok((Reply::Refused(_), _)) => return Err(Errno::EIO),
                Ok(answer) => return Ok(answer),
                Err(WireError::TooLong(_) | WireError::Malformed | WireError::Descriptors) => return Err(Errno::EIO),
                Err(WireError::Silent) => return Err(self.give_up()),
                Err(WireError::Closed | WireError::Io(_) | WireError::ForeignServer(_)) => {
                    self.resume(generation, wait.deadline, reclaim)?;
                }
            }
        }
    }

    fn try_call(
        &self,
        request: &Request,
        descriptors: &[BorrowedFd<'_>],
        control: Option<&ControlPage<Mapping>>,
        wait: &mut CallWait,
    ) -> Result<(Reply, Vec<OwnedFd>), WireError> {
        let (idle, generation) = {
            let mut pool = self.pool.lock();
            (pool.idle.pop(), pool.generation)
        };
        let mut connection = match idle {
            Some(connection) => connection,
            None => self.attach(wait.deadline)?,
        };
        let reply = match control {
            Some(control) => self.ask_in_slot(control, request, &mut connection, wait)?,
            None => None,
        };
        let answer = match reply {
            Some(reply) => (reply, Vec::new()),
            None => connection.call_watched(request, descriptors, &mut || self.check_presence(wait))?,
        };
        let mut pool = self.pool.lock();
        // An answer in memory proves nothing about the connection, which may be that of a SharedFS that is gone.
        if pool.idle.len() < IDLE_MAX && pool.generation == generation {
            pool.idle.push(connection);
        }
        Ok(answer)
    }

    /// Asks in the session's request slot, unless another thread uses it.
    ///
    /// Nothing is under way on the connection, so its state shows whether the SharedFS that has the question still
    /// lives.
    fn ask_in_slot(
        &self,
        control: &ControlPage<Mapping>,
        request: &Request,
        connection: &mut Connection,
        wait: &mut CallWait,
    ) -> Result<Option<Reply>, WireError> {
        let Some(mut slot_client) = self.slot_client.try_lock() else { return Ok(None) };
        slot_client.ask(control, request, connection, silence_of(self.patience), &mut || self.check_presence(wait))
    }

    /// As [`Self::call`], for a request that may take any time.
    ///
    /// `pause` waits until a socket has something to read, a time is over, or the call is to be interrupted. In the
    /// last case LibFS sends `cancel` once, and the answer shows whether it came in time.
    pub(crate) fn call_interruptible(
        &self,
        request: &Request,
        cancel: &Request,
        reclaim: &dyn Reclaim,
        pause: &mut dyn FnMut(BorrowedFd<'_>, Duration) -> WakeReason,
    ) -> Result<Reply, Errno> {
        let mut wait = self.begin_waiting();
        let mut is_cancelled = false;
        loop {
            let generation = self.pool.lock().generation;
            let answer = self.try_interruptible(request, &mut wait, pause, &mut || {
                is_cancelled = true;
                self.call(cancel, None, reclaim).map(drop)
            });
            match answer {
                Ok(Reply::Error(errno)) => return Err(errno),
                Ok(Reply::Refused(_)) | Err(WireError::TooLong(_) | WireError::Malformed | WireError::Descriptors) => {
                    return Err(Errno::EIO);
                }
                Ok(reply) => return Ok(reply),
                Err(WireError::Silent) => return Err(self.give_up()),
                // A SharedFS that has forgotten the waiting has ended it.
                Err(WireError::Closed | WireError::Io(_) | WireError::ForeignServer(_)) if is_cancelled => {
                    return Err(Errno::EINTR);
                }
                Err(WireError::Closed | WireError::Io(_) | WireError::ForeignServer(_)) => {
                    self.resume(generation, wait.deadline, reclaim)?;
                }
            }
        }
    }

    fn try_interruptible(
        &self,
        request: &Request,
        wait: &mut CallWait,
        pause: &mut dyn FnMut(BorrowedFd<'_>, Duration) -> WakeReason,
        cancel: &mut dyn FnMut() -> Result<(), Errno>,
    ) -> Result<Reply, WireError> {
        let idle = self.pool.lock().idle.pop();
        let mut connection = match idle {
            Some(connection) => connection,
            None => self.attach(wait.deadline)?,
        };
        connection.send(request, &[])?;
        loop {
            match pause(connection.socket().as_fd(), silence_of(self.patience)) {
                WakeReason::Ready => break,
                WakeReason::Silent => self.check_presence(wait)?,
                WakeReason::Interrupted => {
                    cancel().map_err(|_| WireError::Silent)?;
                    break;
                }
            }
        }
        let (reply, _) = connection.receive_reply(&mut || self.check_presence(wait))?;
        self.record_answer();
        let mut pool = self.pool.lock();
        if pool.idle.len() < IDLE_MAX {
            pool.idle.push(connection);
        }
        Ok(reply)
    }

    fn attach(&self, deadline: Instant) -> Result<OwnDescriptor<Connection>, WireError> {
        let mut connection = self.connect()?;
        match self.send_attach(&mut connection, deadline)? {
            Reply::Done => Ok(connection),
            // A restarted SharedFS doesn't know the session yet: it must be resumed first.
            _ => Err(WireError::Closed),
        }
    }

    fn send_attach(&self, connection: &mut Connection, deadline: Instant) -> Result<Reply, WireError> {
        let request = Request::Attach { version: self.version.load(Ordering::Relaxed), peer: self.peer };
        connection.call_watched(&request, &[], &mut self.accept_silence(deadline)).map(|(reply, _)| reply)
    }

    /// Returns a watch that accepts silence up to a deadline and records it.
    fn accept_silence(&self, deadline: Instant) -> impl FnMut() -> Result<(), WireError> + '_ {
        let mut silence = silence_until(deadline);
        move || {
            self.record_silence();
            silence()
        }
    }

    /// Checks on another connection whether SharedFS answers, after a while without an answer.
    ///
    /// SharedFS may be busy or wait for another session's lock; or it is stopped, or hangs.
    fn check_presence(&self, wait: &mut CallWait) -> Result<(), WireError> {
        let now = Instant::now();
        if now < wait.next_check {
            return Ok(());
        }
        let is_there = match self.connect() {
            Ok(mut other) => match self.send_attach(&mut other, wait.deadline) {
                // A refusal is an answer, too.
                Ok(_) | Err(WireError::Closed) => true,
                Err(_) => false,
            },
            Err(_) => false,
        };
        let now = Instant::now();
        if is_there {
            self.record_answer();
            *wait = CallWait { deadline: now + self.patience, next_check: now + self.patience / 4 };
            return Ok(());
        }
        // A SharedFS that is gone has closed the connection on which the caller waits.
        self.record_silence();
        if now < wait.deadline { Ok(()) } else { Err(WireError::Silent) }
    }

    /// Returns how long a new call may wait: less if another call gave up a while ago.
    fn begin_waiting(&self) -> CallWait {
        let now = Instant::now();
        let is_lost = self.is_away.load(Ordering::Relaxed)
            && self.absence.lock().given_up.is_some_and(|then| now.duration_since(then) < self.patience);
        let most = if is_lost { silence_of(self.patience) } else { self.patience };
        CallWait { deadline: now + most, next_check: now }
    }

    /// Records that SharedFS has answered.
    fn record_answer(&self) {
        if !self.is_away.swap(false, Ordering::Relaxed) {
            return;
        }
        let before = std::mem::take(&mut *self.absence.lock());
        if before.is_announced {
            (self.notice)(&format!("the daemon at {} answers again", self.socket.display()));
        }
    }

    /// Records that SharedFS does not answer at this moment.
    fn record_silence(&self) {
        let mut absence = self.absence.lock();
        self.is_away.store(true, Ordering::Relaxed);
        let since = *absence.since.get_or_insert_with(Instant::now);
        if !absence.is_announced && since.elapsed() >= silence_of(self.patience) {
            absence.is_announced = true;
            drop(absence);
            (self.notice)(&format!(
                "the daemon at {} does not answer; calls that need it wait, for {} seconds at most",
                self.socket.display(),
                self.patience.as_secs()
            ));
        }
    }

    /// Records that the patience has run out; returns the call's error.
    fn give_up(&self) -> Errno {
        let mut absence = self.absence.lock();
        self.is_away.store(true, Ordering::Relaxed);
        absence.is_announced = true;
        let is_first = absence.given_up.replace(Instant::now()).is_none();
        drop(absence);
        if is_first {
            (self.notice)(&format!(
                "the daemon at {} has not answered for {} seconds: calls that need it fail with an I/O error until it does; \
                 'ashlar status' shows whether it runs, 'ashlar daemon' starts it",
                self.socket.display(),
                self.patience.as_secs()
            ));
        }
        Errno::EIO
    }

    /// Returns how often the session has begun to resume.
    ///
    /// A change shows that a new SharedFS may have read the session's state.
    pub(crate) fn resumptions(&self) -> u64 {
        self.resumptions.load(Ordering::SeqCst)
    }

    /// Closes the connections that no call uses.
    pub(crate) fn close_connections(&self) {
        // In a forked process, a thread that doesn't exist any more may hold the lock.
        if let Some(mut pool) = self.pool.try_lock() {
            pool.idle.clear();
        }
    }

    /// Connects to SharedFS, at a descriptor number outside the program's own.
    fn connect(&self) -> Result<OwnDescriptor<Connection>, WireError> {
        let connection = Connection::connect_above(&self.socket, self.descriptors.from, silence_of(self.patience))?;
        Ok(OwnDescriptor::new(connection, self.descriptors))
    }

    /// Waits until SharedFS is back and knows the session again.
    fn resume(&self, generation: u64, deadline: Instant, reclaim: &dyn Reclaim) -> Result<(), Errno> {
        let _one_at_a_time = self.resuming.lock();
        {
            let mut pool = self.pool.lock();
            if pool.generation != generation {
                return Ok(());
            }
            pool.idle.clear();
        }
        self.resumptions.fetch_add(1, Ordering::SeqCst);
        loop {
            match self.try_resume(deadline, reclaim) {
                Ok(connection) => {
                    let mut pool = self.pool.lock();
                    pool.generation += 1;
                    pool.idle.push(connection);
                    return Ok(());
                }
                Err(Some(errno)) => return Err(errno),
                Err(None) if Instant::now() >= deadline => return Err(self.give_up()),
                Err(None) => {
                    self.record_silence();
                    std::thread::sleep(RETRY_PAUSE);
                }
            }
        }
    }

    /// Tries to resume the session once. `Err(None)`: not yet; `Err(Some)`: never.
    fn try_resume(&self, deadline: Instant, reclaim: &dyn Reclaim) -> Result<OwnDescriptor<Connection>, Option<Errno>> {
        let mut watch = self.accept_silence(deadline);
        let mut connection = self.connect().map_err(|_| None)?;
        let hello = Hello {
            versions: PROTOCOL_VERSIONS,
            kind: self.kind,
            resume: Some(self.peer),
            label: self.label.clone(),
            beside: 0,
            yields_to_kernel: self.yields_to_kernel,
        };
        match connection.call_watched(&Request::Hello(hello), &[], &mut watch) {
            // Another release may serve the session from now on.
            Ok((Reply::Welcome(welcome), _)) => self.version.store(welcome.version, Ordering::Relaxed),
            Ok((Reply::Error(errno), _)) => return Err(Some(errno)),
            Ok((Reply::Refused(reason), _)) => {
                let socket = self.socket.display();
                (self.notice)(&format!("the daemon at {socket} does not resume the session: {reason}"));
                return Err(Some(Errno::EIO));
            }
            Ok(_) => return Err(Some(Errno::EIO)),
            Err(_) => return Err(None),
        }
        for request in reclaim.requests() {
            connection.call_watched::<_, Reply>(&request, &[], &mut watch).map_err(|_| None)?;
        }
        let mount = self.mount.lock().clone();
        if let Some(mount) = mount {
            let (reply, _) =
                connection.call_watched::<_, Reply>(&mount.0, &[mount.1.as_fd()], &mut watch).map_err(|_| None)?;
            if matches!(reply, Reply::Error(_)) {
                return Err(None);
            }
        }
        // Any other request ends the restoring: those that follow are new.
        let none = Request::SyncDependencies(Vec::new());
        connection.call_watched::<_, Reply>(&none, &[], &mut watch).map_err(|_| None)?;
        Ok(connection)
    }
}

/// Returns how long SharedFS may be silent at a time.
fn silence_of(patience: Duration) -> Duration {
    // To the kernel, a zero timeout means no limit.
    SILENCE.min(patience / 4).max(Duration::from_millis(1))
}

/// Returns a watch that accepts silence up to a deadline.
fn silence_until(deadline: Instant) -> impl FnMut() -> Result<(), WireError> {
    move || if Instant::now() < deadline { Ok(()) } else { Err(WireError::Silent) }
}
