//! The locks of one owner on one file.

use ashlar_types::{ByteRange, LockMode, LockedRange};

/// Ranges with their modes, sorted and disjoint; adjacent ranges of one mode are merged.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Spans(Vec<LockedRange>);

impl Spans {
    /// Sets the mode of a range; `None` unlocks it.
    pub fn set(&mut self, range: ByteRange, mode: Option<LockMode>) {
        let mut spans = Vec::with_capacity(self.0.len() + 2);
        for held in &self.0 {
            let span = held.range;
            if !span.overlaps(range) {
                spans.push(*held);
                continue;
            }
            if span.first < range.first {
                spans.push(LockedRange { range: ByteRange { first: span.first, last: range.first - 1 }, ..*held });
            }
            if span.last > range.last {
                spans.push(LockedRange { range: ByteRange { first: range.last + 1, last: span.last }, ..*held });
            }
        }
        spans.extend(mode.map(|mode| LockedRange { mode, range }));
        spans.sort_unstable_by_key(|held| held.range);
        self.0.clear();
        for held in spans {
            match self.0.last_mut() {
                Some(last) if last.mode == held.mode && last.range.last.checked_add(1) == Some(held.range.first) => {
                    last.range.last = held.range.last;
                }
                _ => self.0.push(held),
            }
        }
    }

    /// Returns the first span that conflicts with another owner's lock.
    pub fn find_conflict(&self, range: ByteRange, mode: LockMode) -> Option<LockedRange> {
        let conflicts = |held: LockMode| mode == LockMode::Write || held == LockMode::Write;
        self.iter().find(|held| held.range.overlaps(range) && conflicts(held.mode))
    }

    pub fn iter(&self) -> impl Iterator<Item = LockedRange> + '_ {
        self.0.iter().copied()
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}
