//! Starts SharedFS: takes up every session that left files.
//!
//! Sessions whose process lives go on as if nothing had happened. The logs of the others are digested, and these
//! sessions are removed.
//!
//! A kill at any point of it changes nothing: the next start begins again at the committed state.
//!
//! A record that no SharedFS has seen may be forged, and after a loss of power no lease tells. Numbers and credit stand
//! in the session's lease table, which LibFS makes last before its log. So a record that uses more ends its log. Logs
//! of ordinary users are applied behind those of the super-user and of mounts, but for what these depend on: a forged
//! record takes no name from those. If SharedFS panics at a log, that log is quarantined, and the start begins anew.
//!
//! Handles show the present, and logs an earlier time: an inode that lost its last name may have been open then, and
//! written to. So nothing that another session may have used is freed until all logs are applied.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ashlar_pmem::{Arena, ArenaError};
use ashlar_store::Store;
use ashlar_types::{LogPosition, SessionId};
use ashlar_wire::SessionKind;

use crate::apply::Slice;
use crate::digest;
use crate::grant_cache::GrantPublisher;
use crate::leasing::Leasing;
use crate::mapped;
use crate::mount_notifier::Notifier;
use crate::panics::{self, Blame};
use crate::process_watcher::ProcessWatcher;
use crate::retired;
use crate::session::{ServedSession, SessionError};
use crate::session_page;
use crate::shared_state::SharedState;
use crate::state::{RecoveryPhase, State, UnmetDependency};
use crate::validate::Violation;
use crate::{Config, DaemonError};

/// How long another process may hold the arena before this start gives up.
const HANDOVER: Duration = Duration::from_secs(1);

/// Opens the arena and brings it up to date with all that sessions have logged.
///
/// # Errors
/// [`DaemonError`] if the arena can't be opened, or its shared area fails.
pub fn recover(config: Config) -> Result<SharedState, DaemonError> {
    let system = |what| move |error| DaemonError::System { what, error };
    ashlar_pmem::sigbus::install().map_err(system("cannot guard against truncated files"))?;
    let arena = Arc::new(open_arena(&config)?);
    let watcher = ProcessWatcher::new().map_err(system("cannot watch processes"))?;
    let (mut state, left) = recover_logs(&config, &arena)?;
    state.store.show_lagging();
    match GrantPublisher::make(state.store.next_session_id()?) {
        Ok(grant_cache) => state.grant_cache = Some(grant_cache),
        Err(error) => tracing::warn!(%error, "no memory for the grant cache: every session asks for all that it reads"),
    }
    let shared = SharedState::new(config, arena, watcher, state);
    settle_sessions(&shared)?;
    // Not before the logs that depend on them are given up.
    left.damaged.into_iter().try_for_each(|id| quarantine_damaged(&shared.arena, id))?;
    left.unfinished.into_iter().for_each(|id| retired::remove(&shared, id));
    Ok(shared)
}

/// Applies what all sessions have logged, and commits it.
///
/// A log at which SharedFS panics may have been applied in part. So everything begins again at the committed state,
/// without that log.
fn recover_logs(config: &Config, arena: &Arc<Arena>) -> Result<(State, UnusableSessions), DaemonError> {
    let mut set_aside = BTreeSet::new();
    loop {
        match try_recover_logs(config, arena, &set_aside) {
            Ok(recovered) => return Ok(recovered),
            Err(RecoveryFailure::Panic(id)) => {
                tracing::error!(
                    session = id.0,
                    "SharedFS panicked at a session's log; its files are kept as sessions/fenced-*"
                );
                set_aside.insert(id);
            }
            Err(RecoveryFailure::Daemon(error)) => return Err(error),
        }
    }
}

/// Why logs can't be recovered.
enum RecoveryFailure {
    /// SharedFS panicked at this session's log.
    Panic(SessionId),
    Daemon(DaemonError),
}

impl<E: Into<DaemonError>> From<E> for RecoveryFailure {
    fn from(error: E) -> Self {
        Self::Daemon(error.into())
    }
}

/// Runs a step that reads one session's files.
///
/// # Errors
/// [`RecoveryFailure::Panic`] if it panics. The state may then be half changed.
fn guard_session<T>(id: SessionId, step: impl FnOnce() -> T) -> Result<T, RecoveryFailure> {
    let guarded = || {
        #[cfg(test)]
        tests::panic_if_planted(id);
        step()
    };
    panics::contain(guarded).map_err(|_| RecoveryFailure::Panic(id))
}

