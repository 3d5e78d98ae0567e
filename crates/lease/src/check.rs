//! The invariants of the lease manager, for tests and for `ashlar fsck`.

use std::collections::BTreeSet;

use crate::below::Below;
use crate::{Ancestry, LeaseManager, Mode, Place};

impl LeaseManager {
    /// Checks the tables against each other and against the tree, between two pieces of work.
    ///
    /// # Errors
    ///
    /// A description of the broken invariant.
    pub fn check(&self, ancestry: &impl Ancestry) -> Result<(), String> {
        self.check_conflicts()?;
        self.check_slots()?;
        self.check_counts(ancestry)
    }

    fn check_conflicts(&self) -> Result<(), String> {
        for (inode, holders) in &self.holds.nodes {
            if holders.is_empty() {
                return Err(format!("inode {inode} has an entry without a holder"));
            }
            let is_writer = |holder: (&ashlar_types::SessionId, &u32)| {
                self.holds.slot(*holder.0, *holder.1).mode == Mode::Write || self.holds.is_dirty(*holder.0, *holder.1)
            };
            if holders.len() > 1 && holders.iter().any(is_writer) {
                return Err(format!("inode {inode} is held by {} sessions, and one may write", holders.len()));
            }
        }
        for (directory, holders) in &self.holds.files {
            let is_reader = |holder: (&ashlar_types::SessionId, &u32)| {
                self.holds.slot(*holder.0, *holder.1).mode == Mode::Read && !self.holds.is_dirty(*holder.0, *holder.1)
            };
            if holders.is_empty() || !holders.iter().all(is_reader) {
                return Err(format!("the files of {directory} have no reader, or one that is more than that"));
            }
        }
        for (inode, (session, slot)) in &self.holds.subtrees {
            if self.holds.slot(*session, *slot).mode != Mode::Write {
                return Err(format!("the subtree lease on {inode} is not to write"));
            }
        }
        Ok(())
    }

    fn check_slots(&self) -> Result<(), String> {
        let mut places = 0;
        for (session, holder) in &self.holds.holders {
            for (number, slot) in (0_u32..).zip(&holder.slots) {
                let fail = |what: &str| Err(format!("slot {number} of session {session} {what}"));
                if slot.place.is_none() != holder.free.contains(&number) {
                    return fail("is not where free slots are, or is though it's used");
                }
                if slot.dirty != holder.dirty.contains(&number) {
                    return fail("is not where dirty slots are, or is though it's clean");
                }
                if slot.live && slot.mode == Mode::Write && !slot.dirty {
                    return fail("can be written on, but is not dirty");
                }
                let is_shadow = |other: &u32| {
                    let other = &holder.slots[*other as usize];
                    other.live && other.shadowed.contains(&number)
                };
                let is_shadowed = |other: &u32| holder.slots[*other as usize].shadows.contains(&number);
                if !slot.shadows.iter().all(is_shadow) || !slot.shadowed.iter().all(is_shadowed) {
                    return fail("and its shadows disagree");
                }
                let Some(place) = slot.place else {
                    if slot.live || slot.dirty || !slot.shadows.is_empty() || !slot.shadowed.is_empty() {
                        return fail("is free, but in use");
                    }
                    continue;
                };
                places += 1;
                if self.holds.slot_at(place, *session) != Some(number)
                    || !holder.by_stamp.contains(&(slot.stamp, number))
                {
                    return fail("holds a place that doesn't know it");
                }
            }
        }
        let shared = self.holds.nodes.values().chain(self.holds.files.values());
        let shared: usize = shared.map(std::collections::BTreeMap::len).sum();
        let stamps: usize = self.holds.holders.values().map(|holder| holder.entries()).sum();
        if places != shared + self.holds.subtrees.len() || places != stamps {
            return Err(format!(
                "{places} slots are used, but {shared} shared and {} subtree leases are held",
                self.holds.subtrees.len()
            ));
        }
        Ok(())
    }

    fn check_counts(&self, ancestry: &impl Ancestry) -> Result<(), String> {
        for (inode, parent) in self.holds.below.parents() {
            let real = ancestry.home(inode).directory;
            if parent != real {
                return Err(format!("a move of inode {inode} from {parent:?} to {real:?} was not reported"));
            }
        }
        let mut below = Below::default();
        let mut places = BTreeSet::new();
        for (session, holder) in &self.holds.holders {
            for (_, slot) in &holder.by_stamp {
                let place = holder.slots[*slot as usize].place.unwrap_or(Place::node(ashlar_types::InodeId(0)));
                places.insert(place);
                below.add(place.inode, *session, ancestry);
            }
        }
        if below != self.holds.below {
            return Err("the counts of leases below directories are wrong".to_owned());
        }
        Ok(())
    }
}
