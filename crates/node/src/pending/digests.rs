//! Requests that apply logs and wait for commits.

use std::collections::BTreeSet;
use std::time::Duration;

use ashlar_pmem::MediumKind;
use ashlar_store::{MapBlocks, MappedRun, StoreError};
use ashlar_types::{Errno, InodeId, LogPosition, SessionId};
use ashlar_wire::{LEASE_SLOTS, Reply};

use crate::digest::durability::{find_writers, is_uncommitted};
use crate::journal::NodeJournal;
use crate::journal::acts::journal_inodes;
use crate::journal::log_limits::{raise_limit, raise_limit_for_read, recall_room};
use crate::leases::grant::{ENDING, LATER, Patience, report_store_error};
use crate::leases::leasing::Ancestors;
use crate::node_core::NodeCore;
use crate::pending::progress::{Progress, WaitFor, done, ok};
use crate::pending::steps::{ApplyLogs, CommitAll, DigestWait, ReplicationWait};
use crate::records::logs::find_settled;
use crate::sessions::mapped_table::NUMBER_MAX;
use crate::sessions::mapping::{check_shown, try_to_map};
use crate::sessions::session::ServedSession;

/// Inode numbers in one range. A crash loses at most so many of them per session.
pub const RANGE: u64 = 4096;
/// Inode numbers that a process begins with: most make few files or none.
pub const FIRST_RANGE: u64 = 64;
/// Slots of a session's lease table that are kept for leases it asks for.
///
/// The others are for inodes that it makes.
const LEASES_KEPT: u64 = 128;
const _: () = assert!(FIRST_RANGE <= RANGE && RANGE <= crate::sessions::session_page::RANGE_MAX);
/// How often the node commits other sessions' writes to map a file.
const TRIES: u32 = 3;

/// A session asks for the digest of its log, and waits for the commit.
#[derive(Debug)]
pub enum DigestTask {
    /// Nothing is done yet.
    Begin,
    /// The log is applied up to the position that was settled.
    Apply(LogPosition, ApplyLogs),
    /// A commit is awaited.
    Commit(DigestWait),
}

impl DigestTask {
    /// Goes on.
    pub fn advance(&mut self, node: &mut NodeCore, id: SessionId) -> Progress<Result<Reply, Errno>> {
        loop {
            match self {
                Self::Begin => {
                    let settled = ok!(find_settled(node, id).ok_or(Errno::EIO));
                    *self = Self::Apply(settled, ApplyLogs::of(id));
                }
                Self::Apply(settled, apply) => {
                    done!(apply.advance(node));
                    ok!(node.live(id).ok_or(Errno::EIO));
                    let target = (*settled).min(node.store.applied(id));
                    *self = Self::Commit(DigestWait::for_commit(id, target));
                }
                Self::Commit(wait) => return Progress::Done(done!(wait.advance(node)).map(Reply::Committed)),
            }
        }
    }
}

/// How long a session that may not append further pauses before it is tried again.
const LIMIT_PAUSE: Duration = Duration::from_millis(20);

/// A session asks that appends to its log may go up to a position.
#[derive(Debug)]
pub struct LimitTask {
    upto: LogPosition,
    reads: bool,
    stage: LimitStage,
}

#[derive(Debug)]
enum LimitStage {
    Begin,
    /// Its own log is applied: frames need less room than what may be appended.
    Apply(ApplyLogs),
    /// Only commits make room now. Other sessions have given back what they did not use after so many of them.
    Wait(Option<u64>),
}

impl LimitTask {
    /// Lets appends go up to a position. `reads` says that a read needs it, which changes nothing.
    pub fn new(upto: LogPosition, reads: bool) -> Self {
        Self { upto, reads, stage: LimitStage::Begin }
    }

