//! Opens and ends sessions.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender};
use std::time::{Duration, Instant};

use ashlar_node::journal::NodeJournal;
use ashlar_node::leases::kernel_notifier::KernelNotifier;
use ashlar_node::pending::NodeRequest;
use ashlar_node::sessions::admission::{Refused, check_admission, check_room, find_session, user_of};
use ashlar_node::sessions::beginning::{BegunSession, begin_session, resume_session};
use ashlar_node::sessions::identity::SessionIdentity;
use ashlar_node::sessions::removal::{RemovedSession, remove_ended_sessions};
use ashlar_node::sessions::session::{Control, LogRoom, ServedSession};
use ashlar_node::{Node, NodeEffect};
use ashlar_pmem::{Arena, MediumKind};
use ashlar_processes::process::{identify_peer, open_process};
use ashlar_types::{Errno, InodeId, LogGeneration, SessionId, VersionRange};
use ashlar_wire::{Hello, PROTOCOL_VERSIONS, Peer, SessionKind, Welcome, WelcomeSegment};

use crate::length_check;
use crate::mount_notifier::{abort_dead_mount, notifier_of};
use crate::quarantine::quarantine_fenced;
use crate::retired::RetiredSession;
use crate::retired_files;
use crate::session_files::{PreparedSession, SessionFiles};
use crate::session_pool;
use crate::shared_state::{SharedState, StateGuard};

/// How long a new session sleeps before it checks kernels' names again.
///
/// Forgetting them takes about as long.
const FORGETTING_PAUSE: Duration = Duration::from_micros(100);

/// Returns how much of a log has room when its session begins.
///
/// A mount can write as much as its log holds, whatever else becomes full. Most processes log little before they end,
/// and those that go on ask for more.
fn log_beginning(kind: SessionKind, log_bytes: u64) -> u64 {
    if kind == SessionKind::Mount { log_bytes } else { session_pool::LOG_BEGINNING.min(log_bytes) }
}

/// The answer to a first message.
pub struct OpenedSession {
    /// The welcome message.
    pub welcome: Welcome,
    /// The session's files, which are sent with it.
    pub files: SessionFiles,
    /// Further files for a process.
    ///
    /// They are a data segment, the grant cache, and the placeholder. A mount asks for everything: its kernel's cache
    /// is taken back with the mount's own leases.
    pub others: [Option<Arc<File>>; 3],
}

/// Opens a new session for the peer of a socket, or resumes one that it had.
///
/// The connection was accepted at `accepted_ticks`.
pub fn hello(
    shared: &SharedState,
    socket: impl AsFd,
    accepted_ticks: u64,
    hello: &Hello,
) -> Result<OpenedSession, Refused> {
    let version = PROTOCOL_VERSIONS.negotiate(hello.versions);
    let version = version.ok_or_else(|| Refused::Because(wrong_version(hello.versions)))?;
    let (identity, ending) =
        identify_peer(socket, accepted_ticks, hello.kind, &hello.label).map_err(Refused::Because)?;
    let mut opened = match hello.resume {
        Some(peer) => reopen_session(shared, peer, &identity, hello)?,
        None => open_session(shared, identity, ending, hello)?,
    };
    opened.welcome.version = version;
    Ok(opened)
}

/// Returns the sentence for a peer of other versions.
pub fn wrong_version(versions: VersionRange) -> String {
    format!("this daemon speaks protocol {PROTOCOL_VERSIONS}, not {versions}; use the same release on both sides")
}

