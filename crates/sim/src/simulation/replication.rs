//! The replica and the link to it: frames and acknowledgements come late, and connections are cut.

use std::collections::VecDeque;

use ashlar_node::NodeCore;
use ashlar_node::journal::{CopyPart, CopyPlan, CopySender, CopyState, NodeJournal, ReplayError};
use ashlar_pmem::CrashMedium;
use ashlar_store::{CommitFault, CommitJob, StoreError, compare_dumps};
use ashlar_types::JournalPosition;

use super::{CommitStage, SimEvent, Simulation};
use crate::faults::{FaultKind, SimBug};
use crate::journal_plants::{MemoryRing, UNSEEN_DAMAGE, open_copy, revive_frames, validate_end};
use crate::random::SimRandom;
use crate::replica_machine::{ReplicaMachine, ReplicaOptions};

/// Bytes of frames in a message, but for a long first frame.
const PART_BYTES: usize = 3000;
/// Messages that are under way at most: the writing node then waits.
const PARTS_MAX: usize = 6;
/// One message in so many is damaged on its way.
const GARBLED: u64 = 60;

/// The replica, and the connection to it.
pub(super) struct Replication {
    machine: ReplicaMachine,
    /// Counts connections: messages of an earlier one are lost.
    connection: u64,
    /// Sends the journal, while there is a connection.
    sender: Option<CopySender>,
    /// Messages to the replica that are under way, and those that it has not stored. A flag tells the damaged ones.
    sent: VecDeque<(CopyPart, bool)>,
    arrived: VecDeque<(CopyPart, bool)>,
    /// When the last message of each direction arrives: none overtakes another.
    last_arrival: (u64, u64),
    /// Counts the lives of the replica.
    life: u64,
    /// Whether its next step is scheduled.
    is_scheduled: bool,
    commit: Option<CommitJob>,
    plant: Option<SimBug>,
    /// The copy as it was before it was cut last, if cut frames are to come back.
    uncut: Option<MemoryRing>,
    /// The copy that a loss of power at the replica leaves at least, and the journal that one at the writer leaves.
    durable_here: JournalPosition,
    durable_there: JournalPosition,
    /// The position at which the trees were compared last.
    compared: Option<JournalPosition>,
    draws: SimRandom,
}

impl std::fmt::Debug for Replication {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Replication").field("connection", &self.connection).finish_non_exhaustive()
    }
}

impl Replication {
    /// Makes a replica that does not run.
    pub(super) fn new(seed: u64, blocks: u32, ring_bytes: u64, plant: Option<SimBug>) -> Result<Self, ReplayError> {
        let mut draws = SimRandom::new(seed, 6);
        let options = ReplicaOptions {
            medium: if draws.one_in(2) { CrashMedium::Words } else { CrashMedium::Pages },
            blocks,
            ring_bytes,
            fault: plant.and_then(SimBug::replica_fault),
        };
        Ok(Self {
            machine: ReplicaMachine::new(options)?,
            connection: 0,
            sender: None,
            sent: VecDeque::new(),
            arrived: VecDeque::new(),
            last_arrival: (0, 0),
            life: 0,
            is_scheduled: false,
            commit: None,
            plant,
            uncut: None,
            durable_here: JournalPosition(0),
            durable_there: JournalPosition(0),
            compared: None,
            draws,
        })
    }

    /// The connection is lost, with all messages.
    fn cut(&mut self) {
        self.connection += 1;
        self.sender = None;
        self.sent.clear();
        self.arrived.clear();
    }

    /// Agrees with the writing node where the copy goes on.
    fn connect(&mut self, journal: &mut NodeJournal) -> Result<(), ReplayError> {
        self.cut();
        let Some(replica) = &mut self.machine.replica else { return Ok(()) };
        let mut state = replica.copy_state();
        if self.plant == Some(SimBug::UncomparedEpoch) {
            let lineage = journal.ring().lineage().clone();
            state = CopyState { lineage, end: state.end };
        }
        let (plan, sender) = CopySender::begin(journal, &state)?;
        let CopyPlan { from, .. } = plan;
        if self.plant == Some(SimBug::RevivedFrames) && from < state.end {
            self.uncut = Some(open_copy(&self.machine.ring)?);
        }
        replica.follow(plan)?;
        self.durable_here = self.durable_here.min(from).max(replica.durable());
        self.sender = Some(sender);
        Ok(())
    }

