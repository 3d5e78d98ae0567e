//! The bodies of frames.
//!
//! Shapes and meaning are in `docs/format-journal.md`, section "Bodies".

use ashlar_types::{
    Credentials, InodeId, JournalPosition, LogGeneration, LogPosition, NodeNumber, QuotaKey, QuotaLimits, SessionId,
    Timestamp,
};
use serde::{Deserialize, Serialize};

use crate::frame::{FRAME_BYTES_MAX, FRAME_HEADER_BYTES, FrameKind};

/// A session began: from here on, its records are validated under these credentials.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionBegan {
    /// The session.
    pub session: SessionId,
    /// The generation of its log.
    pub generation: LogGeneration,
    /// Its user. The encoder writes the groups in ascending order, each once.
    pub credentials: Credentials,
}

/// Records of a session's log: a batch, or a part of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub struct LogRecords<'a> {
    /// The session.
    pub session: SessionId,
    /// The log's position at which the batch begins.
    pub from: LogPosition,
    /// The log's position at which the batch ends.
    pub to: LogPosition,
    /// Bytes of the batch in the frames before this one.
    pub offset: u64,
    /// Records one behind the other ([`crate::push_record`]). Void slots and skipped bytes are left out.
    pub bytes: &'a [u8],
    /// Whether the batch continues in the session's next Records frame.
    #[serde(skip)]
    pub continues: bool,
}

/// The reason why a record was refused. The numbers stand on media: new ones are added at the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub enum RefusalReason {
    DamagedLog,
    TruncatedLog,
    LengthenedFile,
    Unreadable,
    Misfit,
    NoLease,
    ForeignNumber,
    NotPermitted,
    TooDeep,
    TooManyAttributes,
    NoCredit,
    NoQuota,
    ForgedDependency,
    UnmetDependency,
    Panicked,
}

/// A record that is not applied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RefusedRecord {
    /// Its position in the session's log.
    pub position: LogPosition,
    /// The reason.
    pub reason: RefusalReason,
}

/// The writing node's verdict on a session's batches since its verdict before.
///
/// It holds all that a replica would otherwise have to decide by itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BatchVerdict {
    /// The session.
    pub session: SessionId,
    /// The position up to which the session's log is applied.
    pub upto: LogPosition,
    /// The number of this verdict among the node's: one more each time.
    pub order: u64,
    /// A record that says that it was made later is applied as made at this time.
    pub latest: Option<Timestamp>,
    /// Whether the session is fenced: nothing more of its log is applied.
    pub is_fenced: bool,
    /// The records that are not applied, in ascending order.
    pub refused: Vec<RefusedRecord>,
    /// The records that are valid and have no effect, in ascending order.
    pub ignored: Vec<LogPosition>,
    /// The inodes that lost their last name and stay, in ascending order: a handle is open. All others are freed.
    pub kept: Vec<InodeId>,
}

/// An act of SharedFS itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum OwnAct<'a> {
    /// An update in no log: it frees a kept inode, merges a time of access, or repairs a fault.
    Update {
        /// The kind of a record.
        kind: u8,
        /// The body of a record.
        body: &'a [u8],
    },
    /// Grants a range of inode numbers.
    Inodes {
        /// The session that may use them.
        session: SessionId,
        /// The first number.
        first: InodeId,
        /// How many there are.
        count: u64,
    },
    /// Notes the access that a session keeps to an inode that it has open.
    Right {
        /// The session.
        session: SessionId,
        /// The inode.
        inode: InodeId,
        /// The access, as the lowest octal digit of a mode.
        access: u8,
    },
    /// Sets limits of a user, a group or a subtree.
    Limits {
        /// The user, group or subtree.
        key: QuotaKey,
        /// Its limits.
        limits: QuotaLimits,
    },
}

/// The body of a frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FrameBody<'a> {
    /// A session began.
    Began(SessionBegan),
    /// Records of a session's log.
    Records(LogRecords<'a>),
    /// The node's verdict on them.
    Verdict(BatchVerdict),
    /// An act of SharedFS itself.
    Own(OwnAct<'a>),
    /// Another node's journal must be applied up to a position before what follows.
    After {
        /// The other node.
        node: NodeNumber,
        /// The position in its journal.
        position: JournalPosition,
    },
    /// A session ended.
    Ended {
        /// The session.
        session: SessionId,
    },
    /// A successor ends a dead node's journal. Its verdicts on the rest follow.
    Adopt {
        /// The dead node.
        node: NodeNumber,
        /// The end of its journal.
        upto: JournalPosition,
    },
}

impl FrameBody<'_> {
    /// Returns the frame's kind.
    #[must_use]
    pub const fn kind(&self) -> FrameKind {
        match self {
            Self::Began(_) => FrameKind::Began,
            Self::Records(_) => FrameKind::Records,
            Self::Verdict(_) => FrameKind::Verdict,
            Self::Own(_) => FrameKind::Own,
            Self::After { .. } => FrameKind::After,
            Self::Ended { .. } => FrameKind::Ended,
            Self::Adopt { .. } => FrameKind::Adopt,
        }
    }

    /// Returns the session that the body names.
    #[must_use]
    pub const fn session(&self) -> Option<SessionId> {
        match self {
            Self::Began(SessionBegan { session, .. })
            | Self::Records(LogRecords { session, .. })
            | Self::Verdict(BatchVerdict { session, .. })
            | Self::Own(OwnAct::Inodes { session, .. } | OwnAct::Right { session, .. })
            | Self::Ended { session } => Some(*session),
            Self::Own(OwnAct::Update { .. } | OwnAct::Limits { .. }) | Self::After { .. } | Self::Adopt { .. } => None,
        }
    }
}

/// The most bytes of a Records body beside the records: four numbers and a length.
pub(crate) const RECORDS_FIELDS_BYTES_MAX: u64 = 5 * 10;
/// The most bytes of records in one frame.
pub(crate) const RECORDS_BYTES_MAX: u64 = FRAME_BYTES_MAX - FRAME_HEADER_BYTES - RECORDS_FIELDS_BYTES_MAX;

/// Cuts a batch into the frames that hold it: one, unless the batch is too long.
///
/// `bytes` are the records between `from` and `to` of the session's log. `frame_bytes_max` is the ring's limit
/// ([`crate::JournalRing::frame_bytes_max`]).
pub fn split_batch(
    session: SessionId,
    from: LogPosition,
    to: LogPosition,
    bytes: &[u8],
    frame_bytes_max: u64,
) -> impl Iterator<Item = LogRecords<'_>> {
    let limit =
        frame_bytes_max.saturating_sub(FRAME_HEADER_BYTES + RECORDS_FIELDS_BYTES_MAX).clamp(1, RECORDS_BYTES_MAX);
    let mut next = Some(0);
    std::iter::from_fn(move || {
        let offset = next?;
        let rest = &bytes[offset..];
        let length = rest.len().min(limit as usize);
        let continues = length < rest.len();
        next = continues.then_some(offset + length);
        Some(LogRecords { session, from, to, offset: offset as u64, bytes: &rest[..length], continues })
    })
}