fn open_session(
    shared: &SharedState,
    identity: SessionIdentity,
    ending: OwnedFd,
    hello: &Hello,
) -> Result<OpenedSession, Refused> {
    {
        let state = shared.lock();
        if state.ending {
            return Err(Refused::Because("the daemon is shutting down".into()));
        }
        let own = rustix::process::geteuid().as_raw();
        check_admission(&state.sessions, &shared.config.sessions, &identity, hello.beside, own)?;
        check_room(state.sessions.values().map(user_of), identity.uid)?;
    }
    if length_check::is_user_over(shared, identity.uid) {
        let user = identity.uid;
        return Err(Refused::Because(format!("processes of user {user} keep the files of ended sessions; end them")));
    }
    let prepared = match identity.kind {
        SessionKind::Process => shared.pool.take(&identity.credentials()).map_or_else(|| prepare_session(shared), Ok),
        SessionKind::Mount => make_session(shared, SessionKind::Mount),
    };
    let refused = |error| Refused::Because(format!("no session can be made: {error}"));
    let prepared = prepared.map_err(refused)?;
    let id = prepared.id;
    let now = ashlar_processes::clock::boot_time();
    let (session, files) = prepared.give_to(identity, now).map_err(|error| {
        retired_files::remove(shared, id);
        refused(error.to_string())
    })?;
    let mut guard = shared.lock();
    let state = &mut *guard;
    let BegunSession { inodes, disturbed } =
        begin_session(state, session, hello.yields_to_kernel).inspect_err(|_| {
            // Other sessions were faster.
            retired_files::remove_with(shared, state, id);
        })?;
    shared.session_files.lock().insert(id, files.clone());
    watch_files(shared, state, id);
    let session = &state.sessions[&id];
    let SessionIdentity { process, uid, kind, label, .. } = &session.identity;
    // A line for each program would fill the disk in time.
    match kind {
        SessionKind::Mount => tracing::info!(session = id.0, pid = process.pid, uid, %label, "mounted"),
        SessionKind::Process => tracing::debug!(session = id.0, pid = process.pid, uid, %label, "session opened"),
    }
    let opened = make_welcome(shared, state, session, files, inodes);
    drop(guard);
    watch_process(shared, id, ending);
    await_forgetting(shared, &disturbed);
    Ok(opened)
}

/// Watches for the end of a session's process.
pub fn watch_process(shared: &SharedState, id: SessionId, process: OwnedFd) {
    if let Err(error) = shared.watcher.add(id, process) {
        tracing::error!(session = id.0, %error, "a process can't be watched; the next start removes its session");
    }
}

/// Watches for files of a session that its process makes longer.
pub fn watch_files(shared: &SharedState, state: &Node, id: SessionId) {
    if let Some(Err(error)) = state.sessions.get(&id).map(|session| shared.file_guard.watch(session)) {
        tracing::error!(session = id.0, %error, "the lengths of a session's files can't be watched");
    }
}

/// Prepares a session for a process; an error says why that fails.
pub fn prepare_session(shared: &SharedState) -> Result<PreparedSession, String> {
    make_session(shared, SessionKind::Process)
}

fn make_session(shared: &SharedState, kind: SessionKind) -> Result<PreparedSession, String> {
    let id = shared.lock().store.next_session_id().map_err(|error| error.to_string())?;
    // Making the files may take a while on a disk, so the lock is free meanwhile.
    let bytes = shared.config.log_bytes_for(shared.arena.summary().size_bytes);
    let room = LogRoom { bytes, allocated: log_beginning(kind, bytes) };
    let made = retry_with_room(shared, || PreparedSession::make(&shared.arena, id, room));
    let make_whole =
        |prepared: &PreparedSession| if kind == SessionKind::Mount { prepared.make_whole() } else { Ok(()) };
    let whole = made.and_then(|prepared| retry_with_room(shared, || make_whole(&prepared)).map(|()| prepared));
    whole.map_err(|error| {
        // The next start removes files that can't be removed now.
        let _ = shared.arena.remove_session(id);
        error.to_string()
    })
}

/// Makes something that takes room in the arena's file system.
///
/// If that fails, it removes the retired sessions and tries again.
fn retry_with_room<T, E>(shared: &SharedState, make: impl Fn() -> Result<T, E>) -> Result<T, E> {
    make().or_else(|error| if retired_files::give_up_kept(shared) { make() } else { Err(error) })
}

