//! The messages of the session protocol.

use std::path::PathBuf;

use ashlar_types::{
    ByteRange, Contents, Errno, Extent, FileKind, Inode, InodeId, LeaseMode, LeaseScope, LockAction, LockKind,
    LockedRange, LogGeneration, LogPosition, NameHashKey, QuotaAmount, QuotaId, QuotaKey, QuotaLimits, QuotaVersion,
    SegmentVersion, SessionId, VersionRange, WantedLease,
};
use ashlar_update::Cost;
use serde::{Deserialize, Serialize};

use crate::cluster::{ClusterCommand, ClusterReport};
use crate::{MountTerms, OperationCounts, Question};

/// The versions of the protocol and of the shared memory's layout that this release understands.
pub const PROTOCOL_VERSIONS: VersionRange = VersionRange::new(18, 18);

/// The kind of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SessionKind {
    /// A process that acts for the user that runs it.
    Process,
    /// A FUSE mount. It acts for many users, so it must be root, and a kernel caches its answers.
    Mount,
}

/// The first message on a session's first connection.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Hello {
    /// [`PROTOCOL_VERSIONS`] of the sender. They come first in every version of this message.
    pub versions: VersionRange,
    /// The kind of the session.
    pub kind: SessionKind,
    /// After a restart of SharedFS: the session to resume.
    pub resume: Option<Peer>,
    /// For `status`: the mount point, or the program's name.
    pub label: String,
    /// The device number of a mount's files, for a program that uses that mount too; otherwise 0.
    ///
    /// SharedFS must serve that mount.
    pub beside: u64,
    /// Whether the kernel can serve inodes that the session can't.
    ///
    /// Such a session is refused leases that cover reserved inodes ([`Request::Reserve`]).
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
    /// The offset of block 0 in the file, in bytes. The checksums (one `u32` a block) begin at byte 0.
    pub data_offset: u64,
}

/// SharedFS's answer to [`Hello`].
///
/// Its descriptors are the log (read-write), the control page (read-write) and the lease table (read-only). A process
/// also receives a data segment (read-only), if the answer names one, and the grant cache (read-only), if one exists.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Welcome {
    /// The newest version of the protocol that both sides understand: the session's version.
    pub version: u32,
    /// The session, and its secret for further connections.
    pub peer: Peer,
    /// Bytes of the log file.
    pub log_bytes: u64,
    /// Bytes of the log file, from its beginning, that have room. The session asks for more ([`Request::LogSpace`]).
    pub log_allocated: u64,
    /// The log's generation.
    pub log_generation: LogGeneration,
    /// The arena's id.
    pub arena: u64,
    /// Whether `fsync` needs `fdatasync` of the log (a `disk` arena).
    pub sync_needed: bool,
    /// Whether `fsync` asks SharedFS, which waits for the replica.
    pub is_replicated: bool,
    /// Whether stores need flush instructions (`pmem`, real or emulated).
    pub flush_needed: bool,
    /// Whether ordinary memory replaces persistent memory, and so can't be mapped as persistent.
    pub emulated: bool,
    /// The key of the name hash that orders directories (see [`DirectoryEntry::cookie`]).
    pub hash_key: NameHashKey,
    /// Milliseconds for which a kernel may cache the mount's answers.
    pub cache_ttl_ms: u64,
    /// The segment version ([`crate::ControlPage::segment_version`]) in which the grant cache of this answer is valid.
    ///
    /// Under that version, the SharedFS that writes the cache has not ended.
    pub segment_version: SegmentVersion,
    /// The first data segment, of the same version.
    ///
    /// Most arenas have no other segment, and most sessions read from it.
    pub segment: Option<WelcomeSegment>,
    /// Inode numbers that the session may use: the first, and how many.
    ///
    /// The session asks for more ([`Request::InodeRange`]).
    pub inodes: (InodeId, u64),
}

/// The state to send with a lease. Attributes are always sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Need {
    /// A file's content: inline bytes or all its extents.
    pub contents: bool,
    /// A directory's entries, if there are at most [`Need::ENTRIES_MAX`].
    pub entries: bool,
    /// With the entries, the attributes of those children that the same lease covers.
    pub children: bool,
    /// All extended attributes.
    pub xattrs: bool,
}

impl Need {
    /// The most entries that SharedFS sends with a lease.
    ///
    /// A session reads larger directories name by name and page by page.
    pub const ENTRIES_MAX: u64 = 8192;
}

