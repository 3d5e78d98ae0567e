//! How the library in a program tells a mount that the program is about to watch something.
//!
//! It reads an extended attribute of that, which the mount answers when it has reserved the inode.

/// Of an inode that is about to be watched.
pub const WATCH_ATTRIBUTE: &str = "ashlar.watch";
/// Of any inode of a mount or a file system that is about to be watched as a whole.
pub const WATCH_ALL_ATTRIBUTE: &str = "ashlar.watch.all";
