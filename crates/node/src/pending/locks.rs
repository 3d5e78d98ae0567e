//! Requests that set or query file locks.

use ashlar_lease::locks::WaiterId;
use ashlar_types::{Errno, InodeId, SessionId};
use ashlar_wire::{LOCK_SLOTS, Reply, Request};

use crate::leases::grant::{ENDING, report_store_error};
use crate::locks::lock_checks::{check_lock, check_query};
use crate::locks::locking::{CheckedLock, LockAttempt, LockHolders, Locking};
use crate::node_core::NodeCore;
use crate::pending::progress::{Progress, WaitFor, done, ok};
use crate::pending::steps::ApplyLogs;

/// A session sets, removes or queries a lock.
#[derive(Debug)]
pub struct LockTask {
    request: Request,
    /// The session has just resumed, and repeats a request that SharedFS has forgotten.
    reclaims: bool,
    stage: LockStage,
}

#[derive(Debug)]
enum LockStage {
    Begin,
    Apply(ApplyLogs),
    Check,
    Grace(CheckedLock),
    Ready(CheckedLock),
    Wait(CheckedLock, WaiterId),
}

impl LockTask {
    /// Serves [`Request::Lock`] or [`Request::QueryLock`].
    pub fn new(request: Request, reclaims: bool) -> Self {
        Self { request, reclaims, stage: LockStage::Begin }
    }

    /// Goes on.
    pub fn advance(&mut self, node: &mut NodeCore, id: SessionId) -> Progress<Result<Reply, Errno>> {
        loop {
            match &mut self.stage {
                LockStage::Begin => {
                    let inode = ok!(inode_of(&self.request));
                    let found = node.store.inode(inode).map_err(|error| report_store_error(&error));
                    // The session may just have made the inode: then its log is applied first.
                    let is_there = ok!(found).is_some();
                    self.stage = if is_there { LockStage::Check } else { LockStage::Apply(ApplyLogs::of(id)) };
                }
                LockStage::Apply(apply) => {
                    done!(apply.advance(node));
                    self.stage = LockStage::Check;
                }
                LockStage::Check => {
                    let checked = match &self.request {
                        Request::QueryLock { .. } => {
                            check_query(&node.sessions, node.handle_leases(), id, &self.request)
                        }
                        request => check_lock(&node.sessions, node.handle_leases(), id, request, self.reclaims),
                    };
                    let checked = ok!(checked);
                    node.locking.handle_reclaim(&checked, &node.sessions, node.now.since_boot);
                    self.stage =
                        if checked.awaits_grace { LockStage::Grace(checked) } else { LockStage::Ready(checked) };
                }
                LockStage::Grace(checked) => {
                    // Sessions that may have held locks before a restart ask for them again first. The asking session
                    // may have ended by then.
                    if let Some(until) = node.locking.grace_until(node.now.since_boot) {
                        if node.ending {
                            return Progress::Done(Err(ENDING));
                        }
                        return Progress::Wait(WaitFor::Locks, Some(until));
                    }
                    ok!(node.sessions.lockable(id));
                    self.stage = LockStage::Ready(*checked);
                }
                LockStage::Ready(checked) => {
                    let NodeCore { locking, sessions, processes, effects, now, .. } = &mut *node;
                    let (holders, now) = (LockHolders { sessions, processes: &**processes }, now.since_boot);
                    if let Request::QueryLock { .. } = self.request {
                        return Progress::Done(Ok(locking.query_lock(checked, holders, effects, now)));
                    }
                    match locking.try_lock(checked, holders, effects, now) {
                        LockAttempt::Answered(answer) => return Progress::Done(answer),
                        LockAttempt::Waits(waiter) => self.stage = LockStage::Wait(*checked, waiter),
                    }
                }
                LockStage::Wait(checked, waiter) => {
                    let NodeCore { locking, sessions, effects, .. } = &mut *node;
                    if let Some(answer) = locking.poll_lock(checked, *waiter, sessions, effects) {
                        return Progress::Done(answer);
                    }
                    if node.ending {
                        return Progress::Done(Err(ENDING));
                    }
                    return Progress::Wait(WaitFor::Locks, None);
                }
            }
        }
    }

    /// Gives up the request, whose peer has hung up; returns whether it has ended by that.
    ///
    /// A wait that has just got its lock keeps it.
    pub fn cancel(&mut self, locking: &mut Locking) -> bool {
        match &self.stage {
            LockStage::Wait(_, waiter) => locking.abandon_wait(*waiter),
            _ => true,
        }
    }
}

fn inode_of(request: &Request) -> Result<InodeId, Errno> {
    match request {
        Request::Lock { slot, .. } if slot.is_some_and(|slot| slot.number >= LOCK_SLOTS) => Err(Errno::EINVAL),
        Request::Lock { inode, .. } | Request::QueryLock { inode, .. } => Ok(*inode),
        _ => Err(Errno::EINVAL),
    }
}
