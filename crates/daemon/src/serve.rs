//! Serves connections, each in a thread.
//!
//! The thread receives a request, serves it, and sends the reply. The thread that accepts a connection serves it, and
//! another one waits for the next. Programs begin and end all the time, and each waits for the answer to its first
//! message. So no thread is to be made or woken meanwhile.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ashlar_types::{Errno, LogPosition, SessionId};
use ashlar_wire::{Acceptor, Connection, Listener, MountTerms, Reply, Request, SessionKind, WelcomeSegment, WireError};
use parking_lot::{Condvar, Mutex};

use crate::grant::{LookupTarget, Patience};
use crate::materialise::materialise;
use crate::mount_notifier::{MountDevice, Notifier};
use crate::request_slots::SlotOwner;
use crate::sessions::{self, Refused};
use crate::shared_state::SharedState;
use crate::state::State;
use crate::{credit, durability, grant, locking, mapped, quota, reserved, status};

/// The most connections at once, and of one process: each has a thread.
///
/// A process keeps a few, and one for each thread that waits for a lock or a commit.
const CONNECTIONS_MAX: usize = 1024;
const CONNECTIONS_OF_PROCESS_MAX: usize = 256;
/// The longest request.
///
/// A thousand wants are far below it, and a peer must not make SharedFS hold more.
const REQUEST_BYTES_MAX: usize = 1 << 20;
/// Stack of a connection's thread: requests don't nest.
const STACK_BYTES: usize = 512 << 10;
/// How many threads wait for a connection, if the system has threads.
const ACCEPTORS: std::ops::RangeInclusive<usize> = 2..=4;
/// How often SharedFS checks for its end, and its pause after a failed accept.
const END_CHECK_INTERVAL: Duration = Duration::from_millis(200);
const RETRY: Duration = Duration::from_millis(10);
/// How long connections may take to end when SharedFS ends.
const PATIENCE: Duration = Duration::from_secs(2);

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
    sockets: BTreeMap<u64, (i32, UnixStream)>,
    /// Threads that wait for a connection.
    acceptors: usize,
}

impl Connections {
    /// Registers a connection; returns `None` if there are too many.
    fn register(&self, connection: &Connection) -> Option<u64> {
        let socket = connection.socket().try_clone().ok()?;
        let pid = rustix::net::sockopt::socket_peercred(&socket).ok()?.pid.as_raw_nonzero().get();
        let mut open = self.open.lock();
        let of_process = open.sockets.values().filter(|(other, _)| *other == pid).count();
        if open.sockets.len() >= CONNECTIONS_MAX || of_process >= CONNECTIONS_OF_PROCESS_MAX {
            return None;
        }
        open.count += 1;
        let number = open.count;
        open.sockets.insert(number, (pid, socket));
        Some(number)
    }

    fn unregister(&self, number: u64) {
        self.open.lock().sockets.remove(&number);
        self.closed.notify_all();
    }

    /// Records that a thread is about to wait for a connection.
    ///
    /// Returns `false` if enough threads do.
    fn begin_waiting(&self) -> bool {
        let mut open = self.open.lock();
        let is_wanted = open.acceptors < *ACCEPTORS.end();
        open.acceptors += usize::from(is_wanted);
        is_wanted
    }

    /// Records that a thread no longer waits; returns how many others do.
    fn end_waiting(&self) -> usize {
        let mut open = self.open.lock();
        open.acceptors -= 1;
        open.acceptors
    }

    /// Ends all connections: requests under way are answered, and nothing more is read.
    fn end_all(&self) {
        let mut open = self.open.lock();
        for (_, socket) in open.sockets.values() {
            // A connection that is closed already needs no end.
            let _ = socket.shutdown(std::net::Shutdown::Read);
        }
        let deadline = Instant::now() + PATIENCE;
        while !open.sockets.is_empty() && !self.closed.wait_until(&mut open, deadline).timed_out() {}
    }
}

