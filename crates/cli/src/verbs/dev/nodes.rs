//! Makes the nodes of a cluster on this machine, starts their daemons, and removes their arenas.

use std::fs;
use std::io::ErrorKind;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ashlar_member::{Invitation, found_cluster};
use ashlar_wire::{ClusterReport, NodeStanding, StatusReply};

use super::network::spawn_in;
use super::processes::{has_daemon, mounts_of};
use super::record::{ClusterRecord, NodeRecord};
use crate::arguments::DevUpArguments;
use crate::error::{CliError, DevError};
use crate::output::progress;
use crate::system::arena::{ArenaLocation, DAEMON_LOG};
use crate::system::background::{daemon_status, first_error, open_log, this_program};

/// How often a daemon is asked that starts.
const PAUSE: Duration = Duration::from_millis(20);
/// How long the replica may take to come into sync with an empty writer.
const SYNC_PATIENCE: Duration = Duration::from_secs(60);

/// Makes the arenas: the first node founds the cluster, the second one joins it.
pub fn make_arenas(cluster: &ClusterRecord, arguments: &DevUpArguments) -> Result<(), CliError> {
    let [first, second] = &cluster.nodes[..] else {
        return Err(DevError::WrongCount(cluster.nodes.len() as u16).into());
    };
    let place = ArenaLocation::at(first.arena.clone())?;
    place.prepare(Some(arguments.size), false)?;
    let arena = Arc::new(place.open()?);
    found_cluster(&arena, first.address.clone(), !arguments.no_tls, arguments.min_replicas)?;
    let invitation = Invitation::issue_at_rest(&arena, second.address.clone(), false)?;
    let place = ArenaLocation::at(second.arena.clone())?;
    place.make_directory()?;
    Ok(invitation.accept(place.directory(), arguments.size.0, false)?)
}

/// Starts a node's daemon in its namespace, and waits until it answers.
pub fn start_daemon(node: &NodeRecord) -> Result<StatusReply, CliError> {
    if has_daemon(node) {
        return Err(DevError::Runs(node.number).into());
    }
    let place = ArenaLocation::at(node.arena.clone())?;
    let (log, said_before) = open_log(&place.open_directory()?, DAEMON_LOG)?;
    let mut command = Command::new(this_program()?);
    command.args(["daemon", "--background", "--arena"]).arg(place.directory());
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
    let started = spawn_in(node.namespace.as_deref(), &mut command);
    let mut child = started.map_err(CliError::system(format!("starting the daemon of node {}", node.number)))?;
    loop {
        // Recovery of long logs takes time: as long as the daemon lives, it is starting.
        if let Ok(Some(status)) = daemon_status(&place) {
            return Ok(status);
        }
        if let Some(status) = child.try_wait().map_err(CliError::system("waiting for the daemon"))? {
            let reason =
                first_error(&place.daemon_log(), said_before).unwrap_or_else(|| format!("it ended with {status}"));
            return Err(CliError::DaemonStart { reason, log: place.daemon_log() });
        }
        std::thread::sleep(PAUSE);
    }
}

/// Returns the state of the cluster as a node knows it; `None` if its daemon does not answer.
pub fn report_of(node: &NodeRecord) -> Option<ClusterReport> {
    let place = ArenaLocation::at(node.arena.clone()).ok()?;
    daemon_status(&place).ok()?.and_then(|status| status.cluster).map(|cluster| *cluster)
}

/// Waits until the writer serves, and its replica is in sync.
pub fn wait_for_sync(cluster: &ClusterRecord) -> Result<(), CliError> {
    let spinner = progress::spinner("waiting until the replica is in sync");
    let deadline = Instant::now() + SYNC_PATIENCE;
    let result = loop {
        let reports: Vec<_> = cluster.nodes.iter().filter_map(report_of).collect();
        if reports.iter().any(|report| report.standing == NodeStanding::Serving && report.is_linked && report.in_sync) {
            break Ok(());
        }
        if Instant::now() > deadline {
            let problems = reports.into_iter().flat_map(|report| report.problems);
            let problem = problems.last().unwrap_or_else(|| "no node says why".into());
            let (name, seconds) = (cluster.name.clone(), SYNC_PATIENCE.as_secs());
            break Err(DevError::NotInSync { name, seconds, problem }.into());
        }
        std::thread::sleep(PAUSE);
    };
    spinner.finish_and_clear();
    result
}

/// Checks that nothing stands where an arena is to be made. An empty directory may stand there.
pub fn check_free(arena: &Path) -> Result<(), CliError> {
    let is_free = match fs::read_dir(arena) {
        Ok(mut entries) => entries.next().is_none(),
        Err(error) => error.kind() == ErrorKind::NotFound,
    };
    if is_free { Ok(()) } else { Err(DevError::ArenaTaken(arena.to_owned()).into()) }
}

/// Unmounts all mounts of an arena whose processes were killed.
pub fn remove_mounts(arena: &Path) -> Result<(), CliError> {
    for record in mounts_of(arena) {
        match ashlar_fuse::unmount(&record.directory, true) {
            Ok(()) | Err(ashlar_fuse::MountError::NotMounted { .. }) => record.remove(),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Removes an arena, made whole or in part.
pub fn remove_arena(arena: &Path) -> Result<(), CliError> {
    match fs::remove_dir_all(arena) {
        // A file system that is mounted on it stays: the cluster has not made it.
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::ResourceBusy) => Ok(()),
        removed => removed.map_err(CliError::system(format!("removing {}", arena.display()))),
    }
}
