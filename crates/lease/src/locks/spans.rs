//! The locks of one owner on one file.

use super::HeldLockMode;

/// A range of bytes, both ends inclusive.
///
/// If it reaches to the end of the file and beyond, `last` is the largest offset.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ByteRange {
    /// First byte.
    pub first: u64,
    /// Last byte; not before the first.
    pub last: u64,
}

impl ByteRange {
    /// All bytes.
    pub const ALL: Self = Self { first: 0, last: u64::MAX };

    /// Whether the two have a byte in common.
    #[must_use]
    pub const fn overlaps(self, other: Self) -> bool {
        self.first <= other.last && other.first <= self.last
    }
}

/// Ranges with their modes, sorted and disjoint; adjacent ranges of one mode are merged.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Spans(Vec<(ByteRange, HeldLockMode)>);

impl Spans {
    /// Sets the mode of a range; `None` unlocks it.
    pub fn set(&mut self, range: ByteRange, mode: Option<HeldLockMode>) {
        let mut spans = Vec::with_capacity(self.0.len() + 2);
        for (span, span_mode) in &self.0 {
            if !span.overlaps(range) {
                spans.push((*span, *span_mode));
                continue;
            }
            if span.first < range.first {
                spans.push((ByteRange { first: span.first, last: range.first - 1 }, *span_mode));
            }
            if span.last > range.last {
                spans.push((ByteRange { first: range.last + 1, last: span.last }, *span_mode));
            }
        }
        spans.extend(mode.map(|mode| (range, mode)));
        spans.sort_unstable_by_key(|span| span.0);
        self.0.clear();
        for (span, mode) in spans {
            match self.0.last_mut() {
                Some((last, last_mode)) if *last_mode == mode && last.last.checked_add(1) == Some(span.first) => {
                    last.last = span.last;
                }
                _ => self.0.push((span, mode)),
            }
        }
    }

    /// Returns the first span that conflicts with another owner's lock.
    pub fn find_conflict(&self, range: ByteRange, mode: HeldLockMode) -> Option<(ByteRange, HeldLockMode)> {
        let conflicts = |held: HeldLockMode| mode == HeldLockMode::Write || held == HeldLockMode::Write;
        self.0.iter().find(|(span, held)| span.overlaps(range) && conflicts(*held)).copied()
    }

    pub fn iter(&self) -> impl Iterator<Item = (ByteRange, HeldLockMode)> + '_ {
        self.0.iter().copied()
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}
