//! The process of a node that serves no sessions: a replica, or a node that was replaced.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use ashlar_cluster::MemberRole;
use ashlar_cluster::chain::ChainTiming;
use ashlar_fabric::Fabric;
use ashlar_metrics::StatusSlot;
use ashlar_node::journal::Replica;
use ashlar_pmem::Arena;
use ashlar_processes::clock;
use ashlar_replica::mirror::{CopyService, ReplicaService, adopt_copy};
use ashlar_replica::{ReplicaError, open_copy};
use ashlar_store::StoreError;

use crate::error::MemberError;
use crate::membership::Membership;
use crate::standby::{Standby, StandbyWork};
use crate::standby_server::{StandbyNode, StandbyServer};

/// How often the process checks whether it is to end.
const END_CHECK: Duration = Duration::from_millis(200);

/// How long to wait for a thread that still shows the state of a service.
const CLOSE_PAUSE: Duration = Duration::from_millis(1);

/// Why a node that serves no sessions has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StandbyEnd {
    /// A signal asked for it.
    Stopped,
    /// The node's role has changed: it must start again.
    RoleChanged,
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
    status: &StatusSlot,
) -> Result<StandbyEnd, MemberError> {
    let is_replica = membership.role() == MemberRole::Replica;
    let fabric = is_replica.then(|| membership.start_fabric()).transpose()?;
    let standby = Arc::new(Standby::new(membership, Arc::clone(&arena)));
    let server = StandbyServer::start(socket, &arena, Arc::clone(&standby) as Arc<dyn StandbyNode>, status)
        .map_err(|error| MemberError::System { what: "cannot listen at the socket", error })?;
    tracing::info!(role = standby.membership.role().name(), "the node serves no sessions");
    let (follower, followed) = (Arc::clone(&standby), Arc::clone(&arena));
    let thread = fabric.map(|fabric| std::thread::spawn(move || follow_writer(&follower, &followed, &fabric)));
    let is_over = || should_end() || thread.as_ref().is_some_and(|thread| thread.is_finished());
    standby.await_restart(END_CHECK, &is_over);
    // A promotion ends the work first, and then changes the document. The server ends after the command that it serves.
    drop(server);
    let must_restart = standby.must_restart();
    standby.end_work();
    let mut is_superseded = false;
    if let Some(Ok(result)) = thread.map(|thread| thread.join()) {
        is_superseded = result?;
    }
    Ok(if must_restart || is_superseded { StandbyEnd::RoleChanged } else { StandbyEnd::Stopped })
}

/// Follows the writer, and takes a copy of the whole file system whenever it must. Returns whether another node has
/// taken over from the writer.
fn follow_writer(standby: &Standby, arena: &Arc<Arena>, fabric: &Arc<dyn Fabric>) -> Result<bool, MemberError> {
    let Membership { document, .. } = &standby.membership;
    while !standby.is_ending() {
        match open_copy(arena, document.cluster, document.writer().node) {
            Ok(replica) => match follow_frames(standby, fabric, replica)? {
                FollowEnd::Ended => return Ok(false),
                FollowEnd::Superseded => return Ok(true),
                FollowEnd::NeedsCopy => take_copy(standby, arena, fabric)?,
            },
            Err(ReplicaError::Store(StoreError::Copying)) => take_copy(standby, arena, fabric)?,
            Err(error) => return Err(error.into()),
        }
    }
    Ok(false)
}

/// Why a replica takes no more frames.
enum FollowEnd {
    /// It was asked to end.
    Ended,
    /// Another node has taken over from its writer.
    Superseded,
    /// The whole file system must be copied. The store is closed.
    NeedsCopy,
}

/// Takes frames, and applies them.
fn follow_frames(standby: &Standby, fabric: &Arc<dyn Fabric>, replica: Replica) -> Result<FollowEnd, MemberError> {
    let Membership { document, files, .. } = &standby.membership;
    let (state, timing, now) = (files.hard_state()?, ChainTiming::default(), clock::boot_time());
    let (fabric, files) = (Arc::clone(fabric), files.clone());
    let mut service = Arc::new(ReplicaService::new(fabric, files, document, state, replica, timing, now));
    if !standby.begin_work(StandbyWork::Follow(Arc::clone(&service))) {
        return Ok(FollowEnd::Ended);
    }
    let applier = Arc::clone(&service);
    let applier = std::thread::spawn(move || applier.run_applier());
    let ended = service.run_link(&clock::boot_time);
    service.end();
    // If it panicked, it has logged that, and the process ends.
    let _ = applier.join();
    ended.map_err(MemberError::Failed)?;
    if !service.needs_copy() {
        let is_superseded = service.status().superseded.is_some();
        return Ok(if is_superseded { FollowEnd::Superseded } else { FollowEnd::Ended });
    }
    standby.begin_work(StandbyWork::None);
    // A thread that shows the state may hold it for a moment.
    while Arc::get_mut(&mut service).is_none() {
        std::thread::sleep(CLOSE_PAUSE);
    }
    Ok(FollowEnd::NeedsCopy)
}

/// Takes a copy of the whole file system, until it is made or the process ends.
fn take_copy(standby: &Standby, arena: &Arc<Arena>, fabric: &Arc<dyn Fabric>) -> Result<(), MemberError> {
    let Membership { document, files, .. } = &standby.membership;
    let (state, timing, now) = (files.hard_state()?, ChainTiming::default(), clock::boot_time());
    let (fabric, files, arena) = (Arc::clone(fabric), files.clone(), Arc::clone(arena));
    let service = Arc::new(CopyService::new(fabric, files, document, state, arena, timing, now));
    if standby.begin_work(StandbyWork::Copy(Arc::clone(&service))) {
        service.run(&clock::boot_time).map_err(MemberError::Failed)?;
    }
    Ok(())
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
