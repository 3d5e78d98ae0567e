//! The commands, requests and limits of the lease manager.

use ashlar_types::{InodeId, LeaseMode, LeaseScope, LogPosition, SessionId, WantedLease};
use thiserror::Error;

/// The target of a lease: an inode and a scope.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct LeaseTarget {
    /// The inode; for [`LeaseScope::Files`] the directory, for [`LeaseScope::Subtree`] the topmost directory.
    pub inode: InodeId,
    /// The scope.
    pub scope: LeaseScope,
}

impl LeaseTarget {
    pub(crate) const fn node(inode: InodeId) -> Self {
        Self { inode, scope: LeaseScope::Node }
    }

    pub(crate) const fn files(inode: InodeId) -> Self {
        Self { inode, scope: LeaseScope::Files }
    }

    pub(crate) const fn subtree(inode: InodeId) -> Self {
        Self { inode, scope: LeaseScope::Subtree }
    }
}

/// The tree as it is applied in SharedFS's memory. It has no cycles but the root's.
pub trait Ancestry {
    /// Returns the place of an inode in the tree. [`InodeId::RENAME`] counts as a directory in the root.
    fn home(&self, inode: InodeId) -> InodeHome;
}

/// The place of an inode in the tree.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InodeHome {
    /// The directory through which a lease may govern the inode.
    ///
    /// `None` for the root, for an inode in no directory or in several, and for an unknown inode.
    pub directory: Option<InodeId>,
    /// Whether the inode is itself a directory.
    pub is_directory: bool,
}

impl InodeHome {
    /// Returns the directory whose files include the inode.
    #[must_use]
    pub fn as_file(self) -> Option<InodeId> {
        self.directory.filter(|_| !self.is_directory)
    }
}

/// A lease that a session asks for, and how freely the manager may answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct RequestedLease {
    /// The lease.
    pub lease: WantedLease,
    /// Whether a write lease may answer it, on as much of the tree around as no other session uses.
    ///
    /// A session that only reads should not set this. Then other sessions can join as passive readers
    /// ([`LeaseManager::join_readers`](crate::LeaseManager::join_readers)), and the next session finds the published
    /// grants.
    pub may_widen: bool,
}

/// The number of a request, which its grant repeats.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct RequestId(pub u64);

/// The content of a slot in a session's lease table, as it is or as the shell must write it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotWord {
    /// The session.
    pub session: SessionId,
    /// The slot's number in its lease table, or [`SlotWord::UNRECORDED`].
    pub slot: u32,
    /// The inode on which the lease stands.
    pub inode: InodeId,
    /// The generation.
    pub generation: u64,
    /// The mode; `None`: no lease.
    pub mode: Option<LeaseMode>,
    /// The scope.
    pub scope: LeaseScope,
}

impl SlotWord {
    /// The slot number of a lease that was attached when the table was full.
    ///
    /// The shell has nothing to write. The lease gets a slot as soon as the queue reaches it; a restart before that
    /// loses it.
    pub const UNRECORDED: u32 = u32::MAX;
}

/// A lease that the manager has granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grant {
    /// The inode that the session asked for.
    pub inode: InodeId,
    /// The slot that makes the lease valid, as the shell must write it.
    ///
    /// Its inode and scope name the target that governs the inode asked for.
    pub word: SlotWord,
}

/// A part cut out of a lease on more than one inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseHole {
    /// The inode, or the directory.
    pub inode: InodeId,
    /// The scope.
    pub scope: LeaseScope,
    /// Whether the holder keeps its own read lease on the part, so that its kernel's cache stays valid.
    ///
    /// Otherwise the shell invalidates that cache.
    pub keeps_read: bool,
}

/// The reason for a revocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum RevokeReason {
    /// Another session asks for inodes that the lease covers.
    Conflict,
    /// A lease on more than one inode was split too often.
    TooManyHoles,
    /// The session holds too many leases, and this one was granted least recently.
    Evicted,
    /// The session gave it back.
    Released,
    /// The session was idle for too long.
    Expired,
    /// The session has ended.
    Ended,
    /// The inode no longer exists.
    Gone,
    /// A subtree lease of the same session covers the inode now; its kernel's cache stays valid.
    Folded,
}

/// An action for the shell, to perform at once and in this order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// Write the word: the lease is revoked.
    ///
    /// If the session is a mount, invalidate the kernel's cache of the word's inode, or of everything below it.
    Revoke {
        /// The word, without a mode.
        word: SlotWord,
        /// The reason.
        reason: RevokeReason,
    },
    /// Write the word: the lease changes from write to read. Cached state stays valid.
    Downgrade {
        /// The word, with the generation that it had.
        word: SlotWord,
    },
    /// Write the word: the lease stays, but the session must ask again for everything granted on it.
    Split {
        /// The word, with a new generation.
        word: SlotWord,
        /// The part that the lease no longer covers. `None` if it covers as much as before.
        ///
        /// The kernel's cache of that part alone is invalidated.
        hole: Option<LeaseHole>,
    },
    /// Write the word: the session holds this lease without a grant of it.
    ///
    /// A restart finds the lease in the table, so the shell writes it before it publishes the session's applied
    /// position.
    Attach {
        /// The word.
        word: SlotWord,
    },
    /// Seal the session's log and apply all of it, then call [`crate::LeaseManager::handle_applied`].
    SealAndApply {
        /// The session.
        session: SessionId,
    },
    /// Write the words, then answer the request.
    Grant {
        /// The session.
        session: SessionId,
        /// The request.
        request: RequestId,
        /// The grants, in the order of the request.
        grants: Vec<Grant>,
        /// Updates of other sessions that these grants include and that are not known to be persistent.
        dependencies: Vec<(SessionId, LogPosition)>,
    },
    /// Nothing can be done before this time. Poll again then, or after the next event.
    Wait {
        /// The time, on the clock of the calls.
        until_us: u64,
    },
}

