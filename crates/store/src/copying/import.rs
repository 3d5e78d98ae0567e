//! The replica's side: stores the parts of a copy.

use std::sync::Arc;

use ashlar_pmem::Arena;
use ashlar_types::{
    BLOCK_BYTES, FILE_SIZE_MAX, Inode, InodeId, Name, QuotaKey, SessionId, XATTR_NAME_MAX, XATTR_VALUE_MAX, blocks_for,
};
use ashlar_update::Entry;

use crate::copying::error::FullCopyError;
use crate::copying::item::{COPY_PART_BYTES_MAX, CopiedBlocks, CopyEnd, CopyItem, ITEM_BLOCKS_MAX};
use crate::database::Database;
use crate::format::first_counters;
use crate::medium::{MemoryArena, StoreIdentity, StoreMedium};
use crate::metadata::chunk::CHUNK_BLOCKS;
use crate::metadata::rows::{self, StoredCounters, Superblock, kind};
use crate::opening::{read_counters, read_superblock};
use crate::{INLINE_BYTES_MAX, Store, StoreError};

/// Bytes of rows, and of blocks, that wait for a commit at most.
const UNCOMMITTED_ROW_BYTES: usize = 16 << 20;
const UNCOMMITTED_DATA_BYTES: u64 = 64 << 20;
/// Bytes that a row takes beside its name or value.
const ROW_BYTES: u64 = 256;
/// The part of the metadata budget by which the copy may exceed it, as updates may at the writer.
const BUDGET_SLACK_PART: u64 = 4;

/// A copy of another node's tree that is being stored in an arena.
///
/// The arena's store is marked as a part of a tree until [`Self::finish`]. After an error the copy must be begun anew.
pub struct StoreImport {
    store: Store,
    data_bytes: u64,
    has_failed: bool,
}

impl StoreImport {
    /// Begins a copy: empties the arena's store, and marks it. Without a store, makes one.
    ///
    /// Only the numbers that the node has given out are kept. The store must not be open. The arena must belong to the
    /// writer's file system.
    ///
    /// # Errors
    /// Those of [`Store::open`], but for [`StoreError::NotFormatted`] and [`StoreError::Copying`]: a store that this
    /// release does not understand is left as it is.
    pub fn begin(arena: Arc<Arena>) -> Result<Self, FullCopyError> {
        let database = Database::open(&arena)?;
        Self::begin_on(StoreMedium::Arena(arena), database)
    }

    /// Begins a copy in an arena in memory.
    ///
    /// # Errors
    /// As [`Self::begin`].
    pub fn begin_in_memory(arena: Arc<MemoryArena>) -> Result<Self, FullCopyError> {
        let database = arena.open_database();
        Self::begin_on(StoreMedium::Memory(arena), database)
    }

    fn begin_on(medium: StoreMedium, database: Database) -> Result<Self, FullCopyError> {
        let identity = medium.identity();
        let snapshot = database.snapshot()?;
        let counters = match read_superblock(&snapshot, identity)? {
            Some(_) => StoredCounters { reserved_blocks: 0, ..read_counters(&snapshot, identity.node)? },
            None => first_counters(identity),
        };
        // The list of the freed pages takes eight bytes for each.
        let list_bytes = snapshot.used_bytes()? / 256;
        drop(snapshot);
        let mut writer = database.write(2, list_bytes + 1024)?;
        writer.clear()?;
        writer.put(&[kind::SUPERBLOCK], &encode_superblock(identity, false))?;
        writer.put(&[kind::COUNTERS], &rows::encode_counters(counters))?;
        writer.commit()?;
        let store = Store::over(medium, Arc::new(database))?;
        store.check_sound()?;
        Ok(Self { store, data_bytes: 0, has_failed: false })
    }

    /// Stores the items of a part. Some may be committed at once.
    ///
    /// # Errors
    /// [`FullCopyError::Encoding`], [`FullCopyError::Item`]; [`StoreError::FullBlocks`] and
    /// [`StoreError::FullMetadata`] if the arena is too small; those of a commit.
    pub fn import_part(&mut self, part: &[u8]) -> Result<(), FullCopyError> {
        self.guard(|import| {
            if part.len() > COPY_PART_BYTES_MAX {
                return Err(FullCopyError::Encoding("it is too long"));
            }
            let mut rest = part;
            while !rest.is_empty() {
                let (item, behind) = CopyItem::decode(rest)?;
                import.import_item(&item)?;
                rest = behind;
            }
            let is_due = import.store.uncommitted_bytes() >= UNCOMMITTED_ROW_BYTES
                || import.data_bytes >= UNCOMMITTED_DATA_BYTES;
            if is_due { import.commit_items() } else { Ok(()) }
        })
    }

