//! Journals the batches and the acts of a node, in the step that applies them.

use ashlar_journal::{BatchVerdict, FrameBody, JournalError, OwnAct, RefusalReason, RefusedRecord, SessionBegan};
use ashlar_log::RecordAt;
use ashlar_types::{InodeId, LogPosition, SessionId, Timestamp};
use ashlar_update::Update;

use crate::effects::NodeEffect;
use crate::journal::writer::journal_failure;
use crate::node_core::NodeCore;
use crate::records::validate::{RecordRefusal, Violation};
use crate::sessions::session::ServedSession;

/// Journals a batch that was just applied, with the verdict on it.
pub fn journal_batch(
    state: &mut NodeCore,
    id: SessionId,
    from: LogPosition,
    batch: (&[RecordAt], &[u8]),
    refusal: Option<&RecordRefusal>,
    latest: Timestamp,
) {
    let upto = state.store.applied(id);
    if state.journal.is_none() || upto == from && refusal.is_none() {
        return;
    }
    // They stand before the verdict that narrows the rights.
    for (session, inode, access) in state.batch_notes.take_rights() {
        journal_act(state, OwnAct::Right { session, inode, access: access.0 as u8 });
    }
    let Some(journal) = &mut state.journal else { return };
    let is_limited = state.sessions.get(&id).is_some_and(ServedSession::needs_validation);
    let refused = batch.0.iter().find(|record| record.end > upto || record.position >= upto);
    let refused = refusal
        .zip(refused)
        .map(|(refusal, record)| RefusedRecord { position: record.position, reason: reason_of(refusal) });
    let ignored = state.batch_notes.ignored().iter().copied().filter(|position| *position < upto);
    let verdict = BatchVerdict {
        upto,
        latest: is_limited.then_some(latest),
        is_fenced: matches!(refusal, Some(RecordRefusal::Forged(_))),
        refused: refused.into_iter().filter(|refused| refused.position <= upto).collect(),
        ignored: ignored.collect(),
        kept: state.batch_notes.kept(),
        ..journal.next_verdict(id)
    };
    let appended = journal.append_batch(&mut state.store, from, batch, verdict);
    note_journalled(state, appended);
}

/// Journals an update that SharedFS itself has applied.
pub fn journal_own(state: &mut NodeCore, update: &Update<'_>) {
    let body = update.encode().parts().concat();
    journal_act(state, OwnAct::Update { kind: update.kind() as u8, body: &body });
}

/// Journals an act of SharedFS itself, before a session makes use of it.
pub fn journal_act(state: &mut NodeCore, act: OwnAct<'_>) {
    append_frame(state, &FrameBody::Own(act));
}

/// Journals a range of inode numbers, before a session may use them.
pub fn journal_inodes(state: &mut NodeCore, session: SessionId, first: InodeId, count: u64) {
    journal_act(state, OwnAct::Inodes { session, first, count });
}

/// Journals the beginning of a session.
pub fn journal_session(state: &mut NodeCore, session: &ServedSession) {
    let began = SessionBegan {
        session: session.id,
        generation: session.log.generation(),
        credentials: session.credentials.clone(),
    };
    append_frame(state, &FrameBody::Began(began));
}

/// Removes the row of a session that has ended, and says so in the journal.
pub fn remove_session_row(state: &mut NodeCore, id: SessionId) {
    state.store.remove_session(id);
    append_frame(state, &FrameBody::Ended { session: id });
}

fn append_frame(state: &mut NodeCore, body: &FrameBody<'_>) {
    let Some(journal) = &mut state.journal else { return };
    let appended = journal.append(&mut state.store, body);
    note_journalled(state, appended);
}

/// Asks for the frame to be sent. Ends SharedFS if the journal failed: the replica would lack the frame.
fn note_journalled(state: &mut NodeCore, appended: Result<(), JournalError>) {
    state.effects.push(NodeEffect::Replicate);
    if let Err(error) = appended {
        tracing::error!(%error, "the journal can't be written");
        state.failure.get_or_insert(journal_failure(error));
        state.effects.push(NodeEffect::WakeDigests);
    }
}

/// Returns the reason of a refusal as the journal says it.
fn reason_of(refusal: &RecordRefusal) -> RefusalReason {
    let violation = match refusal {
        RecordRefusal::Forged(violation) | RecordRefusal::NotGranted(violation) => violation,
        RecordRefusal::Unmet(..) => return RefusalReason::UnmetDependency,
        RecordRefusal::Store(_) => return RefusalReason::NoCredit,
    };
    match violation {
        Violation::Log(_) => RefusalReason::DamagedLog,
        Violation::Truncated => RefusalReason::TruncatedLog,
        Violation::Lengthened => RefusalReason::LengthenedFile,
        Violation::Unreadable(_) => RefusalReason::Unreadable,
        Violation::Misfit(_) => RefusalReason::Misfit,
        Violation::NoLease(_) => RefusalReason::NoLease,
        Violation::ForeignNumber(_) => RefusalReason::ForeignNumber,
        Violation::NotPermitted(_) => RefusalReason::NotPermitted,
        Violation::TooDeep(_) => RefusalReason::TooDeep,
        Violation::TooManyAttributes(_) => RefusalReason::TooManyAttributes,
        Violation::NoCredit => RefusalReason::NoCredit,
        Violation::NoQuota => RefusalReason::NoQuota,
        Violation::ForgedDependency => RefusalReason::ForgedDependency,
        Violation::Panicked => RefusalReason::Panicked,
    }
}