/// Recovers all logs but those of `set_aside`.
fn try_recover_logs(
    config: &Config,
    arena: &Arc<Arena>,
    set_aside: &BTreeSet<SessionId>,
) -> Result<(State, UnusableSessions), RecoveryFailure> {
    let store = Store::open(Arc::clone(arena))?;
    let mut state = State::new(store, Leasing::new(config))?;
    state.phase = RecoveryPhase::Recovering;
    let left = take_up_sessions(arena, &mut state, set_aside)?;
    let mut bounds = Vec::new();
    for id in state.live_ids() {
        let end = guard_session(id, || seal_log(&mut state, id))?;
        bounds.extend(end.map(|end| (id, applicable_end(&state, id, end))));
    }
    // First the records that were validated before, then the rest under the leases that stand: the leases describe the
    // state between the two.
    let validated: Vec<_> = bounds.iter().map(|&(id, end)| (id, validated_end(&mut state, id, end))).collect();
    apply_in_order(&mut state, &validated)?;
    restore_leases(&mut state);
    apply_in_order(&mut state, &bounds)?;
    while make_room(&mut state)? {
        apply_in_order(&mut state, &bounds)?;
    }
    cut_unmet(&mut state, &bounds)?;
    fence_barred(&mut state);
    state.phase = RecoveryPhase::Running;
    digest::commit(&mut state)?;
    Ok((state, left))
}

/// Sessions whose files can't be taken up.
#[derive(Default)]
struct UnusableSessions {
    /// Sessions without an owner.
    unfinished: Vec<SessionId>,
    /// Sessions whose files contradict themselves, by their owner or by the medium.
    damaged: Vec<SessionId>,
}

/// Quarantines damaged files, as far as they can be kept.
fn quarantine_damaged(arena: &Arena, id: SessionId) -> Result<(), DaemonError> {
    digest::quarantine_session(arena, id).or_else(|error| {
        tracing::warn!(session = id.0, %error, "not all of the files could be quarantined");
        Ok(arena.remove_session(id)?)
    })
}

/// Opens the arena.
///
/// Another process may hold it for a moment: one that checks whether it is in use, or a SharedFS that is ending. If a
/// SharedFS serves it, this fails at once.
fn open_arena(config: &Config) -> Result<Arena, ArenaError> {
    let deadline = Instant::now() + HANDOVER;
    let serves = || std::os::unix::net::UnixStream::connect(&config.socket).is_ok();
    loop {
        match Arena::open(&config.arena) {
            Err(ArenaError::InUse { .. }) if Instant::now() < deadline && !serves() => {
                std::thread::sleep(HANDOVER / 500);
            }
            result => return result,
        }
    }
}

/// Takes up the sessions that have left files, and returns the others.
///
/// On a disk, a session without an owner may still have had a process that made nothing persistent. Updates that other
/// sessions based on it are lost then.
fn take_up_sessions(
    arena: &Arena,
    state: &mut State,
    set_aside: &BTreeSet<SessionId>,
) -> Result<UnusableSessions, RecoveryFailure> {
    let mut left = UnusableSessions::default();
    let files = arena.sessions()?;
    let rows = state.store.sessions();
    for (id, _) in &rows {
        if *id != SessionId::SHARED_FS && !files.contains(id) {
            // Its files were removed first when it ended.
            state.store.remove_session(*id);
        }
    }
    for id in files {
        if set_aside.contains(&id) {
            state.lost.insert(id);
            left.damaged.push(id);
            continue;
        }
        let committed = state.store.committed(id);
        match guard_session(id, || ServedSession::take_up(arena, id, committed))? {
            Ok(session) => {
                // This comes first: from here on its process no longer uses block addresses that an earlier SharedFS
                // sent.
                session.control.raise_segment_version();
                if !rows.iter().any(|(row, _)| *row == id) {
                    state.store.set_session(id, session.log.generation(), LogPosition(0));
                }
                state.ways.add_user(&session.credentials);
                state.sessions.insert(id, session);
                // Before any block is given out.
                if let Err(error) = mapped::take_up(arena, state, id) {
                    tracing::error!(session = id.0, %error, "the table of its process's mapped files can't be read");
                }
            }
            Err(SessionError::Unfinished) => {
                state.lost.insert(id);
                left.unfinished.push(id);
            }
            Err(error) => {
                tracing::error!(session = id.0, %error, "a session's files are damaged; they are kept as sessions/fenced-*");
                state.lost.insert(id);
                left.damaged.push(id);
            }
        }
    }
    Ok(left)
}

/// Seals a session's log and returns the end of its records.
///
/// The seal voids records that are half done. A dead process has left them so, and a living one appends them again. The
/// living process checks its leases before that, as before all later appends. SharedFS may have been killed between
/// taking a lease and sealing the log. A process that had checked before that could still append.
fn seal_log(state: &mut State, id: SessionId) -> Option<LogPosition> {
    let sealed = state.live(id)?.log.seal();
    state.counters.seals += 1;
    match sealed {
        // Whether the log is truncated, or goes backwards.
        Ok((_, end)) => state.settled(id).map(|_| end),
        Err(damaged) => {
            state.fence(id, &Violation::Log(damaged.to_string()));
            None
        }
    }
}

