//! Requests that may have to wait, their terms and their answers.

use ashlar_types::{Access, InodeId, QuotaId, QuotaKey, QuotaLimits, SessionId};
use ashlar_wire::{Reply, Request};

use crate::leases::grant::{AnswerGate, Patience};

/// Names a pending request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct RequestTicket(pub(super) u64);

/// The terms of one request.
#[derive(Clone, Copy, Debug)]
pub struct RequestTerms {
    /// Whether it may wait.
    pub patience: Patience,
    /// Bytes of memory that the answer may take.
    pub bytes_max: usize,
    /// The session has just resumed, and repeats what SharedFS has forgotten.
    pub reclaims: bool,
}

impl RequestTerms {
    /// The terms of a request of SharedFS itself.
    pub const OWN: Self = Self { patience: Patience::Any, bytes_max: usize::MAX, reclaims: false };
}

/// A reply, and what must have happened before it may be sent.
#[derive(Debug)]
pub struct GatedReply {
    /// The reply.
    pub reply: Reply,
    /// The conditions.
    pub gate: AnswerGate,
}

impl From<Reply> for GatedReply {
    fn from(reply: Reply) -> Self {
        Self { reply, gate: AnswerGate::default() }
    }
}

/// The result of a request.
#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "it is returned once, and not kept")]
pub enum NodeAnswer {
    /// A reply to a session.
    Reply(GatedReply),
    /// The session may open the inode on one of the mounts of these devices.
    ///
    /// A watched directory's entry comes with it, by which the kernel knows the watchers.
    MayOpen {
        /// The directory and the name.
        entry: Option<(InodeId, Vec<u8>)>,
        /// The devices that the files of the arena's mounts show.
        devices: Vec<u64>,
    },
    /// An act of the shell's own has ended.
    Done,
}

impl From<Reply> for NodeAnswer {
    fn from(reply: Reply) -> Self {
        Self::Reply(reply.into())
    }
}

/// A request that may have to wait.
#[derive(Debug)]
pub enum NodeRequest {
    /// A session's message.
    Session(SessionId, Request),
    /// A session's message that a session sends to open a file; the shell has read the flags.
    Open {
        /// The session.
        session: SessionId,
        /// The inode.
        inode: InodeId,
        /// The access that is wanted; `None` for a descriptor that neither reads nor writes.
        access: Option<Access>,
        /// Whether accesses must leave the time of access as it is.
        keeps_time: bool,
    },
    /// Free space, as an administrator sees it.
    Space(QuotaId),
    /// All limits and uses.
    Quotas,
    /// Sets limits.
    SetQuota(QuotaKey, QuotaLimits),
    /// Digests all that these sessions logged, and takes what they held.
    EndSessions(Vec<SessionId>),
    /// Frees the orphans that no session has open.
    SweepOrphans,
    /// Commits all that is applied.
    Commit,
    /// Makes durable all that all sessions have done: as their `sync` does.
    Sync,
    /// Makes free what sessions hold unused or have deleted.
    Reclaim,
    /// Takes the leases on these inodes from all sessions.
    TakeLeases(Vec<InodeId>),
}
