//! A node that serves no sessions: what it says, and its promotion.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ashlar_cluster::{Coordinator, HardState, LinkEvidence, MemberRole, PromotionRefusal, check_promotion};
use ashlar_pmem::Arena;
use ashlar_processes::clock;
use ashlar_replica::mirror::{CopyService, EmbeddedCoordinator, ReplicaService, ReplicaStatus};
use ashlar_types::JournalPosition;
use ashlar_wire::{ClusterCommand, ClusterReport};
use parking_lot::{Condvar, Mutex};

use crate::membership::Membership;
use crate::standby_report::{describe_copying, describe_following, describe_replaced};
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
    arena: Arc<Arena>,
    work: Mutex<StandbyWork>,
    is_ending: AtomicBool,
    /// Its document has changed, or it could not be changed.
    must_restart: Mutex<bool>,
    changed: Condvar,
}

impl Standby {
    /// Returns a node that has just started.
    pub fn new(membership: Membership, arena: Arc<Arena>) -> Self {
        Self {
            membership,
            arena,
            work: Mutex::new(StandbyWork::None),
            is_ending: AtomicBool::new(false),
            must_restart: Mutex::new(false),
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

    /// Waits until it must start again, or until `is_over` says so.
    pub fn await_restart(&self, pause: Duration, is_over: &dyn Fn() -> bool) {
        let mut must_restart = self.must_restart.lock();
        while !*must_restart && !is_over() {
            self.changed.wait_for(&mut must_restart, pause);
        }
    }

    /// Returns whether it must start again.
    pub fn must_restart(&self) -> bool {
        *self.must_restart.lock()
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
        // Its document may be older, and call it the writer.
        if let Some(epoch) = self.membership.state.superseding(document.epoch) {
            return Err(PromotionRefusal::IsReplaced(*node, epoch).to_string());
        }
        let (status, state) = self.status();
        let work = self.work.lock().clone();
        let writer_answers = match &work {
            StandbyWork::Follow(service) => service.has_heard(WRITER_SILENCE, clock::boot_time()),
            _ => false,
        };
        let durable = status.map_or(JournalPosition(0), |status| status.durable);
        let evidence = LinkEvidence { writer_answers, durable };
        check_promotion(document, &state, *node, evidence, is_forced).map_err(|refusal| refusal.to_string())?;
        // From here on nothing of the writer is taken. The node starts again in any case, as what its document says.
        self.end_work();
        let coordinator = EmbeddedCoordinator::new(files.clone());
        let swapped = coordinator.read().and_then(|(document, version)| {
            let next = document.with_promotion(*node)?;
            coordinator.compare_and_swap(version, &next)
        });
        *self.must_restart.lock() = true;
        self.changed.notify_all();
        swapped.map(drop).map_err(|error| error.to_string())
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
        let work = self.work.lock().clone();
        match work {
            StandbyWork::Follow(service) => describe_following(&self.membership, &service.status()),
            StandbyWork::Copy(service) => describe_copying(&self.membership, &service.status()),
            StandbyWork::None if self.membership.role() == MemberRole::Replaced => describe_replaced(&self.membership),
            StandbyWork::None => self.membership.report(),
        }
    }

    fn resize(&self, bytes: u64) -> Result<(), String> {
        let StandbyWork::Follow(service) = self.work.lock().clone() else {
            return Err("the arena is being filled, or out of use; its size can be changed while it follows".into());
        };
        if bytes < self.arena.summary().size_bytes {
            return Err("a replica's arena can't be made smaller; make it anew with 'ashlar node add --replace'".into());
        }
        let grown = self.arena.resize(bytes).map_err(|error| error.to_string())?;
        let added = service.add_segments(grown.added, clock::boot_time());
        added.map_err(|error| format!("{error}; stop this node's daemon and start it again"))
    }

    fn run_command(&self, command: &ClusterCommand) -> Result<(), String> {
        match command {
            ClusterCommand::Promote { force } => self.promote(*force),
            ClusterCommand::AddReplica { .. } => {
                let writer = self.membership.document.writer();
                Err(format!("node {} at {} is the writer; run this there", writer.node, writer.address))
            }
            ClusterCommand::Force => {
                let Membership { node, .. } = &self.membership;
                Err(format!("node {node} is not the writer; 'ashlar node force' is for a writer whose replica is away"))
            }
        }
    }
}
