//! The application of logs to the state, in batches.
//!
//! A batch is copied out of the log, coalesced, judged record by record, and applied. What is served, committed or moved is never
//! the state in the middle of a batch: a coalesced batch is right at its end only, so SharedFS's lock is held from its beginning
//! to its end.

use std::sync::Arc;
use std::time::Instant;

use ashlar_log::RecordAt;
use ashlar_types::{Access, InodeId, LogPosition, SessionId};
use ashlar_update::coalesce::{Scope, coalesce};
use ashlar_update::{Update, join};

use crate::page;
use crate::session::SessionLog;
use crate::state::{Phase, State};
use crate::validate::{Refusal, Validator, Violation};

/// Records and bytes of log in one batch: short enough that nobody notices the wait for the lock, well below a millisecond.
const BATCH_RECORDS: usize = 256;
const BATCH_BYTES: u64 = 256 << 10;
/// The batch buffer is kept up to this size; a single record may be longer.
const SCRATCH_BYTES_KEPT: usize = 2 << 20;

/// How much of a log is applied while the lock is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Slice {
    /// One batch, so that others get the lock after it.
    Batch,
    /// All there is: a lease can't move before its holder's log is applied.
    All,
}

/// Records of a log, in a copy that nobody changes any more.
struct Batch {
    bytes: Vec<u8>,
    records: Vec<RecordAt>,
    /// What stands behind the records is none.
    damage: Option<Violation>,
    /// There is nothing more up to where the log is to be applied.
    is_last: bool,
}

impl Batch {
    /// Copies a batch out of a log, into `bytes`, whatever they hold.
    fn copy(log: &SessionLog, from: LogPosition, to: LogPosition, bytes: Vec<u8>) -> Self {
        let mut batch = Self { bytes, records: Vec::new(), damage: None, is_last: false };
        let mut scanner = log.scanner(from, to);
        let mut end = 0;
        while batch.records.len() < BATCH_RECORDS && scanner.position().0 - from.0 < BATCH_BYTES {
            match scanner.next_into(&mut batch.bytes, end) {
                None => {
                    batch.is_last = true;
                    break;
                }
                Some(Ok(record)) => {
                    end = record.body.end;
                    batch.records.push(record);
                }
                Some(Err(corrupt)) => {
                    batch.damage = Some(Violation::Log(corrupt.to_string()));
                    break;
                }
            }
        }
        batch
    }

    /// The updates that the records are. The batch ends before one that is none.
    fn decode(&self) -> (Vec<Update<'_>>, Option<Violation>) {
        let mut updates = Vec::with_capacity(self.records.len());
        for record in &self.records {
            match Update::decode(record.kind, &self.bytes[record.body.clone()]) {
                Ok(update) => updates.push(update),
                Err(error) => return (updates, Some(error.into())),
            }
        }
        (updates, self.damage.clone())
    }
}

fn changes_content(update: &&Update<'_>) -> bool {
    matches!(update, Update::Write { .. } | Update::Resize { .. } | Update::Allocate { .. })
}

impl State {
    /// Applies a session's log up to `to`, or one batch of it. Whether `to` was reached; a session that forged a record is
    /// fenced, and then there is nothing more to reach.
    pub fn apply(&mut self, id: SessionId, to: LogPosition, slice: Slice) -> bool {
        loop {
            let reached = self.apply_batch(id, to);
            if reached || slice == Slice::Batch {
                return reached;
            }
        }
    }

    fn apply_batch(&mut self, id: SessionId, to: LogPosition) -> bool {
        let Some(session) = self.live(id).filter(|session| !session.is_cut) else { return true };
        let (log, from) = (Arc::clone(&session.log), self.store.applied(id));
        if from >= to {
            return true;
        }
        let batch = Batch::copy(&log, from, to, std::mem::take(&mut self.scratch));
        let (updates, damage) = batch.decode();
        self.store.take_quota_moves();
        let refusal = self.apply_updates(id, &batch.records, &updates).err().or(damage.map(Refusal::from));
        // Of a batch only its end is right, so what it uses is known only now.
        let refusal = refusal.or(self.spend_quota(id).err().map(Refusal::from));
        drop(updates);
        let is_last = batch.is_last;
        if is_last && refusal.is_none() {
            self.store.advance(id, to);
        }
        if batch.bytes.capacity() <= SCRATCH_BYTES_KEPT {
            self.scratch = batch.bytes;
        }
        let applied = self.store.applied(id);
        self.note_applied(id, from, batch.records.partition_point(|record| record.end <= applied) as u64);
        match refusal {
            None => is_last,
            Some(error) => {
                self.refuse(id, error);
                true
            }
        }
    }

