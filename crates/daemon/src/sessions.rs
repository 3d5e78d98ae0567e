//! Beginnings and ends of sessions.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender};
use std::time::{Duration, Instant};

use ashlar_pmem::MediumKind;
use ashlar_types::{Errno, InodeId, LogGeneration, LogPosition, SessionId};
use ashlar_wire::{CreditKind, Hello, LEASE_SLOTS, PROTOCOL_VERSION, Peer, SessionKind, Welcome};

use crate::apply::Slice;
use crate::credit;
use crate::ended::{self, Ended};
use crate::identity::Identity;
use crate::materialise;
use crate::serve;
use crate::session::{Blank, Control, LogRoom, Session, SessionFiles};
use crate::shared::Shared;
use crate::state::State;

/// Inode numbers in one range. A crash loses at most so many of them per session.
const RANGE: u64 = 4096;
/// Inode numbers that a process begins with: most make few files or none.
const FIRST_RANGE: u64 = 64;
/// Slots of a session's lease table that are not for what it makes: for what it asks for at once.
const LEASES_KEPT: u64 = 128;
const _: () = assert!(FIRST_RANGE <= RANGE && RANGE <= crate::page::RANGE_MAX);

/// The most sessions at once: each has a log in the arena. One ordinary user gets a part of them, and all of them together leave
/// some to root, as which mounts run: nobody can keep others out.
const SESSIONS_MAX: usize = 256;
const SESSIONS_OF_USER_MAX: usize = 32;
/// So many of a user's that are ending don't count for that part. They go with the next commit, and programs that follow one another end faster
/// than batches are committed; all of them count for the whole, so that there are never more logs.
const SESSIONS_OF_USER_ENDING: usize = 32;
const SESSIONS_OF_ROOT: usize = 64;

/// How long a new session sleeps before it looks again whether kernels have forgotten names: about as long as that takes.
const FORGETTING_PAUSE: Duration = Duration::from_micros(100);
/// Bytes of a process's log that have room in the arena when it begins.
pub const LOG_BEGINNING: u64 = 64 << 10;

/// How much of a log has room when it begins. A mount can write as much as its log holds, whatever else becomes full; of processes
/// most log little before they end, and those that go on ask for more.
fn log_beginning(kind: SessionKind, log_bytes: u64) -> u64 {
    if kind == SessionKind::Mount { log_bytes } else { LOG_BEGINNING.min(log_bytes) }
}

/// The answer to a first message.
pub struct Opened {
    /// What to say.
    pub welcome: Welcome,
    /// The session's files go with it …
    pub files: SessionFiles,
    /// … and for a process a data segment, the board, and what it has in the kernel in the place of its files. A mount
    /// asks for everything: what its kernel keeps is taken back with the mount's own leases.
    pub others: [Option<Arc<File>>; 3],
}

/// Why a session can't begin.
#[derive(Debug)]
pub enum Refused {
    /// A sentence for people.
    Because(String),
    /// A number for programs.
    Errno(Errno),
}

/// Opens a new session for the peer of a socket, or lets it go on with one it had.
pub fn hello(shared: &Shared, socket: impl AsFd, hello: &Hello) -> Result<Opened, Refused> {
    if hello.version != PROTOCOL_VERSION {
        return Err(Refused::Because(wrong_version(hello.version)));
    }
    let (identity, ending) = Identity::of_peer(socket, hello.kind, &hello.label).map_err(Refused::Because)?;
    match hello.resume {
        Some(peer) => resume(shared, peer, &identity, hello),
        None => open(shared, identity, ending, hello),
    }
}

/// What to say to a peer of another version.
pub fn wrong_version(version: u32) -> String {
    format!("this daemon speaks protocol version {PROTOCOL_VERSION}, not {version}; use the same release on both sides")
}

