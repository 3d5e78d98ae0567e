//! What the shell says to the lease manager, and what it is told to do.

use ashlar_types::{InodeId, LogPosition, SessionId};
use thiserror::Error;

/// What a lease lets its holder do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Mode {
    /// Read; shared with other readers.
    Read,
    /// Read and write; exclusive.
    Write,
}

/// What a lease covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Scope {
    /// One inode: attributes, content, entries.
    Node,
    /// The files of one directory: what is in it, is no directory itself, has no other link, and has no lease of its own. To read only,
    /// and shared with other readers.
    Files,
    /// A directory and all below it that has no lease of its own.
    Subtree,
}

/// Where a lease stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    /// The inode; for [`Scope::Files`] the directory, for [`Scope::Subtree`] the topmost one.
    pub inode: InodeId,
    /// The scope.
    pub scope: Scope,
}

impl Place {
    pub(crate) const fn node(inode: InodeId) -> Self {
        Self { inode, scope: Scope::Node }
    }

    pub(crate) const fn files(inode: InodeId) -> Self {
        Self { inode, scope: Scope::Files }
    }

    pub(crate) const fn subtree(inode: InodeId) -> Self {
        Self { inode, scope: Scope::Subtree }
    }
}

/// The tree as it is applied in SharedFS's memory. It has no cycles but the root's.
pub trait Ancestry {
    /// Where an inode is. [`InodeId::RENAME`] counts as a directory in the root.
    fn home(&self, inode: InodeId) -> Home;
}

/// Where an inode is in the tree.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Home {
    /// The directory through which it may be governed. `None` for the root, for what is in no directory or in several, and for what is
    /// unknown.
    pub directory: Option<InodeId>,
    /// Whether it is a directory itself.
    pub is_directory: bool,
}

impl Home {
    /// The directory whose files it is one of.
    #[must_use]
    pub fn as_file(self) -> Option<InodeId> {
        self.directory.filter(|_| !self.is_directory)
    }
}

/// A lease that is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Want {
    /// On which inode.
    pub inode: InodeId,
    /// To read or to write; a subtree lease is to write in any case.
    pub mode: Mode,
    /// `Subtree` takes everything below the directory from everybody else. `Node` may be answered with more. `Files`: as `Node`; what is
    /// to be read and is a file is best held together with the other files of its directory.
    pub scope: Scope,
    /// It may be answered with one to write, on as much of the tree around as nobody else has anything in. Who only reads is better off without:
    /// others can read along ([`LeaseManager::join`](crate::LeaseManager::join)), and whoever comes next finds what he was told.
    pub widens: bool,
}

/// A request, as its grant names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct RequestId(pub u64);

/// What a slot of a session's lease table says, or shall say.
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
    pub mode: Option<Mode>,
    /// The scope.
    pub scope: Scope,
}

impl SlotWord {
    /// The lease was attached when the table was full: there is nothing to write. It gets a slot as soon as the queue
    /// comes to it; a restart before that loses it.
    pub const UNRECORDED: u32 = u32::MAX;
}

/// A lease that was granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grant {
    /// The inode that was wanted.
    pub inode: InodeId,
    /// The slot that validates it, as it shall be written. Its inode and scope name the place that governs the wanted
    /// inode.
    pub word: SlotWord,
}

/// What was cut out of a lease on more than one inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hole {
    /// The inode, or the directory.
    pub inode: InodeId,
    /// The scope.
    pub scope: Scope,
    /// The holder keeps a read lease of its own on it, so that its kernel's cache stays valid; otherwise the shell
    /// invalidates that.
    pub keeps_read: bool,
}

/// Why a lease was revoked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reason {
    /// Another session wants what it covers.
    Conflict,
    /// A lease on more than one inode was split too often.
    TooManyHoles,
    /// The session holds too many leases; this one was granted least recently.
    Evicted,
    /// The session gave it back.
    Released,
    /// The session was idle for too long.
    Expired,
    /// The session has ended.
    Ended,
    /// The inode does not exist any more.
    Gone,
    /// A subtree lease of the same session covers the inode now; its kernel's cache stays valid.
    Folded,
}