    /// Commits all items stored so far. That makes none of them count before the end; it bounds what waits.
    ///
    /// # Errors
    /// Those of a commit.
    pub fn commit(&mut self) -> Result<(), FullCopyError> {
        self.guard(Self::commit_items)
    }

    /// Ends the copy: all of it is committed, and then the store is whole, at the writer's mark. Opens the store.
    ///
    /// The copy of the writer's journal that begins at the mark must be there by now.
    ///
    /// # Errors
    /// [`FullCopyError::Failed`] if any part was not stored; [`FullCopyError::Incomplete`]; those of a commit. The
    /// store is then still marked.
    pub fn finish(mut self, end: &CopyEnd) -> Result<Store, FullCopyError> {
        self.commit()?;
        let (inodes, entries) = self.store.snapshot.inodes_and_entries()?;
        for (what, found, expected) in [("inodes", inodes, end.inodes), ("entries", entries, end.entries)] {
            if found != expected {
                return Err(FullCopyError::Incomplete { what, found, expected });
            }
        }
        if !self.store.inode(InodeId::ROOT)?.is_some_and(|root| root.is_directory()) {
            return Err(FullCopyError::Item("a tree without a root directory"));
        }
        let medium = self.store.medium.clone();
        let superblock = encode_superblock(medium.identity(), true);
        self.store.active.set_row(InodeId::ROOT, &[kind::SUPERBLOCK], Some(&superblock));
        self.store.set_journal_mark(end.writer, end.mark);
        self.store.commit()?;
        drop(self);
        Ok(Store::open_on(medium)?)
    }

    /// Runs a step, unless one has failed; notes if this one does.
    fn guard(&mut self, step: impl FnOnce(&mut Self) -> Result<(), FullCopyError>) -> Result<(), FullCopyError> {
        if self.has_failed {
            return Err(FullCopyError::Failed);
        }
        let result = step(self);
        self.has_failed = result.is_err();
        result
    }

    fn commit_items(&mut self) -> Result<(), FullCopyError> {
        self.store.commit()?;
        self.data_bytes = 0;
        Ok(())
    }

    fn import_item(&mut self, item: &CopyItem<'_>) -> Result<(), FullCopyError> {
        let store = &mut self.store;
        match *item {
            CopyItem::Inode { inode, ref value } => {
                check_inode(inode)?;
                match value {
                    Some(value) => put_inode(store, inode, value)?,
                    None => store.active.remove_inode(inode),
                }
            }
            CopyItem::Entry { directory, name, target } => {
                check_inode(directory)?;
                Name::check(name).map_err(|_| FullCopyError::Item("a name that no entry has"))?;
                pay(store, name.len())?;
                let entry = target.map(|(inode, kind)| Entry { inode, kind });
                store.active.set_entry(directory.0, store.name_cookie(name), name, entry, false);
            }
            CopyItem::Blocks { inode, first, ref blocks } => {
                check_inode(inode)?;
                return self.import_blocks(inode, first, blocks);
            }
            CopyItem::Inline { inode, bytes } => {
                check_inode(inode)?;
                if bytes.is_some_and(|bytes| bytes.is_empty() || bytes.len() as u64 > INLINE_BYTES_MAX) {
                    return Err(FullCopyError::Item("a small file that is not small"));
                }
                pay(store, bytes.map_or(0, <[u8]>::len))?;
                store.active.set_inline(inode, bytes.map(<[u8]>::to_vec));
            }
            CopyItem::Xattr { inode, name, value } => {
                check_inode(inode)?;
                let fits = (1..=XATTR_NAME_MAX).contains(&name.len());
                if !fits || value.is_some_and(|value| value.len() > XATTR_VALUE_MAX) {
                    return Err(FullCopyError::Item("an extended attribute that is too long"));
                }
                pay(store, name.len() + value.map_or(0, <[u8]>::len))?;
                store.active.set_row(inode, &rows::xattr_key(inode, name), value);
            }
            CopyItem::Orphan { inode, is_orphan } => {
                check_inode(inode)?;
                pay(store, 0)?;
                store.active.set_row(inode, &rows::key1(kind::ORPHAN, inode.0), is_orphan.then_some(&[]));
            }
            CopyItem::Session { session, state } => {
                if session == SessionId::SHARED_FS || !session.is_valid() {
                    return Err(FullCopyError::Item("a session's number that no node gives out"));
                }
                match state {
                    Some((generation, position)) => {
                        store.skip_session_id(session)?;
                        store.set_session(session, generation, position);
                    }
                    None => store.remove_session(session),
                }
            }
            CopyItem::Quota { key, account } => {
                if matches!(key, QuotaKey::Subtree(id) if !id.is_storable() || id.0 == 0) {
                    return Err(FullCopyError::Item("a subtree's number that no inode has"));
                }
                let (used, limits) = account.unwrap_or_default();
                store.quotas.replace(key, used, limits);
            }
        }
        Ok(())
    }

