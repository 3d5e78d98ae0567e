//! The last writers of shared inodes, and how far their logs must be persistent.

use std::collections::{BTreeMap, BTreeSet};

use ashlar_types::{InodeId, LogPosition, SessionId};

use crate::{Ancestry, InodeHome, LeaseTarget};

/// Marks at targets that writers have left.
///
/// A mark at a subtree counts for all inodes below it, also after they move out of it.
#[derive(Debug)]
pub(crate) struct Dependencies {
    marks: BTreeMap<LeaseTarget, BTreeMap<SessionId, LogPosition>>,
    by_position: BTreeSet<(SessionId, LogPosition, LeaseTarget)>,
    /// Marks that count for every inode.
    floor: BTreeMap<SessionId, LogPosition>,
    marks_max: usize,
}

impl Dependencies {
    pub fn new(marks_max: usize, applied: &[(SessionId, LogPosition)]) -> Self {
        let mut floor = BTreeMap::new();
        for (session, position) in applied {
            raise(&mut floor, *session, *position);
        }
        Self { marks: BTreeMap::new(), by_position: BTreeSet::new(), floor, marks_max }
    }

    /// Marks that `session` wrote at `target`, in its log up to `position`.
    pub fn mark(&mut self, target: LeaseTarget, session: SessionId, position: LogPosition) {
        if position == LogPosition(0) {
            return;
        }
        let marks = self.marks.entry(target).or_default();
        let before = marks.get(&session).copied();
        if before.is_some_and(|before| before >= position) {
            return;
        }
        marks.insert(session, position);
        if let Some(before) = before {
            self.by_position.remove(&(session, before, target));
        }
        self.by_position.insert((session, position, target));
        if self.by_position.len() > self.marks_max {
            for (session, position, _) in std::mem::take(&mut self.by_position) {
                raise(&mut self.floor, session, position);
            }
            self.marks.clear();
        }
    }

    /// Removes marks, since the session's log is persistent up to `position`.
    pub fn forget(&mut self, session: SessionId, position: LogPosition) {
        if self.floor.get(&session).is_some_and(|floor| *floor <= position) {
            self.floor.remove(&session);
        }
        while let Some(first) = self.by_position.range((session, LogPosition(0), LOWEST)..).next().copied() {
            if first.0 != session || first.1 > position {
                return;
            }
            self.by_position.remove(&first);
            if let Some(marks) = self.marks.get_mut(&first.2) {
                marks.remove(&session);
                if marks.is_empty() {
                    self.marks.remove(&first.2);
                }
            }
        }
    }

    /// Moves marks along with a directory that has moved away from below `from`.
    ///
    /// Marks there count for all inodes below the directory as before. The log of the moving session depends on them,
    /// but holes in its lease are granted to others without that log.
    pub fn move_marks(&mut self, directory: InodeId, from: Option<InodeId>, ancestry: &impl Ancestry) {
        if self.marks.is_empty() {
            return;
        }
        let mut found = BTreeMap::new();
        self.collect_from(from, ancestry, &mut found);
        for (session, position) in found {
            self.mark(LeaseTarget::subtree(directory), session, position);
        }
    }

    /// Adds to `found` the updates that the state of `inode` includes.
    pub fn collect(&self, inode: InodeId, ancestry: &impl Ancestry, found: &mut BTreeMap<SessionId, LogPosition>) {
        // Usually everything is persistent, so the path upwards need not be walked.
        if !self.marks.is_empty() {
            let home = ancestry.home(inode);
            self.collect_at(LeaseTarget::node(inode), found);
            self.collect_at(LeaseTarget::subtree(inode), found);
            if let Some(directory) = home.as_file() {
                self.collect_at(LeaseTarget::files(directory), found);
            }
            self.collect_from(home.directory, ancestry, found);
        }
        for (session, position) in &self.floor {
            raise(found, *session, *position);
        }
    }

    /// Adds to `found` what [`Self::collect`] adds for each inode of a path, which is given from below up to the root.
    pub fn collect_path(
        &self,
        path: impl Iterator<Item = (InodeId, InodeHome)>,
        found: &mut BTreeMap<SessionId, LogPosition>,
    ) {
        if !self.marks.is_empty() {
            for (inode, home) in path {
                self.collect_at(LeaseTarget::node(inode), found);
                self.collect_at(LeaseTarget::subtree(inode), found);
                if let Some(directory) = home.as_file() {
                    self.collect_at(LeaseTarget::files(directory), found);
                }
            }
        }
        for (session, position) in &self.floor {
            raise(found, *session, *position);
        }
    }

    /// Adds to `found` the marks for everything below a directory, there and further up.
    fn collect_from(
        &self,
        directory: Option<InodeId>,
        ancestry: &impl Ancestry,
        found: &mut BTreeMap<SessionId, LogPosition>,
    ) {
        let mut next = directory;
        while let Some(directory) = next {
            self.collect_at(LeaseTarget::subtree(directory), found);
            next = ancestry.home(directory).directory;
        }
    }

    /// Adds to `found` the marks at one target.
    pub fn collect_at(&self, target: LeaseTarget, found: &mut BTreeMap<SessionId, LogPosition>) {
        for (session, position) in self.marks.get(&target).into_iter().flatten() {
            raise(found, *session, *position);
        }
    }
}

const LOWEST: LeaseTarget = LeaseTarget::node(InodeId(0));

fn raise(positions: &mut BTreeMap<SessionId, LogPosition>, session: SessionId, position: LogPosition) {
    let known = positions.entry(session).or_insert(position);
    *known = (*known).max(position);
}