/// A lease that a session asks for, with state.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct LeaseRequest {
    /// The lease.
    pub lease: WantedLease,
    /// The state to send with it.
    pub need: Need,
}

impl LeaseRequest {
    /// Asks for a lease on an inode alone, to write or only to read.
    #[must_use]
    pub const fn on_inode(inode: InodeId, is_write: bool, need: Need) -> Self {
        Self { lease: WantedLease { inode, mode: LeaseMode::new(is_write), scope: LeaseScope::Node }, need }
    }

    /// Returns the same request for a lease to write.
    #[must_use]
    pub const fn to_write(self) -> Self {
        Self { lease: WantedLease { mode: LeaseMode::Write, ..self.lease }, ..self }
    }
}

/// A directory entry.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DirectoryEntry {
    /// The name's place in the directory's order: from 3 to 2^63 − 1. It is constant for the life of the entry.
    pub cookie: u64,
    /// The name.
    pub name: Vec<u8>,
    /// The inode to which it leads.
    pub inode: InodeId,
    /// The kind of that inode.
    pub kind: FileKind,
}

/// The state of an inode, as far as the session asked for it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct InodeState {
    /// Attributes.
    pub attributes: Inode,
    /// Content, if asked for.
    pub contents: Option<Contents>,
    /// All entries, if asked for and not too many.
    pub entries: Option<Vec<DirectoryEntry>>,
    /// The session's user may not read the directory: entries were asked for, and it must look them up one by one.
    pub hides_entries: bool,
    /// All extended attributes, if asked for; without the values that the session's user may not read.
    pub xattrs: Option<Vec<(Vec<u8>, Vec<u8>)>>,
    /// Whether processes have mapped the file and must see what is written to it.
    ///
    /// A session that writes reports the write ([`Request::Show`]). SharedFS sends the flag to all sessions that may
    /// write: no other session holds a lease on a file while it is mapped so.
    pub is_followed: bool,
}

/// A lease that SharedFS has granted.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct GrantReply {
    /// The inode.
    pub inode: InodeId,
    /// The slot of the lease table whose word makes the lease valid.
    pub slot: u32,
    /// The slot's word as long as the lease holds.
    pub word: u64,
    /// The state that comes with the lease.
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

/// An amount by which an update raises a user's, group's or subtree's usage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct QuotaRequest {
    /// The user, group or subtree.
    pub key: QuotaKey,
    /// The additional amount.
    pub amount: QuotaAmount,
    /// Whether the super-user makes the update and this limit does not bind it. SharedFS believes only a privileged
    /// session.
    pub exempt: bool,
}

/// A quota balance that a session was granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct QuotaGrant {
    /// The user, group or subtree.
    pub key: QuotaKey,
    /// Blocks; `None` if they are not limited.
    pub blocks: Option<u64>,
    /// Inodes; `None` if they are not limited.
    pub inodes: Option<u64>,
}

/// An owner, a group or a subtree, for `ashlar quota show`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct QuotaStatus {
    /// The user, group or subtree.
    pub key: QuotaKey,
    /// The amount in use.
    pub used: QuotaAmount,
    /// The limits.
    pub limits: QuotaLimits,
    /// The path of the directory at the top of a subtree, from the root of the file system.
    pub path: Option<Vec<u8>>,
}

/// A slot of the session's control page, as it was when the session asked.
///
/// SharedFS may serve a request after the session has abandoned it. Such a request does not affect a slot that has
/// changed since.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LockSlot {
    /// The slot's number.
    pub number: u32,
    /// The slot's word.
    pub word: u64,
}

/// The reason why only the kernel may serve an inode.
///
/// No session but a mount's then holds a lease that covers it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum ReserveReason {
    /// A program may have mapped the file for writing, through the kernel's pages.
    Mapped,
    /// The kernel notifies a program of operations on the inode.
    ///
    /// If the inode is a directory, that includes operations on its entries and on the files in it.
    Watched,
    /// The kernel notifies a program of operations on a mount as a whole. The inode is the root.
    WatchedAll,
}

