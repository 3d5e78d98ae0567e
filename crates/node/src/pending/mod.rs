//! Requests that can't be answered at once.
//!
//! Each is a row of a table, under a ticket. The shell advances a row when it begins, when an effect or its time says
//! so, and as long as the row can go on. A row never waits in here.

mod digests;
mod ends;
mod grants;
mod locks;
pub mod progress;
pub mod round;
mod space;
mod steps;

use std::collections::BTreeMap;

use ashlar_types::{Access, Errno, InodeId, QuotaId, QuotaKey, QuotaLimits, SessionId};
use ashlar_wire::{Reply, Request};

use crate::access::open_rights;
use crate::blame::Blame;
use crate::leases::grant::{self, AnswerGate, Patience, report_store_error};
use crate::leases::reserved;
use crate::locks::locking;
use crate::node::Node;
use crate::sessions::mapping;
use crate::space::{credit, quota};
use digests::{DigestTask, MapTask, RangeTask, ShowTask, SyncTask, WantedMapping};
use ends::EndSessions;
use grants::{AcquireTask, LookupTarget, LookupTask, ReserveTask, TakeFromAll};
use locks::LockTask;
use progress::{Progress, done};
use space::{CreditTask, LimitsTask, QuotaTask};
use steps::{ApplyLogs, CommitAll, DigestWait, ReclaimStep, SweepOrphans};

pub use digests::FIRST_RANGE;

/// Names a pending request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct RequestTicket(u64);

/// The terms of one request.
#[derive(Clone, Copy, Debug)]
pub struct RequestTerms {
    /// Whether it may wait.
    pub patience: Patience,
    /// Bytes of memory that the answer may take.
    pub bytes_max: usize,
    /// The session has just resumed, and repeats what SharedFS has forgotten.
    pub reclaims: bool,
}

impl RequestTerms {
    /// The terms of a request of SharedFS itself.
    pub const OWN: Self = Self { patience: Patience::Any, bytes_max: usize::MAX, reclaims: false };
}

/// A reply, and what must have happened before it may be sent.
#[derive(Debug)]
pub struct GatedReply {
    /// The reply.
    pub reply: Reply,
    /// The conditions.
    pub gate: AnswerGate,
}

impl From<Reply> for GatedReply {
    fn from(reply: Reply) -> Self {
        Self { reply, gate: AnswerGate::default() }
    }
}

/// The result of a request.
#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "it is returned once, and not kept")]
pub enum NodeAnswer {
    /// A reply to a session.
    Reply(GatedReply),
    /// The session may open the inode on one of the mounts of these devices.
    ///
    /// A watched directory's entry comes with it, by which the kernel knows the watchers.
    MayOpen {
        /// The directory and the name.
        entry: Option<(InodeId, Vec<u8>)>,
        /// The devices that the files of the arena's mounts show.
        devices: Vec<u64>,
    },
    /// An act of the shell's own has ended.
    Done,
}

impl From<Reply> for NodeAnswer {
    fn from(reply: Reply) -> Self {
        Self::Reply(reply.into())
    }
}

/// A request that may have to wait.
#[derive(Debug)]
pub enum NodeRequest {
    /// A session's message.
    Session(SessionId, Request),
    /// A session's message that a session sends to open a file; the shell has read the flags.
    Open {
        /// The session.
        session: SessionId,
        /// The inode.
        inode: InodeId,
        /// The access that is wanted; `None` for a descriptor that neither reads nor writes.
        access: Option<Access>,
        /// Whether accesses must leave the time of access as it is.
        keeps_time: bool,
    },
    /// Free space, as an administrator sees it.
    Space(QuotaId),
    /// All limits and uses.
    Quotas,
    /// Sets limits.
    SetQuota(QuotaKey, QuotaLimits),
    /// Digests all that these sessions logged, and takes what they held.
    EndSessions(Vec<SessionId>),
    /// Frees the orphans that no session has open.
    SweepOrphans,
    /// Commits all that is applied.
    Commit,
    /// Makes free what sessions hold unused or have deleted.
    Reclaim,
    /// Takes the leases on these inodes from all sessions.
    TakeLeases(Vec<InodeId>),
}

