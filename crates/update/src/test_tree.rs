//! A small tree for tests: maps, byte arrays, and a walk that checks that it is sound; and updates at random that fit
//! it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::LazyLock;

use ashlar_types::{BLOCK_BYTES, FileKind, Inode, InodeId, QuotaId, Timestamp, blocks_for};

use crate::{
    Allocation, Applied, Create, Entry, Invalid, Rename, SetAttributes, Tree, Update, Whiteout, apply, permission,
};

/// A file's content: bytes up to the last one that is not zero, and the blocks that are taken up.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct TestFile {
    pub bytes: Vec<u8>,
    pub blocks: BTreeSet<u64>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct TestTree {
    pub inodes: BTreeMap<InodeId, Inode>,
    pub entries: BTreeMap<(InodeId, Vec<u8>), Entry>,
    pub xattrs: BTreeMap<(InodeId, Vec<u8>), Vec<u8>>,
    pub files: BTreeMap<InodeId, TestFile>,
    pub orphans: BTreeSet<InodeId>,
    /// Inodes that another session has open.
    pub open_elsewhere: BTreeSet<InodeId>,
}

pub(crate) fn at(seconds: i64) -> Timestamp {
    Timestamp { seconds, nanoseconds: 0 }
}

/// Moves a name; what stands at the new one goes.
pub(crate) fn rename(
    inode: InodeId,
    (parent, name): (InodeId, &'static [u8]),
    (new_parent, new_name): (InodeId, &'static [u8]),
    target: Option<InodeId>,
) -> Rename<'static> {
    Rename {
        parent,
        name,
        inode,
        new_parent,
        new_name,
        target,
        exchange: false,
        whiteout: None,
        release: true,
        at: at(5),
    }
}

impl TestTree {
    /// A tree of an empty root.
    pub(crate) fn new() -> Self {
        let mut tree = Self::default();
        let root = Inode::new(FileKind::Directory, 0o755, InodeId::ROOT, at(0));
        tree.inodes.insert(InodeId::ROOT, root);
        tree
    }

    pub(crate) fn apply(&mut self, update: &Update<'_>) -> Result<Applied, Invalid> {
        apply(self, update)
    }

    /// Checks all that is true of every sound tree.
    pub(crate) fn check(&self) {
        for (&id, inode) in &self.inodes {
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
            let file = self.files.get(&id).cloned().unwrap_or_default();
            assert_eq!(inode.blocks as usize, file.blocks.len(), "blocks of {id}");
            assert!(inode.kind == FileKind::Regular || file == TestFile::default());
            assert!(file.bytes.len() as u64 <= inode.size, "bytes behind the end of {id}");
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

    fn file(&mut self, id: InodeId, change: impl FnOnce(&mut TestFile)) -> Result<u64, Invalid> {
        let file = self.files.entry(id).or_default();
        change(file);
        while file.bytes.last() == Some(&0) {
            file.bytes.pop();
        }
        let blocks = file.blocks.len() as u64;
        // A file that was never written and one whose content is gone are the same.
        if *file == TestFile::default() {
            self.files.remove(&id);
        }
        Ok(blocks)
    }
}

impl TestFile {
    fn fill(&mut self, start: u64, bytes: &[u8]) {
        let (start, end) = (start as usize, start as usize + bytes.len());
        self.bytes.resize(self.bytes.len().max(end), 0);
        self.bytes[start..end].copy_from_slice(bytes);
    }

    fn zero(&mut self, start: u64, end: u64) {
        let end = self.bytes.len().min(end as usize);
        if (start as usize) < end {
            self.bytes[start as usize..end].fill(0);
        }
    }

    fn allocate(&mut self, how: Allocation, offset: u64, length: u64) {
        let end = offset + length;
        let (first, last) = (offset / BLOCK_BYTES, blocks_for(end));
        let (from, to, by) = (offset as usize, end as usize, length as usize);
        match how {
            Allocation::Reserve | Allocation::ReserveKeepSize => self.blocks.extend(first..last),
            Allocation::Zero | Allocation::ZeroKeepSize => {
                self.zero(offset, end);
                self.blocks.extend(first..last);
            }
            Allocation::Punch => {
                self.zero(offset, end);
                self.blocks.retain(|block| !(blocks_for(offset)..end / BLOCK_BYTES).contains(block));
            }
            Allocation::Collapse => {
                self.bytes.drain(from.min(self.bytes.len())..to.min(self.bytes.len()));
                let old = std::mem::take(&mut self.blocks);
                let kept = old.into_iter().filter(|block| !(first..last).contains(block));
                self.blocks.extend(kept.map(|block| if block >= last { block - (last - first) } else { block }));
            }
            Allocation::Insert => {
                if from < self.bytes.len() {
                    self.bytes.splice(from..from, std::iter::repeat_n(0, by));
                }
                let old = std::mem::take(&mut self.blocks);
                self.blocks
                    .extend(old.into_iter().map(|block| if block >= first { block + (last - first) } else { block }));
            }
        }
    }
}

impl Tree for TestTree {
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
        self.orphans.remove(&inode);
        self.xattrs.retain(|(id, _), _| *id != inode);
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
        !self.open_elsewhere.contains(&inode)
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
        self.file(id, |file| {
            if !data.is_empty() {
                file.fill(offset, data);
                file.blocks.extend(offset / BLOCK_BYTES..blocks_for(offset + data.len() as u64));
            }
        })
    }
    fn resize(&mut self, id: InodeId, inode: &Inode, size: u64) -> Result<u64, Invalid> {
        let old = inode.size;
        self.file(id, |file| {
            if size <= old {
                file.bytes.truncate(size as usize);
                file.blocks.retain(|&block| block < blocks_for(size));
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
        self.file(id, |file| file.allocate(how, offset, length))
    }
}

/// Numbers from which a random update is made.
pub(crate) type Choice = (u8, u16, u16, u16, u16);

static PATTERN: LazyLock<Vec<u8>> = LazyLock::new(|| (0..40_000u32).map(|n| (n * 7 % 255) as u8 + 1).collect());
const NAMES: [&[u8]; 3] = [b"a", b"b", b"c"];
const MODES: [u32; 4] = [0o644, 0o6755, 0o2640, 0o4700];
const LENGTHS: [u64; 8] = [1, 100, 1024, 4096, 5000, 8192, 3 * 4096, 0];

fn pick<T: Copy>(from: &[T], choice: u16) -> Option<T> {
    if from.is_empty() { None } else { Some(from[usize::from(choice) % from.len()]) }
}

impl TestTree {
    /// Inodes of some kinds, the newest ones first.
    fn chosen(&self, choice: u16, wanted: impl Fn(&Inode) -> bool) -> Option<InodeId> {
        let all: Vec<InodeId> =
            self.inodes.iter().rev().filter(|(_, inode)| wanted(inode)).map(|(id, _)| *id).collect();
        pick(&all, choice)
    }

    fn is_below(&self, inode: InodeId, other: InodeId) -> bool {
        crate::would_make_cycle(self, other, inode).expect("the test's tree has no errors")
    }

    fn random_rename(&self, b: u16, c: u16, d: u16, time: Timestamp, next: InodeId) -> Option<Update<'static>> {
        let sources: Vec<_> = self.entries.iter().collect();
        let ((parent, source), entry) = pick(&sources, b)?;
        let name = NAMES.into_iter().find(|name| name == source)?;
        let new_parent = self.chosen(c >> 2, |inode| inode.is_directory() && inode.links > 0)?;
        let new_name = pick(&NAMES, d)?;
        let target = self.entries.get(&(new_parent, new_name.to_vec())).map(|entry| entry.inode);
        let exchange = target.is_some() && c % 8 == 0;
        let cycle = self.is_below(new_parent, entry.inode)
            || exchange && target.is_some_and(|target| self.is_below(*parent, target));
        let (parent, inode, release) = (*parent, entry.inode, d % 5 != 0);
        let acl_access: &[u8] = if d % 2 == 0 { b"list" } else { b"" };
        let whiteout = Whiteout { inode: next, uid: u32::from(d), gid: 7, acl_access };
        let whiteout = Some(whiteout).filter(|_| !exchange && d % 3 == 0);
        let rename =
            Rename { parent, name, inode, new_parent, new_name, target, exchange, whiteout, release, at: time };
        (!cycle).then_some(Update::Rename(rename))
    }

    fn random_content(&self, what: u16, c: u16, d: u16, time: Timestamp) -> Option<Update<'static>> {
        let inode = self.chosen(c, |inode| inode.kind == FileKind::Regular)?;
        let offset = u64::from(d % 20) * 1024 + u64::from(d / 20 % 3) * 10;
        let length = pick(&LENGTHS, d / 64)?;
        let strip = d % 7 == 0;
        Some(match what {
            0..=3 => {
                let from = usize::from(c % 251) * 10;
                let data = &PATTERN[from..from + length as usize];
                Update::Write { inode, offset, at: time, strip, data }
            }
            4 | 5 => {
                let size = if d % 3 == 0 { 0 } else { offset };
                Update::Resize { inode, size, strip, at: time }
            }
            what => {
                let how = Allocation::ALL[usize::from(what - 6) % 7];
                let moves = matches!(how, Allocation::Collapse | Allocation::Insert);
                let (offset, length) = if moves { (offset / 4096 * 4096, 4096) } else { (offset, length) };
                if self.inodes[&inode].size > 100_000 {
                    return None;
                }
                Update::Allocate { inode, how, offset, length, strip, at: time }
            }
        })
    }

    fn random_attributes(&self, what: u16, b: u16, c: u16, d: u16, time: Timestamp) -> Option<Update<'static>> {
        let inode = self.chosen(c, |_| true)?;
        let mode = pick(&MODES, d / 7);
        let name: &'static [u8] = if d % 2 == 0 { b"user.x" } else { b"user.y" };
        Some(match what {
            0..=2 => Update::SetAttributes(SetAttributes {
                inode,
                mode: mode.filter(|_| b & 1 != 0),
                uid: Some(u32::from(d)).filter(|_| b & 2 != 0),
                gid: Some(u32::from(d)).filter(|_| b & 4 != 0),
                accessed: Some(at(i64::from(d % 50))).filter(|_| b & 8 != 0),
                modified: Some(at(i64::from(d % 60))).filter(|_| b & 16 != 0),
                at: time,
            }),
            3 => {
                let value = &PATTERN[usize::from(d / 4)..usize::from(d / 4) + 4];
                Update::SetXattr { inode, name, value, mode: mode.filter(|_| b % 3 == 0), at: time }
            }
            4 => Update::RemoveXattr { inode, name, mode: mode.filter(|_| b % 3 == 0), at: time },
            5 => Update::SetQuota {
                inode,
                quota: [QuotaId::NONE, QuotaId::of(inode), QuotaId(16)][usize::from(d) % 3],
                at: time,
            },
            _ => Update::Accessed { inode, at: time },
        })
    }

    /// An update that fits the tree, or nearly: the caller tries it. `next` is the next inode's number.
    pub(crate) fn random_update(&self, choice: Choice, next: InodeId) -> Option<Update<'static>> {
        let (kind, a, b, c, d) = choice;
        let time = at(i64::from(a % 97));
        let parent = self.chosen(c >> 3, |inode| inode.is_directory() && inode.links > 0)?;
        let name = pick(&NAMES, b)?;
        let entries: Vec<_> = self.entries.iter().collect();
        match kind % 32 {
            0..=5 => {
                let kind =
                    [FileKind::Regular, FileKind::Regular, FileKind::Directory, FileKind::Symlink][usize::from(c % 4)];
                let target: &[u8] = if kind == FileKind::Symlink { b"there" } else { b"" };
                let name = if kind == FileKind::Regular && d % 6 == 0 { b"" } else { name };
                let acl_access: &[u8] = if d % 9 == 0 { b"list" } else { b"" };
                let (mode, uid, gid) = (pick(&MODES, d)?, u32::from(d), 7);
                let inode = next;
                Some(Update::Create(Create {
                    inode,
                    parent,
                    name,
                    kind,
                    mode,
                    uid,
                    gid,
                    device: 0,
                    at: time,
                    target,
                    acl_access,
                    acl_default: b"",
                }))
            }
            6 => {
                let inode = self.chosen(d, |inode| !inode.is_directory() && permission::is_linkable(inode))?;
                Some(Update::Link { inode, parent, name, at: time })
            }
            7..=12 => {
                let ((parent, source), entry) = pick(&entries, d)?;
                let name = NAMES.into_iter().find(|name| name == source)?;
                let (inode, parent, release) = (entry.inode, *parent, c % 5 != 0);
                Some(if entry.kind == FileKind::Directory {
                    Update::RemoveDirectory { inode, parent, name, release, at: time }
                } else {
                    Update::Unlink { inode, parent, name, release, at: time }
                })
            }
            13..=16 => self.random_rename(b, c, d, time, next),
            17..=24 => self.random_content(b % 13, c, d, time),
            25..=29 => self.random_attributes(b % 7, b >> 3, c, d, time),
            _ => Some(Update::Release { inode: self.chosen(c, |inode| inode.links == 0)? }),
        }
    }

    /// Applies random updates, each of which fits; returns those that did.
    pub(crate) fn grow(&mut self, choices: &[Choice], next: &mut u64) -> Vec<Update<'static>> {
        let mut done = Vec::new();
        for choice in choices {
            let Some(update) = self.random_update(*choice, InodeId(*next)) else { continue };
            if self.apply(&update).is_ok() {
                *next += 1;
                done.push(update);
            }
        }
        done
    }
}
