//! What callers say and get.

use std::path::PathBuf;

use ashlar_types::{Errno, FileKind, Inode, InodeId, Timestamp};
use ashlar_update::Entry;
use ashlar_wire::SessionKind;
use thiserror::Error;

use crate::own::OwnDescriptors;

/// How to open a session.
#[derive(Clone, Debug)]
pub struct Options {
    /// SharedFS's socket.
    pub socket: PathBuf,
    /// What the session is.
    pub kind: SessionKind,
    /// Mount point or program, for `status`.
    pub label: String,
    /// The number of the device that a mount's files show, which the program uses too; 0 where it uses none.
    pub beside: u64,
    /// The front end has the kernel serve a call that fails with [`Errno::RESERVED`]. A session that does not is refused nothing, and may see what is on the
    /// medium of a file that the kernel serves.
    pub yields_to_kernel: bool,
    /// How long a call waits for a SharedFS that is away, or does not answer, before it gives `EIO`, in milliseconds.
    pub patience_ms: u64,
    /// Tells whoever looks after the session in a sentence that SharedFS is waited for, and what came of it.
    pub notice: fn(&str),
    /// How it keeps its descriptors.
    pub descriptors: OwnDescriptors,
}

/// Why no session could be opened.
#[derive(Debug, Error)]
pub enum ConnectError {
    /// Nobody listens.
    #[error("no ashlar daemon answers at {path}: {reason}; start one with 'ashlar daemon' or 'ashlar mount'")]
    NoDaemon {
        /// The socket.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// The daemon said no, and why.
    #[error("the daemon refused the session: {0}")]
    Refused(String),
    /// Shared memory could not be mapped.
    #[error("the session's memory could not be mapped: {0}")]
    Memory(String),
}

/// An inode as an operation found or left it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// Its number.
    pub id: InodeId,
    /// Its attributes.
    pub inode: Inode,
}

impl Found {
    /// What the entry says that leads to it.
    pub(crate) fn entry(&self) -> Entry {
        Entry { inode: self.id, kind: self.inode.kind }
    }
}

/// What to make.
#[derive(Clone, Copy, Debug)]
pub struct Make<'a> {
    /// Kind.
    pub kind: FileKind,
    /// Permission bits as the caller gave them.
    pub mode: u32,
    /// The caller's umask; a default ACL of the directory takes its place.
    pub umask: u32,
    /// Device number, for devices.
    pub device: u64,
    /// Target of a symbolic link.
    pub target: &'a [u8],
}

/// A time to set: one given, or the clock's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SetTime {
    /// The time at which the operation runs.
    Now,
    /// This one.
    At(Timestamp),
}

/// Attributes to set: those that are `Some`.
#[derive(Clone, Copy, Debug, Default)]
pub struct Change {
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
    /// The change also clears set-user-id and set-group-id (a truncation or change of owner by an ordinary user).
    pub strip: bool,
}

/// Where a write goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteAt {
    /// To this offset.
    Offset(u64),
    /// To the end of the file, wherever it is now.
    End,
}

/// What a write has done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Written {
    /// Where it began.
    pub offset: u64,
    /// How many bytes were written: fewer than asked for only where a quota has room for no more.
    pub bytes: usize,
}

/// How to rename.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RenameFlags {
    /// Fail with `EEXIST` rather than replace (`RENAME_NOREPLACE`).
    pub no_replace: bool,
    /// Exchange the two names (`RENAME_EXCHANGE`).
    pub exchange: bool,
    /// Leave a whiteout at the old name, in the same step (`RENAME_WHITEOUT`).
    pub whiteout: bool,
    /// The directory that the caller found at the new name. It will take that one for removed, so where another stands there by
    /// now nothing happens, and the answer is `ESTALE`.
    pub replaced: Option<InodeId>,
}

/// How to set an extended attribute.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct XattrFlags {
    /// Only make (`XATTR_CREATE`).
    pub create: bool,
    /// Only replace (`XATTR_REPLACE`).
    pub replace: bool,
}

/// What to look for in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seek {
    /// Data (`SEEK_DATA`).
    Data,
    /// A hole (`SEEK_HOLE`).
    Hole,
}

/// An entry as `getdents` tells it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    /// Where to go on after this entry.
    pub cookie: u64,
    /// The name.
    pub name: Vec<u8>,
    /// Where it leads.
    pub id: InodeId,
    /// Kind.
    pub kind: FileKind,
    /// Attributes, where they are at hand without asking.
    pub inode: Option<Inode>,
}

/// An entry's name, and where it leads.
#[derive(Clone, Copy, Debug)]
pub struct ListedName<'a> {
    /// Where to go on after this entry.
    pub cookie: u64,
    /// The name.
    pub name: &'a [u8],
    /// Where it leads.
    pub id: InodeId,
    /// Kind.
    pub kind: FileKind,
}

/// Space, for `statfs`.
pub type Space = ashlar_wire::SpaceReply;

/// The result of an operation.
pub type Outcome<T> = Result<T, Errno>;
