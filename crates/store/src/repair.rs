//! Putting right what a check has found.
//!
//! Each problem has a small remedy of its own in the rows; the counts that a remedy changes are the next round's problems. So
//! repair is rounds of check and remedy, each one transaction, until nothing is left that has a remedy.

use std::collections::BTreeMap;

use ashlar_types::{FileKind, Inode, InodeId};
use ashlar_update::Entry;

use crate::allocator::{Allocator, PIECE_BLOCKS};
use crate::chunk::Chunk;
use crate::database::Writer;
use crate::problem::{Problem, Report};
use crate::rows::{self, kind, Counters, EntryKey};
use crate::store::root_directory;
use crate::{name_cookie, Store, StoreError};

/// More rounds than any damage needs: strays, reattachment, counts, and a last one that finds nothing.
const ROUNDS_MAX: usize = 8;
const LOST_AND_FOUND: &[u8] = b"lost+found";

impl Store {
    /// Commits what is applied, puts right what can be, and returns what a check of the metadata says afterwards. No session
    /// may be using the store: blocks and inodes change under it.
    ///
    /// # Errors
    /// [`StoreError::CommitUnderWay`] while a commit or a checker is at work; those of LMDB.
    pub fn repair(&mut self) -> Result<Report, StoreError> {
        if !self.damaged {
            self.commit()?;
        }
        if self.frozen.is_some() || self.is_held() {
            return Err(StoreError::CommitUnderWay);
        }
        for _ in 0..ROUNDS_MAX {
            let checker = self.checker()?;
            let (report, used) = checker.run_metadata()?;
            drop(checker);
            if !report.problems.iter().any(Problem::is_repairable) {
                self.reload()?;
                return Ok(report);
            }
            self.remedy(&report, &used)?;
        }
        self.reload()?;
        Ok(self.checker()?.run_metadata()?.0)
    }

    fn remedy(&self, report: &Report, used: &BTreeMap<u32, Vec<u64>>) -> Result<(), StoreError> {
        let writer = self.database.write(2 * report.problems.len() as u64 + 64, 1 << 20)?;
        let mut remedy = Remedy { writer, hash_key: self.hash_key, used };
        for problem in &report.problems {
            remedy.apply(problem)?;
        }
        remedy.writer.commit()
    }

    /// Takes over what the database says now.
    fn reload(&mut self) -> Result<(), StoreError> {
        self.snapshot = self.database.snapshot()?;
        self.committed_bytes = self.snapshot.used_bytes()?;
        self.stored = crate::store::read_counters(&self.snapshot)?;
        self.counters.next_inode = self.counters.next_inode.max(self.stored.next_inode);
        self.counters.reserved_blocks = self.stored.reserved_blocks;
        self.absent_inode.set(None);
        self.absent_entry.set(None);
        self.allocator = Allocator::default();
        for segment in self.segments.values() {
            self.allocator.add_segment(segment.info().number, segment.info().blocks);
        }
        self.load_bitmaps()
    }
}

struct Remedy<'a> {
    writer: Writer<'a>,
    hash_key: [u8; 16],
    used: &'a BTreeMap<u32, Vec<u64>>,
}

