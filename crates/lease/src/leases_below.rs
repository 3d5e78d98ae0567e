//! The sessions that hold leases below directories.
//!
//! An inode counts a session's own leases there, and the children that lead to leases of the session. So a further
//! lease changes counts only up to the first ancestor that leads to the session's leases already. However deep a
//! directory is, its many files cost no more than elsewhere.

use std::collections::{BTreeMap, BTreeSet};

use ashlar_types::{InodeId, SessionId};

use crate::Ancestry;

/// The parts of the tree that lead to inodes with leases, with the sessions that hold leases at and below each.
///
/// It keeps its own parents, which change only by reports of moves. So each count is subtracted where it was added.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct LeasesBelow {
    branches: BTreeMap<InodeId, Branch>,
}

#[derive(Debug, Default, PartialEq, Eq)]
struct Branch {
    parent: Option<InodeId>,
    children: BTreeSet<InodeId>,
    /// By session: leases at this inode, and children at or below which the session has leases.
    counts: BTreeMap<SessionId, u32>,
}

impl LeasesBelow {
    /// Counts a lease at `inode`.
    pub fn add(&mut self, inode: InodeId, session: SessionId, ancestry: &impl Ancestry) {
        self.add_branch(inode, ancestry);
        self.count_up(Some(inode), session);
    }

    /// Subtracts a lease at `inode`.
    pub fn remove(&mut self, inode: InodeId, session: SessionId) {
        self.count_down(Some(inode), session);
        self.prune_branch(inode);
    }

    /// Whether there is a lease at or below `inode`.
    pub fn knows(&self, inode: InodeId) -> bool {
        self.branches.contains_key(&inode)
    }

    /// Records that the inode is below `to` now; `None`: below no directory.
    pub fn record_move(&mut self, inode: InodeId, to: Option<InodeId>, ancestry: &impl Ancestry) {
        let Some(branch) = self.branches.get_mut(&inode) else { return };
        let holders: Vec<SessionId> = branch.counts.keys().copied().collect();
        let from = std::mem::replace(&mut branch.parent, to);
        for session in &holders {
            self.count_down(from, *session);
        }
        if let Some(from) = from {
            if let Some(branch) = self.branches.get_mut(&from) {
                branch.children.remove(&inode);
            }
            self.prune_branch(from);
        }
        if let Some(to) = to {
            self.add_branch(to, ancestry);
            self.branches.entry(to).or_default().children.insert(inode);
            for session in holders {
                self.count_up(Some(to), session);
            }
        }
    }

    /// Whether another session has a lease at or below `inode`.
    pub fn has_others(&self, inode: InodeId, session: SessionId) -> bool {
        self.branches.get(&inode).is_some_and(|branch| branch.counts.keys().any(|holder| *holder != session))
    }

    /// Returns inodes at or below `inode` that have leases of other sessions, or lead to such leases.
    ///
    /// If there are more than `most`, it returns only some of them, but more than `most`.
    pub fn inodes_with_others(&self, inode: InodeId, session: SessionId, most: usize) -> Vec<InodeId> {
        let mut found = Vec::new();
        let mut rest = vec![inode];
        while let Some(inode) = rest.pop().filter(|_| found.len() <= most) {
            if self.has_others(inode, session) {
                found.push(inode);
                rest.extend(&self.branches[&inode].children);
            }
        }
        found
    }

    /// Returns the inodes in a directory that have leases, or lead to leases.
    pub fn children(&self, directory: InodeId) -> impl Iterator<Item = InodeId> + '_ {
        self.branches.get(&directory).into_iter().flat_map(|branch| branch.children.iter().copied())
    }

    /// Returns every inode here with the parent under which it is counted.
    pub fn parents(&self) -> impl Iterator<Item = (InodeId, Option<InodeId>)> + '_ {
        self.branches.iter().map(|(inode, branch)| (*inode, branch.parent))
    }

    /// Adds the branch from `inode` up to its top.
    fn add_branch(&mut self, inode: InodeId, ancestry: &impl Ancestry) {
        if self.branches.contains_key(&inode) {
            return;
        }
        let mut inode = inode;
        loop {
            let parent = ancestry.home(inode).directory;
            self.branches.entry(inode).or_default().parent = parent;
            let Some(parent) = parent else { return };
            let is_known = self.branches.contains_key(&parent);
            self.branches.entry(parent).or_default().children.insert(inode);
            if is_known {
                return;
            }
            inode = parent;
        }
    }

    /// Counts one more lease, or child that leads to leases.
    fn count_up(&mut self, from: Option<InodeId>, session: SessionId) {
        let mut next = from;
        while let Some(branch) = next.and_then(|inode| self.branches.get_mut(&inode)) {
            let count = branch.counts.entry(session).or_insert(0);
            *count += 1;
            // The ancestors count this child already.
            next = branch.parent.filter(|_| *count == 1);
        }
    }

    /// Counts one lease less, or one child less that leads to leases.
    fn count_down(&mut self, from: Option<InodeId>, session: SessionId) {
        let mut next = from;
        while let Some(branch) = next.and_then(|inode| self.branches.get_mut(&inode)) {
            let Some(count) = branch.counts.get_mut(&session) else { return };
            *count -= 1;
            if *count > 0 {
                return;
            }
            branch.counts.remove(&session);
            next = branch.parent;
        }
    }

    /// Removes branches that lead to no lease, from `inode` upwards.
    fn prune_branch(&mut self, inode: InodeId) {
        let mut next = Some(inode);
        while let Some(inode) = next {
            let Some(branch) = self.branches.get(&inode) else { return };
            if !branch.counts.is_empty() || !branch.children.is_empty() {
                return;
            }
            next = branch.parent;
            self.branches.remove(&inode);
            if let Some(branch) = next.and_then(|parent| self.branches.get_mut(&parent)) {
                branch.children.remove(&inode);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::InodeHome;

    const DEPTH: u64 = 1000;

    /// A directory in each directory, and files in the last one.
    struct DeepTree;

    impl Ancestry for DeepTree {
        fn home(&self, inode: InodeId) -> InodeHome {
            let directory = (inode.0 > 1).then(|| InodeId((inode.0 - 1).min(DEPTH)));
            InodeHome { directory, is_directory: inode.0 <= DEPTH }
        }
    }

    /// With a count of all leases at each ancestor, these take minutes.
    #[test]
    fn leases_in_a_deep_directory_count_once_above() {
        const FILES: u64 = 300_000;
        let (mut below, session) = (LeasesBelow::default(), SessionId(7));
        for file in 1..=FILES {
            below.add(InodeId(DEPTH + file), session, &DeepTree);
        }
        assert_eq!(below.branches[&InodeId(DEPTH)].counts[&session], FILES as u32);
        assert_eq!(below.branches[&InodeId::ROOT].counts[&session], 1);
        assert!(below.has_others(InodeId::ROOT, SessionId(8)) && !below.has_others(InodeId::ROOT, session));
        for file in 1..FILES {
            below.remove(InodeId(DEPTH + file), session);
        }
        assert!(below.has_others(InodeId::ROOT, SessionId(8)));
        below.remove(InodeId(DEPTH + FILES), session);
        assert_eq!(below, LeasesBelow::default());
    }
}
