//! The messages.

use ashlar_types::{
    BlockAddress, Errno, FileKind, Inode, InodeId, LogGeneration, LogPosition, QuotaAmount, QuotaId, QuotaKey,
    QuotaLimits, SessionId,
};
use ashlar_update::Cost;
use serde::{Deserialize, Serialize};

use crate::{OperationCounts, Question};

/// The version of the protocol and of the shared memory's layout. A daemon understands this one only.
pub const PROTOCOL_VERSION: u32 = 14;

/// What a session is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SessionKind {
    /// A process that acts for the user who runs it.
    Process,
    /// A FUSE mount: acts for many users (so it must be root), and a kernel caches what it answers.
    Mount,
}

/// The first message on a session's first connection.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Hello {
    /// [`PROTOCOL_VERSION`] of the sender.
    pub version: u32,
    /// What the session is.
    pub kind: SessionKind,
    /// After SharedFS has restarted: go on with this session.
    pub resume: Option<Peer>,
    /// Where a mount is mounted, or the program's name: for `status`.
    pub label: String,
    /// The number of the device that a mount's files show, for a program that uses it too: it must be served; 0 for others.
    pub beside: u64,
    /// The kernel can serve what the session can't: it's refused leases that cover what is reserved for the kernel ([`Request::Reserve`]).
    pub yields_to_kernel: bool,
}

/// Proof of being a session: its number and the secret that SharedFS gave it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Peer {
    /// The session.
    pub session: SessionId,
    /// The secret.
    pub token: u64,
}

/// A data segment that the session may map.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct WelcomeSegment {
    /// Its number.
    pub number: u32,
    /// Blocks in it.
    pub blocks: u32,
    /// Where block 0 begins in the file, in bytes; the checksums (one `u32` a block) stand from byte 0.
    pub data_offset: u64,
}

/// SharedFS's answer to [`Hello`]. Descriptors come with it: log (read-write), control page (read-write), lease
/// table (read-only); to a process also a data segment (read-only), if the answer tells of one, and the board (read-only), if there is one.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Welcome {
    /// The session, and its secret for further connections.
    pub peer: Peer,
    /// Bytes of the log file.
    pub log_bytes: u64,
    /// Bytes of it, from its beginning, that have room; for more it asks ([`Request::LogSpace`]).
    pub log_allocated: u64,
    /// The log's generation.
    pub log_generation: LogGeneration,
    /// The arena's id.
    pub arena: u64,
    /// Whether `fsync` needs `fdatasync` of the log (a `disk` arena).
    pub sync_needed: bool,
    /// Whether stores need flush instructions (`pmem`, real or emulated).
    pub flush_needed: bool,
    /// Whether memory stands in for persistent memory, which then cannot be mapped as such.
    pub emulated: bool,
    /// The key of the name hash that orders directories (see [`DirectoryEntry::cookie`]).
    pub hash_key: [u8; 16],
    /// Milliseconds for which a kernel may cache what the mount answers.
    pub cache_ttl_ms: u64,
    /// The era of segments ([`crate::ControlPage::segment_era`]) in which the board that comes along is good: the SharedFS that writes it
    /// has not ended yet.
    pub segment_version: u64,
    /// The first data segment, in the same era: most arenas have no other, and most sessions read from it.
    pub segment: Option<WelcomeSegment>,
    /// Inode numbers that the session may give out: the first, and how many. It asks for more ([`Request::InodeRange`]).
    pub inodes: (InodeId, u64),
}

/// What a lease covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ScopeKind {
    /// One inode.
    Node,
    /// The files of a directory that have no lease of their own, to read.
    Files,
    /// A directory and all below it.
    Subtree,
}

/// Which state shall come with a lease. Attributes always come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Need {
    /// A file's content: inline bytes or all its extents.
    pub contents: bool,
    /// A directory's entries, if there are at most [`Need::ENTRIES_MAX`].
    pub entries: bool,
    /// With the entries, the attributes of those children that are governed by the same lease.
    pub children: bool,
    /// All extended attributes.
    pub xattrs: bool,
}

impl Need {
    /// The most entries that come with a lease; larger directories are asked for name by name and page by page.
    pub const ENTRIES_MAX: u64 = 8192;
}