    /// Sends all of the journal without delay, as a start of SharedFS waits for it. Faults may hit the replica.
    pub(super) fn follow(
        &mut self,
        state: &mut NodeCore,
        mut fails: impl FnMut(&mut SimRandom) -> bool,
    ) -> Result<(), StoreError> {
        let failed = |error: ReplayError| StoreError::Io {
            what: "the replica failed",
            source: std::io::Error::other(error.to_string()),
        };
        let Some(journal) = state.journal.as_mut() else { return Ok(()) };
        self.commit = None;
        self.durable_there = self.durable_there.max(journal.ring().flushed());
        if self.machine.replica.is_none() {
            (self.life, self.is_scheduled) = (self.life + 1, false);
            self.machine.start().map_err(failed)?;
        }
        self.connect(journal).map_err(failed)?;
        while let Some(part) = self.sender.as_mut().and_then(|sender| sender.next_part(journal, PART_BYTES).transpose())
        {
            let part = part.map_err(failed)?;
            if self.machine.replica.as_ref().is_some_and(|replica| replica.room() < part.bytes.len() as u64) {
                self.machine.commit()?;
            }
            let Some(replica) = &mut self.machine.replica else { break };
            replica.take_frames(&part).map_err(failed)?;
            replica.flush().map_err(failed)?;
            self.durable_here = replica.durable();
            while replica.apply_frames(3).map_err(failed)? {}
            if fails(&mut self.draws) {
                let is_killed = self.draws.one_in(2);
                self.end_machine(if is_killed { FaultKind::ReplicaDeath } else { FaultKind::ReplicaPowerLoss });
                (self.life, self.is_scheduled) = (self.life + 1, false);
                self.machine.start().map_err(failed)?;
                self.connect(journal).map_err(failed)?;
            }
        }
        journal.handle_ack(self.machine.replica.as_ref().map_or(JournalPosition(0), |replica| replica.durable()));
        Ok(())
    }

    /// Ends the replica's process, or cuts its machine's power.
    fn end_machine(&mut self, kind: FaultKind) {
        if kind == FaultKind::ReplicaDeath {
            self.machine.kill();
        } else {
            self.machine.lose_power(&mut self.draws);
            if self.plant == Some(SimBug::UnverifiedEnd) {
                validate_end(&self.machine.ring);
            }
        }
        if let Some(uncut) = self.uncut.take() {
            revive_frames(&self.machine.ring, &uncut);
        }
    }

    /// Damages a message, by some bits that lie together.
    fn garble(&mut self, bytes: &mut [u8]) {
        let damage =
            if self.plant == Some(SimBug::UnverifiedPart) { UNSEEN_DAMAGE } else { self.draws.between(1, 255) };
        let at = self.draws.below(bytes.len() as u64 - 7) as usize;
        bytes[at..].iter_mut().zip(damage.to_le_bytes()).for_each(|(byte, damage)| *byte ^= damage);
    }

    fn is_level(&self, state: &NodeCore) -> bool {
        let mark = self.machine.replica.as_ref().map(|replica| replica.mark());
        self.sender.is_some() && mark == state.journal.as_ref().map(NodeJournal::mark)
    }
}

impl Simulation {
    fn break_replica(&mut self, error: &dyn std::fmt::Display) {
        self.break_check("replica", error.to_string());
    }

    // ---- the link

    /// The connection is lost; it comes back after a while.
    pub(super) fn cut_link(&mut self) {
        let Some(replication) = &mut self.replication else { return };
        replication.cut();
        let pause = replication.draws.between(500, 60_000);
        self.schedule(pause, SimEvent::Connects);
    }

