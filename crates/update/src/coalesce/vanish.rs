//! Inodes that a batch both makes and frees.
//!
//! All changes to such an inode can be left out if every record that names it can be left out or replaced. A record for
//! which neither is possible keeps the inode. If an inode stays, so do the directories into which its records put it.

use std::collections::HashMap;

use ashlar_types::{FileKind, InodeId};

use super::planted;
use crate::{Create, Rename, Update};

/// An inode that the batch makes.
#[derive(Debug)]
struct Made {
    kind: FileKind,
    links: u32,
    freed: bool,
    /// A record names it that can't be put without it.
    stays: bool,
    /// Inodes that stay if this one does.
    dependents: Vec<InodeId>,
}

/// The inodes that are made and freed in a batch.
#[derive(Debug, Default)]
pub(super) struct Vanishing {
    made: HashMap<InodeId, Made>,
}

impl Vanishing {
    /// Finds them.
    pub(super) fn of(part: &[Update<'_>]) -> Self {
        let mut vanishing = Self::default();
        for update in part {
            vanishing.note(update);
        }
        let mut staying: Vec<InodeId> = vanishing
            .made
            .iter()
            .filter(|(_, made)| made.stays || !(made.freed || planted!(IgnoreFreed) && made.links == 0))
            .map(|(id, _)| *id)
            .collect();
        while let Some(id) = staying.pop() {
            if let Some(made) = vanishing.made.remove(&id).filter(|_| !planted!(IgnoreDependents)) {
                staying.extend(made.dependents);
            }
        }
        vanishing
    }

    /// Whether the inode is one of them.
    pub(super) fn holds(&self, inode: InodeId) -> bool {
        self.made.contains_key(&inode)
    }

    /// The inode's kind, if it is one of them.
    pub(super) fn kind(&self, inode: InodeId) -> Option<FileKind> {
        self.made.get(&inode).map(|made| made.kind)
    }

    fn note(&mut self, update: &Update<'_>) {
        match update {
            Update::Create(create) => self.create(create),
            Update::Link { inode, parent, .. } => {
                self.placed(*inode, *parent);
                if let Some(made) = self.living(*inode) {
                    made.links += 1;
                }
            }
            Update::Unlink { inode, parent, release, .. } | Update::RemoveDirectory { inode, parent, release, .. } => {
                self.placed(*inode, *parent);
                self.unlinked(*inode, *release);
            }
            Update::Rename(rename) if rename.exchange => {
                for id in [Some(rename.inode), rename.target, Some(rename.parent), Some(rename.new_parent)] {
                    self.keep(id);
                }
            }
            Update::Rename(rename) => self.rename(rename),
            Update::Release { inode } => {
                if let Some(made) = self.made.get_mut(inode) {
                    made.freed |= made.links == 0;
                }
            }
            Update::Write { inode, .. }
            | Update::Resize { inode, .. }
            | Update::Allocate { inode, .. }
            | Update::SetXattr { inode, .. }
            | Update::SetQuota { inode, .. }
            | Update::RemoveXattr { inode, .. } => {
                self.living(*inode);
            }
            Update::SetAttributes(set) => {
                self.living(set.inode);
            }
            // Neither changes an inode that is gone.
            Update::Accessed { .. } | Update::Depend { .. } => {}
        }
    }

    fn create(&mut self, create: &Create<'_>) {
        if let Some(made) = self.made.get_mut(&create.inode) {
            // A number is never used twice; a session that does it gets no favours.
            made.stays = true;
            return;
        }
        let links = u32::from(!create.name.is_empty());
        let made = Made { kind: create.kind, links, freed: false, stays: false, dependents: Vec::new() };
        self.made.insert(create.inode, made);
        self.placed(create.inode, create.parent);
    }

    /// The made inode, which a record changes: one that is gone can't be changed, so then the batch makes no sense.
    fn living(&mut self, inode: InodeId) -> Option<&mut Made> {
        let made = self.made.get_mut(&inode)?;
        made.stays |= made.freed;
        Some(made)
    }

    fn keep(&mut self, inode: Option<InodeId>) {
        if let Some(made) = inode.and_then(|inode| self.made.get_mut(&inode)) {
            made.stays = true;
        }
    }

    /// A record names `parent` as the directory of `inode`'s entry.
    fn placed(&mut self, inode: InodeId, parent: InodeId) {
        match self.living(inode) {
            Some(made) => made.dependents.push(parent),
            None => self.keep(Some(parent)),
        }
    }

    fn unlinked(&mut self, inode: InodeId, release: bool) {
        if let Some(made) = self.living(inode) {
            made.links = made.links.saturating_sub(1);
            made.freed |= made.links == 0 && release;
        }
    }

    fn rename(&mut self, rename: &Rename<'_>) {
        let Rename { parent, inode, new_parent, target, release, whiteout, .. } = *rename;
        if let Some(whiteout) = whiteout.filter(|_| !planted!(IgnoreWhiteouts)) {
            // Without the inode that moves, there is no record left that makes the whiteout. It isn't among those that
            // may vanish itself: what removes it later needs it then.
            self.keep(Some(inode));
            self.keep(Some(whiteout.inode));
        }
        self.placed(inode, parent);
        self.placed(inode, new_parent);
        let Some(target) = target else { return };
        // Where the inode vanishes and the target does not, what is left is the target's removal, and that can't say
        // that another directory's times change too.
        match self.living(target) {
            Some(made) if parent != new_parent => made.dependents.extend([new_parent, inode]),
            Some(made) => made.dependents.push(new_parent),
            None if parent != new_parent => self.keep(Some(inode)),
            None => {}
        }
        self.unlinked(target, release);
    }
}