/// The requests that wait.
#[derive(Debug, Default)]
pub struct PendingRequests {
    rows: BTreeMap<RequestTicket, PendingRow>,
    last: u64,
}

impl PendingRequests {
    /// Returns how many wait.
    #[must_use]
    pub fn count(&self) -> usize {
        self.rows.len()
    }

    fn insert(&mut self, row: PendingRow) -> RequestTicket {
        self.last += 1;
        self.rows.insert(RequestTicket(self.last), row);
        RequestTicket(self.last)
    }
}

/// One request that waits.
#[derive(Debug)]
struct PendingRow {
    session: Option<SessionId>,
    terms: RequestTerms,
    task: Task,
}

#[derive(Debug)]
enum Task {
    Answered(Box<Option<Result<NodeAnswer, Errno>>>),
    Acquire(AcquireTask),
    Lookup(Box<LookupTask>),
    Reserve(ReserveTask),
    Lock(LockTask),
    Range(RangeTask),
    Credit(CreditTask),
    Quota(QuotaTask),
    Limits(LimitsTask),
    Quotas(ApplyLogs),
    Space(QuotaId, ApplyLogs),
    Digest(DigestTask),
    MakeRoom(DigestWait),
    Sync(SyncTask),
    Map(MapTask),
    Show(ShowTask),
    Open { inode: InodeId, access: Option<Access>, keeps_time: bool, apply: ApplyLogs },
    End(EndSessions),
    Sweep(SweepOrphans),
    Commit(CommitAll),
    Reclaim(ReclaimStep),
    TakeLeases(TakeFromAll),
}

impl Node {
    /// Begins a request. The shell advances it next.
    pub fn begin_request(&mut self, request: NodeRequest, terms: RequestTerms) -> RequestTicket {
        let (session, task) = match request {
            NodeRequest::Session(id, request) => (Some(id), self.begin_session_request(id, request, terms)),
            NodeRequest::Open { session, inode, access, keeps_time } => {
                (Some(session), Ok(Task::Open { inode, access, keeps_time, apply: ApplyLogs::of(session) }))
            }
            NodeRequest::Space(subtree) => (None, Ok(Task::Space(subtree, ApplyLogs::default()))),
            NodeRequest::Quotas => (None, Ok(Task::Quotas(ApplyLogs::of_all(self)))),
            NodeRequest::SetQuota(key, limits) => {
                let is_odd = matches!(key, QuotaKey::Subtree(id) if id == QuotaId::NONE || !id.is_storable());
                let task =
                    if is_odd { Err(Errno::EINVAL) } else { Ok(Task::Limits(LimitsTask::new(self, key, limits))) };
                (None, task)
            }
            NodeRequest::EndSessions(ids) => (None, Ok(Task::End(EndSessions::new(self, ids)))),
            NodeRequest::SweepOrphans => (None, Ok(Task::Sweep(SweepOrphans::default()))),
            NodeRequest::Commit => (None, Ok(Task::Commit(CommitAll::default()))),
            NodeRequest::Reclaim => (None, Ok(Task::Reclaim(ReclaimStep::default()))),
            NodeRequest::TakeLeases(inodes) => (None, Ok(Task::TakeLeases(TakeFromAll::new(inodes)))),
        };
        let task = task.unwrap_or_else(|errno| Task::Answered(Box::new(Some(Err(errno)))));
        self.pending.insert(PendingRow { session, terms, task })
    }