fn open(shared: &Shared, identity: Identity, ending: OwnedFd, hello: &Hello) -> Result<Opened, Refused> {
    {
        let state = shared.lock();
        if state.ending {
            return Err(Refused::Because("the daemon is shutting down".into()));
        }
        // The kernel shows what nobody serves, and so knows nothing of it: what is open could not become the kernel's.
        if hello.beside != 0 && !materialise::is_mount(&state, hello.beside) {
            return Err(Refused::Because("nobody serves the mount any more; unmount it, and mount it again".into()));
        }
        check_room(state.sessions.values().map(of_whom), identity.uid)?;
    }
    let blank = match identity.kind {
        SessionKind::Process => shared.pool.take(&identity.credentials()).map_or_else(|| blank(shared), Ok),
        SessionKind::Mount => make(shared, SessionKind::Mount),
    };
    let refused = |error| Refused::Because(format!("no session can be made: {error}"));
    let blank = blank.map_err(refused)?;
    let (id, is_new) = (blank.id, blank.only_for.is_none());
    let mut session = blank.give(identity).map_err(|error| {
        ended::remove(shared, id);
        refused(error.to_string())
    })?;
    let mut state = shared.lock();
    if let Err(refused) = check_room(state.sessions.values().map(of_whom), session.identity.uid) {
        // Others were faster.
        ended::remove_with(shared, &mut state, id);
        return Err(refused);
    }
    let Identity { process, uid, kind, label, .. } = &session.identity;
    // A line for each program would fill the disk in time.
    match kind {
        SessionKind::Mount => tracing::info!(session = id.0, pid = process.pid, uid, %label, "mounted"),
        SessionKind::Process => tracing::debug!(session = id.0, pid = process.pid, uid, %label, "session opened"),
    }
    if state.store.has_quota_limits() {
        session.raise_quota_version(true);
    }
    if is_new {
        state.store.set_session(id, session.log.generation(), LogPosition(0));
    }
    state.counters.sessions_opened += 1;
    let inodes = begin_with_means(&mut state, &mut session);
    let opened = welcome(shared, &state, &session, inodes);
    if state.sessions.is_empty() {
        // There was nothing to look at.
        shared.digest_wanted.notify_all();
    }
    state.leasing.take_up(&session);
    admit(&mut state, id, hello);
    state.sessions.insert(id, Session { is_connected: true, ..session });
    let disturbed = state.note_sharing();
    drop(state);
    watch(shared, id, ending);
    await_forgetting(shared, &disturbed);
    Ok(opened)
}

/// Has the end of a session's process be told.
pub fn watch(shared: &Shared, id: SessionId, process: OwnedFd) {
    if let Err(error) = shared.watcher.add(id, process) {
        tracing::error!(session = id.0, %error, "a process can't be watched; what is left of it goes at the next start");
    }
}

/// Makes a process's session that is nobody's yet; else says why there is none.
pub fn blank(shared: &Shared) -> Result<Blank, String> {
    make(shared, SessionKind::Process)
}

fn make(shared: &Shared, kind: SessionKind) -> Result<Blank, String> {
    let id = shared.lock().store.next_session_id().map_err(|error| error.to_string())?;
    // Making the files may take a while on a disk, so nobody waits for it.
    let bytes = shared.config.log_bytes_for(shared.arena.summary().size_bytes);
    let room = LogRoom { bytes, allocated: log_beginning(kind, bytes) };
    let made = with_room(shared, || Blank::make(&shared.arena, id, room));
    let make_whole = |blank: &Blank| if kind == SessionKind::Mount { blank.make_whole() } else { Ok(()) };
    let whole = made.and_then(|blank| with_room(shared, || make_whole(&blank)).map(|()| blank));
    whole.map_err(|error| {
        // What can't be removed now goes at the next start.
        let _ = shared.arena.remove_session(id);
        error.to_string()
    })
}

/// Makes something that takes room of the arena's file system. Where that fails, there may be none but what is kept for programs to come.
fn with_room<T, E>(shared: &Shared, make: impl Fn() -> Result<T, E>) -> Result<T, E> {
    make().or_else(|error| if shared.pool.give_up_kept(shared) { make() } else { Err(error) })
}

/// Waits until mounts that were alone have had their kernels forget names: a kernel keeps some only for a lone mount. One that cannot
/// have it forget, or does not answer, is waited for until it may not believe them any more.
fn await_forgetting(shared: &Shared, disturbed: &[(Arc<Control>, u64)]) {
    let deadline = Instant::now() + shared.cache_ttl();
    let is_due = || disturbed.iter().any(|(control, company)| control.company_known() != *company);
    while is_due() && Instant::now() < deadline {
        std::thread::sleep(FORGETTING_PAUSE);
    }
}

/// Whose session it is, and whether it's ending.
fn of_whom(session: &Session) -> (u32, bool) {
    (session.identity.uid, session.is_ending)
}