/// Serves connections until SharedFS is to end.
///
/// # Errors
/// The system's, if there is no thread for the first ones.
pub fn serve_connections(shared: &Arc<SharedState>, listener: &Listener) -> io::Result<()> {
    let connections = Arc::new(Connections::default());
    for _ in 0..*ACCEPTORS.start() {
        start_acceptor(shared, listener.acceptor(), &connections)?;
    }
    let (mut unused_since, mut count) = (Instant::now(), 0);
    while !shared.lock().ending {
        // A connecting process may be about to open a session: a mount first checks whether there is a daemon.
        let before = std::mem::replace(&mut count, connections.open.lock().count);
        if count != before || !shared.lock().sessions.is_empty() {
            unused_since = Instant::now();
        }
        let lingering = shared.config.linger_seconds.map(Duration::from_secs);
        if lingering.is_some_and(|linger| unused_since.elapsed() >= linger) {
            tracing::info!("no session is left; SharedFS ends");
            shared.stop();
            break;
        }
        std::thread::sleep(END_CHECK_INTERVAL);
    }
    listener.stop_accepting();
    connections.end_all();
    Ok(())
}

/// Starts a thread that accepts connections, if too few do.
fn start_acceptor(shared: &Arc<SharedState>, acceptor: Acceptor, connections: &Arc<Connections>) -> io::Result<()> {
    if !connections.begin_waiting() {
        return Ok(());
    }
    let (worker, open) = (Arc::clone(shared), Arc::clone(connections));
    let thread = std::thread::Builder::new().name("serve".into()).stack_size(STACK_BYTES);
    let started = thread.spawn(move || accept_connections(&worker, &acceptor, &open));
    started.map(drop).inspect_err(|_| _ = connections.end_waiting())
}

/// Accepts and serves connections, while too few other threads wait for one.
fn accept_connections(shared: &Arc<SharedState>, acceptor: &Acceptor, connections: &Arc<Connections>) {
    let mut is_failing = false;
    loop {
        let accepted = acceptor.accept();
        let was_failing = std::mem::replace(&mut is_failing, accepted.is_err());
        let others = connections.end_waiting();
        match accepted {
            Ok(connection) => {
                let another = || start_acceptor(shared, acceptor.clone(), connections);
                match if others < *ACCEPTORS.start() { another() } else { Ok(()) } {
                    // Some thread must wait for further connections.
                    Err(error) if others == 0 => tracing::warn!(%error, "no thread for a connection"),
                    _ => serve_or_refuse(shared, connection, connections),
                }
            }
            Err(_) if shared.lock().ending => return,
            Err(error) => {
                if !was_failing {
                    tracing::warn!(%error, "connections can't be accepted");
                }
                // Most likely there are no descriptors left: give others time to close some.
                std::thread::sleep(RETRY);
            }
        }
        if !connections.begin_waiting() {
            return;
        }
    }
}

/// Serves a connection until its end, unless there are too many.
fn serve_or_refuse(shared: &Arc<SharedState>, mut connection: Connection, connections: &Connections) {
    if shared.lock().ending {
        return;
    }
    if let Some(number) = connections.register(&connection) {
        serve_connection(shared, &mut connection);
        drop(connection);
        connections.unregister(number);
    } else {
        let reason = "too many connections are open; close some".into();
        // A peer that does not wait for the answer does not get it.
        let _ = connection.send(&Reply::Refused(reason), &[]);
    }
}

/// A reply, and the descriptors that are sent with it.
struct ReplyWithFiles {
    /// `None`: the helper has sent it.
    reply: Option<Reply>,
    files: Vec<Arc<dyn AsFd + Send + Sync>>,
    /// A prepared session was taken for it.
    takes_prepared: bool,
}

impl ReplyWithFiles {
    fn of(reply: Option<Reply>, files: Vec<Arc<dyn AsFd + Send + Sync>>) -> Self {
        Self { reply, files, takes_prepared: false }
    }
}

impl From<Reply> for ReplyWithFiles {
    fn from(reply: Reply) -> Self {
        Self::of(Some(reply), Vec::new())
    }
}

