//! The journal of a writing node.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use ashlar_journal::{
    BatchRecord, BatchVerdict, FlushJob, FrameBody, JournalError, JournalIdentity, JournalRing, push_record,
    split_batch,
};
use ashlar_log::RecordAt;
use ashlar_pmem::SharedMemory;
use ashlar_store::{JournalMark, Store, StoreError};
use ashlar_types::{Access, Epoch, InodeId, JournalPosition, LogPosition, NodeNumber, SessionId};
use ashlar_wire::Credit;

use crate::journal::applier::{FrameApplier, ReplayError};

/// The part of the ring that may be promised to logs.
const LOGS_PART: (u64, u64) = (3, 4);
/// The part of the ring that may be needed before a commit is due.
const FILLING_PART: (u64, u64) = (1, 4);
/// The part that may be needed before a recovery commits in its middle.
const SHORT_PART: (u64, u64) = (1, 2);
/// The part that may be needed before no session begins any more; the rest is for those that there are.
const NEARLY_FULL_PART: (u64, u64) = (7, 8);

/// Decisions that were made while a batch was applied, and that a replica must know.
#[derive(Debug, Default)]
pub struct BatchNotes {
    /// Records that are valid and have no effect.
    ignored: Vec<LogPosition>,
    /// Whether inodes that lost their last name may be freed. The first answer holds for the whole batch.
    may_free: RefCell<BTreeMap<InodeId, bool>>,
    /// The rights to open inodes that sessions keep.
    rights: Vec<(SessionId, InodeId, Access)>,
}

impl BatchNotes {
    /// Begins a batch.
    pub fn clear(&mut self) {
        self.ignored.clear();
        self.may_free.get_mut().clear();
        self.rights.clear();
    }

    /// Notes that a session keeps a right to an inode that it has open.
    pub fn keep_right(&mut self, session: SessionId, inode: InodeId, access: Access) {
        self.rights.push((session, inode, access));
    }

    /// Takes the rights that sessions keep.
    pub(super) fn take_rights(&mut self) -> Vec<(SessionId, InodeId, Access)> {
        std::mem::take(&mut self.rights)
    }

    /// Notes a record that has no effect.
    pub fn ignore(&mut self, position: LogPosition) {
        self.ignored.push(position);
    }

    /// Returns the records that have no effect.
    pub(super) fn ignored(&self) -> &[LogPosition] {
        &self.ignored
    }

    /// Returns whether an inode may be freed: as `decide` says, the first time in a batch.
    pub fn may_free(&self, inode: InodeId, decide: impl FnOnce() -> bool) -> bool {
        *self.may_free.borrow_mut().entry(inode).or_insert_with(decide)
    }

    /// Returns the inodes that lost their last name, and that may not be freed.
    pub(super) fn kept(&self) -> Vec<InodeId> {
        self.may_free.borrow().iter().filter(|(_, may_free)| !**may_free).map(|(inode, _)| *inode).collect()
    }
}

/// The journal of a writing node.
#[derive(Debug)]
pub struct NodeJournal {
    node: NodeNumber,
    ring: JournalRing<Arc<SharedMemory>>,
    /// The store has all frames that were there at the start.
    is_replayed: bool,
    order: u64,
    /// The position of the commit under way, or of the last one.
    frozen: JournalPosition,
    /// The position up to which no start needs the frames. They are kept for a replica that comes back, while there is
    /// room.
    reusable: JournalPosition,
    /// The position that the replica has acknowledged; `None` while this node's own copy is enough.
    acknowledged: Option<JournalPosition>,
    /// Requests to make updates durable wait for the journal, and not for a commit.
    answers_syncs: bool,
    /// The position up to which such a request wants the journal durable.
    wanted: JournalPosition,
    bytes: Vec<u8>,
}

impl NodeJournal {
    /// Opens a journal, and begins an epoch in it: the machine may have lost power since a frame was appended.
    ///
    /// # Errors
    /// [`ReplayError::Open`], [`ReplayError::Journal`].
    pub fn open(store: &Store, memory: Arc<SharedMemory>, identity: JournalIdentity) -> Result<Self, ReplayError> {
        let (node, mut ring) = (identity.node, JournalRing::open(memory, identity)?);
        let number = ring.lineage().last().epoch.number + 1;
        ring.begin_epoch(Epoch { number, node })?;
        let JournalMark { position: frozen, order } = store.journal_mark(node).unwrap_or_default();
        // All up to the store's last commit, as at its end: if nothing else is to be committed, no commit comes.
        let reusable = ring.head().max(frozen.min(ring.flushed()));
        Ok(Self {
            node,
            ring,
            is_replayed: false,
            order,
            frozen,
            reusable,
            acknowledged: None,
            answers_syncs: false,
            wanted: JournalPosition(0),
            bytes: Vec::new(),
        })
    }