/// A lease that is wanted.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Want {
    /// On which inode.
    pub inode: InodeId,
    /// To write, or only to read.
    pub write: bool,
    /// On the inode or on all below it.
    pub scope: ScopeKind,
    /// What to send with it.
    pub need: Need,
}

/// An extent of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Extent {
    /// The first block of the file.
    pub logical_block: u64,
    /// How many blocks.
    pub blocks: u64,
    /// Where the first one lies, the others behind it in the same segment; `None`: reserved, and read as zeros.
    pub address: Option<BlockAddress>,
}

/// A file's content as SharedFS has it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Contents {
    /// The bytes themselves.
    Inline(Vec<u8>),
    /// Extents, in order; what lies between them is a hole.
    Extents(Vec<Extent>),
}

/// A directory entry.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DirectoryEntry {
    /// The name's place in the directory's order: from 3 to 2^63 − 1, the same as long as the entry lives.
    pub cookie: u64,
    /// The name.
    pub name: Vec<u8>,
    /// Where it leads.
    pub inode: InodeId,
    /// Kind of that inode.
    pub kind: FileKind,
}

/// What SharedFS knows of an inode, as far as it was asked for.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct InodeState {
    /// Attributes.
    pub attributes: Inode,
    /// Content, if asked for.
    pub contents: Option<Contents>,
    /// All entries, if asked for and not too many.
    pub entries: Option<Vec<DirectoryEntry>>,
    /// All extended attributes, if asked for.
    pub xattrs: Option<Vec<(Vec<u8>, Vec<u8>)>>,
    /// Processes have mapped the file, and are to see what is written to it: who writes says so ([`Request::Show`]). It is told to all who may
    /// write: nobody else has a lease on a file when it is mapped so.
    pub is_followed: bool,
}

/// A lease that was granted.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct GrantReply {
    /// On which inode.
    pub inode: InodeId,
    /// The slot of the lease table whose word makes the lease valid.
    pub slot: u32,
    /// The word that the slot holds as long as the lease holds.
    pub word: u64,
    /// The state that comes with it.
    pub state: InodeState,
}

/// Blocks and metadata bytes that a session may use up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Credit {
    /// Data blocks.
    pub blocks: u64,
    /// Bytes of metadata.
    pub metadata_bytes: u64,
}

impl From<Cost> for Credit {
    fn from(cost: Cost) -> Self {
        Self { blocks: cost.blocks, metadata_bytes: cost.metadata_bytes }
    }
}

/// An era of quotas: what was granted in one is worth nothing in the next. Odd: there are limits; even: there is none, and nothing
/// needs to be asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct QuotaVersion(pub u64);

impl QuotaVersion {
    /// Whether anybody is limited.
    #[must_use]
    pub const fn has_limits(self) -> bool {
        self.0 % 2 == 1
    }

    /// The next era, with limits or without.
    #[must_use]
    pub const fn next(self, has_limits: bool) -> Self {
        // The session can write the word that this is read back from, so any number may come.
        Self(self.0.wrapping_add(if self.has_limits() == has_limits { 2 } else { 1 }))
    }
}

/// What an update will have somebody use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct QuotaWant {
    /// Who.
    pub key: QuotaKey,
    /// How much more.
    pub amount: QuotaAmount,
    /// The super-user does it, whom this limit does not hold. Only a privileged session is believed.
    pub exempt: bool,
}

/// What a session may have somebody use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct QuotaGrant {
    /// Who.
    pub key: QuotaKey,
    /// Blocks; `None`: they are not limited.
    pub blocks: Option<u64>,
    /// Inodes; `None`: they are not limited.
    pub inodes: Option<u64>,
}

/// An owner, a group or a subtree, for `ashlar quota show`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct QuotaStatus {
    /// Who.
    pub key: QuotaKey,
    /// What is used.
    pub used: QuotaAmount,
    /// What may be.
    pub limits: QuotaLimits,
    /// Where the directory at the top of a subtree is, from the root of the file system.
    pub path: Option<Vec<u8>>,
}

/// The two kinds of file locks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum LockKind {
    /// `fcntl` record locks: a range, owned by a process (or an open file description).
    Record,
    /// `flock`: the whole file, owned by an open file description.
    Flock,
}

