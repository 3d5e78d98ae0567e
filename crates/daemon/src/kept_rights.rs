//! Keeps rights to open files that other sessions have narrowed.
//!
//! A process keeps the rights that it had when it opened the file, as POSIX requires.
//!
//! Purpose: a record that changes a file's content is validated by the file's mode and access list as they are now. A
//! session that had the file open before they were narrowed may go on to write it, and its records are honest.
//!
//! Invariants:
//! - SharedFS believes no claim. It notes a right only if the session's user has it at that moment by mode, access list
//!   or ownership, and the narrowing update is about to take it away.
//! - A right is noted before that update is applied. So at every point at which SharedFS can be killed, the right is
//!   noted or the old rights stand, in the state that the next SharedFS begins with and in the logs that it applies.
//! - It stays noted until the file is closed and all that the session logged by then is committed: a restart validates
//!   the records from the committed position on once more.
//! - On a disk it is durable before the commit of the narrowing update is. A record written under a kept right depends
//!   on that update, so a synced record never comes back without its right.
//!
//! The words stand behind the slots of the session's lease table, which SharedFS alone writes:
//!
//! ```text
//! word n, of 8 bytes, from byte 8 n behind the slots on
//!   inode << 16 | access         0: none; 4: to read, 2: to write, 1: the way to it
//! ```
//!
//! The way to an inode is kept when an update moves the inode or removes its last name. Directories above it that are
//! narrowed or moved are no update of the inode; the `ways` module notes those.
//!
//! Non-goals: the super-user's sessions, which are not validated.

use std::collections::BTreeMap;
use std::sync::Arc;

use ashlar_pmem::{Mapping, OutOfBounds, Persistent};
use ashlar_store::StoreError;
use ashlar_types::{Access, Inode, InodeId, MODE_PERMISSIONS, SessionId};
use ashlar_update::acl::Acl;
use ashlar_update::permission::granted_access;
use ashlar_update::{Update, XATTR_ACL_ACCESS};
use ashlar_wire::{HANDLE_SLOTS, LEASE_TABLE_BYTES};

use crate::session::ServedSession;
use crate::session_page;
use crate::state::State;

/// As many rights as a session can have inodes open.
const RIGHTS_MAX: u32 = HANDLE_SLOTS as u32;
/// Rights that have room at first (4 KiB), and the growth when they are used up.
const ROOM_FIRST: u32 = 512;
const ROOM_GROWTH: u32 = 4;
const WORD_BYTES: u64 = 8;
const INODE_AT: u32 = 16;
/// Bytes of a lease table's file, with the words behind the slots.
pub const LEASES_FILE_BYTES: u64 = LEASE_TABLE_BYTES + RIGHTS_MAX as u64 * WORD_BYTES;

/// A right that is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct KeptRight {
    access: Access,
    /// Its position in the table.
    ///
    /// `None` if the table got no room: the right is lost with this SharedFS.
    word: Option<u32>,
}

/// The rights that one session keeps.
#[derive(Debug)]
pub struct KeptRights {
    table: Arc<Mapping>,
    kept: BTreeMap<InodeId, KeptRight>,
    /// Words of the table below `used` that hold nothing.
    free: Vec<u32>,
    /// Words of the table that were ever used.
    used: u32,
    /// Words of the table that have room.
    room: u32,
    /// The batch of the store that commits the last narrowing update at the latest.
    ///
    /// The rights of that update were noted last.
    batch: u64,
}

impl KeptRights {
    /// Reads the kept rights from a session's lease table.
    ///
    /// # Errors
    /// [`OutOfBounds`] if the table is too short.
    pub fn load(table: Arc<Mapping>) -> Result<Self, OutOfBounds> {
        let used = session_page::rights_used(&*table).min(RIGHTS_MAX);
        let (mut kept, mut free) = (BTreeMap::new(), Vec::new());
        for number in (0..used).rev() {
            match table.load_u64(word_offset(number))? {
                0 => free.push(number),
                word => {
                    let access = Access(word as u32 & 0o7);
                    kept.insert(InodeId(word >> INODE_AT), KeptRight { access, word: Some(number) });
                }
            }
        }
        // Other words may have room too; making it twice does no harm.
        Ok(Self { table, kept, free, used, room: used, batch: 0 })
    }

    /// Returns whether the session keeps any right.
    pub fn is_any(&self) -> bool {
        !self.kept.is_empty()
    }

    /// Returns whether the session keeps this access to an inode.
    pub fn has(&self, inode: InodeId, access: Access) -> bool {
        self.kept.get(&inode).map_or(Access::NONE, |right| right.access).contains(access)
    }

