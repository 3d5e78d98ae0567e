//! Knows which open files are a session's by right, and keeps the rights to them.
//!
//! A process keeps the rights that it had when it opened the file, as POSIX requires, and the file while it has it
//! open.
//!
//! Purpose: a session says in its control page which inodes it has open. A hostile one may say so of any inode, and in
//! advance. So SharedFS counts a handle of an ordinary user's session only if the session was granted the inode at a
//! time when its user might open it. A record that changes a file's content is validated by the file's mode and access
//! list as they are now. A session that had the file open before they were narrowed may go on to write it, and its
//! records are honest.
//!
//! Invariants:
//! - SharedFS believes no claim. A session opens a file under a lease on it, its own or the grant cache's, or makes it.
//!   LibFS records the handle first. So when SharedFS has taken the lease, it sees all handles that were opened under
//!   it. Then, before another session changes the inode, it notes each with the access that the user has at that
//!   moment.
//! - Before an update narrows rights, SharedFS keeps those that the update takes, for sessions with a noted handle.
//! - A right is noted before that update is applied. So at every point at which SharedFS can be killed, the right is
//!   noted or the old rights stand, in the state that the next SharedFS begins with and in the logs that it applies.
//! - It stays noted until the file is closed and all that the session logged by then is committed: a restart validates
//!   the records from the committed position on once more.
//! - On a disk a kept right is durable before the commit of the narrowing update is. A record written under it depends
//!   on that update, so a synced record never comes back without its right.
//!
//! A restarted SharedFS no longer knows what was opened under the leases of the earlier grant cache. It notes the
//! handles that it finds, as far as the user may open the files by then.
//!
//! The words stand behind the slots of the session's lease table, which SharedFS alone writes:
//!
//! ```text
//! word n, of 8 bytes, from byte 8 n behind the slots on
//!   inode << 16 | access at opening << 8 | kept access      0: none; an access is 4: to read, 2: to write
//! ```
//!
//! A kept access may also have 1: the way to the inode. It is kept when an update moves the inode or removes its last
//! name. Directories above it that are narrowed or moved are no update of the inode; the `ways` module notes those.
//!
//! Non-goals: the super-user's sessions, which are not validated.

use std::collections::BTreeMap;
use std::sync::Arc;

use ashlar_pmem::{OutOfBounds, Persistent, SharedMemory};
use ashlar_types::{Access, InodeId};
use ashlar_wire::{HANDLE_SLOTS, LEASE_TABLE_BYTES};

use crate::sessions::session_page::SessionPage;

/// As many rights as a session can have inodes open.
const RIGHTS_MAX: u32 = HANDLE_SLOTS as u32;
/// Rights that have room at first (4 KiB), and the growth when they are used up.
const ROOM_FIRST: u32 = 512;
const ROOM_GROWTH: u32 = 4;
const WORD_BYTES: u64 = 8;
const INODE_AT: u32 = 16;
const OPENED_AT: u32 = 8;
/// The end of the words behind the slots.
pub const RIGHTS_END: u64 = LEASE_TABLE_BYTES + RIGHTS_MAX as u64 * WORD_BYTES;

/// The rights to one open file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct KeptRight {
    /// The access that the user had when SharedFS last took a lease under which the file was opened.
    opened: Access,
    /// The part of it that was narrowed since; [`Access::EXECUTE`] if the way to the inode is kept.
    kept: Access,
    /// Its position in the table.
    ///
    /// `None` if the table got no room: the right is lost with this SharedFS.
    word: Option<u32>,
}

impl KeptRight {
    const NONE: Self = Self { opened: Access::NONE, kept: Access::NONE, word: None };
}

/// The rights that one session keeps.
#[derive(Debug)]
pub struct KeptRights {
    page: SessionPage,
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
    pub fn load(page: SessionPage) -> Result<Self, OutOfBounds> {
        let used = page.rights_used().min(RIGHTS_MAX);
        let (mut kept, mut free) = (BTreeMap::new(), Vec::new());
        for number in (0..used).rev() {
            match page.memory().load_u64(word_offset(number))? {
                0 => free.push(number),
                word => {
                    let (opened, access) = (Access((word >> OPENED_AT) as u32 & 0o7), Access(word as u32 & 0o7));
                    kept.insert(InodeId(word >> INODE_AT), KeptRight { opened, kept: access, word: Some(number) });
                }
            }
        }
        // Other words may have room too; making it twice does no harm.
        Ok(Self { page, kept, free, used, room: used, batch: 0 })
    }