    /// SharedFS and the replica connect, if both run.
    pub(super) fn connect_replica(&mut self) {
        let (Some(replication), Some(node)) = (&mut self.replication, &mut self.machine.node) else { return };
        let Some(journal) = &mut node.journal else { return };
        if replication.sender.is_some() || replication.machine.replica.is_none() {
            return;
        }
        if let Err(error) = replication.connect(journal) {
            return self.break_replica(&error);
        }
        let from = replication.durable_here;
        self.trace("replica", || format!("connects; its copy is durable up to {from}"));
        self.send_ack();
        self.schedule(1, SimEvent::SendsFrames);
    }

    /// SharedFS sends what is new in the journal.
    pub(super) fn send_frames(&mut self) {
        let may_garble = self.may_fail(FaultKind::GarbledPart);
        let (Some(replication), Some(node)) = (&mut self.replication, &self.machine.node) else { return };
        let (Some(journal), Some(sender)) = (&node.journal, &mut replication.sender) else { return };
        if replication.sent.len() + replication.arrived.len() >= PARTS_MAX {
            return;
        }
        let mut part = match sender.next_part(journal, PART_BYTES) {
            Ok(Some(part)) => part,
            Ok(None) => return,
            Err(error) => return self.break_replica(&error),
        };
        let is_garbled = may_garble && !part.bytes.is_empty() && replication.draws.one_in(GARBLED);
        if is_garbled {
            replication.garble(&mut part.bytes);
            self.counts.faults[FaultKind::GarbledPart as usize] += 1;
        }
        replication.sent.push_back((part, is_garbled));
        let is_slow = replication.draws.one_in(12);
        let delay = if is_slow { replication.draws.between(1_000, 60_000) } else { replication.draws.between(20, 400) };
        let at = (self.now_us + delay).max(replication.last_arrival.0);
        replication.last_arrival.0 = at;
        let (connection, pause) = (replication.connection, at - self.now_us);
        self.schedule(pause, SimEvent::PartArrives(connection));
        self.schedule(1, SimEvent::SendsFrames);
    }

    /// A message arrives at the replica.
    pub(super) fn take_part(&mut self, connection: u64) {
        let Some(replication) = &mut self.replication else { return };
        if replication.connection != connection {
            return;
        }
        let part = replication.sent.pop_front();
        replication.arrived.extend(part);
        self.schedule_replica(30);
    }

    /// The replica acknowledges what is durable in its copy.
    fn send_ack(&mut self) {
        let Some(replication) = &mut self.replication else { return };
        let (Some(replica), Some(_)) = (&replication.machine.replica, &replication.sender) else { return };
        let is_early = self.options.plant == Some(SimBug::EarlyAck);
        let position = if is_early { replica.copy_state().end } else { replica.durable() };
        let at = (self.now_us + replication.draws.between(20, 1_500)).max(replication.last_arrival.1);
        replication.last_arrival.1 = at;
        let (connection, pause) = (replication.connection, at - self.now_us);
        self.schedule(pause, SimEvent::AckArrives(connection, position));
    }

    /// An acknowledgement arrives at SharedFS.
    pub(super) fn take_ack(&mut self, connection: u64, position: JournalPosition) {
        let (Some(replication), Some(node)) = (&self.replication, &mut self.machine.node) else { return };
        let Some(journal) = node.journal.as_mut().filter(|_| replication.connection == connection) else { return };
        journal.handle_ack(position);
        self.schedule(1, SimEvent::SendsFrames);
        if matches!(self.shell.commit, CommitStage::Awaiting(_)) {
            self.schedule(2, SimEvent::CommitRuns);
        }
    }

    /// Describes the journal and its copy for the trace; empty on a machine by itself.
    pub(super) fn describe_journal(&self) -> String {
        let journal = self.machine.node.as_ref().and_then(|node| node.journal.as_ref());
        let (Some(replication), Some(journal)) = (&self.replication, journal) else { return String::new() };
        let ring = journal.ring();
        let copy = replication.machine.replica.as_ref().map(|of| (of.committed(), of.mark().position, of.durable()));
        let (sent, arrived) = (replication.sent.len(), replication.arrived.len());
        format!(
            "; journal from {} to {}, durable up to {}; copy {copy:?}, {sent} parts on the way, {arrived} arrived",
            ring.head(),
            ring.end(),
            ring.flushed()
        )
    }

