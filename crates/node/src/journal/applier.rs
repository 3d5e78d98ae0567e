//! Applies frames to a store, as a replica or a start does. It judges nothing.

use std::collections::BTreeMap;

use ashlar_journal::{
    BatchRecord, BatchVerdict, CopyError, FrameBody, FrameError, JournalError, JournalOpenError, LogRecords, OwnAct,
    SessionBegan, StoredFrame, read_records,
};
use ashlar_store::{JournalMark, Store, StoreError};
use ashlar_types::{Errno, InodeId, LogPosition, NodeNumber, SessionId, Timestamp};
use ashlar_update::{DecodeError, Update, UpdateKind, join};
use ashlar_wire::Credit;
use thiserror::Error;

use crate::records::batch::for_each_stretch;

/// Why a frame can't be applied.
#[derive(Debug, Error)]
pub enum ReplayError {
    /// The memory holds no journal that this node may read.
    #[error(transparent)]
    Open(#[from] JournalOpenError),
    /// The journal can't be read.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// Bytes from another copy are not the next frames.
    #[error(transparent)]
    Copy(#[from] CopyError),
    /// A copy has applied frames that the journal does not have, or lacks frames that it no longer has.
    #[error("the copy does not belong to this journal; it must be made anew")]
    OtherCopy,
    /// A frame is none that this program writes.
    #[error("a frame of the journal can't be read: {0}")]
    Frame(#[from] FrameError),
    /// A record in a frame is no update.
    #[error("a record in the journal can't be read: {0}")]
    Record(#[from] DecodeError),
    /// The store refuses an update that the writing node has applied.
    #[error("an update of the journal can't be applied: {0}")]
    Store(#[from] StoreError),
    /// The batch may need room that only a commit makes free. Nothing has changed.
    #[error("the updates applied so far must be committed first")]
    CommitFirst,
    /// The frames contradict each other.
    #[error("the journal contradicts itself: {0}")]
    Contradiction(&'static str),
    /// The frame is of a kind that one writing node alone does not need.
    #[error("the journal has a frame of several nodes")]
    SeveralNodes,
}

impl ReplicaFault {
    /// Returns the fault of this name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Some(match name {
            "kept-inode" => Self::KeptInode,
            "batch-border" => Self::BatchBorder,
            "access-time" => Self::AccessTime,
            "refused-record" => Self::RefusedRecord,
            _ => return None,
        })
    }
}

impl From<ReplayError> for Errno {
    fn from(_: ReplayError) -> Self {
        Self::EIO
    }
}

/// A fault that a test plants in a replica: the comparison of trees must find it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplicaFault {
    /// It frees an inode that lost its last name and is to be kept.
    KeptInode,
    /// It ends a batch one record early.
    BatchBorder,
    /// It leaves out an access time.
    AccessTime,
    /// It applies a record that was refused.
    RefusedRecord,
}

/// A session's batches since its last verdict.
#[derive(Debug, Default)]
struct PendingBatch {
    from: LogPosition,
    bytes: Vec<u8>,
    /// Its last frame is there.
    is_whole: bool,
}

/// Applies the frames of one node's journal, in their order.
#[derive(Debug)]
pub struct FrameApplier {
    node: NodeNumber,
    mark: JournalMark,
    batches: BTreeMap<SessionId, PendingBatch>,
    /// The cost of the records applied so far, by session.
    costs: BTreeMap<SessionId, Credit>,
    joined: Vec<u8>,
    /// The store may be committed between two frames.
    may_commit: bool,
    fault: Option<ReplicaFault>,
}

impl FrameApplier {
    /// Begins where the store has applied the node's journal.
    #[must_use]
    pub fn new(store: &Store, node: NodeNumber) -> Self {
        let mark = store.journal_mark(node).unwrap_or_default();
        let (batches, costs, joined) = (BTreeMap::new(), BTreeMap::new(), Vec::new());
        Self { node, mark, batches, costs, joined, may_commit: false, fault: None }
    }

    /// Begins as [`Self::new`], for a store that has commits of its own.
    ///
    /// The writing node may have committed between two frames where this store has not, and used what that set free.
    #[must_use]
    pub fn with_commits(store: &Store, node: NodeNumber) -> Self {
        Self { may_commit: true, ..Self::new(store, node) }
    }

    /// Returns how far the journal is applied.
    #[must_use]
    pub fn mark(&self) -> JournalMark {
        self.mark
    }

    /// Returns the cost of the records that were applied, by session.
    #[must_use]
    pub fn into_costs(self) -> BTreeMap<SessionId, Credit> {
        self.costs
    }

    /// Returns the sessions with records that have no verdict yet, and where these begin.
    pub fn unjudged(&self) -> impl Iterator<Item = (SessionId, LogPosition)> + '_ {
        self.batches.iter().map(|(id, batch)| (*id, batch.from))
    }

    /// Plants a fault.
    pub fn plant(&mut self, fault: ReplicaFault) {
        self.fault = Some(fault);
    }

    /// Applies a frame.
    ///
    /// # Errors
    /// [`ReplayError::CommitFirst`]; with any other one the store is half changed, and must be opened again.
    pub fn apply_frame(&mut self, store: &mut Store, frame: &StoredFrame<'_>) -> Result<(), ReplayError> {
        match frame.decode()? {
            FrameBody::Began(began) => begin_session(store, &began)?,
            FrameBody::Records(records) => self.take_records(&records)?,
            FrameBody::Verdict(verdict) => self.apply_verdict(store, verdict)?,
            FrameBody::Own(act) => apply_act(store, &act)?,
            FrameBody::Ended { session } => store.remove_session(session),
            FrameBody::After { .. } | FrameBody::Adopt { .. } => return Err(ReplayError::SeveralNodes),
        }
        // A start behind records without their verdict would lack these records.
        if self.batches.is_empty() {
            self.mark.position = frame.end();
            store.set_journal_mark(self.node, self.mark);
        }
        Ok(())
    }

    fn take_records(&mut self, records: &LogRecords<'_>) -> Result<(), ReplayError> {
        let batch = self.batches.entry(records.session).or_default();
        if batch.is_whole {
            return Err(ReplayError::Contradiction("a batch has no verdict"));
        }
        if records.offset != batch.bytes.len() as u64 {
            return Err(ReplayError::Contradiction("a part of a batch is missing"));
        }
        batch.from = records.from;
        batch.bytes.extend_from_slice(records.bytes);
        batch.is_whole = !records.continues;
        Ok(())
    }

    fn apply_verdict(&mut self, store: &mut Store, mut verdict: BatchVerdict) -> Result<(), ReplayError> {
        if verdict.order != self.mark.order + 1 {
            return Err(ReplayError::Contradiction("a verdict is missing"));
        }
        let (session, upto) = (verdict.session, verdict.upto);
        if let Some(batch) = self.batches.remove(&session).filter(|batch| batch.is_whole) {
            let mut records = read_records(batch.from, &batch.bytes)?;
            self.spoil(&mut verdict, &mut records);
            let applied = self.apply_batch(store, &verdict, &records);
            if matches!(applied, Err(ReplayError::CommitFirst)) {
                self.batches.insert(session, batch);
            }
            applied?;
        }
        self.mark.order = verdict.order;
        store.advance(session, upto);
        store.take_quota_moves();
        Ok(())
    }

    /// Changes a batch and its verdict as the planted fault does.
    fn spoil(&self, verdict: &mut BatchVerdict, records: &mut Vec<BatchRecord<'_>>) {
        const ACCESSED: u8 = UpdateKind::Accessed as u8;
        match self.fault {
            None => {}
            Some(ReplicaFault::KeptInode) => verdict.kept.clear(),
            Some(ReplicaFault::BatchBorder) => _ = records.pop(),
            Some(ReplicaFault::AccessTime) => records.retain(|record| record.kind != ACCESSED),
            Some(ReplicaFault::RefusedRecord) => {
                verdict.upto.0 += u64::from(!verdict.refused.is_empty());
                verdict.refused.clear();
            }
        }
    }

    fn apply_batch(
        &mut self,
        store: &mut Store,
        verdict: &BatchVerdict,
        records: &[BatchRecord<'_>],
    ) -> Result<(), ReplayError> {
        let updates: Vec<_> =
            records.iter().map(|record| Update::decode(record.kind, record.body)).collect::<Result<_, _>>()?;
        if self.may_commit && store.is_dirty() && lacks_room(store, &updates) {
            return Err(ReplayError::CommitFirst);
        }
        let is_admitted = |record: &BatchRecord<'_>| {
            record.position < verdict.upto && !verdict.refused.iter().any(|refused| refused.position == record.position)
        };
        for (_, update) in records.iter().zip(&updates).filter(|(record, _)| is_admitted(record)) {
            let (cost, sum) = (Credit::from(update.cost()), self.costs.entry(verdict.session).or_default());
            sum.blocks += cost.blocks;
            sum.metadata_bytes += cost.metadata_bytes;
        }
        let mut joined_bytes = std::mem::take(&mut self.joined);
        let mut apply = |update: &Update<'_>| {
            apply_update(store, (verdict.session, verdict.upto), update, verdict.latest, &verdict.kept)
        };
        let result = for_each_stretch(&updates, |these, left| {
            let admitted = records[these.clone()].iter().take_while(|record| is_admitted(record)).count();
            match (admitted, left) {
                (0, _) => {}
                (1, [Some(update), ..]) if !verdict.ignored.contains(&records[these.start].position) => apply(update)?,
                (1, _) => {}
                (_, writes) => {
                    let joined = join::join(writes[..admitted].iter().copied().flatten(), &mut joined_bytes);
                    joined.map_or(Ok(()), |joined| apply(&joined))?;
                }
            }
            Ok::<_, ReplayError>(admitted == these.len())
        });
        self.joined = joined_bytes;
        result.map(drop)
    }
}

