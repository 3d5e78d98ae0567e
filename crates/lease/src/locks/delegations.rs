//! Files whose record locks a session keeps itself.
//!
//! Invariants: what is delegated has nothing in the table, nobody waits for it, and every request about it recalls it first. So table
//! and delegations together are, at each request, what a table alone would be.

use std::collections::BTreeMap;

use ashlar_types::{InodeId, SessionId};

use super::{ByteRange, LockAction, LockKind, LockMode, LockOwner, LockRequest, LockTable};

/// A file is delegated only if no two owners have asked about it within this time, in milliseconds: each recall costs the one who asks,
/// and the one who is recalled sends messages until it is delegated again.
const QUIET_MS: u64 = 100;
/// Files are remembered for that time; when there are more, those are forgotten whose time is over.
const ASKED_MAX: usize = 1024;

/// The memory in which sessions keep what is delegated to them.
pub trait Slots {
    /// Gives a session the say over its locks on a file, which are these; `false` where it can't have them.
    fn delegate(&mut self, to: SessionId, slot: u32, inode: InodeId, locks: &[(ByteRange, LockMode)]) -> bool;

    /// Takes that away, and gives the locks that the session has on the file.
    fn recall(&mut self, from: SessionId, slot: u32, inode: InodeId) -> Vec<(ByteRange, LockMode)>;
}

#[derive(Clone, Copy, Debug)]
struct Delegation {
    owner: LockOwner,
    pid: u32,
    slot: u32,
}

impl Delegation {
    fn place(self) -> (SessionId, u32) {
        (self.owner.session, self.slot)
    }
}

/// Who asked last about a file, and when it last was another one than before.
#[derive(Clone, Copy, Debug)]
struct Asked {
    by: LockOwner,
    changed_ms: Option<u64>,
}

/// What is delegated to whom.
#[derive(Debug, Default)]
pub struct Delegations {
    delegated: BTreeMap<InodeId, Delegation>,
    /// The same by session and slot: a slot has room for one file.
    slots: BTreeMap<(SessionId, u32), InodeId>,
    asked: BTreeMap<InodeId, Asked>,
}

impl Delegations {
    /// Somebody asks about record locks on a file, whether for one or what there are: if they are delegated, they come back into the table.
    pub fn handle_request(
        &mut self,
        now_ms: u64,
        inode: InodeId,
        by: LockOwner,
        table: &mut LockTable,
        slots: &mut impl Slots,
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

    /// Takes a file back, into the table; says whose it was.
    pub fn recall(&mut self, inode: InodeId, table: &mut LockTable, slots: &mut impl Slots) -> Option<LockOwner> {
        let Delegation { owner, pid, slot } = self.remove(inode)?;
        enter(inode, owner, pid, &slots.recall(owner.session, slot, inode), table);
        Some(owner)
    }

    /// Delegates a file to an owner that has just been answered, if it may have it; whether it was done. Its locks leave the table.
    pub fn delegate(
        &mut self,
        now_ms: u64,
        (inode, owner, pid, slot): (InodeId, LockOwner, u32, u32),
        table: &mut LockTable,
        slots: &mut impl Slots,
    ) -> bool {
        let is_quiet =
            self.asked.get(&inode).and_then(|asked| asked.changed_ms).is_none_or(|at| now_ms >= at + QUIET_MS);
        if !is_quiet || !table.is_alone(inode, owner) {
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
        // What stood in this slot the session has given back.
        if let Some(before) = self.slots.insert(delegation.place(), inode) {
            self.delegated.remove(&before);
        }
        self.delegated.insert(inode, delegation);
    }

    fn remove(&mut self, inode: InodeId) -> Option<Delegation> {
        let delegation = self.delegated.remove(&inode)?;
        self.slots.remove(&delegation.place());
        Some(delegation)
    }

    /// After a restart: a session has the say over a file, or had its locks in the table, in which case `locks` says which. Where two claim
    /// the same file, the later one's locks are entered in the table as far as they can be.
    pub fn take_up(
        &mut self,
        (inode, owner, pid, slot): (InodeId, LockOwner, u32, u32),
        is_delegated: bool,
        locks: &[(ByteRange, LockMode)],
        table: &mut LockTable,
        slots: &mut impl Slots,
    ) {
        if is_delegated && table.is_alone(inode, owner) && !self.delegated.contains_key(&inode) {
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

    /// The session has ended, and what it had is free.
    pub fn handle_session_end(&mut self, session: SessionId) {
        let own: Vec<_> = self.slots.range((session, 0)..=(session, u32::MAX)).map(|(_, inode)| *inode).collect();
        for inode in own {
            self.remove(inode);
        }
    }

    /// How many files are delegated.
    #[must_use]
    pub fn count(&self) -> usize {
        self.delegated.len()
    }
}

fn enter(inode: InodeId, owner: LockOwner, pid: u32, locks: &[(ByteRange, LockMode)], table: &mut LockTable) {
    for &(range, mode) in locks {
        let kind = LockKind::Record;
        // Only a session that has claimed what it does not have is refused here, and that is all that becomes of it.
        table.handle_lock(LockRequest { inode, kind, owner, pid, range, action: LockAction::Lock(mode), wait: None });
    }
}