    /// Returns the inodes to which any right is noted.
    pub fn inodes(&self) -> impl Iterator<Item = InodeId> + '_ {
        self.kept.keys().copied()
    }

    /// Returns whether the table can't grow any more.
    pub fn is_full(&self) -> bool {
        self.used == RIGHTS_MAX
    }

    /// Returns whether the session keeps any right.
    pub fn is_any(&self) -> bool {
        self.kept.values().any(|right| right.kept != Access::NONE)
    }

    /// Returns the access to an inode that the session keeps.
    pub fn kept(&self, inode: InodeId) -> Access {
        self.kept.get(&inode).map_or(Access::NONE, |right| right.kept)
    }

    /// Returns the access with which the session has opened an inode, if it still has it open.
    pub fn opened(&self, inode: InodeId) -> Access {
        self.kept.get(&inode).map_or(Access::NONE, |right| right.opened)
    }

    /// Returns whether the session keeps this access to an inode.
    pub fn has(&self, inode: InodeId, access: Access) -> bool {
        self.kept(inode).contains(access)
    }

    /// Notes that the session has opened an inode with this access.
    ///
    /// `is_over` returns those of the noted inodes whose rights are of no more use.
    pub fn note_opened(&mut self, inode: InodeId, access: Access, is_over: impl FnOnce(&Self) -> Vec<InodeId>) {
        let before = self.kept.get(&inode).copied().unwrap_or(KeptRight::NONE);
        if !before.opened.contains(access) {
            self.note(inode, KeptRight { opened: before.opened | access, ..before }, is_over);
        }
    }

    /// Keeps a part of the access with which the session has opened an inode.
    pub fn keep(&mut self, inode: InodeId, access: Access, batch: u64, is_over: impl FnOnce(&Self) -> Vec<InodeId>) {
        let before = self.kept.get(&inode).copied().unwrap_or(KeptRight::NONE);
        if !before.kept.contains(access) {
            self.batch = batch;
            self.note(inode, KeptRight { kept: before.kept | access, ..before }, is_over);
        }
    }

    /// Notes that the session does not have an inode open any more.
    pub fn note_closed(&mut self, inode: InodeId) {
        let Some(before) = self.kept.get(&inode).copied() else { return };
        if before.kept == Access::NONE {
            self.forget(inode);
        } else if before.opened != Access::NONE {
            self.note(inode, KeptRight { opened: Access::NONE, ..before }, |_| Vec::new());
        }
    }

    /// Notes rights, in the table first.
    fn note(&mut self, inode: InodeId, right: KeptRight, is_over: impl FnOnce(&Self) -> Vec<InodeId>) {
        if right.word.is_none() && self.free.is_empty() && self.used == self.room {
            is_over(self).into_iter().for_each(|inode| self.forget(inode));
        }
        let word = right.word.or_else(|| self.free.pop()).or_else(|| self.next_word());
        let noted = inode.0 << INODE_AT | u64::from(right.opened.0) << OPENED_AT | u64::from(right.kept.0);
        if !matches!(word.map(|word| self.store(word, noted)), Some(Ok(()))) {
            tracing::error!(%inode, "no room to note a right to an open file: it is lost if the daemon is killed");
        }
        self.kept.insert(inode, KeptRight { word, ..right });
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
            self.page.memory().allocate(word_offset(self.room)..word_offset(room)).ok()?;
            self.room = room;
        }
        let word = Some(self.used).filter(|word| *word < RIGHTS_MAX)?;
        self.page.set_rights_used(word + 1);
        self.used = word + 1;
        Some(word)
    }

    fn store(&self, number: u32, word: u64) -> Result<(), OutOfBounds> {
        self.page.memory().store_u64(word_offset(number), word)?;
        self.page.memory().flush(word_offset(number), WORD_BYTES)?;
        self.page.fence();
        Ok(())
    }

    /// Returns the table, if it must be durable before this batch of the store is.
    pub fn unsynced(&self, batch: u64) -> Option<&Arc<SharedMemory>> {
        (self.batch >= batch).then_some(self.page.memory())
    }
}

