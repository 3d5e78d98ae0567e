//! Types that all layers share: ids, positions, attributes, names, errors.
//!
//! Purpose: give each quantity that crosses a crate boundary one type. So an inode number is never taken for a
//! position, nor a length for an offset. Nothing here does I/O or keeps state.
//!
//! Source: `docs/architecture.md`, section "Glossary".
#![forbid(unsafe_code)]

mod attributes;
mod contents;
mod credentials;
mod errno;
mod file_system;
mod ids;
mod inode_hasher;
mod leases;
mod locks;
mod mountinfo;
mod name;
mod node;
mod printable;
mod quota;
mod version_range;

pub use attributes::{
    FileKind, Inode, MODE_PERMISSIONS, MODE_SETGID, MODE_SETUID, MODE_STICKY, NEVER_NAMED, Timestamp, WHITEOUT_DEVICE,
    WHITEOUT_MODE,
};
pub use contents::{Contents, Extent};
pub use credentials::{Access, Credentials};
pub use errno::Errno;
pub use file_system::{ArenaId, FileSystemId, FileSystemIdentity, NameHashKey};
pub use ids::{
    BlockAddress, Epoch, ExtentVersion, InodeId, JournalPosition, LogGeneration, LogPosition, QuotaId, SealCount,
    SegmentVersion, SessionId,
};
pub use inode_hasher::InodeHasher;
pub use leases::{LeaseMode, LeaseScope, WantedLease};
pub use locks::{ByteRange, LockAction, LockKind, LockMode, LockedRange, change_range};
pub use mountinfo::{MOUNT_SOURCE, MOUNT_TYPE, MountLine, RING_SWITCH, mount_lines, topmost_mount};
pub use name::{
    COOKIE_PARENT, COOKIE_SELF, DEPTH_MAX, NAME_MAX, Name, NameError, PATH_MAX, SYMLINK_MAX, XATTR_NAME_MAX,
    XATTR_VALUE_MAX, XATTRS_BYTES_MAX, name_cookie,
};
pub use node::{NodeNumber, NodeNumberError};
pub use printable::escape_controls;
pub use quota::{QuotaAmount, QuotaKey, QuotaLimits, QuotaVersion, entry_blocks, quota_keys, xattr_blocks};
pub use version_range::VersionRange;

/// Bytes in one block of a data segment: the unit of allocation and of checksums.
pub const BLOCK_BYTES: u64 = 4096;

/// The largest size of a file, in bytes: 2^63 − 1, the largest `off_t`.
pub const FILE_SIZE_MAX: u64 = i64::MAX as u64;

/// The most links that one inode may have.
pub const LINK_MAX: u32 = 1_000_000;

/// Returns the number of blocks that `bytes` need, rounded up.
#[must_use]
pub const fn blocks_for(bytes: u64) -> u64 {
    bytes.div_ceil(BLOCK_BYTES)
}
