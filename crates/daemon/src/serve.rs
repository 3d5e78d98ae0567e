//! Serves connections, each in a thread.
//!
//! The thread receives a request, serves it, and sends the reply. The thread that accepts a connection serves it, and
//! another one waits for the next. Programs begin and end all the time, and each waits for the answer to its first
//! message. So no thread is to be made or woken meanwhile.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use ashlar_helper::{FileOpening, FileReport};
use ashlar_node::Node;
use ashlar_node::blame::{self, Blame};
use ashlar_node::leases::grant::{ENDING, LONG, Patience};
use ashlar_node::pending::{NodeRequest, RequestTerms};
use ashlar_node::sessions::admission::{Refused, find_session, record_return};
use ashlar_node::sessions::session::ServedSession;
use ashlar_pmem::ArenaError;
use ashlar_processes::clock;
use ashlar_processes::process::has_connected;
use ashlar_types::{Errno, SessionId, VersionRange};
use ashlar_wire::{Acceptor, Connection, Listener, MountTerms, ReceiveLimits, Reply, Request, SessionKind, WireError};

use crate::connections::{ACCEPTORS, ConnectedProcess, Connections};
use crate::materialise::materialise;
use crate::mount_notifier::{MountDevice, Notifier, notifier_of};
use crate::node_requests::{ask_node, fence_after_panic, finish_answer};
use crate::request_slots::SlotOwner;
use crate::retired_files::give_up_kept;
use crate::session_files::{self, SessionError};
use crate::sessions;
use crate::shared_state::SharedState;
use crate::slot_service::serve_slot;
use crate::status;
use crate::user_shares::{ANSWER_BYTES, UserShare};

