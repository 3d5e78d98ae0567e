//! Applies logs to the state, in batches.
//!
//! A batch is copied out of the log, coalesced, validated record by record, and applied. A coalesced batch is right at
//! its end only. So SharedFS holds its lock from the batch's beginning to its end. No thread serves, commits or moves
//! the state in between.

use std::sync::Arc;

use ashlar_log::RecordAt;
use ashlar_store::StoreError;
use ashlar_types::{Access, InodeId, LogPosition, SessionId, Timestamp};
use ashlar_update::{Allocation, Applied, Update, join};

use crate::access::narrowing::{keep_cut_ways, keep_rights, keep_ways};
use crate::access::open_handles::note_own_handle;
use crate::blame::{self, Blame};
use crate::effects::NodeEffect;
use crate::journal::acts::journal_batch;
use crate::journal::log_limits::raise_limit;
use crate::leases::leasing::Leasing;
use crate::node_core::NodeCore;
use crate::records::batch::for_each_stretch;
use crate::records::logs::{cut_log, fence_session};
use crate::records::validate::{Leases as _, RecordRefusal, Validator, Violation, may_hold};
use crate::recovery::state::{RecoveryPhase, UnmetDependency};
use crate::sessions::session::{ServedSession, SessionLog};
use crate::time::NodeTime;

/// The most records and bytes of log in one batch.
///
/// They keep the wait for the lock well below a millisecond, too short to notice.
const BATCH_RECORDS: usize = 256;
const BATCH_BYTES: u64 = 256 << 10;
/// The batch buffer is kept up to this size; a single record may be longer.
const SCRATCH_BYTES_KEPT: usize = 2 << 20;

/// The most records of a log that are skipped at recovery: each begins a new batch.
const SKIPPED_MAX: u32 = 4096;

/// How far, in seconds, a session's clock may be ahead of SharedFS's: both read the machine's.
const CLOCK_SLACK_SECONDS: i64 = 1;

/// How much of a log is applied while the lock is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Slice {
    /// One batch, so that other threads get the lock after it.
    Batch,
    /// All of the log: a lease can't move before its holder's log is applied.
    All,
    /// One batch that ends behind this position: at recovery another log may depend on that much.
    BatchThrough(LogPosition),
}

/// Records of a log, in a copy that no process changes any more.
struct Batch {
    bytes: Vec<u8>,
    records: Vec<RecordAt>,
    /// The log behind the records is damaged.
    damage: Option<Violation>,
    /// There is nothing more up to the position to which the log is to be applied.
    is_last: bool,
}

impl Batch {
    /// Copies a batch of at most `most` records out of a log into `bytes`, whatever they hold; it ends behind `enough`.
    fn copy(
        log: &SessionLog,
        (from, to): (LogPosition, LogPosition),
        (most, enough): (usize, LogPosition),
        bytes: Vec<u8>,
    ) -> Self {
        let mut batch = Self { bytes, records: Vec::new(), damage: None, is_last: false };
        let mut scanner = log.scanner(from, to);
        let mut end = 0;
        let is_short = |at: LogPosition| at < enough && at.0 - from.0 < BATCH_BYTES;
        while batch.records.len() < most && is_short(scanner.position()) {
            match scanner.next_into(&mut batch.bytes, end) {
                None => {
                    batch.is_last = true;
                    return batch;
                }
                Some(Ok(record)) => {
                    end = record.body.end;
                    batch.records.push(record);
                }
                Some(Err(corrupt)) => {
                    batch.damage = Some(Violation::Log(corrupt.to_string()));
                    return batch;
                }
            }
        }
        // The last record may fill the batch, or end at `enough`.
        batch.is_last = scanner.position() == to;
        batch
    }

    /// Decodes the records into updates.
    ///
    /// The batch ends before a record that is not one, and behind one that takes long.
    fn decode(&self) -> Decoded<'_> {
        let mut updates = Vec::with_capacity(self.records.len());
        let mut room = BATCH_RECORDS;
        for record in &self.records {
            match Update::decode(record.kind, &self.bytes[record.body.clone()]) {
                Ok(update) => updates.push(update),
                Err(error) => return Decoded { updates, damage: Some(error.into()), is_whole: true },
            }
            room = room.saturating_sub(updates.last().map_or(0, weight));
            if room == 0 {
                break;
            }
        }
        let is_whole = updates.len() == self.records.len();
        let damage = self.damage.clone().filter(|_| is_whole);
        Decoded { updates, damage, is_whole }
    }
}

