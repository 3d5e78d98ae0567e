//! The table of held leases: sessions, targets and slots.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::BuildHasherDefault;

use ashlar_types::{InodeHasher, InodeId, LeaseMode, LeaseScope, LogPosition, SessionId};

use crate::leases_below::LeasesBelow;
use crate::{Ancestry, InodeHome, LeaseTarget, SlotWord};

/// A slot of a session's lease table.
#[derive(Clone, Debug)]
pub(crate) struct LeaseSlot {
    /// `None` if the slot is free. Its generation outlives the lease.
    pub target: Option<LeaseTarget>,
    pub mode: LeaseMode,
    pub generation: u64,
    /// Whether the generation was granted, so that the session may consider it valid.
    pub live: bool,
    /// Whether the session's log may hold unapplied records that were written on this slot.
    pub dirty: bool,
    /// Whether the slot's records may still be in the log after the next apply.
    ///
    /// The target was known on a slot that was removed while a log was applied, and whose word is written later. The
    /// next seal may come before that word. Only the seal after it covers all records.
    pub late: bool,
    /// The log's position when it was last applied with this slot dirty.
    pub written: LogPosition,
    /// The time at which it last became live.
    pub granted_us: u64,
    /// The time of the last grant to the session, also if the slot was live before.
    pub last_grant_us: u64,
    /// The order of the session's leases by their last grant.
    pub stamp: u64,
    /// The number of holes cut into the lease.
    pub splits: u32,
    /// The number of entries that the session has made in the directory while it held it on this slot.
    pub made: u32,
    /// Live slots on which the session came to know this slot's target before it had this slot.
    pub shadows: BTreeSet<u32>,
    /// The slots that name this one as their shadow.
    pub shadowed: BTreeSet<u32>,
}

impl LeaseSlot {
    const fn free() -> Self {
        Self {
            target: None,
            mode: LeaseMode::Read,
            generation: 1,
            live: false,
            dirty: false,
            late: false,
            written: LogPosition(0),
            granted_us: 0,
            last_grant_us: 0,
            stamp: 0,
            splits: 0,
            made: 0,
            shadows: BTreeSet::new(),
            shadowed: BTreeSet::new(),
        }
    }
}

/// A session's leases.
#[derive(Debug, Default)]
pub(crate) struct Holder {
    pub slots: Vec<LeaseSlot>,
    pub free: BTreeSet<u32>,
    pub by_stamp: BTreeSet<(u64, u32)>,
    pub dirty: BTreeSet<u32>,
    pub applied: LogPosition,
    pub active_us: u64,
    /// Whether the session has ended, and is not waited for.
    pub ending: bool,
    /// Whether a [`crate::evaluate::Work::Trim`] is in the queue.
    pub trimming: bool,
    /// Whether the session is a passive reader ([`crate::LeaseManager::join_readers`]), which obstructs no session.
    pub is_passive: bool,
    /// The slots of the session's table that have room, if not all have.
    pub table_slots: Option<u32>,
}

impl Holder {
    /// Adds slots up to this one.
    fn grow(&mut self, slot: u32) {
        while self.slots.len() <= slot as usize {
            self.free.insert(self.slots.len() as u32);
            self.slots.push(LeaseSlot::free());
        }
    }

    /// Returns the number of leases that the session holds.
    pub fn entries(&self) -> usize {
        self.by_stamp.len()
    }
}

/// Sessions that hold shareable targets, and the slots on which they do.
pub(crate) type SharedHolders = BTreeMap<InodeId, BTreeMap<SessionId, u32>>;

/// All leases.
#[derive(Debug, Default)]
pub(crate) struct HeldLeases {
    pub nodes: SharedHolders,
    pub files: SharedHolders,
    pub subtrees: BTreeMap<InodeId, (SessionId, u32)>,
    pub holders: BTreeMap<SessionId, Holder>,
    pub below: LeasesBelow,
    stamp: u64,
    governors: RefCell<Governors>,
}

/// The subtree leases that govern directories, as found before: a deep path is climbed once, not for each record.
///
/// All are forgotten when a subtree lease comes or goes, and when a directory moves. One is forgotten when its inode is
/// made or freed.
type Governors = HashMap<InodeId, Option<InodeId>, BuildHasherDefault<InodeHasher>>;

/// The most directories whose governing lease is remembered.
const GOVERNORS_MAX: usize = 16_384;

