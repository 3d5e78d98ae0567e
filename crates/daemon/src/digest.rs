//! The threads that digest.
//!
//! They apply in slices, commit in batches without the lock, and free orphans.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ashlar_pmem::Arena;
use ashlar_store::{CommitDone, CommitJob, Committed, StoreError};
use ashlar_types::{InodeId, SessionId};
use ashlar_update::Update;
use parking_lot::MutexGuard;

use crate::apply::Slice;
use crate::huge_pages::{self, huge_thread};
use crate::session::ServedSession;
use crate::session_page;
use crate::shared_state::{SharedState, StateGuard};
use crate::state::State;

/// The part of a log that may wait before the log is digested.
const UNAPPLIED_PART: u64 = 4;
/// How long a log may be idle with waiting records before it is digested.
const IDLE: Duration = Duration::from_millis(300);
/// The part of a log that may wait for a commit before one begins.
const UNCOMMITTED_PART: u64 = 3;
/// The bytes of metadata that may wait for a commit before one begins.
const UNCOMMITTED_BYTES: usize = 32 << 20;
/// How long the oldest update may wait before a commit begins.
const COMMIT_AGE: Duration = Duration::from_millis(500);
/// How often logs are checked while sessions write, and while they don't.
const CHECK_INTERVAL_BUSY: Duration = Duration::from_millis(5);
const CHECK_INTERVAL_IDLE: Duration = Duration::from_millis(250);
/// How often orphans are checked.
const SWEEP: Duration = Duration::from_secs(1);
/// The number of quarantined sessions whose files are kept for inspection.
const FENCED_KEPT: usize = 8;
/// How long a commit that failed waits until it is tried again.
const RETRY: Duration = Duration::from_secs(1);

/// Runs the digest thread: checks all logs, and applies those that are due.
pub fn digest_thread(shared: &SharedState) {
    let (mut swept, mut moved) = (Instant::now(), Instant::now());
    let mut state = shared.lock();
    while !state.ending {
        // A digest that is wanted from here on happens in the next round at the latest: the lock is released in
        // between.
        state.digest_wanted = false;
        let (mut busy, mut has_more) = (false, false);
        for id in state.live_ids() {
            if is_due(&mut state, id, &mut busy) {
                let is_more;
                (state, is_more) = shared.apply_some(state, id);
                has_more |= is_more;
            }
        }
        if busy {
            moved = Instant::now();
        }
        release_blocks(&mut state);
        if swept.elapsed() >= SWEEP {
            state.leasing.manager.handle_time(crate::grant::now_us());
        }
        shared.perform_decisions(&mut state);
        crate::sessions::remove_ended(shared, &mut state);
        if swept.elapsed() >= SWEEP {
            state = sweep_orphans(shared, state);
            // Segments that lagged behind while the arena was checked.
            state.store.show_lagging();
            state.publish_sharing();
            swept = Instant::now();
        }
        if is_commit_due(&state) {
            shared.request_commit(&mut state);
        }
        if state.failure.is_some() {
            drop(state);
            shared.stop();
            return;
        }
        let pause = if moved.elapsed() < 2 * CHECK_INTERVAL_IDLE { CHECK_INTERVAL_BUSY } else { CHECK_INTERVAL_IDLE };
        if state.ending || state.digest_wanted || has_more {
            continue;
        }
        if state.sessions.is_empty() && !state.store.is_dirty() && state.orphans.is_empty() {
            shared.digest_wanted.wait(&mut state);
        } else {
            shared.digest_wanted.wait_for(&mut state, pause);
        }
    }
}

/// Returns whether a session's log should be applied now.
fn is_due(state: &mut State, id: SessionId, busy: &mut bool) -> bool {
    let applied = state.store.applied(id);
    let Some(session) = state.sessions.get_mut(&id) else { return false };
    let tail = session.log.tail();
    if tail != session.moved.0 {
        session.moved = (tail, Instant::now());
        state.leasing.manager.handle_activity(id, crate::grant::now_us());
        *busy = true;
    }
    let waiting = tail.0.saturating_sub(applied.0);
    if waiting > session.log.capacity() / UNAPPLIED_PART || waiting > 0 && session.moved.1.elapsed() > IDLE {
        session.due = tail;
    }
    session.due.max(session.wanted) > applied
}