/// The updates of a batch.
struct Decoded<'a> {
    updates: Vec<Update<'a>>,
    /// The log behind them is damaged.
    damage: Option<Violation>,
    /// No records of the batch are left.
    is_whole: bool,
}

/// Returns for how many short records an update counts, by the most work that it can take.
fn weight(update: &Update<'_>) -> usize {
    match update {
        // It moves all blocks of a file that follow.
        Update::Allocate { how: Allocation::Collapse | Allocation::Insert, .. } => BATCH_RECORDS,
        // If it moves a directory, its leases are counted in another place, and paths are climbed anew.
        Update::Rename(rename) if rename.parent != rename.new_parent => BATCH_RECORDS / 16,
        _ => 1,
    }
}

/// Applies a session's log up to `to`, or one batch of it.
///
/// Returns whether `to` was reached. A session that forged a record is fenced, and then nothing more is left to
/// reach.
pub fn apply_log(state: &mut NodeCore, id: SessionId, to: LogPosition, slice: Slice) -> bool {
    let enough = if let Slice::BatchThrough(enough) = slice { enough } else { to };
    loop {
        let reached = apply_batch(state, id, to, enough);
        if reached || slice != Slice::All {
            return reached;
        }
    }
}

fn apply_batch(state: &mut NodeCore, id: SessionId, to: LogPosition, enough: LogPosition) -> bool {
    let Some(session) = state.live(id).filter(|session| !session.is_cut) else { return true };
    let (log, from) = (Arc::clone(&session.log), state.store.applied(id));
    if from >= to {
        return true;
    }
    if session.append_limit.is_some_and(|limit| to > limit) {
        fence_session(state, id, &Violation::Log("it goes beyond its limit".into()));
        return true;
    }
    let _blame = Blame::for_records(session, from);
    // After a loss of power, a log may be cut before a record whose grant is lost. No record before the cut may be
    // left out for one behind it: it may be synced. So each record is a batch.
    let most = if session.is_whole { BATCH_RECORDS } else { 1 };
    let scratch = std::mem::take(&mut state.scratch);
    let Ok(batch) = blame::contain(|| Batch::copy(&log, (from, to), (most, enough), scratch)) else {
        fence_session(state, id, &Violation::Panicked);
        return true;
    };
    let panicked = |_| Decoded { updates: Vec::new(), damage: Some(Violation::Panicked), is_whole: true };
    let Decoded { updates, damage, is_whole } = blame::contain(|| batch.decode()).unwrap_or_else(panicked);
    state.store.take_quota_moves();
    state.batch_notes.clear();
    let latest = latest_time(state.now);
    let refusal = apply_updates(state, id, &batch.records, &updates).err().or(damage.map(RecordRefusal::from));
    // Only the end of a batch is right, so its use of quota is known only now.
    let refusal = refusal.or(spend_quota(state, id).err().map(RecordRefusal::from));
    let is_skipped = refusal.as_ref().is_some_and(|refusal| skip_refused(state, id, refusal, &batch.records, &updates));
    let count = updates.len();
    drop(updates);
    let is_last = batch.is_last && is_whole;
    if is_last && refusal.is_none() {
        state.store.advance(id, to);
    }
    // A restart applies journalled records again without the lease manager, so their leases are written down before.
    let attaching = state.lease_tables().write_attached();
    journal_batch(state, id, from, (&batch.records[..count], &batch.bytes), refusal.as_ref(), latest);
    if batch.bytes.capacity() <= SCRATCH_BYTES_KEPT {
        state.scratch = batch.bytes;
    }
    let applied = state.store.applied(id);
    record_applied(state, id, from, batch.records.partition_point(|record| record.end <= applied) as u64);
    state.lease_tables().end_attaching(&attaching);
    raise_limit(state, id, applied);
    match refusal {
        None => is_last,
        Some(_) if is_skipped => false,
        Some(error) => {
            handle_refusal(state, id, error);
            true
        }
    }
}

