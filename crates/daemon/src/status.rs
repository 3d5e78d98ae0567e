//! Answers requests of the command line.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use ashlar_member::report_leading;
use ashlar_node::NodeCore;
use ashlar_node::digest::freed_blocks::take_unreleased_blocks;
use ashlar_node::pending::{NodeAnswer, NodeRequest, RequestTerms};
use ashlar_node::space::credit::space_of_all;
use ashlar_store::StoreError;
use ashlar_types::{BLOCK_BYTES, Errno, JournalPosition};
use ashlar_wire::{FsckReply, Reply, Request, StatusReply, is_administrator};

use crate::leading::run_command;
use crate::shadow_service;
use crate::shared_state::{SharedState, StateGuard};

/// How long SharedFS tries to empty a segment of a shrinking arena, and how often.
const PATIENCE: Duration = Duration::from_secs(3);
const PAUSE: Duration = Duration::from_millis(50);

/// Answers a request of the command line.
///
/// Any user may ask for the status; all else is for root and the user that runs SharedFS.
pub fn answer_command(shared: &SharedState, socket: impl AsFd, request: &Request) -> Result<Reply, Errno> {
    if matches!(request, Request::Status) {
        return Ok(Reply::Status(Box::new(report_status(shared))));
    }
    if !is_administrator(socket)? {
        return Err(Errno::EPERM);
    }
    match request {
        Request::Fsck => check_arena(shared).map(Reply::Fsck),
        Request::SetQuota { key, limits } => ask(shared, NodeRequest::SetQuota(*key, *limits)),
        Request::Quotas => ask(shared, NodeRequest::Quotas),
        Request::CompareShadow { directory } => shadow_service::compare_trees(shared, directory).map(Reply::Compared),
        Request::Resize { bytes } => resize_arena(shared, *bytes).map(|()| Reply::Done),
        Request::Cluster(command) => {
            let leading = shared.leading.as_ref().ok_or(Errno::ENXIO)?;
            Ok(run_command(shared, leading, command).unwrap_or_else(Reply::Refused))
        }
        Request::Shutdown => {
            let busy = shared.lock().sessions.values().any(|session| !session.is_ending);
            if busy {
                return Err(Errno::EBUSY);
            }
            shared.stop();
            Ok(Reply::Done)
        }
        _ => Err(Errno::EPROTO),
    }
}

fn ask(shared: &SharedState, request: NodeRequest) -> Result<Reply, Errno> {
    match shared.lock().serve_request(request, RequestTerms::OWN)? {
        NodeAnswer::Reply(answer) => Ok(answer.reply),
        _ => Err(Errno::EIO),
    }
}

/// Returns the status of SharedFS, for the command line and for metrics.
pub fn report_status(shared: &SharedState) -> StatusReply {
    // The link's thread locks its own state, and then the node.
    let leading = shared.leading.as_ref().map(|leading| (leading, leading.leader.status()));
    let state = shared.lock();
    let end = state.journal.as_ref().map_or(JournalPosition(0), |journal| journal.mark().position);
    let summary = shared.arena.summary();
    let medium = shared.arena.medium();
    let mut counters = state.counters.list();
    counters.extend(state.leasing.counters());
    counters.push(("huge_pages_waiting".to_owned(), crate::huge_pages::count_waiting(&state)));
    let sessions = state.sessions.values().map(|session| session.status(state.store.committed(session.id)));
    StatusReply {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        pid: std::process::id(),
        uptime_seconds: shared.started.elapsed().as_secs(),
        arena: shared.arena.dir().display().to_string(),
        medium: medium.label().to_owned(),
        arena_bytes: summary.size_bytes,
        space: space_of_all(&state.store, &state.sessions, None),
        sessions: sessions.collect(),
        counters,
        cluster: leading.map(|(leading, status)| Box::new(report_leading(&leading.membership, &status, end))),
    }
}

