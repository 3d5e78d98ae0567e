//! Starts SharedFS: takes up every session that left files.
//!
//! Sessions whose process lives go on as if nothing had happened. The logs of the others are digested, and these
//! sessions are removed.
//!
//! A kill at any point of it changes nothing: the next start begins again at the committed state.
//!
//! The node applies the logs ([`ashlar_node::recovery`]). If SharedFS panics at a log, that log is quarantined, and the
//! start begins anew.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use ashlar_pmem::{Arena, ArenaError};
use ashlar_processes::clock;
use ashlar_processes::process::{MachineProcesses, open_process};
use ashlar_processes::process_watcher::ProcessWatcher;
use ashlar_replica::{ReplicaError, Shadow, forget_journal, open_journal};
use ashlar_store::{MappedRun, Store, StoreError};
use ashlar_types::SessionId;

use ashlar_member::Membership;
use ashlar_node::blame::{self, Blame};
use ashlar_node::leases::grant_cache::GrantPublisher;
use ashlar_node::leases::kernel_notifier::KernelNotifier;
use ashlar_node::pending::progress::Progress;
use ashlar_node::pending::{NodeRequest, RequestTerms};
use ashlar_node::recovery::settling::SessionSettling;
use ashlar_node::recovery::take_up::{self, FoundSession, SoundSession};
use ashlar_node::recovery::{RecoveryFailure, recover_logs as recover_logs_of};
use ashlar_node::sessions::mapped_table::MappedTable;
use ashlar_node::sessions::session::ServedSession;
use ashlar_node::{Node, NodeLimits};

use crate::grant_memory::make_grant_memory;
use crate::leading::{StartingProcess, begin_leading};
use crate::mount_notifier::{Notifier, abort_dead_mount, notifier_of};
use crate::quarantine::quarantine_session;
use crate::retired_files;
use crate::session_files::{
    SessionError, SessionFiles, check_versions, open_mapped_table, remove_owner, take_up_session,
};
use crate::sessions;
use crate::shared_state::{Copies, Leading, SharedState};
use crate::{Config, DaemonError};

/// Opens the arena and brings it up to date with all that sessions have logged.
///
/// # Errors
/// [`DaemonError`] if the arena can't be opened, or its shared area fails.
pub fn recover(
    config: Config,
    arena: Arc<Arena>,
    membership: Option<Membership>,
    process: StartingProcess<'_>,
) -> Result<SharedState, DaemonError> {
    let system = |what| move |error| DaemonError::System { what, error };
    ashlar_pmem::sigbus::install().map_err(system("cannot guard against truncated files"))?;
    check_versions(&arena)?;
    let watcher = ProcessWatcher::new().map_err(system("cannot watch processes"))?;
    let (mut state, left, copies) = recover_logs(&config, &arena, membership.as_ref(), process)?;
    state.store.show_lagging();
    let holder = state.store.next_session_id()?;
    let grant_cache = make_grant_memory()
        .inspect_err(|error| {
            tracing::warn!(%error, "no memory for the grant cache: every session asks for all that it reads");
        })
        .ok();
    let grant_cache = grant_cache.and_then(|(memory, file)| {
        state.grant_cache = GrantPublisher::new(holder, memory);
        state.grant_cache.is_some().then_some(file)
    });
    let shared = SharedState::new(config, arena, watcher, state, left.files, grant_cache, copies);
    settle_sessions(&shared)?;
    // Not before the logs that depend on them are given up.
    left.damaged.into_iter().try_for_each(|id| quarantine_damaged(&shared.arena, id))?;
    left.unfinished.into_iter().for_each(|id| retired_files::remove(&shared, id));
    Ok(shared)
}

/// Applies what all sessions have logged, and commits it.
///
/// A log at which SharedFS panics may have been applied in part. So everything begins again at the committed state,
/// without that log.
fn recover_logs(
    config: &Config,
    arena: &Arc<Arena>,
    membership: Option<&Membership>,
    process: StartingProcess<'_>,
) -> Result<(Node, FoundSessions, Copies), DaemonError> {
    let mut set_aside = BTreeSet::new();
    loop {
        match try_recover_logs(config, arena, &set_aside, membership, process) {
            Ok(recovered) => return Ok(recovered),
            Err(StartFailure::Panic(id)) => {
                tracing::error!(
                    session = id.0,
                    "SharedFS panicked at a session's log; its files are kept as sessions/fenced-*"
                );
                set_aside.insert(id);
            }
            Err(StartFailure::Daemon(error)) => return Err(error),
        }
    }
}