/// Whether there is room for one more session of a user beside those of others and of its own, each with whether it's ending.
fn check_room(sessions: impl Iterator<Item = (u32, bool)>, user: u32) -> Result<(), Refused> {
    let (mut all, mut own, mut ending) = (0, 0, 0_usize);
    for (other, is_ending) in sessions {
        all += 1;
        own += usize::from(other == user && !is_ending);
        ending += usize::from(other == user && is_ending);
    }
    own += ending.saturating_sub(SESSIONS_OF_USER_ENDING);
    if user != 0 && own >= SESSIONS_OF_USER_MAX {
        return Err(Refused::Because(format!("user {user} has {own} sessions already; end some of them")));
    }
    let most = if user == 0 { SESSIONS_MAX } else { SESSIONS_MAX - SESSIONS_OF_ROOT };
    if all >= most {
        return Err(Refused::Because(format!("there are {all} sessions already; end some of them")));
    }
    Ok(())
}

fn resume(shared: &Shared, peer: Peer, identity: &Identity, hello: &Hello) -> Result<Opened, Refused> {
    let mut state = shared.lock();
    if state.ending {
        return Err(Refused::Because("the daemon is shutting down".into()));
    }
    let session = find(&state, peer).ok_or(Refused::Errno(Errno::ESTALE))?;
    if session.fenced.is_some() || session.identity.process != identity.process {
        return Err(Refused::Errno(Errno::EIO));
    }
    let opened = welcome(shared, &state, session, (InodeId(0), 0));
    state.counters.sessions_resumed += 1;
    admit(&mut state, peer.session, hello);
    let State { locking, sessions, .. } = &mut *state;
    // A SharedFS that it has come back to already knows more than its copies tell.
    if sessions.get(&peer.session).is_some_and(|session| !session.is_connected) {
        locking.take_up_again(peer.session, sessions);
    }
    locking.note_reclaimed();
    tracing::info!(session = peer.session.0, "session resumed");
    Ok(opened)
}

/// Refuses a session nothing that is reserved for the kernel, where the kernel can't serve it instead.
fn admit(state: &mut State, id: SessionId, hello: &Hello) {
    if !hello.yields_to_kernel {
        state.leasing.manager.admit_to_reserved(id);
    }
}

/// A session that has resumed has asked for all that an earlier SharedFS knew.
pub fn note_back(state: &mut State, id: SessionId) {
    if let Some(session) = state.sessions.get_mut(&id) {
        session.is_connected = true;
    }
    state.locking.note_back(id);
}

/// The session that a connection proves to belong to.
pub fn find(state: &State, peer: Peer) -> Option<&Session> {
    state.sessions.get(&peer.session).filter(|session| session.token == peer.token)
}

/// Gives a process's session what nearly every one asks for that makes or writes anything: inode numbers, and credit. Where there is none to be
/// had it asks, and hears why.
fn begin_with_means(state: &mut State, session: &mut Session) -> (InodeId, u64) {
    let none = (InodeId(0), 0);
    if session.identity.kind == SessionKind::Mount
        || session.grant_credit(credit::to_begin_with(state), CreditKind::Common).is_err()
    {
        return none;
    }
    let Ok(range) = state.store.allocate_inodes(FIRST_RANGE) else { return none };
    let first = InodeId(range.start);
    session.ranges.add(&*session.page, first, FIRST_RANGE).map_or(none, |()| (first, FIRST_RANGE))
}

fn welcome(shared: &Shared, state: &State, session: &Session, inodes: (InodeId, u64)) -> Opened {
    let medium = shared.arena.medium();
    // Of a session that was found it isn't known how much there is, but at least that.
    let log_beginning = log_beginning(session.identity.kind, session.log_room.bytes);
    let is_process = session.identity.kind == SessionKind::Process;
    // Who is told of none asks, and hears what is wrong.
    let first = shared.arena.segments().first().filter(|_| is_process).map(|segment| segment.number);
    let segment = first.and_then(|number| serve::segment(shared, number).ok());
    let (segment, segment_file) = segment.map_or((None, None), |(segment, file)| (Some(segment), Some(Arc::new(file))));
    let welcome = Welcome {
        peer: Peer { session: session.id, token: session.token },
        log_bytes: session.log_room.bytes,
        log_allocated: session.log_room.allocated.max(log_beginning),
        log_generation: LogGeneration(session.log.generation().0),
        arena: shared.arena.summary().id,
        sync_needed: medium.kind == MediumKind::Disk,
        flush_needed: medium.kind == MediumKind::Pmem || medium.emulated,
        emulated: medium.emulated,
        hash_key: state.store.hash_key(),
        cache_ttl_ms: shared.config.cache_ttl_ms,
        segment_version: session.control.segment_version(),
        segment,
        inodes,
    };
    let grant_cache =
        state.grant_cache.as_ref().filter(|_| is_process).map(|grant_cache| Arc::clone(grant_cache.file()));
    // The process knows it by its place, behind the board.
    let placeholder = grant_cache.as_ref().and(shared.placeholder.clone());
    Opened { welcome, files: session.files.clone(), others: [segment_file, grant_cache, placeholder] }
}