    /// Goes on. The result is `EINVAL` for a position that no append needs, `EIO` if the shared area has failed, or
    /// [`ENDING`].
    pub fn advance(&mut self, node: &mut NodeCore, id: SessionId) -> Progress<Result<Reply, Errno>> {
        loop {
            let session = ok!(node.live(id).ok_or(Errno::EIO));
            if self.upto > node.store.applied(id).plus(2 * session.log.capacity()) {
                return Progress::Done(Err(Errno::EINVAL));
            }
            if raise_limit(node, id, self.upto) || self.reads && raise_limit_for_read(node, id, self.upto) {
                return Progress::Done(Ok(Reply::Done));
            }
            if node.failure.is_some() {
                return Progress::Done(Err(Errno::EIO));
            }
            if node.ending {
                return Progress::Done(Err(ENDING));
            }
            match &mut self.stage {
                LimitStage::Begin => self.stage = LimitStage::Apply(ApplyLogs::of(id)),
                LimitStage::Apply(apply) => {
                    done!(apply.advance(node));
                    self.stage = LimitStage::Wait(None);
                }
                LimitStage::Wait(recalled) if *recalled != Some(node.commits.ended) => {
                    *recalled = Some(node.commits.ended);
                    recall_room(node, id);
                }
                LimitStage::Wait(_) => {
                    node.request_commit();
                    return Progress::Wait(WaitFor::Digests, Some(node.now.since_boot + LIMIT_PAUSE));
                }
            }
        }
    }
}

/// A request waits for what is committed; all logs may have to be applied first.
#[derive(Debug)]
pub enum SyncTask {
    /// All that all sessions have done.
    All(ApplyLogs),
    /// Updates of an inode by other sessions, with the names that lead to it.
    Inode {
        /// The inode.
        inode: InodeId,
        /// Positions of other sessions that must be committed too.
        positions: Vec<(SessionId, LogPosition)>,
        /// Sessions whose logs are applied.
        applied: BTreeSet<SessionId>,
        /// The log that is being applied.
        apply: Option<(SessionId, ApplyLogs)>,
    },
    /// Applied updates of sessions, up to these positions.
    Positions(Vec<(SessionId, LogPosition)>),
    /// A commit is awaited.
    Commit(CommitAll),
    /// The journal is awaited, in all copies that count.
    Replication(ReplicationWait),
}

impl SyncTask {
    /// Makes persistent what other sessions than `id` have done to an inode, and their updates up to `positions`.
    ///
    /// With a journal that answers, what `id` itself has done counts too: its own log is in one copy alone.
    pub fn of_inode(node: &NodeCore, id: SessionId, inode: InodeId, positions: Vec<(SessionId, LogPosition)>) -> Self {
        if node.journal.as_ref().is_some_and(NodeJournal::answers_syncs) {
            let apply = Some((id, ApplyLogs::of(id)));
            return Self::Inode { inode, positions, applied: BTreeSet::new(), apply };
        }
        Self::Inode { inode, positions, applied: BTreeSet::from([id]), apply: None }
    }

    /// Waits until all that is applied is durable: in the journal if it answers, or in the store.
    fn of_applied(node: &NodeCore) -> Self {
        match ReplicationWait::begin(node) {
            Some(wait) => Self::Replication(wait),
            None => Self::Commit(CommitAll::default()),
        }
    }

