//! A run: one event queue, virtual time, one seed.

mod checks;
mod failures;
mod locking;
mod plants;
mod quotas;
mod replication;
mod shell;
mod work;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

use self::quotas::Administrator;
use self::replication::Replication;
use ashlar_node::digest::commit::{NodeCommit, NodeCommitDone};
use ashlar_node::pending::RequestTicket;
use ashlar_node::pending::progress::WaitFor;
use ashlar_node::pending::round::{DigestPace, DigestRound};
use ashlar_pmem::MediumKind;
use ashlar_types::{JournalPosition, LogPosition, SessionId};

use crate::client::SimClient;
use crate::faults::{FaultKind, FaultKinds, SimBug};
use crate::history::UpdateHistory;
use crate::machine::{Machine, MachineOptions, node_time};
use crate::random::SimRandom;

/// Operations of all clients in a run.
pub const STEPS: u64 = 160;
/// The virtual time, in microseconds, within which everything ends once the faults have ended.
const SETTLE_US: u64 = 60_000_000;
/// The most events of a run: more mean that something goes round in circles.
const EVENTS_MAX: u64 = 400_000;

/// How a run goes.
#[derive(Clone, Copy, Debug)]
pub struct SimOptions {
    /// The seed.
    pub seed: u64,
    /// Operations of all clients.
    pub steps: u64,
    /// Faults that may happen.
    pub faults: FaultKinds,
    /// The bug that is planted.
    pub plant: Option<SimBug>,
    /// Whether a trace is kept.
    pub is_traced: bool,
}

impl SimOptions {
    /// A run of a seed with all faults and no bug.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self { seed, steps: STEPS, faults: FaultKinds::ALL, plant: None, is_traced: false }
    }
}

/// A check that has failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BrokenCheck {
    /// The check.
    pub check: &'static str,
    /// The violation.
    pub detail: String,
}

impl BrokenCheck {
    fn new(check: &'static str, detail: impl Into<String>) -> Self {
        Self { check, detail: detail.into() }
    }
}

impl fmt::Display for BrokenCheck {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.check, self.detail)
    }
}

/// The counts of one or more runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SimCounts {
    /// Events.
    pub events: u64,
    /// Operations of clients.
    pub steps: u64,
    /// Updates that were logged.
    pub updates: u64,
    /// Commits that ended well.
    pub commits: u64,
    /// Faults by kind.
    pub faults: [u64; FaultKind::ALL.len()],
    /// Recoveries that were checked.
    pub recoveries: u64,
    /// Trees that were compared.
    pub trees: u64,
    /// Trees of a replica that were compared with the node's.
    pub compared: u64,
    /// Checks of other kinds.
    pub checks: u64,
}

impl SimCounts {
    /// Adds the counts of another run.
    pub fn add(&mut self, other: &Self) {
        self.events += other.events;
        self.steps += other.steps;
        self.updates += other.updates;
        self.commits += other.commits;
        self.faults.iter_mut().zip(other.faults).for_each(|(sum, count)| *sum += count);
        self.recoveries += other.recoveries;
        self.trees += other.trees;
        self.compared += other.compared;
        self.checks += other.checks;
    }
}

impl fmt::Display for SimCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { events, steps, updates, commits, faults, recoveries, trees, compared, checks } = self;
        write!(f, "{steps} steps, {updates} updates, {commits} commits, {events} events; ")?;
        for (kind, count) in FaultKind::ALL.into_iter().zip(faults) {
            write!(f, "{count} {kind}, ")?;
        }
        write!(f, "{recoveries} recoveries; {trees} trees compared, {compared} with a replica's, {checks} other checks")
    }
}

/// The result of a run.
#[derive(Clone, Debug)]
pub struct RunOutcome {
    /// The counts.
    pub counts: SimCounts,
    /// The check that has failed, if any.
    pub broken: Option<BrokenCheck>,
    /// The trace: one line an event.
    pub trace: Vec<String>,
}

/// An event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum SimEvent {
    /// A slot's client goes on, or gets a new one.
    Client(usize),
    /// A pending request is advanced.
    Advance(RequestTicket),
    /// The gate of an answer may be open.
    Digest,
    CommitBegins,
    CommitRuns,
    CommitEnds,
    /// SharedFS learns of a process's end.
    ProcessEnded(SessionId),
    /// SharedFS learns that the process behind a request is gone.
    HungUp(RequestTicket),
    SharedFsStarts,
    Fault,
    /// The administrator comes.
    Administer,
    /// SharedFS and the replica connect.
    Connects,
    SendsFrames,
    /// A message of this connection arrives at the replica.
    PartArrives(u64),
    AckArrives(u64, JournalPosition),
    /// The replica of this life goes on.
    ReplicaWorks(u64),
    ReplicaStarts,
}

