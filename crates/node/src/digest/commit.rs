//! Commits: when one is due, and what it sets free.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use ashlar_journal::FlushJob;
use ashlar_pmem::SharedMemory;
use ashlar_store::{CommitDone, CommitJob, Committed, Store, StoreError};
use ashlar_types::{JournalPosition, LogPosition, SessionId};

use crate::digest::commit_state::CommitState;
use crate::effects::NodeEffect;
use crate::invariants::check_sessions;
use crate::journal::NodeJournal;
use crate::node_core::NodeCore;
use crate::sessions::session::ServedSession;
use crate::sessions::session_table::SessionTable;

/// The part of a log that may wait before the log is digested.
const UNAPPLIED_PART: u64 = 4;
/// The part of what a session may append that may wait, where appends are limited.
const LIMITED_PART: u64 = 2;
/// How long a log may be idle with waiting records before it is digested.
const IDLE: Duration = Duration::from_millis(300);
/// The part of a log that may wait for a commit before one begins.
const UNCOMMITTED_PART: u64 = 3;
/// The bytes of metadata that may wait for a commit before one begins.
const UNCOMMITTED_BYTES: usize = 32 << 20;
/// How long the oldest update may wait before a commit begins.
const COMMIT_AGE: Duration = Duration::from_millis(500);

/// Returns whether a session's log should be applied now.
///
/// Sets `is_busy` if the session has logged anything since it was asked last.
pub fn is_due(session: &mut ServedSession, applied: LogPosition, now: Duration, is_busy: &mut bool) -> bool {
    let tail = session.log.tail();
    if tail != session.moved.0 {
        session.moved = (tail, now);
        *is_busy = true;
    }
    let waiting = tail.0.saturating_sub(applied.0);
    let limited = session.append_limit.map(|limit| limit.0.saturating_sub(applied.0) / LIMITED_PART);
    let most = limited.unwrap_or(u64::MAX).min(session.log.capacity() / UNAPPLIED_PART);
    if waiting > most || waiting > 0 && now > session.moved.1 + IDLE {
        session.due = tail;
    }
    session.due.max(session.wanted) > applied
}

/// Returns whether it's time for a commit.
pub fn is_commit_due(state: &NodeCore) -> bool {
    let is_old = || state.commits.oldest_uncommitted.is_none_or(|oldest| state.now.since_boot > oldest + COMMIT_AGE);
    let is_much = || is_much_uncommitted(&state.store, state.sessions.values()) || is_journal_filling(state);
    can_commit(&state.store, &state.commits) && (is_old() || is_much())
}

/// Returns whether a commit is due, now that more of this session's log is applied.
pub fn is_commit_due_after(state: &NodeCore, id: SessionId) -> bool {
    let is_much = || is_much_uncommitted(&state.store, state.sessions.get(&id)) || is_journal_filling(state);
    can_commit(&state.store, &state.commits) && is_much()
}

/// Returns whether much of the journal can be reused only after a commit.
fn is_journal_filling(state: &NodeCore) -> bool {
    state.journal.as_ref().is_some_and(NodeJournal::is_filling)
}

/// Returns whether there is anything to commit, and no commit is under way.
pub fn can_commit(store: &Store, commits: &CommitState) -> bool {
    store.is_dirty() && !commits.is_running
}

/// Returns whether much of these sessions' logs is applied and not committed.
///
/// An amount for which a request waits counts as much.
pub fn is_much_uncommitted<'a>(store: &Store, sessions: impl IntoIterator<Item = &'a ServedSession>) -> bool {
    let is_long = |session: &ServedSession| {
        let (applied, committed) = (store.applied(session.id), store.committed(session.id));
        let is_wanted = committed < session.wanted && session.wanted <= applied;
        is_wanted || applied.0.saturating_sub(committed.0) > session.log.capacity() / UNCOMMITTED_PART
    };
    store.uncommitted_bytes() > UNCOMMITTED_BYTES || sessions.into_iter().any(is_long)
}

/// Freezes the applied updates for a commit.
///
/// Returns `None` if there is nothing to commit, or no commit can begin now.
pub fn begin_commit(state: &mut NodeCore) -> Option<NodeCommit> {
    // A batch that is tried again holds the updates of its first try: it's the same commit, and its costs are noted
    // already.
    let is_new = !state.store.is_frozen();
    if is_new {
        record_costs(&state.store, &state.sessions);
    }
    let mut job = state.store.begin_commit()?;
    let batch = state.store.next_batch() - 1;
    job.sync_first(state.sessions.values().filter_map(|session| session.rights.unsynced(batch)).cloned().collect());
    if is_new {
        state.commits.record_begin();
    }
    state.commits.is_running = true;
    let (awaited, flush) = state.journal.as_mut().map(|journal| journal.begin_commit(is_new)).unzip();
    Some(NodeCommit { job, awaited, flush: flush.flatten(), flushed: None })
}

