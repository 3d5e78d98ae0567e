//! Sets of numbers as ranges.

use std::collections::BTreeMap;
use std::ops::Bound;

/// A set of numbers, as ranges that neither overlap nor touch: start by end.
///
/// A log of appends that is read backwards makes ranges grow downwards, and such a range keeps its key. `u64::MAX` as
/// an end means without end.
#[derive(Debug, Default)]
pub(super) struct Ranges(BTreeMap<u64, u64>);

impl Ranges {
    /// Adds `start..end`.
    pub(super) fn insert(&mut self, mut start: u64, mut end: u64) {
        if start >= end {
            return;
        }
        while let Some((&other_end, other)) = self.0.range_mut(start..).next().filter(|(_, other)| **other <= end) {
            if other_end >= end {
                *other = start.min(*other);
                return;
            }
            (start, end) = (start.min(*other), end.max(other_end));
            self.0.remove(&other_end);
        }
        self.0.insert(end, start);
    }

    /// Whether all of `start..end` is in the set.
    pub(super) fn contains(&self, start: u64, end: u64) -> bool {
        self.first_gap(start, end).is_none()
    }

    /// The first number of `start..end` that is not in the set.
    pub(super) fn first_gap(&self, start: u64, end: u64) -> Option<u64> {
        let around =
            self.0.range((Bound::Excluded(start), Bound::Unbounded)).next().filter(|(_, first)| **first <= start);
        Some(around.map_or(start, |(&covered, _)| covered)).filter(|&gap| gap < end)
    }

    /// The number behind the last one of `start..end` that is not in the set.
    pub(super) fn last_gap_end(&self, start: u64, end: u64) -> Option<u64> {
        let last = self.0.range(end..).next().filter(|(_, first)| **first < end);
        Some(last.map_or(end, |(_, &first)| first)).filter(|&gap_end| gap_end > start)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn ranges_are_a_set(
            added in prop::collection::vec((0u64..60, 0u64..20), 0..12),
            (start, length) in (0u64..60, 0u64..30),
        ) {
            let (mut ranges, mut model) = (Ranges::default(), [false; 100]);
            for (start, length) in added {
                ranges.insert(start, start + length);
                model[start as usize..(start + length) as usize].fill(true);
            }
            let end = start + length;
            let mut gaps = (start..end).filter(|&n| !model[n as usize]);
            prop_assert_eq!(ranges.contains(start, end), gaps.clone().next().is_none());
            prop_assert_eq!(ranges.first_gap(start, end), gaps.next());
            let last = (start..end).rev().find(|&n| !model[n as usize]);
            prop_assert_eq!(ranges.last_gap_end(start, end), last.map(|n| n + 1));
            let pairs: Vec<_> = ranges.0.iter().collect();
            prop_assert!(pairs.iter().all(|(end, start)| start < end));
            prop_assert!(pairs.windows(2).all(|pair| pair[0].0 < pair[1].1));
        }
    }
}