/// What the shell shall do, at once and in this order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// Write the word: the lease is gone. Invalidate the kernel's cache of the word's inode, or of all below it, if
    /// the session is a mount.
    Revoke {
        /// The word, without mode.
        word: SlotWord,
        /// Why.
        reason: Reason,
    },
    /// Write the word: from write to read. What is cached stays valid.
    Downgrade {
        /// The word, with the generation it had.
        word: SlotWord,
    },
    /// Write the word: the lease stays, but all that was granted on it must be asked for again.
    Split {
        /// The word, with a new generation.
        word: SlotWord,
        /// What it no longer covers. Only that is invalidated in the kernel's cache. `None`: it covers what it did.
        hole: Option<Hole>,
    },
    /// Write the word: the session holds this lease, though it was not told. It's found in the table after a restart,
    /// so it's written before the session's applied position is published.
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
        /// In the order of the wants.
        grants: Vec<Grant>,
        /// Updates of other sessions that these grants show and that are not known to be persistent.
        dependencies: Vec<(SessionId, LogPosition)>,
    },
    /// Nothing can be done before this time; poll again then, or after the next event.
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

    /// The words that the command says to write, in order.
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

/// Why a request was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum RequestError {
    /// The queue is full.
    #[error("{0} lease requests are waiting already; try again")]
    QueueFull(usize),
    /// More leases than may be asked for at once.
    #[error("{0} leases were asked for at once; ask for fewer")]
    TooManyWants(usize),
    /// The session has ended or is about to.
    #[error("session {0} has ended")]
    Ended(SessionId),
}

/// Limits, each with its reason.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// A lease is not taken for so long after its grant, unless it was used, so that two sessions which want the same both get
    /// on. Longer than an answer needs to reach its session and be used, and short enough that a session which is stopped in
    /// that time delays nobody noticeably.
    pub hold_us: u64,
    /// After so long without activity a session's leases are revoked; 0: never.
    pub lease_ttl_us: u64,
    /// A lease of a session that reads along goes after so long: whether it is still of use is not known.
    pub along_us: u64,
    /// Leases of one session. Beyond, the least recently granted are revoked. Well below `table_slots`, as leases
    /// that are attached while a log is applied come on top.
    pub entries_per_session_max: usize,
    /// A session that has made so much in a directory which it holds (a power of two, or from the next one on) gets a lease on all below it,
    /// if that costs others no more than `fill_takes_max` leases on files there, each of them granted `fill_spares_us` ago or before.
    pub fills_from: u32,
    /// See `fills_from`.
    pub fill_takes_max: usize,
    /// See `fills_from`.
    pub fill_spares_us: u64,
    /// Slots in a session's lease table.
    pub table_slots: u32,
    /// Holes cut into one lease before it is revoked as a whole.
    pub splits_max: u32,
    /// For so long after that, nobody gets a subtree lease on that directory, or above, without asking for it, nor one on its files: the
    /// sessions would collide again.
    pub contended_us: u64,
    /// Places whose last writers are remembered one by one. Beyond, all are merged, and every grant depends on them.
    pub marks_max: usize,
    /// Requests that may wait.
    pub queue_max: usize,
    /// Leases asked for at once: a rename needs seven.
    pub wants_max: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            hold_us: 200,
            lease_ttl_us: 0,
            along_us: 60_000_000,
            entries_per_session_max: 16_384,
            fills_from: 64,
            fill_takes_max: 64,
            fill_spares_us: 1000,
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
    /// Requests granted, and answers past the queue.
    pub grants: u64,
    /// Leases revoked, for whatever reason.
    pub revocations: u64,
    /// Leases turned from write to read.
    pub downgrades: u64,
    /// Holes cut into leases on more than one inode.
    pub splits: u64,
    /// Logs sealed and applied because a lease moved.
    pub applications: u64,
    /// Leases held now, but for those of sessions that read along.
    pub entries: u64,
    /// Sessions that hold leases now.
    pub sessions: u64,
    /// Requests waiting now.
    pub waiting: u64,
}
