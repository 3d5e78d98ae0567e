//! Options, arguments and results of LibFS's operations.

use std::path::PathBuf;

use ashlar_types::{Errno, FileKind, Inode, InodeId, Name, NameError, Timestamp};
use ashlar_update::Entry;
use ashlar_wire::SessionKind;
use thiserror::Error;

use crate::client::own_descriptors::DescriptorPolicy;

/// How to open a session.
#[derive(Clone, Debug)]
pub struct Options {
    /// SharedFS's socket.
    pub socket: PathBuf,
    /// The kind of session.
    pub kind: SessionKind,
    /// The mount point or program, for `status`.
    pub label: String,
    /// The device number of the files of the mount that the program uses too; 0 if it uses none.
    pub beside: u64,
    /// The front end lets the kernel serve a call that fails with [`Errno::RESERVED`]. SharedFS refuses nothing to a
    /// session without it. Such a session may see a reserved file as it is on the medium.
    pub yields_to_kernel: bool,
    /// How long, in milliseconds, a call waits for a SharedFS that is away or silent before it fails with `EIO`.
    pub patience_ms: u64,
    /// Receives a sentence for the session's user when calls wait for SharedFS, and when that ends.
    pub notice: fn(&str),
    /// How LibFS keeps its descriptors.
    pub descriptors: DescriptorPolicy,
}

/// Why a session could not be opened.
#[derive(Debug, Error)]
pub enum ConnectError {
    /// No daemon listens.
    #[error("no ashlar daemon answers at {path}: {reason}; start one with 'ashlar daemon' or 'ashlar mount'")]
    NoDaemon {
        /// The socket.
        path: PathBuf,
        /// The reason.
        reason: String,
    },
    /// The daemon refused, with its reason.
    #[error("the daemon refused the session: {0}")]
    Refused(String),
    /// The user may have no session there; the kernel serves it.
    #[error("there are no sessions for this user; 'ashlar status' shows for which users there are")]
    NotAdmitted,
    /// The mount is for reading only.
    #[error("the file system is mounted for reading only; use its files through the mount")]
    ReadOnly,
    /// Shared memory could not be mapped.
    #[error("the session's memory could not be mapped: {0}")]
    Memory(String),
}

/// An inode as an operation found or left it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundInode {
    /// Its number.
    pub id: InodeId,
    /// Its attributes.
    pub inode: Inode,
}

impl FoundInode {
    /// Returns the directory entry that leads to the inode.
    pub(crate) fn entry(&self) -> Entry {
        Entry { inode: self.id, kind: self.inode.kind }
    }
}

/// An inode to create.
#[derive(Clone, Copy, Debug)]
pub struct NewInode<'a> {
    /// Its kind.
    pub kind: FileKind,
    /// Permission bits as the caller gave them.
    pub mode: u32,
    /// The caller's umask; a default ACL of the directory replaces it.
    pub umask: u32,
    /// Device number, for devices.
    pub device: u64,
    /// Target of a symbolic link.
    pub target: &'a [u8],
}

/// A time to set: a given one, or the clock's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SetTime {
    /// The time at which the operation runs.
    Now,
    /// This time.
    At(Timestamp),
}

/// Attributes to set: those that are `Some`.
#[derive(Clone, Copy, Debug, Default)]
pub struct AttributeChange {
    /// Permission bits.
    pub mode: Option<u32>,
    /// Owner.
    pub uid: Option<u32>,
    /// Group.
    pub gid: Option<u32>,
    /// Size.
    pub size: Option<u64>,
    /// Last access.
    pub accessed: Option<SetTime>,
    /// Last change of content.
    pub modified: Option<SetTime>,
    /// The change also clears set-user-id and set-group-id, as a truncation or change of owner by an ordinary user
    /// does.
    pub strip: bool,
}

/// Where a write begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteAt {
    /// At this offset.
    Offset(u64),
    /// At the end of the file, wherever that is when the write runs.
    End,
}

/// The outcome of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Written {
    /// The offset at which it began.
    pub offset: u64,
    /// Bytes written: fewer than asked for if the arena, a quota or a file-size limit has no room for more.
    pub bytes: usize,
}

/// How to rename.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RenameFlags {
    /// Fail with `EEXIST` instead of replacing (`RENAME_NOREPLACE`).
    pub no_replace: bool,
    /// Exchange the two names (`RENAME_EXCHANGE`).
    pub exchange: bool,
    /// Leave a whiteout at the old name, in the same step (`RENAME_WHITEOUT`).
    pub whiteout: bool,
    /// The directory that the caller found at the new name and will treat as removed. If another inode is there by now,
    /// nothing happens and the result is `ESTALE`.
    pub replaced: Option<InodeId>,
}

/// How to set an extended attribute.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct XattrFlags {
    /// Only create (`XATTR_CREATE`).
    pub create: bool,
    /// Only replace (`XATTR_REPLACE`).
    pub replace: bool,
}

/// The kind of range that a seek searches for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seek {
    /// Data (`SEEK_DATA`).
    Data,
    /// A hole (`SEEK_HOLE`).
    Hole,
}

/// A directory entry as `getdents` returns it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    /// The cookie to continue a listing after this entry.
    pub cookie: u64,
    /// The name.
    pub name: Vec<u8>,
    /// The inode that it leads to.
    pub id: InodeId,
    /// The inode's kind.
    pub kind: FileKind,
    /// The inode's attributes, if they are cached under a valid lease.
    pub inode: Option<Inode>,
}

/// An entry's name and the inode that it leads to.
#[derive(Clone, Copy, Debug)]
pub struct ListedName<'a> {
    /// The cookie to continue a listing after this entry.
    pub cookie: u64,
    /// The name.
    pub name: &'a [u8],
    /// The inode that it leads to.
    pub id: InodeId,
    /// The inode's kind.
    pub kind: FileKind,
}

/// The result of an operation.
pub type Outcome<T> = Result<T, Errno>;

/// Checks that a name is well-formed.
pub(crate) fn check_name(name: &[u8]) -> Outcome<()> {
    Name::check(name).map_err(|error| match error {
        NameError::TooLong => Errno::ENAMETOOLONG,
        NameError::Invalid => Errno::EINVAL,
    })
}

/// As [`check_name`], for names that must exist or be created: `.` and `..` can be neither removed nor created.
pub(crate) fn check_new_name(name: &[u8], dots: Errno) -> Outcome<()> {
    if name == b"." || name == b".." { Err(dots) } else { check_name(name) }
}