    /// Notes a right, in the table first.
    ///
    /// `is_over` returns those of the noted inodes whose rights are of no more use.
    fn keep(&mut self, inode: InodeId, access: Access, batch: u64, is_over: impl FnOnce(&[InodeId]) -> Vec<InodeId>) {
        let before = self.kept.get(&inode).copied().unwrap_or(KeptRight { access: Access::NONE, word: None });
        if before.access.contains(access) {
            return;
        }
        let access = before.access | access;
        if before.word.is_none() && self.free.is_empty() && self.used == self.room {
            let inodes: Vec<InodeId> = self.kept.keys().copied().collect();
            is_over(&inodes).into_iter().for_each(|inode| self.forget(inode));
        }
        let word = before.word.or_else(|| self.free.pop()).or_else(|| self.next_word());
        let stored = word.map(|word| self.store(word, inode.0 << INODE_AT | u64::from(access.0)));
        if !matches!(stored, Some(Ok(()))) {
            tracing::error!(%inode, "no room to note a right to an open file: it is lost if the daemon is killed");
        }
        self.batch = batch;
        self.kept.insert(inode, KeptRight { access, word });
    }

    fn forget(&mut self, inode: InodeId) {
        if let Some(word) = self.kept.remove(&inode).and_then(|right| right.word) {
            // The table is mapped whole.
            let _ = self.store(word, 0);
            self.free.push(word);
        }
    }

    /// Returns a word that was never used, with room.
    fn next_word(&mut self) -> Option<u32> {
        if self.used == self.room {
            let room = (self.room * ROOM_GROWTH).clamp(ROOM_FIRST, RIGHTS_MAX);
            self.table.allocate(word_offset(self.room)..word_offset(room)).ok()?;
            self.room = room;
        }
        let word = Some(self.used).filter(|word| *word < RIGHTS_MAX)?;
        session_page::set_rights_used(&*self.table, word + 1).ok()?;
        self.used = word + 1;
        Some(word)
    }

    fn store(&self, number: u32, word: u64) -> Result<(), OutOfBounds> {
        self.table.store_u64(word_offset(number), word)?;
        self.table.flush(word_offset(number), WORD_BYTES)?;
        self.table.fence();
        Ok(())
    }

    /// Returns the table, if it must be durable before this batch of the store is.
    pub fn unsynced(&self, batch: u64) -> Option<&Arc<Mapping>> {
        (self.batch >= batch).then_some(&self.table)
    }
}

fn word_offset(number: u32) -> u64 {
    LEASE_TABLE_BYTES + u64::from(number) * WORD_BYTES
}

/// Clears all rights from a table.
///
/// # Errors
/// [`OutOfBounds`] if it is too short.
pub fn clear_rights(table: &Mapping) -> Result<(), OutOfBounds> {
    (0..session_page::rights_used(table).min(RIGHTS_MAX))
        .try_for_each(|number| table.store_u64(word_offset(number), 0))?;
    session_page::set_rights_used(table, 0)
}

/// The attributes that decide which users may open a file.
struct OpenRules {
    inode: Inode,
    acl: Option<Acl>,
}

impl OpenRules {
    /// Returns the rules before and after an update; `None` if it changes none.
    fn around(state: &State, update: &Update<'_>) -> Result<Option<(InodeId, Self, Self)>, StoreError> {
        let id = match update {
            Update::SetAttributes(set) if set.mode.is_some() || set.uid.is_some() || set.gid.is_some() => set.inode,
            Update::SetXattr { inode, name, .. } | Update::RemoveXattr { inode, name, .. }
                if *name == XATTR_ACL_ACCESS =>
            {
                *inode
            }
            _ => return Ok(None),
        };
        // Most changed files are open in no other session.
        let is_open = |session: &ServedSession| session.needs_validation() && session.control.has_open(id);
        if !state.sessions.values().any(is_open) {
            return Ok(None);
        }
        let Some(inode) = state.store.inode(id)? else { return Ok(None) };
        let acl = state.store.xattr(id, XATTR_ACL_ACCESS)?.and_then(|value| Acl::parse(&value));
        let before = Self { inode, acl };
        let mut after = Self { inode: before.inode.clone(), acl: before.acl.clone() };
        let mode = match update {
            Update::SetAttributes(set) => {
                after.inode.uid = set.uid.unwrap_or(after.inode.uid);
                after.inode.gid = set.gid.unwrap_or(after.inode.gid);
                set.mode
            }
            Update::SetXattr { value, mode, .. } => {
                after.acl = Acl::parse(value);
                *mode
            }
            Update::RemoveXattr { mode, .. } => {
                after.acl = None;
                *mode
            }
            _ => None,
        };
        after.inode.mode = mode.map_or(after.inode.mode, |mode| mode & MODE_PERMISSIONS);
        Ok(Some((id, before, after)))
    }

    fn held_by(&self, session: &ServedSession) -> Access {
        granted_access(&self.inode, self.acl.as_ref(), &session.credentials)
    }
}