/// The session behind a connection.
#[derive(Default)]
struct ConnectedPeer {
    session: Option<SessionId>,
    /// A process's session may ask in a request slot.
    slot_owner: Option<SlotOwner>,
    /// It has just resumed, and repeats requests that SharedFS has forgotten.
    is_reclaiming: bool,
}

fn serve_connection(shared: &Arc<SharedState>, connection: &mut Connection) {
    let mut peer = ConnectedPeer::default();
    loop {
        shared.request_slots.watch_connection(shared, connection, peer.slot_owner.as_ref());
        let Ok((request, descriptors)) = connection.receive_limited::<Request>(REQUEST_BYTES_MAX) else { return };
        if peer.slot_owner.is_some() {
            shared.request_slots.record_message();
        }
        let answer = match answer_request(shared, connection, &mut peer, request, descriptors) {
            Ok(answer) => answer,
            Err(SharedState::ENDING) => return,
            Err(errno) => Reply::Error(errno).into(),
        };
        let Some(reply) = &answer.reply else { continue };
        let files: Vec<BorrowedFd<'_>> = answer.files.iter().map(|file| file.as_fd()).collect();
        let sent = match connection.send(reply, &files) {
            // The session receives an error: otherwise it would ask the same again on another connection.
            Err(WireError::TooLong(bytes)) => {
                tracing::error!(bytes, "an answer is too long");
                connection.send(&Reply::Error(Errno::EIO), &[])
            }
            sent => sent,
        };
        if answer.takes_prepared {
            // Not before the session has its answer: the preparation wants the same lock and the same cores.
            shared.pool.refill();
        }
        if sent.is_err() {
            return;
        }
    }
}

fn answer_request(
    shared: &Arc<SharedState>,
    connection: &Connection,
    peer: &mut ConnectedPeer,
    request: Request,
    descriptors: Vec<OwnedFd>,
) -> Result<ReplyWithFiles, Errno> {
    shared.lock().counters.requests += 1;
    match (&request, peer.session) {
        (Request::Hello(hello), None) => {
            return match sessions::hello(shared, connection.socket(), hello) {
                Ok(sessions::OpenedSession { welcome, files, others }) => {
                    let session = welcome.peer.session;
                    let slot_owner = slot_owner_of(&shared.lock(), session);
                    *peer = ConnectedPeer { session: Some(session), slot_owner, is_reclaiming: hello.resume.is_some() };
                    let all = [files.log, files.control, files.leases].into_iter().chain(others.into_iter().flatten());
                    let files = all.map(|file| file as Arc<dyn AsFd + Send + Sync>).collect();
                    let takes_prepared = hello.kind == SessionKind::Process && hello.resume.is_none();
                    Ok(ReplyWithFiles { reply: Some(Reply::Welcome(Box::new(welcome))), files, takes_prepared })
                }
                Err(Refused::Because(sentence)) => Ok(Reply::Refused(sentence).into()),
                Err(Refused::Errno(errno)) => Err(errno),
            };
        }
        (Request::Attach { version, .. }, None) if *version != ashlar_wire::PROTOCOL_VERSION => {
            return Ok(Reply::Refused(sessions::wrong_version(*version)).into());
        }
        (Request::Attach { peer: proof, .. }, None) => {
            let state = shared.lock();
            // A session must resume first: only then SharedFS knows its mount and its locks again.
            let session =
                sessions::find_session(&state, *proof).filter(|session| session.is_connected).ok_or(Errno::ESTALE)?;
            peer.session = Some(session.id);
            peer.slot_owner = slot_owner_of(&state, session.id);
            return Ok(Reply::Done.into());
        }
        (
            Request::Status
            | Request::Fsck
            | Request::Resize { .. }
            | Request::Shutdown
            | Request::SetQuota { .. }
            | Request::Quotas,
            _,
        ) => {
            return status::answer_command(shared, connection.socket(), &request).map(ReplyWithFiles::from);
        }
        (Request::Space { subtree }, session) => {
            return Ok(Reply::Space(credit::space(shared, session, *subtree)).into());
        }
        _ => {}
    }
    let id = peer.session.ok_or(Errno::EPROTO)?;
    {
        let state = shared.lock();
        let session = state.sessions.get(&id).ok_or(Errno::ESTALE)?;
        if session.fenced.is_some() || session.is_ending {
            return Err(Errno::EIO);
        }
    }
    let is_repeated = matches!(request, Request::Lock { .. } | Request::RegisterMount { .. } | Request::Reserve { .. });
    let reclaims = peer.is_reclaiming && is_repeated;
    if peer.is_reclaiming && !reclaims {
        sessions::record_return(&mut shared.lock(), id);
    }
    peer.is_reclaiming = reclaims;
    if let Request::Materialise { inode, flags } = request {
        let directory = descriptors.into_iter().next();
        materialise(shared, id, (inode, flags), directory, connection.socket().as_fd())?;
        return Ok(ReplyWithFiles::of(None, Vec::new()));
    }
    if let Request::Lock { .. } = request {
        return locking::set_lock(shared, id, &request, reclaims, connection.socket().as_fd())
            .map(ReplyWithFiles::from);
    }
    serve_session(shared, id, request, descriptors)
}