/// Why sessions can't be recovered.
enum StartFailure {
    /// SharedFS panicked at this session's files.
    Panic(SessionId),
    Daemon(DaemonError),
}

impl From<RecoveryFailure> for StartFailure {
    fn from(failure: RecoveryFailure) -> Self {
        match failure {
            RecoveryFailure::Panic(id) => Self::Panic(id),
            RecoveryFailure::Store(error) => error.into(),
        }
    }
}

impl<E: Into<DaemonError>> From<E> for StartFailure {
    fn from(error: E) -> Self {
        Self::Daemon(error.into())
    }
}

/// Runs a step that reads one session's files.
///
/// # Errors
/// [`StartFailure::Panic`] if it panics. The state may then be half changed.
fn guard_session<T>(id: SessionId, step: impl FnOnce() -> T) -> Result<T, StartFailure> {
    let guarded = || {
        #[cfg(test)]
        tests::panic_if_planted(id);
        step()
    };
    blame::contain(guarded).map_err(|_| StartFailure::Panic(id))
}

/// Recovers all logs but those of `set_aside`.
fn try_recover_logs(
    config: &Config,
    arena: &Arc<Arena>,
    set_aside: &BTreeSet<SessionId>,
    membership: Option<&Membership>,
    process: StartingProcess<'_>,
) -> Result<(Node, FoundSessions, Copies), StartFailure> {
    if let Some(membership) = membership {
        membership.adopt_former(arena).map_err(DaemonError::from)?;
    }
    let mut store = Store::open(Arc::clone(arena))?;
    let journal = match config.shadow.is_some() || membership.is_some() {
        true => Some(open_journal(arena, &mut store)?),
        false => {
            forget_journal(arena, &mut store)?;
            None
        }
    };
    let mut state = make_node(config, arena, store)?;
    state.journal = journal;
    let mut shadow = config.shadow.as_ref().map(|path| Shadow::open(path, arena, &mut state)).transpose()?;
    if let (Some(shadow), Some(fault)) = (&mut shadow, config.shadow_fault) {
        tracing::warn!(?fault, "the shadow has a planted fault");
        shadow.plant(fault);
    }
    state.begin_recovery();
    let left = take_up_sessions(arena, &mut state, set_aside)?;
    let leading =
        membership.map(|membership| begin_leading(membership.clone(), &mut state, arena, &config.socket, process));
    let leading = leading.transpose()?;
    recover_logs_of(&mut state, &mut |state, upto| match (&leading, &mut shadow) {
        (Some(Leading { leader, .. }), _) => leader.drive_until(state, upto, &clock::boot_time, REPLICA_PATIENCE),
        (None, Some(shadow)) => shadow.catch_up(state),
        (None, None) => Ok(()),
    })?;
    Ok((state, left, Copies { shadow, leading }))
}

/// Makes a node with an arena's store, and without sessions.
///
/// # Errors
/// Those of the store.
pub fn make_node(config: &Config, arena: &Arena, store: Store) -> Result<Node, StoreError> {
    let limits = NodeLimits {
        lease_hold_us: config.lease_hold_us,
        lease_ttl_us: config.lease_ttl_us,
        ..NodeLimits::new(arena.medium().kind)
    };
    Node::new(store, limits, Arc::new(MachineProcesses), clock::now())
}

/// How long a recovery waits for the replica when the journal is short of room.
const REPLICA_PATIENCE: Duration = Duration::from_secs(600);

/// The files of sessions.
#[derive(Default)]
struct FoundSessions {
    /// The descriptors of the sessions that were taken up.
    files: BTreeMap<SessionId, SessionFiles>,
    /// Sessions without an owner.
    unfinished: Vec<SessionId>,
    /// Sessions whose files contradict themselves, by their owner or by the medium.
    damaged: Vec<SessionId>,
}

/// Quarantines damaged files, as far as they can be kept.
fn quarantine_damaged(arena: &Arena, id: SessionId) -> Result<(), DaemonError> {
    quarantine_session(arena, id).or_else(|error| {
        tracing::warn!(session = id.0, %error, "not all of the files could be quarantined");
        Ok(arena.remove_session(id)?)
    })
}