/// How often a thread checks for another thread's table of mapped files, and the pause between.
const TABLE_TRIES: u32 = 1000;
const TABLE_PAUSE: Duration = Duration::from_millis(1);
/// The longest request.
///
/// The longest honest one names an update of each session. A peer must not make SharedFS hold more.
const REQUEST_BYTES_MAX: usize = 64 << 10;
/// How long a connection may be silent before its first message, and in the middle of a message.
const SILENCE_MAX: Duration = Duration::from_secs(10);
/// How long an answer waits until its session takes it.
const ANSWER_MAX: Duration = Duration::from_secs(30);
/// Stack of a connection's thread: requests don't nest.
const STACK_BYTES: usize = 512 << 10;
/// How often SharedFS checks for its end, and its pause after a failed accept.
const END_CHECK_INTERVAL: Duration = Duration::from_millis(200);
const RETRY: Duration = Duration::from_millis(10);

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
        let before = std::mem::replace(&mut count, connections.count());
        if count != before || !shared.lock().sessions.is_empty() {
            unused_since = Instant::now();
        }
        // The daemon of a cluster's node stays: the other node counts on it.
        let linger_seconds = shared.config.linger_seconds.filter(|_| shared.leading.is_none());
        let lingering = linger_seconds.map(Duration::from_secs);
        if lingering.is_some_and(|linger| unused_since.elapsed() >= linger) {
            tracing::info!("no session is left; SharedFS ends");
            shared.stop();
            break;
        }
        if shared.role_changed.load(Ordering::Acquire) {
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
fn serve_or_refuse(shared: &Arc<SharedState>, mut connection: Connection, connections: &Arc<Connections>) {
    if shared.lock().ending {
        return;
    }
    let Some(process) = ConnectedProcess::of(&connection) else { return };
    // A connection without this limit would be served all the same.
    let _ = connection.limit_sending(ANSWER_MAX);
    let registered = connections.register(&connection, process);
    if registered.is_some() {
        serve_connection(shared, &mut connection, process);
    } else {
        let reason = "too many connections are open; close some".into();
        // A peer that does not wait for the answer does not get it.
        let _ = connection.send(&Reply::Refused(reason), &[]);
    }
    if connection.has_queued_descriptors()
        && let Err(error) = shared.helper.close_queued(connection.socket().as_fd())
    {
        tracing::warn!(%error, "no helper closes the descriptors that a process sent");
    }
    // If there were any, the helper has another copy of the socket, or the queue is empty.
    drop(connection);
    drop(registered);
}

/// A reply, and the descriptors that are sent with it.
struct ReplyWithFiles {
    /// `None`: another thread sends it ([`crate::waiting_syncs`]).
    reply: Option<Reply>,
    files: Vec<Arc<dyn AsFd + Send + Sync>>,
    /// A prepared session was taken for it.
    takes_prepared: bool,
    /// The helper opens a file for the session.
    opening: Option<FileReport>,
}

impl ReplyWithFiles {
    fn of(reply: Reply, files: Vec<Arc<dyn AsFd + Send + Sync>>) -> Self {
        Self { reply: Some(reply), files, takes_prepared: false, opening: None }
    }
}

impl ReplyWithFiles {
    /// Returns the reply that another thread sends.
    fn elsewhere() -> Self {
        Self { reply: None, files: Vec::new(), takes_prepared: false, opening: None }
    }
}

impl From<Reply> for ReplyWithFiles {
    fn from(reply: Reply) -> Self {
        Self::of(reply, Vec::new())
    }
}

/// The process and the session behind a connection.
struct ConnectedPeer {
    /// When the connection was accepted, in clock ticks since boot.
    accepted_ticks: u64,
    /// The share of the process's user; `None` if that is root.
    user: Option<Arc<UserShare>>,
    session: Option<SessionId>,
    /// A process's session may ask in a request slot.
    slot_owner: Option<SlotOwner>,
    /// It has just resumed, and repeats requests that SharedFS has forgotten.
    is_reclaiming: bool,
    /// It has sent a message.
    has_begun: bool,
    /// It serves a mount, so root runs it.
    is_mount: bool,
    /// The connection's socket, for replies that another thread sends.
    reply_socket: Option<Arc<UnixStream>>,
}

impl ConnectedPeer {
    fn new(shared: &SharedState, process: ConnectedProcess) -> Self {
        Self {
            accepted_ticks: clock::ticks_now(),
            user: shared.user_shares.of(process.uid),
            session: None,
            slot_owner: None,
            is_reclaiming: false,
            has_begun: false,
            is_mount: false,
            reply_socket: None,
        }
    }

    /// Takes the connection for one of a session.
    fn join_session(&mut self, state: &Node, connection: &mut Connection, id: SessionId) -> Result<(), Errno> {
        let session = state.sessions.get(&id).ok_or(Errno::ESTALE)?;
        self.is_mount = session.identity.kind == SessionKind::Mount;
        if self.is_mount {
            // It sends the kernel's device.
            connection.let_descriptors_pass()?;
        }
        self.session = Some(id);
        self.slot_owner = slot_owner_of(session, self.user.as_ref());
        Ok(())
    }

    /// Returns the connection's socket, for a reply that another thread sends.
    fn reply_socket(&mut self, connection: &Connection) -> Result<Arc<UnixStream>, Errno> {
        if let Some(socket) = &self.reply_socket {
            return Ok(Arc::clone(socket));
        }
        let socket = Arc::new(connection.reply_socket()?);
        Ok(Arc::clone(self.reply_socket.insert(socket)))
    }

    /// Returns the messages that may come next.
    fn limits(&self) -> ReceiveLimits {
        ReceiveLimits {
            bytes_max: REQUEST_BYTES_MAX,
            silence_max: (!self.has_begun).then_some(SILENCE_MAX),
            message_max: SILENCE_MAX,
            takes_descriptors: self.is_mount,
        }
    }
}

fn serve_connection(shared: &Arc<SharedState>, connection: &mut Connection, process: ConnectedProcess) {
    let mut peer = ConnectedPeer::new(shared, process);
    let user = peer.user.clone();
    let mut is_answered_elsewhere = false;
    loop {
        let serve = |owner: &SlotOwner, buffer: &mut Vec<u8>| serve_slot(shared, owner, buffer);
        // A process that waits for its copies asks nothing before it has the reply. Watching would take a core from the
        // threads that it waits for.
        if !std::mem::take(&mut is_answered_elsewhere) {
            shared.request_slots.watch_connection(connection, peer.slot_owner.as_ref(), serve);
        }
        let received = blame::contain(|| connection.receive_bounded::<Request>(&peer.limits()));
        let (request, descriptors) = match received {
            Ok(Ok(message)) => message,
            Ok(Err(_)) => return,
            Err(blame::Panicked) => return fence_after_panic(shared, peer.session.filter(|_| !peer.is_mount)),
        };
        peer.has_begun = true;
        if peer.slot_owner.is_some() {
            shared.request_slots.record_message();
        }
        let mut room = user.as_deref().filter(|_| may_be_long(&request)).map(UserShare::reserve_answer);
        let again = room.as_ref().map(|_| request.clone());
        let bytes_max = if user.is_some() { ANSWER_BYTES } else { usize::MAX };
        let mut answered = serve_contained(shared, connection, &mut peer, (request, descriptors), bytes_max);
        let is_long = matches!(answered, Some(Err(LONG)));
        if let Some(again) = again.filter(|_| is_long) {
            drop(room.take());
            room = user.as_deref().map(UserShare::reserve_all);
            answered = serve_contained(shared, connection, &mut peer, (again, Vec::new()), usize::MAX);
        }
        let answer = match answered {
            Some(Ok(answer)) => answer,
            Some(Err(ENDING)) => return,
            Some(Err(errno)) => Reply::Error(errno).into(),
            // A mount acts for many users, so only the request fails.
            None if peer.is_mount => Reply::Error(Errno::EIO).into(),
            None => return fence_after_panic(shared, peer.session),
        };
        let ReplyWithFiles { reply, files, takes_prepared, opening } = answer;
        let Some(reply) = reply else {
            is_answered_elsewhere = true;
            continue;
        };
        let with: Vec<BorrowedFd<'_>> = files.iter().map(|file| file.as_fd()).collect();
        let sent = match connection.send(&reply, &with) {
            // The session receives an error: otherwise it would ask the same again on another connection.
            Err(WireError::TooLong(bytes)) => {
                tracing::error!(bytes, "an answer is too long");
                connection.send(&Reply::Error(Errno::EIO), &[])
            }
            sent => sent,
        };
        drop((reply, files, room));
        if takes_prepared {
            // Not before the session has its answer: the preparation wants the same lock and the same cores.
            shared.pool.refill();
        }
        if let Some(opening) = opening {
            shared.helper.await_report(opening);
        }
        if sent.is_err() {
            return;
        }
    }
}

/// Returns whether the answer to a request may be long.
fn may_be_long(request: &Request) -> bool {
    use Request::{Acquire, Kept, Lookup, ReadDirectory, Status};
    matches!(request, Acquire(_) | Lookup { .. } | ReadDirectory { .. } | Kept(_) | Status)
}

/// Serves a request within the share of its user; returns `None` if it makes SharedFS panic.
fn serve_contained(
    shared: &Arc<SharedState>,
    connection: &mut Connection,
    peer: &mut ConnectedPeer,
    (request, descriptors): (Request, Vec<OwnedFd>),
    bytes_max: usize,
) -> Option<Result<ReplyWithFiles, Errno>> {
    let user = peer.user.clone();
    // To find space, SharedFS applies logs and commits.
    let employs_others = matches!(request, Request::Credit { .. } | Request::Quota(_));
    let _service = shared.user_shares.begin_service(user.as_deref(), employs_others);
    blame::contain(|| answer_request(shared, connection, peer, request, descriptors, bytes_max)).ok()
}

fn answer_request(
    shared: &Arc<SharedState>,
    connection: &mut Connection,
    peer: &mut ConnectedPeer,
    request: Request,
    descriptors: Vec<OwnedFd>,
    bytes_max: usize,
) -> Result<ReplyWithFiles, Errno> {
    shared.lock().counters.requests += 1;
    match (&request, peer.session) {
        (Request::Hello(hello), None) => {
            return match sessions::hello(shared, connection.socket(), peer.accepted_ticks, hello) {
                Ok(sessions::OpenedSession { welcome, files, others }) => {
                    peer.join_session(&shared.lock(), connection, welcome.peer.session)?;
                    peer.is_reclaiming = hello.resume.is_some();
                    let all = [files.log, files.control, files.leases].into_iter().chain(others.into_iter().flatten());
                    let files = all.map(|file| file as Arc<dyn AsFd + Send + Sync>).collect();
                    let takes_prepared = hello.kind == SessionKind::Process && hello.resume.is_none();
                    Ok(ReplyWithFiles {
                        takes_prepared,
                        ..ReplyWithFiles::of(Reply::Welcome(Box::new(welcome)), files)
                    })
                }
                Err(Refused::Because(sentence)) => Ok(Reply::Refused(sentence).into()),
                Err(Refused::Errno(errno)) => Err(errno),
            };
        }
        (Request::Attach { version, .. }, None) if !ashlar_wire::PROTOCOL_VERSIONS.covers(*version) => {
            let only = VersionRange::new(*version, *version);
            return Ok(Reply::Refused(sessions::wrong_version(only)).into());
        }
        (Request::Attach { peer: proof, .. }, None) => {
            // A session must resume first: only then SharedFS knows its mount and its locks again.
            let is_ready = |session: &&ServedSession| session.is_connected;
            let owner =
                find_session(&shared.lock().sessions, *proof).filter(is_ready).map(|found| found.identity.process);
            // Other processes may know the secret, such as a child that has given up rights.
            if !has_connected(&owner.ok_or(Errno::ESTALE)?, connection.socket(), peer.accepted_ticks) {
                return Err(Errno::EPERM);
            }
            let state = shared.lock();
            // Meanwhile the number may have passed to another session.
            let id = find_session(&state.sessions, *proof).ok_or(Errno::ESTALE)?.id;
            peer.join_session(&state, connection, id)?;
            return Ok(Reply::Done.into());
        }
        (
            Request::Status
            | Request::Fsck
            | Request::Resize { .. }
            | Request::Shutdown
            | Request::SetQuota { .. }
            | Request::Quotas
            | Request::CompareShadow { .. }
            | Request::Cluster(_),
            _,
        ) => {
            return status::answer_command(shared, connection.socket(), &request).map(ReplyWithFiles::from);
        }
        (Request::Space { subtree }, None) => {
            let answer = shared.lock().serve_request(NodeRequest::Space(*subtree), RequestTerms::OWN)?;
            return finish_answer(answer, Patience::Any).map(ReplyWithFiles::from);
        }
        _ => {}
    }
    let id = peer.session.ok_or(Errno::EPROTO)?;
    let _blame = Blame::for_request(shared.lock().sessions.asking(id, &request)?);
    let is_repeated = matches!(request, Request::Lock { .. } | Request::RegisterMount { .. } | Request::Reserve { .. });
    let reclaims = peer.is_reclaiming && is_repeated;
    if peer.is_reclaiming && !reclaims {
        record_return(&mut shared.lock(), id);
    }
    peer.is_reclaiming = reclaims;
    if let Request::Materialise { inode, flags } = request {
        let FileOpening { for_session, report } = materialise(shared, id, (inode, flags))?;
        let answer = ReplyWithFiles::of(Reply::OpenThere, vec![Arc::new(for_session)]);
        return Ok(ReplyWithFiles { opening: Some(report), ..answer });
    }
    let terms = RequestTerms { patience: Patience::Any, bytes_max, reclaims };
    if let Request::Lock { .. } = request {
        return set_lock(shared, id, request, terms, connection.socket().as_fd()).map(ReplyWithFiles::from);
    }
    let is_sync = matches!(request, Request::SyncAll | Request::SyncInode { .. } | Request::SyncDependencies(_));
    if is_sync && shared.leading.is_some() {
        let socket = peer.reply_socket(connection)?;
        return match shared.lock().serve_or_wait(id, request, terms, &socket)? {
            Some(answer) => finish_answer(answer, terms.patience).map(ReplyWithFiles::from),
            None => Ok(ReplyWithFiles::elsewhere()),
        };
    }
    serve_session(shared, id, request, descriptors, terms)
}

/// Returns a process's session as one that may ask in a request slot.
///
/// A mount has many threads with many connections.
fn slot_owner_of(session: &ServedSession, user: Option<&Arc<UserShare>>) -> Option<SlotOwner> {
    let is_process = session.identity.kind == SessionKind::Process;
    is_process.then(|| SlotOwner { id: session.id, control: Arc::clone(&session.control), user: user.cloned() })
}

fn serve_session(
    shared: &Arc<SharedState>,
    id: SessionId,
    request: Request,
    descriptors: Vec<OwnedFd>,
    terms: RequestTerms,
) -> Result<ReplyWithFiles, Errno> {
    Ok(match request {
        Request::LogSpace { bytes } => {
            sessions::grant_log_space(shared, id, bytes)?;
            Reply::Done.into()
        }
        Request::HandleSpace => {
            sessions::grant_handle_space(shared, id)?;
            Reply::Done.into()
        }
        Request::Segment(number) => {
            let (segment, file) = sessions::open_segment(&shared.arena, number)?;
            ReplyWithFiles::of(Reply::Segment(segment), vec![Arc::new(file)])
        }
        Request::RegisterMount { device: number, terms } => {
            let device = descriptors.into_iter().next().ok_or(Errno::EINVAL)?;
            register_mount(shared, id, device, number, terms)?.into()
        }
        Request::Goodbye => {
            sessions::end_sessions(shared, &[id]);
            Reply::Done.into()
        }
        Request::Leave => {
            sessions::leave_session(shared, id);
            Reply::Done.into()
        }
        Request::InodeRange => match ask_node(shared, id, request.clone(), terms) {
            // The arena's file system has no room for the lease table; retired sessions keep some.
            Err(Errno::ENOSPC) if give_up_kept(shared) => ask_node(shared, id, request, terms)?.into(),
            answered => answered?.into(),
        },
        Request::Map { .. } => {
            make_mapped_table(shared, id)?;
            ask_node(shared, id, request, terms)?.into()
        }
        request => ask_node(shared, id, request, terms)?.into(),
    })
}

/// Sets or removes a lock, and waits for it as long as the peer is there.
fn set_lock(
    shared: &SharedState,
    id: SessionId,
    request: Request,
    terms: RequestTerms,
    socket: BorrowedFd<'_>,
) -> Result<Reply, Errno> {
    let mut node = shared.lock();
    let ticket = node.begin_request(NodeRequest::Session(id, request), terms);
    let answer = node.await_answer(ticket, terms.patience, Some(socket));
    drop(node);
    finish_answer(answer?, terms.patience)
}

/// Makes a session's table of mapped files, if it has none.
fn make_mapped_table(shared: &SharedState, id: SessionId) -> Result<(), Errno> {
    for _ in 0..TABLE_TRIES {
        if shared.lock().live(id).ok_or(Errno::EIO)?.mapped.is_some() {
            return Ok(());
        }
        // It takes a while on a disk, so the lock is free meanwhile.
        match session_files::make_mapped_table(&shared.arena, id) {
            Ok(table) => {
                shared.lock().sessions.get_mut(&id).ok_or(Errno::EIO)?.mapped = Some(table);
                return Ok(());
            }
            // Another thread of the process has nearly made it.
            Err(SessionError::Arena(ArenaError::Io { source, .. }))
                if source.kind() == io::ErrorKind::AlreadyExists =>
            {
                std::thread::sleep(TABLE_PAUSE);
            }
            Err(error) => {
                tracing::warn!(session = id.0, %error, "the table of mapped files can't be made");
                return Err(Errno::EIO);
            }
        }
    }
    Err(Errno::EIO)
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
    match session.notifier.as_ref().and_then(notifier_of) {
        Some(notifier) => notifier.connect(device)?,
        None => session.notifier = Some(Notifier::start(device, shared.cache_ttl(), session.note_stale())?),
    }
    Ok(Reply::Done)
}