/// Returns a process's session as one that may ask in a request slot.
///
/// A mount has many threads with many connections.
fn slot_owner_of(state: &State, id: SessionId) -> Option<SlotOwner> {
    let session = state.sessions.get(&id).filter(|session| session.identity.kind == SessionKind::Process)?;
    Some(SlotOwner { id, control: Arc::clone(&session.control) })
}

fn serve_session(
    shared: &Arc<SharedState>,
    id: SessionId,
    request: Request,
    descriptors: Vec<OwnedFd>,
) -> Result<ReplyWithFiles, Errno> {
    Ok(match request {
        Request::Acquire(wants) => grant::acquire(shared, id, &wants, Patience::Any)?.into(),
        Request::Lookup { directory, name, within, makes, write, need } => {
            let found = LookupTarget { directory, name: &name, within, makes, write, need };
            grant::lookup(shared, id, &found, Patience::Any)?.into()
        }
        Request::ReadDirectory { directory, after, limit } => {
            grant::read_directory(shared, directory, after, limit)?.into()
        }
        Request::Kept(question) => {
            let mut state = shared.lock();
            let kept = state.sessions.get_mut(&id).and_then(|session| session.kept.take());
            let (_, reply) = kept.filter(|(of, _)| *of == question).ok_or(Errno::EPROTO)?;
            reply.into()
        }
        Request::InodeRange => {
            let (first, count) = sessions::grant_inode_range(shared, id)?;
            Reply::Inodes(first, count).into()
        }
        Request::Credit { want, replaces } => Reply::Credit(credit::grant(shared, id, want, replaces)?).into(),
        Request::Quota(wants) => quota::grant(shared, id, &wants)?.into(),
        Request::LogSpace { bytes } => {
            sessions::grant_log_space(shared, id, bytes)?;
            Reply::Done.into()
        }
        Request::HandleSpace => {
            sessions::grant_handle_space(shared, id)?;
            Reply::Done.into()
        }
        Request::Digest => digest_log(shared, id)?.into(),
        Request::MakeRoom { upto } => make_room(shared, id, upto)?.into(),
        Request::SyncDependencies(dependencies) => {
            durability::sync_positions(shared, shared.lock(), &dependencies)?;
            Reply::Done.into()
        }
        Request::SyncInode { inode, dependencies } => {
            durability::sync_inode(shared, id, inode, dependencies)?;
            Reply::Done.into()
        }
        Request::SyncAll => {
            durability::sync_all(shared)?;
            Reply::Done.into()
        }
        Request::Segment(number) => {
            let (segment, file) = open_segment(shared, number)?;
            ReplyWithFiles::of(Some(Reply::Segment(segment)), vec![Arc::new(file)])
        }
        Request::RegisterMount { device: number, terms } => {
            let device = descriptors.into_iter().next().ok_or(Errno::EINVAL)?;
            register_mount(shared, id, device, number, terms)?.into()
        }
        Request::QueryLock { .. } => locking::query_lock(shared, id, &request)?.into(),
        Request::CancelLock { ticket } => locking::cancel_wait(shared, id, ticket).into(),
        Request::ReleaseLocks { inode, owner, kind } => locking::release_locks(shared, id, inode, owner, kind).into(),
        Request::YieldLocks { inode, moves } => locking::yield_locks(shared, id, inode, moves).into(),
        Request::Map { inode, first, blocks, follows, number } => {
            mapped::map_blocks(shared, id, inode, (first, blocks), (number, follows), Patience::Any)?.into()
        }
        Request::Unmap { number } => {
            mapped::unmap_blocks(shared, id, number);
            Reply::Done.into()
        }
        Request::Show { inode } => {
            mapped::show_writes(shared, id, inode)?;
            Reply::Done.into()
        }
        Request::Reserve { inode, reason } => {
            reserved::reserve(shared, id, inode, reason)?;
            Reply::Done.into()
        }
        Request::Free { inode, reason } => {
            reserved::end_reservation(shared, id, inode, reason)?;
            Reply::Done.into()
        }
        Request::Goodbye => {
            sessions::end_sessions(shared, &[id]);
            Reply::Done.into()
        }
        Request::Leave => {
            sessions::leave_session(shared, id);
            Reply::Done.into()
        }
        Request::Hello(_)
        | Request::Attach { .. }
        | Request::Space { .. }
        | Request::Status
        | Request::Fsck
        | Request::Resize { .. }
        | Request::Shutdown
        | Request::SetQuota { .. }
        | Request::Quotas
        | Request::Materialise { .. }
        | Request::Lock { .. } => return Err(Errno::EPROTO),
    })
}

