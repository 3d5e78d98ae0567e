//! The threads that digest and commit.
//!
//! The node applies logs in steps; other threads have it in between. A commit runs without the lock.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ashlar_node::digest::commit::{begin_commit, can_commit, finish_commit, is_much_uncommitted};
use ashlar_node::pending::progress::Progress;
use ashlar_node::pending::round::{DigestPace, DigestRound, NextRound, RoundStep};
use ashlar_node::records::apply::Slice;
use ashlar_node::{Node, NodeEffect};
use ashlar_processes::clock;
use ashlar_store::StoreError;

use crate::huge_pages::{self, huge_thread};
use crate::shared_state::{Leading, SharedState};

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
                Progress::More => state.bump(),
                Progress::Wait(..) if state.is_over() => break NextRound::Now,
                Progress::Wait(_, until) => state.wait_until(&shared.progress, until),
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
        let Some(mut job) = begin_commit(&mut state) else {
            state.effects.push(NodeEffect::WakeDigests);
            continue;
        };
        let mut awaited = Ok(());
        if let Some(upto) = job.awaited() {
            state.unlocked(|| job.flush());
            awaited = state.await_copies(upto);
        }
        let done = state.unlocked(move || if awaited.is_ok() { job.run() } else { job.give_up() });
        if let Err(error) = finish_commit(&mut state, done) {
            state.counters.commits_failed += 1;
            if state.ending {
                // The end commits all that is left, and reports a failure. A replica that is away is none.
                return;
            }
            tracing::error!(%error, "a batch can't be committed; it is kept and tried again");
            state.effects.push(NodeEffect::WakeDigests);
            // Requests that want a commit meanwhile would otherwise make it fail over and over.
            let until = Instant::now() + RETRY;
            while !state.ending
                && !state.wait_for(&shared.commit_wanted, until.saturating_duration_since(Instant::now()))
            {}
            state.commits.is_wanted = true;
        }
        // Meanwhile, enough may have been applied for another commit.
        let is_due =
            can_commit(&state.store, &state.commits) && is_much_uncommitted(&state.store, state.sessions.values());
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
    apply_all(&mut state);
    match (shared.commit(&mut state), &shared.leading) {
        // All is in the logs and in the journal. The next start commits it, once the replica has it.
        (Err(StoreError::CommitUnderWay), Some(_)) => tracing::warn!("the replica is away; not all is committed"),
        (committed, _) => committed?,
    }
    if let Some(Leading { leader, .. }) = &shared.leading {
        leader.say_goodbye(&mut state, &clock::boot_time);
    }
    shared.shadow.as_ref().map_or(Ok(()), |shadow| shadow.lock().catch_up(&mut state))
}

/// Applies all logs.
pub fn apply_all(state: &mut Node) {
    for id in state.live_ids() {
        if let Some(settled) = state.settled(id) {
            state.apply(id, settled, Slice::All);
        }
    }
    state.decide_all();
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
