//! Decoded inodes of the database. For each file that a session asks for, SharedFS reads all directories above it.

use std::cell::RefCell;

use ashlar_types::{Inode, InodeId};

/// The number of cached inodes, each in the slot of its number's last bits. Consecutive numbers use different slots.
const SLOTS: usize = 8192;

/// Decoded rows of inodes, in the snapshot that is read at present.
#[derive(Debug, Default)]
pub(crate) struct InodeCache(RefCell<Vec<Option<(InodeId, Inode)>>>);

fn slot(inode: InodeId) -> usize {
    inode.0 as usize % SLOTS
}

impl InodeCache {
    pub fn get(&self, inode: InodeId) -> Option<Inode> {
        let slots = self.0.borrow();
        let (_, found) = slots.get(slot(inode))?.as_ref().filter(|(id, _)| *id == inode)?;
        Some(found.clone())
    }

    pub fn put(&self, inode: InodeId, found: &Inode) {
        // Targets of links may be long.
        if !found.target.is_empty() {
            return;
        }
        let mut slots = self.0.borrow_mut();
        if slots.is_empty() {
            slots.resize_with(SLOTS, || None);
        }
        slots[slot(inode)] = Some((inode, found.clone()));
    }

    /// Another snapshot is read from now on, in which these rows differ.
    pub fn forget(&mut self, changed: impl ExactSizeIterator<Item = InodeId>) {
        let slots = self.0.get_mut();
        if slots.is_empty() {
            return;
        }
        if changed.len() >= SLOTS {
            return slots.clear();
        }
        for inode in changed {
            slots[slot(inode)] = None;
        }
    }

    /// Another snapshot is read from now on.
    pub fn forget_all(&mut self) {
        self.0.get_mut().clear();
    }
}
