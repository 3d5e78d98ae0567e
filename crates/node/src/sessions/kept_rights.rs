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
use ashlar_store::StoreError;
use ashlar_types::{Access, Inode, InodeId, LeaseScope, LogPosition, MODE_PERMISSIONS, SessionId};
use ashlar_update::acl::Acl;
use ashlar_update::permission::granted_access;
use ashlar_update::{Update, XATTR_ACL_ACCESS};
use ashlar_wire::{HANDLE_SLOTS, LEASE_TABLE_BYTES};

use crate::blame::Blame;
use crate::leases::leasing::Ancestors;
use crate::node::Node;
use crate::sessions::session::{Control, ServedSession, SessionLog};
use crate::sessions::session_page::SessionPage;

/// As many rights as a session can have inodes open.
const RIGHTS_MAX: u32 = HANDLE_SLOTS as u32;
/// The most handles to check when a lease on many inodes is taken, and at a restart, of a user.
///
/// It takes some milliseconds, for which no other request is served.
const CHECKED_MAX: usize = 16_384;
const FOUND_MAX: usize = 65_536;
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
    fn note_opened(&mut self, inode: InodeId, access: Access, is_over: impl FnOnce(&Self) -> Vec<InodeId>) {
        let before = self.kept.get(&inode).copied().unwrap_or(KeptRight::NONE);
        if !before.opened.contains(access) {
            self.note(inode, KeptRight { opened: before.opened | access, ..before }, is_over);
        }
    }

    /// Keeps a part of the access with which the session has opened an inode.
    fn keep(&mut self, inode: InodeId, access: Access, batch: u64, is_over: impl FnOnce(&Self) -> Vec<InodeId>) {
        let before = self.kept.get(&inode).copied().unwrap_or(KeptRight::NONE);
        if !before.kept.contains(access) {
            self.batch = batch;
            self.note(inode, KeptRight { kept: before.kept | access, ..before }, is_over);
        }
    }

    /// Notes that the session does not have an inode open any more.
    fn note_closed(&mut self, inode: InodeId) {
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

    /// Returns the noted inodes that the session has closed, and whose rights no record needs any more.
    ///
    /// The log is committed up to `committed`.
    fn closed(&self, control: &Control, log: &SessionLog, committed: LogPosition) -> Vec<InodeId> {
        let mut closed: Vec<_> = self.kept.keys().copied().filter(|inode| !control.has_open(*inode)).collect();
        // The tail is read after that: records from before a file was closed lie before the tail.
        if committed < log.tail() {
            closed.retain(|inode| self.kept(*inode) == Access::NONE);
        }
        closed
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

/// The attributes that decide which users may open a file.
struct OpenRules {
    inode: Inode,
    acl: Option<Acl>,
}

impl OpenRules {
    /// Returns the rules before and after an update; `None` if it changes none.
    fn around(state: &Node, update: &Update<'_>) -> Result<Option<(InodeId, Self, Self)>, StoreError> {
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
        let concerns = |session: &ServedSession| {
            session.needs_validation() && (session.control.has_open(id) || session.rights.opened(id) != Access::NONE)
        };
        if !state.sessions.values().any(concerns) {
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

impl ServedSession {
    /// Returns whether the session has an inode open that it has opened by right.
    ///
    /// No lease of it covers the inode: then SharedFS has noted all handles.
    pub fn has_opened(&self, inode: InodeId) -> bool {
        self.control.has_open(inode) && (self.credentials.is_privileged() || self.rights.opened(inode) != Access::NONE)
    }
}

impl Node {
    /// Returns whether a session has an inode open that it has opened by right, also under a lease that still stands.
    pub fn has_opened(&self, session: &ServedSession, inode: InodeId) -> bool {
        if !session.control.has_open(inode) || session.has_opened(inode) {
            return session.has_opened(inode);
        }
        let covers = |holder| self.leasing.manager.is_governed_by(holder, inode, &Ancestors(&self.store));
        let is_covered = covers(session.id) || self.grant_cache.as_ref().is_some_and(|cache| covers(cache.holder()));
        is_covered && self.openable(session, inode).is_ok_and(|access| access != Access::NONE)
    }

    /// Returns the access with which a session's user may open an inode now.
    fn openable(&self, session: &ServedSession, id: InodeId) -> Result<Access, StoreError> {
        let Some(inode) = self.store.inode(id)? else { return Ok(Access::NONE) };
        let acl = self.store.xattr(id, XATTR_ACL_ACCESS)?.and_then(|value| Acl::parse(&value));
        Ok(granted_access(&inode, acl.as_ref(), &session.credentials))
    }

    /// Notes the handles that were opened under a lease, after the lease was taken.
    ///
    /// `holder` is its session, or the grant cache's, under whose leases all sessions open files.
    pub fn note_opened(&mut self, holder: SessionId, inode: InodeId, scope: LeaseScope) {
        let is_published = self.grant_cache.as_ref().is_some_and(|grant_cache| grant_cache.holder() == holder);
        let is_user = |session: &&ServedSession| session.needs_validation() && (is_published || session.id == holder);
        let mut left = CHECKED_MAX;
        let of_users = self.sessions.values().filter(is_user);
        let opened: Vec<_> = match scope {
            LeaseScope::Node => {
                of_users.filter(|user| user.control.has_open(inode)).map(|user| (user.id, vec![inode])).collect()
            }
            LeaseScope::Files | LeaseScope::Subtree => {
                of_users.map(|user| (user.id, user.control.open_inodes())).collect()
            }
        };
        opened.into_iter().for_each(|(id, inodes)| self.note_handles(id, &inodes, &mut left));
    }

    /// Notes the handle of a session that has made an inode, or has removed its last name.
    pub fn note_own_handle(&mut self, id: SessionId, inode: InodeId) {
        let is_open = |session: &ServedSession| session.needs_validation() && session.control.has_open(inode);
        if self.sessions.get(&id).is_some_and(is_open) {
            self.note_handles(id, &[inode], &mut { 1 });
        }
    }

    /// Notes the handles that sessions had at a restart of SharedFS.
    pub fn note_handles_found(&mut self) {
        let mut left = BTreeMap::new();
        for id in self.live_ids() {
            let Some(session) = self.sessions.get(&id).filter(|session| session.needs_validation()) else { continue };
            let _blame = Blame::for_request(session);
            let (uid, inodes) = (session.identity.uid, session.control.open_inodes());
            self.note_handles(id, &inodes, left.entry(uid).or_insert(FOUND_MAX));
        }
    }

    /// Notes handles of a session on inodes that its user may open.
    fn note_handles(&mut self, id: SessionId, inodes: &[InodeId], left: &mut usize) {
        for &inode in inodes {
            let Some(session) = self.sessions.get(&id).filter(|_| *left > 0) else { return };
            if session.rights.opened(inode).contains(Access::READ | Access::WRITE) {
                continue;
            }
            *left -= 1;
            let access = self.openable(session, inode).unwrap_or_else(|error| {
                tracing::error!(%inode, %error, "the rights to an open file can't be read");
                Access::NONE
            });
            let committed = self.store.committed(id);
            let Some(session) = self.sessions.get_mut(&id).filter(|_| access != Access::NONE) else { continue };
            let (control, log) = (&session.control, &session.log);
            session.rights.note_opened(inode, access, |rights| rights.closed(control, log, committed));
        }
    }

    /// Notes the rights to open files that sessions lose by an update.
    ///
    /// The update is not applied yet.
    ///
    /// # Errors
    /// Those of the store.
    pub fn keep_rights(&mut self, update: &Update<'_>) -> Result<(), StoreError> {
        let Some((inode, before, after)) = OpenRules::around(self, update)? else { return Ok(()) };
        let mut losing = Vec::new();
        for session in self.sessions.values_mut().filter(|session| session.needs_validation()) {
            if !session.control.has_open(inode) {
                session.rights.note_closed(inode);
                continue;
            }
            let narrowed = before.held_by(session).without(after.held_by(session));
            let lost = Access(narrowed.0 & session.rights.opened(inode).0).without(Access::EXECUTE);
            if lost != Access::NONE {
                losing.push((session.id, lost));
            }
        }
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
        session.rights.keep(inode, access, batch, |rights| rights.closed(control, log, committed));
    }
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