/// Returns the end of the records that may be applied.
///
/// An earlier SharedFS has panicked at those behind it, or at a request of the session.
fn applicable_end(state: &State, id: SessionId, end: LogPosition) -> LogPosition {
    let barred = state.live(id).and_then(|session| session_page::barred(&*session.page));
    barred.map_or(end, |barred| barred.min(end))
}

/// Fences the sessions that made an earlier SharedFS panic.
fn fence_barred(state: &mut State) {
    for id in state.live_ids() {
        if state.live(id).is_some_and(|session| session_page::barred(&*session.page).is_some()) {
            state.fence(id, &Violation::Panicked);
        }
    }
}

/// Returns the position up to which a session's records were validated.
///
/// If SharedFS was killed while it took one of the session's leases, all present records were written before the
/// session could know. The ones not validated yet are applied under the leases that stand. Their inodes and moves
/// change these leases, but the leases do not decide on them.
fn validated_end(state: &mut State, id: SessionId, end: LogPosition) -> LogPosition {
    let Some(session) = state.sessions.get_mut(&id) else { return end };
    if session_page::is_revoking(&*session.page) {
        session.trusted = end;
    }
    session.validated = session.validated.min(end);
    session.validated
}

/// Applies logs up to their bounds, those of ordinary users last.
///
/// Each log is applied only as far as its dependencies are. [`State::unmet`] then holds the conditions that are
/// missing.
fn apply_in_order(state: &mut State, bounds: &[(SessionId, LogPosition)]) -> Result<(), RecoveryFailure> {
    // As much of each log as is applied now: at first all of the privileged ones, and what these depend on.
    let is_privileged = |id: &SessionId| state.sessions.get(id).is_some_and(|s| s.credentials.is_privileged());
    let mut enough: BTreeMap<SessionId, LogPosition> =
        bounds.iter().filter(|(id, _)| is_privileged(id)).copied().collect();
    loop {
        let before: Vec<_> = bounds.iter().map(|(id, _)| state.store.applied(*id)).collect();
        state.unmet.clear();
        for &(id, end) in bounds {
            if let Some(&enough) = enough.get(&id) {
                guard_session(id, || state.apply(id, end, Slice::Through(enough)))?;
            }
        }
        let mut is_more = bounds.iter().zip(before).any(|((id, _), before)| state.store.applied(*id) != before);
        for unmet in state.unmet.values() {
            if let UnmetDependency::Session(other, position) = *unmet {
                let enough = enough.entry(other).or_default();
                is_more |= position > *enough;
                *enough = position.max(*enough);
            }
        }
        if !is_more || state.unmet.is_empty() {
            if bounds.iter().all(|(id, end)| enough.get(id).is_some_and(|enough| enough >= end)) {
                return Ok(());
            }
            enough = bounds.iter().copied().collect();
        }
    }
}

/// Makes room for logs that stopped for lack of it.
///
/// Nothing else lets them go on. It frees inodes that have no link and are open in no session, and commits what has
/// been freed. Returns whether there is more room now.
fn make_room(state: &mut State) -> Result<bool, DaemonError> {
    if !state.unmet.values().any(|unmet| *unmet == UnmetDependency::Room) {
        return Ok(false);
    }
    let room = |state: &State| (state.store.space().blocks_free, state.store.space().metadata_bytes_used);
    let (free, used) = room(state);
    digest::free_orphans(state);
    digest::commit(state)?;
    // Extents from before the start are void, so no session reads freed blocks by them.
    digest::release_blocks(state);
    digest::take_unreleased_blocks(state);
    let (free_now, used_now) = room(state);
    Ok(free_now > free || used_now < used)
}

/// Gives up missing dependencies of logs.
///
/// It cuts the depending logs, unless the other log is at fault.
fn cut_unmet(state: &mut State, bounds: &[(SessionId, LogPosition)]) -> Result<(), RecoveryFailure> {
    let unmet = std::mem::take(&mut state.unmet);
    for (id, unmet) in unmet {
        let UnmetDependency::Session(other, _) = unmet else { continue };
        let position = state.store.applied(id);
        let this_boot = state.live(id).is_some_and(|session| session.is_whole);
        if this_boot {
            state.counters.logs_cut += 1;
            // Memory has lost nothing: the other session has destroyed its own log, and this one must not suffer for
            // that.
            tracing::error!(session = id.0, other = other.0, %position, "a log that this one depends on is damaged");
            state.lost.insert(other);
        } else {
            tracing::warn!(session = id.0, other = other.0, %position, "the log is cut: its further records depend on lost updates");
            state.cut(id);
        }
    }
    let rest: Vec<_> =
        bounds.iter().copied().filter(|(id, _)| state.sessions.get(id).is_some_and(|s| !s.is_ending)).collect();
    if rest.iter().any(|&(id, end)| state.live(id).is_some() && state.store.applied(id) < end) {
        state.phase = RecoveryPhase::Salvaging;
        for (id, end) in rest {
            guard_session(id, || state.apply(id, end, Slice::All))?;
        }
        state.phase = RecoveryPhase::Recovering;
    }
    Ok(())
}