fn register_mount(
    shared: &SharedState,
    id: SessionId,
    device: OwnedFd,
    number: u64,
    terms: MountTerms,
) -> Result<Reply, Errno> {
    let mut state = shared.lock();
    let session = state.sessions.get_mut(&id).ok_or(Errno::ESTALE)?;
    if session.identity.kind != ashlar_wire::SessionKind::Mount {
        return Err(Errno::EPERM);
    }
    session.set_mount(number, terms)?;
    let device = MountDevice::new(device, number, &shared.helper);
    match &session.notifier {
        Some(notifier) => notifier.connect(device)?,
        None => session.notifier = Some(Notifier::start(device, shared.cache_ttl(), session.note_stale())?),
    }
    Ok(Reply::Done)
}

fn digest_log(shared: &SharedState, id: SessionId) -> Result<Reply, Errno> {
    let mut state = shared.lock();
    let settled = state.settled(id).ok_or(Errno::EIO)?;
    state = shared.apply_settled(state, id);
    if state.live(id).is_none() {
        return Err(Errno::EIO);
    }
    let target = settled.min(state.store.applied(id));
    Ok(Reply::Committed(shared.wait_committed(&mut state, id, target)?))
}

fn make_room(shared: &SharedState, id: SessionId, upto: LogPosition) -> Result<Reply, Errno> {
    let mut state = shared.lock();
    let settled = state.settled(id).ok_or(Errno::EIO)?;
    Ok(Reply::Committed(shared.wait_digested(&mut state, id, upto.min(settled))?))
}

/// Returns a data segment, and its file.
pub fn open_segment(shared: &SharedState, number: u32) -> Result<(WelcomeSegment, File), Errno> {
    let found = shared.arena.segments().into_iter().find(|segment| segment.number == number).ok_or(Errno::EINVAL)?;
    let file = shared.arena.segment_file(number, false).map_err(|error| {
        tracing::error!(number, %error, "a segment can't be opened");
        Errno::EIO
    })?;
    Ok((WelcomeSegment { number, blocks: found.blocks, data_offset: found.data_offset() }, file))
}