/// What is asked of a lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum LockMode {
    /// Shared.
    Read,
    /// Exclusive.
    Write,
    /// Take away.
    Unlock,
}

/// A slot of the session's control page as it was when the session asked. A request may be served after the session has given it up: it
/// says nothing of a slot that has changed since.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LockSlot {
    /// Which one.
    pub number: u32,
    /// Its word.
    pub word: u64,
}

/// Why only the kernel may serve an inode: no session but a mount's then holds a lease that covers it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum ReserveReason {
    /// A program may have mapped the file to write it, by pages of the kernel's.
    Mapped,
    /// A program is told by the kernel of what is done to the inode, and where that is a directory, to its entries and to what is in it.
    Watched,
    /// A program is told by the kernel of what is done on a mount as a whole. The inode is the root.
    WatchedAll,
}

/// A request of a session (or of the command line).
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Request {
    /// Opens or resumes a session.
    Hello(Hello),
    /// A further connection of a session.
    Attach {
        /// Version of the sender.
        version: u32,
        /// The session.
        peer: Peer,
    },
    /// All of these leases or none, with state.
    Acquire(Vec<Want>),
    /// One entry of a directory, and a lease on what it leads to.
    Lookup {
        /// The directory.
        directory: InodeId,
        /// The name.
        name: Vec<u8>,
        /// The lease on the directory, where the session holds none that is enough.
        within: Option<Want>,
        /// Where there is no such entry, one is to be made: then the lease on the directory is to be one to write.
        makes: bool,
        /// Whether what is found is to be written.
        write: bool,
        /// What to send of it.
        need: Need,
    },
    /// Entries of a directory on which the session holds a lease, in cookie order, without leases.
    ReadDirectory {
        /// The directory.
        directory: InodeId,
        /// Entries with larger cookies only.
        after: u64,
        /// At most so many.
        limit: u32,
    },
    /// A range of inode numbers.
    InodeRange,
    /// More credit.
    Credit {
        /// At least so much.
        want: Credit,
        /// It is for an update that gives back as much as it takes, once it is committed.
        replaces: bool,
    },
    /// Give the log's file room up to this byte.
    LogSpace {
        /// Bytes from its beginning.
        bytes: u64,
    },
    /// Give all slots for open handles room.
    HandleSpace,
    /// Digest the session's log up to its tail and commit; the reply tells the committed position.
    Digest,
    /// Digest the session's log up to this position at least, or up to its tail, and commit that. The reply tells the committed position, as soon as that
    /// is so: the rest is digested while the session goes on.
    MakeRoom {
        /// The position.
        upto: LogPosition,
    },
    /// Make other sessions' updates persistent, which this session's depend on.
    SyncDependencies(Vec<(SessionId, LogPosition)>),
    /// Make persistent what other sessions have done to an inode and to its names, and what this session depends on.
    SyncInode {
        /// The inode.
        inode: InodeId,
        /// Other sessions' updates on which this session's depend.
        dependencies: Vec<(SessionId, LogPosition)>,
    },
    /// Make persistent what all sessions have done.
    SyncAll,
    /// For `statfs`.
    Space {
        /// The subtree within whose limits it is asked for.
        subtree: QuotaId,
    },
    /// A data segment; its descriptor (read-only) comes with the reply.
    Segment(u32),
    /// The mount's `/dev/fuse` descriptor comes with this, through which SharedFS makes the kernel forget what is no longer true.
    RegisterMount {
        /// The device number that the mount's files show (`st_dev`).
        device: u64,
    },
    /// Sets or removes a lock. A `wait` reply comes when it's granted, or on `CancelLock` from another connection.
    Lock {
        /// The file.
        inode: InodeId,
        /// Kind.
        kind: LockKind,
        /// Who owns it within the session.
        owner: u64,
        /// The process to name to others who ask.
        pid: u32,
        /// First byte.
        start: u64,
        /// Last byte.
        end: u64,
        /// Mode.
        mode: LockMode,
        /// `Some(ticket)`: wait; the ticket is the session's name for this waiting.
        wait: Option<u64>,
        /// The slot in which the session has a copy of the process's locks on the file, and may be delegated them.
        slot: Option<LockSlot>,
    },
    /// Which lock is in the way of this record lock.
    QueryLock {
        /// The file.
        inode: InodeId,
        /// Kind.
        kind: LockKind,
        /// Who asks.
        owner: u64,
        /// First byte.
        start: u64,
        /// Last byte.
        end: u64,
        /// Mode.
        mode: LockMode,
    },
    /// Stops waiting.
    CancelLock {
        /// The ticket of the waiting.
        ticket: u64,
    },
    /// Removes all locks of an owner on a file, as `close` does.
    ReleaseLocks {
        /// The file.
        inode: InodeId,
        /// The owner.
        owner: u64,
        /// Which of its locks.
        kind: LockKind,
    },
    /// Takes the process's record locks on a file back, if they are delegated, and tells which ones there are.
    YieldLocks {
        /// The file.
        inode: InodeId,
        /// From here on until they are released, the same process may lock the file over them through a mount: they move there.
        moves: bool,
    },
    /// The session ends in order; the reply comes when all of it is committed.
    Goodbye,
    /// The session ends, as if its process had died: the reply comes when all of it is applied.
    Leave,
    /// What is going on (command line).
    Status,
    /// Checks the file system while it is in use (command line).
    Fsck,
    /// Changes the arena's size (command line).
    Resize {
        /// New size, in bytes.
        bytes: u64,
    },
    /// Commits everything and ends SharedFS, if no session is left (command line).
    Shutdown,
    /// More of what is limited: all of these or none. The limits that hold are told with what is granted.
    Quota(Vec<QuotaWant>),
    /// Sets limits, or takes them away, at once (command line).
    SetQuota {
        /// Whose.
        key: QuotaKey,
        /// The limits.
        limits: QuotaLimits,
    },
    /// Who uses how much, and who may (command line).
    Quotas,
    /// The answer to this question in the session's mailbox, which was too long for that.
    Kept(Question),
    /// Blocks of a file that this session has open are to stay where they are: the process maps them.
    Map {
        /// The file.
        inode: InodeId,
        /// The first block.
        first: u64,
        /// How many: all of them must be in data segments.
        blocks: u64,
        /// What is written to the file from now on is to be seen there. The session must hold the lease to write it.
        follows: bool,
        /// What the session calls it, below 2^31. What it called so before is unmapped.
        number: u32,
    },
    /// The process has unmapped what it had mapped under this number.
    Unmap {
        /// The number.
        number: u32,
    },
    /// What this session has written to a file is to be seen where the file is mapped.
    Show {
        /// The file.
        inode: InodeId,
    },
    /// Reserves an inode for the kernel (a mount's session): when the answer comes, no session but mounts' holds a lease that covers it. Others that ask
    /// for one get [`Errno::RESERVED`]. It holds until [`Request::Free`], or until the session's end.
    Reserve {
        /// The inode.
        inode: InodeId,
        /// Why.
        reason: ReserveReason,
    },
    /// Ends what [`Request::Reserve`] began. As long as there is another reason, or another mount has one, the inode stays reserved.
    Free {
        /// The inode.
        inode: InodeId,
        /// Why it was reserved.
        reason: ReserveReason,
    },
    /// A descriptor of the kernel's. A directory on a mount of the arena comes with this; back comes a new open file description of the
    /// inode on that mount.
    Materialise {
        /// Which inode: a regular file or a directory.
        inode: InodeId,
        /// How to open it, as for open(2): the access mode, and flags that neither make nor cut anything.
        flags: u32,
    },
}

