//! SharedFS: sessions, digest, recovery and leases on one node.
//!
//! Purpose: SharedFS is the one process of a node that opens the shared area. Sessions (LibFS in other processes)
//! append to their own logs. SharedFS grants them leases with state, applies their logs in memory, and commits in
//! batches. It frees inodes and blocks that no session needs any more.
//!
//! Invariants:
//! - Decisions are sans-I/O (`ashlar-lease`) or a plain function of the state (the validation). One mutex guards all of
//!   the state. No thread waits for a session, a disk or a kernel while it holds the mutex.
//! - SharedFS validates and applies a record from one private copy. A session that changes its log meanwhile changes
//!   nothing.
//! - A forged record fences its own session and no other one. Being slow or stopped is no violation.
//! - SharedFS removes a session's log file before its row in the store. So no crash makes a digested log look new.
//! - Killing SharedFS at any instruction loses nothing: identity, leases, inode ranges and credit of a session stand in
//!   memory that SharedFS alone writes and that outlives it.
//!
//! Non-goals: the meaning of updates (`ashlar-update`), media (`ashlar-store`), other nodes.
//!
//! Source: `docs/format-session.md`; Assise §3 (SharedFS).
#![forbid(unsafe_code)]

mod config;
mod connections;
mod digest;
mod error;
mod file_guard;
#[cfg(test)]
mod grant_cache_tests;
mod grant_memory;
mod huge_pages;
mod leading;
mod length_check;
mod log_check;
mod materialise;
mod mount_notifier;
mod node_requests;
mod panics;
mod placeholder;
mod pool_filling;
mod quarantine;
mod recovery;
mod request_slots;
mod retired;
mod retired_files;
mod serve;
mod session_files;
mod session_pool;
mod sessions;
mod shadow_service;
mod shared_state;
mod slot_service;
mod status;
mod supervisor;
#[cfg(test)]
mod test_sessions;
mod user_shares;
mod waiting_syncs;

pub use ashlar_node::journal::ReplicaFault;
pub use config::Config;
pub use error::{DaemonError, SupervisorError};
pub use log_check::{LogFindings, check_logs};
pub use shadow_service::describe_comparison;
pub use supervisor::{DEATH_REPORT, RESTART_EXIT, RETRY_EXIT, ROLE_EXIT, Supervised, supervise};

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use crate::leading::StartingProcess;
use crate::shared_state::Leading;
use ashlar_cluster::{MemberRole, Standing};
use ashlar_member::{Membership, StandbyEnd, run_standby};
use ashlar_metrics::{MetricsServer, StatusSlot};
use ashlar_pmem::{ArenaError, PrivateDirectory};
use ashlar_wire::{BusyWait, Listener, listen_to_all};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

/// Runs SharedFS: opens the arena, recovers, listens, and serves until it must end.
///
/// SIGTERM, SIGINT, a shutdown request or the end of its lingering ends it. Everything is committed then.
///
/// # Errors
/// [`DaemonError`] if the arena or the socket can't be opened, or recovery fails.
pub fn run(config: Config) -> Result<(), DaemonError> {
    let system = |what| move |error| DaemonError::System { what, error };
    panics::confine_panics();
    ashlar_helper::raise_descriptor_limit();
    BusyWait::respect_quota();
    let mut signals = Signals::new([SIGTERM, SIGINT]).map_err(system("cannot watch signals"))?;
    let stop_signals = signals.handle();
    let started = Instant::now();
    let socket = config.socket.clone();
    let arena = Arc::new(recovery::open_arena(&config)?);
    let membership = Membership::open(&arena)?;
    let pending = std::cell::RefCell::new(&mut signals);
    let should_end = || pending.borrow_mut().pending().next().is_some();
    let status = StatusSlot::default();
    let metrics = config.metrics.clone().map(|address| MetricsServer::start(address, status.clone()));
    let _metrics = metrics.transpose().map_err(system("cannot serve metrics"))?;
    if let Some(membership) = membership.clone().filter(|membership| membership.role() != MemberRole::Writer) {
        if membership.role() == MemberRole::Replaced
            && let Err(error) = session_files::fence_all(&arena)
        {
            tracing::error!(%error, "sessions of before the replacement can't be fenced");
        }
        return match run_standby(arena, membership, &socket, &should_end, &status)? {
            StandbyEnd::Stopped => Ok(()),
            StandbyEnd::RoleChanged => Err(DaemonError::RoleChanged),
        };
    }
    let process = StartingProcess { should_end: &should_end, status: &status };
    let shared = match recovery::recover(config, arena, membership, process) {
        Err(DaemonError::Interrupted) => return Ok(()),
        recovered => Arc::new(recovered?),
    };
    let listener = listen(&socket)?;
    let reported = Arc::clone(&shared);
    let _reported = status.fill(Arc::new(move || status::report_status(&reported)));
    let stopper = Arc::clone(&shared);
    let mut threads = digest::start_threads(&shared).map_err(system("cannot start threads"))?;
    let watched = Arc::clone(&shared);
    let (died, dead) = std::sync::mpsc::channel();
    threads.push(std::thread::spawn(move || sessions::watch_thread(&watched, &died)));
    let ender = Arc::clone(&shared);
    threads.push(std::thread::spawn(move || sessions::end_thread(&ender, &dead)));
    let filler = Arc::clone(&shared);
    threads.push(std::thread::spawn(move || pool_filling::fill_thread(&filler)));
    if shared.shadow.is_some() {
        let shadowed = Arc::clone(&shared);
        threads.push(std::thread::spawn(move || shadow_service::shadow_thread(&shadowed)));
    }
    let leading = shared.leading.is_some().then(|| {
        let led = Arc::clone(&shared);
        std::thread::spawn(move || led.leading.as_ref().map_or((), |leading| leading.leader.run(&*led)))
    });
    let guard = Arc::clone(&shared);
    threads.push(std::thread::spawn(move || length_check::check_lengths_thread(&guard)));
    threads.push(std::thread::spawn(move || {
        for _ in signals.forever() {
            tracing::info!("a signal asks for the end");
            stopper.stop();
        }
    }));
    tracing::info!(socket = %socket.display(), startup_ms = started.elapsed().as_millis() as u64, "SharedFS serves");
    let served = serve::serve_connections(&shared, &listener).map_err(system("cannot start threads"));
    shared.stop();
    stop_signals.close();
    for thread in threads {
        // A thread that panicked has logged that, and may have ended the process. The next start repeats its work.
        let _ = thread.join();
    }
    if let (Some(thread), Some(Leading { leader, .. })) = (leading, &shared.leading) {
        leader.leave();
        let _ = thread.join();
    }
    let result = digest::digest_all(&shared);
    drop(listener);
    let standing = shared.leading.as_ref().map(|leading| leading.leader.status().standing);
    if matches!(standing, Some(Standing::Replaced(_))) {
        // Nothing may be committed any more, so the digest has ended with an error.
        return Err(DaemonError::RoleChanged);
    }
    served.and(result.map_err(DaemonError::Failed))?;
    if shared.role_changed.load(Ordering::Acquire) { Err(DaemonError::RoleChanged) } else { Ok(()) }
}

/// Listens at the socket, for all users.
fn listen(socket: &Path) -> Result<Listener, DaemonError> {
    let failed = |error| DaemonError::Socket { path: socket.to_owned(), error };
    if let Some(directory) = socket.parent() {
        PrivateDirectory::open(directory).map_err(ArenaError::from)?;
    }
    listen_to_all(socket).map_err(failed)
}
