//! One round of the digest: all logs that are due, what they set free, and a commit if one is due.

use std::time::Duration;

use ashlar_types::{LogPosition, SessionId};

use crate::digest::commit::{is_commit_due, is_commit_due_after, is_due};
use crate::digest::freed_blocks::release_blocks;
use crate::effects::NodeEffect;
use crate::node_core::NodeCore;
use crate::pending::progress::{Progress, done};
use crate::pending::steps::{SweepOrphans, decide_next};
use crate::records::apply::{Slice, apply_log};
use crate::records::logs::find_settled;

/// Batches of one log that are applied before the next session's turn.
const BATCHES_IN_TURN: usize = 8;
/// How often logs are checked while sessions write, and while they don't.
const CHECK_INTERVAL_BUSY: Duration = Duration::from_millis(5);
const CHECK_INTERVAL_IDLE: Duration = Duration::from_millis(250);
/// How often orphans are checked.
const SWEEP: Duration = Duration::from_secs(1);

/// The pace of the digest, as its earlier rounds left it.
#[derive(Clone, Copy, Debug)]
pub struct DigestPace {
    /// When orphans were last checked, since boot.
    swept: Duration,
    /// When a log was last seen to grow.
    moved: Duration,
}

impl DigestPace {
    /// Begins at this time since boot.
    pub fn new(now: Duration) -> Self {
        Self { swept: now, moved: now }
    }
}

/// When the next round begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NextRound {
    /// At once.
    Now,
    /// When [`NodeEffect::Digest`] is polled, or after this time.
    After(Duration),
    /// When [`NodeEffect::Digest`] is polled: there is nothing to check.
    WhenAsked,
}

/// A round of the digest.
#[derive(Debug)]
pub struct DigestRound {
    pace: DigestPace,
    /// The sessions that follow, the next one last.
    left: Vec<SessionId>,
    current: Option<Turn>,
    has_more: bool,
    stage: RoundStage,
}

/// A session's turn.
#[derive(Debug)]
struct Turn {
    id: SessionId,
    settled: LogPosition,
    batches: usize,
    /// The last batch reached the end.
    is_last: bool,
    decides: bool,
}

#[derive(Debug)]
enum RoundStage {
    Logs,
    Decide,
    /// The shell removes the ended sessions in between.
    Ends,
    Sweep(SweepOrphans),
}

impl DigestRound {
    /// Begins a round.
    pub fn new(node: &mut NodeCore, pace: DigestPace) -> Self {
        // A digest that is wanted from here on happens in the next round at the latest.
        node.digest_wanted = false;
        let mut left = node.live_ids();
        left.reverse();
        Self { pace, left, current: None, has_more: false, stage: RoundStage::Logs }
    }

    /// Goes on. The shell calls it again after it has removed the ended sessions ([`RoundStep::RemoveEnded`]).
    pub fn advance(&mut self, node: &mut NodeCore) -> Progress<RoundStep> {
        let is_sweep_due = node.now.since_boot >= self.pace.swept + SWEEP;
        loop {
            match &mut self.stage {
                RoundStage::Logs => {
                    done!(self.apply_next(node));
                    if self.left.is_empty() && self.current.is_none() {
                        release_blocks(&mut node.store, &node.sessions);
                        if is_sweep_due {
                            node.leasing.manager.handle_time(node.now.since_boot_us());
                        }
                        self.stage = RoundStage::Decide;
                    }
                }
                RoundStage::Decide => {
                    done!(decide_next(node));
                    self.stage = RoundStage::Ends;
                    return Progress::Done(RoundStep::RemoveEnded);
                }
                RoundStage::Ends if is_sweep_due => self.stage = RoundStage::Sweep(SweepOrphans::default()),
                RoundStage::Ends => return Progress::Done(self.end(node)),
                RoundStage::Sweep(sweep) => {
                    done!(sweep.advance(node));
                    // Segments that lagged behind while the arena was checked.
                    node.store.show_lagging();
                    node.publish_sharing();
                    self.pace.swept = node.now.since_boot;
                    return Progress::Done(self.end(node));
                }
            }
        }
    }

    /// Applies a batch of the next due log.
    fn apply_next(&mut self, node: &mut NodeCore) -> Progress<()> {
        let Some(turn) = &mut self.current else {
            let Some(id) = self.left.pop() else { return Progress::Done(()) };
            let mut is_busy = false;
            let (applied, now) = (node.store.applied(id), node.now.since_boot);
            let session = node.sessions.get_mut(&id);
            let due = session.is_some_and(|session| is_due(session, applied, now, &mut is_busy));
            if is_busy {
                node.leasing.manager.handle_activity(id, node.now.since_boot_us());
                self.pace.moved = now;
            }
            if due {
                let settled = find_settled(node, id);
                self.current = settled.map(|settled| Turn { id, settled, batches: 0, is_last: false, decides: false });
                if node.live(id).is_none() {
                    // A request that waits for the session need not wait any longer.
                    node.effects.push(NodeEffect::WakeDigests);
                }
            }
            return Progress::Done(());
        };
        if !turn.decides {
            turn.is_last = apply_log(node, turn.id, turn.settled, Slice::Batch);
            turn.batches += 1;
            turn.decides = true;
        }
        done!(decide_next(node));
        turn.decides = false;
        if is_commit_due_after(node, turn.id) {
            node.request_commit();
        }
        let is_over = turn.is_last || turn.batches == BATCHES_IN_TURN;
        if is_over {
            self.has_more |= !turn.is_last;
            if node.live(turn.id).is_none() {
                node.effects.push(NodeEffect::WakeDigests);
            }
            self.current = None;
        }
        if is_over { Progress::Done(()) } else { Progress::More }
    }

    fn end(&self, node: &mut NodeCore) -> RoundStep {
        if is_commit_due(node) {
            node.request_commit();
        }
        let is_quiet = node.now.since_boot >= self.pace.moved + 2 * CHECK_INTERVAL_IDLE;
        let next = if node.ending || node.digest_wanted || self.has_more {
            NextRound::Now
        } else if node.sessions.is_empty() && !node.store.is_dirty() && node.orphans.is_empty() {
            NextRound::WhenAsked
        } else {
            NextRound::After(if is_quiet { CHECK_INTERVAL_IDLE } else { CHECK_INTERVAL_BUSY })
        };
        RoundStep::Over(self.pace, next)
    }
}

/// The shell's act after a part of a round.
#[derive(Clone, Copy, Debug)]
pub enum RoundStep {
    /// Remove the ended sessions, and advance the round again.
    RemoveEnded,
    /// The round is over; the next one begins with this pace.
    Over(DigestPace, NextRound),
}