    /// Judges every record as it stands in the log, each against the state that the ones before it left, and applies what
    /// coalescing left of it; short writes that follow each other are applied as one. Only content is coalesced and joined, which no
    /// judgement depends on.
    ///
    /// Where a record is refused, content that the batch had written before it and that the refused or later records would have
    /// overwritten may be missing: nobody has seen it, and its session is fenced. A missing dependency, which is nobody's
    /// offence, cuts the log exactly, as nothing is coalesced across it.
    fn apply_updates(&mut self, id: SessionId, records: &[RecordAt], updates: &[Update<'_>]) -> Result<(), Refusal> {
        // Less than two changes of content leave nothing to be saved.
        let coalesced =
            (updates.iter().filter(changes_content).nth(1).is_some()).then(|| coalesce(updates, Scope::Content));
        if let Some(coalesced) = &coalesced {
            self.counters.coalesced_records += coalesced.dropped;
            self.counters.coalesced_bytes += coalesced.saved_bytes;
        }
        // What coalescing left of each record; `None`: nothing.
        let left: Vec<Option<&Update<'_>>> = match &coalesced {
            None => updates.iter().map(Some).collect(),
            Some(coalesced) => coalesced.left(updates).collect(),
        };
        let mut index = 0;
        // A record that is no update ends them.
        while index < updates.len() {
            let length = join::stretch(left[index..].iter().map_while(|left| *left)).max(1);
            let these = index..index + length;
            let applied = self.apply_records(id, &records[these.clone()], &updates[these.clone()], &left[these]);
            if let Err((refused, refusal)) = applied {
                // Void slots in front of it count as applied: another log may wait for the position at which they end.
                self.store.advance(id, refused);
                return Err(refusal);
            }
            index += length;
        }
        Ok(())
    }

    /// Applies a record, or writes that are joined; an error comes with the position of the first record that is not applied.
    fn apply_records(
        &mut self,
        id: SessionId,
        records: &[RecordAt],
        updates: &[Update<'_>],
        left: &[Option<&Update<'_>>],
    ) -> Result<(), (LogPosition, Refusal)> {
        let mut admitted = 0;
        let mut refusal = None;
        for (record, update) in records.iter().zip(updates) {
            if let Err(error) = self.admit(id, update, record.position) {
                refusal = Some((record.position, error));
                break;
            }
            admitted += 1;
        }
        let applied = match (admitted, left) {
            (0, _) => Ok(()),
            (1, [Some(update), ..]) => self.apply_update(id, records[0].end, update).map(drop),
            (1, _) => {
                self.store.advance(id, records[0].end);
                Ok(())
            }
            (_, writes) => {
                let mut data = std::mem::take(&mut self.joined);
                let joined = join::join(writes[..admitted].iter().copied().flatten(), &mut data);
                let end = records[admitted - 1].end;
                let applied = joined.map_or(Ok(()), |joined| self.apply_update(id, end, &joined).map(drop));
                self.joined = data;
                applied
            }
        };
        if let Err(error) = applied {
            // They may be tried again, and are paid for once.
            if let Some(session) = self.sessions.get_mut(&id) {
                updates[..admitted].iter().for_each(|update| session.account.refund(update.cost().into()));
            }
            return Err((records[0].position, error.into()));
        }
        refusal.map_or(Ok(()), Err)
    }

    /// Judges a record as it stands in the log, and takes what it costs.
    fn admit(&mut self, id: SessionId, update: &Update<'_>, position: LogPosition) -> Result<(), Refusal> {
        self.validate(id, update, position)?;
        self.charge(id, update)?;
        Ok(self.keep_rights(update)?)
    }

    /// Charges what the session paid when it logged the update, whatever is left of it.
    fn charge(&mut self, id: SessionId, update: &Update<'_>) -> Result<(), Refusal> {
        let Some(session) = self.sessions.get_mut(&id) else { return Ok(()) };
        if !session.account.spend(update.cost().into()) && session.is_whole {
            return Err(Violation::NoCredit.into());
        }
        Ok(())
    }

    fn note_applied(&mut self, id: SessionId, from: LogPosition, records: u64) {
        let applied = self.store.applied(id);
        self.counters.records_applied += records;
        self.counters.bytes_applied += applied.0.saturating_sub(from.0);
        if applied > from {
            self.oldest_uncommitted.get_or_insert_with(Instant::now);
        }
        crate::grant::write_attached(self);
        if let Some(session) = self.sessions.get_mut(&id) {
            session.records += records;
            session.digested_bytes += applied.0.saturating_sub(from.0);
            session.control.set_applied(applied);
            // The page is mapped whole, so the store can't miss it.
            let _ = page::set_validated(&*session.page, applied.max(session.validated));
        }
    }

    fn validate(&self, id: SessionId, update: &Update<'_>, position: LogPosition) -> Result<(), Refusal> {
        let Some(session) = self.sessions.get(&id) else { return Ok(()) };
        if let Update::Depend { session: other, position } = update {
            // A session that is no more was committed as a whole before it went.
            let is_known = *other != id && (self.sessions.contains_key(other) || self.lost.contains(other));
            return match is_known && *position > self.store.applied(*other) {
                true if self.phase == Phase::Recovering => Err(Refusal::Unmet(*other)),
                true if !self.lost.contains(other) => Err(Violation::ForgedDependency.into()),
                _ => Ok(()),
            };
        }
        // The lease table and the page of a session from before the machine's last start may be older than its log.
        let this_boot = session.is_whole;
        let leases =
            (this_boot && position >= session.validated.max(session.trusted)).then(|| self.leasing.of(id, &self.store));
        Validator {
            store: &self.store,
            credentials: &session.credentials,
            leases,
            is_granted: &|inode| session.ranges.contains(inode) || !this_boot && inode >= InodeId::FIRST_FREE,
            keeps_write: &|inode| session.rights.has(inode, Access::WRITE),
        }
        .validate(update)
    }
}