/// Returns whether updates may need more room than is free now.
fn lacks_room(store: &Store, updates: &[Update<'_>]) -> bool {
    let (blocks, metadata_bytes) = updates.iter().map(Update::cost).fold((0u64, 0u64), |(blocks, bytes), cost| {
        (blocks.saturating_add(cost.blocks), bytes.saturating_add(cost.metadata_bytes))
    });
    let space = store.space();
    blocks > space.blocks_free || metadata_bytes > space.metadata_bytes_total.saturating_sub(space.metadata_bytes_used)
}

/// Applies an update that the writing node has applied.
fn apply_update(
    store: &mut Store,
    (session, end): (SessionId, LogPosition),
    update: &Update<'_>,
    latest: Option<Timestamp>,
    kept: &[InodeId],
) -> Result<(), ReplayError> {
    let limited = latest.and_then(|latest| update.limited_to(latest));
    store.apply(session, end, limited.as_ref().unwrap_or(update), &|inode| !kept.contains(&inode))?;
    Ok(())
}

fn begin_session(store: &mut Store, began: &SessionBegan) -> Result<(), ReplayError> {
    let is_known =
        store.sessions().iter().any(|(id, state)| *id == began.session && state.generation == began.generation);
    if !is_known {
        store.set_session(began.session, began.generation, LogPosition(0));
    }
    Ok(store.skip_session_id(began.session)?)
}

fn apply_act(store: &mut Store, act: &OwnAct<'_>) -> Result<(), ReplayError> {
    match *act {
        OwnAct::Update { kind, body } => {
            let own = SessionId::SHARED_FS;
            let end = store.applied(own).plus(1);
            apply_update(store, (own, end), &Update::decode(kind, body)?, None, &[])?;
            store.take_quota_moves();
        }
        OwnAct::Inodes { first, count, .. } => store.skip_inodes(first, count)?,
        // Only a node that takes over needs them.
        OwnAct::Right { .. } => {}
        OwnAct::Limits { key, limits } => store.set_quota_limits(key, limits),
    }
    Ok(())
}