impl HeldLeases {
    /// Returns the subtree lease that governs an inode in directory `from`, or `from` itself.
    pub fn governing_subtree(&self, from: Option<InodeId>, ancestry: &impl Ancestry) -> Option<InodeId> {
        let mut governors = self.governors.borrow_mut();
        let (mut climbed, mut next) = (Vec::new(), from);
        let found = loop {
            let Some(inode) = next else { break None };
            if let Some(known) = governors.get(&inode) {
                break *known;
            }
            climbed.push(inode);
            if self.subtrees.contains_key(&inode) {
                break Some(inode);
            }
            next = ancestry.home(inode).directory;
        };
        if governors.len() + climbed.len() > GOVERNORS_MAX {
            governors.clear();
        }
        governors.extend(climbed.into_iter().take(GOVERNORS_MAX).map(|inode| (inode, found)));
        found
    }

    /// Forgets which leases govern directories, since that changes.
    pub fn forget_governors(&mut self) {
        self.governors.get_mut().clear();
    }

    /// Forgets which lease governs an inode. It may have been asked for before the inode was made.
    pub fn forget_governor(&mut self, inode: InodeId) {
        self.governors.get_mut().remove(&inode);
    }

    /// Returns the target whose leases govern an inode.
    pub fn governing(&self, inode: InodeId, ancestry: &impl Ancestry) -> Option<LeaseTarget> {
        if self.nodes.contains_key(&inode) {
            return Some(LeaseTarget::node(inode));
        }
        if self.subtrees.contains_key(&inode) {
            return Some(LeaseTarget::subtree(inode));
        }
        let home = ancestry.home(inode);
        self.governing_in(home.directory, home.is_directory, ancestry)
    }

    /// As [`Self::governing`], if `top` is the subtree lease that governs the inode's directory.
    pub fn governing_below(&self, inode: InodeId, home: InodeHome, top: Option<InodeId>) -> Option<LeaseTarget> {
        if self.nodes.contains_key(&inode) {
            return Some(LeaseTarget::node(inode));
        }
        if self.subtrees.contains_key(&inode) {
            return Some(LeaseTarget::subtree(inode));
        }
        match home.as_file().filter(|directory| self.files.contains_key(directory)) {
            Some(directory) => Some(LeaseTarget::files(directory)),
            None => top.map(LeaseTarget::subtree),
        }
    }

    /// Returns the target that governs inodes of a directory that have no lease of their own.
    pub fn governing_in(
        &self,
        directory: Option<InodeId>,
        is_directory: bool,
        ancestry: &impl Ancestry,
    ) -> Option<LeaseTarget> {
        match directory.filter(|directory| !is_directory && self.files.contains_key(directory)) {
            Some(directory) => Some(LeaseTarget::files(directory)),
            None => self.governing_subtree(directory, ancestry).map(LeaseTarget::subtree),
        }
    }

    /// Returns the slot on which a session holds a target.
    pub fn slot_at(&self, target: LeaseTarget, session: SessionId) -> Option<u32> {
        match target.scope {
            LeaseScope::Node => self.nodes.get(&target.inode)?.get(&session).copied(),
            LeaseScope::Files => self.files.get(&target.inode)?.get(&session).copied(),
            LeaseScope::Subtree => {
                self.subtrees.get(&target.inode).filter(|holder| holder.0 == session).map(|holder| holder.1)
            }
        }
    }