    /// Goes on for the asking session.
    pub fn advance(&mut self, node: &mut NodeCore, id: SessionId) -> Progress<Result<(), Errno>> {
        loop {
            match self {
                Self::All(apply) => {
                    done!(apply.advance(node));
                    *self = Self::of_applied(node);
                }
                Self::Inode { inode, positions, applied, apply } => {
                    if let Some((writer, logs)) = apply {
                        done!(logs.advance(node));
                        applied.insert(*writer);
                        positions.push((*writer, node.store.applied(*writer)));
                        *apply = None;
                    }
                    // A log may lead to further ones: it makes the inode, or moves it below another directory.
                    let writers = ok!(find_writers(&node.store, &node.leasing, &node.sessions, *inode)
                        .map_err(|error| report_store_error(&error)));
                    match writers.into_iter().find(|writer| !applied.contains(writer)) {
                        Some(writer) => *apply = Some((writer, ApplyLogs::of(writer))),
                        None => {
                            let ancestors = Ancestors(&node.store);
                            positions.extend(node.leasing.manager.path_dependencies(id, *inode, &ancestors));
                            *self = Self::Positions(std::mem::take(positions));
                        }
                    }
                }
                Self::Positions(positions) => {
                    if !is_uncommitted(&node.store, positions) {
                        return Progress::Done(Ok(()));
                    }
                    *self = Self::of_applied(node);
                }
                Self::Commit(commit) => return commit.advance(node),
                Self::Replication(wait) => return wait.advance(node),
            }
        }
    }
}

/// A session asks for a range of inode numbers.
#[derive(Debug)]
pub enum RangeTask {
    /// Nothing is done yet.
    Begin,
    /// The log is applied and committed, so that an old range may be replaced.
    Apply(ApplyLogs),
    /// As above.
    Commit(CommitAll),
    /// The range can be granted.
    Grant,
}

impl RangeTask {
    /// Goes on. The result is `ENOSPC` if the arena's file system has no room for the lease table.
    pub fn advance(&mut self, node: &mut NodeCore, id: SessionId) -> Progress<Result<Reply, Errno>> {
        loop {
            match self {
                Self::Begin => {
                    let needs_commit = ok!(node.live(id).ok_or(Errno::EIO)).ranges.needs_commit();
                    *self = if needs_commit { Self::Apply(ApplyLogs::of(id)) } else { Self::Grant };
                }
                Self::Apply(apply) => {
                    done!(apply.advance(node));
                    *self = Self::Commit(CommitAll::default());
                }
                Self::Commit(commit) => {
                    ok!(done!(commit.advance(node)));
                    ok!(node.sessions.get_mut(&id).ok_or(Errno::EIO)).ranges.record_commit();
                    *self = Self::Grant;
                }
                Self::Grant => return Progress::Done(grant_range(node, id)),
            }
        }
    }
}

fn grant_range(node: &mut NodeCore, id: SessionId) -> Result<Reply, Errno> {
    // A new inode that other sessions see may get a lease of its own, for which no session asks. So a session gets no
    // more numbers than have room for that.
    let free = |node: &NodeCore| {
        let left = |session: &ServedSession| u64::from(session.lease_room - session.lease_top);
        node.live(id).map(|session| if session.lease_room == LEASE_SLOTS { u64::MAX } else { left(session) })
    };
    if free(node).ok_or(Errno::EIO)? <= LEASES_KEPT + FIRST_RANGE {
        let room = node.live(id).ok_or(Errno::EIO)?.lease_room;
        node.lease_tables().make_room(id, room).map_err(|error| error.raw_os_error().map_or(Errno::EIO, Errno))?;
    }
    let count = free(node).ok_or(Errno::EIO)?.saturating_sub(LEASES_KEPT).clamp(1, RANGE);
    let range = node.store.allocate_inodes(count).map_err(|error| {
        tracing::error!(%error, "no inode numbers");
        if matches!(error, StoreError::NumbersExhausted { .. }) { Errno::ENOSPC } else { Errno::EIO }
    })?;
    let first = InodeId(range.start);
    journal_inodes(node, id, first, count);
    let session = node.sessions.get_mut(&id).filter(|session| session.fenced.is_none()).ok_or(Errno::EIO)?;
    session.ranges.add(&session.page, first, count);
    Ok(Reply::Inodes(first, count))
}

/// The blocks that a session wants to map.
#[derive(Clone, Copy, Debug)]
pub struct WantedMapping {
    /// The file.
    pub inode: InodeId,
    /// The first block.
    pub first: u64,
    /// How many blocks.
    pub blocks: u64,
    /// The number under which they are mapped.
    pub number: u32,
    /// Whether the mapping follows writes.
    pub follows: bool,
}