    /// Begins a session's message, or answers it if it never waits.
    fn begin_session_request(&mut self, id: SessionId, request: Request, terms: RequestTerms) -> Result<Task, Errno> {
        let answered = |reply: Reply| Task::Answered(Box::new(Some(Ok(reply.into()))));
        Ok(match request {
            Request::Acquire(wants) => Task::Acquire(AcquireTask::new(wants)),
            Request::Lookup { directory, name, within, makes, write, need } => {
                let target = LookupTarget { directory, name, within, makes, write, need };
                Task::Lookup(Box::new(LookupTask::new(target)))
            }
            Request::ReadDirectory { directory, after, limit } => {
                answered(grant::read_directory(self, id, directory, after, limit)?)
            }
            Request::Kept(question) => {
                let kept = self.sessions.get_mut(&id).and_then(|session| session.kept.take());
                answered(kept.filter(|(of, _)| *of == question).ok_or(Errno::EPROTO)?.1)
            }
            Request::InodeRange => Task::Range(RangeTask::Begin),
            Request::Credit { want, replaces } => Task::Credit(CreditTask::new(want, replaces)),
            Request::Quota(wants) => Task::Quota(QuotaTask::new(id, wants)?),
            // The session's own latest writes and deletions count.
            Request::Space { subtree } => Task::Space(subtree, ApplyLogs::of(id)),
            Request::Digest => Task::Digest(DigestTask::Begin),
            Request::MakeRoom { upto } => {
                let settled = self.settled(id).ok_or(Errno::EIO)?;
                Task::MakeRoom(DigestWait::for_digest(id, upto.min(settled)))
            }
            Request::SyncDependencies(positions) => Task::Sync(SyncTask::Positions(positions)),
            Request::SyncInode { inode, dependencies } => Task::Sync(SyncTask::of_inode(id, inode, dependencies)),
            Request::SyncAll => Task::Sync(SyncTask::All(ApplyLogs::of_all(self))),
            Request::Lock { .. } | Request::QueryLock { .. } => Task::Lock(LockTask::new(request, terms.reclaims)),
            Request::CancelLock { ticket } => answered(locking::cancel_wait(self, id, ticket)),
            Request::ReleaseLocks { inode, owner, kind } => {
                answered(locking::release_locks(self, id, inode, owner, kind))
            }
            Request::YieldLocks { inode, moves } => answered(locking::yield_locks(self, id, inode, moves)),
            Request::Map { inode, first, blocks, follows, number } => {
                Task::Map(MapTask::new(id, WantedMapping { inode, first, blocks, number, follows }))
            }
            Request::Unmap { number } => {
                mapping::unmap_blocks(self, id, number);
                answered(Reply::Done)
            }
            Request::Show { inode } => Task::Show(ShowTask::new(id, inode)),
            Request::Reserve { inode, reason } => Task::Reserve(ReserveTask::new(id, inode, reason)),
            Request::Free { inode, reason } => {
                reserved::end_reservation(self, id, inode, reason)?;
                answered(Reply::Done)
            }
            _ => return Err(Errno::EPROTO),
        })
    }

    /// Goes on with a request. A request that has ended is no longer pending.
    ///
    /// # Panics
    /// If no such request is pending.
    pub fn advance(&mut self, ticket: RequestTicket) -> Progress<Result<NodeAnswer, Errno>> {
        let mut row = self.pending.rows.remove(&ticket).expect("a pending request");
        let _blame = row.session.and_then(|id| self.sessions.get(&id)).map(Blame::for_request);
        let progress = row.advance(self);
        if !matches!(progress, Progress::Done(_)) {
            self.pending.rows.insert(ticket, row);
        }
        progress
    }

    /// Gives up a request; returns whether it has ended by that.
    ///
    /// A request for a lock that has just got it keeps it, and must be advanced once more.
    pub fn cancel_request(&mut self, ticket: RequestTicket) -> bool {
        let Some(mut row) = self.pending.rows.remove(&ticket) else { return true };
        let is_ended = match &mut row.task {
            Task::Acquire(acquire) => {
                acquire.cancel(self);
                true
            }
            Task::Lookup(lookup) => {
                lookup.cancel(self);
                true
            }
            Task::Reserve(reserve) => {
                reserve.cancel(self);
                true
            }
            Task::Lock(lock) => lock.cancel(self),
            _ => true,
        };
        if !is_ended {
            self.pending.rows.insert(ticket, row);
        }
        is_ended
    }
}

