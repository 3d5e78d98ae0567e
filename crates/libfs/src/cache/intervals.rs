//! A set of disjoint half-open ranges of `u64`, for the blocks that a file takes up.

use std::collections::BTreeMap;

/// Ranges `start..end`, disjoint and not adjacent, by start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Intervals {
    ranges: BTreeMap<u64, u64>,
    count: u64,
}

impl Intervals {
    /// Returns how many numbers the set has.
    pub(crate) fn count(&self) -> u64 {
        self.count
    }

    /// Returns how many numbers of `start..end` the set has.
    pub(crate) fn count_within(&self, start: u64, end: u64) -> u64 {
        let before = self.ranges.range(..start).next_back();
        let overlap = |(&s, &e): (&u64, &u64)| e.min(end).saturating_sub(s.max(start));
        before.map_or(0, overlap) + self.ranges.range(start..end.max(start)).map(overlap).sum::<u64>()
    }

    /// Adds `start..end`.
    pub(crate) fn insert(&mut self, start: u64, end: u64) {
        if start >= end {
            return;
        }
        // Most writes extend the last range, or lie in it.
        if let Some(mut last) = self.ranges.last_entry() {
            let (s, e) = (*last.key(), *last.get());
            if s <= start && start <= e {
                self.count += end.saturating_sub(e);
                last.insert(e.max(end));
                return;
            }
        }
        if self.ranges.range(..=start).next_back().is_some_and(|(_, &e)| e >= end) {
            return;
        }
        let (mut start, mut end) = (start, end);
        while let Some((&s, &e)) = self.ranges.range(..=end).next_back() {
            if e < start {
                break;
            }
            start = start.min(s);
            end = end.max(e);
            self.ranges.remove(&s);
            self.count -= e - s;
        }
        self.ranges.insert(start, end);
        self.count += end - start;
    }

    /// Removes `start..end`.
    pub(crate) fn remove(&mut self, start: u64, end: u64) {
        if start >= end {
            return;
        }
        while let Some((&s, &e)) = self.ranges.range(..end).next_back() {
            if e <= start {
                break;
            }
            self.ranges.remove(&s);
            self.count -= e - s;
            if s < start {
                self.ranges.insert(s, start);
                self.count += start - s;
            }
            if e > end {
                self.ranges.insert(end, e);
                self.count += e - end;
            }
        }
    }

    /// Removes `start..end` and moves all later ranges down.
    pub(crate) fn collapse(&mut self, start: u64, end: u64) {
        self.remove(start, end);
        let tail = self.ranges.split_off(&end);
        self.count -= tail.iter().map(|(s, e)| e - s).sum::<u64>();
        for (s, e) in tail {
            self.insert(s - (end - start), e - (end - start));
        }
    }

    /// Opens a gap of `length` at `at` and moves all later ranges up.
    pub(crate) fn open_gap(&mut self, at: u64, length: u64) {
        if length == 0 {
            return;
        }
        // Splits a range that spans the gap's place.
        if let Some((&s, &e)) = self.ranges.range(..at).next_back() {
            if e > at {
                self.ranges.insert(s, at);
                self.ranges.insert(at, e);
            }
        }
        let tail = self.ranges.split_off(&at);
        self.ranges.extend(tail.into_iter().map(|(s, e)| (s + length, e + length)));
    }

    /// Returns the number behind the last one in the set.
    pub(crate) fn end(&self) -> u64 {
        self.ranges.last_key_value().map_or(0, |(_, &end)| end)
    }

    /// Returns the first number from `from` on that is in the set (`inside`) or not in it.
    pub(crate) fn next(&self, from: u64, inside: bool) -> Option<u64> {
        let covering = self.ranges.range(..=from).next_back().filter(|&(_, &e)| e > from);
        match (covering, inside) {
            (Some(_), true) => Some(from),
            (Some((_, &end)), false) => Some(end),
            (None, true) => self.ranges.range(from..).next().map(|(&s, _)| s),
            (None, false) => Some(from),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    #[derive(Clone, Debug)]
    enum Step {
        Insert(u64, u64),
        Remove(u64, u64),
        Collapse(u64, u64),
        Gap(u64, u64),
    }

    fn step() -> impl Strategy<Value = Step> {
        (0u8..4, 0u64..60, 0u64..20).prop_map(|(what, start, length)| match what {
            0 => Step::Insert(start, start + length),
            1 => Step::Remove(start, start + length),
            2 => Step::Collapse(start, start + length),
            _ => Step::Gap(start, length),
        })
    }

    proptest! {
        #[test]
        fn random_steps_behave_like_a_set_of_numbers(steps in prop::collection::vec(step(), 1..40)) {
            let (mut set, mut model) = (Intervals::default(), BTreeSet::new());
            for step in steps {
                match step {
                    Step::Insert(s, e) => { set.insert(s, e); model.extend(s..e); }
                    Step::Remove(s, e) => { set.remove(s, e); model.retain(|n| !(s..e).contains(n)); }
                    Step::Collapse(s, e) => {
                        set.collapse(s, e);
                        model = model.into_iter().filter(|n| !(s..e).contains(n)).map(|n| if n >= e { n - (e - s) } else { n }).collect();
                    }
                    Step::Gap(at, length) => {
                        set.open_gap(at, length);
                        model = model.into_iter().map(|n| if n >= at { n + length } else { n }).collect();
                    }
                }
                prop_assert_eq!(set.count(), model.len() as u64);
                for from in 0..100 {
                    prop_assert_eq!(set.next(from, true), model.range(from..).next().copied());
                    prop_assert_eq!(set.next(from, false), (from..).find(|n| !model.contains(n)));
                }
            }
        }
    }
}
