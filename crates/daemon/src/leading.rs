//! Leads: carries the journal to the replica on another machine.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use ashlar_cluster::chain::LinkProblem;
use ashlar_cluster::{CopiesNeeded, Standing};
use ashlar_member::{Invitation, Membership, StandbyNode, StandbyServer, report_leading};
use ashlar_metrics::StatusSlot;
use ashlar_node::NodeCore;
use ashlar_pmem::Arena;
use ashlar_processes::clock;
use ashlar_replica::mirror::{LeaderOptions, LeaderService, WriterNode};
use ashlar_store::StoreError;
use ashlar_types::JournalPosition;
use ashlar_wire::{ClusterCommand, ClusterReport, Reply};

use crate::DaemonError;
use crate::shared_state::{Leading, SharedState};

/// How long a start waits for the replica before it says at the socket that it waits.
const QUIET_WAIT: Duration = Duration::from_millis(300);

/// How long an order to go on alone may take, and how often that is checked.
const ALONE_PATIENCE: Duration = Duration::from_secs(5);
const ALONE_PAUSE: Duration = Duration::from_millis(10);
/// The process of a start, as its steps need it.
#[derive(Clone, Copy)]
pub struct StartingProcess<'a> {
    /// Returns whether a signal asks for the end.
    pub should_end: &'a dyn Fn() -> bool,
    /// Metrics are served from it.
    pub status: &'a StatusSlot,
}

/// Begins to lead, and waits until the node may serve.
///
/// # Errors
/// [`DaemonError::RoleChanged`] if another node has taken over; [`DaemonError::Interrupted`]; those of the fabric.
pub fn begin_leading(
    membership: Membership,
    core: &mut NodeCore,
    arena: &Arc<Arena>,
    socket: &Path,
    process: StartingProcess<'_>,
) -> Result<Leading, DaemonError> {
    let StartingProcess { should_end, status } = process;
    let journal = core.journal.as_mut().expect("a member of a cluster has a journal");
    journal.answer_syncs();
    let end = journal.mark().position;
    let fabric = membership.start_fabric()?;
    let Membership { files, document, state, .. } = &membership;
    let (files, options, now) = (files.clone(), LeaderOptions::default(), clock::boot_time());
    let leader = Arc::new(LeaderService::new(fabric, files, document, *state, options, now, end));
    let until = clock::boot_time() + QUIET_WAIT;
    leader.drive_until_serving(core, &clock::boot_time, &|| clock::boot_time() >= until || should_end());
    if matches!(leader.status().standing, Standing::Waiting(_)) {
        let waiting = WaitingWriter { membership: membership.clone(), leader: Arc::clone(&leader), end };
        tracing::warn!("{}", waiting.refusal());
        let system = |error| DaemonError::Socket { path: socket.to_owned(), error };
        let server = StandbyServer::start(socket, arena, Arc::new(waiting), status).map_err(system)?;
        leader.drive_until_serving(core, &clock::boot_time, should_end);
        drop(server);
    }
    match leader.status().standing {
        Standing::Serving => Ok(Leading { membership, leader }),
        Standing::Replaced(_) => Err(DaemonError::RoleChanged),
        Standing::Waiting(_) => Err(DaemonError::Interrupted),
    }
}

/// A writer that waits for its replica.
struct WaitingWriter {
    membership: Membership,
    leader: Arc<LeaderService>,
    /// The journal's end.
    end: JournalPosition,
}

impl StandbyNode for WaitingWriter {
    fn refusal(&self) -> String {
        let Membership { document, node, .. } = &self.membership;
        if let Some(problem @ LinkProblem::MinReplicas { .. }) = self.leader.status().last_problem {
            return format!("node {node} serves no sessions yet: {problem}");
        }
        let replica = document.replica().map_or("its replica".to_owned(), |replica| {
            format!("its replica, node {} at {}, which may have taken over meanwhile", replica.node, replica.address)
        });
        format!(
            "node {node} serves no sessions yet: it waits for {replica}; \
             start that node, or let this one go on alone with 'ashlar node force'"
        )
    }

    fn may_serve_soon(&self) -> bool {
        true
    }

    fn report(&self) -> ClusterReport {
        report_leading(&self.membership, &self.leader.status(), self.end)
    }

    fn resize(&self, _: u64) -> Result<(), String> {
        Err(self.refusal())
    }

    fn run_command(&self, command: &ClusterCommand) -> Result<(), String> {
        match command {
            ClusterCommand::Force => self.leader.order_alone(),
            ClusterCommand::Promote { .. } => Err(is_writer(&self.membership)),
            ClusterCommand::AddReplica { .. } => {
                Err("this node waits for its replica; let it go on alone first, with 'ashlar node force'".into())
            }
        }
    }
}

fn is_writer(membership: &Membership) -> String {
    format!("node {} is the writer already", membership.node)
}

/// Carries out an administrator's command at a writer.
///
/// # Errors
/// A sentence for people.
pub fn run_command(shared: &SharedState, leading: &Leading, command: &ClusterCommand) -> Result<Reply, String> {
    let Leading { membership, leader } = leading;
    match command {
        ClusterCommand::Force => leader.order_alone().map(|()| Reply::Done),
        ClusterCommand::Promote { .. } => Err(is_writer(membership)),
        ClusterCommand::AddReplica { address, replaces } => {
            if *replaces && membership.document.replica().is_some() {
                leader.order_alone()?;
                await_alone(leader)?;
            }
            let invitation = Invitation::issue(membership, &shared.arena, address.clone(), *replaces);
            let invitation = invitation.map_err(|error| error.to_string())?;
            // The next SharedFS has the new document. Sessions wait for it, some tenths of a second.
            shared.role_changed.store(true, Ordering::Release);
            Ok(Reply::Invitation(invitation.to_text()))
        }
    }
}

/// Waits until the order to go on alone is recorded.
fn await_alone(leader: &LeaderService) -> Result<(), String> {
    let until = clock::boot_time() + ALONE_PATIENCE;
    while leader.status().copies != CopiesNeeded::Own {
        if clock::boot_time() >= until {
            return Err("the order to go on alone can't be recorded; see the daemon's log".into());
        }
        std::thread::sleep(ALONE_PAUSE);
    }
    Ok(())
}

impl WriterNode for SharedState {
    fn with_node(&self, work: &mut dyn FnMut(&mut NodeCore)) {
        work(&mut self.lock());
    }

    fn now(&self) -> Duration {
        clock::boot_time()
    }

    fn handle_standing(&self, standing: Standing) {
        if let Standing::Replaced(epoch) = standing {
            tracing::info!(%epoch, "another node has taken over; SharedFS ends, and keeps what it has");
            let source = std::io::Error::other("another node has taken over");
            self.lock().failure.get_or_insert(StoreError::Io { what: "SharedFS may not serve any more", source });
            self.stop();
        }
    }

    fn handle_replicated(&self) {
        self.waiting_syncs.advance_all(self);
        self.replicated.notify_all();
    }

    fn handle_failure(&self, error: StoreError) {
        tracing::error!(%error, "the journal has failed");
        self.lock().failure.get_or_insert(error);
        self.stop();
    }
}