fn restore_leases(state: &mut State) {
    let State { store, leasing, sessions, .. } = state;
    leasing.restore(store, sessions.values().filter(|s| s.fenced.is_none() && s.is_whole));
}

/// Removes the owners of logs that were cut.
///
/// Only then their dependencies may be removed: a start that does not know these would count them as met.
fn remove_owners_of_cut(state: &State) -> Result<(), DaemonError> {
    let mut cut = state.sessions.values().filter(|session| session.is_cut);
    let what = "a log that depends on lost updates can't be given up";
    cut.try_for_each(ServedSession::remove_owner).map_err(|error| DaemonError::System { what, error })
}

/// Lets living sessions go on, and removes dead ones.
fn settle_sessions(shared: &SharedState) -> Result<(), DaemonError> {
    let mut state = shared.lock();
    remove_owners_of_cut(&state)?;
    let (mut dead, mut running, mut dead_mounts) = (0, Vec::new(), Vec::new());
    for id in state.sessions.keys().copied().collect::<Vec<_>>() {
        let Some(session) = state.sessions.get_mut(&id) else { continue };
        // Its process has written its control page.
        let _blame = Blame::for_request(session);
        #[cfg(test)]
        tests::panic_at_settling_if_planted(id);
        match session.identity.process.open() {
            Some(process) if session.fenced.is_none() => {
                let (now, ttl) = (crate::grant::boot_time(), shared.cache_ttl());
                let lost_until = Duration::from_millis(session_page::stale_until_ms(&*session.page)).min(now + ttl);
                let has_other_locks = session_page::has_other_locks(&*session.page);
                if session.identity.kind == SessionKind::Mount {
                    session.notifier = Some(Notifier::absent(ttl, lost_until, session.note_stale()));
                }
                state.not_before = state.not_before.max(Instant::now() + lost_until.saturating_sub(now));
                if has_other_locks {
                    state.locking.expect_reclaim(id);
                }
                running.push(id);
                crate::sessions::watch_process(shared, id, process);
                crate::sessions::watch_files(shared, &state, id);
                tracing::info!(session = id.0, "a running session goes on");
            }
            process => {
                dead += 1;
                if process.is_none() && session.identity.kind == SessionKind::Mount {
                    dead_mounts.push(session.mount_device);
                }
                session.is_ending = true;
                crate::grant::end_leases(&mut state, id);
                state.store.release_all(id);
            }
        }
    }
    dead_mounts.retain(|device| !crate::materialise::is_mount(&state, *device));
    dead_mounts.into_iter().for_each(|device| crate::mount_notifier::abort_dead_mount(device, &shared.config.arena));
    {
        let State { locking, sessions, .. } = &mut **state;
        locking.take_up(&running, sessions);
    }
    state.note_handles_found();
    // Grants of an earlier SharedFS are over: they have been used, or are asked for again.
    let has_limits = state.store.has_quota_limits();
    for id in state.live_ids() {
        if state
            .live(id)
            .is_some_and(|session| !session.is_ending && (has_limits || session.quota_version.has_limits()))
        {
            state.invalidate_quota_balances(id, has_limits);
        }
        if let Some(session) = state.sessions.get_mut(&id) {
            session.is_quota_validated = true;
        }
    }
    shared.perform_decisions(&mut state);
    // From here on, none of the leases from before the start stands.
    state.sessions.values().filter_map(|session| session.notifier.as_ref()).for_each(|absent| absent.renew_absence());
    crate::sessions::remove_ended(shared, &mut state);
    // Inodes that recovery has kept count as used until they are freed. A session that goes on may just have closed a
    // file to which its log still writes; the sweep checks that.
    state = digest::sweep_orphans(shared, state);
    if dead > 0 {
        tracing::info!(sessions = dead, "the logs of sessions that are gone were digested");
    }
    Ok(digest::commit(&mut state)?)
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::path::Path;

    use super::*;
    use crate::test_sessions::{add_session, make_arena};

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
        recover(Config::new(place)).expect("a sound arena")
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
        panics::confine_panics();
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
