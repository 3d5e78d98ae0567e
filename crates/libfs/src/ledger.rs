//! Which nodes have changes at which positions of the log, so that what is committed can be forgotten in time.

use std::collections::BTreeSet;

use ashlar_types::{InodeId, LogPosition};
use parking_lot::Mutex;

#[derive(Debug, Default)]
struct Inner {
    dirty: BTreeSet<(LogPosition, InodeId)>,
    /// For each thread between reservation and entry: the log's tail before it reserved.
    in_flight: Vec<(u64, LogPosition)>,
    tickets: u64,
}

/// The account of changes.
#[derive(Debug, Default)]
pub(crate) struct Ledger(Mutex<Inner>);

impl Ledger {
    /// Says that a record will be appended at or behind `tail`.
    pub(crate) fn begin(&self, tail: LogPosition) -> u64 {
        let mut inner = self.0.lock();
        inner.tickets += 1;
        let ticket = inner.tickets;
        inner.in_flight.push((ticket, tail));
        ticket
    }

    /// Enters the record at `position` as a change of `nodes`; without a position nothing was appended.
    pub(crate) fn finish(&self, ticket: u64, position: Option<LogPosition>, nodes: impl Iterator<Item = InodeId>) {
        let mut inner = self.0.lock();
        inner.in_flight.retain(|(found, _)| *found != ticket);
        if let Some(position) = position {
            inner.dirty.extend(nodes.map(|node| (position, node)));
        }
    }

    /// Takes out the nodes with changes before `committed`, and the position up to which that was all of them.
    pub(crate) fn take(&self, committed: LogPosition) -> (LogPosition, BTreeSet<InodeId>) {
        let mut inner = self.0.lock();
        let bound = inner.in_flight.iter().map(|(_, tail)| *tail).min().map_or(committed, |low| low.min(committed));
        let later = inner.dirty.split_off(&(bound, InodeId(0)));
        let taken = std::mem::replace(&mut inner.dirty, later);
        (bound, taken.into_iter().map(|(_, node)| node).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_on_its_way_holds_back_the_bound() {
        let ledger = Ledger::default();
        let slow = ledger.begin(LogPosition(10));
        let fast = ledger.begin(LogPosition(20));
        ledger.finish(fast, Some(LogPosition(20)), [InodeId(2)].into_iter());
        assert_eq!(ledger.take(LogPosition(30)), (LogPosition(10), BTreeSet::new()));
        ledger.finish(slow, Some(LogPosition(10)), [InodeId(1)].into_iter());
        assert_eq!(ledger.take(LogPosition(15)), (LogPosition(15), BTreeSet::from([InodeId(1)])));
        assert_eq!(ledger.take(LogPosition(30)), (LogPosition(30), BTreeSet::from([InodeId(2)])));
    }
}