    /// Applies the frames that the store's commits lack. Nothing is appended before that.
    ///
    /// Records without a verdict are left to their sessions' logs: a verdict says that none of them counts. Returns the
    /// cost of what was applied, by session.
    ///
    /// # Errors
    /// [`ReplayError`]; the store is then half changed.
    pub(crate) fn replay(&mut self, store: &mut Store) -> Result<BTreeMap<SessionId, Credit>, ReplayError> {
        let mut applier = FrameApplier::new(store, self.node);
        let (mut cursor, mut buffer) = (self.ring.cursor_at(applier.mark().position)?, Vec::new());
        while let Some(frame) = self.ring.read_frame(cursor, &mut buffer)? {
            applier.apply_frame(store, &frame)?;
            cursor = frame.next();
        }
        self.order = applier.mark().order;
        self.is_replayed = true;
        let unjudged: Vec<_> = applier.unjudged().collect();
        for (session, from) in unjudged {
            let verdict = BatchVerdict { upto: from, ..self.next_verdict(session) };
            self.append(store, &FrameBody::Verdict(verdict))
                .map_err(|error| ReplayError::Store(journal_failure(error)))?;
        }
        Ok(applier.into_costs())
    }

    /// Returns the ring, for those that copy it.
    #[must_use]
    pub fn ring(&self) -> &JournalRing<Arc<SharedMemory>> {
        &self.ring
    }

    /// Returns the number of the last verdict, and the journal's end.
    #[must_use]
    pub fn mark(&self) -> JournalMark {
        JournalMark { position: self.ring.end(), order: self.order }
    }

    /// Returns whether so much of the ring is needed that a commit is due.
    #[must_use]
    pub fn is_filling(&self) -> bool {
        self.is_needed_beyond(FILLING_PART)
    }

    /// Returns whether so much of the ring is needed that a recovery must commit first.
    #[must_use]
    pub fn is_short(&self) -> bool {
        self.is_needed_beyond(SHORT_PART)
    }

    /// Returns whether so much of the ring is needed that no session may begin.
    #[must_use]
    pub fn is_nearly_full(&self) -> bool {
        self.is_needed_beyond(NEARLY_FULL_PART)
    }

    /// Returns the bytes of the ring that can't be reused.
    #[must_use]
    pub fn needed_bytes(&self) -> u64 {
        self.ring.end().0 - self.reusable.0
    }

    /// Returns the bytes of the ring that records of logs may still use.
    #[must_use]
    pub fn room_for_logs(&self) -> u64 {
        self.part(LOGS_PART).saturating_sub(self.needed_bytes())
    }

    fn is_needed_beyond(&self, part: (u64, u64)) -> bool {
        self.needed_bytes() > self.part(part)
    }

    fn part(&self, part: (u64, u64)) -> u64 {
        self.ring.capacity() * part.0 / part.1
    }

    /// Returns the next verdict on a session's batch; it refuses nothing, and counts nothing.
    pub(super) fn next_verdict(&self, session: SessionId) -> BatchVerdict {
        BatchVerdict {
            session,
            upto: LogPosition(0),
            order: self.order + 1,
            latest: None,
            is_fenced: false,
            refused: Vec::new(),
            ignored: Vec::new(),
            kept: Vec::new(),
        }
    }

    /// Appends a frame.
    ///
    /// # Errors
    /// Those of the ring.
    pub(super) fn append(&mut self, store: &mut Store, body: &FrameBody<'_>) -> Result<(), JournalError> {
        assert!(self.is_replayed, "frames of the last start are not applied yet");
        self.append_to_ring(body)?;
        if let FrameBody::Verdict(verdict) = body {
            self.order = verdict.order;
        }
        // A Records frame and its verdict are appended together, so every end is one at which a start may begin.
        store.set_journal_mark(self.node, self.mark());
        Ok(())
    }

    /// Appends a batch with the node's verdict on it.
    ///
    /// # Errors
    /// Those of the ring.
    pub(super) fn append_batch(
        &mut self,
        store: &mut Store,
        from: LogPosition,
        (records, bodies): (&[RecordAt], &[u8]),
        verdict: BatchVerdict,
    ) -> Result<(), JournalError> {
        if !records.is_empty() {
            let mut bytes = std::mem::take(&mut self.bytes);
            bytes.clear();
            let mut before = from;
            for RecordAt { position, kind, body, .. } in records {
                let record = BatchRecord { position: *position, kind: *kind, body: &bodies[body.clone()] };
                push_record(&mut bytes, before, &record);
                before = *position;
            }
            let to = records[records.len() - 1].end;
            let limit = self.ring.frame_bytes_max();
            for part in split_batch(verdict.session, from, to, &bytes, limit) {
                self.append_to_ring(&FrameBody::Records(part))?;
            }
            self.bytes = bytes;
        }
        self.append(store, &FrameBody::Verdict(verdict))
    }