/// Waits until kernels of mounts that were alone have forgotten names.
///
/// A kernel keeps some only for a sole mount. If a mount can't make its kernel forget, or does not answer, this waits
/// until the kernel may not believe them any more.
fn await_forgetting(shared: &SharedState, disturbed: &[(Arc<Control>, u64)]) {
    let deadline = Instant::now() + shared.cache_ttl();
    let is_due = || disturbed.iter().any(|(control, company)| control.company_known() != *company);
    while is_due() && Instant::now() < deadline {
        std::thread::sleep(FORGETTING_PAUSE);
    }
}

fn reopen_session(
    shared: &SharedState,
    peer: Peer,
    identity: &SessionIdentity,
    hello: &Hello,
) -> Result<OpenedSession, Refused> {
    let mut state = shared.lock();
    if state.ending {
        return Err(Refused::Because("the daemon is shutting down".into()));
    }
    resume_session(&mut state, peer, identity, hello.yields_to_kernel).map_err(Refused::Errno)?;
    let session = find_session(&state.sessions, peer).ok_or(Refused::Errno(Errno::ESTALE))?;
    let files = shared.session_files.lock().get(&peer.session).cloned().ok_or(Refused::Errno(Errno::ESTALE))?;
    let opened = make_welcome(shared, &state, session, files, (InodeId(0), 0));
    tracing::info!(session = peer.session.0, "session resumed");
    Ok(opened)
}

fn make_welcome(
    shared: &SharedState,
    state: &Node,
    session: &ServedSession,
    files: SessionFiles,
    inodes: (InodeId, u64),
) -> OpenedSession {
    let medium = shared.arena.medium();
    // The room of a session that was taken up is not known, but it is at least that.
    let log_beginning = log_beginning(session.identity.kind, session.log_room.bytes);
    let is_process = session.identity.kind == SessionKind::Process;
    // A session that receives none asks for one, and receives the error.
    let first = shared.arena.segments().first().filter(|_| is_process).map(|segment| segment.number);
    let segment = first.and_then(|number| open_segment(&shared.arena, number).ok());
    let (segment, segment_file) = segment.map_or((None, None), |(segment, file)| (Some(segment), Some(Arc::new(file))));
    let welcome = Welcome {
        version: PROTOCOL_VERSIONS.current,
        peer: Peer { session: session.id, token: session.token },
        log_bytes: session.log_room.bytes,
        log_allocated: session.log_room.allocated.max(log_beginning),
        log_generation: LogGeneration(session.log.generation().0),
        arena: shared.arena.summary().id,
        sync_needed: medium.kind == MediumKind::Disk,
        is_replicated: state.journal.as_ref().is_some_and(NodeJournal::answers_syncs),
        flush_needed: medium.kind == MediumKind::Pmem || medium.emulated,
        emulated: medium.emulated,
        hash_key: state.store.hash_key(),
        cache_ttl_ms: shared.config.cache_ttl_ms,
        segment_version: session.control.segment_version(),
        segment,
        inodes,
    };
    let grant_cache = shared.grant_cache.clone().filter(|_| is_process);
    // The process knows it by its position, behind the grant cache.
    let placeholder = grant_cache.as_ref().and(shared.placeholder.clone());
    OpenedSession { welcome, files, others: [segment_file, grant_cache, placeholder] }
}

/// Gives a session's log room up to a byte.
pub fn grant_log_space(shared: &SharedState, id: SessionId, bytes: u64) -> Result<(), Errno> {
    let (log, before) = {
        let state = shared.lock();
        let session = state.live(id).ok_or(Errno::EIO)?;
        if bytes > session.log_room.bytes {
            return Err(Errno::EINVAL);
        }
        (Arc::clone(&session.log_memory), session.log_room.allocated)
    };
    if bytes <= before {
        return Ok(());
    }
    // It takes a while, so the lock is free meanwhile.
    retry_with_room(shared, || log.allocate(before..bytes)).map_err(|error| to_errno(&error))?;
    if let Some(session) = shared.lock().sessions.get_mut(&id) {
        session.log_room.allocated = session.log_room.allocated.max(bytes);
    }
    Ok(())
}

