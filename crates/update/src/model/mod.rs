//! A file system in memory: the model that other trees are compared with.
//!
//! It has no I/O and nothing clever. The store's tests, the crash enumeration of digest and the tests of this crate use
//! it as their reference. [`ModelTree::random_update`] makes updates that fit it.

mod file;
mod random;

pub use random::UpdateChoice;

use std::collections::{BTreeMap, BTreeSet};

use ashlar_types::{
    FileKind, Inode, InodeId, QuotaAmount, QuotaKey, Timestamp, blocks_for, entry_blocks, xattr_blocks,
};

use crate::xattr_size::attribute_bytes;
use crate::{Allocation, Applied, Entry, Invalid, Tree, Update};
use file::ModelFile;

/// A file system in memory.
///
/// Two of them are equal if all that can be read is. Whether a block of zeros was written or reserved does not count.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ModelTree {
    pub(crate) inodes: BTreeMap<InodeId, Inode>,
    pub(crate) entries: BTreeMap<(InodeId, Vec<u8>), Entry>,
    pub(crate) xattrs: BTreeMap<(InodeId, Vec<u8>), Vec<u8>>,
    pub(crate) orphans: BTreeSet<InodeId>,
    files: BTreeMap<InodeId, ModelFile>,
    /// Inodes that another session has open, so that they stay when they lose their last link.
    pub(crate) open: BTreeSet<InodeId>,
}

impl ModelTree {
    /// Makes a file system of an empty root directory, as the store does.
    #[must_use]
    pub fn new() -> Self {
        let root = Inode::new(FileKind::Directory, 0o755, InodeId::ROOT, Timestamp::default());
        Self { inodes: BTreeMap::from([(InodeId::ROOT, root)]), ..Self::default() }
    }

    /// Sets which inodes another session has open.
    pub fn set_open(&mut self, open: impl IntoIterator<Item = InodeId>) {
        self.open = open.into_iter().collect();
    }

    /// Applies an update. Inodes that are open elsewhere are not freed.
    ///
    /// # Errors
    /// [`Invalid`], and then nothing has changed.
    pub fn apply(&mut self, update: &Update<'_>) -> Result<Applied, Invalid> {
        crate::apply(self, update)
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

    /// An inode's extended attributes, names and values, by name.
    #[must_use]
    pub fn xattrs(&self, inode: InodeId) -> Vec<(Vec<u8>, Vec<u8>)> {
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
        self.files.get(&inode).map_or_else(Vec::new, ModelFile::blocks)
    }

    /// Reads bytes of a file from `offset` on, and returns how many there were before the file's end.
    pub fn read(&self, inode: InodeId, offset: u64, into: &mut [u8]) -> usize {
        let size = self.inodes.get(&inode).map_or(0, |inode| inode.size);
        let length = size.saturating_sub(offset).min(into.len() as u64) as usize;
        into[..length].fill(0);
        if let Some(file) = self.files.get(&inode) {
            file.read(offset, &mut into[..length]);
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

    /// Checks all that is true of every sound tree.
    ///
    /// # Panics
    /// If the tree is not sound.
    pub fn check(&self) {
        for (&id, inode) in &self.inodes {
            self.check_inode(id, inode);
        }
        for ((parent, _), entry) in &self.entries {
            let inode = &self.inodes[&entry.inode];
            assert_eq!(inode.kind, entry.kind);
            assert!(self.inodes[parent].is_directory());
            assert!(!inode.is_directory() || inode.parent == *parent, "parent of directory {}", entry.inode);
        }
        for id in self.orphans.iter().chain(self.files.keys()).chain(self.xattrs.keys().map(|(id, _)| id)) {
            assert!(self.inodes.contains_key(id), "something is left of {id}");
        }
    }

    fn check_inode(&self, id: InodeId, inode: &Inode) {
        let own: Vec<_> = self.entries.iter().filter(|((parent, _), _)| *parent == id).collect();
        let subdirectories = own.iter().filter(|(_, entry)| entry.kind == FileKind::Directory).count();
        let names = self.entries.values().filter(|entry| entry.inode == id).count();
        assert_eq!(inode.entries as usize, own.len(), "entries of {id}");
        if id == InodeId::ROOT {
            assert_eq!(inode.links as usize, 2 + subdirectories);
        } else if inode.is_directory() {
            let expected = if names == 1 { 2 + subdirectories } else { 0 };
            assert_eq!(inode.links as usize, expected, "links of directory {id}");
        } else {
            assert_eq!(inode.links as usize, names, "links of {id}");
        }
        assert_eq!(self.orphans.contains(&id), inode.links == 0, "orphan {id}");
        let file = self.files.get(&id);
        assert_eq!(inode.blocks, file.map_or(0, ModelFile::count), "blocks of {id}");
        assert!(inode.kind == FileKind::Regular || file.is_none());
        assert!(file.is_none_or(|file| file.is_zero_from(inode.size)), "bytes behind the end of {id}");
    }

    /// Changes a file's content, and returns how many blocks it then takes up.
    fn change(&mut self, inode: InodeId, change: impl FnOnce(&mut ModelFile)) -> Result<u64, Invalid> {
        let file = self.files.entry(inode).or_default();
        change(file);
        let count = file.count();
        // A file that was never written and one whose content is gone are the same.
        if count == 0 {
            self.files.remove(&inode);
        }
        Ok(count)
    }
}

impl Tree for ModelTree {
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
        self.change(id, |file| file.write(offset, data))
    }

    fn resize(&mut self, id: InodeId, inode: &Inode, size: u64) -> Result<u64, Invalid> {
        let is_cut = size <= inode.size;
        self.change(id, |file| {
            if is_cut {
                file.cut(size);
            }
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
        let touched = offset / ashlar_types::BLOCK_BYTES..blocks_for(end);
        self.change(id, |file| match how {
            Allocation::Reserve | Allocation::ReserveKeepSize => file.reserve(touched),
            Allocation::Zero | Allocation::ZeroKeepSize => file.zero(offset, end),
            Allocation::Punch => file.punch(offset, end),
            Allocation::Collapse => file.collapse(touched),
            Allocation::Insert => file.insert(touched),
        })
    }
}