/// A scheduled event: time, order, the life of SharedFS for which it is meant (0: any), event.
type Scheduled = Reverse<(u64, u64, u64, SimEvent)>;

/// The owner of a pending request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Waiter {
    Client(usize),
    Administrator,
    /// The answer is ignored.
    Unwanted,
    /// Sessions end.
    Ending(EndStage),
}

/// How far the end of sessions has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum EndStage {
    Digest,
    Commit,
    Sweep,
}

/// How far a commit has come.
#[derive(Debug, Default)]
enum CommitStage {
    #[default]
    Idle,
    Scheduled,
    Begun(NodeCommit),
    /// The replica has not made the journal durable.
    Awaiting(NodeCommit),
    Ran(NodeCommitDone),
}

/// The state of SharedFS's shell, which is lost with SharedFS.
#[derive(Debug, Default)]
struct ShellState {
    waiters: BTreeMap<RequestTicket, (Waiter, Option<WaitFor>)>,
    pace: Option<DigestPace>,
    round: Option<DigestRound>,
    digest_at: Option<u64>,
    commit: CommitStage,
}

/// A client's place: a user whose processes follow one another.
#[derive(Debug)]
struct ClientSlot {
    uid: u32,
    client: Option<SimClient>,
    /// The number of the event that takes it on.
    wake: u64,
}

/// A run.
struct Simulation {
    options: SimOptions,
    now_us: u64,
    life: u64,
    queue: BinaryHeap<Scheduled>,
    scheduled: u64,
    machine: Machine,
    replication: Option<Replication>,
    shell: ShellState,
    slots: Vec<ClientSlot>,
    history: UpdateHistory,
    administrator: Administrator,
    /// Positions of sessions that were committed before, by any SharedFS.
    committed: BTreeMap<SessionId, LogPosition>,
    steps_left: u64,
    faults_end: bool,
    is_after_power_loss: bool,
    /// Draws what clients do, when SharedFS works, when faults happen, and the administrator's limits.
    work: SimRandom,
    pace: SimRandom,
    fault: SimRandom,
    limits: SimRandom,
    counts: SimCounts,
    broken: Option<BrokenCheck>,
    trace: Vec<String>,
}

/// Runs a seed.
#[must_use]
pub fn run_seed(options: SimOptions) -> RunOutcome {
    let mut simulation = match Simulation::new(options) {
        Ok(simulation) => simulation,
        Err(error) => {
            let broken = Some(BrokenCheck::new("start", error));
            return RunOutcome { counts: SimCounts::default(), broken, trace: Vec::new() };
        }
    };
    let run = catch_unwind(AssertUnwindSafe(|| simulation.run()));
    if let Err(panic) = run {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
        simulation.broken = Some(BrokenCheck::new("panic", text.unwrap_or_default()));
    }
    RunOutcome { counts: simulation.counts, broken: simulation.broken, trace: simulation.trace }
}

impl Simulation {
    fn new(options: SimOptions) -> Result<Self, String> {
        let mut setup = SimRandom::new(options.seed, 1);
        let mut machine = MachineOptions {
            ring_bytes: None,
            medium: match setup.below(7) {
                0 => MediumKind::Memory,
                1..=3 => MediumKind::Pmem,
                _ => MediumKind::Disk,
            },
            // Of so few, SharedFS keeps 64 back for updates that replace content.
            blocks: setup.between(80, 200) as u32,
            lease_hold_us: setup.pick(&[0, 200, 2000]).unwrap_or(0),
        };
        // The other half tests a machine by itself.
        let has_replica = setup.one_in(2) && machine.medium != MediumKind::Memory;
        machine.ring_bytes = has_replica.then(|| setup.between(192, 512) << 10);
        let replica =
            machine.ring_bytes.map(|bytes| Replication::new(options.seed, machine.blocks, bytes, options.plant));
        let replication = replica.transpose().map_err(|error| error.to_string())?;
        let slots = setup.between(2, 4) as usize;
        // Only the super-user may change an empty tree.
        let uids: Vec<u32> =
            (0..slots).map(|slot| if slot == 0 { 0 } else { setup.pick(&[0, 1001, 1002]).unwrap_or(0) }).collect();
        Ok(Self {
            options,
            now_us: 1_000_000,
            life: 1,
            queue: BinaryHeap::new(),
            scheduled: 0,
            machine: Machine::new(machine).map_err(|error| error.to_string())?,
            replication,
            shell: ShellState::default(),
            slots: uids.into_iter().map(|uid| ClientSlot { uid, client: None, wake: 0 }).collect(),
            history: UpdateHistory::default(),
            administrator: Administrator::new(setup.one_in(2)),
            committed: BTreeMap::new(),
            steps_left: options.steps,
            faults_end: false,
            is_after_power_loss: false,
            work: SimRandom::new(options.seed, 2),
            pace: SimRandom::new(options.seed, 3),
            fault: SimRandom::new(options.seed, 4),
            limits: SimRandom::new(options.seed, 5),
            counts: SimCounts::default(),
            broken: None,
            trace: Vec::new(),
        })
    }