/// Gives all slots for a session's open handles room.
pub fn grant_handle_space(shared: &SharedState, id: SessionId) -> Result<(), Errno> {
    let control = Arc::clone(&shared.lock().live(id).ok_or(Errno::EIO)?.control);
    // It takes a while, so the lock is free meanwhile.
    retry_with_room(shared, || ServedSession::make_handle_room(&control)).map_err(|error| to_errno(&error))
}

fn to_errno(error: &io::Error) -> Errno {
    error.raw_os_error().map_or(Errno::EIO, Errno)
}

/// Ends sessions whose processes are gone or closed them.
///
/// All that they logged is digested, and all that they held is free. One commit serves all of them.
pub fn end_sessions(shared: &SharedState, ids: &[SessionId]) {
    let mut state = begin_end(shared, ids, |_, _| true);
    // The end of SharedFS tries again, and reports a failure.
    if state.perform(NodeRequest::Commit).is_err() && !state.ending {
        tracing::warn!("ended sessions stay until their logs can be committed");
    }
    remove_ended(shared, &mut state);
    // It fails only when SharedFS ends.
    let _ = state.perform(NodeRequest::SweepOrphans);
    state.effects.push(NodeEffect::WakeDigests);
    state.request_digest();
}

/// Ends a session that need not wait for the commit.
///
/// It is committed and removed in the background. Other sessions see its updates on return.
pub fn leave_session(shared: &SharedState, id: SessionId) {
    leave_where(shared, &[id], |_, _| true);
}

/// Does as [`leave_session`] for the sessions that `is_meant` accepts.
///
/// While the lock is free, a session's number may pass to another process at any time.
fn leave_where(shared: &SharedState, ids: &[SessionId], is_meant: impl Fn(SessionId, &ServedSession) -> bool) {
    let mut state = begin_end(shared, ids, is_meant);
    state.request_commit();
    state.request_digest();
}

/// Applies all that sessions have logged, and takes their leases and locks.
fn begin_end<'a>(
    shared: &'a SharedState,
    ids: &[SessionId],
    is_meant: impl Fn(SessionId, &ServedSession) -> bool,
) -> StateGuard<'a> {
    let mut state = shared.lock();
    let is_meant = |id: &&SessionId| state.sessions.get(id).is_some_and(|session| is_meant(**id, session));
    let meant: Vec<_> = ids.iter().filter(is_meant).copied().collect();
    for id in &meant {
        let notifier = state.sessions.get_mut(id).and_then(|session| {
            session.is_ending = true;
            session.notifier.take()
        });
        if let Some(notifier) = notifier.as_ref().and_then(notifier_of) {
            notifier.stop(false);
        }
    }
    // It has no error of its own.
    let _ = state.perform(NodeRequest::EndSessions(meant));
    state
}

/// Removes the ended sessions that are committed as a whole, and their files.
pub fn remove_ended(shared: &SharedState, state: &mut Node) {
    quarantine_fenced(&shared.arena, state);
    for RemovedSession { session, end, is_reusable } in remove_ended_sessions(state) {
        let id = session.id;
        shared.session_files.lock().remove(&id);
        match session.identity.kind {
            SessionKind::Mount => tracing::info!(session = id.0, records = session.records, "unmounted"),
            SessionKind::Process => tracing::debug!(session = id.0, records = session.records, "session ended"),
        }
        if session.fenced.is_some() {
            // Its files are quarantined.
            state.remove_session_row(id);
        } else if !is_reusable || shared.pool.keep(RetiredSession::of(session, end)).is_some() {
            retired_files::remove_with(shared, state, id);
        }
        shared.watcher.remove(id);
    }
}

