//! File locks as all layers name them: kind, mode, action and range.

use serde::{Deserialize, Serialize};

/// The two kinds of file locks. Locks exclude only locks of their own kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum LockKind {
    /// `fcntl` record locks: a range, owned by a process (or an open file description).
    Record,
    /// `flock`: the whole file, owned by an open file description.
    Flock,
}

/// The right that a lock leaves to other owners.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum LockMode {
    /// Shared: others may read-lock.
    #[default]
    Read,
    /// Exclusive: others may not lock.
    Write,
}

/// The action of a lock request, on the owner's locks in a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum LockAction {
    /// Sets a read lock in their place.
    Read,
    /// Sets a write lock in their place.
    Write,
    /// Removes them.
    Unlock,
}

impl LockAction {
    /// Returns the mode of the lock that it sets; `None` if it removes locks.
    #[must_use]
    pub const fn mode(self) -> Option<LockMode> {
        match self {
            Self::Read => Some(LockMode::Read),
            Self::Write => Some(LockMode::Write),
            Self::Unlock => None,
        }
    }
}

impl From<LockMode> for LockAction {
    fn from(mode: LockMode) -> Self {
        match mode {
            LockMode::Read => Self::Read,
            LockMode::Write => Self::Write,
        }
    }
}

/// A range of bytes, both ends inclusive.
///
/// If it reaches to the end of the file and beyond, `last` is the largest offset.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ByteRange {
    /// First byte.
    pub first: u64,
    /// Last byte; not before the first.
    pub last: u64,
}

impl ByteRange {
    /// All bytes.
    pub const ALL: Self = Self::new(0, u64::MAX);

    /// Returns the range from one byte to another, both included.
    #[must_use]
    pub const fn new(first: u64, last: u64) -> Self {
        Self { first, last }
    }

    /// Whether the two have a byte in common.
    #[must_use]
    pub const fn overlaps(self, other: Self) -> bool {
        self.first <= other.last && other.first <= self.last
    }

    /// Whether all bytes of the other range are in this one.
    #[must_use]
    pub const fn contains(self, other: Self) -> bool {
        self.first <= other.first && other.last <= self.last
    }

    /// Whether the last byte is not before the first, which a message does not promise.
    #[must_use]
    pub const fn is_valid(self) -> bool {
        self.first <= self.last
    }
}

/// Locks or unlocks a range of bytes on which an owner may have locks.
///
/// `held` are the owner's locks: in order, none of which overlap. Passes its locks after that to `keep`, in the same
/// order, some of which may adjoin each other in the same mode. Returns whether `keep` always did.
pub fn change_range(
    held: &[LockedRange],
    range: ByteRange,
    action: LockAction,
    mut keep: impl FnMut(LockedRange) -> bool,
) -> bool {
    let mut are_kept = true;
    let mut asked = action.mode().map(|mode| LockedRange { mode, range });
    for held in held {
        let ByteRange { first, last } = held.range;
        if first < range.first {
            let range = ByteRange { first, last: last.min(range.first - 1) };
            are_kept &= keep(LockedRange { range, ..*held });
        }
        if last >= range.first {
            are_kept &= asked.take().is_none_or(&mut keep);
        }
        if last > range.last {
            let range = ByteRange { first: first.max(range.last + 1), last };
            are_kept &= keep(LockedRange { range, ..*held });
        }
    }
    are_kept && asked.is_none_or(keep)
}

/// A locked range of bytes, with the lock's mode.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct LockedRange {
    /// The mode.
    pub mode: LockMode,
    /// The range.
    pub range: ByteRange,
}

impl LockedRange {
    /// Lengthens the range by one of the same mode that begins behind it; returns whether `next` is such a one.
    pub fn extend(&mut self, next: &Self) -> bool {
        let adjoins = self.mode == next.mode && self.range.last.checked_add(1) == Some(next.range.first);
        if adjoins {
            self.range.last = next.range.last;
        }
        adjoins
    }
}