/// Returns whether it's time for a commit.
fn is_commit_due(state: &State) -> bool {
    let is_old = || state.oldest_uncommitted.is_none_or(|oldest| oldest.elapsed() > COMMIT_AGE);
    can_commit(state) && (is_old() || is_much_uncommitted(state, state.sessions.values()))
}

/// Returns whether a commit is due, now that more of this session's log is applied.
pub fn is_commit_due_after(state: &State, id: SessionId) -> bool {
    can_commit(state) && is_much_uncommitted(state, state.sessions.get(&id))
}

fn can_commit(state: &State) -> bool {
    state.store.is_dirty() && !state.is_committing
}

/// Returns whether much of these sessions' logs is applied and not committed.
///
/// An amount for which a thread waits counts as much.
fn is_much_uncommitted<'a>(state: &State, sessions: impl IntoIterator<Item = &'a ServedSession>) -> bool {
    let is_long = |session: &ServedSession| {
        let (applied, committed) = (state.store.applied(session.id), state.store.committed(session.id));
        let is_wanted = committed < session.wanted && session.wanted <= applied;
        is_wanted || applied.0.saturating_sub(committed.0) > session.log.capacity() / UNCOMMITTED_PART
    };
    state.store.uncommitted_bytes() > UNCOMMITTED_BYTES || sessions.into_iter().any(is_long)
}

/// Makes blocks usable again that sessions have freed and refer to no more.
pub fn release_blocks(state: &mut State) {
    let released: Vec<_> =
        state.sessions.values().filter(|s| s.fenced.is_none()).map(|s| (s.id, s.control.released())).collect();
    for (id, position) in released {
        // A word about positions to come would count as the word of the session that gets this number next.
        state.store.release(id, position.min(state.store.applied(id)));
    }
    state.store.release_all(SessionId::SHARED_FS);
}

/// Takes freed blocks from sessions that might still read them.
///
/// Their freeing is committed. These sessions begin a new extent version, in which they ask again where their data are.
/// That needs no action of theirs now.
pub fn take_unreleased_blocks(state: &mut State) {
    for session in state.sessions.values().filter(|session| session.fenced.is_none()) {
        let committed = state.store.committed(session.id);
        if state.store.has_unreleased(session.id, committed) {
            session.control.raise_extent_version();
            state.store.release(session.id, committed);
        }
    }
}

/// Quarantines fenced sessions.
///
/// Their files are kept for inspection, under names that no start takes up. SharedFS renames the log only after all
/// that it applied from it is committed: until then a restart needs the log.
pub fn quarantine_fenced(shared: &SharedState, state: &mut State) {
    let settled: Vec<SessionId> = state
        .sessions
        .values()
        .filter(|s| s.fenced.is_some() && !s.is_quarantined && state.store.committed(s.id) >= state.store.applied(s.id))
        .map(|s| s.id)
        .collect();
    for id in settled {
        if let Err(error) = quarantine_session(&shared.arena, id) {
            if error.kind() != io::ErrorKind::NotFound {
                tracing::warn!(session = id.0, %error, "a fenced session's files can't be quarantined");
            }
            continue;
        }
        tracing::warn!(session = id.0, "the fenced session's log is kept as sessions/fenced-{}.log", id.0);
        // Its positions stay known until its process has ended: other sessions build on what was applied.
        state.store.release_all(id);
        if let Some(session) = state.sessions.get_mut(&id) {
            session.is_quarantined = true;
        }
    }
}