/// Cuts off the mounts of sessions whose processes have died.
///
/// Their ends take a commit, and programs that use the mounts must not wait for that.
fn cut_off_mounts(shared: &SharedState, ids: &[SessionId]) {
    let mounts: Vec<_> = {
        let mut state = shared.lock();
        state.counters.sessions_died += ids.len() as u64;
        let mount =
            |session: &mut ServedSession| session.notifier.take().map(|notifier| (notifier, session.mount_device));
        ids.iter().filter_map(|id| state.sessions.get_mut(id).and_then(mount)).collect()
    };
    for (notifier, device) in mounts {
        let notifier: Arc<dyn KernelNotifier> = notifier;
        if !notifier_of(&notifier).is_some_and(|notifier| notifier.stop(true)) {
            // It had not returned to this SharedFS yet.
            abort_dead_mount(device, &shared.config.arena);
        }
    }
}

/// Runs the thread that ends sessions whose processes have died.
///
/// It waits for no commit: that may take until a replica is back, and what other dead sessions hold must become free.
pub fn end_thread(shared: &SharedState, died: &Receiver<Vec<SessionId>>) {
    while let Ok(mut ids) = died.recv() {
        ids.extend(died.try_iter().flatten());
        // The number may be another process's by now.
        let mut gone: Vec<_> = {
            let state = shared.lock();
            ids.iter().filter_map(|id| Some((*id, state.sessions.get(id)?.identity.process))).collect()
        };
        gone.retain(|(_, process)| open_process(process).is_none());
        leave_where(shared, &ids, |id, session| gone.contains(&(id, session.identity.process)));
    }
}

/// Runs the thread that learns of the deaths of processes.
pub fn watch_thread(shared: &SharedState, died: &Sender<Vec<SessionId>>) {
    loop {
        match shared.watcher.wait() {
            Ok(ended) if !ended.is_empty() => {
                cut_off_mounts(shared, &ended);
                if died.send(ended).is_err() {
                    return;
                }
            }
            Ok(_) => {}
            Err(error) => {
                tracing::error!(%error, "processes can't be watched");
                std::thread::sleep(std::time::Duration::from_secs(1));
            }
        }
        if shared.lock().ending {
            return;
        }
    }
}

/// Returns a data segment, and its file.
pub fn open_segment(arena: &Arena, number: u32) -> Result<(WelcomeSegment, File), Errno> {
    let found = arena.segments().into_iter().find(|segment| segment.number == number).ok_or(Errno::EINVAL)?;
    let file = arena.segment_file(number, false).map_err(|error| {
        tracing::error!(number, %error, "a segment can't be opened");
        Errno::EIO
    })?;
    Ok((WelcomeSegment { number, blocks: found.blocks, data_offset: found.data_offset() }, file))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_sessions::{identity, insert_session, make_arena, start};

    /// An ending session must stay between two steps of its log's application.
    ///
    /// A commit between them must not remove it. The rest of its log was lost once.
    #[test]
    fn ending_session_stays_while_its_log_is_applied_in_steps() {
        let place = tempfile::tempdir().expect("a directory");
        make_arena(place.path());
        let shared = start(crate::Config::new(place.path()));
        let own = identity(std::process::id(), 0);
        let prepared = prepare_session(&shared).expect("made");
        let (mut session, _) = prepared.give_to(own, ashlar_processes::clock::boot_time()).expect("given");
        (session.is_ending, session.enders) = (true, 1);
        let id = insert_session(&shared, session);
        let mut state = shared.lock();
        remove_ended(&shared, &mut state);
        assert!(state.sessions.contains_key(&id), "its applied records are committed, but there are more");
        state.sessions.entry(id).and_modify(|session| session.enders = 0);
        remove_ended(&shared, &mut state);
        assert!(!state.sessions.contains_key(&id));
    }
}