    /// Runs until everything has ended, or a check fails.
    fn run(&mut self) {
        self.trace("machine", || "starts".to_owned());
        self.start_replica();
        self.start_shared_fs();
        for slot in 0..self.slots.len() {
            let pause = self.pace.below(500);
            self.schedule_client(slot, pause);
        }
        let pause = self.fault.between(5_000, 300_000);
        self.schedule(pause, SimEvent::Fault);
        if self.administrator.is_active {
            let pause = self.limits.between(5_000, 200_000);
            self.schedule(pause, SimEvent::Administer);
        }
        let mut deadline = u64::MAX;
        while self.broken.is_none() {
            let Some(Reverse((at, number, life, event))) = self.queue.pop() else { break };
            if life != 0 && life != self.life {
                continue;
            }
            if matches!(event, SimEvent::Client(slot) if self.slots[slot].wake != number) {
                continue;
            }
            self.now_us = self.now_us.max(at);
            self.counts.events += 1;
            if self.steps_left == 0 && !self.faults_end {
                self.faults_end = true;
                deadline = self.now_us + SETTLE_US;
                self.trace("machine", || "the faults end".to_owned());
            }
            if self.faults_end && self.is_quiet() {
                break;
            }
            if self.now_us > deadline || self.counts.events > EVENTS_MAX {
                self.report_stall();
                break;
            }
            if let Some(node) = &mut self.machine.node {
                node.handle_time(node_time(self.now_us));
            }
            self.handle(event);
            self.perform_effects();
            self.observe_journal();
            self.check_event();
        }
        if self.broken.is_none() {
            self.check_end();
        }
    }

    fn handle(&mut self, event: SimEvent) {
        match event {
            SimEvent::Client(slot) => self.go_on(slot),
            SimEvent::Advance(ticket) => self.advance_request(ticket),
            SimEvent::Digest => self.advance_digest(),
            SimEvent::CommitBegins => self.begin_commit(),
            SimEvent::CommitRuns => self.run_commit(),
            SimEvent::CommitEnds => self.end_commit(),
            SimEvent::ProcessEnded(session) => self.end_session(session),
            SimEvent::HungUp(ticket) => self.hang_up(ticket),
            SimEvent::SharedFsStarts => self.start_shared_fs(),
            SimEvent::Fault => self.draw_fault(),
            SimEvent::Administer => self.administer(),
            SimEvent::Connects => self.connect_replica(),
            SimEvent::SendsFrames => self.send_frames(),
            SimEvent::PartArrives(connection) => self.take_part(connection),
            SimEvent::AckArrives(connection, position) => self.take_ack(connection, position),
            SimEvent::ReplicaWorks(life) => self.work_replica(life),
            SimEvent::ReplicaStarts => self.start_replica(),
        }
    }

    /// Schedules an event for this life of SharedFS, or for any if it concerns a client.
    fn schedule(&mut self, pause_us: u64, event: SimEvent) {
        self.scheduled += 1;
        let life = match event {
            SimEvent::Client(_)
            | SimEvent::Fault
            | SimEvent::Administer
            | SimEvent::SharedFsStarts
            | SimEvent::PartArrives(_)
            | SimEvent::ReplicaWorks(_)
            | SimEvent::ReplicaStarts => 0,
            _ => self.life,
        };
        self.queue.push(Reverse((self.now_us + pause_us, self.scheduled, life, event)));
    }

    fn break_check(&mut self, check: &'static str, detail: impl Into<String>) {
        if self.broken.is_none() {
            let broken = BrokenCheck::new(check, detail);
            self.trace("check", || broken.to_string());
            self.broken = Some(broken);
        }
    }

    fn trace(&mut self, actor: &str, what: impl FnOnce() -> String) {
        if self.options.is_traced {
            let (seconds, micros) = (self.now_us / 1_000_000, self.now_us % 1_000_000);
            self.trace.push(format!("{seconds:3}.{micros:06}  {actor:<12} {}", what()));
        }
    }

    fn has_plant(&self, bug: SimBug) -> bool {
        self.options.plant == Some(bug)
    }

    /// Returns whether no client has anything to do, and SharedFS runs.
    fn is_quiet(&self) -> bool {
        let is_idle = |slot: &ClientSlot| slot.client.as_ref().is_none_or(|client| client.goal.is_none());
        self.machine.node.is_some()
            && self.slots.iter().all(is_idle)
            && self.shell.waiters.is_empty()
            && self.is_replica_level()
    }
}
