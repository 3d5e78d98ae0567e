//! Ranges of versions of a format or a protocol.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The versions of a format or a protocol that one side understands.
///
/// Files and messages carry the range of the program that wrote them. A program of another release then knows whether
/// the two have a version in common, and refuses the rest before it changes anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct VersionRange {
    /// The oldest version that is understood.
    pub oldest: u32,
    /// The version that is written, the newest that is understood.
    pub current: u32,
}

impl VersionRange {
    /// Returns the range from one version to another, both included.
    #[must_use]
    pub const fn new(oldest: u32, current: u32) -> Self {
        Self { oldest, current }
    }

    /// Whether a version is in the range.
    #[must_use]
    pub const fn covers(self, version: u32) -> bool {
        self.oldest <= version && version <= self.current
    }

    /// Returns the newest version that both ranges have; `None` if they have none in common.
    #[must_use]
    pub const fn negotiate(self, other: Self) -> Option<u32> {
        let newest = if self.current < other.current { self.current } else { other.current };
        if self.covers(newest) && other.covers(newest) { Some(newest) } else { None }
    }
}

impl fmt::Display for VersionRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.oldest == self.current {
            return write!(f, "version {}", self.current);
        }
        write!(f, "versions {} to {}", self.oldest, self.current)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlapping_ranges_agree_on_newest_common_version() {
        let (older, newer) = (VersionRange::new(2, 4), VersionRange::new(3, 7));
        assert_eq!((older.negotiate(newer), newer.negotiate(older)), (Some(4), Some(4)));
        assert_eq!(newer.negotiate(newer), Some(7));
    }

    #[test]
    fn ranges_without_common_version_agree_on_none() {
        let (older, newer) = (VersionRange::new(1, 2), VersionRange::new(3, 3));
        assert_eq!((older.negotiate(newer), newer.negotiate(older)), (None, None));
        let reversed = VersionRange::new(5, 1);
        assert_eq!((reversed.negotiate(older), older.negotiate(reversed)), (None, None), "a range of no versions");
    }

    #[test]
    fn range_covers_both_of_its_ends() {
        let range = VersionRange::new(3, 5);
        assert_eq!([2, 3, 5, 6].map(|version| range.covers(version)), [false, true, true, false]);
    }

    #[test]
    fn range_reads_as_one_version_or_two() {
        assert_eq!(VersionRange::new(3, 3).to_string(), "version 3");
        assert_eq!(VersionRange::new(3, 5).to_string(), "versions 3 to 5");
    }
}