/// A request of a session, or of the command line.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Request {
    /// Opens or resumes a session.
    Hello(Hello),
    /// Adds a connection to a session.
    Attach {
        /// The version of the session ([`Welcome::version`]).
        version: u32,
        /// The session.
        peer: Peer,
    },
    /// Asks for all of these leases or none, with state.
    Acquire(Vec<LeaseRequest>),
    /// Looks up one entry of a directory, and asks for a lease on its inode.
    Lookup {
        /// The directory.
        directory: InodeId,
        /// The name.
        name: Vec<u8>,
        /// The lease on the directory, if the session holds none that suffices.
        within: Option<LeaseRequest>,
        /// Whether the session creates the entry if it is missing. The lease on the directory is then a write lease.
        makes: bool,
        /// Whether the session writes the inode that is found.
        write: bool,
        /// The state of the inode to send.
        need: Need,
    },
    /// Reads entries of a directory on which the session holds a lease, in cookie order, without leases.
    ReadDirectory {
        /// The directory.
        directory: InodeId,
        /// Entries with larger cookies only.
        after: u64,
        /// The most entries to return.
        limit: u32,
    },
    /// Asks for a range of inode numbers.
    InodeRange,
    /// Asks for more credit.
    Credit {
        /// The least amount.
        want: Credit,
        /// Whether it is for an update that, once committed, frees as much as it takes.
        replaces: bool,
    },
    /// Asks for room in the log's file up to this byte.
    LogSpace {
        /// Bytes from its beginning.
        bytes: u64,
    },
    /// Asks for room for all slots for open handles.
    HandleSpace,
    /// Digests the session's log up to its tail, and commits. The reply holds the committed position.
    Digest,
    /// Digests the session's log at least up to this position, or up to its tail, and commits that part.
    ///
    /// The reply holds the committed position and arrives as soon as that part is committed. SharedFS digests the rest
    /// while the session goes on.
    MakeRoom {
        /// The position.
        upto: LogPosition,
    },
    /// Makes other sessions' updates persistent on which this session's updates depend.
    SyncDependencies(Vec<(SessionId, LogPosition)>),
    /// Makes persistent the changes of other sessions to an inode and its names, and this session's dependencies.
    SyncInode {
        /// The inode.
        inode: InodeId,
        /// Other sessions' updates on which this session's updates depend.
        dependencies: Vec<(SessionId, LogPosition)>,
    },
    /// Makes the changes of all sessions persistent.
    SyncAll,
    /// Asks for free space, for `statfs`.
    Space {
        /// The subtree whose limits apply.
        subtree: QuotaId,
    },
    /// Asks for a data segment; its descriptor (read-only) comes with the reply.
    Segment(u32),
    /// Registers a mount. Its `/dev/fuse` descriptor comes with this request.
    ///
    /// Through that descriptor, SharedFS makes the kernel forget state that is no longer true.
    RegisterMount {
        /// The device number that the mount's files show (`st_dev`).
        device: u64,
        /// Its terms for programs.
        terms: MountTerms,
    },
    /// Sets or removes a lock.
    ///
    /// If `wait` is set, the reply comes when the lock is granted, or after `CancelLock` from another connection.
    Lock {
        /// The file.
        inode: InodeId,
        /// The kind.
        kind: LockKind,
        /// The owner within the session.
        owner: u64,
        /// The process that other lock queries report.
        pid: u32,
        /// The range.
        range: ByteRange,
        /// The action.
        action: LockAction,
        /// `Some(ticket)`: wait. The ticket is the session's name for this wait.
        wait: Option<u64>,
        /// The slot that holds the session's copy of the process's locks on the file, and that may be delegated.
        slot: Option<LockSlot>,
    },
    /// Asks which lock conflicts with this record lock.
    QueryLock {
        /// The file.
        inode: InodeId,
        /// The kind.
        kind: LockKind,
        /// The owner within the session.
        owner: u64,
        /// The range.
        range: ByteRange,
        /// The action of the lock that would conflict.
        action: LockAction,
    },
    /// Cancels a wait.
    CancelLock {
        /// The ticket of the wait.
        ticket: u64,
    },
    /// Removes all locks of an owner on a file, as `close` does.
    ReleaseLocks {
        /// The file.
        inode: InodeId,
        /// The owner.
        owner: u64,
        /// The kind of the locks.
        kind: LockKind,
    },
    /// Recalls the process's delegated record locks on a file, and asks which ones exist.
    YieldLocks {
        /// The file.
        inode: InodeId,
        /// Whether the same process may from now on lock the file through a mount.
        ///
        /// Until they are released, the locks then move to that mount.
        moves: bool,
    },
    /// Ends the session in order. The reply comes when all of its log is committed.
    Goodbye,
    /// Ends the session as if its process had died. The reply comes when all of its log is applied.
    Leave,
    /// Asks for the state of SharedFS (command line).
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
    /// Asks for quota balances: all of these or none. The reply names the version of the limits.
    Quota(Vec<QuotaRequest>),
    /// Sets or removes limits, at once (command line).
    SetQuota {
        /// The user, group or subtree.
        key: QuotaKey,
        /// The limits.
        limits: QuotaLimits,
    },
    /// Asks for all usages and limits (command line).
    Quotas,
    /// Compares the tree with that of the shadow, both as of the same position of the journal (command line).
    CompareShadow {
        /// The shadow's directory.
        directory: PathBuf,
    },
    /// A command about the cluster (command line).
    Cluster(ClusterCommand),
    /// Fetches the answer to this question, which was too long for the session's request slot.
    Kept(Question),
    /// Fixes blocks of a file that this session has open: the process maps them.
    Map {
        /// The file.
        inode: InodeId,
        /// The first block.
        first: u64,
        /// The number of blocks. All of them must be in data segments.
        blocks: u64,
        /// Whether later writes to the file must be visible in the mapping. The session must hold the file's write
        /// lease.
        follows: bool,
        /// The session's number for the mapping, below 2^31. It replaces an earlier mapping of that number.
        number: u32,
    },
    /// Reports that the process has removed its mapping of this number.
    Unmap {
        /// The number.
        number: u32,
    },
    /// Makes this session's writes to a file visible where the file is mapped.
    Show {
        /// The file.
        inode: InodeId,
    },
    /// Reserves an inode for the kernel (a mount's session).
    ///
    /// When the reply comes, no session but mounts' holds a lease that covers the inode. Other sessions that ask for
    /// one get [`Errno::RESERVED`]. The reservation ends with [`Request::Free`], or with the session.
    Reserve {
        /// The inode.
        inode: InodeId,
        /// The reason.
        reason: ReserveReason,
    },
    /// Ends a reservation by [`Request::Reserve`].
    ///
    /// While another reason exists, or another mount has one, the inode stays reserved.
    Free {
        /// The inode.
        inode: InodeId,
        /// The reason for the reservation.
        reason: ReserveReason,
    },
    /// Asks for a kernel descriptor of an inode.
    ///
    /// The reply, [`Reply::OpenThere`], names no file yet.
    Materialise {
        /// The inode: a regular file or a directory.
        inode: InodeId,
        /// The flags of open(2): the access mode, and flags that neither create nor truncate.
        flags: u32,
    },
    /// Asks that appends to the session's log may go up to this position; the reply comes when they may.
    ///
    /// Only a node with a journal limits them: what a log holds must have room in the journal.
    LogLimit {
        /// The position.
        upto: LogPosition,
        /// Whether a read needs that, and no change. It waits less.
        reads: bool,
    },
}

