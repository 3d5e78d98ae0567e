//! Delegations: files whose record locks a session keeps itself.
//!
//! Invariants: the table holds no lock on a delegated file, no owner waits for one, and every request about the file
//! first recalls it. So table and delegations together equal, at each request, a table alone.

use std::collections::BTreeMap;

use ashlar_types::{InodeId, LockKind, LockedRange, SessionId};

use super::{LockOwner, LockRequest, LockTable};

/// Milliseconds for which a file must have had requests from one owner only, before it is delegated.
///
/// Each recall costs the requesting owner time. The session that is recalled sends messages until the file is delegated
/// again.
const QUIET_MS: u64 = 100;
/// The most files remembered for that time. If there are more, files whose time is over are forgotten.
const ASKED_MAX: usize = 1024;

/// The memory in which sessions keep their delegated locks.
pub trait DelegationSlots {
    /// Delegates a session's locks on a file to it; `false` if the session can't have them.
    fn delegate(&mut self, to: SessionId, slot: u32, inode: InodeId, locks: &[LockedRange]) -> bool;

    /// Recalls the delegation, and returns the locks that the session has on the file.
    fn recall(&mut self, from: SessionId, slot: u32, inode: InodeId) -> Vec<LockedRange>;
}

#[derive(Clone, Copy, Debug)]
struct Delegation {
    owner: LockOwner,
    pid: u32,
    slot: u32,
}

impl Delegation {
    fn slot_key(self) -> (SessionId, u32) {
        (self.owner.session, self.slot)
    }
}

/// The owner that asked last about a file, and the time of the last change of owner.
#[derive(Clone, Copy, Debug)]
struct Asked {
    by: LockOwner,
    changed_ms: Option<u64>,
}

/// The delegated files and their owners.
#[derive(Debug, Default)]
pub struct Delegations {
    delegated: BTreeMap<InodeId, Delegation>,
    /// The same by session and slot: a slot has room for one file.
    slots: BTreeMap<(SessionId, u32), InodeId>,
    asked: BTreeMap<InodeId, Asked>,
}

impl Delegations {
    /// Recalls a file's locks into the table before a request about record locks on it.
    ///
    /// The request may ask for a lock or only query them.
    pub fn handle_request(
        &mut self,
        now_ms: u64,
        inode: InodeId,
        by: LockOwner,
        table: &mut LockTable,
        slots: &mut impl DelegationSlots,
    ) {
        let recalled = self.recall(inode, table, slots);
        let before = self.asked.get(&inode).map(|asked| asked.by).or(recalled);
        let known = self.asked.get(&inode).and_then(|asked| asked.changed_ms);
        let changed_ms = if before.is_some_and(|before| before != by) { Some(now_ms) } else { known };
        if self.asked.len() >= ASKED_MAX {
            self.asked.retain(|_, asked| asked.changed_ms.is_some_and(|changed| now_ms < changed + QUIET_MS));
        }
        self.asked.insert(inode, Asked { by, changed_ms });
    }

    /// Whether a file is delegated to an owner.
    #[must_use]
    pub fn is_delegated_to(&self, inode: InodeId, owner: LockOwner) -> bool {
        self.delegated.get(&inode).is_some_and(|delegation| delegation.owner == owner)
    }

    /// Recalls a file's locks into the table, and returns their former owner.
    pub fn recall(
        &mut self,
        inode: InodeId,
        table: &mut LockTable,
        slots: &mut impl DelegationSlots,
    ) -> Option<LockOwner> {
        let Delegation { owner, pid, slot } = self.remove(inode)?;
        enter(inode, owner, pid, &slots.recall(owner.session, slot, inode), table);
        Some(owner)
    }

    /// Delegates a file to the owner that was just answered, if allowed, and returns whether it did.
    ///
    /// The owner's locks leave the table.
    pub fn delegate(
        &mut self,
        now_ms: u64,
        (inode, owner, pid, slot): (InodeId, LockOwner, u32, u32),
        table: &mut LockTable,
        slots: &mut impl DelegationSlots,
    ) -> bool {
        let is_quiet =
            self.asked.get(&inode).and_then(|asked| asked.changed_ms).is_none_or(|at| now_ms >= at + QUIET_MS);
        if !is_quiet || !table.is_sole_owner(inode, owner) {
            return false;
        }
        if !slots.delegate(owner.session, slot, inode, &table.records(inode, owner)) {
            return false;
        }
        table.handle_close(owner, inode, LockKind::Record);
        self.insert(inode, Delegation { owner, pid, slot });
        true
    }

    fn insert(&mut self, inode: InodeId, delegation: Delegation) {
        // The session has given back the file that stood in this slot before.
        if let Some(before) = self.slots.insert(delegation.slot_key(), inode) {
            self.delegated.remove(&before);
        }
        self.delegated.insert(inode, delegation);
    }

    fn remove(&mut self, inode: InodeId) -> Option<Delegation> {
        let delegation = self.delegated.remove(&inode)?;
        self.slots.remove(&delegation.slot_key());
        Some(delegation)
    }

    /// Takes over a session's claim on a file after a restart.
    ///
    /// The session had the file delegated, or had its locks in the table, and then `locks` lists them. If two sessions
    /// claim the same file, the later one's locks are entered in the table as far as possible.
    pub fn restore_claim(
        &mut self,
        (inode, owner, pid, slot): (InodeId, LockOwner, u32, u32),
        is_delegated: bool,
        locks: &[LockedRange],
        table: &mut LockTable,
        slots: &mut impl DelegationSlots,
    ) {
        if is_delegated && table.is_sole_owner(inode, owner) && !self.delegated.contains_key(&inode) {
            self.insert(inode, Delegation { owner, pid, slot });
            return;
        }
        self.recall(inode, table, slots);
        if is_delegated {
            enter(inode, owner, pid, &slots.recall(owner.session, slot, inode), table);
        } else {
            enter(inode, owner, pid, locks, table);
        }
    }

    /// Removes the delegations of a session that has ended.
    pub fn handle_session_end(&mut self, session: SessionId) {
        let own: Vec<_> = self.slots.range((session, 0)..=(session, u32::MAX)).map(|(_, inode)| *inode).collect();
        for inode in own {
            self.remove(inode);
        }
    }

    /// Returns the number of delegated files.
    #[must_use]
    pub fn count(&self) -> usize {
        self.delegated.len()
    }
}

fn enter(inode: InodeId, owner: LockOwner, pid: u32, locks: &[LockedRange], table: &mut LockTable) {
    for &LockedRange { mode, range } in locks {
        let (kind, action) = (LockKind::Record, mode.into());
        // Only a session that has claimed locks of others is refused here, and the refusal has no other effect.
        table.handle_lock(LockRequest { inode, kind, owner, pid, range, action, wait: None });
    }
}