/// Opens the arena.
///
/// Another process may hold it for a moment: one that checks whether it is in use, or a SharedFS that is ending. If a
/// SharedFS serves it, this fails at once.
pub fn open_arena(config: &Config) -> Result<Arena, ArenaError> {
    let serves = || std::os::unix::net::UnixStream::connect(&config.socket).is_ok();
    Arena::open_when_free(&config.arena, &|| !serves())
}

/// Takes up the sessions that have left files, and returns the others.
fn take_up_sessions(
    arena: &Arena,
    state: &mut Node,
    set_aside: &BTreeSet<SessionId>,
) -> Result<FoundSessions, StartFailure> {
    let (mut left, mut found) = (FoundSessions::default(), BTreeMap::new());
    for id in arena.sessions()? {
        if set_aside.contains(&id) {
            found.insert(id, FoundSession::Lost);
            left.damaged.push(id);
            continue;
        }
        let committed = state.store.committed(id);
        let taken_up = match guard_session(id, || take_up_session(arena, id, committed, state.now.since_boot))? {
            Ok((session, files)) => {
                left.files.insert(id, files);
                let mapped = open_living_table(arena, &session).unwrap_or_else(|error| {
                    tracing::error!(session = id.0, %error, "the table of its process's mapped files can't be read");
                    None
                });
                FoundSession::Sound(Box::new(SoundSession { session, mapped }))
            }
            Err(SessionError::Unfinished) => {
                left.unfinished.push(id);
                FoundSession::Lost
            }
            Err(error) => {
                tracing::error!(session = id.0, %error, "a session's files are damaged; they are kept as sessions/fenced-*");
                left.damaged.push(id);
                FoundSession::Lost
            }
        };
        found.insert(id, taken_up);
    }
    take_up::take_up_sessions(state, found).map_err(ReplicaError::from)?;
    Ok(left)
}

/// Returns the mappings of a session's process. A dead one has nothing mapped any more.
///
/// # Errors
/// [`SessionError`].
fn open_living_table(
    arena: &Arena,
    session: &ServedSession,
) -> Result<Option<(MappedTable, Vec<MappedRun>)>, SessionError> {
    if open_process(&session.identity.process).is_none() {
        return Ok(None);
    }
    open_mapped_table(arena, session.id)
}

/// Removes the owners of logs that were cut.
///
/// Only then their dependencies may be removed: a start that does not know these would count them as met.
fn remove_owners_of_cut(state: &Node) -> Result<(), DaemonError> {
    let mut cut = state.sessions.values().filter(|session| session.is_cut);
    let what = "a log that depends on lost updates can't be given up";
    cut.try_for_each(remove_owner).map_err(|error| DaemonError::System { what, error })
}

/// Lets living sessions go on, and removes dead ones.
fn settle_sessions(shared: &SharedState) -> Result<(), DaemonError> {
    let mut state = shared.lock();
    remove_owners_of_cut(&state)?;
    let (mut settling, ttl) = (SessionSettling::default(), shared.cache_ttl());
    for id in state.sessions.keys().copied().collect::<Vec<_>>() {
        let session = &state.sessions[&id];
        // Its process has written its control page.
        let _blame = Blame::for_request(session);
        #[cfg(test)]
        tests::panic_at_settling_if_planted(id);
        let process = open_process(&session.identity.process);
        let running = settling.settle_session(&mut state, id, process.is_some(), ttl);
        let Some((process, running)) = process.zip(running) else { continue };
        if let (Some(stale_until), Some(session)) = (running.mount_stale_until, state.sessions.get_mut(&id)) {
            let notifier: Arc<dyn KernelNotifier> = Notifier::absent(ttl, stale_until, session.note_stale());
            session.notifier = Some(notifier);
        }
        sessions::watch_process(shared, id, process);
        sessions::watch_files(shared, &state, id);
        tracing::info!(session = id.0, "a running session goes on");
    }
    let settled = settling.finish(&mut state);
    settled.dead_mounts.into_iter().for_each(|device| abort_dead_mount(device, &shared.config.arena));
    let notifiers = state.sessions.values().filter_map(|session| session.notifier.as_ref()).filter_map(notifier_of);
    notifiers.for_each(|absent| absent.renew_absence());
    sessions::remove_ended(shared, &mut state);
    // Inodes that recovery has kept count as used until they are freed. A session that goes on may just have closed a
    // file to which its log still writes; the sweep checks that.
    sweep_orphans(shared, &mut state)?;
    if !settled.ended.is_empty() {
        tracing::info!(sessions = settled.ended.len(), "the logs of sessions that are gone were digested");
    }
    Ok(shared.commit(&mut state)?)
}

