//! The store's twin: the same tree in memory, with no I/O and nothing clever, for tests and as the reference.

use std::collections::{BTreeMap, BTreeSet};

use ashlar_types::{
    BLOCK_BYTES, Inode, InodeId, QuotaAmount, QuotaKey, Timestamp, blocks_for, entry_blocks, xattr_blocks,
};
use ashlar_update::xattr_size::attribute_bytes;
use ashlar_update::{Allocation, Applied, Entry, Invalid, Tree, Update};

use crate::model::Xattrs;
use crate::store::root_directory;

type Content = Box<[u8; BLOCK_BYTES as usize]>;

/// A file's blocks: absent ones are holes, `None` is reserved and not written.
type Blocks = BTreeMap<u64, Option<Content>>;

/// A file system in memory.
#[derive(Clone, Debug, Default)]
pub struct MemoryStore {
    inodes: BTreeMap<InodeId, Inode>,
    entries: BTreeMap<(InodeId, Vec<u8>), Entry>,
    xattrs: BTreeMap<(InodeId, Vec<u8>), Vec<u8>>,
    orphans: BTreeSet<InodeId>,
    files: BTreeMap<InodeId, Blocks>,
    /// Inodes that a session has open, so that they stay when they lose their last link.
    open: BTreeSet<InodeId>,
}

impl MemoryStore {
    /// An empty file system with a root directory, as [`crate::Store::format`] makes it.
    #[must_use]
    pub fn new() -> Self {
        let inodes = BTreeMap::from([(InodeId::ROOT, root_directory(Timestamp::default()))]);
        Self { inodes, ..Self::default() }
    }

    /// Applies an update. `may_free` says whether an inode without links may be freed.
    ///
    /// # Errors
    /// [`Invalid`], and then nothing has changed.
    pub fn apply(&mut self, update: &Update<'_>, may_free: &dyn Fn(InodeId) -> bool) -> Result<Applied, Invalid> {
        self.open = self.inodes.keys().copied().filter(|&inode| !may_free(inode)).collect();
        ashlar_update::apply(self, update)
    }

    /// All inodes, in order.
    pub fn inodes(&self) -> impl Iterator<Item = (InodeId, &Inode)> {
        self.inodes.iter().map(|(&id, inode)| (id, inode))
    }

    /// A directory's entries, by name.
    pub fn entries(&self, directory: InodeId) -> impl Iterator<Item = (&[u8], Entry)> {
        let all = (directory, Vec::new())..(InodeId(directory.0 + 1), Vec::new());
        self.entries.range(all).map(|((_, name), entry)| (&**name, *entry))
    }

    /// An inode's extended attributes, by name.
    #[must_use]
    pub fn xattrs(&self, inode: InodeId) -> Xattrs {
        let all = (inode, Vec::new())..(InodeId(inode.0 + 1), Vec::new());
        self.xattrs.range(all).map(|((_, name), value)| (name.clone(), value.clone())).collect()
    }

    /// The inodes without links.
    #[must_use]
    pub fn orphans(&self) -> Vec<InodeId> {
        self.orphans.iter().copied().collect()
    }

    /// The blocks that a file takes up, and whether each was written.
    #[must_use]
    pub fn blocks(&self, inode: InodeId) -> Vec<(u64, bool)> {
        self.files.get(&inode).into_iter().flatten().map(|(&block, content)| (block, content.is_some())).collect()
    }

    /// Reads bytes of a file from `offset` on, and says how many there were before the file's end.
    pub fn read(&self, inode: InodeId, offset: u64, into: &mut [u8]) -> usize {
        let size = self.inodes.get(&inode).map_or(0, |inode| inode.size);
        let length = size.saturating_sub(offset).min(into.len() as u64) as usize;
        for (index, byte) in into[..length].iter_mut().enumerate() {
            let at = offset + index as u64;
            let block = self.files.get(&inode).and_then(|file| file.get(&(at / BLOCK_BYTES)));
            *byte = block.and_then(Option::as_ref).map_or(0, |content| content[(at % BLOCK_BYTES) as usize]);
        }
        length
    }

    /// The use of every account, counted afresh.
    #[must_use]
    pub fn quotas(&self) -> BTreeMap<QuotaKey, QuotaAmount> {
        let mut quotas = BTreeMap::<QuotaKey, QuotaAmount>::new();
        for (id, inode) in &self.inodes {
            let xattrs: usize = self.xattrs(*id).iter().map(|(name, value)| attribute_bytes(name, value)).sum();
            for key in inode.quota_keys() {
                let used = quotas.entry(key).or_default();
                used.blocks += inode.blocks + entry_blocks(inode.entries) + xattr_blocks(xattrs as u64);
                used.inodes += 1;
            }
        }
        quotas
    }

    fn count(&self, inode: InodeId) -> u64 {
        self.files.get(&inode).map_or(0, |file| file.len() as u64)
    }

