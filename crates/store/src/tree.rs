//! The store as the tree that updates act on.

use ashlar_types::{Inode, InodeId, LogPosition, SessionId, xattr_blocks};
use ashlar_update::{Allocation, Applied, Entry, Tree, Update};

use crate::blocks::allocator::Freer;
use crate::metadata::rows::{self, kind};
use crate::quotas::Holding;
use crate::{Store, StoreError};

/// The part of the budget by which applied updates may exceed it.
///
/// Credit is granted within the budget, but the pages that rows take are an estimate. The map has room for it.
const BUDGET_SLACK_PART: u64 = 4;

/// The store during one update.
struct Applying<'a> {
    store: &'a mut Store,
    may_free: &'a dyn Fn(InodeId) -> bool,
}

impl Store {
    /// Applies an update of a session, whose record ends at `end` in its log.
    ///
    /// `may_free` says whether an inode without links may be freed, since no other session has it open. For SharedFS's
    /// own updates the session is [`SessionId::SHARED_FS`], and the position has no meaning.
    ///
    /// # Errors
    /// [`StoreError::Invalid`], [`StoreError::FullBlocks`] and [`StoreError::FullMetadata`] leave everything as it was.
    /// After any other error half-way, the store is [`StoreError::Poisoned`].
    pub fn apply(
        &mut self,
        session: SessionId,
        end: LogPosition,
        update: &Update<'_>,
        may_free: &dyn Fn(InodeId) -> bool,
    ) -> Result<Applied, StoreError> {
        self.check_sound()?;
        let cost = update.cost().metadata_bytes;
        let (used, total) = (self.metadata_bytes_used(), self.database.budget_bytes());
        if cost > 0 && used + cost > total + total / BUDGET_SLACK_PART {
            return Err(StoreError::FullMetadata { used, total });
        }
        self.freer = Freer { session, end };
        self.touched = false;
        self.holdings.get_mut().clear();
        if matches!(update, Update::Rename(rename) if rename.parent != rename.new_parent) {
            self.depths.get_mut().clear();
        }
        let result = ashlar_update::apply(&mut Applying { store: self, may_free }, update);
        match &result {
            Ok(_) => {
                self.active.pay(cost);
                self.advance(session, end);
                self.show_update(update);
            }
            Err(error) if self.touched => {
                tracing::error!(%error, %session, "an update failed half-way; the store must be opened again");
                self.poisoned = true;
            }
            Err(_) => {}
        }
        result
    }
}

impl Store {
    /// Changes the account of an inode's usage; `None`: it is removed.
    ///
    /// Updates read an inode before they change it, so its former usage is known already.
    fn shift_quotas(&mut self, id: InodeId, after: Option<Holding>) -> Result<(), StoreError> {
        let known = self.holdings.get_mut().iter().rposition(|(seen, _)| *seen == id);
        let before = match known {
            Some(index) => self.holdings.get_mut()[index].1,
            None => self.inode(id)?.as_ref().map(Holding::of),
        };
        // They move with their inode.
        let moves = before.is_some_and(|before| after.is_none_or(|after| !after.has_accounts_of(&before)));
        let xattrs = if moves { self.xattr_blocks(id)? } else { 0 };
        self.quotas.shift(before.map(|of| of.plus(xattrs)), after.map(|of| of.plus(xattrs)));
        self.holdings.get_mut().push((id, after));
        Ok(())
    }

    /// Returns the blocks that an inode's extended attributes count.
    fn xattr_blocks(&self, id: InodeId) -> Result<u64, StoreError> {
        Ok(xattr_blocks(self.xattr_bytes(id)? as u64))
    }

    /// Stores or removes an extended attribute, and counts it.
    fn change_xattr(&mut self, id: InodeId, name: &[u8], value: Option<&[u8]>) -> Result<(), StoreError> {
        let before = self.xattr_blocks(id)?;
        self.set_xattr(id, name, value)?;
        let after = self.xattr_blocks(id)?;
        if let Some(of) = self.inode(id)?.as_ref().filter(|_| before != after).map(Holding::of) {
            self.quotas.shift(Some(of.plus(before)), Some(of.plus(after)));
        }
        Ok(())
    }
}