/// Frees orphans, before any thread commits.
fn sweep_orphans(shared: &SharedState, state: &mut Node) -> Result<(), StoreError> {
    let sweep = state.begin_request(NodeRequest::SweepOrphans, RequestTerms::OWN);
    loop {
        match state.advance(sweep) {
            // It has no error of its own.
            Progress::Done(_) => return Ok(()),
            Progress::More => {}
            Progress::Wait(..) if state.store.is_dirty() => shared.commit(state)?,
            // A later sweep frees them.
            Progress::Wait(..) => {
                state.cancel_request(sweep);
                return Ok(());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::path::Path;

    use super::*;
    use crate::test_sessions::{self, add_session, make_arena};

    /// Names the arena of a start that is to panic, and the session at which it does.
    const ARENA_ENV: &str = "ASHLAR_TEST_START_ARENA";
    const SESSION_ENV: &str = "ASHLAR_TEST_START_SESSION";

    thread_local! {
        static PLANTED: Cell<Option<SessionId>> = const { Cell::new(None) };
        static PLANTED_AT_SETTLING: Cell<Option<SessionId>> = const { Cell::new(None) };
    }

    /// Panics where a session's files are read, if a test has planted that.
    pub(super) fn panic_if_planted(id: SessionId) {
        assert_ne!(PLANTED.get(), Some(id), "planted");
    }

    /// Panics where a session goes on or ends, if a test has planted that.
    pub(super) fn panic_at_settling_if_planted(id: SessionId) {
        assert_ne!(PLANTED_AT_SETTLING.get(), Some(id), "planted");
    }

    fn start(place: &Path) -> SharedState {
        test_sessions::start(Config::new(place))
    }

    /// Adds a session of this process.
    fn add_own_session(shared: &SharedState) -> SessionId {
        add_session(shared, std::process::id())
    }

    #[test]
    fn log_that_panics_is_quarantined_and_others_go_on() {
        let place = tempfile::tempdir().expect("a directory");
        make_arena(place.path());
        let shared = start(place.path());
        let (one, two) = (add_own_session(&shared), add_own_session(&shared));
        drop(shared);
        PLANTED.set(Some(one));
        let shared = start(place.path());
        PLANTED.set(None);
        assert_eq!(shared.lock().live_ids(), [two]);
        let quarantined = place.path().join(format!("sessions/fenced-{one}.log"));
        assert!(quarantined.exists(), "its log is kept");
        drop(shared);
        assert_eq!(start(place.path()).lock().live_ids(), [two], "the next start finds it no more");
    }

    #[test]
    #[ignore = "this is the process that panics, which another test starts"]
    fn start_that_panics() {
        let (Ok(place), Ok(session)) = (std::env::var(ARENA_ENV), std::env::var(SESSION_ENV)) else { return };
        crate::panics::confine_panics();
        PLANTED_AT_SETTLING.set(Some(SessionId(session.parse().expect("a number"))));
        start(Path::new(&place));
        unreachable!("the process has ended");
    }

    /// A session's memory must not make every start panic.
    #[test]
    fn session_at_which_a_start_panics_is_fenced_by_the_next() {
        let place = tempfile::tempdir().expect("a directory");
        make_arena(place.path());
        let shared = start(place.path());
        let (one, two) = (add_own_session(&shared), add_own_session(&shared));
        drop(shared);
        let mut command = std::process::Command::new(std::env::current_exe().expect("this program"));
        command.args(["--exact", "recovery::tests::start_that_panics", "--ignored", "--test-threads=1"]);
        command.env(ARENA_ENV, place.path()).env(SESSION_ENV, one.0.to_string());
        let status = command.status().expect("run");
        assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(libc::SIGABRT), "{status}");
        let shared = start(place.path());
        assert_eq!(shared.lock().live_ids(), [two]);
    }
}