    fn change(&mut self, inode: InodeId, change: impl FnOnce(&mut Blocks)) -> Result<u64, Invalid> {
        let file = self.files.entry(inode).or_default();
        change(file);
        if file.is_empty() {
            self.files.remove(&inode);
        }
        Ok(self.count(inode))
    }
}

/// Zeroes the existing bytes in a range.
fn zero_bytes(file: &mut Blocks, from: u64, to: u64) {
    for (&block, content) in file.range_mut(from / BLOCK_BYTES..blocks_for(to)) {
        let Some(content) = content else { continue };
        let start = block * BLOCK_BYTES;
        for at in from.max(start)..to.min(start + BLOCK_BYTES) {
            content[(at - start) as usize] = 0;
        }
    }
}

/// Moves the blocks from `from` on to `to` and behind.
fn shift(file: &mut Blocks, from: u64, to: u64) {
    let moved = file.split_off(&from);
    file.extend(moved.into_iter().map(|(block, content)| (block - from + to, content)));
}

impl Tree for MemoryStore {
    type Error = Invalid;

    fn inode(&self, inode: InodeId) -> Result<Option<Inode>, Invalid> {
        Ok(self.inodes.get(&inode).cloned())
    }

    fn put_inode(&mut self, inode: InodeId, value: Inode) -> Result<(), Invalid> {
        self.inodes.insert(inode, value);
        Ok(())
    }

    fn remove_inode(&mut self, inode: InodeId) -> Result<(), Invalid> {
        self.inodes.remove(&inode);
        self.files.remove(&inode);
        self.xattrs.retain(|(of, _), _| *of != inode);
        self.orphans.remove(&inode);
        Ok(())
    }

    fn entry(&self, parent: InodeId, name: &[u8]) -> Result<Option<Entry>, Invalid> {
        Ok(self.entries.get(&(parent, name.to_vec())).copied())
    }

    fn put_entry(&mut self, parent: InodeId, name: &[u8], entry: Entry) -> Result<(), Invalid> {
        self.entries.insert((parent, name.to_vec()), entry);
        Ok(())
    }

    fn remove_entry(&mut self, parent: InodeId, name: &[u8]) -> Result<(), Invalid> {
        self.entries.remove(&(parent, name.to_vec()));
        Ok(())
    }

    fn set_orphan(&mut self, inode: InodeId, orphan: bool) -> Result<(), Invalid> {
        if orphan {
            self.orphans.insert(inode);
        } else {
            self.orphans.remove(&inode);
        }
        Ok(())
    }

    fn may_free(&self, inode: InodeId) -> bool {
        !self.open.contains(&inode)
    }

    fn put_xattr(&mut self, inode: InodeId, name: &[u8], value: &[u8]) -> Result<(), Invalid> {
        self.xattrs.insert((inode, name.to_vec()), value.to_vec());
        Ok(())
    }

    fn remove_xattr(&mut self, inode: InodeId, name: &[u8]) -> Result<(), Invalid> {
        self.xattrs.remove(&(inode, name.to_vec()));
        Ok(())
    }

    fn write(&mut self, id: InodeId, _: &Inode, offset: u64, data: &[u8], _: u64) -> Result<u64, Invalid> {
        self.change(id, |file| {
            for (index, &byte) in data.iter().enumerate() {
                let at = offset + index as u64;
                let block = file.entry(at / BLOCK_BYTES).or_default();
                block.get_or_insert_with(|| Box::new([0; BLOCK_BYTES as usize]))[(at % BLOCK_BYTES) as usize] = byte;
            }
        })
    }

    fn resize(&mut self, id: InodeId, inode: &Inode, size: u64) -> Result<u64, Invalid> {
        if size > inode.size {
            return Ok(self.count(id));
        }
        self.change(id, |file| {
            file.split_off(&blocks_for(size));
            zero_bytes(file, size, blocks_for(size) * BLOCK_BYTES);
        })
    }

    fn allocate(
        &mut self,
        id: InodeId,
        _: &Inode,
        how: Allocation,
        offset: u64,
        length: u64,
        _: u64,
    ) -> Result<u64, Invalid> {
        let end = offset + length;
        let touched = offset / BLOCK_BYTES..blocks_for(end);
        let whole = blocks_for(offset)..end / BLOCK_BYTES;
        self.change(id, |file| match how {
            Allocation::Reserve | Allocation::ReserveKeepSize => {
                touched.for_each(|block| {
                    file.entry(block).or_default();
                });
            }
            Allocation::Zero | Allocation::ZeroKeepSize => {
                zero_bytes(file, offset, end);
                whole.for_each(|block| drop(file.insert(block, None)));
                touched.for_each(|block| {
                    file.entry(block).or_default();
                });
            }
            Allocation::Punch => {
                zero_bytes(file, offset, end);
                file.retain(|block, _| !whole.contains(block));
            }
            Allocation::Collapse => {
                file.retain(|block, _| !touched.contains(block));
                shift(file, touched.end, touched.start);
            }
            Allocation::Insert => shift(file, touched.start, touched.end),
        })
    }
}
