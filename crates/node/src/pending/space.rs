//! Requests for credit and quotas.

use ashlar_types::{Errno, QuotaKey, QuotaLimits, SessionId};
use ashlar_wire::{Credit, CreditKind, QuotaRequest, Reply};

use crate::node_core::NodeCore;
use crate::pending::progress::{Progress, done, ok};
use crate::pending::steps::{ApplyLogs, CommitAll, ReclaimStep, SweepOrphans, decide_next};
use crate::sessions::session::ServedSession;
use crate::sessions::session_table::SessionTable;
use crate::space::credit::{ATTEMPTS, holdable, take_blocks_if_of_use, try_grant};
use crate::space::credit_recall::write_off_credit;
use crate::space::quota::{check_quota_wants, grant_quota};
use crate::space::quota_recall::{set_limits, take_back_balances};

/// A session asks for credit.
///
/// If there is too little space, the node takes back the unused credit of other sessions. It also digests everything,
/// so that each record counts with the space that it really took. In the end it takes back what sessions do not show.
/// Only then it refuses.
#[derive(Debug)]
pub struct CreditTask {
    want: Credit,
    kinds: &'static [CreditKind],
    attempt: u32,
    stage: CreditStage,
}

#[derive(Debug)]
enum CreditStage {
    Try,
    /// The logs of the user's own sessions are applied, to take back what they hold unused.
    ApplyOwn(ApplyLogs),
    DecideOwn,
    /// Grants no more than what is wanted.
    TryExact,
    Reclaim(ReclaimStep),
    DecideAll,
    TakeBlocks,
}

impl CreditTask {
    /// Asks for credit; the session replaces content with it, or not.
    pub fn new(want: Credit, replaces: bool) -> Self {
        let kinds: &[_] = if replaces { &[CreditKind::Common, CreditKind::Kept] } else { &[CreditKind::Common] };
        Self { want, kinds, attempt: 0, stage: CreditStage::Try }
    }

    /// Goes on.
    pub fn advance(&mut self, node: &mut NodeCore, id: SessionId) -> Progress<Result<Credit, Errno>> {
        loop {
            match &mut self.stage {
                CreditStage::Try => {
                    let most = holdable(&node.store, &node.sessions, id);
                    if self.want.blocks > most.blocks || self.want.metadata_bytes > most.metadata_bytes {
                        let uid = ok!(node.live(id).ok_or(Errno::EIO)).identity.uid;
                        let of_user =
                            node.live_ids().into_iter().filter(|own| is_of_user(&node.sessions, *own, uid)).collect();
                        self.stage = CreditStage::ApplyOwn(ApplyLogs::of_each(of_user));
                    } else if let Some(granted) =
                        ok!(try_grant(&node.store, &mut node.sessions, id, self.want, self.kinds, most))
                    {
                        return Progress::Done(Ok(granted));
                    } else {
                        self.stage = CreditStage::Reclaim(ReclaimStep::default());
                    }
                }
                CreditStage::ApplyOwn(apply) => {
                    done!(apply.advance(node));
                    let uid = ok!(node.live(id).ok_or(Errno::EIO)).identity.uid;
                    write_off_credit(node, |session: &ServedSession| session.identity.uid == uid);
                    self.stage = CreditStage::DecideOwn;
                }
                CreditStage::DecideOwn => {
                    done!(decide_next(node));
                    self.stage = CreditStage::TryExact;
                }
                CreditStage::TryExact => {
                    if let Some(granted) =
                        ok!(try_grant(&node.store, &mut node.sessions, id, self.want, self.kinds, Credit::default()))
                    {
                        return Progress::Done(Ok(granted));
                    }
                    self.stage = CreditStage::Reclaim(ReclaimStep::default());
                }
                CreditStage::Reclaim(reclaim) => {
                    if self.attempt == ATTEMPTS {
                        node.counters.credit_refused += 1;
                        return Progress::Done(Err(Errno::ENOSPC));
                    }
                    ok!(done!(reclaim.advance(node)));
                    if self.attempt > 0 {
                        // From here on no other session gets anything: the answer is exact.
                        write_off_credit(node, |_| true);
                        self.stage = CreditStage::DecideAll;
                    } else {
                        self.stage = CreditStage::TakeBlocks;
                    }
                }
                CreditStage::DecideAll => {
                    done!(decide_next(node));
                    self.stage = CreditStage::TakeBlocks;
                }
                CreditStage::TakeBlocks => {
                    take_blocks_if_of_use(&mut node.store, &node.sessions, self.want.blocks, self.kinds);
                    self.attempt += 1;
                    self.stage = CreditStage::Try;
                }
            }
        }
    }
}