/// A helper opens what it sends to a session with this flag (`O_NONBLOCK`, which means nothing to a file) and clears it then: by that a mount knows that the
/// first closing by another process is no closing by a program ([`Request::Materialise`]).
pub const HELPER_FLAG: i32 = libc::O_NONBLOCK;

/// Free and total space.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpaceReply {
    /// Data blocks in the arena.
    pub blocks_total: u64,
    /// Data blocks neither used nor promised to others.
    pub blocks_free: u64,
    /// Files that there may be.
    pub inodes_total: u64,
    /// Files that can still be made.
    pub inodes_free: u64,
}

/// One session, for `status`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SessionStatus {
    /// Number.
    pub session: SessionId,
    /// What it is.
    pub kind: SessionKind,
    /// Process.
    pub pid: u32,
    /// User.
    pub uid: u32,
    /// Mount point, or program.
    pub label: String,
    /// Bytes in the log that are not yet committed.
    pub log_used_bytes: u64,
    /// Size of the log.
    pub log_bytes: u64,
    /// Records digested so far.
    pub records: u64,
    /// Bytes of log digested so far.
    pub digested_bytes: u64,
    /// Leases granted to it so far.
    pub leases_granted: u64,
    /// Lease words taken from it, narrowed or renewed so far.
    pub leases_revoked: u64,
    /// What it says that it has done, by the number of [`crate::OperationKind`].
    pub operations: Vec<OperationCounts>,
    /// Whether it was fenced for forged records, and why.
    pub fenced: Option<String>,
}

