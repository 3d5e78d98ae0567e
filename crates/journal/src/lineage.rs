//! The epochs of a journal, and the positions at which they begin.
//!
//! Within one epoch a journal has one writer, which never goes back. So two copies that have the same epoch at the same
//! position are the same up to there. `docs/format-journal.md`, section "Lineage".

use ashlar_types::{Epoch, JournalPosition};

use crate::JournalError;

/// The most entries of a lineage: a page of state has room for more, and a ring rarely holds frames of ten epochs.
pub const LINEAGE_ENTRIES_MAX: usize = 128;

/// An epoch, and the position of its first frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LineageEntry {
    /// The position at which the epoch begins.
    pub begin: JournalPosition,
    /// The epoch.
    pub epoch: Epoch,
}

/// The epochs of a journal, oldest first. Begins and epoch numbers grow strictly; there is at least one entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lineage {
    entries: Vec<LineageEntry>,
}

impl Lineage {
    /// Returns the lineage of a journal that has one epoch.
    #[must_use]
    pub fn new(epoch: Epoch, begin: JournalPosition) -> Self {
        Self { entries: vec![LineageEntry { begin, epoch }] }
    }

    /// Returns the lineage with these entries, `None` if no journal has them.
    #[must_use]
    pub fn from_entries(entries: Vec<LineageEntry>) -> Option<Self> {
        let is_fit = !entries.is_empty()
            && entries.len() <= LINEAGE_ENTRIES_MAX
            && entries.is_sorted_by(|one, other| one.begin < other.begin && one.epoch.number < other.epoch.number);
        is_fit.then_some(Self { entries })
    }

    /// Returns the entries, oldest first.
    #[must_use]
    pub fn entries(&self) -> &[LineageEntry] {
        &self.entries
    }

    /// Returns the newest epoch.
    #[must_use]
    pub fn last(&self) -> LineageEntry {
        self.entries[self.entries.len() - 1]
    }

    /// Returns the epoch of a frame at this position, `None` if it is further back than the table reaches.
    #[must_use]
    pub fn epoch_at(&self, position: JournalPosition) -> Option<Epoch> {
        let following = self.entries.partition_point(|entry| entry.begin <= position);
        Some(self.entries[following.checked_sub(1)?].epoch)
    }

    /// Returns the epochs that begin at this position or before, `None` if there are none.
    #[must_use]
    pub fn upto(&self, position: JournalPosition) -> Option<Self> {
        let kept = self.entries.partition_point(|entry| entry.begin <= position);
        Self::from_entries(self.entries[..kept].to_vec())
    }

    /// Adds an epoch, which begins at `begin`. Epochs that have no frame before that are dropped.
    ///
    /// # Errors
    /// [`JournalError::StaleEpoch`] if its number does not follow the last one; [`JournalError::LineageFull`].
    pub fn begin_epoch(&mut self, epoch: Epoch, begin: JournalPosition) -> Result<(), JournalError> {
        let last = self.last().epoch;
        if epoch.number <= last.number {
            return Err(JournalError::StaleEpoch { epoch, last });
        }
        let kept = self.entries.partition_point(|entry| entry.begin < begin);
        if kept == LINEAGE_ENTRIES_MAX {
            return Err(JournalError::LineageFull);
        }
        self.entries.truncate(kept);
        self.entries.push(LineageEntry { begin, epoch });
        Ok(())
    }

    /// Drops the oldest entry of a full table, if no frame from `head` on is of that epoch.
    pub(crate) fn make_room(&mut self, head: JournalPosition) {
        if self.entries.len() == LINEAGE_ENTRIES_MAX && self.entries[1].begin <= head {
            self.entries.remove(0);
        }
    }

    /// Returns whether all frames in `from..to` have the same epochs in both.
    #[must_use]
    pub fn agrees(&self, other: &Self, from: JournalPosition, to: JournalPosition) -> bool {
        from >= to || self.part_from(other, from).is_some_and(|parts| parts.is_none_or(|parts| parts >= to))
    }