/// Gives a session's log room up to a byte.
pub fn log_space(shared: &Shared, id: SessionId, bytes: u64) -> Result<(), Errno> {
    let (log, before) = {
        let state = shared.lock();
        let session = state.live(id).ok_or(Errno::EIO)?;
        if bytes > session.log_room.bytes {
            return Err(Errno::EINVAL);
        }
        (Arc::clone(&session.files.log), session.log_room.allocated)
    };
    if bytes <= before {
        return Ok(());
    }
    // It takes a while, so nobody waits for it.
    with_room(shared, || ashlar_pmem::allocate(&log, before..bytes)).map_err(|error| errno(&error))?;
    if let Some(session) = shared.lock().sessions.get_mut(&id) {
        session.log_room.allocated = session.log_room.allocated.max(bytes);
    }
    Ok(())
}

/// Gives all slots for a session's open handles room.
pub fn handle_space(shared: &Shared, id: SessionId) -> Result<(), Errno> {
    let control = Arc::clone(&shared.lock().live(id).ok_or(Errno::EIO)?.control);
    // It takes a while, so nobody waits for it.
    with_room(shared, || Session::make_handle_room(&control)).map_err(|error| errno(&error))
}

fn errno(error: &io::Error) -> Errno {
    error.raw_os_error().map_or(Errno::EIO, Errno)
}

/// A range of inode numbers for a session.
pub fn inode_range(shared: &Shared, id: SessionId) -> Result<(InodeId, u64), Errno> {
    let mut state = shared.lock();
    if state.live(id).ok_or(Errno::EIO)?.ranges.is_full() {
        // The oldest range is forgotten next; records that use its numbers must have been judged by then.
        state = shared.apply_settled(state, id);
    }
    // What others see of what is made may get a lease of its own, which nobody asks for: there are no more numbers than have room for that.
    let free = |state: &State| {
        let left = |session: &Session| u64::from(session.lease_room - session.lease_top);
        state.live(id).map(|session| if session.lease_room == LEASE_SLOTS { u64::MAX } else { left(session) })
    };
    if free(&state).ok_or(Errno::EIO)? <= LEASES_KEPT + FIRST_RANGE {
        let room = state.live(id).ok_or(Errno::EIO)?.lease_room;
        if let Err(error) = crate::grant::make_lease_room(&mut state, id, room) {
            drop(state);
            return if shared.pool.give_up_kept(shared) { inode_range(shared, id) } else { Err(errno(&error)) };
        }
    }
    let count = free(&state).ok_or(Errno::EIO)?.saturating_sub(LEASES_KEPT).clamp(1, RANGE);
    let range = state.store.allocate_inodes(count).map_err(|error| {
        tracing::error!(%error, "no inode numbers");
        Errno::EIO
    })?;
    let first = InodeId(range.start);
    let session = state.sessions.get_mut(&id).filter(|session| session.fenced.is_none()).ok_or(Errno::EIO)?;
    session.ranges.add(&*session.page, first, count).map_err(|_| Errno::EIO)?;
    Ok((first, count))
}

/// Ends sessions whose processes are gone, or that said goodbye: everything they logged is digested, and what they held is
/// free. One commit serves all of them.
pub fn end(shared: &Shared, ids: &[SessionId]) {
    end_where(shared, ids, |_, _| true);
}

/// As [`end`], as far as a number is still that of the session which is meant: another one may go on with it at any time that the lock is free.
fn end_where(shared: &Shared, ids: &[SessionId], is_meant: impl Fn(SessionId, &Session) -> bool) {
    let mut state = begin_end(shared, ids, is_meant);
    if shared.commit_all(&mut state).is_err() {
        tracing::warn!("ended sessions stay until their logs can be committed");
    }
    remove_ended(shared, &mut state);
    state = crate::digest::sweep_orphans(shared, state);
    shared.progress.notify_all();
    shared.digest_wanted.notify_all();
    drop(state);
}