    /// Appends a frame; gives up frames that are only kept for a replica if there is no room otherwise.
    fn append_to_ring(&mut self, body: &FrameBody<'_>) -> Result<(), JournalError> {
        if self.ring.capacity() - self.ring.used() < self.ring.frame_bytes_max() && self.ring.head() < self.reusable {
            self.ring.truncate(self.reusable)?;
        }
        self.ring.append(body).map(drop)
    }

    /// Begins a commit. The frames before the position must be durable first, here and at the replica.
    ///
    /// A commit that is tried again takes only what it took the first time: then `is_new` is `false`.
    pub fn begin_commit(&mut self, is_new: bool) -> (JournalPosition, Option<(FlushJob, Arc<SharedMemory>)>) {
        if is_new {
            self.frozen = self.ring.end();
        }
        (self.frozen, self.ring.begin_flush().map(|job| (job, Arc::clone(self.ring.memory()))))
    }

    /// Makes the journal durable here. Returns the position up to which it is.
    ///
    /// # Errors
    /// Those of the medium.
    pub fn flush(&mut self) -> Result<JournalPosition, StoreError> {
        self.ring.flush().map_err(journal_failure)
    }

    /// Notes the result of that flush.
    ///
    /// # Errors
    /// Those of the medium: nothing may be committed any more.
    pub fn finish_flush(&mut self, job: &FlushJob, result: io::Result<()>) -> Result<(), StoreError> {
        self.ring.finish_flush(job, result).map(drop).map_err(journal_failure)
    }

    /// Lets the frames of the commit be reused: no start has need of them, and the replica has made them durable.
    ///
    /// The newest half of the ring stays for a replica that comes back, as long as no frame needs its room.
    ///
    /// # Errors
    /// Those of the medium.
    pub fn finish_commit(&mut self) -> Result<(), StoreError> {
        self.reusable = self.reusable.max(self.frozen.min(self.ring.flushed()));
        let kept = JournalPosition(self.ring.end().0.saturating_sub(self.ring.capacity() / 2));
        let bound = self.reusable.min(kept);
        if bound <= self.ring.head() {
            return Ok(());
        }
        self.ring.truncate(bound).map(drop).map_err(journal_failure)
    }

    /// Waits for a replica from now on, whose copy is durable up to this position; or no more for any.
    pub fn set_replica(&mut self, durable: Option<JournalPosition>) {
        self.acknowledged = durable;
    }

    /// Takes the position up to which the replica's copy is durable.
    pub fn handle_ack(&mut self, durable: JournalPosition) {
        self.acknowledged = self.acknowledged.map(|acknowledged| acknowledged.max(durable));
    }

    /// Returns whether the replica, if one is waited for, has made the journal durable up to this position.
    #[must_use]
    pub fn is_acknowledged(&self, upto: JournalPosition) -> bool {
        self.acknowledged.is_none_or(|acknowledged| acknowledged >= upto)
    }

    /// Lets requests to make updates durable wait for the journal from now on, and not for a commit.
    pub fn answer_syncs(&mut self) {
        self.answers_syncs = true;
    }

    /// Returns whether requests to make updates durable wait for the journal.
    #[must_use]
    pub fn answers_syncs(&self) -> bool {
        self.answers_syncs
    }

    /// Asks for the journal to be made durable up to a position.
    pub(crate) fn want_durable(&mut self, upto: JournalPosition) {
        self.wanted = self.wanted.max(upto);
    }

    /// Begins to make the journal durable here, if a request waits for that.
    pub fn begin_wanted_flush(&mut self) -> Option<(FlushJob, Arc<SharedMemory>)> {
        let job = if self.wanted > self.ring.flushed() { self.ring.begin_flush()? } else { return None };
        Some((job, Arc::clone(self.ring.memory())))
    }

    /// Returns the position up to which the journal is durable in all copies that count.
    #[must_use]
    pub fn replicated(&self) -> JournalPosition {
        let flushed = self.ring.flushed();
        self.acknowledged.map_or(flushed, |acknowledged| acknowledged.min(flushed))
    }
}

/// Returns the error of a node whose journal has failed.
pub(super) fn journal_failure(error: JournalError) -> StoreError {
    StoreError::Io { what: "the journal failed", source: io::Error::other(error.to_string()) }
}
