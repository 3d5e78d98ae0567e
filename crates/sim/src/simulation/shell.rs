//! SharedFS's shell: pending requests, digest rounds, commits, and the ends of sessions.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use ashlar_node::digest::commit::{begin_commit, can_commit, finish_commit, is_much_uncommitted};
use ashlar_node::pending::progress::{Progress, WaitFor};
use ashlar_node::pending::round::{DigestPace, DigestRound, NextRound, RoundStep};
use ashlar_node::pending::{NodeAnswer, NodeRequest, RequestTerms, RequestTicket};
use ashlar_node::{Node, NodeEffect};
use ashlar_store::CommitFault;
use ashlar_types::{Errno, SessionId};

use super::{CommitStage, EndStage, ShellState, SimEvent, Simulation, Waiter};
use crate::client::Asked;
use crate::faults::{FaultKind, SimBug};

/// How long a commit that failed waits until it is tried again.
const RETRY_US: u64 = 1_000_000;
/// One call in so many may be cut off by a kill.
const KILL_IN_CALL: u64 = 120;

impl Simulation {
    /// Does what the node asks of its shell.
    pub(super) fn perform_effects(&mut self) {
        while let Some(effect) = self.machine.node.as_mut().and_then(|node| node.poll_effect()) {
            match effect {
                NodeEffect::WakeGrants => self.wake(WaitFor::Grants),
                NodeEffect::WakeLocks => self.wake(WaitFor::Locks),
                NodeEffect::WakeDigests => self.wake(WaitFor::Digests),
                NodeEffect::Digest => {
                    let pause = self.pace.between(1, 60);
                    self.schedule_digest(pause);
                }
                NodeEffect::Commit => self.schedule_commit(),
                NodeEffect::Replicate => self.schedule(1, SimEvent::SendsFrames),
            }
        }
    }

    /// Calls the node, which may be killed between two of its writes to the memory of sessions.
    ///
    /// Returns `None` if SharedFS does not run, or has been killed.
    fn call_node<T>(&mut self, call: impl FnOnce(&mut Node) -> T) -> Option<T> {
        let is_killed = self.may_fail(FaultKind::KillInCall) && self.fault.one_in(KILL_IN_CALL);
        let has_loss = self.has_plant(SimBug::LostWrite);
        let node = self.machine.node.as_mut()?;
        if !is_killed {
            return Some(call(node));
        }
        let most = self.fault.between(1, 7);
        let writes = self.fault.below(1 << most);
        let gate = std::sync::Arc::clone(&self.machine.gate);
        gate.plan_end(writes);
        if has_loss {
            gate.plan_loss(1 + self.fault.below(8));
        }
        let result = catch_unwind(AssertUnwindSafe(|| call(node)));
        if gate.is_closed() {
            self.count_fault(FaultKind::KillInCall);
            self.trace("SharedFS", || format!("is killed after {writes} writes of a call"));
            self.kill_shared_fs();
            return None;
        }
        gate.open();
        Some(result.unwrap_or_else(|panic| resume_unwind(panic)))
    }

    fn wake(&mut self, event: WaitFor) {
        let is_woken = |(_, (_, waits)): &(&RequestTicket, &(Waiter, Option<WaitFor>))| *waits == Some(event);
        let woken: Vec<_> = self.shell.waiters.iter().filter(is_woken).map(|(ticket, _)| *ticket).collect();
        for ticket in woken {
            if self.has_plant(SimBug::ForgottenRequest) && self.pace.one_in(4) {
                continue;
            }
            let pause = self.pace.between(1, 40);
            self.schedule(pause, SimEvent::Advance(ticket));
        }
    }

    /// Begins a request of the shell's own or of a client; the node runs.
    pub(super) fn begin_request(&mut self, request: NodeRequest, terms: RequestTerms, waiter: Waiter) -> RequestTicket {
        let node = self.machine.node.as_mut().expect("SharedFS runs");
        let ticket = node.begin_request(request, terms);
        self.shell.waiters.insert(ticket, (waiter, None));
        let pause = self.pace.between(1, 30);
        self.schedule(pause, SimEvent::Advance(ticket));
        ticket
    }

    pub(super) fn advance_request(&mut self, ticket: RequestTicket) {
        let Some((waiter, _)) = self.shell.waiters.get(&ticket).copied() else { return };
        let Some(progress) = self.call_node(|node| node.advance(ticket)) else { return };
        match progress {
            Progress::Done(answer) => {
                self.shell.waiters.remove(&ticket);
                self.deliver(waiter, ticket, answer);
            }
            Progress::More => {
                let pause = self.pace.between(1, 20);
                self.schedule(pause, SimEvent::Advance(ticket));
            }
            Progress::Wait(event, until) => {
                self.shell.waiters.insert(ticket, (waiter, Some(event)));
                if let Some(until) = until {
                    let pause = (until.as_micros() as u64 + 1).saturating_sub(self.now_us);
                    if !self.has_plant(SimBug::ForgottenRequest) {
                        self.schedule(pause, SimEvent::Advance(ticket));
                    }
                }
            }
        }
    }