/// Ends a session that waits for nothing more than that others see what it did: it is committed and removed in the background.
pub fn leave(shared: &Shared, id: SessionId) {
    let mut state = begin_end(shared, &[id], |_, _| true);
    shared.want_commit(&mut state);
    shared.want_digest(&mut state);
}

/// Applies all of what sessions have logged, and takes their leases and locks.
fn begin_end<'a>(
    shared: &'a Shared,
    ids: &[SessionId],
    is_meant: impl Fn(SessionId, &Session) -> bool,
) -> parking_lot::MutexGuard<'a, State> {
    let mut state = shared.lock();
    for &id in ids {
        let Some(session) = state.sessions.get_mut(&id).filter(|session| is_meant(id, session)) else { continue };
        session.is_ending = true;
        if let Some(notifier) = session.notifier.take() {
            notifier.end(false);
        }
        state.store.unmap_blocks(id, None);
        let Some(session) = state.live(id) else { continue };
        // Sealing voids what a thread that is no more had begun to append.
        match session.log.seal() {
            Ok((_, sealed)) => {
                // The lock is free between two steps: whoever commits then must not take it for done.
                state.sessions.entry(id).and_modify(|session| session.enders += 1);
                while !state.apply(id, sealed, Slice::Batch) {
                    parking_lot::MutexGuard::bump(&mut state);
                }
                state.sessions.entry(id).and_modify(|session| session.enders -= 1);
            }
            Err(damaged) => state.fence(id, &crate::validate::Violation::Log(damaged.to_string())),
        }
        if let Some(session) = state.sessions.get_mut(&id) {
            session.outstanding.clear();
            // The page has room for all slots.
            let _ = crate::page::forget_delegated(&*session.page);
        }
        crate::grant::end_leases(&mut state, id);
        crate::reserved::end_session(&mut state, id);
        state.locking.end_session(id);
    }
    shared.drive(&mut state);
    shared.locks_changed.notify_all();
    state
}

/// Forgets the ended sessions that are committed as a whole.
pub fn remove_ended(shared: &Shared, state: &mut State) {
    crate::digest::set_fenced_aside(shared, state);
    let ended: Vec<SessionId> = state
        .sessions
        .values()
        .filter(|s| s.is_ending && s.enders == 0 && state.store.committed(s.id) >= state.store.applied(s.id))
        .map(|s| s.id)
        .collect();
    for id in ended {
        remove(shared, state, id);
    }
}

/// Forgets a session that is committed as a whole.
fn remove(shared: &Shared, state: &mut State, id: SessionId) {
    let Some(session) = state.sessions.remove(&id) else { return };
    match session.identity.kind {
        SessionKind::Mount => tracing::info!(session = id.0, records = session.records, "unmounted"),
        SessionKind::Process => tracing::debug!(session = id.0, records = session.records, "session ended"),
    }
    let end = state.store.applied(id);
    // What it has freed so far it reads no more; who has its number next may read what is freed from then on.
    state.store.release(id, end);
    state.store.unmap_blocks(id, None);
    let (is_fit, is_aside) = (Ended::is_fit(state, &session), session.fenced.is_some());
    if is_aside {
        state.store.remove_session(id);
    } else if !is_fit || shared.pool.keep(Ended::of(session, end)).is_some() {
        ended::remove_with(shared, state, id);
    }
    state.note_sharing();
    state.counters.sessions_ended += 1;
    shared.watcher.remove(id);
}

/// Cuts off the mounts of sessions whose processes have died. Their ends take a commit; programs that use the mounts shall
/// not wait for that.
fn cut_off(shared: &Shared, ids: &[SessionId]) {
    let mounts: Vec<_> = {
        let mut state = shared.lock();
        state.counters.sessions_died += ids.len() as u64;
        let mount = |session: &mut Session| session.notifier.take().map(|notifier| (notifier, session.mount_device));
        ids.iter().filter_map(|id| state.sessions.get_mut(id).and_then(mount)).collect()
    };
    for (notifier, device) in mounts {
        if !notifier.end(true) {
            // It had not come back to this SharedFS yet.
            crate::notify::abort_dead(device, &shared.config.arena);
        }
    }
}

