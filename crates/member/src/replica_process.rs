//! The process of a node that serves no sessions: a replica, or a node that was replaced.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ashlar_cluster::chain::ChainTiming;
use ashlar_cluster::{Coordinator, LinkEvidence, MemberRole, check_promotion};
use ashlar_pmem::Arena;
use ashlar_processes::clock;
use ashlar_replica::mirror::{EmbeddedCoordinator, ReplicaService, ReplicaStatus, adopt_copy};
use ashlar_replica::open_copy;
use ashlar_wire::{ClusterCommand, ClusterReport, ReplicationReport};
use parking_lot::{Condvar, Mutex};

use crate::error::MemberError;
use crate::membership::Membership;
use crate::standby_server::{StandbyNode, StandbyServer};

/// How often the process checks whether it is to end.
const END_CHECK: Duration = Duration::from_millis(200);
/// How long a writer may be silent until it counts as away for a promotion.
const WRITER_SILENCE: Duration = Duration::from_secs(1);

/// Why a node that serves no sessions has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StandbyEnd {
    /// A signal asked for it.
    Stopped,
    /// The node was promoted: it must start again, as the writer.
    Promoted,
}

/// A node that serves no sessions.
struct Standby {
    membership: Membership,
    /// The replica's threads; a replaced node has none.
    service: Option<Arc<ReplicaService>>,
    is_promoted: Mutex<bool>,
    changed: Condvar,
}

/// Runs a node that serves no sessions, until it is promoted or `should_end` says so.
///
/// # Errors
/// [`MemberError`].
pub fn run_standby(
    arena: Arc<Arena>,
    membership: Membership,
    socket: &Path,
    should_end: &dyn Fn() -> bool,
) -> Result<StandbyEnd, MemberError> {
    let system = |what| move |error| MemberError::System { what, error };
    let is_over = Arc::new(AtomicBool::new(false));
    let mut threads = Vec::new();
    let service = if membership.role() == MemberRole::Replica {
        let writer = membership.document.writer().node;
        let replica = open_copy(&arena, membership.document.cluster, writer)?;
        let service = Arc::new(ReplicaService::new(
            membership.start_fabric()?,
            membership.files.clone(),
            &membership.document,
            membership.state,
            replica,
            ChainTiming::default(),
            clock::boot_time(),
        ));
        let (applier, link, over) = (Arc::clone(&service), Arc::clone(&service), Arc::clone(&is_over));
        let spawn = |name: &str| std::thread::Builder::new().name(name.into());
        let thread = spawn("apply").spawn(move || {
            applier.run_applier();
            Ok(())
        });
        threads.push(thread.map_err(system("cannot start threads"))?);
        let thread = spawn("link").spawn(move || {
            let result = link.run_link(&clock::boot_time);
            over.store(true, Ordering::Release);
            result
        });
        threads.push(thread.map_err(system("cannot start threads"))?);
        Some(service)
    } else {
        // A successor tells it its epoch.
        None
    };
    let standby = Arc::new(Standby { membership, service, is_promoted: Mutex::new(false), changed: Condvar::new() });
    let server = StandbyServer::start(socket, &arena, Arc::clone(&standby) as Arc<dyn StandbyNode>)
        .map_err(system("cannot listen at the socket"))?;
    tracing::info!(role = standby.membership.role().name(), "the node serves no sessions");
    let mut is_promoted = standby.is_promoted.lock();
    while !*is_promoted && !should_end() && !is_over.load(Ordering::Acquire) {
        standby.changed.wait_for(&mut is_promoted, END_CHECK);
    }
    let was_promoted = *is_promoted;
    drop(is_promoted);
    drop(server);
    if let Some(service) = &standby.service {
        service.end();
    }
    for thread in threads {
        if let Ok(result) = thread.join() {
            result.map_err(MemberError::Failed)?;
        }
    }
    if !was_promoted {
        return Ok(StandbyEnd::Stopped);
    }
    // The document says that this node is the writer: a start that finds a copy adopts it.
    drop(standby);
    drop(arena);
    Ok(StandbyEnd::Promoted)
}

impl Membership {
    /// Takes over what a former writer has journalled, if that is still to be done.
    ///
    /// # Errors
    /// Those of the journal and the store.
    pub fn adopt_former(&self, arena: &Arc<Arena>) -> Result<(), MemberError> {
        let former = self.document.members.iter().filter(|member| member.role == MemberRole::Replaced);
        for member in former {
            if adopt_copy(arena, self.document.cluster, member.node)? {
                tracing::info!(node = %member.node, "took over from a former writer");
            }
        }
        Ok(())
    }
}

impl Standby {
    fn status(&self) -> Option<ReplicaStatus> {
        self.service.as_ref().map(|service| service.status())
    }

    /// Makes the node the writer in the document.
    fn promote(&self, is_forced: bool) -> Result<(), String> {
        let Membership { document, node, files, .. } = &self.membership;
        let status = self.status();
        let evidence = LinkEvidence {
            writer_answers: self
                .service
                .as_ref()
                .is_some_and(|service| service.has_heard(WRITER_SILENCE, clock::boot_time())),
            durable: status.as_ref().map(|status| status.durable).unwrap_or_default(),
        };
        let state = status.map_or(self.membership.state, |status| status.state);
        check_promotion(document, &state, *node, evidence, is_forced).map_err(|refusal| refusal.to_string())?;
        // From here on nothing of the writer is taken.
        if let Some(service) = &self.service {
            service.end();
        }
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

    fn describe(&self) -> ClusterReport {
        let mut report = self.membership.report();
        let writer = self.membership.document.writer();
        let Some(status) = self.status() else {
            report.standing = "replaced".into();
            let problem = "another node has taken over; make this one anew with 'ashlar node add --replace'";
            report.problems.push(problem.into());
            return report;
        };
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
        if status.needs_copy {
            report.problems.push("the copy does not belong to the writer's journal; it must be made anew".into());
        }
        if let Some(problem) = status.last_problem.filter(|_| !status.is_following) {
            let (node, address) = (writer.node, &writer.address);
            report.problems.push(format!("no link to node {node} at {address}: {problem}"));
        }
        report
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
        self.describe()
    }

    fn run_command(&self, command: ClusterCommand) -> Result<(), String> {
        match command {
            ClusterCommand::Promote { force } => self.promote(force),
            ClusterCommand::Force => Err("only a writer that waits for its replica is forced to go on".into()),
        }
    }
}