/// Checks the last committed state while sessions go on.
fn check_arena(shared: &SharedState) -> Result<FsckReply, Errno> {
    let failed = |error: StoreError| {
        tracing::error!(%error, "the check failed");
        Errno::EIO
    };
    let checker = {
        let mut state = shared.lock();
        state.perform(NodeRequest::Commit)?;
        state.store.checker().map_err(failed)?
    };
    let report = checker.run(&mut |_| ()).map_err(failed)?;
    let counts = [
        ("inodes", report.counts.inodes),
        ("directories", report.counts.directories),
        ("entries", report.counts.entries),
        ("blocks", report.counts.blocks),
        ("bytes", report.counts.bytes),
    ];
    // A fenced session is no damage: its forged records are kept out, and `status` shows it.
    let problems = report.problems.iter().map(ToString::to_string).collect();
    Ok(FsckReply { counts: counts.map(|(name, count)| (name.to_owned(), count)).to_vec(), problems })
}

fn to_errno(error: &StoreError) -> Errno {
    tracing::error!(%error, "the arena can't be resized");
    match error {
        StoreError::FullBlocks { .. } | StoreError::FullMetadata { .. } => Errno::ENOSPC,
        StoreError::CommitUnderWay => Errno::EAGAIN,
        StoreError::Mapped(_) => Errno::EBUSY,
        _ => Errno::EIO,
    }
}

/// Grows by new segments, or empties the last ones and gives them back.
fn resize_arena(shared: &SharedState, bytes: u64) -> Result<(), Errno> {
    let resized = shared.arena.resize(bytes).map_err(|error| {
        tracing::error!(%error, "the arena can't be resized");
        match error {
            ashlar_pmem::ArenaError::NoSpace { .. } => Errno::ENOSPC,
            ashlar_pmem::ArenaError::TooSmall { .. } | ashlar_pmem::ArenaError::TooLarge { .. } => Errno::EINVAL,
            _ => Errno::EIO,
        }
    })?;
    let mut state = shared.lock();
    if let Some(shadow) = &shared.shadow {
        shadow.lock().grow(&shared.arena).map_err(|error| to_errno(&error))?;
    }
    for segment in resized.added {
        state.store.add_segment(segment).map_err(|error| to_errno(&error))?;
    }
    for segment in resized.surplus {
        match empty_when_freed(shared, state, segment.number) {
            Ok(next) => state = next,
            Err(errno) => {
                // The size is the space that is left, not the requested one.
                let left: u64 = shared.arena.segments().iter().map(|left| u64::from(left.blocks) * BLOCK_BYTES).sum();
                if let Err(error) = shared.arena.resize(left) {
                    tracing::error!(%error, "the arena's size can't be noted");
                }
                return Err(errno);
            }
        }
    }
    Ok(())
}

/// Empties a segment and gives it back.
///
/// If the other segments have no room for its blocks, this tries again for a while. Blocks that sessions have removed
/// may not be free yet, and further removals free more; a commit may be under way.
fn empty_when_freed<'a>(
    shared: &'a SharedState,
    mut state: StateGuard<'a>,
    number: u32,
) -> Result<StateGuard<'a>, Errno> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        state.perform(NodeRequest::Reclaim)?;
        let NodeCore { store, sessions, .. } = &mut **state;
        take_unreleased_blocks(store, sessions);
        match empty_segment(shared, &mut state, number) {
            Ok(()) => return Ok(state),
            Err(errno) => {
                state.store.keep_segment(number);
                if Instant::now() > deadline || !matches!(errno, Errno::ENOSPC | Errno::EAGAIN) {
                    return Err(errno);
                }
            }
        }
        state.unlocked(|| std::thread::sleep(PAUSE));
    }
}

/// Empties a segment and gives it back.
///
/// Another segment may have its number later, so sessions begin a new segment version. None can ask for a segment
/// before this is done, since that takes the lock.
fn empty_segment(shared: &SharedState, state: &mut StateGuard<'_>, number: u32) -> Result<(), Errno> {
    // Sessions would not learn of a commit that the store does by itself in the next step, or in the last: leave it
    // none.
    shared.commit(state).map_err(|error| to_errno(&error))?;
    let moved = state.store.retire_segment(number).map_err(|error| to_errno(&error))?;
    state.perform(NodeRequest::TakeLeases(moved))?;
    state.perform(NodeRequest::Commit)?;
    shared.commit(state).map_err(|error| to_errno(&error))?;
    state.store.remove_segment(number).map_err(|error| to_errno(&error))?;
    state.sessions.values().for_each(|session| session.control.raise_segment_version());
    shared.arena.remove_segment(number).map_err(|error| {
        tracing::error!(number, %error, "an empty segment can't be removed");
        Errno::EIO
    })
}
