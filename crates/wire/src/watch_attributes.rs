//! Attributes by which a program's library announces a watch to the mount.
//!
//! The library reads such an extended attribute of the inode that the program is about to watch. The mount answers when
//! it has reserved the inode.

/// The attribute of an inode that a program is about to watch.
pub const WATCH_ATTRIBUTE: &str = "ashlar.watch";
/// The attribute of any inode of a mount, or file system, that a program is about to watch as a whole.
pub const WATCH_ALL_ATTRIBUTE: &str = "ashlar.watch.all";
