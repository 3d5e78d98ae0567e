//! The state that updates act on, as a trait.

use ashlar_types::{FileKind, Inode, InodeId};
use thiserror::Error;

use crate::Allocation;

/// The target of a directory entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The inode.
    pub inode: InodeId,
    /// Its kind, which `getdents` tells without a look at the inode.
    pub kind: FileKind,
}

/// Why an update can't be applied: the record is forged or the state is damaged. An honest writer has checked all of
/// these under its leases before it appended the record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Invalid {
    /// The record names an inode that does not exist.
    #[error("inode {0} does not exist")]
    NoInode(InodeId),
    /// The inode to be made exists.
    #[error("inode {0} exists already")]
    InodeExists(InodeId),
    /// The entry to be removed, moved or replaced is not there, or leads to another inode.
    #[error("the directory entry is not what the record says")]
    WrongEntry,
    /// The entry to be made is there.
    #[error("the directory entry exists already")]
    EntryExists,
    /// The file to be linked has lost its last name, and gets no other.
    #[error("inode {0} has lost its last name")]
    Removed(InodeId),
    /// The inode's kind does not fit the update.
    #[error("inode {0} is of the wrong kind")]
    WrongKind(InodeId),
    /// The directory to be removed or replaced holds entries.
    #[error("directory {0} is not empty")]
    NotEmpty(InodeId),
    /// A directory would be moved below itself.
    #[error("directory {0} would be moved below itself")]
    Cycle(InodeId),
    /// The inode would come into a directory that counts against another subtree's quota.
    #[error("inode {0} would move to where another subtree's quota counts")]
    OtherQuota(InodeId),
    /// A number is out of its range: offset, size, length, mode, nanoseconds, link count.
    #[error("a number in the record is out of range")]
    OutOfRange,
    /// A name is not valid.
    #[error("a name in the record is not valid")]
    BadName,
}

/// The state of a file system (or of the part of it that an update names), as [`crate::apply()`] sees it.
///
/// Inodes, entries and attributes are plain look-ups and stores. The data calls do the work on a file's content, and
/// return the number of blocks that the file takes up afterwards ([`Inode::blocks`]), which every tree counts alike: a
/// block is taken up once a byte in it was written, or it was reserved, until it is punched out or cut off; a write
/// into an *inline* file is counted in blocks all the same. Only whole blocks are punched out. A new size that is the
/// old one or less cuts off all blocks behind it, reserved ones too; a larger one leaves reserved blocks as they are.
/// Bytes behind the end read as zeros when the file grows, whatever was there before it was cut.
pub trait Tree {
    /// Failure of the tree itself (I/O), or an [`Invalid`] update.
    type Error: From<Invalid>;

    /// The inode, or `None`.
    fn inode(&self, inode: InodeId) -> Result<Option<Inode>, Self::Error>;
    /// Stores an inode, new or changed.
    fn put_inode(&mut self, inode: InodeId, value: Inode) -> Result<(), Self::Error>;
    /// Removes an inode with its data and extended attributes, and its orphan mark.
    fn remove_inode(&mut self, inode: InodeId) -> Result<(), Self::Error>;

    /// The entry called `name` in directory `parent`, or `None`.
    fn entry(&self, parent: InodeId, name: &[u8]) -> Result<Option<Entry>, Self::Error>;
    /// Stores an entry, new or changed.
    fn put_entry(&mut self, parent: InodeId, name: &[u8], entry: Entry) -> Result<(), Self::Error>;
    /// Removes an entry.
    fn remove_entry(&mut self, parent: InodeId, name: &[u8]) -> Result<(), Self::Error>;

    /// Marks an inode as having no links but perhaps open handles (`true`), or takes the mark away.
    fn set_orphan(&mut self, inode: InodeId, orphan: bool) -> Result<(), Self::Error>;
    /// Whether an orphan may be freed now: no session but the writer of the update has it open.
    fn may_free(&self, inode: InodeId) -> bool;

    /// Stores an extended attribute.
    fn put_xattr(&mut self, inode: InodeId, name: &[u8], value: &[u8]) -> Result<(), Self::Error>;
    /// Removes an extended attribute; one that isn't there is no error.
    fn remove_xattr(&mut self, inode: InodeId, name: &[u8]) -> Result<(), Self::Error>;

    /// Writes `data` at `offset`. `inode` is as before the update, `size` the size after it.
    fn write(&mut self, id: InodeId, inode: &Inode, offset: u64, data: &[u8], size: u64) -> Result<u64, Self::Error>;
    /// Cuts off or extends with a hole. `inode` is as before the update, `size` the size after it.
    fn resize(&mut self, id: InodeId, inode: &Inode, size: u64) -> Result<u64, Self::Error>;
    /// Reserves, punches, zeroes, collapses or inserts. `inode` is as before the update, `size` the size after it.
    fn allocate(
        &mut self,
        id: InodeId,
        inode: &Inode,
        how: Allocation,
        offset: u64,
        length: u64,
        size: u64,
    ) -> Result<u64, Self::Error>;
}
