//! Sets of numbers as ranges.

use std::collections::BTreeMap;

/// A set of numbers, as ranges that neither overlap nor touch: end by start. `u64::MAX` as an end means without end.
#[derive(Debug, Default)]
pub(super) struct Ranges(BTreeMap<u64, u64>);

impl Ranges {
    /// Adds `start..end`.
    pub(super) fn insert(&mut self, mut start: u64, mut end: u64) {
        if start >= end {
            return;
        }
        while let Some((&other, &other_end)) = self.0.range(..=end).next_back() {
            if other_end < start {
                break;
            }
            start = start.min(other);
            end = end.max(other_end);
            self.0.remove(&other);
        }
        self.0.insert(start, end);
    }

    /// Whether all of `start..end` is in the set.
    pub(super) fn contains(&self, start: u64, end: u64) -> bool {
        self.first_gap(start, end).is_none()
    }

    /// The first number of `start..end` that is not in the set.
    pub(super) fn first_gap(&self, start: u64, end: u64) -> Option<u64> {
        let covered = self.0.range(..=start).next_back().map_or(0, |(_, &end)| end);
        Some(start.max(covered)).filter(|&gap| gap < end)
    }

    /// The number behind the last one of `start..end` that is not in the set.
    pub(super) fn last_gap_end(&self, start: u64, end: u64) -> Option<u64> {
        let last = self.0.range(..end).next_back().filter(|&(_, &other_end)| other_end >= end);
        Some(last.map_or(end, |(&other, _)| other)).filter(|&gap_end| gap_end > start)
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
            prop_assert!(pairs.windows(2).all(|pair| pair[0].1 < pair[1].0));
        }
    }
}
