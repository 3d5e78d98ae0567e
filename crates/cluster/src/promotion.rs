//! Whether a replica may take over.

use ashlar_types::{Epoch, JournalPosition, NodeNumber};
use thiserror::Error;

use crate::document::{ClusterDocument, MemberRole};
use crate::hard_state::HardState;

/// The writer's state as the replica knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkEvidence {
    /// The writer answers.
    pub writer_answers: bool,
    /// The position up to which this replica's copy of the journal is durable.
    pub durable: JournalPosition,
}

/// Why a promotion is refused. Each says what may be lost, and what to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum PromotionRefusal {
    /// The node serves already.
    #[error("node {0} is the writer already")]
    IsWriter(NodeNumber),
    /// The node was replaced.
    #[error("node {0} was replaced in epoch {1}; make it anew with 'ashlar node add --replace'")]
    IsReplaced(NodeNumber, Epoch),
    /// The node is no member.
    #[error("node {0} is no member of this cluster")]
    NotAMember(NodeNumber),
    /// The writer answers.
    #[error("node {0} answers; stop it first: two writers would part the file system")]
    WriterAnswers(NodeNumber),
    /// The replica is not in sync: it has no whole copy, or the writer has acknowledged alone.
    #[error(
        "this node is not in sync: node {0} may have acknowledged updates that it lacks; start node {0}, and wait \
         until 'ashlar status' says 'in sync' (--force does not help)"
    )]
    NotInSync(NodeNumber),
    /// The writer may have gone on alone.
    #[error(
        "node {writer} may have acknowledged updates that this node lacks, since min_replicas is or may be 1 at one of the two: \
         start node {writer}, or give those updates up with --force (this node has its journal up to position {durable})"
    )]
    MayLackUpdates {
        /// The writer.
        writer: NodeNumber,
        /// The position up to which this node has the writer's journal.
        durable: JournalPosition,
    },
}

impl PromotionRefusal {
    /// Returns whether an administrator may override the refusal.
    #[must_use]
    pub const fn may_be_forced(self) -> bool {
        matches!(self, Self::MayLackUpdates { .. })
    }
}

/// Checks whether a replica may take over; `is_forced` gives up what it may lack.
///
/// With `min_replicas = 2` at both, the writer has acknowledged nothing that this node lacks. With 1 it may have gone
/// on alone, unless its last message said that it stopped, at a position that this node has.
///
/// # Errors
/// [`PromotionRefusal`].
pub fn check_promotion(
    document: &ClusterDocument,
    state: &HardState,
    node: NodeNumber,
    evidence: LinkEvidence,
    is_forced: bool,
) -> Result<(), PromotionRefusal> {
    match document.member(node).map(|member| member.role) {
        None => return Err(PromotionRefusal::NotAMember(node)),
        Some(MemberRole::Writer) => return Err(PromotionRefusal::IsWriter(node)),
        Some(MemberRole::Replaced) => return Err(PromotionRefusal::IsReplaced(node, document.epoch)),
        Some(MemberRole::Replica) => {}
    }
    let writer = document.writer().node;
    if evidence.writer_answers {
        return Err(PromotionRefusal::WriterAnswers(writer));
    }
    if !state.in_sync {
        return Err(PromotionRefusal::NotInSync(writer));
    }
    let needs_both = document.min_replicas >= 2 && state.writer_min_replicas.is_some_and(|writer| writer >= 2);
    let has_all = needs_both || state.writer_stopped_at.is_some_and(|stopped| evidence.durable >= stopped);
    if has_all || is_forced {
        return Ok(());
    }
    Err(PromotionRefusal::MayLackUpdates { writer, durable: evidence.durable })
}
