//! The table of requests that wait.

use std::collections::BTreeMap;

use ashlar_types::{Access, Errno, InodeId, QuotaId, QuotaKey, SessionId};
use ashlar_wire::{Reply, Request};

use crate::access::open_rights;
use crate::blame::Blame;
use crate::invariants::check_session;
use crate::leases::grant::report_store_error;
use crate::leases::wants;
use crate::node_core::NodeCore;
use crate::pending::digests::{DigestTask, LimitTask, MapTask, RangeTask, ShowTask, SyncTask, WantedMapping};
use crate::pending::ends::EndSessions;
use crate::pending::grants::{AcquireTask, LookupTarget, LookupTask, ReserveTask, TakeFromAll};
use crate::pending::locks::LockTask;
use crate::pending::progress::{Progress, done};
use crate::pending::request::{GatedReply, NodeAnswer, NodeRequest, RequestTerms, RequestTicket};
use crate::pending::space::{CreditTask, LimitsTask, QuotaTask};
use crate::pending::steps::{ApplyLogs, CommitAll, DigestWait, ReclaimStep, SweepOrphans};
use crate::records::logs::find_settled;
use crate::sessions::mapping;
use crate::space::{credit, quota};

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

    /// Begins a request. The shell advances it next.
    pub fn begin(&mut self, state: &mut NodeCore, request: NodeRequest, terms: RequestTerms) -> RequestTicket {
        let (session, task) = match request {
            NodeRequest::Session(id, request) => (Some(id), begin_session_request(state, id, request, terms)),
            NodeRequest::Open { session, inode, access, keeps_time } => {
                (Some(session), Ok(Task::Open { inode, access, keeps_time, apply: ApplyLogs::of(session) }))
            }
            NodeRequest::Space(subtree) => (None, Ok(Task::Space(subtree, ApplyLogs::default()))),
            NodeRequest::Quotas => (None, Ok(Task::Quotas(ApplyLogs::of_all(&state.sessions)))),
            NodeRequest::SetQuota(key, limits) => {
                let is_odd = matches!(key, QuotaKey::Subtree(id) if id == QuotaId::NONE || !id.is_storable());
                let task = if is_odd {
                    Err(Errno::EINVAL)
                } else {
                    Ok(Task::Limits(LimitsTask::new(&state.sessions, key, limits)))
                };
                (None, task)
            }
            NodeRequest::EndSessions(ids) => (None, Ok(Task::End(EndSessions::new(state, ids)))),
            NodeRequest::SweepOrphans => (None, Ok(Task::Sweep(SweepOrphans::default()))),
            NodeRequest::Commit => (None, Ok(Task::Commit(CommitAll::default()))),
            NodeRequest::Sync => (None, Ok(Task::Sync(SyncTask::All(ApplyLogs::of_all(&state.sessions))))),
            NodeRequest::Reclaim => (None, Ok(Task::Reclaim(ReclaimStep::default()))),
            NodeRequest::TakeLeases(inodes) => (None, Ok(Task::TakeLeases(TakeFromAll::new(inodes)))),
        };
        let task = task.unwrap_or_else(|errno| Task::Answered(Box::new(Some(Err(errno)))));
        self.insert(PendingRow { session, terms, task })
    }

    /// Goes on with a request. A request that has ended is no longer pending.
    ///
    /// # Panics
    /// If no such request is pending.
    pub fn advance(&mut self, state: &mut NodeCore, ticket: RequestTicket) -> Progress<Result<NodeAnswer, Errno>> {
        let mut row = self.rows.remove(&ticket).expect("a pending request");
        let _blame = row.session.and_then(|id| state.sessions.get(&id)).map(Blame::for_request);
        let progress = row.advance(state);
        if let Some(id) = row.session {
            check_session(state, id);
        }
        if !matches!(progress, Progress::Done(_)) {
            self.rows.insert(ticket, row);
        }
        progress
    }

    /// Gives up a request; returns whether it has ended by that.
    ///
    /// A request for a lock that has just got it keeps it, and must be advanced once more.
    pub fn cancel(&mut self, state: &mut NodeCore, ticket: RequestTicket) -> bool {
        let Some(mut row) = self.rows.remove(&ticket) else { return true };
        let is_ended = match &mut row.task {
            Task::Acquire(acquire) => {
                acquire.cancel(state);
                true
            }
            Task::Lookup(lookup) => {
                lookup.cancel(state);
                true
            }
            Task::Reserve(reserve) => {
                reserve.cancel(state);
                true
            }
            Task::Lock(lock) => lock.cancel(&mut state.locking),
            _ => true,
        };
        if !is_ended {
            self.rows.insert(ticket, row);
        }
        is_ended
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
    Limit(LimitTask),
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

impl PendingRow {
    fn advance(&mut self, node: &mut NodeCore) -> Progress<Result<NodeAnswer, Errno>> {
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
                replied(quota::list_quotas(&node.store, &node.sessions).map(Reply::Quotas))
            }
            Task::Space(subtree, apply) => {
                done!(apply.advance(node));
                if self.session.is_some() && node.live(id).is_none() {
                    return Progress::Done(Err(Errno::EIO));
                }
                replied(Ok(Reply::Space(credit::space(&node.store, &node.sessions, self.session, *subtree))))
            }
            Task::Digest(digest) => replied(done!(digest.advance(node, id))),
            Task::MakeRoom(wait) => replied(done!(wait.advance(node)).map(Reply::Committed)),
            Task::Limit(limit) => replied(done!(limit.advance(node, id))),
            Task::Sync(sync) => ended(done!(sync.advance(node, id))),
            Task::Map(map) => replied(done!(map.advance(node, id, terms.patience))),
            Task::Show(show) => ended(done!(show.advance(node, id))),
            Task::Open { inode, access, keeps_time, apply } => {
                // The session's latest changes of the inode's rights count. An inode that it has just made is there.
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

/// Begins a session's message, or answers it if it never waits.
fn begin_session_request(
    state: &mut NodeCore,
    id: SessionId,
    request: Request,
    terms: RequestTerms,
) -> Result<Task, Errno> {
    let answered = |reply: Reply| Task::Answered(Box::new(Some(Ok(reply.into()))));
    Ok(match request {
        Request::Acquire(wants) => Task::Acquire(AcquireTask::new(wants)),
        Request::Lookup { directory, name, within, makes, write, need } => {
            let target = LookupTarget { directory, name, within, makes, write, need };
            Task::Lookup(Box::new(LookupTask::new(target)))
        }
        Request::ReadDirectory { directory, after, limit } => {
            answered(wants::read_directory(state.tree(), id, directory, after, limit)?)
        }
        Request::Kept(question) => {
            let kept = state.sessions.get_mut(&id).and_then(|session| session.kept.take());
            answered(kept.filter(|(of, _)| *of == question).ok_or(Errno::EPROTO)?.1)
        }
        Request::InodeRange => Task::Range(RangeTask::Begin),
        Request::Credit { want, replaces } => Task::Credit(CreditTask::new(want, replaces)),
        Request::Quota(wants) => Task::Quota(QuotaTask::new(id, wants)?),
        // The session's own latest writes and deletions count.
        Request::Space { subtree } => Task::Space(subtree, ApplyLogs::of(id)),
        Request::Digest => Task::Digest(DigestTask::Begin),
        Request::MakeRoom { upto } => {
            let settled = find_settled(state, id).ok_or(Errno::EIO)?;
            Task::MakeRoom(DigestWait::for_digest(id, upto.min(settled)))
        }
        Request::LogLimit { upto, reads } => Task::Limit(LimitTask::new(upto, reads)),
        Request::SyncDependencies(positions) => Task::Sync(SyncTask::Positions(positions)),
        Request::SyncInode { inode, dependencies } => Task::Sync(SyncTask::of_inode(state, id, inode, dependencies)),
        Request::SyncAll => Task::Sync(SyncTask::All(ApplyLogs::of_all(&state.sessions))),
        Request::Lock { .. } | Request::QueryLock { .. } => Task::Lock(LockTask::new(request, terms.reclaims)),
        Request::CancelLock { ticket } => {
            let now = state.now.since_boot;
            answered(state.locking.cancel_wait(id, ticket, &mut state.effects, now))
        }
        Request::ReleaseLocks { inode, owner, kind } => {
            let NodeCore { locking, sessions, effects, .. } = state;
            answered(locking.release_locks(id, (inode, owner, kind), sessions, effects))
        }
        Request::YieldLocks { inode, moves } => {
            let NodeCore { locking, sessions, effects, .. } = state;
            answered(locking.yield_locks(id, (inode, moves), sessions, effects))
        }
        Request::Map { inode, first, blocks, follows, number } => {
            Task::Map(MapTask::new(id, WantedMapping { inode, first, blocks, number, follows }))
        }
        Request::Unmap { number } => {
            mapping::unmap_blocks(&mut state.store, state.sessions.get_mut(&id), id, number);
            answered(Reply::Done)
        }
        Request::Show { inode } => Task::Show(ShowTask::new(id, inode)),
        Request::Reserve { inode, reason } => Task::Reserve(ReserveTask::new(id, inode, reason)),
        Request::Free { inode, reason } => {
            state.reservations.end_reservation((inode, id, reason), &mut state.leasing, &state.store)?;
            answered(Reply::Done)
        }
        _ => return Err(Errno::EPROTO),
    })
}

/// Returns the mounts on which a session may open an inode.
fn check_open(
    node: &NodeCore,
    id: SessionId,
    inode: InodeId,
    access: Option<Access>,
    keeps_time: bool,
) -> Result<NodeAnswer, Errno> {
    let session = node.live(id).ok_or(Errno::EIO)?;
    let found = node.store.inode(inode).map_err(|error| report_store_error(&error))?.ok_or(Errno::ESTALE)?;
    match access {
        Some(access) => open_rights::check_rights(node.tree(), session, (inode, &found), access, keeps_time)?,
        // An O_PATH descriptor neither reads nor writes, and opens nothing; but it allows more than a number does.
        None => open_rights::check_way(node.tree(), session, (inode, &found))?,
    }
    let devices: Vec<u64> = node.sessions.values().filter_map(open_rights::served_device).collect();
    if devices.is_empty() {
        return Err(Errno::EINVAL);
    }
    Ok(NodeAnswer::MayOpen {
        entry: open_rights::watched_entry(&node.store, &node.reservations, (inode, &found))?,
        devices,
    })
}
