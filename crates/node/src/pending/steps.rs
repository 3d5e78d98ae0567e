//! Steps that several kinds of requests take.

use std::time::Duration;

use ashlar_types::{Errno, JournalPosition, LogPosition, SessionId};

use crate::digest::commit::is_commit_due_after;
use crate::digest::freed_blocks::release_blocks;
use crate::digest::orphans::{closed_orphans, free_orphan, is_open};
use crate::leases::decisions::decide_batch;
use crate::leases::grant::ENDING;
use crate::node_core::NodeCore;
use crate::pending::progress::{Progress, WaitFor, done, ok};
use crate::records::apply::{Slice, apply_log};
use crate::records::logs::find_settled;
use crate::sessions::session_table::SessionTable;

/// Performs the lease manager's decisions, with at most one batch of the logs that they seal.
pub fn decide_next(node: &mut NodeCore) -> Progress<()> {
    if decide_batch(node) { Progress::Done(()) } else { Progress::More }
}

/// Applies logs up to the ends that are settled when their turn comes, one batch in each step.
#[derive(Debug, Default)]
pub struct ApplyLogs {
    /// The logs that follow, the next one last.
    left: Vec<SessionId>,
    current: Option<(SessionId, LogPosition)>,
    /// The lease manager's decisions are not performed as a whole.
    decides: bool,
}

impl ApplyLogs {
    /// Applies one session's log.
    pub fn of(id: SessionId) -> Self {
        Self { left: vec![id], ..Self::default() }
    }

    /// Applies these sessions' logs, one after the other.
    pub fn of_each(mut ids: Vec<SessionId>) -> Self {
        ids.reverse();
        Self { left: ids, ..Self::default() }
    }

    /// Applies all logs.
    pub fn of_all(sessions: &SessionTable) -> Self {
        Self::of_each(sessions.live_ids())
    }

    /// Applies the next batch.
    pub fn advance(&mut self, node: &mut NodeCore) -> Progress<()> {
        loop {
            if self.decides {
                done!(decide_next(node));
                self.decides = false;
            }
            let (id, settled) = match self.current {
                Some(current) => current,
                None => {
                    let Some(id) = self.left.pop() else { return Progress::Done(()) };
                    let Some(settled) = find_settled(node, id) else { continue };
                    *self.current.insert((id, settled))
                }
            };
            let is_last = apply_log(node, id, settled, Slice::Batch);
            self.decides = true;
            if is_last {
                self.current = None;
            }
            if is_commit_due_after(node, id) {
                node.request_commit();
            }
            if !is_last {
                done!(decide_next(node));
                self.decides = false;
                return Progress::More;
            }
        }
    }
}

/// Waits until all that is applied when it begins is committed.
#[derive(Debug, Default)]
pub struct CommitAll {
    /// The number of the commit to wait for, and the commits that had failed before.
    aim: Option<(u64, u64)>,
}

impl CommitAll {
    /// Returns whether everything is committed.
    ///
    /// The result is `EIO` if the shared area or a commit has failed, or [`ENDING`].
    pub fn advance(&mut self, node: &mut NodeCore) -> Progress<Result<(), Errno>> {
        // A batch that is under way may lack the newest updates; the next one that begins has them.
        let (target, failed) = *self.aim.get_or_insert((node.commits.begun + 1, node.counters.commits_failed));
        if !node.store.is_dirty() || node.commits.ended >= target {
            return Progress::Done(Ok(()));
        }
        if node.failure.is_some() || node.counters.commits_failed > failed {
            return Progress::Done(Err(Errno::EIO));
        }
        if node.ending {
            return Progress::Done(Err(ENDING));
        }
        node.request_commit();
        Progress::Wait(WaitFor::Digests, None)
    }
}

/// Waits until the journal, as it is when this begins, is durable in all copies that count.
#[derive(Debug)]
pub struct ReplicationWait {
    upto: JournalPosition,
    until: Duration,
}

impl ReplicationWait {
    /// Waits for the journal's end; `None` if the journal does not answer.
    pub fn begin(node: &NodeCore) -> Option<Self> {
        let journal = node.journal.as_ref().filter(|journal| journal.answers_syncs())?;
        let until = node.now.since_boot + node.limits.replication_patience;
        Some(Self { upto: journal.mark().position, until })
    }

    /// Returns whether all copies have it.
    ///
    /// The result is `EIO` if the shared area has failed, or if the replica is away for too long; or [`ENDING`].
    pub fn advance(&mut self, node: &mut NodeCore) -> Progress<Result<(), Errno>> {
        let Some(journal) = node.journal.as_mut().filter(|journal| journal.replicated() < self.upto) else {
            return Progress::Done(Ok(()));
        };
        journal.want_durable(self.upto);
        if node.failure.is_some() || node.now.since_boot >= self.until {
            return Progress::Done(Err(Errno::EIO));
        }
        if node.ending {
            return Progress::Done(Err(ENDING));
        }
        Progress::Wait(WaitFor::Copies, Some(self.until))
    }
}

