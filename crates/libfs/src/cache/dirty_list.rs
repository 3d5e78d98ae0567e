//! The dirty list: nodes with changes that SharedFS has not committed.
//!
//! It tells which nodes can forget changes after a commit.

use std::collections::VecDeque;

use ashlar_types::{InodeId, LogPosition};
use rustix_futex_sync::Mutex;

/// Entries of capacity to keep when the list is nearly empty.
const KEPT_PLACES: usize = 1024;

/// The nodes with uncommitted changes: each once, in the order of their first changes.
#[derive(Debug, Default)]
pub(crate) struct DirtyList(Mutex<VecDeque<(LogPosition, InodeId)>>);

impl DirtyList {
    /// Adds a node that is not in the list. Nearly always, its first change is the newest of all.
    pub(crate) fn add_node(&self, first: LogPosition, node: InodeId) {
        let mut all = self.0.lock();
        if all.back().is_none_or(|&(last, _)| last <= first) {
            all.push_back((first, node));
        } else {
            let place = all.partition_point(|&(other, _)| other <= first);
            all.insert(place, (first, node));
        }
    }

    /// Adds nodes again that were taken out.
    pub(crate) fn add_nodes_again(&self, nodes: &[(LogPosition, InodeId)]) {
        if !nodes.is_empty() {
            let mut all = self.0.lock();
            all.extend(nodes);
            all.make_contiguous().sort();
        }
    }

    /// Takes out the nodes whose first change is before `bound`. The caller adds those with later changes again.
    pub(crate) fn take_nodes(&self, bound: LogPosition) -> Vec<InodeId> {
        let mut all = self.0.lock();
        let count = all.partition_point(|&(first, _)| first < bound);
        let taken = all.drain(..count).map(|(_, node)| node).collect();
        if all.len() < all.capacity() / 4 {
            all.shrink_to(KEPT_PLACES);
        }
        taken
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_are_taken_in_order_of_first_change() {
        let dirty_list = DirtyList::default();
        dirty_list.add_node(LogPosition(20), InodeId(2));
        dirty_list.add_node(LogPosition(10), InodeId(1));
        assert_eq!(dirty_list.take_nodes(LogPosition(10)), []);
        assert_eq!(dirty_list.take_nodes(LogPosition(20)), [InodeId(1)]);
        dirty_list.add_nodes_again(&[(LogPosition(25), InodeId(3)), (LogPosition(15), InodeId(1))]);
        assert_eq!(dirty_list.take_nodes(LogPosition(30)), [InodeId(1), InodeId(2), InodeId(3)]);
        assert_eq!(dirty_list.take_nodes(LogPosition(u64::MAX)), []);
    }
}