impl PendingRow {
    fn advance(&mut self, node: &mut Node) -> Progress<Result<NodeAnswer, Errno>> {
        let (terms, id) = (self.terms, self.session.unwrap_or(SessionId(0)));
        let replied = |result: Result<Reply, Errno>| Progress::Done(result.map(NodeAnswer::from));
        let gated = |result: Result<GatedReply, Errno>| Progress::Done(result.map(NodeAnswer::Reply));
        let ended = |result: Result<(), Errno>| Progress::Done(result.map(|()| Reply::Done.into()));
        match &mut self.task {
            Task::Answered(answer) => Progress::Done(answer.take().unwrap_or(Err(Errno::EIO))),
            Task::Acquire(acquire) => gated(done!(acquire.advance(node, id, terms))),
            Task::Lookup(lookup) => gated(done!(lookup.advance(node, id, terms))),
            Task::Reserve(reserve) => ended(done!(reserve.advance(node, id, terms))),
            Task::Lock(lock) => replied(done!(lock.advance(node, id))),
            Task::Range(range) => replied(done!(range.advance(node, id))),
            Task::Credit(credit) => replied(done!(credit.advance(node, id)).map(Reply::Credit)),
            Task::Quota(quota) => replied(done!(quota.advance(node, id))),
            Task::Limits(limits) => ended(done!(limits.advance(node))),
            Task::Quotas(apply) => {
                done!(apply.advance(node));
                replied(quota::list_quotas(node).map(Reply::Quotas))
            }
            Task::Space(subtree, apply) => {
                done!(apply.advance(node));
                if self.session.is_some() && node.live(id).is_none() {
                    return Progress::Done(Err(Errno::EIO));
                }
                replied(Ok(Reply::Space(credit::space(node, self.session, *subtree))))
            }
            Task::Digest(digest) => replied(done!(digest.advance(node, id))),
            Task::MakeRoom(wait) => replied(done!(wait.advance(node)).map(Reply::Committed)),
            Task::Sync(sync) => ended(done!(sync.advance(node, id))),
            Task::Map(map) => replied(done!(map.advance(node, id, terms.patience))),
            Task::Show(show) => ended(done!(show.advance(node, id))),
            Task::Open { inode, access, keeps_time, apply } => {
                // The session's latest changes of the inode's rights count, and an inode that it has just made is
                // there.
                done!(apply.advance(node));
                Progress::Done(check_open(node, id, *inode, *access, *keeps_time))
            }
            Task::End(end) => {
                done!(end.advance(node));
                Progress::Done(Ok(NodeAnswer::Done))
            }
            Task::Sweep(sweep) => {
                done!(sweep.advance(node));
                Progress::Done(Ok(NodeAnswer::Done))
            }
            Task::Commit(commit) => ended(done!(commit.advance(node))),
            Task::Reclaim(reclaim) => ended(done!(reclaim.advance(node))),
            Task::TakeLeases(take) => ended(done!(take.advance(node))),
        }
    }
}

/// Returns the mounts on which a session may open an inode.
fn check_open(
    node: &Node,
    id: SessionId,
    inode: InodeId,
    access: Option<Access>,
    keeps_time: bool,
) -> Result<NodeAnswer, Errno> {
    let session = node.live(id).ok_or(Errno::EIO)?;
    let found = node.store.inode(inode).map_err(|error| report_store_error(&error))?.ok_or(Errno::ESTALE)?;
    match access {
        Some(access) => open_rights::check_rights(node, session, (inode, &found), access, keeps_time)?,
        // An O_PATH descriptor neither reads nor writes, and opens nothing; but it allows more than a number does.
        None => open_rights::check_way(node, session, (inode, &found))?,
    }
    let devices: Vec<u64> = node.sessions.values().filter_map(open_rights::served_device).collect();
    if devices.is_empty() {
        return Err(Errno::EINVAL);
    }
    Ok(NodeAnswer::MayOpen { entry: open_rights::watched_entry(node, (inode, &found))?, devices })
}