/// Waits until a session's log is committed up to a position.
///
/// The wait ends too if the session is gone.
#[derive(Debug)]
pub struct DigestWait {
    id: SessionId,
    target: LogPosition,
    /// The digest must apply the log first.
    applies: bool,
}

impl DigestWait {
    /// Waits for a commit of what is applied up to `target`.
    pub fn for_commit(id: SessionId, target: LogPosition) -> Self {
        Self { id, target, applies: false }
    }

    /// Waits for the digest of a log up to `target`.
    pub fn for_digest(id: SessionId, target: LogPosition) -> Self {
        Self { id, target, applies: true }
    }

    /// Returns the committed position.
    ///
    /// The result is `EIO` if the session is fenced or the shared area has failed, or [`ENDING`].
    pub fn advance(&mut self, node: &mut NodeCore) -> Progress<Result<LogPosition, Errno>> {
        let Self { id, target, applies } = *self;
        let (committed, applied) = (node.store.committed(id), node.store.applied(id));
        let Some(session) = node.sessions.get_mut(&id) else { return Progress::Done(Ok(committed)) };
        if committed >= target || session.is_cut && committed >= applied {
            return Progress::Done(Ok(committed));
        }
        if node.failure.is_some() || session.fenced.is_some() {
            return Progress::Done(Err(Errno::EIO));
        }
        if node.ending {
            return Progress::Done(Err(ENDING));
        }
        if applies {
            session.wanted = session.wanted.max(target);
            node.request_digest();
        } else {
            node.request_commit();
        }
        Progress::Wait(WaitFor::Digests, None)
    }
}

/// Frees the orphans that no session has open.
#[derive(Debug, Default)]
pub struct SweepOrphans {
    closed: Vec<ashlar_types::InodeId>,
    stage: SweepStage,
}

#[derive(Debug, Default)]
enum SweepStage {
    #[default]
    Begin,
    Apply(ApplyLogs),
    Decide,
}

impl SweepOrphans {
    /// Frees them, after all logs are applied.
    pub fn advance(&mut self, node: &mut NodeCore) -> Progress<()> {
        loop {
            match &mut self.stage {
                SweepStage::Begin => {
                    self.closed = closed_orphans(node);
                    if self.closed.is_empty() {
                        return Progress::Done(());
                    }
                    // A record that is still in a log may give an orphan a name again, or open it.
                    self.stage = SweepStage::Apply(ApplyLogs::of_all(&node.sessions));
                }
                SweepStage::Apply(apply) => {
                    done!(apply.advance(node));
                    for inode in std::mem::take(&mut self.closed) {
                        if !is_open(node, inode) && node.orphans.contains(&inode) {
                            free_orphan(node, inode);
                        }
                    }
                    self.stage = SweepStage::Decide;
                }
                SweepStage::Decide => return decide_next(node),
            }
        }
    }
}

/// Makes free the space that sessions hold unused or have deleted.
#[derive(Debug, Default)]
pub enum ReclaimStep {
    /// Nothing is done yet.
    #[default]
    Begin,
    /// Each session's unused credit is recalled, and its log applied.
    Sessions(Vec<SessionId>, ApplyLogs),
    /// Orphans are freed.
    Sweep(SweepOrphans),
    /// The freed space is committed.
    Commit(CommitAll),
}

impl ReclaimStep {
    /// Goes on with it. The result is that of a commit.
    pub fn advance(&mut self, node: &mut NodeCore) -> Progress<Result<(), Errno>> {
        loop {
            match self {
                Self::Begin => {
                    let mut ids = node.live_ids();
                    ids.reverse();
                    *self = Self::Sessions(ids, ApplyLogs::default());
                }
                Self::Sessions(left, apply) => {
                    done!(apply.advance(node));
                    match left.pop() {
                        Some(id) => {
                            if let Some(session) = node.sessions.get_mut(&id) {
                                session.recall_credit();
                            }
                            *apply = ApplyLogs::of(id);
                        }
                        None => *self = Self::Sweep(SweepOrphans::default()),
                    }
                }
                Self::Sweep(sweep) => {
                    done!(sweep.advance(node));
                    *self = Self::Commit(CommitAll::default());
                }
                Self::Commit(commit) => {
                    ok!(done!(commit.advance(node)));
                    release_blocks(&mut node.store, &node.sessions);
                    return Progress::Done(Ok(()));
                }
            }
        }
    }
}