impl Command {
    pub(crate) fn word_mut(&mut self) -> Option<&mut SlotWord> {
        match self {
            Self::Revoke { word, .. } | Self::Downgrade { word } | Self::Split { word, .. } | Self::Attach { word } => {
                Some(word)
            }
            Self::Grant { .. } | Self::SealAndApply { .. } | Self::Wait { .. } => None,
        }
    }

    /// Returns the words that the command writes, in order.
    pub fn words(&self) -> impl Iterator<Item = SlotWord> + '_ {
        let (one, many) = match self {
            Self::Revoke { word, .. } | Self::Downgrade { word } | Self::Split { word, .. } | Self::Attach { word } => {
                (Some(*word), &[][..])
            }
            Self::Grant { grants, .. } => (None, &grants[..]),
            Self::SealAndApply { .. } | Self::Wait { .. } => (None, &[][..]),
        };
        one.into_iter().chain(many.iter().map(|grant| grant.word)).filter(|word| word.slot != SlotWord::UNRECORDED)
    }
}

/// The reason why a request was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum RequestError {
    /// The queue is full.
    #[error("{0} lease requests are waiting already; try again")]
    QueueFull(usize),
    /// The request asks for more leases than one request may.
    #[error("{0} leases were asked for at once; ask for fewer")]
    TooManyWants(usize),
    /// The session has ended or is about to.
    #[error("session {0} has ended")]
    Ended(SessionId),
    /// The inode has no lease of this scope: all below a file, or to read all below a directory, or to write files
    /// together.
    #[error("inode {0} has no lease of the scope that was asked for")]
    OddScope(InodeId),
}

/// Limits, each with its reason.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// How long a lease stays with its holder after its grant, unless the holder has used it sooner.
    ///
    /// So two sessions that ask for the same lease both make progress. The time is longer than an answer needs to reach
    /// its session and be used. It is so short that a session that is stopped in that time causes no noticeable delay.
    pub hold_us: u64,
    /// After so long without activity, a session's leases are revoked; 0: never.
    pub lease_ttl_us: u64,
    /// The age at which a passive reader's lease is revoked: the manager can't know whether it is still of use.
    pub passive_ttl_us: u64,
    /// The most leases of one session. Beyond, the least recently granted are revoked.
    ///
    /// The number is well below `table_slots`, since leases that are attached while a log is applied are added to it.
    pub entries_per_session_max: usize,
    /// Entries that a session makes in a directory that it holds, before the directory's lease is widened.
    ///
    /// The manager tries at the next power of two, and at each further one. The lease then covers everything below.
    /// Others may lose at most `widen_takes_max` leases on files there, each granted at least `widen_min_age_us` ago.
    pub widen_after_entries: u32,
    /// See `widen_after_entries`.
    pub widen_takes_max: usize,
    /// See `widen_after_entries`.
    pub widen_min_age_us: u64,
    /// Slots in a session's lease table.
    pub table_slots: u32,
    /// Holes cut into one lease before it is revoked as a whole.
    pub splits_max: u32,
    /// How long leases stay narrow at a directory where sessions collided.
    ///
    /// During that time, a session gets a subtree lease there or above only on request, and no lease on the directory's
    /// files. Otherwise the sessions would collide again.
    pub contended_us: u64,
    /// The most targets whose last writers are remembered one by one. Beyond, all are merged, and every grant depends
    /// on them.
    pub marks_max: usize,
    /// The most requests that may wait.
    pub queue_max: usize,
    /// The most leases in one request: a rename needs seven.
    pub wants_max: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            hold_us: 200,
            lease_ttl_us: 0,
            passive_ttl_us: 60_000_000,
            entries_per_session_max: 16_384,
            widen_after_entries: 64,
            widen_takes_max: 64,
            widen_min_age_us: 1000,
            table_slots: 65_536,
            splits_max: 32,
            contended_us: 2_000_000,
            marks_max: 65_536,
            queue_max: 4096,
            wants_max: 64,
        }
    }
}

/// Counts, for `ashlar status`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Requests granted, and answers that bypassed the queue.
    pub grants: u64,
    /// Leases revoked, for any reason.
    pub revocations: u64,
    /// Leases changed from write to read.
    pub downgrades: u64,
    /// Holes cut into leases on more than one inode.
    pub splits: u64,
    /// Logs sealed and applied because a lease moved.
    pub applications: u64,
    /// Leases held now, without those of passive readers.
    pub entries: u64,
    /// Sessions that hold leases now.
    pub sessions: u64,
    /// Requests waiting now.
    pub waiting: u64,
}