/// Renames a session's files.
///
/// The log is first: without it, no start takes the session up.
pub fn quarantine_session(arena: &Arena, id: SessionId) -> io::Result<()> {
    let sessions = arena.dir().join("sessions");
    for extension in ["log", "control", "leases"] {
        fs::rename(sessions.join(format!("{id}.{extension}")), sessions.join(format!("fenced-{id}.{extension}")))?;
    }
    // The table of the process's mapped segments is needed until the process has ended, and no start takes it up.
    arena.remove_session(id).map_err(io::Error::other)?;
    remove_oldest_quarantined(&sessions)
}

/// Removes all but the files of the last few quarantined sessions.
///
/// A session that forges logs all day must not fill the arena. The times of the renames say which session came last,
/// since numbers are used again.
fn remove_oldest_quarantined(sessions: &Path) -> io::Result<()> {
    let number = |name: &str| name.strip_prefix("fenced-")?.split('.').next()?.parse::<u64>().ok();
    let mut kept = BTreeMap::<u64, ((i64, i64), Vec<PathBuf>)>::new();
    for file in fs::read_dir(sessions)? {
        let file = file?;
        if let Some(id) = file.file_name().to_str().and_then(number) {
            let metadata = file.metadata()?;
            let (renamed, paths) = kept.entry(id).or_default();
            *renamed = (*renamed).max((metadata.ctime(), metadata.ctime_nsec()));
            paths.push(file.path());
        }
    }
    let mut kept: Vec<_> = kept.into_values().collect();
    kept.sort();
    for path in kept.into_iter().rev().skip(FENCED_KEPT).flat_map(|(_, paths)| paths) {
        fs::remove_file(path)?;
    }
    Ok(())
}

fn closed_orphans(state: &State) -> Vec<InodeId> {
    state.orphans.iter().copied().filter(|&inode| !state.is_open(inode)).collect()
}

/// Frees orphans that no session has open.
pub fn sweep_orphans<'a>(shared: &'a SharedState, mut state: StateGuard<'a>) -> StateGuard<'a> {
    let closed = closed_orphans(&state);
    if closed.is_empty() {
        return state;
    }
    // A record that is still in a log may give an orphan a name again, or open it.
    state = shared.apply_all_settled(state);
    for inode in closed {
        if state.is_open(inode) || !state.orphans.contains(&inode) {
            continue;
        }
        free_orphan(&mut state, inode);
    }
    shared.perform_decisions(&mut state);
    state
}

/// Frees the orphans that no session has open.
///
/// A log may still write to them.
pub fn free_orphans(state: &mut State) {
    closed_orphans(state).into_iter().for_each(|inode| free_orphan(state, inode));
}

/// Frees one orphan that no session has open.
fn free_orphan(state: &mut State, inode: InodeId) {
    let end = state.store.applied(SessionId::SHARED_FS).plus(1);
    match state.apply_update(SessionId::SHARED_FS, end, &Update::Release { inode }) {
        Ok(applied) => {
            state.counters.orphans_freed += u64::from(applied.freed.is_some());
            // It has a name again, or is gone: no orphan either way.
            state.orphans.remove(&inode);
            state.oldest_uncommitted.get_or_insert_with(Instant::now);
        }
        Err(error) => tracing::error!(%inode, %error, "an orphan can't be freed"),
    }
}

/// Runs the commit thread: commits one batch after the other, as they are wanted.
pub fn commit_thread(shared: &SharedState) {
    let mut state = shared.lock();
    loop {
        while !state.commit_wanted {
            if state.ending {
                return;
            }
            shared.commit_wanted.wait(&mut state);
        }
        state.commit_wanted = false;
        let Some(job) = begin_commit(&mut state) else {
            shared.progress.notify_all();
            continue;
        };
        let done = MutexGuard::unlocked(&mut state, move || job.run());
        if let Err(error) = finish_commit(&mut state, done) {
            state.counters.commits_failed += 1;
            tracing::error!(%error, "a batch can't be committed; it is kept and tried again");
            if state.ending {
                return;
            }
            shared.progress.notify_all();
            // Threads that want a commit meanwhile would otherwise make it fail over and over.
            let until = Instant::now() + RETRY;
            while !state.ending && !shared.commit_wanted.wait_until(&mut state, until).timed_out() {}
            state.commit_wanted = true;
        }
        // Meanwhile, enough may have been applied for another commit.
        state.commit_wanted |= can_commit(&state) && is_much_uncommitted(&state, state.sessions.values());
        shared.progress.notify_all();
    }
}