/// Books the use of limited resources by a batch of a session.
fn spend_quota(state: &mut NodeCore, id: SessionId) -> Result<(), Violation> {
    let NodeCore { store, sessions, counters, .. } = state;
    let moves = store.take_quota_moves();
    match sessions.get_mut(&id).filter(|_| !moves.is_empty()) {
        Some(session) => session.spend_quota(&moves, store, counters),
        None => Ok(()),
    }
}

/// Validates every record against the state that the earlier ones left.
///
/// It applies what coalescing left of the records; short writes that follow each other are applied as one. Only
/// content is coalesced and joined, and no validation depends on content.
///
/// If a record is refused, earlier content of the batch that the refused or later records would have overwritten
/// may be missing. No session has seen that content, and the writing session is fenced. A missing dependency, which
/// is no session's violation, cuts the log exactly, as nothing is coalesced across it. So does a lost grant, as
/// after a loss of power each record is a batch.
fn apply_updates(
    state: &mut NodeCore,
    id: SessionId,
    records: &[RecordAt],
    updates: &[Update<'_>],
) -> Result<(), RecordRefusal> {
    let mut refused = None;
    let away = for_each_stretch(updates, |these, left| {
        let applied = apply_records(state, id, &records[these.clone()], &updates[these], left);
        refused = applied.err();
        Ok::<_, RecordRefusal>(refused.is_none())
    })?;
    state.counters.coalesced_records += away.records;
    state.counters.coalesced_bytes += away.bytes;
    let Some((position, refusal)) = refused else { return Ok(()) };
    // Void slots in front of the record count as applied: another log may wait for the position at which they end.
    state.store.advance(id, position);
    Err(refusal)
}

/// Applies a record, or writes that are joined.
///
/// An error comes with the position of the first record that is not applied.
fn apply_records(
    state: &mut NodeCore,
    id: SessionId,
    records: &[RecordAt],
    updates: &[Update<'_>],
    left: &[Option<&Update<'_>>],
) -> Result<(), (LogPosition, RecordRefusal)> {
    let mut admitted = 0;
    let mut refusal = None;
    for (record, update) in records.iter().zip(updates) {
        if let Err(error) = admit_record(state, id, update, record.position) {
            refusal = Some((record.position, error));
            break;
        }
        admitted += 1;
    }
    let applied = match (admitted, left) {
        (0, _) => Ok(()),
        (1, [Some(update), ..]) if has_effect(state, id, update, records[0].position) => {
            apply_limited(state, id, records[0].end, update)
        }
        (1, left) => {
            if left[0].is_some() {
                state.batch_notes.ignore(records[0].position);
            }
            state.store.advance(id, records[0].end);
            Ok(())
        }
        (_, writes) => {
            let mut data = std::mem::take(&mut state.joined);
            let joined = join::join(writes[..admitted].iter().copied().flatten(), &mut data);
            let end = records[admitted - 1].end;
            let applied = joined.map_or(Ok(()), |joined| apply_limited(state, id, end, &joined));
            state.joined = data;
            applied
        }
    };
    if let Err(error) = applied {
        // The records may be tried again, and are charged once.
        if let Some(session) = state.sessions.get_mut(&id) {
            updates[..admitted].iter().for_each(|update| session.account.refund(update.cost().into()));
        }
        return Err((records[0].position, error.into()));
    }
    refusal.map_or(Ok(()), Err)
}

/// Validates a record as it stands in the log, and charges its cost.
fn admit_record(
    state: &mut NodeCore,
    id: SessionId,
    update: &Update<'_>,
    position: LogPosition,
) -> Result<(), RecordRefusal> {
    // It changes nothing, so a panic leaves nothing half made.
    blame::contain(|| validate_record(state, id, update, position)).unwrap_or(Err(Violation::Panicked.into()))?;
    let NodeCore { store, sessions, ways, batch_notes, .. } = state;
    sessions.get_mut(&id).map_or(Ok(()), |session| charge_record(session, update))?;
    keep_ways(store, sessions, ways, batch_notes, update)?;
    Ok(keep_rights(store, sessions, batch_notes, update)?)
}

/// Charges the cost that the session paid when it logged the update.
///
/// It does so whatever coalescing left of the update.
fn charge_record(session: &mut ServedSession, update: &Update<'_>) -> Result<(), RecordRefusal> {
    if session.account.spend(update.cost().into()) { Ok(()) } else { Err(session.refuse_use(Violation::NoCredit)) }
}

/// Skips a refused record, if another session may be to blame for the refusal; returns whether it did.
///
/// At recovery, a session may have destroyed its own log, up to what is committed. Records of others that build on
/// what was there are refused then. These sessions are honest, so they lose these records and go on.
fn skip_refused(
    state: &mut NodeCore,
    id: SessionId,
    refusal: &RecordRefusal,
    records: &[RecordAt],
    updates: &[Update<'_>],
) -> bool {
    if state.recovery.phase != RecoveryPhase::Salvaging || matches!(refusal, RecordRefusal::Forged(Violation::Panicked))
    {
        return false;
    }
    let (RecordRefusal::Forged(violation), applied) = (refusal, state.store.applied(id)) else { return false };
    let index = records.partition_point(|record| record.end <= applied);
    let (Some(record), Some(update)) = (records.get(index), updates.get(index)) else { return false };
    let is_meant = |session: &&mut ServedSession| session.is_whole && session.skipped < SKIPPED_MAX;
    let Some(session) = state.sessions.get_mut(&id).filter(is_meant) else { return false };
    if session.skipped == 0 {
        tracing::warn!(session = id.0, position = %applied, %violation, "a record that builds on lost ones is skipped");
    }
    session.skipped += 1;
    // It was paid for. A session that has not paid has less than it should, which harms only itself.
    session.account.spend(update.cost().into());
    state.store.advance(id, record.end);
    true
}

fn record_applied(state: &mut NodeCore, id: SessionId, from: LogPosition, records: u64) {
    let applied = state.store.applied(id);
    state.counters.records_applied += records;
    state.counters.bytes_applied += applied.0.saturating_sub(from.0);
    if applied > from {
        state.commits.record_applied(state.now.since_boot);
    }
    if let Some(session) = state.sessions.get_mut(&id) {
        session.records += records;
        session.digested_bytes += applied.0.saturating_sub(from.0);
        session.control.set_applied(applied);
        session.page.set_validated(applied.max(session.validated));
    }
}

fn validate_record(
    state: &NodeCore,
    id: SessionId,
    update: &Update<'_>,
    position: LogPosition,
) -> Result<(), RecordRefusal> {
    let Some(session) = state.sessions.get(&id) else { return Ok(()) };
    if let Update::Depend { session: other, position } = update {
        // A session that is gone was committed as a whole before it ended.
        let is_known = *other != id && (state.sessions.contains_key(other) || state.recovery.lost.contains(other));
        return match is_known && *position > state.store.applied(*other) {
            true if state.recovery.phase == RecoveryPhase::Recovering => Err(RecordRefusal::Unmet(*other, *position)),
            true if !state.recovery.lost.contains(other) => Err(Violation::ForgedDependency.into()),
            _ => Ok(()),
        };
    }
    let leases = is_leased(session, position).then(|| state.leasing.leases_of(id, &state.store));
    Validator {
        store: &state.store,
        credentials: &session.credentials,
        leases,
        is_granted: &|inode| inode.is_of(state.store.node()) && session.ranges.contains(inode),
        keeps_write: &|inode| session.rights.has(inode, Access::WRITE),
    }
    .validate(update)
    .map_err(|refusal| match refusal {
        RecordRefusal::Forged(violation @ Violation::ForeignNumber(_)) => session.refuse_use(violation),
        refusal => refusal,
    })?;
    // At recovery, the ways may have changed since the record was written.
    if state.recovery.phase == RecoveryPhase::Running {
        state.ways.check_reached(&state.store, session, update)
    } else {
        Ok(())
    }
}

/// Returns whether leases decide about a session's record at this position.
///
/// The leases of a session from before the machine's last start may be older than its log. Its numbers and its credit
/// are not: LibFS makes them last before its log.
fn is_leased(session: &ServedSession, position: LogPosition) -> bool {
    session.is_whole && position >= session.validated.max(session.trusted)
}

/// Returns whether an accepted update changes anything.
///
/// A time of access does so if the user may read the file, and has come to it. Such a record takes no lease. So another
/// session may have narrowed an honest reader's rights since. The record is then ignored, not refused.
///
/// A release frees a file if the session may write it. Without that lease, another session's log may still hold writes
/// to the file, whose handle it has closed. The orphan is then freed later, when all logs are applied.
fn has_effect(state: &NodeCore, id: SessionId, update: &Update<'_>, position: LogPosition) -> bool {
    if let (Update::Release { inode }, Some(session)) = (update, state.sessions.get(&id)) {
        return !is_leased(session, position) || state.leasing.leases_of(id, &state.store).may_write(*inode);
    }
    let Update::Accessed { inode, .. } = update else { return true };
    let Some(session) = state.sessions.get(&id).filter(|session| session.needs_validation()) else { return true };
    let may_read = || may_hold(&state.store, &session.credentials, *inode, Access::READ);
    // At recovery, the ways may have changed since the record was written.
    let has_reached = || {
        state.recovery.phase != RecoveryPhase::Running
            || state.ways.has_reached(&state.store, session, *inode).unwrap_or(true)
    };
    // If the store fails, so does the update.
    session.rights.has(*inode, Access::READ) || may_read().unwrap_or(true) && has_reached()
}

/// Applies a validated update; an ordinary user's update sets no times of the future.
fn apply_limited(state: &mut NodeCore, id: SessionId, end: LogPosition, update: &Update<'_>) -> Result<(), StoreError> {
    let is_limited = state.sessions.get(&id).is_some_and(ServedSession::needs_validation);
    let limited = if is_limited { update.limited_to(latest_time(state.now)) } else { None };
    apply_update(state, id, end, limited.as_ref().unwrap_or(update)).map(drop)
}

/// Returns the latest time that a session's clock may show now.
fn latest_time(now: NodeTime) -> Timestamp {
    Timestamp { seconds: now.wall.seconds + CLOCK_SLACK_SECONDS, ..now.wall }
}

/// Applies a validated update.
///
/// It reports to the lease manager which inodes the update moved.
pub fn apply_update(
    state: &mut NodeCore,
    id: SessionId,
    end: LogPosition,
    update: &Update<'_>,
) -> Result<Applied, StoreError> {
    let others = || state.sessions.values().filter(|other| other.id != id && other.fenced.is_none());
    // Recovery sees handles as they are now. The logs are of a time when a session may still have had the inode
    // open and written to it. The inode may be freed when all logs are applied.
    let keeps_all =
        state.recovery.phase != RecoveryPhase::Running && id != SessionId::SHARED_FS && others().next().is_some();
    let decide = |inode: InodeId| !keeps_all && !others().any(|other| other.has_opened(inode));
    let may_free = |inode: InodeId| state.batch_notes.may_free(inode, || decide(inode));
    let moves = Leasing::find_moves(&state.store, update)?;
    let applied = state.store.apply(id, end, update, &may_free)?;
    state.leasing.report_applied(&state.store, id, update, applied, moves)?;
    if state.ways.record_applied(&state.store, update)? {
        if let Some(grant_cache) = &mut state.grant_cache {
            grant_cache.withdraw_hidden(&state.store, &state.ways)?;
        }
        keep_cut_ways(&state.store, &mut state.sessions, &state.ways, &mut state.batch_notes)?;
    }
    if let Some(session) = state.sessions.get(&id) {
        state.ways.record_placed(&state.store, session, update)?;
    }
    if let (Update::Accessed { inode, at }, Some(grant_cache)) = (update, &mut state.grant_cache) {
        // It takes no lease, so the published grant stands.
        grant_cache.record_access_time(*inode, *at, state.store.next_batch());
    }
    if let Update::Create(create) = update {
        note_own_handle(&state.store, state.sessions.get_mut(&id), create.inode);
    }
    if let Some(inode) = applied.orphaned {
        state.orphans.insert(inode);
        note_own_handle(&state.store, state.sessions.get_mut(&id), inode);
    }
    if let Some(inode) = applied.freed {
        state.orphans.remove(&inode);
        state.reservations.forget_inode(inode);
    }
    if let Update::Link { inode, .. } = update {
        state.orphans.remove(inode);
    }
    Ok(applied)
}

/// Draws the consequences of a record that can't be applied.
pub fn handle_refusal(state: &mut NodeCore, id: SessionId, refusal: RecordRefusal) {
    match refusal {
        RecordRefusal::Forged(violation) => fence_session(state, id, &violation),
        RecordRefusal::Unmet(other, position) => {
            state.recovery.unmet.insert(id, UnmetDependency::Session(other, position));
        }
        RecordRefusal::NotGranted(violation) => {
            let position = state.store.applied(id);
            tracing::warn!(session = id.0, %position, %violation, "the log is cut: the grant of its next record is lost");
            cut_log(state, id);
        }
        RecordRefusal::Store(StoreError::FullBlocks { .. } | StoreError::FullMetadata { .. })
            if state.recovery.phase == RecoveryPhase::Recovering =>
        {
            state.recovery.unmet.insert(id, UnmetDependency::Room);
        }
        RecordRefusal::Store(error @ (StoreError::FullBlocks { .. } | StoreError::FullMetadata { .. })) => {
            // Credit covers every record, so only damage leads here. The record is kept with its log in the
            // quarantine.
            tracing::error!(session = id.0, %error, "a record that its credit covers finds no room");
            fence_session(state, id, &Violation::Log(error.to_string()));
        }
        RecordRefusal::Store(error) => {
            tracing::error!(session = id.0, %error, "the shared area failed");
            state.failure.get_or_insert(error);
            state.effects.push(NodeEffect::WakeDigests);
        }
    }
}

#[cfg(test)]
mod tests {
    use ashlar_types::InodeId;
    use ashlar_update::Rename;

    use super::*;

    fn batch(updates: &[Update<'_>]) -> Batch {
        let (mut bytes, mut records) = (Vec::new(), Vec::new());
        for update in updates {
            let start = bytes.len();
            update.encode().parts().iter().for_each(|part| bytes.extend_from_slice(part));
            let (position, end) = (LogPosition(start as u64), LogPosition(bytes.len() as u64));
            let (kind, body) = (update.kind() as u8, start..bytes.len());
            records.push(RecordAt { position, end, body_position: position, kind, body });
        }
        Batch { bytes, records, damage: Some(Violation::Truncated), is_last: true }
    }

    /// Each of them may take as long as a whole batch.
    #[test]
    fn batch_ends_behind_records_that_take_long() {
        let (inode, at) = (InodeId(9), Timestamp::default());
        let allocate = |how| Update::Allocate { inode, how, offset: 0, length: 4096, strip: true, at };
        let (reserve, insert) = (allocate(Allocation::Reserve), allocate(Allocation::Insert));
        let mixed = batch(&[reserve.clone(), insert.clone(), insert, reserve.clone()]);
        let decoded = mixed.decode();
        assert_eq!((decoded.updates.len(), decoded.is_whole, decoded.damage), (2, false, None));
        let (from, to) = (InodeId(2), InodeId(3));
        let rename = |new_parent| {
            let (name, new_name, target, exchange, whiteout) = (&b"a"[..], &b"b"[..], None, false, None);
            let (parent, release) = (from, true);
            let rename = Rename { parent, name, inode, new_parent, new_name, target, exchange, whiteout, release, at };
            Update::Rename(rename)
        };
        assert_eq!(batch(&vec![rename(to); 40]).decode().updates.len(), 16);
        assert_eq!(batch(&vec![rename(from); 40]).decode().updates.len(), 40);
        let plain = batch(&[reserve.clone(), reserve]);
        let decoded = plain.decode();
        assert_eq!((decoded.updates.len(), decoded.is_whole), (2, true));
        assert_eq!(decoded.damage, Some(Violation::Truncated));
    }
}