fn word_offset(number: u32) -> u64 {
    LEASE_TABLE_BYTES + u64::from(number) * WORD_BYTES
}

/// Clears all rights from a table.
///
/// # Errors
/// [`OutOfBounds`] if it is too short.
pub fn clear_rights(page: &SessionPage) -> Result<(), OutOfBounds> {
    (0..page.rights_used().min(RIGHTS_MAX)).try_for_each(|number| page.memory().store_u64(word_offset(number), 0))?;
    page.set_rights_used(0);
    Ok(())
}

#[cfg(test)]
mod tests {
    use ashlar_pmem::{CrashMedium, CrashTwin};

    use super::*;

    fn table() -> SessionPage {
        let twin = CrashTwin::new(CrashMedium::Pages, RIGHTS_END as usize);
        SessionPage::new(Arc::new(SharedMemory::Twin(twin))).expect("long enough")
    }

    fn all_stay(_: &KeptRights) -> Vec<InodeId> {
        Vec::new()
    }

    #[test]
    fn kept_rights_loaded_after_kill_are_equal() {
        let table = table();
        let mut rights = KeptRights::load(table.clone()).expect("read");
        rights.keep(InodeId(7), Access::READ, 3, all_stay);
        rights.keep(InodeId(8), Access::WRITE, 4, all_stay);
        rights.keep(InodeId(7), Access::WRITE, 5, all_stay);
        assert!(rights.unsynced(5).is_some() && rights.unsynced(6).is_none());
        rights.note_opened(InodeId(8), Access::READ, all_stay);
        rights.note_opened(InodeId(10), Access::READ | Access::WRITE, all_stay);
        rights.note_opened(InodeId(11), Access::READ, all_stay);
        rights.note_closed(InodeId(11));
        assert!(rights.unsynced(6).is_none(), "a handle is of no use after a loss of power");
        for rights in [rights, KeptRights::load(table.clone()).expect("read")] {
            assert!(rights.has(InodeId(7), Access::READ | Access::WRITE));
            assert!(rights.has(InodeId(8), Access::WRITE) && !rights.has(InodeId(8), Access::READ));
            assert!(!rights.has(InodeId(9), Access::READ));
            let opened = |inode| rights.opened(InodeId(inode));
            assert_eq!((opened(7), opened(8), opened(11)), (Access::NONE, Access::READ, Access::NONE));
            assert!(opened(10).contains(Access::READ | Access::WRITE) && !rights.has(InodeId(10), Access::READ));
        }
        clear_rights(&table).expect("cleared");
        assert!(!KeptRights::load(table).expect("read").has(InodeId(7), Access::READ));
    }

    #[test]
    fn words_of_closed_files_are_reused() {
        let table = table();
        let mut rights = KeptRights::load(table.clone()).expect("read");
        (0..u64::from(ROOM_FIRST)).for_each(|inode| rights.keep(InodeId(inode), Access::WRITE, 1, all_stay));
        let odd = |rights: &KeptRights| rights.kept.keys().copied().filter(|inode| inode.0 % 2 == 1).collect();
        rights.keep(InodeId(1000), Access::WRITE, 1, odd);
        let again = KeptRights::load(table.clone()).expect("read");
        assert_eq!(table.rights_used(), ROOM_FIRST, "the table need not grow");
        assert!(again.has(InodeId(1000), Access::WRITE) && again.has(InodeId(2), Access::WRITE));
        assert!(!again.has(InodeId(3), Access::WRITE));
    }

    #[test]
    fn table_has_room_for_rights_of_all_handles() {
        let table = table();
        let mut rights = KeptRights::load(table.clone()).expect("read");
        (0..=u64::from(RIGHTS_MAX)).for_each(|inode| rights.keep(InodeId(inode), Access::WRITE, 1, all_stay));
        let again = KeptRights::load(table).expect("read");
        assert!(again.has(InodeId(u64::from(RIGHTS_MAX) - 1), Access::WRITE));
        let one_more = InodeId(RIGHTS_MAX.into());
        assert!(rights.has(one_more, Access::WRITE) && !again.has(one_more, Access::WRITE));
    }
}