fn is_of_user(sessions: &SessionTable, id: SessionId, uid: u32) -> bool {
    sessions.live(id).is_some_and(|session| session.identity.uid == uid)
}

/// A session asks to use what quotas limit.
///
/// If there is too little, the node takes back the balances of all sessions and applies all logs, so that only real use
/// counts. Only then it refuses.
#[derive(Debug)]
pub struct QuotaTask {
    wants: Vec<QuotaRequest>,
    stage: QuotaStage,
}

#[derive(Debug)]
enum QuotaStage {
    ApplyOwn(ApplyLogs),
    ApplyAll(ApplyLogs),
    Sweep(SweepOrphans),
    Decide,
}

impl QuotaTask {
    /// Asks for balances.
    ///
    /// # Errors
    /// `EINVAL` for wants that LibFS does not have.
    pub fn new(id: SessionId, wants: Vec<QuotaRequest>) -> Result<Self, Errno> {
        check_quota_wants(&wants)?;
        Ok(Self { wants, stage: QuotaStage::ApplyOwn(ApplyLogs::of(id)) })
    }

    /// Goes on.
    pub fn advance(&mut self, node: &mut NodeCore, id: SessionId) -> Progress<Result<Reply, Errno>> {
        loop {
            match &mut self.stage {
                QuotaStage::ApplyOwn(apply) => {
                    done!(apply.advance(node));
                    if let Some((version, grants)) = grant_quota(&node.store, &mut node.sessions, id, &self.wants) {
                        return Progress::Done(Ok(Reply::Quota { version, grants }));
                    }
                    self.stage = QuotaStage::ApplyAll(ApplyLogs::of_all(&node.sessions));
                }
                QuotaStage::ApplyAll(apply) => {
                    done!(apply.advance(node));
                    self.stage = QuotaStage::Sweep(SweepOrphans::default());
                }
                QuotaStage::Sweep(sweep) => {
                    done!(sweep.advance(node));
                    take_back_balances(node, &self.wants);
                    self.stage = QuotaStage::Decide;
                }
                QuotaStage::Decide => {
                    done!(decide_next(node));
                    // No other request was served in between: this answer is exact.
                    ok!(node.live(id).ok_or(Errno::EIO));
                    return Progress::Done(match grant_quota(&node.store, &mut node.sessions, id, &self.wants) {
                        Some((version, grants)) => Ok(Reply::Quota { version, grants }),
                        None => {
                            node.counters.quota_refused += 1;
                            Err(Errno::EDQUOT)
                        }
                    });
                }
            }
        }
    }
}

/// An administrator sets or removes limits.
#[derive(Debug)]
pub struct LimitsTask {
    key: QuotaKey,
    limits: QuotaLimits,
    stage: LimitsStage,
}

#[derive(Debug)]
enum LimitsStage {
    Apply(ApplyLogs),
    Decide,
    Commit(CommitAll),
}

impl LimitsTask {
    /// Sets limits, which are durable at the end.
    pub fn new(sessions: &SessionTable, key: QuotaKey, limits: QuotaLimits) -> Self {
        Self { key, limits, stage: LimitsStage::Apply(ApplyLogs::of_all(sessions)) }
    }

    /// Goes on. The result is `EIO` if they can't be committed.
    pub fn advance(&mut self, node: &mut NodeCore) -> Progress<Result<(), Errno>> {
        loop {
            match &mut self.stage {
                LimitsStage::Apply(apply) => {
                    done!(apply.advance(node));
                    set_limits(node, self.key, self.limits);
                    self.stage = LimitsStage::Decide;
                }
                LimitsStage::Decide => {
                    done!(decide_next(node));
                    self.stage = LimitsStage::Commit(CommitAll::default());
                }
                LimitsStage::Commit(commit) => return commit.advance(node),
            }
        }
    }
}