impl Remedy<'_> {
    fn apply(&mut self, problem: &Problem) -> Result<(), StoreError> {
        match problem {
            Problem::UnknownRow { .. } | Problem::SharedBlock { .. } | Problem::DamagedBlock { .. } => Ok(()),
            Problem::NoRoot => self.put_inode(InodeId::ROOT, &root_directory()),
            Problem::DamagedRow { bytes, .. } if **bytes == [kind::COUNTERS] => {
                // The next rounds raise what is too low.
                self.put_counters(Counters { next_inode: 1 << 40, next_session: 1 << 40, reserved_blocks: 0 })
            }
            Problem::DamagedRow { bytes, .. }
            | Problem::StrayRow { bytes, .. }
            | Problem::DanglingEntry { bytes, .. }
            | Problem::SecondParent { bytes, .. } => self.writer.delete(bytes),
            Problem::MisplacedEntry { directory, bytes, .. } => self.replace_entry(*directory, bytes),
            Problem::WrongKind { inode, bytes, .. } => match self.inode(*inode)? {
                Some(found) => self.writer.put(bytes, &rows::encode_entry(Entry { inode: *inode, kind: found.kind })),
                None => self.writer.delete(bytes),
            },
            Problem::WrongLinks { inode, expected, .. } => self.change(*inode, |found| found.links = *expected),
            Problem::WrongEntries { inode, expected, .. } => self.change(*inode, |found| found.entries = *expected),
            Problem::WrongBlocks { inode, expected, .. } => self.change(*inode, |found| found.blocks = *expected),
            Problem::WrongParent { inode, expected, .. } => self.change(*inode, |found| found.parent = *expected),
            Problem::Unreachable { inode, through } => {
                if let Some(key) = through {
                    self.writer.delete(key)?;
                }
                self.reattach(*inode)
            }
            Problem::UnmarkedOrphan { inode } => self.writer.put(&rows::key1(kind::ORPHAN, inode.0), &[]),
            Problem::MarkedOrphan { inode } => self.writer.delete(&rows::key1(kind::ORPHAN, inode.0)),
            Problem::InlineAndBlocks { inode } => self.writer.delete(&rows::key1(kind::INLINE, inode.0)),
            Problem::ExtentOutside { block, bytes, .. } => self.cut_block(*block % crate::chunk::CHUNK_BLOCKS, bytes),
            Problem::WrongBitmap { segment, .. } => self.put_bitmap(*segment),
            Problem::WrongReserved { expected, .. } => {
                let counters = self.counters()?;
                self.put_counters(Counters { reserved_blocks: *expected, ..counters })
            }
            Problem::WrongNextInode { used, .. } => {
                let counters = self.counters()?;
                self.put_counters(Counters { next_inode: counters.next_inode.max(used + 1), ..counters })
            }
        }
    }

    fn counters(&self) -> Result<Counters, StoreError> {
        let row = self.writer.get(&[kind::COUNTERS])?;
        row.and_then(rows::decode_counters).ok_or(StoreError::Corrupt("the counters' row is damaged"))
    }

    fn put_counters(&mut self, counters: Counters) -> Result<(), StoreError> {
        self.writer.put(&[kind::COUNTERS], &rows::encode_counters(counters))
    }

    fn inode(&self, inode: InodeId) -> Result<Option<Inode>, StoreError> {
        Ok(self.writer.get(&rows::key1(kind::INODE, inode.0))?.and_then(rows::decode_inode))
    }

    fn put_inode(&mut self, id: InodeId, inode: &Inode) -> Result<(), StoreError> {
        let mut value = Vec::new();
        rows::encode_inode(inode, &mut value);
        self.writer.put(&rows::key1(kind::INODE, id.0), &value)
    }

    fn change(&mut self, id: InodeId, change: impl FnOnce(&mut Inode)) -> Result<(), StoreError> {
        if let Some(mut inode) = self.inode(id)? {
            change(&mut inode);
            self.put_inode(id, &inode)?;
        }
        Ok(())
    }

    /// Puts an entry where its name belongs, unless that place is taken.
    fn replace_entry(&mut self, directory: InodeId, key: &[u8]) -> Result<(), StoreError> {
        let value = self.writer.get(key)?.map(<[u8]>::to_vec);
        self.writer.delete(key)?;
        let (Some((_, _, name)), Some(value)) = (rows::split_key2(key), value) else { return Ok(()) };
        let right = EntryKey::new(directory.0, name_cookie(&self.hash_key, name), name);
        if self.writer.get(right.as_bytes())?.is_none() {
            self.writer.put(right.as_bytes(), &value)?;
        }
        Ok(())
    }

    /// Gives an inode an entry in `/lost+found`, called after its number.
    fn reattach(&mut self, id: InodeId) -> Result<(), StoreError> {
        let Some(mut inode) = self.inode(id)? else { return Ok(()) };
        let Some(directory) = self.lost_and_found()? else { return Ok(()) };
        let name = format!("#{id}").into_bytes();
        let key = EntryKey::new(directory.0, name_cookie(&self.hash_key, &name), &name);
        self.writer.put(key.as_bytes(), &rows::encode_entry(Entry { inode: id, kind: inode.kind }))?;
        inode.parent = directory;
        self.put_inode(id, &inode)
    }

    /// The directory `/lost+found`, which is made where it is missing; `None` while there is no root, or where the name is
    /// taken by something else.
    fn lost_and_found(&mut self) -> Result<Option<InodeId>, StoreError> {
        let Some(root) = self.inode(InodeId::ROOT)? else { return Ok(None) };
        let key = EntryKey::new(InodeId::ROOT.0, name_cookie(&self.hash_key, LOST_AND_FOUND), LOST_AND_FOUND);
        if let Some(entry) = self.writer.get(key.as_bytes())?.and_then(rows::decode_entry) {
            return Ok((entry.kind == FileKind::Directory).then_some(entry.inode));
        }
        let counters = self.counters()?;
        let id = InodeId(counters.next_inode);
        self.put_counters(Counters { next_inode: id.0 + 1, ..counters })?;
        let times = Inode { accessed: root.modified, modified: root.modified, changed: root.modified, ..root };
        self.put_inode(id, &Inode { mode: 0o700, links: 2, entries: 0, born: times.modified, uid: 0, gid: 0, ..times })?;
        self.writer.put(key.as_bytes(), &rows::encode_entry(Entry { inode: id, kind: FileKind::Directory }))?;
        Ok(Some(id))
    }

    /// Makes a block of a chunk a hole.
    fn cut_block(&mut self, block: u64, key: &[u8]) -> Result<(), StoreError> {
        let Some(mut chunk) = self.writer.get(key)?.and_then(Chunk::decode) else { return Ok(()) };
        chunk.clear(block, block + 1);
        if chunk.is_empty() {
            return self.writer.delete(key);
        }
        let mut value = Vec::new();
        chunk.encode(&mut value);
        self.writer.put(key, &value)
    }

    fn put_bitmap(&mut self, segment: u32) -> Result<(), StoreError> {
        let Some(words) = self.used.get(&segment) else { return Ok(()) };
        for (piece, words) in words.chunks(PIECE_BLOCKS as usize / 64).enumerate() {
            let key = rows::bitmap_key(segment, piece as u32);
            if words.iter().all(|&word| word == 0) {
                self.writer.delete(&key)?;
                continue;
            }
            let mut value: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
            value.resize(crate::allocator::PIECE_BYTES, 0);
            self.writer.put(&key, &value)?;
        }
        Ok(())
    }
}