impl State {
    /// Notes the rights to open files that sessions lose by an update.
    ///
    /// The update is not applied yet.
    ///
    /// # Errors
    /// Those of the store.
    pub fn keep_rights(&mut self, update: &Update<'_>) -> Result<(), StoreError> {
        let Some((inode, before, after)) = OpenRules::around(self, update)? else { return Ok(()) };
        let loses = |session: &ServedSession| {
            let lost = before.held_by(session).without(after.held_by(session));
            let is_open = lost != Access::NONE && session.needs_validation() && session.control.has_open(inode);
            is_open.then_some((session.id, lost))
        };
        let losing: Vec<_> = self.sessions.values().filter_map(loses).collect();
        losing.into_iter().for_each(|(session, lost)| self.keep_right(session, inode, lost));
        Ok(())
    }

    /// Notes that a session keeps a right to an inode that it has open.
    ///
    /// The update that takes the right is not applied yet. [`Access::EXECUTE`] is the way to the inode.
    pub fn keep_right(&mut self, id: SessionId, inode: InodeId, access: Access) {
        let (batch, committed) = (self.store.next_batch(), self.store.committed(id));
        let Some(session) = self.sessions.get_mut(&id) else { return };
        let (control, log) = (&session.control, &session.log);
        session.rights.keep(inode, access, batch, |noted| {
            let closed: Vec<_> = noted.iter().copied().filter(|inode| !control.has_open(*inode)).collect();
            // The tail is read after that: records from before the file was closed lie before the tail.
            if committed >= log.tail() { closed } else { Vec::new() }
        });
    }
}

#[cfg(test)]
mod tests {
    use ashlar_pmem::{MappingAccess, Medium};

    use super::*;

    fn table() -> Arc<Mapping> {
        let file = tempfile::tempfile().expect("a file");
        file.set_len(LEASES_FILE_BYTES).expect("long enough");
        let mapped = Mapping::map(&file, LEASES_FILE_BYTES, MappingAccess::ReadWrite, Medium::MEMORY);
        Arc::new(mapped.expect("mapped"))
    }

    fn all_stay(_: &[InodeId]) -> Vec<InodeId> {
        Vec::new()
    }

    #[test]
    fn kept_rights_loaded_after_kill_are_equal() {
        let table = table();
        let mut rights = KeptRights::load(Arc::clone(&table)).expect("read");
        rights.keep(InodeId(7), Access::READ, 3, all_stay);
        rights.keep(InodeId(8), Access::WRITE, 4, all_stay);
        rights.keep(InodeId(7), Access::WRITE, 5, all_stay);
        assert!(rights.unsynced(5).is_some() && rights.unsynced(6).is_none());
        for rights in [rights, KeptRights::load(Arc::clone(&table)).expect("read")] {
            assert!(rights.has(InodeId(7), Access::READ | Access::WRITE));
            assert!(rights.has(InodeId(8), Access::WRITE) && !rights.has(InodeId(8), Access::READ));
            assert!(!rights.has(InodeId(9), Access::READ));
        }
        clear_rights(&table).expect("cleared");
        assert!(!KeptRights::load(table).expect("read").has(InodeId(7), Access::READ));
    }

    #[test]
    fn words_of_closed_files_are_reused() {
        let table = table();
        let mut rights = KeptRights::load(Arc::clone(&table)).expect("read");
        (0..u64::from(ROOM_FIRST)).for_each(|inode| rights.keep(InodeId(inode), Access::WRITE, 1, all_stay));
        let odd = |noted: &[InodeId]| noted.iter().copied().filter(|inode| inode.0 % 2 == 1).collect();
        rights.keep(InodeId(1000), Access::WRITE, 1, odd);
        let again = KeptRights::load(Arc::clone(&table)).expect("read");
        assert_eq!(session_page::rights_used(&*table), ROOM_FIRST, "the table need not grow");
        assert!(again.has(InodeId(1000), Access::WRITE) && again.has(InodeId(2), Access::WRITE));
        assert!(!again.has(InodeId(3), Access::WRITE));
    }

    #[test]
    fn table_has_room_for_rights_of_all_handles() {
        let table = table();
        let mut rights = KeptRights::load(Arc::clone(&table)).expect("read");
        (0..=u64::from(RIGHTS_MAX)).for_each(|inode| rights.keep(InodeId(inode), Access::WRITE, 1, all_stay));
        let again = KeptRights::load(table).expect("read");
        assert!(again.has(InodeId(u64::from(RIGHTS_MAX) - 1), Access::WRITE));
        let one_more = InodeId(RIGHTS_MAX.into());
        assert!(rights.has(one_more, Access::WRITE) && !again.has(one_more, Access::WRITE));
    }
}