    fn import_blocks(&mut self, inode: InodeId, first: u64, blocks: &CopiedBlocks<'_>) -> Result<(), FullCopyError> {
        let count = match *blocks {
            CopiedBlocks::Hole(count) | CopiedBlocks::Reserved(count) => u64::from(count),
            CopiedBlocks::Written { bytes, ref damaged } => {
                let count = bytes.len() as u64 / BLOCK_BYTES;
                let is_whole = bytes.len() as u64 % BLOCK_BYTES == 0 && count <= ITEM_BLOCKS_MAX;
                if !is_whole || damaged.iter().any(|&step| u64::from(step) >= count) {
                    return Err(FullCopyError::Item("a part of a block, or too many blocks"));
                }
                count
            }
        };
        if count == 0 || first >= blocks_for(FILE_SIZE_MAX) || first % CHUNK_BLOCKS + count > CHUNK_BLOCKS {
            return Err(FullCopyError::Item("blocks beside a chunk of a file's map"));
        }
        pay(&mut self.store, 0)?;
        match set_blocks(&mut self.store, inode, first, count, blocks) {
            // Blocks that were replaced come free with a commit.
            Err(StoreError::FullBlocks { .. }) if self.store.is_dirty() => {
                self.commit_items()?;
                set_blocks(&mut self.store, inode, first, count, blocks)?;
            }
            done => done?,
        }
        if let CopiedBlocks::Written { bytes, .. } = blocks {
            self.data_bytes += bytes.len() as u64;
        }
        Ok(())
    }
}

fn encode_superblock(identity: StoreIdentity, is_whole: bool) -> Vec<u8> {
    rows::encode_superblock(Superblock { versions: rows::FORMAT_VERSIONS, arena: identity.id, is_whole })
}

fn check_inode(inode: InodeId) -> Result<(), FullCopyError> {
    if inode.0 == 0 || !inode.is_valid() {
        return Err(FullCopyError::Item("an inode's number that no node gives out"));
    }
    Ok(())
}

fn put_inode(store: &mut Store, inode: InodeId, value: &Inode) -> Result<(), FullCopyError> {
    let mut row = Vec::new();
    rows::encode_inode(value, &mut row);
    if rows::decode_inode(&row).as_ref() != Some(value) || row.len() > rows::INODE_BYTES + ashlar_types::SYMLINK_MAX {
        return Err(FullCopyError::Item("attributes that no inode has"));
    }
    pay(store, row.len())?;
    // It may be a number of this node's own that its counters have forgotten.
    store.skip_inodes(inode, 1)?;
    store.active.put_inode(inode, value.clone(), false);
    Ok(())
}

/// Accounts for a row of so many bytes and its overhead.
fn pay(store: &mut Store, bytes: usize) -> Result<(), StoreError> {
    let cost = 2 * bytes as u64 + ROW_BYTES;
    let (used, total) = (store.metadata_bytes_used(), store.database.budget_bytes());
    if used + cost > total + total / BUDGET_SLACK_PART {
        return Err(StoreError::FullMetadata { used, total });
    }
    store.active.pay(cost);
    Ok(())
}

/// Replaces blocks of a file. Done again after a lack of blocks, it does the rest.
fn set_blocks(
    store: &mut Store,
    inode: InodeId,
    first: u64,
    count: u64,
    blocks: &CopiedBlocks<'_>,
) -> Result<(), StoreError> {
    match *blocks {
        CopiedBlocks::Hole(_) => store.free_blocks(inode, first..first + count).map(drop),
        CopiedBlocks::Reserved(_) => {
            store.free_blocks(inode, first..first + count)?;
            store.reserve(inode, first..first + count).map(drop)
        }
        CopiedBlocks::Written { bytes, ref damaged } => {
            store.write_blocks(inode, first * BLOCK_BYTES, bytes)?;
            damaged.iter().try_for_each(|&step| store.mark_damaged(inode, first + u64::from(step)))
        }
    }
}