    // ---- the replica's work

    /// The replica takes one step.
    pub(super) fn work_replica(&mut self, life: u64) {
        let Some(replication) = &mut self.replication else { return };
        if replication.life != life || replication.machine.replica.is_none() {
            return;
        }
        replication.is_scheduled = false;
        if replication.commit.is_some() {
            self.run_replica_commit();
        } else if let Err(error) = self.advance_replica() {
            return self.break_replica(&error);
        }
        self.compare_trees();
    }

    fn schedule_replica(&mut self, most_us: u64) {
        let Some(replication) = &mut self.replication else { return };
        if std::mem::replace(&mut replication.is_scheduled, true) {
            return;
        }
        let (life, pause) = (replication.life, replication.draws.between(1, most_us));
        self.schedule(pause, SimEvent::ReplicaWorks(life));
    }

    fn advance_replica(&mut self) -> Result<(), ReplayError> {
        let Some(replication) = &mut self.replication else { return Ok(()) };
        let Some(replica) = &mut replication.machine.replica else { return Ok(()) };
        let first = replication.arrived.front().map(|(part, _)| part.bytes.len() as u64);
        if first.is_some_and(|bytes| bytes <= replica.room()) && !replication.draws.one_in(3) {
            if let Some((part, is_garbled)) = replication.arrived.pop_front() {
                match replica.take_frames(&part) {
                    Err(ReplayError::Copy(_)) if is_garbled => {
                        self.trace("replica", || "refuses a damaged message".to_owned());
                        self.cut_link();
                    }
                    taken => taken?,
                }
            }
            if self.options.plant == Some(SimBug::EarlyAck) {
                self.send_ack();
            }
            self.schedule(1, SimEvent::SendsFrames);
            self.schedule_replica(60);
            return Ok(());
        }
        if replica.durable() < replica.copy_state().end && !replication.draws.one_in(4) {
            replica.flush()?;
            replication.durable_here = replica.durable();
            self.send_ack();
            self.schedule_replica(200);
            return Ok(());
        }
        let is_more = replica.apply_frames(1 + replication.draws.below(4) as usize)?;
        let is_stuck = first.is_some_and(|bytes| bytes > replica.room());
        let has_rest = is_more || first.is_some() || replica.durable() < replica.copy_state().end;
        if is_stuck || replication.draws.one_in(if has_rest { 20 } else { 3 }) {
            let applied = replica.mark().position;
            replication.commit = replica.begin_commit();
            let (is_begun, durable) = (replication.commit.is_some(), replication.durable_there);
            if is_begun && applied > durable {
                let detail = format!("the replica commits up to {applied}, and the writer has {durable} durable");
                self.break_check("commit gate", detail);
            }
        }
        let is_idle = !has_rest && self.replication.as_ref().is_some_and(|of| of.commit.is_none());
        if !is_idle {
            self.schedule_replica(500);
        }
        Ok(())
    }

    fn run_replica_commit(&mut self) {
        let may_crash = self.may_fail(FaultKind::CommitCrash);
        let may_refuse = self.may_fail(FaultKind::FailedCommit);
        let Some(replication) = &mut self.replication else { return };
        let Some(job) = replication.commit.take() else { return };
        let database = replication.machine.arena.database();
        if may_crash && replication.draws.one_in(25) {
            let fault = match replication.draws.below(3) {
                0 => CommitFault::Cut,
                torn => CommitFault::Torn { is_new: torn == 1 },
            };
            database.plan_fault(database.commits(), fault);
            drop(job.run());
            self.count_fault(FaultKind::CommitCrash);
            return self.end_replica(FaultKind::ReplicaDeath);
        }
        if may_refuse && replication.draws.one_in(25) {
            database.plan_fault(database.commits(), CommitFault::Full);
        }
        let done = job.run();
        let Some(replica) = &mut replication.machine.replica else { return };
        // A commit that failed is tried again.
        let _ = replica.finish_commit(done);
        self.schedule_replica(500);
    }