/// The thread that ends sessions whose processes have died, all that have by then with one commit.
pub fn end_thread(shared: &Shared, died: &Receiver<Vec<SessionId>>) {
    while let Ok(mut ids) = died.recv() {
        ids.extend(died.try_iter().flatten());
        // The number may be another process's by now.
        let mut gone: Vec<_> = {
            let state = shared.lock();
            ids.iter().filter_map(|id| Some((*id, state.sessions.get(id)?.identity.process))).collect()
        };
        gone.retain(|(_, process)| process.open().is_none());
        end_where(shared, &ids, |id, session| gone.contains(&(id, session.identity.process)));
    }
}

/// The thread that learns of the deaths of processes.
pub fn watch_thread(shared: &Shared, died: &Sender<Vec<SessionId>>) {
    loop {
        match shared.watcher.wait() {
            Ok(ended) if !ended.is_empty() => {
                cut_off(shared, &ended);
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Whoever committed between two of the steps in which a long log is applied at its session's end took the session for done: the rest was lost.
    #[test]
    fn a_session_whose_log_is_being_applied_in_steps_stays() {
        let place = tempfile::tempdir().expect("a directory");
        let options = ashlar_pmem::ArenaOptions { size_bytes: 16 << 20, emulate_pmem: false };
        let arena = ashlar_pmem::Arena::create(place.path(), &options).expect("an arena");
        ashlar_store::Store::format(&arena, ashlar_types::Timestamp::default()).expect("formatted");
        drop(arena);
        let shared = crate::recovery::recover(crate::Config::new(place.path())).expect("a sound arena");
        let process = crate::identity::Process::find(std::process::id()).expect("this process");
        let kind = SessionKind::Process;
        let identity = Identity { process, uid: 0, gid: 0, groups: Vec::new(), kind, label: "test".into() };
        let mut session = blank(&shared).expect("made").give(identity).expect("given");
        let id = session.id;
        (session.is_ending, session.enders) = (true, 1);
        let mut state = shared.lock();
        state.store.set_session(id, session.log.generation(), LogPosition(0));
        state.sessions.insert(id, session);
        remove_ended(&shared, &mut state);
        assert!(state.sessions.contains_key(&id), "all that is applied of it is committed, and there is more");
        state.sessions.entry(id).and_modify(|session| session.enders = 0);
        remove_ended(&shared, &mut state);
        assert!(!state.sessions.contains_key(&id));
    }

    /// How many sessions of a user find room beside others.
    fn fitting(user: u32, mut sessions: Vec<(u32, bool)>) -> usize {
        let before = sessions.len();
        while check_room(sessions.iter().copied(), user).is_ok() {
            sessions.push((user, false));
        }
        sessions.len() - before
    }

    #[test]
    fn no_user_takes_the_sessions_of_others() {
        assert_eq!(fitting(7, Vec::new()), SESSIONS_OF_USER_MAX);
        assert_eq!(fitting(8, vec![(7, false); SESSIONS_OF_USER_MAX]), SESSIONS_OF_USER_MAX);
        let crowd: Vec<(u32, bool)> =
            (1..=1000).map(|user| (user, user % 2 == 0)).take(SESSIONS_MAX - SESSIONS_OF_ROOT).collect();
        assert_eq!(fitting(2000, crowd.clone()), 0);
        assert_eq!(fitting(0, crowd), SESSIONS_OF_ROOT);
        assert_eq!(fitting(0, Vec::new()), SESSIONS_MAX);
    }

    /// A user's thirty-third program in a moment was refused its session, though none of the others ran any more.
    #[test]
    fn sessions_that_are_ending_leave_their_user_room_but_not_without_end() {
        let ending = |count| vec![(7, true); count];
        assert_eq!(fitting(7, ending(SESSIONS_OF_USER_ENDING)), SESSIONS_OF_USER_MAX);
        assert_eq!(fitting(7, ending(SESSIONS_OF_USER_ENDING + 5)), SESSIONS_OF_USER_MAX - 5);
        assert_eq!(fitting(7, ending(SESSIONS_OF_USER_ENDING + SESSIONS_OF_USER_MAX)), 0);
        assert_eq!(fitting(8, ending(SESSIONS_OF_USER_ENDING + SESSIONS_OF_USER_MAX)), SESSIONS_OF_USER_MAX);
    }
}