/// What is going on.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct StatusReply {
    /// Version of the daemon.
    pub version: String,
    /// Process of the daemon.
    pub pid: u32,
    /// Seconds since it started.
    pub uptime_seconds: u64,
    /// Where the arena is.
    pub arena: String,
    /// Kind of its medium.
    pub medium: String,
    /// Size, in bytes.
    pub arena_bytes: u64,
    /// Space.
    pub space: SpaceReply,
    /// Sessions.
    pub sessions: Vec<SessionStatus>,
    /// Named counters since the start, in a fixed order.
    pub counters: Vec<(String, u64)>,
}

/// The result of a check.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct FsckReply {
    /// What was counted: name and number.
    pub counts: Vec<(String, u64)>,
    /// What is wrong, a sentence each.
    pub problems: Vec<String>,
}

/// SharedFS's answers.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[allow(clippy::large_enum_variant, reason = "a reply lives for one call, on the stack")]
pub enum Reply {
    /// It failed.
    Error(Errno),
    /// The connection's first message was refused, with a sentence for people.
    Refused(String),
    /// To `Hello`.
    Welcome(Box<Welcome>),
    /// It's done.
    Done,
    /// To `Acquire`: the grants in the order of the wants, children of directories behind them.
    Granted {
        /// The grants.
        grants: Vec<GrantReply>,
        /// The session's own log is part of the state up to here.
        applied: LogPosition,
        /// What these states show of other sessions: to be logged before anything that could depend on it.
        dependencies: Vec<(SessionId, LogPosition)>,
    },
    /// To `Lookup`: `None` if there is no such entry.
    Entry {
        /// The entry.
        entry: Option<DirectoryEntry>,
        /// The directory, if a lease on it was asked for.
        directory: Option<GrantReply>,
        /// What the entry leads to, and what was told along with it.
        grants: Vec<GrantReply>,
        /// As in `Granted`.
        applied: LogPosition,
        /// As in `Granted`.
        dependencies: Vec<(SessionId, LogPosition)>,
    },
    /// To `ReadDirectory`.
    Entries(Vec<DirectoryEntry>),
    /// To `InodeRange`: the first number and how many.
    Inodes(InodeId, u64),
    /// To `Credit`: what was granted, at least what was asked for.
    Credit(Credit),
    /// To `Digest`.
    Committed(LogPosition),
    /// To `Space`.
    Space(SpaceReply),
    /// To `Segment`.
    Segment(WelcomeSegment),
    /// To `Lock`: it is done, and the slot is delegated, with all of the process's locks on the file.
    Delegated,
    /// To `Lock` and `QueryLock`: the process has locks on this file through a mount, and must go on there.
    LockedOnMount,
    /// To `YieldLocks`: mode, first and last byte of each.
    Locks(Vec<(LockMode, u64, u64)>),
    /// To `QueryLock`: mode, first and last byte, and process of a lock that is in the way.
    Conflict(Option<(LockMode, u64, u64, u32)>),
    /// To `Status`.
    Status(Box<StatusReply>),
    /// To `Fsck`.
    Fsck(FsckReply),
    /// To `Quota`: what was granted, at least what was asked for, in the order of the wants.
    Quota {
        /// The era in which it may be used.
        version: QuotaVersion,
        /// How much.
        grants: Vec<QuotaGrant>,
    },
    /// To `Quotas`.
    Quotas(Vec<QuotaStatus>),
    /// To `Map`: where the blocks are, in order; none where they can't be mapped.
    Mapped(Vec<Extent>),
}