/// The flag with which a helper opens a file that it sends to a session: `O_NONBLOCK`.
///
/// The flag means nothing to a file, and the helper clears it before sending. By the flag, a mount knows that the first
/// close by another process is not a program's close ([`Request::Materialise`]).
pub const HELPER_FLAG: i32 = libc::O_NONBLOCK;

/// Free and total space.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpaceReply {
    /// Data blocks in the arena.
    pub blocks_total: u64,
    /// Data blocks that are neither used nor granted to others.
    pub blocks_free: u64,
    /// The largest number of inodes.
    pub inodes_total: u64,
    /// Inodes that can still be created.
    pub inodes_free: u64,
}

/// One session, for `status`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SessionStatus {
    /// Its number.
    pub session: SessionId,
    /// Its kind.
    pub kind: SessionKind,
    /// Its process.
    pub pid: u32,
    /// Its user.
    pub uid: u32,
    /// Its mount point, or its program.
    pub label: String,
    /// Bytes in the log that are not committed yet.
    pub log_used_bytes: u64,
    /// The size of the log.
    pub log_bytes: u64,
    /// Records digested so far.
    pub records: u64,
    /// Bytes of log digested so far.
    pub digested_bytes: u64,
    /// Leases granted to the session so far.
    pub leases_granted: u64,
    /// Lease words of the session that were revoked, narrowed or renewed so far.
    pub leases_revoked: u64,
    /// Operations that the session has counted, by the number of [`crate::OperationKind`].
    pub operations: Vec<OperationCounts>,
    /// If the session was fenced for forged records: the violation.
    pub fenced: Option<String>,
    /// The terms of its mount, once that is registered.
    pub terms: Option<MountTerms>,
}

