//! A worker's operations and their answers.

use serde::{Deserialize, Serialize};

/// Names in a directory: few, so that operations meet.
pub const NAMES: [&str; 3] = ["a", "b", "c"];
/// The directories that a round begins with, below the round's own, which is number 0. Workers hold them open, and work
/// in them wherever they are moved.
pub const DIRECTORIES: [(usize, usize); 3] = [(0, 0), (0, 1), (1, 2)];
/// All of them, the round's own included.
pub const HANDLES: usize = DIRECTORIES.len() + 1;

/// A name in a directory that workers hold open: number of the directory, number of the name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct EntryName(pub usize, pub usize);

/// The kind of a rename.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Move {
    /// Replaces the target of the new name.
    Replace,
    /// Fails if the new name exists.
    NoReplace,
    /// Exchanges the two names.
    Exchange,
}

/// An operation. Open files are named by their inode numbers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Operation {
    /// Makes a file that must not exist yet, and opens it.
    Create(EntryName),
    /// Opens a file.
    Open(EntryName),
    /// Makes a directory.
    MakeDirectory(EntryName),
    /// Removes an empty directory.
    RemoveDirectory(EntryName),
    /// Removes a file's name.
    Unlink(EntryName),
    /// Renames.
    Rename(EntryName, EntryName, Move),
    /// Makes another name for a file.
    Link(EntryName, EntryName),
    /// Asks for the attributes of a name's target.
    Stat(EntryName),
    /// Lists a directory.
    List(usize),
    /// Writes text at an offset.
    Write(u64, usize, String),
    /// Writes text at the end.
    Append(u64, String),
    /// Reads that many bytes from an offset on.
    Read(u64, usize, usize),
    /// Sets the size.
    Truncate(u64, usize),
    /// Asks for size and links of an open file.
    StatOpen(u64),
}

/// The answer of an operation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Answer {
    /// The operation succeeded.
    Done,
    /// A file: its inode number.
    File(u64),
    /// Text that was read; zeros stand as `.`.
    Text(String),
    /// The names in a directory, one bit each.
    Names(u8),
    /// The target is a directory.
    Directory,
    /// A file: inode number, size, links.
    Attributes(u64, usize, u32),
    /// An error number.
    Error(i32),
}

/// An operation that a worker has made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// When it was called, in nanoseconds of the monotonic clock.
    pub called: u64,
    /// When it returned, by the same clock.
    pub returned: u64,
    /// The operation.
    pub operation: Operation,
    /// Its answer.
    pub answer: Answer,
}