    /// Returns the holders of leases at an inode, of any scope, with their slots.
    pub fn holders_at(&self, inode: InodeId) -> impl Iterator<Item = (SessionId, u32)> + '_ {
        let shared = [&self.nodes, &self.files].into_iter().filter_map(move |shared| shared.get(&inode)).flatten();
        shared.map(|(session, slot)| (*session, *slot)).chain(self.subtrees.get(&inode).copied())
    }

    /// Returns the holders of a target, with their slots.
    pub fn holders_of(&self, target: LeaseTarget) -> impl Iterator<Item = (SessionId, u32)> + '_ {
        let LeaseTarget { inode, scope } = target;
        let shared = match scope {
            LeaseScope::Node => self.nodes.get(&inode),
            LeaseScope::Files => self.files.get(&inode),
            LeaseScope::Subtree => None,
        };
        let alone = self.subtrees.get(&inode).filter(|_| scope == LeaseScope::Subtree);
        shared.into_iter().flatten().map(|(session, slot)| (*session, *slot)).chain(alone.copied())
    }

    /// Returns the slot on which a session governs an inode.
    pub fn slot_governing(&self, session: SessionId, inode: InodeId, ancestry: &impl Ancestry) -> Option<u32> {
        self.slot_at(self.governing(inode, ancestry)?, session)
    }

    pub fn slot(&self, session: SessionId, slot: u32) -> &LeaseSlot {
        &self.holders[&session].slots[slot as usize]
    }

    pub fn slot_mut(&mut self, session: SessionId, slot: u32) -> &mut LeaseSlot {
        &mut self.holder(session).slots[slot as usize]
    }

    /// Returns the session's state, and adds it if it is missing.
    pub fn holder(&mut self, session: SessionId) -> &mut Holder {
        self.holders.entry(session).or_default()
    }

    /// Returns the slot's current word.
    pub fn word(&self, session: SessionId, slot: u32) -> SlotWord {
        let state = self.slot(session, slot);
        let target = state.target.unwrap_or(LeaseTarget::node(InodeId(0)));
        SlotWord {
            session,
            slot,
            inode: target.inode,
            generation: state.generation,
            mode: state.target.map(|_| state.mode),
            scope: target.scope,
        }
    }

    /// Whether unapplied records may exist that were written on the slot, or on one of its shadows.
    pub fn is_dirty(&self, session: SessionId, slot: u32) -> bool {
        let slots = &self.holders[&session].slots;
        let state = &slots[slot as usize];
        state.dirty || state.shadows.iter().any(|shadow| slots[*shadow as usize].dirty)
    }

    /// Gives a target to a session, on a free slot; beyond its table if the table is full.
    pub fn add(&mut self, target: LeaseTarget, session: SessionId, mode: LeaseMode, ancestry: &impl Ancestry) -> u32 {
        let holder = self.holder(session);
        let slot = holder.free.first().copied().unwrap_or(holder.slots.len() as u32);
        self.take(slot, target, session, mode, ancestry);
        slot
    }

    /// Gives a target to a session on this slot, which is free.
    pub fn take(
        &mut self,
        slot: u32,
        target: LeaseTarget,
        session: SessionId,
        mode: LeaseMode,
        ancestry: &impl Ancestry,
    ) {
        self.stamp += 1;
        let stamp = self.stamp;
        let holder = self.holder(session);
        holder.grow(slot);
        holder.free.remove(&slot);
        let state = &mut holder.slots[slot as usize];
        *state = LeaseSlot { target: Some(target), mode, generation: state.generation, stamp, ..LeaseSlot::free() };
        holder.by_stamp.insert((stamp, slot));
        self.enter_lease(target, session, slot);
        self.below.add(target.inode, session, ancestry);
    }

    /// Restores a slot from the lease table after a restart, without its lease.
    pub fn restore_slot(&mut self, word: &SlotWord) {
        let holder = self.holder(word.session);
        holder.grow(word.slot);
        holder.slots[word.slot as usize].generation = word.generation;
    }

    /// Gives the slot a new generation, and returns its new word.
    ///
    /// State that was granted on the slot is no longer valid.
    pub fn raise_generation(&mut self, session: SessionId, slot: u32) -> SlotWord {
        let holder = self.holder(session);
        let state = &mut holder.slots[slot as usize];
        state.generation += 1;
        state.live = false;
        let is_dirty = state.dirty;
        for shadowed in std::mem::take(&mut state.shadowed) {
            let shadowed_state = &mut holder.slots[shadowed as usize];
            shadowed_state.shadows.remove(&slot);
            if is_dirty {
                shadowed_state.dirty = true;
                holder.dirty.insert(shadowed);
            }
        }
        self.word(session, slot)
    }

    /// Records other live slots on which the session also knows the slot's target.
    pub fn set_shadows(&mut self, session: SessionId, slot: u32, shadows: BTreeSet<u32>) {
        let holder = self.holder(session);
        for shadow in &shadows {
            holder.slots[*shadow as usize].shadowed.insert(slot);
        }
        holder.slots[slot as usize].shadows = shadows;
    }

    fn drop_shadows(&mut self, session: SessionId, slot: u32) -> BTreeSet<u32> {
        let holder = self.holder(session);
        let shadows = std::mem::take(&mut holder.slots[slot as usize].shadows);
        for shadow in &shadows {
            holder.slots[*shadow as usize].shadowed.remove(&slot);
        }
        shadows
    }

    /// Moves ungranted leases from slots beyond the table to free slots in it, and returns the new slots.
    pub fn record_all(&mut self, session: SessionId, table_slots: u32, ancestry: &impl Ancestry) -> Vec<u32> {
        let holder = self.holder(session);
        let beyond = table_slots..holder.slots.len() as u32;
        let beyond: Vec<_> = beyond.filter(|slot| !holder.free.contains(slot)).collect();
        beyond.into_iter().map(|slot| self.relocate(session, slot, ancestry)).collect()
    }

    fn relocate(&mut self, session: SessionId, slot: u32, ancestry: &impl Ancestry) -> u32 {
        let state = self.slot(session, slot);
        let (Some(target), mode, written) = (state.target, state.mode, state.written) else { return slot };
        let (is_dirty, is_late) = (state.dirty, state.late);
        let shadows = self.drop_shadows(session, slot);
        self.remove(session, slot);
        let to = self.add(target, session, mode, ancestry);
        self.set_shadows(session, to, shadows);
        self.slot_mut(session, to).written = written;
        if is_dirty {
            self.set_dirty(session, to);
            self.slot_mut(session, to).late = is_late;
        }
        to
    }

    /// Removes a target that no longer exists.
    ///
    /// State known on the slot beside it stays valid until the new word is written, though the log may have been sealed
    /// before.
    pub fn end_lease(&mut self, session: SessionId, slot: u32) -> SlotWord {
        let state = self.slot(session, slot);
        let is_known = state.dirty && (state.live || state.late);
        let shadowed = if is_known { state.shadowed.clone() } else { BTreeSet::new() };
        let word = self.raise_generation(session, slot);
        self.remove(session, slot);
        for known in shadowed {
            self.set_dirty(session, known);
            self.slot_mut(session, known).late = true;
        }
        word
    }

    /// Removes a slot's lease, and frees the slot. The caller has changed its generation.
    pub fn remove(&mut self, session: SessionId, slot: u32) {
        self.drop_shadows(session, slot);
        let holder = self.holder(session);
        let state = &mut holder.slots[slot as usize];
        assert!(!state.live && state.shadowed.is_empty(), "a slot is freed only behind its revocation");
        let Some(target) = state.target.take() else { return };
        state.dirty = false;
        holder.dirty.remove(&slot);
        holder.by_stamp.remove(&(state.stamp, slot));
        holder.free.insert(slot);
        match target.scope {
            LeaseScope::Node => remove_holder(&mut self.nodes, target.inode, session),
            LeaseScope::Files => remove_holder(&mut self.files, target.inode, session),
            LeaseScope::Subtree => {
                self.subtrees.remove(&target.inode);
                self.forget_governors();
            }
        }
        self.below.remove(target.inode, session);
    }

    /// Widens the lease on one directory, or on its files, to everything below it.
    ///
    /// State that is known on the slot stays known.
    pub fn widen_lease(&mut self, session: SessionId, slot: u32) {
        let Some(LeaseTarget { inode, scope }) = self.slot(session, slot).target else { return };
        match scope {
            LeaseScope::Node => remove_holder(&mut self.nodes, inode, session),
            LeaseScope::Files => remove_holder(&mut self.files, inode, session),
            LeaseScope::Subtree => return,
        }
        let target = LeaseTarget::subtree(inode);
        self.enter_lease(target, session, slot);
        let state = self.slot_mut(session, slot);
        (state.target, state.mode) = (Some(target), LeaseMode::Write);
    }

    /// Records that the session has made an entry in the directory that it holds on the slot.
    ///
    /// So the lease is in use. Returns the number of entries made there.
    pub fn record_made(&mut self, session: SessionId, slot: u32) -> u32 {
        self.mark_recent(session, slot);
        let state = self.slot_mut(session, slot);
        state.made = state.made.saturating_add(1);
        state.made
    }

    /// Makes the lease the last one to be evicted.
    fn mark_recent(&mut self, session: SessionId, slot: u32) {
        self.stamp += 1;
        let stamp = self.stamp;
        let holder = self.holder(session);
        let state = &mut holder.slots[slot as usize];
        holder.by_stamp.remove(&(state.stamp, slot));
        holder.by_stamp.insert((stamp, slot));
        state.stamp = stamp;
    }

    /// Records that the slot is granted.
    pub fn record_grant(&mut self, session: SessionId, slot: u32, now_us: u64) {
        self.mark_recent(session, slot);
        let holder = self.holder(session);
        holder.active_us = now_us;
        let state = &mut holder.slots[slot as usize];
        state.last_grant_us = now_us;
        if !state.live {
            state.live = true;
            state.granted_us = now_us;
        }
        if state.mode == LeaseMode::Write {
            self.set_dirty(session, slot);
        }
    }

    /// Records that the session's log may hold records written on the slot.
    pub fn set_dirty(&mut self, session: SessionId, slot: u32) {
        let holder = self.holder(session);
        holder.slots[slot as usize].dirty = true;
        holder.dirty.insert(slot);
    }

    fn enter_lease(&mut self, target: LeaseTarget, session: SessionId, slot: u32) {
        match target.scope {
            LeaseScope::Node => drop(self.nodes.entry(target.inode).or_default().insert(session, slot)),
            LeaseScope::Files => drop(self.files.entry(target.inode).or_default().insert(session, slot)),
            LeaseScope::Subtree => {
                self.subtrees.insert(target.inode, (session, slot));
                self.forget_governors();
            }
        }
    }
}

fn remove_holder(shared: &mut SharedHolders, inode: InodeId, session: SessionId) {
    if let Some(holders) = shared.get_mut(&inode) {
        holders.remove(&session);
        if holders.is_empty() {
            shared.remove(&inode);
        }
    }
}
