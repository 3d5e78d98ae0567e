//! The updates.

use ashlar_types::{
    BLOCK_BYTES, FileKind, InodeId, LogPosition, QuotaId, SessionId, Timestamp, WHITEOUT_DEVICE, WHITEOUT_MODE,
    blocks_for,
};

/// The kind of an update, which stands in the record's header. The numbers stand on media; a number is never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
#[allow(missing_docs)]
pub enum UpdateKind {
    Write = 1,
    Create = 2,
    Link = 3,
    Unlink = 4,
    RemoveDirectory = 5,
    Rename = 6,
    Resize = 7,
    Allocate = 8,
    SetAttributes = 9,
    SetXattr = 10,
    RemoveXattr = 11,
    Accessed = 12,
    Release = 13,
    Depend = 14,
    SetQuota = 15,
}

/// How `fallocate` changes a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Allocation {
    /// Reserve blocks that read as zeros; the size grows if the range ends behind it.
    Reserve = 0,
    /// Reserve blocks, keep the size.
    ReserveKeepSize = 1,
    /// Make a hole; keep the size.
    Punch = 2,
    /// Make the range read as zeros and keep it reserved; the size grows if the range ends behind it.
    Zero = 3,
    /// As [`Allocation::Zero`], but keep the size.
    ZeroKeepSize = 4,
    /// Remove the range (whole blocks) and move the following bytes down.
    Collapse = 5,
    /// Insert a hole (whole blocks) and move the following bytes up.
    Insert = 6,
}

impl Allocation {
    /// All of them, in the order of their numbers.
    pub const ALL: [Self; 7] = [
        Self::Reserve,
        Self::ReserveKeepSize,
        Self::Punch,
        Self::Zero,
        Self::ZeroKeepSize,
        Self::Collapse,
        Self::Insert,
    ];
}

/// Makes an inode, and an entry for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Create<'a> {
    /// The new inode's number, from a range granted to the session.
    pub inode: InodeId,
    /// The directory.
    pub parent: InodeId,
    /// The name in it; empty for an inode without a name (`O_TMPFILE`), which starts as an orphan.
    pub name: &'a [u8],
    /// Kind.
    pub kind: FileKind,
    /// Permission bits as they are to be: umask, set-group-id inheritance and default ACL already applied.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Device number, for devices.
    pub device: u64,
    /// When.
    pub at: Timestamp,
    /// A symbolic link's target.
    pub target: &'a [u8],
    /// Inherited access ACL in the extended attribute's format; empty for none.
    pub acl_access: &'a [u8],
    /// Inherited default ACL; empty for none.
    pub acl_default: &'a [u8],
}

/// The inode that a rename leaves at the old name: a character device of number 0:0 and without permissions. It tells
/// an overlay of file systems that nothing is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Whiteout<'a> {
    /// Its number, from a range granted to the session.
    pub inode: InodeId,
    /// Owner.
    pub uid: u32,
    /// Group, with set-group-id inheritance already applied.
    pub gid: u32,
    /// Inherited access ACL; empty for none.
    pub acl_access: &'a [u8],
}

/// Moves an entry, or exchanges two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rename<'a> {
    /// The directory that holds the entry.
    pub parent: InodeId,
    /// The entry's name.
    pub name: &'a [u8],
    /// The inode that the entry leads to.
    pub inode: InodeId,
    /// The directory to move to.
    pub new_parent: InodeId,
    /// The name there.
    pub new_name: &'a [u8],
    /// The inode that the target entry leads to, if there is one; it's replaced, or exchanged.
    pub target: Option<InodeId>,
    /// Exchange the two entries instead of replacing the second.
    pub exchange: bool,
    /// Leave this at the old name; an exchange leaves the target there.
    pub whiteout: Option<Whiteout<'a>>,
    /// The writer has no handle open on the replaced inode: it may be freed with its last link.
    pub release: bool,
    /// When.
    pub at: Timestamp,
}

impl<'a> Rename<'a> {
    /// The whiteout, as an update of its own would make it in the empty place. One record does both, so that nothing
    /// can come between: neither name is free in the meantime.
    #[must_use]
    pub fn makes(&self) -> Option<Create<'a>> {
        self.whiteout.map(|whiteout| Create {
            inode: whiteout.inode,
            parent: self.parent,
            name: self.name,
            kind: FileKind::CharDevice,
            mode: WHITEOUT_MODE,
            uid: whiteout.uid,
            gid: whiteout.gid,
            device: WHITEOUT_DEVICE,
            at: self.at,
            target: &[],
            acl_access: whiteout.acl_access,
            acl_default: &[],
        })
    }
}