    fn deliver(&mut self, waiter: Waiter, ticket: RequestTicket, answer: Result<NodeAnswer, Errno>) {
        match waiter {
            Waiter::Client(slot) => {
                let pause = self.pace.between(1, 60);
                let Some(client) = &mut self.slots[slot].client else { return };
                // A process that has died leaves its slot to another one.
                if !matches!(&client.asked, Asked::Pending(_, own) if *own == ticket) {
                    return;
                }
                let Asked::Pending(request, _) = std::mem::replace(&mut client.asked, Asked::Nothing) else { return };
                let mut reply = answer.and_then(|answer| match answer {
                    NodeAnswer::Reply(gated) => Ok(gated.reply),
                    NodeAnswer::MayOpen { .. } | NodeAnswer::Done => Err(Errno::EPROTO),
                });
                let session = client.session;
                if let Ok(reply) = &mut reply
                    && self.has_plant(SimBug::DoubleQuotaGrant)
                {
                    self.plant_double_grant(session, reply);
                }
                let Some(client) = &mut self.slots[slot].client else { return };
                client.asked = Asked::Answered(request, Box::new(reply));
                self.schedule_client(slot, pause);
            }
            Waiter::Unwanted => {}
            Waiter::Administrator => self.take_limits(answer.map(drop)),
            Waiter::Ending(EndStage::Digest) => {
                self.begin_request(NodeRequest::Commit, RequestTerms::OWN, Waiter::Ending(EndStage::Commit));
            }
            Waiter::Ending(EndStage::Commit) => {
                self.remove_ended();
                self.begin_request(NodeRequest::SweepOrphans, RequestTerms::OWN, Waiter::Ending(EndStage::Sweep));
            }
            Waiter::Ending(EndStage::Sweep) => {
                if let Some(node) = &mut self.machine.node {
                    node.effects.push(NodeEffect::WakeDigests);
                    node.request_digest();
                }
            }
        }
    }

    /// SharedFS has learned that a session's process is gone, or has closed it.
    pub(super) fn end_session(&mut self, id: SessionId) {
        if self.machine.node.as_ref().is_none_or(|node| !node.sessions.contains_key(&id)) {
            return;
        }
        self.trace("SharedFS", || format!("ends session {id}"));
        let request = NodeRequest::EndSessions(vec![id]);
        self.begin_request(request, RequestTerms::OWN, Waiter::Ending(EndStage::Digest));
    }

    /// The process behind a request is gone: SharedFS gives the request up.
    pub(super) fn hang_up(&mut self, ticket: RequestTicket) {
        let Some(node) = self.machine.node.as_mut() else { return };
        if self.shell.waiters.contains_key(&ticket) && node.cancel_request(ticket) {
            self.shell.waiters.remove(&ticket);
        } else {
            // A lock that has just come must be taken.
            self.advance_request(ticket);
        }
    }

    pub(super) fn remove_ended(&mut self) {
        for id in self.machine.remove_ended() {
            self.committed.remove(&id);
            self.trace("SharedFS", || format!("removes session {id}"));
        }
    }

    // ---- the digest

    fn schedule_digest(&mut self, pause_us: u64) {
        let at = self.now_us + pause_us;
        if self.shell.digest_at.is_none_or(|before| at < before) {
            self.shell.digest_at = Some(at);
            self.schedule(pause_us, SimEvent::Digest);
        }
    }

    pub(super) fn advance_digest(&mut self) {
        if self.shell.digest_at.is_none_or(|at| at > self.now_us) {
            return;
        }
        self.shell.digest_at = None;
        let (pace, round) = (self.shell.pace, self.shell.round.take());
        let advanced = self.call_node(|node| {
            let pace = pace.unwrap_or_else(|| DigestPace::new(node.now.since_boot));
            let mut round = round.unwrap_or_else(|| DigestRound::new(node, pace));
            let progress = round.advance(node);
            (round, progress)
        });
        let Some((round, progress)) = advanced else { return };
        self.shell.round = Some(round);
        let pause = match progress {
            Progress::Done(RoundStep::RemoveEnded) => {
                self.remove_ended();
                Some(self.pace.between(1, 20))
            }
            Progress::Done(RoundStep::Over(reached, next)) => {
                (self.shell.round, self.shell.pace) = (None, Some(reached));
                match next {
                    NextRound::Now => Some(1),
                    NextRound::After(pause) => Some(pause.as_micros() as u64),
                    NextRound::WhenAsked => None,
                }
            }
            Progress::More | Progress::Wait(..) => Some(self.pace.between(1, 20)),
        };
        if let Some(error) = self.machine.node.as_ref().and_then(|node| node.failure.as_ref()) {
            let detail = error.to_string();
            self.break_check("store", detail);
        }
        if let Some(pause) = pause {
            self.schedule_digest(pause);
        }
    }