impl Tree for Applying<'_> {
    type Error = StoreError;

    fn inode(&self, inode: InodeId) -> Result<Option<Inode>, StoreError> {
        let found = self.store.inode(inode)?;
        self.store.holdings.borrow_mut().push((inode, found.as_ref().map(Holding::of)));
        Ok(found)
    }

    fn put_inode(&mut self, inode: InodeId, value: Inode) -> Result<(), StoreError> {
        self.store.shift_quotas(inode, Some(Holding::of(&value)))?;
        self.store.touched = true;
        let absent = self.store.absent_inode.get() == Some(inode);
        self.store.active.put_inode(inode, value, absent);
        Ok(())
    }

    fn remove_inode(&mut self, inode: InodeId) -> Result<(), StoreError> {
        self.store.shift_quotas(inode, None)?;
        self.store.quotas.forget_top(inode);
        self.store.touched = true;
        self.store.remove_contents(inode)?;
        self.store.remove_xattrs(inode)?;
        self.set_orphan(inode, false)?;
        self.store.active.remove_inode(inode);
        Ok(())
    }

    fn entry(&self, parent: InodeId, name: &[u8]) -> Result<Option<Entry>, StoreError> {
        self.store.entry(parent, name)
    }

    fn put_entry(&mut self, parent: InodeId, name: &[u8], entry: Entry) -> Result<(), StoreError> {
        self.store.touched = true;
        let cookie = self.store.name_cookie(name);
        // It was said of one name. Another that is stored after it may share the cookie.
        let absent = self.store.absent_entry.take() == Some((parent.0, cookie));
        self.store.active.set_entry(parent.0, cookie, name, Some(entry), absent);
        Ok(())
    }

    fn remove_entry(&mut self, parent: InodeId, name: &[u8]) -> Result<(), StoreError> {
        self.store.touched = true;
        let cookie = self.store.name_cookie(name);
        self.store.active.set_entry(parent.0, cookie, name, None, false);
        Ok(())
    }

    fn set_orphan(&mut self, inode: InodeId, orphan: bool) -> Result<(), StoreError> {
        self.store.touched = true;
        let key = rows::key1(kind::ORPHAN, inode.0);
        let is_orphan = match self.store.find_in_batches(|batch| batch.row(&key)) {
            Some(said) => said.is_some(),
            None => !self.store.active.has_made(inode) && self.store.snapshot.get(&key)?.is_some(),
        };
        if is_orphan != orphan {
            self.store.active.set_row(inode, &key, orphan.then_some(&[]));
        }
        Ok(())
    }

    fn may_free(&self, inode: InodeId) -> bool {
        (self.may_free)(inode)
    }

    fn put_xattr(&mut self, inode: InodeId, name: &[u8], value: &[u8]) -> Result<(), StoreError> {
        self.store.touched = true;
        self.store.change_xattr(inode, name, Some(value))
    }

    fn remove_xattr(&mut self, inode: InodeId, name: &[u8]) -> Result<(), StoreError> {
        self.store.touched = true;
        self.store.change_xattr(inode, name, None)
    }

    fn write(&mut self, id: InodeId, inode: &Inode, offset: u64, data: &[u8], size: u64) -> Result<u64, StoreError> {
        self.store.write_file(id, inode, offset, data, size)
    }

    fn resize(&mut self, id: InodeId, inode: &Inode, size: u64) -> Result<u64, StoreError> {
        self.store.resize_file(id, inode, size)
    }

    fn allocate(
        &mut self,
        id: InodeId,
        inode: &Inode,
        how: Allocation,
        offset: u64,
        length: u64,
        size: u64,
    ) -> Result<u64, StoreError> {
        self.store.allocate_file(id, inode, how, offset..offset + length, size)
    }
}