    /// Returns the last position up to which two copies of one journal are the same.
    ///
    /// `end` and `other_end` are the copies' ends. Returns `None` if the copies part, or one of them ends, further back
    /// than both tables reach: then no common position is known. All copies are the same up to position 0.
    #[must_use]
    pub fn last_common(
        &self,
        end: JournalPosition,
        other: &Self,
        other_end: JournalPosition,
    ) -> Option<JournalPosition> {
        let (shorter, known) = (end.min(other_end), self.entries[0].begin.max(other.entries[0].begin));
        if shorter < known {
            return None;
        }
        let parts = self.part_from(other, known).or((known.0 == 0).then_some(Some(known)))?;
        Some(parts.map_or(shorter, |parts| parts.min(shorter)))
    }

    /// Returns where the epochs begin to differ from `from` on: `Some(None)` if nowhere, `None` if already there.
    fn part_from(&self, other: &Self, from: JournalPosition) -> Option<Option<JournalPosition>> {
        let at_from = self.epoch_at(from)?;
        if other.epoch_at(from)? != at_from {
            return None;
        }
        let behind = |lineage: &Self| lineage.entries.partition_point(|entry| entry.begin <= from);
        let (mut ours, mut theirs) = (self.entries[behind(self)..].iter(), other.entries[behind(other)..].iter());
        loop {
            match (ours.next(), theirs.next()) {
                (None, None) => return Some(None),
                (Some(one), Some(two)) if one == two => {}
                (Some(one), Some(two)) => return Some(Some(one.begin.min(two.begin))),
                (Some(one), None) | (None, Some(one)) => return Some(Some(one.begin)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use ashlar_types::NodeNumber;
    use proptest::prelude::*;

    use super::*;

    fn epoch(number: u32) -> Epoch {
        Epoch { number, node: NodeNumber::new(1).unwrap() }
    }

    fn lineage(entries: &[(u32, u64)]) -> Lineage {
        let entry =
            |&(number, begin): &(u32, u64)| LineageEntry { begin: JournalPosition(begin), epoch: epoch(number) };
        Lineage::from_entries(entries.iter().map(entry).collect()).unwrap()
    }

    fn common(one: &[(u32, u64)], end: u64, two: &[(u32, u64)], other_end: u64) -> Option<u64> {
        let (one, two) = (lineage(one), lineage(two));
        let (end, other_end) = (JournalPosition(end), JournalPosition(other_end));
        let found = one.last_common(end, &two, other_end);
        assert_eq!(found, two.last_common(other_end, &one, end));
        found.map(|position| position.0)
    }

    #[test]
    fn copies_part_where_their_epochs_do() {
        assert_eq!(common(&[(1, 0)], 100, &[(1, 0)], 60), Some(60));
        assert_eq!(common(&[(1, 0)], 100, &[(1, 0), (2, 60)], 200), Some(60));
        assert_eq!(common(&[(1, 0), (2, 50)], 100, &[(1, 0)], 60), Some(50));
        assert_eq!(common(&[(1, 0), (2, 50), (4, 80)], 99, &[(1, 0), (2, 50), (3, 70)], 99), Some(70));
        assert_eq!(common(&[(1, 0), (2, 50)], 100, &[(1, 0), (3, 50)], 100), Some(50));
        assert_eq!(common(&[(1, 0)], 100, &[(2, 0)], 100), Some(0));
        assert_eq!(common(&[(2, 40), (3, 70)], 90, &[(1, 0), (2, 40), (3, 70)], 80), Some(80));
    }

    #[test]
    fn copies_that_part_before_the_table_have_no_common() {
        assert_eq!(common(&[(3, 100)], 200, &[(1, 0), (2, 50)], 120), None);
        assert_eq!(common(&[(3, 100)], 200, &[(1, 0)], 60), None);
    }

    #[test]
    fn epochs_of_equal_numbers_and_other_nodes_part() {
        let two = Epoch { number: 2, node: NodeNumber::new(9).unwrap() };
        let mut other = lineage(&[(1, 0)]);
        other.begin_epoch(two, JournalPosition(50)).unwrap();
        let end = JournalPosition(80);
        assert_eq!(lineage(&[(1, 0), (2, 50)]).last_common(end, &other, end), Some(JournalPosition(50)));
    }

    #[test]
    fn epoch_without_frames_leaves_no_entry() {
        let mut lineage = lineage(&[(1, 0), (2, 50), (3, 70)]);
        assert!(matches!(
            lineage.begin_epoch(epoch(3), JournalPosition(90)),
            Err(JournalError::StaleEpoch { last: Epoch { number: 3, .. }, .. })
        ));
        lineage.begin_epoch(epoch(5), JournalPosition(50)).unwrap();
        assert_eq!(lineage, self::lineage(&[(1, 0), (5, 50)]));
        assert_eq!(lineage.epoch_at(JournalPosition(49)), Some(epoch(1)));
        assert_eq!(lineage.epoch_at(JournalPosition(50)), Some(epoch(5)));
    }

    #[test]
    fn full_table_forgets_only_epochs_before_the_head() {
        let mut lineage = lineage(&[(1, 0)]);
        for number in 2..=LINEAGE_ENTRIES_MAX as u32 {
            lineage.begin_epoch(epoch(number), JournalPosition(u64::from(number) * 8)).unwrap();
        }
        let (next, begin) = (epoch(LINEAGE_ENTRIES_MAX as u32 + 1), JournalPosition(1 << 20));
        lineage.make_room(JournalPosition(15));
        assert!(matches!(lineage.begin_epoch(next, begin), Err(JournalError::LineageFull)));
        lineage.make_room(JournalPosition(16));
        lineage.begin_epoch(next, begin).unwrap();
        assert_eq!(lineage.entries()[0].epoch, epoch(2));
        assert_eq!(lineage.epoch_at(JournalPosition(15)), None);
    }

    #[test]
    fn impossible_entries_are_no_lineage() {
        let entry = |number, begin| LineageEntry { begin: JournalPosition(begin), epoch: epoch(number) };
        assert_eq!(Lineage::from_entries(vec![]), None);
        assert_eq!(Lineage::from_entries(vec![entry(1, 0), entry(2, 0)]), None);
        assert_eq!(Lineage::from_entries(vec![entry(2, 0), entry(2, 8)]), None);
        let many = (0..=LINEAGE_ENTRIES_MAX as u32).map(|number| entry(number, u64::from(number))).collect();
        assert_eq!(Lineage::from_entries(many), None);
    }

    proptest! {
        /// Against the definition: the longest prefix in which every position has the same epoch.
        #[test]
        fn last_common_matches_positions_one_by_one(
            one in prop::collection::btree_map(0u64..40, 0u32..2, 1..6),
            two in prop::collection::btree_map(0u64..40, 0u32..2, 1..6),
            ends in (0u64..50, 0u64..50),
        ) {
            // Both begin alike; the numbers grow, and those at equal places are often equal.
            let table = |steps: &std::collections::BTreeMap<u64, u32>| {
                let mut entries = vec![(1, 0)];
                for (begin, step) in steps.range(1..) {
                    entries.push((begin.div_ceil(4) as u32 * 3 + 2 + step, begin.div_ceil(4) * 4));
                }
                entries.dedup_by_key(|(_, begin)| *begin);
                entries
            };
            let (one, two) = (table(&one), table(&two));
            let found = common(&one, ends.0, &two, ends.1);
            let (one, two) = (lineage(&one), lineage(&two));
            let shorter = ends.0.min(ends.1);
            let alike = |at: &u64| one.epoch_at(JournalPosition(*at)) == two.epoch_at(JournalPosition(*at));
            prop_assert_eq!(found, Some((0..shorter).take_while(alike).count() as u64));
        }
    }
}