    // ---- commits

    fn schedule_commit(&mut self) {
        if matches!(self.shell.commit, CommitStage::Idle) {
            self.shell.commit = CommitStage::Scheduled;
            let pause = self.pace.between(1, 200);
            self.schedule(pause, SimEvent::CommitBegins);
        }
    }

    pub(super) fn begin_commit(&mut self) {
        let Some(node) = self.machine.node.as_mut() else { return };
        self.shell.commit = CommitStage::Idle;
        if !node.commits.is_wanted {
            return;
        }
        node.commits.is_wanted = false;
        let Some(job) = begin_commit(node) else {
            node.effects.push(NodeEffect::WakeDigests);
            return;
        };
        self.shell.commit = CommitStage::Begun(job);
        let is_slow = self.may_fail(FaultKind::SlowCommit) && self.fault.one_in(6);
        let pause = if is_slow { self.fault.between(20_000, 900_000) } else { self.pace.between(20, 3_000) };
        if is_slow {
            self.count_fault(FaultKind::SlowCommit);
        }
        self.trace("SharedFS", || format!("begins a commit, which is written in {pause} us"));
        self.schedule(pause, SimEvent::CommitRuns);
    }

    pub(super) fn run_commit(&mut self) {
        if !matches!(self.shell.commit, CommitStage::Begun(_) | CommitStage::Awaiting(_)) {
            return;
        }
        let (CommitStage::Begun(mut job) | CommitStage::Awaiting(mut job)) = std::mem::take(&mut self.shell.commit)
        else {
            return;
        };
        job.flush();
        let journal = self.machine.node.as_ref().and_then(|node| node.journal.as_ref());
        let is_awaited = job.awaited().zip(journal).is_some_and(|(upto, journal)| !journal.is_acknowledged(upto));
        if is_awaited && !self.has_plant(SimBug::UngatedCommit) {
            let journal = self.describe_journal();
            self.trace("SharedFS", || format!("waits for the replica{journal}"));
            self.shell.commit = CommitStage::Awaiting(job);
            return;
        }
        self.check_gate(job.awaited());
        let database = self.machine.arena.database();
        if self.may_fail(FaultKind::CommitCrash) && self.fault.one_in(30) {
            self.count_fault(FaultKind::CommitCrash);
            let fault = match self.fault.below(3) {
                0 => CommitFault::Cut,
                torn => CommitFault::Torn { is_new: torn == 1 },
            };
            let database = self.machine.arena.database();
            database.plan_fault(database.commits(), fault);
            drop(job.run());
            self.trace("SharedFS", || format!("ends in the middle of a commit: {fault:?}"));
            if self.may_fail(FaultKind::PowerLoss) && self.fault.one_in(2) {
                self.lose_power();
            } else {
                self.kill_shared_fs();
            }
            return;
        }
        if self.may_fail(FaultKind::FailedCommit) && self.fault.one_in(25) {
            database.plan_fault(database.commits(), CommitFault::Full);
            self.count_fault(FaultKind::FailedCommit);
        }
        if self.has_plant(SimBug::LostCommit) && self.machine.stale_arena.is_none() {
            self.machine.stale_arena = Some(std::sync::Arc::new(self.machine.arena.after_process_death()));
        }
        self.shell.commit = CommitStage::Ran(job.run());
        let pause = self.pace.between(1, 300);
        self.schedule(pause, SimEvent::CommitEnds);
    }

    pub(super) fn end_commit(&mut self) {
        let CommitStage::Ran(done) = std::mem::take(&mut self.shell.commit) else { return };
        let Some(finished) = self.call_node(|node| finish_commit(node, done)) else { return };
        let Some(node) = self.machine.node.as_mut() else { return };
        let mut pause = 1;
        match &finished {
            Err(_) => {
                node.counters.commits_failed += 1;
                node.commits.is_wanted = true;
                pause = RETRY_US;
            }
            Ok(()) => {
                self.counts.commits += 1;
                node.commits.is_wanted |=
                    can_commit(&node.store, &node.commits) && is_much_uncommitted(&node.store, node.sessions.values());
                if self.options.plant == Some(SimBug::EarlyCommitted) {
                    for session in node.sessions.values() {
                        session.set_committed(node.store.applied(session.id));
                    }
                }
            }
        }
        node.effects.push(NodeEffect::WakeDigests);
        let is_wanted = node.commits.is_wanted;
        let journal = self.describe_journal();
        self.trace("SharedFS", || {
            if finished.is_ok() { format!("has committed{journal}") } else { "could not commit".to_owned() }
        });
        if is_wanted {
            self.shell.commit = CommitStage::Scheduled;
            self.schedule(pause, SimEvent::CommitBegins);
        }
    }

    /// Forgets all that a SharedFS knew that is gone.
    pub(super) fn reset_shell(&mut self) {
        self.life += 1;
        self.shell = ShellState::default();
        self.cut_link();
        self.administrator.reset();
    }
}
