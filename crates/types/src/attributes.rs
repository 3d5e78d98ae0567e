//! An inode's attributes.

use serde::{Deserialize, Serialize};

use crate::{BLOCK_BYTES, InodeId, QuotaId};

/// The permission bits of a mode, set-id and sticky bits included.
pub const MODE_PERMISSIONS: u32 = 0o7777;
/// Set-user-id.
pub const MODE_SETUID: u32 = 0o4000;
/// Set-group-id.
pub const MODE_SETGID: u32 = 0o2000;
/// The sticky bit: in a directory, only an entry's owner may remove it.
pub const MODE_STICKY: u32 = 0o1000;

/// The device number of a whiteout, 0:0: a character device by which an overlay of file systems says that a name does
/// not exist.
pub const WHITEOUT_DEVICE: u64 = 0;
/// A whiteout's permission bits, as Linux makes it.
pub const WHITEOUT_MODE: u32 = 0;

/// In place of a device number: the file was made without a name (`O_TMPFILE`), and may still get one.
///
/// It is no device's number, and `st_rdev` does not show it.
pub const NEVER_NAMED: u64 = 1 << 63;

/// The kind of a file. The discriminants are those of `S_IFMT` shifted right by 12, and media hold them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[repr(u8)]
pub enum FileKind {
    /// A FIFO.
    Fifo = 1,
    /// A character device.
    CharDevice = 2,
    /// A directory.
    Directory = 4,
    /// A block device.
    BlockDevice = 6,
    /// A regular file.
    Regular = 8,
    /// A symbolic link.
    Symlink = 10,
    /// A socket.
    Socket = 12,
}

impl FileKind {
    /// Returns the kind whose discriminant is `value` (`d_type` of `getdents`, and the upper four bits of `st_mode`).
    #[must_use]
    pub const fn from_u8(value: u8) -> Option<Self> {
        Some(match value {
            1 => Self::Fifo,
            2 => Self::CharDevice,
            4 => Self::Directory,
            6 => Self::BlockDevice,
            8 => Self::Regular,
            10 => Self::Symlink,
            12 => Self::Socket,
            _ => return None,
        })
    }

    /// Returns the kind that `mode` (`st_mode`) names; a mode without a kind names a regular file, as for `mknod(2)`.
    #[must_use]
    pub const fn from_mode(mode: u32) -> Option<Self> {
        match (mode >> 12) & 0xf {
            0 => Some(Self::Regular),
            kind => Self::from_u8(kind as u8),
        }
    }

    /// Returns the kind's bits in `st_mode`.
    #[must_use]
    pub const fn mode_bits(self) -> u32 {
        (self as u32) << 12
    }
}

/// A point in time: seconds since 1970 (negative before), and nanoseconds from 0 to 999,999,999 after that second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Timestamp {
    /// Seconds since the epoch.
    pub seconds: i64,
    /// Nanoseconds in the second.
    pub nanoseconds: u32,
}

/// An inode: the attributes that `stat` returns, and those that the file system keeps beside them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Inode {
    /// The kind of the file.
    pub kind: FileKind,
    /// Permission bits, set-id and sticky bits ([`MODE_PERMISSIONS`]).
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Hard links; a directory has two and one for each subdirectory; an orphan has none.
    pub links: u32,
    /// Device number, for devices; [`NEVER_NAMED`] for a file that was made without a name, until it gets one.
    pub device: u64,
    /// Bytes in a file; bytes of a symbolic link's target; 0 for a directory.
    pub size: u64,
    /// Blocks of [`crate::BLOCK_BYTES`] that the file's data take up (holes take none, unwritten reservations do).
    pub blocks: u64,
    /// Entries in a directory, `.` and `..` not counted.
    pub entries: u64,
    /// A directory's parent (the root's is itself); for other files the directory of the link made or moved last, or
    /// the root once that link is removed and others are left.
    pub parent: InodeId,
    /// Last access.
    pub accessed: Timestamp,
    /// Last change of content.
    pub modified: Timestamp,
    /// Last change of attributes.
    pub changed: Timestamp,
    /// When the inode was made.
    pub born: Timestamp,
    /// The subtree whose quota it counts against.
    pub quota: QuotaId,
    /// The target of a symbolic link; empty for all other kinds.
    pub target: Vec<u8>,
}

impl Inode {
    /// Makes a new inode: empty, with one name, in `parent`; the super-user's, and counted against no subtree.
    #[must_use]
    pub fn new(kind: FileKind, mode: u32, parent: InodeId, at: Timestamp) -> Self {
        Self {
            kind,
            mode,
            uid: 0,
            gid: 0,
            links: if kind == FileKind::Directory { 2 } else { 1 },
            device: 0,
            size: 0,
            blocks: 0,
            entries: 0,
            parent,
            accessed: at,
            modified: at,
            changed: at,
            born: at,
            quota: QuotaId::NONE,
            target: Vec::new(),
        }
    }

    /// Returns `st_mode`: kind and permission bits.
    #[must_use]
    pub const fn st_mode(&self) -> u32 {
        self.kind.mode_bits() | self.mode
    }

    /// Returns `st_blocks`: the room that the data take up, in sectors of 512 bytes.
    #[must_use]
    pub const fn st_blocks(&self) -> u64 {
        self.blocks.saturating_mul(BLOCK_BYTES / 512)
    }

    /// Returns `st_rdev`: the low 32 bits of glibc's `dev_t`, which hold 12 bits of the major number and 20 of the
    /// minor one, all that Linux has.
    #[must_use]
    pub const fn st_rdev(&self) -> u32 {
        (self.device & 0xffff_ffff) as u32
    }

    /// Whether it is a directory.
    #[must_use]
    pub fn is_directory(&self) -> bool {
        self.kind == FileKind::Directory
    }
}