impl Create<'_> {
    /// The most metadata that it can use up.
    const fn metadata_bytes(&self) -> u64 {
        let bytes = self.name.len() + self.target.len() + self.acl_access.len() + self.acl_default.len();
        2 * ROW_BYTES + bytes as u64
    }
}

/// Sets attributes: those that are `Some`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SetAttributes {
    /// The inode.
    pub inode: InodeId,
    /// Permission bits.
    pub mode: Option<u32>,
    /// Owner.
    pub uid: Option<u32>,
    /// Group.
    pub gid: Option<u32>,
    /// Last access.
    pub accessed: Option<Timestamp>,
    /// Last change of content.
    pub modified: Option<Timestamp>,
    /// The new time of the last attribute change.
    pub at: Timestamp,
}

/// One update: the content of one record.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Update<'a> {
    /// Writes data into a regular file. `strip` clears set-user-id and set-group-id, as a write by an ordinary user
    /// does.
    Write { inode: InodeId, offset: u64, at: Timestamp, strip: bool, data: &'a [u8] },
    /// Makes an inode.
    Create(Create<'a>),
    /// Makes another entry for an inode that is not a directory.
    Link { inode: InodeId, parent: InodeId, name: &'a [u8], at: Timestamp },
    /// Removes an entry of an inode that is not a directory. `release`: the writer has no handle open on the inode.
    Unlink { inode: InodeId, parent: InodeId, name: &'a [u8], release: bool, at: Timestamp },
    /// Removes an empty directory. `release`: the writer has no handle open on it.
    RemoveDirectory { inode: InodeId, parent: InodeId, name: &'a [u8], release: bool, at: Timestamp },
    /// Moves or exchanges entries.
    Rename(Rename<'a>),
    /// Sets a regular file's size.
    Resize { inode: InodeId, size: u64, strip: bool, at: Timestamp },
    /// Changes a range of a regular file by `fallocate`.
    Allocate { inode: InodeId, how: Allocation, offset: u64, length: u64, strip: bool, at: Timestamp },
    /// Sets attributes.
    SetAttributes(SetAttributes),
    /// Sets an extended attribute; an ACL's may change the mode with it.
    SetXattr { inode: InodeId, name: &'a [u8], value: &'a [u8], mode: Option<u32>, at: Timestamp },
    /// Removes an extended attribute; an ACL's may change the mode with it.
    RemoveXattr { inode: InodeId, name: &'a [u8], mode: Option<u32>, at: Timestamp },
    /// Moves the time of last access forward; an earlier time changes nothing, so these merge without leases.
    Accessed { inode: InodeId, at: Timestamp },
    /// The writer has closed its last handle on an orphan.
    Release { inode: InodeId },
    /// The writer of the following records had seen another session's updates up to `position`.
    Depend { session: SessionId, position: LogPosition },
    /// Makes an inode count against another subtree's quota. A new inode counts against the same as its directory.
    SetQuota { inode: InodeId, quota: QuotaId, at: Timestamp },
}

/// The most that an update can use up in the shared area, against which credits are held.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// Data blocks.
    pub blocks: u64,
    /// Bytes of metadata.
    pub metadata_bytes: u64,
}

/// Metadata bytes that one inode or entry may take with the index's overhead.
const ROW_BYTES: u64 = 512;
/// Metadata bytes for the extents that one change of a file's map may add.
const EXTENT_BYTES: u64 = 256;

impl Update<'_> {
    /// The update's kind.
    #[must_use]
    pub const fn kind(&self) -> UpdateKind {
        match self {
            Self::Write { .. } => UpdateKind::Write,
            Self::Create(_) => UpdateKind::Create,
            Self::Link { .. } => UpdateKind::Link,
            Self::Unlink { .. } => UpdateKind::Unlink,
            Self::RemoveDirectory { .. } => UpdateKind::RemoveDirectory,
            Self::Rename(_) => UpdateKind::Rename,
            Self::Resize { .. } => UpdateKind::Resize,
            Self::Allocate { .. } => UpdateKind::Allocate,
            Self::SetAttributes(_) => UpdateKind::SetAttributes,
            Self::SetXattr { .. } => UpdateKind::SetXattr,
            Self::RemoveXattr { .. } => UpdateKind::RemoveXattr,
            Self::Accessed { .. } => UpdateKind::Accessed,
            Self::Release { .. } => UpdateKind::Release,
            Self::Depend { .. } => UpdateKind::Depend,
            Self::SetQuota { .. } => UpdateKind::SetQuota,
        }
    }

    /// The time at which its writer says that it was made.
    #[must_use]
    pub const fn time(&self) -> Option<Timestamp> {
        match self {
            Self::Create(create) => Some(create.at),
            Self::Rename(rename) => Some(rename.at),
            Self::SetAttributes(set) => Some(set.at),
            Self::Write { at, .. }
            | Self::Link { at, .. }
            | Self::Unlink { at, .. }
            | Self::RemoveDirectory { at, .. }
            | Self::Resize { at, .. }
            | Self::Allocate { at, .. }
            | Self::SetXattr { at, .. }
            | Self::RemoveXattr { at, .. }
            | Self::Accessed { at, .. }
            | Self::SetQuota { at, .. } => Some(*at),
            Self::Release { .. } | Self::Depend { .. } => None,
        }
    }

    /// Returns the update as made at `latest`, if it says that it was made later.
    ///
    /// Other times stay: a file's owner may set those of access and content to anything (`utimensat(2)`).
    #[must_use]
    pub fn limited_to(&self, latest: Timestamp) -> Option<Self> {
        let late = self.time().filter(|time| *time > latest)?;
        let mut limited = self.clone();
        match &mut limited {
            Self::Create(create) => create.at = latest,
            Self::Rename(rename) => rename.at = latest,
            Self::SetAttributes(set) => {
                let of_now = |time: Option<Timestamp>| time.map(|time| if time == late { latest } else { time });
                (set.accessed, set.modified, set.at) = (of_now(set.accessed), of_now(set.modified), latest);
            }
            Self::Write { at, .. }
            | Self::Link { at, .. }
            | Self::Unlink { at, .. }
            | Self::RemoveDirectory { at, .. }
            | Self::Resize { at, .. }
            | Self::Allocate { at, .. }
            | Self::SetXattr { at, .. }
            | Self::RemoveXattr { at, .. }
            | Self::Accessed { at, .. }
            | Self::SetQuota { at, .. } => *at = latest,
            Self::Release { .. } | Self::Depend { .. } => {}
        }
        Some(limited)
    }

    /// The most that the update can use up. Both sides of the credit account compute it from the record alone.
    #[must_use]
    pub fn cost(&self) -> Cost {
        let (blocks, metadata_bytes) = match self {
            Self::Write { offset, data, .. } => {
                let length = data.len() as u64;
                let blocks = if length == 0 { 0 } else { (offset % BLOCK_BYTES + length).div_ceil(BLOCK_BYTES) };
                // A small file's content gets a block of its own when the file grows beyond it.
                (blocks + u64::from(*offset >= BLOCK_BYTES), EXTENT_BYTES)
            }
            Self::Create(create) => (0, create.metadata_bytes()),
            Self::Link { name, .. } => (0, ROW_BYTES + name.len() as u64),
            Self::Rename(rename) => {
                let made = rename.makes().map_or(0, |create| create.metadata_bytes());
                (0, ROW_BYTES + rename.new_name.len() as u64 + made)
            }
            // A cut in the middle of a block copies the block.
            Self::Resize { .. } => (1, EXTENT_BYTES),
            Self::Allocate { how, length, .. } => match how {
                Allocation::Reserve | Allocation::ReserveKeepSize | Allocation::Zero | Allocation::ZeroKeepSize => {
                    (blocks_for(*length) + 2, 2 * EXTENT_BYTES)
                }
                Allocation::Punch => (2, 2 * EXTENT_BYTES),
                Allocation::Collapse | Allocation::Insert => (1, 2 * EXTENT_BYTES),
            },
            Self::SetXattr { name, value, .. } => (0, ROW_BYTES + (name.len() + value.len()) as u64),
            // These only free, or change a row in place.
            Self::Unlink { .. }
            | Self::RemoveDirectory { .. }
            | Self::SetAttributes(_)
            | Self::RemoveXattr { .. }
            | Self::Accessed { .. }
            | Self::Release { .. }
            | Self::Depend { .. }
            | Self::SetQuota { .. } => (0, 0),
        };
        Cost { blocks, metadata_bytes }
    }
}

impl std::ops::AddAssign for Cost {
    fn add_assign(&mut self, other: Self) {
        // Forged records may claim any cost; a cost beyond all credit stays beyond it.
        self.blocks = self.blocks.saturating_add(other.blocks);
        self.metadata_bytes = self.metadata_bytes.saturating_add(other.metadata_bytes);
    }
}
