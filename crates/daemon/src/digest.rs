//! The threads that digest, and the files of fenced sessions.
//!
//! The node applies logs in steps; other threads have it in between. A commit runs without the lock.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ashlar_node::digest::commit::{begin_commit, can_commit, commit, finish_commit, is_much_uncommitted};
use ashlar_node::pending::progress::Progress;
use ashlar_node::pending::round::{DigestPace, DigestRound, NextRound, RoundStep};
use ashlar_node::records::apply::Slice;
use ashlar_node::{Node, NodeEffect};
use ashlar_pmem::Arena;
use ashlar_store::StoreError;
use ashlar_types::SessionId;

use crate::huge_pages::{self, huge_thread};
use crate::shared_state::SharedState;

/// The number of quarantined sessions whose files are kept for inspection.
const FENCED_KEPT: usize = 8;
/// How long a commit that failed waits until it is tried again.
const RETRY: Duration = Duration::from_secs(1);

/// Runs the digest thread: checks all logs, and applies those that are due.
pub fn digest_thread(shared: &SharedState) {
    let mut state = shared.lock();
    let mut pace = DigestPace::new(state.now.since_boot);
    while !state.ending {
        state.refresh_time();
        let mut round = DigestRound::new(&mut state, pace);
        let next = loop {
            match round.advance(&mut state) {
                Progress::Done(RoundStep::RemoveEnded) => crate::sessions::remove_ended(shared, &mut state),
                Progress::Done(RoundStep::Over(reached, next)) => {
                    pace = reached;
                    break next;
                }
                Progress::More | Progress::Wait(..) => state.bump(),
            }
        };
        if state.failure.is_some() {
            drop(state);
            shared.stop();
            return;
        }
        match next {
            NextRound::Now => {}
            NextRound::After(pause) => _ = state.wait_for(&shared.digest_wanted, pause),
            NextRound::WhenAsked => state.wait(&shared.digest_wanted),
        }
    }
}

/// Quarantines fenced sessions.
///
/// Their files are kept for inspection, under names that no start takes up. SharedFS renames the log only after all
/// that it applied from it is committed: until then a restart needs the log.
pub fn quarantine_fenced(shared: &SharedState, state: &mut Node) {
    for id in state.settled_fenced() {
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

/// Runs the commit thread: commits one batch after the other, as they are wanted.
pub fn commit_thread(shared: &SharedState) {
    let mut state = shared.lock();
    loop {
        while !state.commits.is_wanted {
            if state.ending {
                return;
            }
            state.wait(&shared.commit_wanted);
        }
        state.commits.is_wanted = false;
        let Some(job) = begin_commit(&mut state) else {
            state.effects.push(NodeEffect::WakeDigests);
            continue;
        };
        let done = state.unlocked(move || job.run());
        if let Err(error) = finish_commit(&mut state, done) {
            state.counters.commits_failed += 1;
            tracing::error!(%error, "a batch can't be committed; it is kept and tried again");
            if state.ending {
                return;
            }
            state.effects.push(NodeEffect::WakeDigests);
            // Requests that want a commit meanwhile would otherwise make it fail over and over.
            let until = Instant::now() + RETRY;
            while !state.ending
                && !state.wait_for(&shared.commit_wanted, until.saturating_duration_since(Instant::now()))
            {}
            state.commits.is_wanted = true;
        }
        // Meanwhile, enough may have been applied for another commit.
        let is_due = can_commit(&state) && is_much_uncommitted(&state.store, state.sessions.values());
        state.commits.is_wanted |= is_due;
        state.effects.push(NodeEffect::WakeDigests);
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
    state.decide_all();
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