/// Freezes the applied updates for a commit.
///
/// Returns `None` if there is nothing to commit, or no commit can begin now.
pub fn begin_commit(state: &mut State) -> Option<CommitJob> {
    // A batch that is tried again holds the updates of its first try: it's the same commit, and its costs are noted
    // already.
    let is_new = !state.store.is_frozen();
    if is_new {
        record_costs(state);
    }
    let mut job = state.store.begin_commit()?;
    let batch = state.store.next_batch() - 1;
    job.sync_first(state.sessions.values().filter_map(|session| session.rights.unsynced(batch)).cloned().collect());
    if is_new {
        state.oldest_uncommitted = None;
        state.commits_begun += 1;
    }
    state.is_committing = true;
    Some(job)
}

/// Records the outcome of a commit, and frees the log space that it made free.
///
/// # Errors
/// Those of the commit, which must be tried again.
pub fn finish_commit(state: &mut State, done: CommitDone) -> Result<(), StoreError> {
    state.is_committing = false;
    let committed = state.store.finish_commit(done)?;
    // Another thread may have ended this commit, and may have begun another one.
    if committed.batch.is_some() {
        state.counters.commits += 1;
        state.commits_ended = state.commits_begun;
    }
    publish_committed(state, &committed);
    Ok(())
}

/// Commits everything without the commit thread.
///
/// # Errors
/// Those of a commit, and [`StoreError::CommitUnderWay`].
pub fn commit(state: &mut State) -> Result<(), StoreError> {
    while state.store.is_dirty() {
        let Some(job) = begin_commit(state) else {
            state.store.check_sound()?;
            return Err(StoreError::CommitUnderWay);
        };
        finish_commit(state, job.run())?;
    }
    Ok(())
}

/// Notes the cost of all records that the coming commit takes.
///
/// So a restart knows the possible cost of the rest of a log.
fn record_costs(state: &mut State) {
    for session in state.sessions.values() {
        // The page is mapped whole, so the store can't miss it.
        let _ = session_page::set_cost_at(&*session.page, state.store.applied(session.id), session.account.used);
    }
}

/// Tells sessions how far their logs are committed.
///
/// The log space up to there is free.
fn publish_committed(state: &mut State, committed: &Committed) {
    for &(id, position) in &committed.sessions {
        if let Some(session) = state.sessions.get(&id).filter(|session| session.fenced.is_none()) {
            session.set_committed(position);
        }
        state.leasing.manager.handle_persistent(id, position);
    }
    if let (Some(grant_cache), Some(batch)) = (&state.grant_cache, committed.batch) {
        grant_cache.set_persistent(batch);
    }
}

/// Applies all logs and commits everything when SharedFS ends.
pub fn digest_all(shared: &SharedState) -> Result<(), StoreError> {
    let mut state = shared.lock();
    if let Some(error) = state.failure.take() {
        return Err(error);
    }
    for id in state.live_ids() {
        if let Some(settled) = state.settled(id) {
            state.apply(id, settled, Slice::All);
        }
    }
    shared.perform_decisions(&mut state);
    commit(&mut state)
}

/// Starts the digest and commit threads, and the one that makes huge pages.
pub fn start_threads(shared: &Arc<SharedState>) -> io::Result<Vec<std::thread::JoinHandle<()>>> {
    type Work = fn(&SharedState);
    let threads: [(&str, Work); 2] = [("digest", digest_thread), ("commit", commit_thread)];
    let huge: Option<(&str, Work)> = huge_pages::is_wanted(shared).then_some(("huge", huge_thread));
    threads
        .into_iter()
        .chain(huge)
        .map(|(name, work)| {
            let shared = Arc::clone(shared);
            std::thread::Builder::new().name(name.into()).spawn(move || work(&shared))
        })
        .collect()
}
