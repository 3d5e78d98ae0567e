//! A node that serves no sessions: what it says, and its promotion.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ashlar_cluster::{Coordinator, HardState, LinkEvidence, MemberRole, check_promotion};
use ashlar_processes::clock;
use ashlar_replica::mirror::{CopyService, EmbeddedCoordinator, ReplicaService, ReplicaStatus};
use ashlar_types::JournalPosition;
use ashlar_wire::{ClusterCommand, ClusterReport, ReplicationReport};
use parking_lot::{Condvar, Mutex};

use crate::membership::Membership;
use crate::standby_server::StandbyNode;

/// How long a writer may be silent until it counts as away for a promotion.
const WRITER_SILENCE: Duration = Duration::from_secs(1);

/// The work of a node that serves no sessions.
#[derive(Clone)]
pub enum StandbyWork {
    /// None: the node was replaced, or it begins.
    None,
    /// It follows its writer.
    Follow(Arc<ReplicaService>),
    /// It takes a copy of the whole file system.
    Copy(Arc<CopyService>),
}

/// A node that serves no sessions.
pub struct Standby {
    /// Its place in the cluster.
    pub membership: Membership,
    work: Mutex<StandbyWork>,
    is_ending: AtomicBool,
    is_promoted: Mutex<bool>,
    changed: Condvar,
}

impl Standby {
    /// Returns a node that has just started.
    pub fn new(membership: Membership) -> Self {
        Self {
            membership,
            work: Mutex::new(StandbyWork::None),
            is_ending: AtomicBool::new(false),
            is_promoted: Mutex::new(false),
            changed: Condvar::new(),
        }
    }

    /// Notes what it does from now on. Returns whether it goes on.
    pub fn begin_work(&self, work: StandbyWork) -> bool {
        *self.work.lock() = work;
        !self.is_ending()
    }

    /// Ends its work.
    pub fn end_work(&self) {
        self.is_ending.store(true, Ordering::Release);
        match &*self.work.lock() {
            StandbyWork::None => {}
            StandbyWork::Follow(service) => service.end(),
            StandbyWork::Copy(service) => service.end(),
        }
    }

    /// Returns whether it ends.
    pub fn is_ending(&self) -> bool {
        self.is_ending.load(Ordering::Acquire)
    }

    /// Waits until it was promoted, or until `is_over` says so. Returns whether it was promoted.
    pub fn await_promotion(&self, pause: Duration, is_over: &dyn Fn() -> bool) -> bool {
        let mut is_promoted = self.is_promoted.lock();
        while !*is_promoted && !is_over() {
            self.changed.wait_for(&mut is_promoted, pause);
        }
        *is_promoted
    }

    /// Returns the state of a replica that follows its writer, and the hard state.
    fn status(&self) -> (Option<ReplicaStatus>, HardState) {
        let work = self.work.lock().clone();
        match work {
            StandbyWork::Follow(service) => {
                let status = service.status();
                let state = status.state;
                (Some(status), state)
            }
            StandbyWork::Copy(service) => (None, service.status().state),
            StandbyWork::None => (None, self.membership.state),
        }
    }

    /// Makes the node the writer in the document.
    fn promote(&self, is_forced: bool) -> Result<(), String> {
        let Membership { document, node, files, .. } = &self.membership;
        let (status, state) = self.status();
        let work = self.work.lock().clone();
        let writer_answers = match &work {
            StandbyWork::Follow(service) => service.has_heard(WRITER_SILENCE, clock::boot_time()),
            _ => false,
        };
        let durable = status.map_or(JournalPosition(0), |status| status.durable);
        let evidence = LinkEvidence { writer_answers, durable };
        check_promotion(document, &state, *node, evidence, is_forced).map_err(|refusal| refusal.to_string())?;
        // From here on nothing of the writer is taken.
        self.end_work();
        let coordinator = EmbeddedCoordinator::new(files.clone());
        let swapped = coordinator.read().and_then(|(document, version)| {
            let next = document.with_promotion(*node)?;
            coordinator.compare_and_swap(version, &next)
        });
        swapped.map_err(|error| error.to_string())?;
        *self.is_promoted.lock() = true;
        self.changed.notify_all();
        Ok(())
    }

    fn report_following(&self, report: &mut ClusterReport, status: ReplicaStatus) {
        report.standing = if status.is_following { "following" } else { "away" }.into();
        report.is_linked = status.is_following;
        report.in_sync = status.state.in_sync;
        report.replication = Some(ReplicationReport {
            end: status.end.0,
            durable: status.durable.0,
            applied: status.applied.0,
            committed: status.committed.0,
            lag_ms: 0,
        });
        if !status.is_following {
            self.report_problem(report, status.last_problem);
        }
    }

    fn report_problem(&self, report: &mut ClusterReport, problem: Option<String>) {
        let writer = self.membership.document.writer();
        let (node, address) = (writer.node, &writer.address);
        let problem = problem.unwrap_or_else(|| "it has not answered yet".into());
        report.problems.push(format!("no link to node {node} at {address}: {problem}"));
    }
}

impl StandbyNode for Standby {
    fn refusal(&self) -> String {
        let Membership { document, node, .. } = &self.membership;
        let writer = document.writer();
        match self.membership.role() {
            MemberRole::Replaced => {
                format!("node {node} was replaced; work on the node that has taken over, and see 'ashlar status' there")
            }
            _ => format!(
                "node {node} is a replica, and node {} at {} serves; work there, \
                 or let this node take over with 'ashlar node promote'",
                writer.node, writer.address
            ),
        }
    }

    fn may_serve_soon(&self) -> bool {
        false
    }

    fn report(&self) -> ClusterReport {
        let mut report = self.membership.report();
        let work = self.work.lock().clone();
        match work {
            StandbyWork::Follow(service) => self.report_following(&mut report, service.status()),
            StandbyWork::Copy(service) => {
                let status = service.status();
                report.standing = if status.is_copying { "copying" } else { "away" }.into();
                report.is_linked = status.is_copying;
                report.copied_bytes = Some(status.bytes);
                if !status.is_copying {
                    self.report_problem(&mut report, status.last_problem);
                }
            }
            StandbyWork::None if self.membership.role() == MemberRole::Replaced => {
                report.standing = "replaced".into();
                report.problems.push(
                    "another node has taken over; to make this one anew, run 'ashlar node add' there, \
                     remove this arena, and run 'ashlar node join' here"
                        .into(),
                );
            }
            StandbyWork::None => report.standing = "away".into(),
        }
        report
    }

    fn run_command(&self, command: &ClusterCommand) -> Result<(), String> {
        match command {
            ClusterCommand::Promote { force } => self.promote(*force),
            ClusterCommand::AddReplica { .. } => {
                let writer = self.membership.document.writer();
                Err(format!("node {} at {} is the writer; run this there", writer.node, writer.address))
            }
            ClusterCommand::Force => Err("only a writer that waits for its replica is forced to go on".into()),
        }
    }
}