/// A session maps blocks of a file.
#[derive(Debug)]
pub struct MapTask {
    wanted: WantedMapping,
    tries: u32,
    stage: MapStage,
}

#[derive(Debug)]
enum MapStage {
    Apply(ApplyLogs),
    Try,
    Commit(CommitAll),
}

impl MapTask {
    /// Maps blocks.
    pub fn new(id: SessionId, wanted: WantedMapping) -> Self {
        Self { wanted, tries: 0, stage: MapStage::Apply(ApplyLogs::of(id)) }
    }

    /// Goes on.
    pub fn advance(
        &mut self,
        node: &mut NodeCore,
        id: SessionId,
        patience: Patience,
    ) -> Progress<Result<Reply, Errno>> {
        let WantedMapping { inode, first, blocks, number, follows } = self.wanted;
        let end = first.checked_add(blocks).filter(|end| *end > first && number <= NUMBER_MAX);
        let end = ok!(end.ok_or(Errno::EINVAL));
        let nothing = || Progress::Done(Ok(Reply::Mapped(Vec::new())));
        loop {
            match &mut self.stage {
                MapStage::Apply(apply) => {
                    match apply.advance(node) {
                        Progress::Done(()) => {}
                        Progress::More if patience == Patience::None => return Progress::Done(Err(LATER)),
                        progress => done!(progress),
                    }
                    self.stage = MapStage::Try;
                }
                MapStage::Try => {
                    self.tries += 1;
                    match ok!(try_to_map(node, id, inode, (number, follows), first..end)) {
                        MapBlocks::Done(runs) => {
                            return Progress::Done(Ok(Reply::Mapped(runs.iter().map(MappedRun::extent).collect())));
                        }
                        // A commit takes longer than a mapping by the kernel.
                        MapBlocks::CommitFirst if node.limits.medium == MediumKind::Disk => return nothing(),
                        MapBlocks::CommitFirst if patience == Patience::None => return Progress::Done(Err(LATER)),
                        MapBlocks::CommitFirst if self.tries < TRIES => {
                            self.stage = MapStage::Commit(CommitAll::default());
                        }
                        MapBlocks::CommitFirst | MapBlocks::Impossible => return nothing(),
                    }
                }
                MapStage::Commit(commit) => {
                    ok!(done!(commit.advance(node)));
                    self.stage = MapStage::Try;
                }
            }
        }
    }
}

/// A session shows what it has written to a file in the file's mappings.
#[derive(Debug)]
pub struct ShowTask {
    inode: InodeId,
    stage: ShowStage,
}

#[derive(Debug)]
enum ShowStage {
    Apply(ApplyLogs),
    Commit(CommitAll),
}

impl ShowTask {
    /// Shows the writes to a file.
    pub fn new(id: SessionId, inode: InodeId) -> Self {
        Self { inode, stage: ShowStage::Apply(ApplyLogs::of(id)) }
    }

    /// Goes on.
    pub fn advance(&mut self, node: &mut NodeCore, id: SessionId) -> Progress<Result<(), Errno>> {
        loop {
            match &mut self.stage {
                ShowStage::Apply(apply) => {
                    done!(apply.advance(node));
                    ok!(check_shown(node.tree(), id, self.inode));
                    if !node.store.lags(self.inode) {
                        return Progress::Done(Ok(()));
                    }
                    self.stage = ShowStage::Commit(CommitAll::default());
                }
                ShowStage::Commit(commit) => {
                    ok!(done!(commit.advance(node)));
                    // For the case that there was nothing to commit. A running check of the arena makes mappings lag
                    // until it has ended; no request waits for that.
                    node.store.show_lagging();
                    return Progress::Done(Ok(()));
                }
            }
        }
    }
}
