//! Faults: processes that die or stop, SharedFS killed and started again, and loss of power.

use ashlar_node::NodeCore;
use ashlar_node::digest::commit::await_no_copy;
use ashlar_store::{CommitFault, StoreError};
use ashlar_types::JournalPosition;

use super::{SimEvent, Simulation};
use crate::client::Asked;
use crate::faults::{FaultKind, SimBug};
use crate::history::UpdateHistory;
use crate::machine::StartReport;

/// Crashes of recovery, one after the other, before one is left to end.
const RECOVERY_CRASHES_MAX: u32 = 3;

impl Simulation {
    /// Returns whether a fault of this kind may happen now.
    pub(super) fn may_fail(&self, kind: FaultKind) -> bool {
        !self.faults_end && self.options.faults.has(kind)
    }

    pub(super) fn count_fault(&mut self, kind: FaultKind) {
        self.counts.faults[kind as usize] += 1;
    }

    /// Draws a fault, and when the next one comes.
    pub(super) fn draw_fault(&mut self) {
        if self.faults_end {
            return;
        }
        let pause = self.fault.between(5_000, 400_000);
        self.schedule(pause, SimEvent::Fault);
        let kinds = if self.replication.is_some() { 14 } else { 10 };
        let (drawn, slot) = (self.fault.below(kinds), self.fault.below(self.slots.len() as u64) as usize);
        let kind = match drawn {
            0..=2 => FaultKind::ProcessDeath,
            3..=5 => FaultKind::SharedFsDeath,
            6 | 7 => FaultKind::PowerLoss,
            8 | 9 => FaultKind::StoppedProcess,
            10 => FaultKind::ReplicaDeath,
            11 => FaultKind::ReplicaPowerLoss,
            _ => FaultKind::CutLink,
        };
        if !self.may_fail(kind) {
            return;
        }
        match kind {
            FaultKind::ProcessDeath => self.end_client(slot, "dies"),
            FaultKind::SharedFsDeath if self.machine.node.is_some() => self.kill_shared_fs(),
            FaultKind::PowerLoss => self.lose_power(),
            FaultKind::ReplicaDeath | FaultKind::ReplicaPowerLoss => self.end_replica(kind),
            FaultKind::CutLink => {
                self.count_fault(kind);
                self.cut_link();
            }
            FaultKind::StoppedProcess => {
                let pause = self.fault.between(1_000, 800_000);
                let until = self.now_us + pause;
                if let Some(client) = &mut self.slots[slot].client {
                    client.stopped_until = until;
                    self.count_fault(kind);
                    self.trace(&format!("client {slot}"), || format!("is stopped for {pause} us"));
                }
            }
            _ => {}
        }
    }

    /// Ends a client's process. SharedFS learns of it after a while, and another process takes the slot.
    pub(super) fn end_client(&mut self, slot: usize, how: &str) {
        let Some(client) = self.slots[slot].client.take() else { return };
        if how == "dies" {
            self.count_fault(FaultKind::ProcessDeath);
        }
        if self.has_plant(SimBug::UnnoticedDeath) {
            return self.schedule_client(slot, 1_000);
        }
        if let Asked::Pending(_, ticket) = client.asked {
            let pause = self.fault.between(10, 3_000);
            self.schedule(pause, SimEvent::HungUp(ticket));
        }
        self.machine.end_process(client.pid);
        self.trace(&format!("client {slot}"), || {
            format!("{how}; session {}, log up to {}", client.session, client.end)
        });
        let (noticed, follows) = (self.fault.between(10, 5_000), self.fault.between(100, 30_000));
        self.schedule(noticed, SimEvent::ProcessEnded(client.session));
        self.schedule_client(slot, follows);
    }