    // ---- faults

    /// The replica's process dies, or its machine loses its power.
    pub(super) fn end_replica(&mut self, kind: FaultKind) {
        if self.replication.as_ref().is_none_or(|replication| replication.machine.replica.is_none()) {
            return;
        }
        self.count_fault(kind);
        self.trace("replica", || format!("{kind}"));
        let Some(replication) = &mut self.replication else { return };
        (replication.life, replication.commit) = (replication.life + 1, None);
        replication.cut();
        replication.end_machine(kind);
        let pause = replication.draws.between(1_000, 120_000);
        self.schedule(pause, SimEvent::ReplicaStarts);
    }

    /// Starts the replica, unless it runs.
    pub(super) fn start_replica(&mut self) {
        let Some(replication) = &mut self.replication else { return };
        if replication.machine.replica.is_some() {
            return;
        }
        (replication.life, replication.is_scheduled) = (replication.life + 1, false);
        if let Err(error) = replication.machine.start() {
            return self.break_replica(&error);
        }
        self.trace("replica", || "has started".to_owned());
        self.connect_replica();
        self.schedule_replica(1_000);
    }

    // ---- checks

    /// Notes how much of the journal a loss of power leaves at the writing node.
    pub(super) fn observe_journal(&mut self) {
        let (Some(replication), Some(node)) = (&mut self.replication, &self.machine.node) else { return };
        if let Some(journal) = &node.journal {
            replication.durable_there = replication.durable_there.max(journal.ring().flushed());
        }
    }

    /// Checks that the replica can't lose what SharedFS is about to commit.
    pub(super) fn check_gate(&mut self, awaited: Option<JournalPosition>) {
        let (Some(replication), Some(awaited)) = (&self.replication, awaited) else { return };
        self.counts.checks += 1;
        if awaited > replication.durable_here {
            let durable = replication.durable_here;
            self.break_check("commit gate", format!("SharedFS commits up to {awaited}, and the replica has {durable}"));
        }
    }

    /// Compares the trees if the replica has applied all of the journal, once at each position.
    pub(super) fn compare_trees(&mut self) {
        let (Some(replication), Some(node)) = (&mut self.replication, &self.machine.node) else { return };
        let Some(replica) = replication.machine.replica.as_ref().filter(|_| replication.is_level(node)) else { return };
        if replication.compared.replace(replica.mark().position) == Some(replica.mark().position) {
            return;
        }
        self.counts.compared += 1;
        let compared = match (node.store.dump_lines(), replica.store().dump_lines()) {
            (Ok(one), Ok(two)) => compare_dumps(one, two, 1).map_err(|error| error.to_string()),
            (Err(error), _) | (_, Err(error)) => Err(error.to_string()),
        };
        match compared {
            Ok(compared) if compared.is_equal() => {}
            Ok(compared) => {
                let difference = compared.differences.first().map(ToString::to_string).unwrap_or_default();
                self.break_check("equal trees", difference);
            }
            Err(error) => self.break_check("equal trees", error),
        }
    }

    /// Returns whether the replica has all that SharedFS has.
    pub(super) fn is_replica_level(&self) -> bool {
        match (&self.replication, &self.machine.node) {
            (Some(replication), Some(node)) => replication.is_level(node),
            _ => true,
        }
    }

    /// Compares the trees at the end, after all frames have been sent.
    pub(super) fn check_replica_at_end(&mut self) {
        let (Some(replication), Some(node)) = (&mut self.replication, &mut self.machine.node) else { return };
        if let Err(error) = replication.follow(node, |_| false) {
            return self.break_replica(&error);
        }
        if !replication.is_level(node) {
            return self.break_check("replica", "it has not applied all of the journal");
        }
        if let Some(replication) = &mut self.replication {
            replication.compared = None;
        }
        self.compare_trees();
    }
}
