//! The invariants of the lease manager, for tests and for `ashlar fsck`.

use std::collections::BTreeSet;

use ashlar_types::LeaseMode;

use crate::leases_below::LeasesBelow;
use crate::{Ancestry, LeaseManager, LeaseTarget};

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
        for (inode, holders) in &self.leases.nodes {
            if holders.is_empty() {
                return Err(format!("inode {inode} has an entry without a holder"));
            }
            let is_writer = |holder: (&ashlar_types::SessionId, &u32)| {
                self.leases.slot(*holder.0, *holder.1).mode == LeaseMode::Write
                    || self.leases.is_dirty(*holder.0, *holder.1)
            };
            if holders.len() > 1 && holders.iter().any(is_writer) {
                return Err(format!("inode {inode} is held by {} sessions, and one may write", holders.len()));
            }
        }
        for (directory, holders) in &self.leases.files {
            let is_reader = |holder: (&ashlar_types::SessionId, &u32)| {
                self.leases.slot(*holder.0, *holder.1).mode == LeaseMode::Read
                    && !self.leases.is_dirty(*holder.0, *holder.1)
            };
            if holders.is_empty() || !holders.iter().all(is_reader) {
                return Err(format!("the files of {directory} have no reader, or a holder that does more than read"));
            }
        }
        for (inode, (session, slot)) in &self.leases.subtrees {
            if self.leases.slot(*session, *slot).mode != LeaseMode::Write {
                return Err(format!("the subtree lease on {inode} is not a write lease"));
            }
        }
        Ok(())
    }

    fn check_slots(&self) -> Result<(), String> {
        let mut used = 0;
        for (session, holder) in &self.leases.holders {
            for (number, slot) in (0_u32..).zip(&holder.slots) {
                let fail = |what: &str| Err(format!("slot {number} of session {session} {what}"));
                if slot.target.is_none() != holder.free.contains(&number) {
                    return fail("is missing in the list of free slots, or is in it though used");
                }
                if slot.dirty != holder.dirty.contains(&number) {
                    return fail("is missing in the list of dirty slots, or is in it though clean");
                }
                if slot.live && slot.mode == LeaseMode::Write && !slot.dirty {
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
                let Some(target) = slot.target else {
                    if slot.live || slot.dirty || !slot.shadows.is_empty() || !slot.shadowed.is_empty() {
                        return fail("is free, but in use");
                    }
                    continue;
                };
                used += 1;
                if self.leases.slot_at(target, *session) != Some(number)
                    || !holder.by_stamp.contains(&(slot.stamp, number))
                {
                    return fail("holds a target that does not name it as holder");
                }
            }
        }
        let shared = self.leases.nodes.values().chain(self.leases.files.values());
        let shared: usize = shared.map(std::collections::BTreeMap::len).sum();
        let stamps: usize = self.leases.holders.values().map(|holder| holder.entries()).sum();
        if used != shared + self.leases.subtrees.len() || used != stamps {
            return Err(format!(
                "{used} slots are used, but {shared} shared and {} subtree leases are held",
                self.leases.subtrees.len()
            ));
        }
        Ok(())
    }

    fn check_counts(&self, ancestry: &impl Ancestry) -> Result<(), String> {
        for (inode, parent) in self.leases.below.parents() {
            let real = ancestry.home(inode).directory;
            if parent != real {
                return Err(format!("a move of inode {inode} from {parent:?} to {real:?} was not reported"));
            }
        }
        let mut below = LeasesBelow::default();
        let mut targets = BTreeSet::new();
        for (session, holder) in &self.leases.holders {
            for (_, slot) in &holder.by_stamp {
                let target = holder.slots[*slot as usize].target.unwrap_or(LeaseTarget::node(ashlar_types::InodeId(0)));
                targets.insert(target);
                below.add(target.inode, *session, ancestry);
            }
        }
        if below != self.leases.below {
            return Err("the counts of leases below directories are wrong".to_owned());
        }
        Ok(())
    }
}