    /// Kills SharedFS. Clients go on, as far as they need it not.
    pub(super) fn kill_shared_fs(&mut self) {
        self.count_fault(FaultKind::SharedFsDeath);
        let journal = self.describe_journal();
        self.trace("SharedFS", || format!("is killed{journal}"));
        self.plant_before_crash();
        self.machine.kill_shared_fs();
        self.reset_shell();
        for slot in 0..self.slots.len() {
            let is_lost = self.fault.one_in(2);
            let Some(client) = &mut self.slots[slot].client else { continue };
            (client.must_resume, client.locks.reclaims) = (true, None);
            client.asked = match std::mem::replace(&mut client.asked, Asked::Nothing) {
                Asked::Pending(request, _) => Asked::Unsent(request),
                Asked::Answered(request, _) if is_lost => Asked::Unsent(request),
                asked => asked,
            };
            let pause = self.fault.between(1, 500);
            self.schedule_client(slot, pause);
        }
        let pause = self.fault.between(100, 100_000);
        self.schedule(pause, SimEvent::SharedFsStarts);
    }

    /// Cuts the power.
    pub(super) fn lose_power(&mut self) {
        self.count_fault(FaultKind::PowerLoss);
        self.trace("machine", || "loses its power".to_owned());
        self.plant_before_crash();
        self.plant_unflushed_journal();
        self.machine.lose_power(&mut self.fault);
        self.plant_unverified_end();
        self.reset_shell();
        self.is_after_power_loss = true;
        if self.machine.is_memory() {
            self.history = UpdateHistory::default();
            self.committed.clear();
            self.administrator.forget_limits();
        }
        for slot in 0..self.slots.len() {
            self.slots[slot].client = None;
            let pause = self.fault.between(100, 30_000);
            self.schedule_client(slot, pause);
        }
        let pause = self.fault.between(100, 50_000);
        self.schedule(pause, SimEvent::SharedFsStarts);
    }

    /// Starts SharedFS once. It waits for the replica, which may fail meanwhile.
    fn start_machine(&mut self, crash_at: Option<(u64, CommitFault)>) -> Result<StartReport, StoreError> {
        let is_failing = self.may_fail(FaultKind::ReplicaDeath);
        let Some(replication) = &mut self.replication else { return self.machine.start(self.now_us, crash_at) };
        let mut await_copy = |state: &mut NodeCore, upto: JournalPosition| {
            replication.follow(state, |draws| is_failing && draws.one_in(30))?;
            await_no_copy(state, upto)
        };
        self.machine.start_with(self.now_us, crash_at, &mut await_copy)
    }

    /// Starts SharedFS, unless it runs.
    pub(super) fn start_shared_fs(&mut self) {
        if self.machine.node.is_some() {
            return;
        }
        self.life += 1;
        if self.has_plant(SimBug::SkippedRecord) && !self.is_after_power_loss {
            self.plant_skipped_record();
        }
        let mut crashes = 0;
        loop {
            let is_crashing = self.may_fail(FaultKind::RecoveryCrash)
                && crashes < RECOVERY_CRASHES_MAX
                && self.counts.recoveries > 0
                && self.fault.one_in(4);
            let crash_at = is_crashing.then(|| {
                let fault = match self.fault.below(3) {
                    0 => CommitFault::Cut,
                    torn => CommitFault::Torn { is_new: torn == 1 },
                };
                (self.fault.below(3), fault)
            });
            let started = self.start_machine(crash_at);
            if crash_at.is_some() {
                // If the planned commit did not come, SharedFS is killed right after its start.
                crashes += 1;
                self.count_fault(FaultKind::RecoveryCrash);
                self.trace("SharedFS", || format!("is killed as it starts, at {crash_at:?}"));
                if let Err(error) = started
                    && !self.machine.arena.database().is_crashed()
                {
                    return self.break_check("recovery", error.to_string());
                }
                self.machine.kill_shared_fs();
                continue;
            }
            match started {
                Ok(report) => {
                    self.machine.end_start();
                    self.check_start(&report);
                }
                Err(error) => self.break_check("recovery", error.to_string()),
            }
            break;
        }
        if let Some(node) = &mut self.machine.node {
            node.request_digest();
        }
        self.cut_link();
        if self.administrator.is_active {
            let pause = self.limits.between(1, 3_000);
            self.schedule(pause, SimEvent::Administer);
        }
        for slot in 0..self.slots.len() {
            let pause = self.pace.between(1, 3_000);
            self.schedule_client(slot, pause);
        }
    }
}
