//! The possible findings of a check.

use ashlar_types::{BlockAddress, InodeId, QuotaAmount, QuotaKey};
use thiserror::Error;

/// The most problems that a report lists; the rest is counted.
pub const PROBLEMS_MAX: usize = 10_000;

/// One thing that is not as it must be, as a sentence for people.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[allow(missing_docs)]
pub enum Problem {
    /// The root directory is missing.
    #[error("the root directory does not exist")]
    NoRoot,
    /// A row of a kind that this release does not know.
    #[error("row {key} is of an unknown kind")]
    UnknownRow { key: String },
    /// A row that can't be decoded.
    #[error("row {key} cannot be read")]
    DamagedRow { key: String, bytes: Vec<u8> },
    /// A row of an inode that does not exist, or that can't have such rows.
    #[error("inode {inode} has a row {key}, but no such inode can have one")]
    StrayRow { inode: InodeId, key: String, bytes: Vec<u8> },
    /// An entry that leads nowhere.
    #[error("the entry {name:?} of directory {directory} leads to inode {inode}, which does not exist")]
    DanglingEntry { directory: InodeId, name: String, inode: InodeId, bytes: Vec<u8> },
    /// An entry in its directory's wrong place, where no look-up finds it.
    #[error("the entry {name:?} of directory {directory} is not where its name's hash says")]
    MisplacedEntry { directory: InodeId, name: String, bytes: Vec<u8> },
    /// An entry that tells another kind than the inode has.
    #[error("the entry {name:?} of directory {directory} tells a wrong kind of inode {inode}")]
    WrongKind { directory: InodeId, name: String, inode: InodeId, bytes: Vec<u8> },
    /// A directory with more than one entry leading to it.
    #[error("directory {inode} has a second entry, {name:?} in directory {directory}")]
    SecondParent { inode: InodeId, directory: InodeId, name: String, bytes: Vec<u8> },
    /// A wrong link count.
    #[error("inode {inode} says that it has {found} links, but has {expected}")]
    WrongLinks { inode: InodeId, found: u32, expected: u32 },
    /// A wrong number of entries.
    #[error("directory {inode} says that it has {found} entries, but has {expected}")]
    WrongEntries { inode: InodeId, found: u64, expected: u64 },
    /// A wrong number of blocks.
    #[error("inode {inode} says that it takes up {found} blocks, but takes up {expected}")]
    WrongBlocks { inode: InodeId, found: u64, expected: u64 },
    /// A directory whose recorded parent does not hold its entry.
    #[error("directory {inode} says that its parent is {found}, but it is {expected}")]
    WrongParent { inode: InodeId, found: InodeId, expected: InodeId },
    /// An inode with links that no path leads to. `through`: the key of the entry that closes a circle of directories.
    #[error("no path leads to inode {inode}")]
    Unreachable { inode: InodeId, through: Option<Vec<u8>> },
    /// An inode without links that is not marked as an orphan.
    #[error("inode {inode} has no links, but is not marked as an orphan")]
    UnmarkedOrphan { inode: InodeId },
    /// An inode with links that is marked as an orphan.
    #[error("inode {inode} has links, but is marked as an orphan")]
    MarkedOrphan { inode: InodeId },
    /// A file with inline bytes and blocks.
    #[error("inode {inode} has both inline bytes and blocks")]
    InlineAndBlocks { inode: InodeId },
    /// An extent outside the segments.
    #[error("block {block} of inode {inode} is said to be arena block {address:?}, which does not exist")]
    ExtentOutside { inode: InodeId, block: u64, address: BlockAddress, bytes: Vec<u8> },
    /// A block that two places refer to.
    #[error("block {block} of inode {inode} is arena block {address:?}, which is in use elsewhere")]
    SharedBlock { inode: InodeId, block: u64, address: BlockAddress },
    /// A block whose content does not match its checksum.
    #[error("block {block} of inode {inode} is damaged (arena block {address:?})")]
    DamagedBlock { inode: InodeId, block: u64, address: BlockAddress },
    /// A bitmap that differs from the blocks in use.
    #[error("{blocks} blocks of segment {segment} are marked wrongly as used or free")]
    WrongBitmap { segment: u32, blocks: u64 },
    /// A wrong count of reserved blocks.
    #[error("{found} blocks are counted as reserved, but {expected} are")]
    WrongReserved { found: u64, expected: u64 },
    /// The recorded use of an owner, a group or a subtree is not the sum over its inodes.
    #[error("{key} is said to use {} blocks and {} inodes, but uses {} and {}", found.blocks, found.inodes, expected.blocks, expected.inodes)]
    WrongQuota { key: QuotaKey, found: QuotaAmount, expected: QuotaAmount },
    /// Inode numbers that might be used a second time.
    #[error("the next inode number is {found}, but number {used} is in use")]
    WrongNextInode { found: u64, used: u64 },
}

impl Problem {
    /// Whether [`crate::Store::repair`] repairs it.
    ///
    /// Repair can't bring back lost content: restore such files from a replica or a backup.
    #[must_use]
    pub fn is_repairable(&self) -> bool {
        !matches!(self, Self::UnknownRow { .. } | Self::SharedBlock { .. } | Self::DamagedBlock { .. })
    }
}

/// How much there is, by the way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TreeCounts {
    /// Inodes.
    pub inodes: u64,
    /// Directories among them.
    pub directories: u64,
    /// Directory entries.
    pub entries: u64,
    /// Inodes without links.
    pub orphans: u64,
    /// Blocks in use.
    pub blocks: u64,
    /// Bytes in the files, holes included.
    pub bytes: u64,
}

/// How far a check has come, in rows and blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CheckProgress {
    /// Rows and blocks checked so far.
    pub done: u64,
    /// Rows and blocks to check in all, as far as known.
    pub total: u64,
}

/// The result of a check.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CheckReport {
    /// The problems, up to [`PROBLEMS_MAX`].
    pub problems: Vec<Problem>,
    /// Problems that the list has no room for.
    pub omitted: u64,
    /// How much there is.
    pub counts: TreeCounts,
}

impl CheckReport {
    /// Whether all is as it must be.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        self.problems.is_empty()
    }

    pub(crate) fn add(&mut self, problem: Problem) {
        if self.problems.len() < PROBLEMS_MAX {
            self.problems.push(problem);
        } else {
            self.omitted += 1;
        }
    }
}