/// The state of SharedFS.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct StatusReply {
    /// The daemon's version.
    pub version: String,
    /// The daemon's process.
    pub pid: u32,
    /// Seconds since it started.
    pub uptime_seconds: u64,
    /// The path of the arena.
    pub arena: String,
    /// The kind of its medium.
    pub medium: String,
    /// The size, in bytes.
    pub arena_bytes: u64,
    /// The space.
    pub space: SpaceReply,
    /// The sessions.
    pub sessions: Vec<SessionStatus>,
    /// Named counters since the start, in a fixed order.
    pub counters: Vec<(String, u64)>,
    /// The cluster, if the arena is a member of one.
    pub cluster: Option<Box<ClusterReport>>,
}

/// The result of a check.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct FsckReply {
    /// Counted things: name and number.
    pub counts: Vec<(String, u64)>,
    /// The problems found, a sentence each.
    pub problems: Vec<String>,
}

/// A tree that was compared.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ComparedTree {
    /// The number of inodes.
    pub inodes: u64,
    /// The number of entries of directories.
    pub entries: u64,
    /// Bytes of contents.
    pub bytes: u64,
    /// The hash of the canonical dump, in hexadecimal.
    pub sha256: String,
}

/// A difference between two trees.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct TreeDifference {
    /// The thing that differs, as a dump names it.
    pub subject: String,
    /// Its attribute; `None` if only one of the trees has the thing.
    pub attribute: Option<String>,
    /// The attribute in the first tree.
    pub a: Option<String>,
    /// The attribute in the second tree.
    pub b: Option<String>,
    /// The difference as a sentence.
    pub text: String,
}

/// The result of a comparison.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ComparisonReply {
    /// SharedFS's own tree.
    pub first: ComparedTree,
    /// The shadow's.
    pub second: ComparedTree,
    /// The number of differences.
    pub differences_count: u64,
    /// The first of them.
    pub differences: Vec<TreeDifference>,
}

/// SharedFS's replies.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[allow(clippy::large_enum_variant, reason = "a reply lives for one call, on the stack")]
pub enum Reply {
    /// The request failed.
    Error(Errno),
    /// SharedFS refused the connection's first message, with a sentence for people.
    Refused(String),
    /// To `Hello`.
    Welcome(Box<Welcome>),
    /// The request is done.
    Done,
    /// To `Acquire`: the grants in the order of the request, then those on children of directories.
    Granted {
        /// The grants.
        grants: Vec<GrantReply>,
        /// The position up to which the states include the session's own log.
        applied: LogPosition,
        /// Other sessions' updates that the states include. The session must log them before any record that could
        /// depend on them.
        dependencies: Vec<(SessionId, LogPosition)>,
    },
    /// To `Lookup`: `None` if there is no such entry.
    Entry {
        /// The entry.
        entry: Option<DirectoryEntry>,
        /// The directory, if a lease on it was asked for.
        directory: Option<GrantReply>,
        /// The grants on the entry's inode, and on inodes that were sent along with it.
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
    /// To `Credit`: the granted credit, at least the amount asked for.
    Credit(Credit),
    /// To `Digest`.
    Committed(LogPosition),
    /// To `Space`.
    Space(SpaceReply),
    /// To `Segment`.
    Segment(WelcomeSegment),
    /// To `Lock`: the lock is set, and all of the process's locks on the file are delegated to the slot.
    Delegated,
    /// To `Lock` and `QueryLock`: the process has locks on this file through a mount, and must continue there.
    LockedOnMount,
    /// To `YieldLocks`.
    Locks(Vec<LockedRange>),
    /// To `QueryLock`: a lock that conflicts, and its process.
    Conflict(Option<(LockedRange, u32)>),
    /// To `Status`.
    Status(Box<StatusReply>),
    /// To `Fsck`.
    Fsck(FsckReply),
    /// To `Quota`: the granted balances, at least the amounts asked for, in the order of the request.
    Quota {
        /// The version under which the session may use the balances.
        version: QuotaVersion,
        /// The balances.
        grants: Vec<QuotaGrant>,
    },
    /// To `Materialise`: the session may have the inode open.
    ///
    /// A socket comes with the reply. The session sends an empty message on it, with a directory on a mount of the
    /// arena. It receives `Done`, with a new open file description of the inode on that mount, or `Error`. The socket
    /// is closed when nothing of SharedFS's keeps the mount busy any more.
    OpenThere,
    /// To `Quotas`.
    Quotas(Vec<QuotaStatus>),
    /// To `CompareShadow`.
    Compared(Box<ComparisonReply>),
    /// To `Map`: the places of the blocks, in order; empty if they can't be mapped.
    Mapped(Vec<Extent>),
    /// To `Cluster`, if it adds a replica: the text of its invitation.
    Invitation(String),
}