/// A commit that waits to be run, without the node.
///
/// The shell makes the journal durable ([`Self::flush`]), waits until the replica has done so too
/// ([`crate::journal::NodeJournal::is_acknowledged`]), and runs the commit.
#[derive(Debug)]
#[must_use = "a commit that is not run commits nothing"]
pub struct NodeCommit {
    job: CommitJob,
    /// The position up to which the replica must have the journal.
    awaited: Option<JournalPosition>,
    /// The frames of the commit's updates must be durable before the commit.
    flush: Option<(FlushJob, Arc<SharedMemory>)>,
    flushed: Option<(FlushJob, io::Result<()>)>,
}

/// A commit that was run, for [`finish_commit`].
#[derive(Debug)]
#[must_use = "the node keeps the batch until it learns of its commit"]
pub struct NodeCommitDone {
    done: CommitDone,
    flushed: Option<(FlushJob, io::Result<()>)>,
}

impl NodeCommit {
    /// Returns the position up to which the replica must have made the journal durable before this runs.
    ///
    /// It is `None` for a node without a journal.
    #[must_use]
    pub fn awaited(&self) -> Option<JournalPosition> {
        self.awaited
    }

    /// Makes the journal durable here.
    pub fn flush(&mut self) {
        if let Some((job, memory)) = self.flush.take() {
            let result = job.run(&*memory);
            self.flushed = Some((job, result));
        }
    }

    /// Gives the commit up: the replica is lost.
    pub fn give_up(self) -> NodeCommitDone {
        let done = self.job.give_up("the replica has not made the journal durable");
        NodeCommitDone { done, flushed: self.flushed }
    }

    /// Makes the journal durable here, then commits.
    pub fn run(mut self) -> NodeCommitDone {
        self.flush();
        let is_flushed = self.flushed.as_ref().is_none_or(|(_, result)| result.is_ok());
        let done = if is_flushed { self.job.run() } else { self.job.give_up("the journal could not be made durable") };
        NodeCommitDone { done, flushed: self.flushed }
    }
}

/// Records the outcome of a commit, and frees the log space that it made free.
///
/// # Errors
/// Those of the commit, which must be tried again.
pub fn finish_commit(state: &mut NodeCore, done: NodeCommitDone) -> Result<(), StoreError> {
    state.commits.is_running = false;
    if let (Some(journal), Some((job, result))) = (&mut state.journal, done.flushed) {
        journal.finish_flush(&job, result)?;
    }
    let committed = state.store.finish_commit(done.done)?;
    if let Some(journal) = &mut state.journal {
        journal.finish_commit()?;
        state.effects.push(NodeEffect::Replicate);
    }
    // Another thread may have ended this commit, and may have begun another one.
    if committed.batch.is_some() {
        state.counters.commits += 1;
        state.commits.ended = state.commits.begun;
    }
    publish_committed(state, &committed);
    check_sessions(state);
    state.effects.push(NodeEffect::WakeDigests);
    Ok(())
}

/// Waits until the replica has made the journal durable up to a position.
///
/// The shell lends it to steps that commit by themselves.
pub type AwaitCopy<'a> = dyn FnMut(&mut NodeCore, JournalPosition) -> Result<(), StoreError> + 'a;

/// Commits everything without the commit thread, in a node that has no replica.
///
/// # Errors
/// As [`commit_with`]; [`StoreError::CommitUnderWay`] if there is a replica, which lacks a part of the journal.
pub fn commit(state: &mut NodeCore) -> Result<(), StoreError> {
    commit_with(state, &mut await_no_copy)
}

/// Commits everything without the commit thread.
///
/// # Errors
/// Those of a commit and of `await_copy`, and [`StoreError::CommitUnderWay`].
pub fn commit_with(state: &mut NodeCore, await_copy: &mut AwaitCopy<'_>) -> Result<(), StoreError> {
    while state.store.is_dirty() {
        let Some(mut job) = begin_commit(state) else {
            state.store.check_sound()?;
            return Err(StoreError::CommitUnderWay);
        };
        job.flush();
        let awaited = job.awaited().map_or(Ok(()), |upto| await_copy(state, upto));
        let done = if awaited.is_ok() { job.run() } else { job.give_up() };
        let finished = finish_commit(state, done);
        awaited.and(finished)?;
    }
    Ok(())
}

/// Does not wait for a replica.
pub fn await_no_copy(state: &mut NodeCore, upto: JournalPosition) -> Result<(), StoreError> {
    let is_acknowledged = state.journal.as_ref().is_none_or(|journal| journal.is_acknowledged(upto));
    if is_acknowledged { Ok(()) } else { Err(StoreError::CommitUnderWay) }
}

/// Notes the cost of all records that the coming commit takes.
///
/// So a restart knows the possible cost of the rest of a log.
fn record_costs(store: &Store, sessions: &SessionTable) {
    for session in sessions.values() {
        session.page.set_cost_at(store.applied(session.id), session.account.used);
    }
}

/// Tells sessions how far their logs are committed.
///
/// The log space up to there is free.
fn publish_committed(state: &mut NodeCore, committed: &Committed) {
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
