//! The repair of problems that a check has found.
//!
//! Each problem has a small remedy of its own in the rows. The counts that a remedy changes are the next round's
//! problems. So repair runs rounds of check and remedy, each in one transaction, until no problem with a remedy is
//! left.

use std::collections::BTreeMap;
use std::ops::Range;

use ashlar_types::{FileKind, Inode, InodeId, NameHashKey, NodeNumber, QuotaAmount, SessionId, Timestamp, name_cookie};
use ashlar_update::Entry;

use crate::blocks::allocator::{Allocator, PIECE_BLOCKS};
use crate::checking::problem::{CheckReport, Problem};
use crate::database::WriteTransaction;
use crate::format::root_directory;
use crate::metadata::chunk::ExtentChunk;
use crate::metadata::rows::{self, EntryKey, StoredCounters, kind};
use crate::{Store, StoreError};

/// More rounds than any damage needs: strays, reattachment, counts, and a last one that finds nothing.
const ROUNDS_MAX: usize = 8;
const LOST_AND_FOUND: &[u8] = b"lost+found";

impl Store {
    /// Commits the applied updates, repairs the metadata, and returns the result of a check afterwards.
    ///
    /// No session may be using the store: blocks and inodes change under it.
    ///
    /// # Errors
    /// [`StoreError::CommitUnderWay`] while a commit, a checker or a copy is at work; those of the database.
    pub fn repair(&mut self) -> Result<CheckReport, StoreError> {
        if !self.damaged {
            self.commit()?;
        }
        if self.frozen.is_some() || self.readers.is_any() || self.has_copies() {
            return Err(StoreError::CommitUnderWay);
        }
        // Rows change past the batches from here on.
        self.seen.forget_all();
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

    fn remedy(&self, report: &CheckReport, used: &BTreeMap<u32, Vec<u64>>) -> Result<(), StoreError> {
        let writer = self.database.write(2 * report.problems.len() as u64 + 64, 1 << 20)?;
        let mut remedy = Remedy { writer, node: self.node, hash_key: self.hash_key, used };
        for problem in &report.problems {
            remedy.apply(problem)?;
        }
        remedy.writer.commit()
    }

    /// Reloads the state of the database.
    fn reload(&mut self) -> Result<(), StoreError> {
        self.snapshot = self.database.snapshot()?;
        self.seen.forget_all();
        self.committed_bytes = self.snapshot.used_bytes()?;
        self.stored = crate::opening::read_counters(&self.snapshot, self.node)?;
        self.counters = self.stored;
        self.inode_end = self.snapshot.inode_end()?;
        self.absent_inode.set(None);
        self.absent_entry.set(None);
        self.allocator = Allocator::new(self.node);
        self.readers.note_committed(self.allocator.frozen_batches());
        for segment in self.segments.values() {
            self.allocator.add_segment(segment.info().number, segment.info().blocks);
        }
        self.load_rows()
    }
}

struct Remedy<'a> {
    writer: WriteTransaction<'a>,
    node: NodeNumber,
    hash_key: NameHashKey,
    used: &'a BTreeMap<u32, Vec<u64>>,
}

impl Remedy<'_> {
    fn apply(&mut self, problem: &Problem) -> Result<(), StoreError> {
        match problem {
            Problem::UnknownRow { .. } | Problem::SharedBlock { .. } | Problem::DamagedBlock { .. } => Ok(()),
            Problem::NoRoot => self.put_inode(InodeId::ROOT, &root_directory(Timestamp::default())),
            Problem::DamagedRow { bytes, .. } if **bytes == [kind::COUNTERS] => {
                // Counters must stay above all used numbers. Later rounds raise a counter that is too low.
                let ahead = |numbers: Range<u64>| numbers.start + (numbers.end - numbers.start) / 2;
                self.put_counters(StoredCounters {
                    next_inode: ahead(InodeId::numbers_of(self.node)),
                    next_session: ahead(SessionId::numbers_of(self.node)),
                    reserved_blocks: 0,
                })
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
            Problem::ExtentOutside { block, bytes, .. } => {
                self.cut_block(*block % crate::metadata::chunk::CHUNK_BLOCKS, bytes)
            }
            Problem::WrongBitmap { segment, .. } => self.put_bitmap(*segment),
            Problem::WrongReserved { expected, .. } => {
                let counters = self.counters()?;
                self.put_counters(StoredCounters { reserved_blocks: *expected, ..counters })
            }
            Problem::WrongQuota { key, expected, .. } => {
                let row = rows::quota_row_key(*key);
                let said = self.writer.get(&row)?.and_then(|value| rows::decode_quota(&row, value));
                let limits = said.map_or_else(Default::default, |(_, _, limits)| limits);
                if *expected == QuotaAmount::default() && limits.is_none() {
                    return self.writer.delete(&row);
                }
                self.writer.put(&row, &rows::encode_quota(*expected, limits))
            }
            Problem::WrongNextInode { used, .. } => {
                let counters = self.counters()?;
                self.put_counters(StoredCounters { next_inode: counters.next_inode.max(used + 1), ..counters })
            }
        }
    }

    fn counters(&self) -> Result<StoredCounters, StoreError> {
        let row = self.writer.get(&[kind::COUNTERS])?;
        row.and_then(rows::decode_counters).ok_or(StoreError::Corrupt("the counters' row is damaged"))
    }

    fn put_counters(&mut self, counters: StoredCounters) -> Result<(), StoreError> {
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

    /// Returns the directory `/lost+found`, and makes it if it is missing.
    ///
    /// Returns `None` while the root is missing, or if another file has the name.
    fn lost_and_found(&mut self) -> Result<Option<InodeId>, StoreError> {
        let Some(root) = self.inode(InodeId::ROOT)? else { return Ok(None) };
        let key = EntryKey::new(InodeId::ROOT.0, name_cookie(&self.hash_key, LOST_AND_FOUND), LOST_AND_FOUND);
        if let Some(entry) = self.writer.get(key.as_bytes())?.and_then(rows::decode_entry) {
            return Ok((entry.kind == FileKind::Directory).then_some(entry.inode));
        }
        let counters = self.counters()?;
        let id = InodeId(counters.next_inode);
        if !id.is_of(self.node) {
            return Err(StoreError::NumbersExhausted { node: self.node, what: "inode numbers" });
        }
        self.put_counters(StoredCounters { next_inode: id.0 + 1, ..counters })?;
        let times = Inode { accessed: root.modified, modified: root.modified, changed: root.modified, ..root };
        self.put_inode(
            id,
            &Inode { mode: 0o700, links: 2, entries: 0, born: times.modified, uid: 0, gid: 0, ..times },
        )?;
        self.writer.put(key.as_bytes(), &rows::encode_entry(Entry { inode: id, kind: FileKind::Directory }))?;
        Ok(Some(id))
    }

    /// Makes a block of a chunk a hole.
    fn cut_block(&mut self, block: u64, key: &[u8]) -> Result<(), StoreError> {
        let Some(mut chunk) = self.writer.get(key)?.and_then(ExtentChunk::decode) else { return Ok(()) };
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
            value.resize(crate::blocks::allocator::PIECE_BYTES, 0);
            self.writer.put(&key, &value)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use ashlar_types::{BlockAddress, LogPosition, NodeNumber, QuotaKey, QuotaLimits, SessionId};
    use ashlar_update::{Create, Update};

    use super::*;
    use crate::metadata::chunk::Run;
    use crate::test_media::{StoreTestArena, TestMedium, on_both_databases};

    const DIRECTORY: InodeId = InodeId(16);
    const FILE: InodeId = InodeId(17);
    const SMALL: InodeId = InodeId(18);

    /// `/d/`, `/d/file` with three blocks in two chunks, `/d/small` with inline bytes and an attribute, `/e/`.
    fn sample(medium: TestMedium) -> (StoreTestArena, Store) {
        let arena = StoreTestArena::new(medium, 16 << 20);
        let mut store = arena.open();
        assert_eq!(store.allocate_inodes(8).unwrap().start, InodeId::FIRST_FREE.0);
        let at = Timestamp::default();
        let make = |inode, parent, name: &'static [u8], kind| {
            let (uid, gid, device) = (0, 0, 0);
            let (target, acl_access, acl_default) = (&[][..], &[][..], &[][..]);
            Update::Create(Create {
                inode,
                parent,
                name,
                kind,
                mode: 0o755,
                uid,
                gid,
                device,
                at,
                target,
                acl_access,
                acl_default,
            })
        };
        let write = |inode, offset, data| Update::Write { inode, offset, at, strip: false, data };
        let updates = [
            make(DIRECTORY, InodeId::ROOT, b"d", FileKind::Directory),
            make(FILE, DIRECTORY, b"file", FileKind::Regular),
            make(SMALL, DIRECTORY, b"small", FileKind::Regular),
            make(InodeId(19), InodeId::ROOT, b"e", FileKind::Directory),
            write(FILE, 0, &[1; 5000]),
            write(FILE, 1_000_000, &[2; 10]),
            write(SMALL, 0, b"bytes"),
            Update::SetXattr { inode: SMALL, name: b"user.x", value: b"y", mode: None, at },
        ];
        for update in &updates {
            store.apply(SessionId::SHARED_FS, LogPosition(0), update, &|_| true).unwrap();
        }
        store.commit().unwrap();
        assert!(store.check(&mut |_| {}).unwrap().is_clean());
        (arena, store)
    }

    /// Damages the rows of the sample, and checks that the check finds `expected` and that repair leaves nothing.
    fn damage(change: impl Fn(&mut Remedy<'_>), expected: impl Fn(&[Problem]) -> bool) -> Store {
        damage_on(TestMedium::Memory, &change, &expected);
        damage_on(TestMedium::Lmdb, &change, &expected)
    }

    fn damage_on(
        medium: TestMedium,
        change: &impl Fn(&mut Remedy<'_>),
        expected: &impl Fn(&[Problem]) -> bool,
    ) -> Store {
        let (arena, store) = sample(medium);
        let used = BTreeMap::new();
        {
            let writer = store.database.write(8, 4096).unwrap();
            let mut remedy = Remedy { writer, node: store.node, hash_key: store.hash_key, used: &used };
            change(&mut remedy);
            remedy.writer.commit().unwrap();
        }
        drop(store);
        let mut store = arena.open();
        let found = store.check(&mut |_| {}).unwrap().problems;
        assert!(expected(&found), "{found:#?}");
        assert!(found.iter().all(Problem::is_repairable));
        assert!(found.iter().all(|problem| problem.to_string().len() > 20));
        let left = store.repair().unwrap();
        assert!(left.is_clean(), "{:#?}", left.problems);
        drop(store);
        let mut store = arena.open();
        assert!(store.check(&mut |_| {}).unwrap().is_clean());
        let update = Update::Accessed { inode: InodeId::ROOT, at: Timestamp { seconds: 9, nanoseconds: 0 } };
        store.apply(SessionId::SHARED_FS, LogPosition(0), &update, &|_| true).unwrap();
        store
    }

    fn entry_key(store: &Remedy<'_>, directory: InodeId, name: &[u8]) -> Vec<u8> {
        EntryKey::new(directory.0, name_cookie(&store.hash_key, name), name).as_bytes().to_vec()
    }

    #[test]
    fn wrong_counts_and_parents_are_corrected() {
        let store = damage(
            |rows| {
                rows.change(DIRECTORY, |inode| (inode.links, inode.entries, inode.parent) = (9, 7, FILE)).unwrap();
                rows.change(FILE, |inode| (inode.links, inode.blocks) = (4, 1000)).unwrap();
            },
            |found| {
                let wrong = |inode, found, expected| Problem::WrongLinks { inode, found, expected };
                found.len() == 5
                    && found.contains(&wrong(DIRECTORY, 9, 2))
                    && found.contains(&wrong(FILE, 4, 1))
                    && found.contains(&Problem::WrongEntries { inode: DIRECTORY, found: 7, expected: 2 })
                    && found.contains(&Problem::WrongBlocks { inode: FILE, found: 1000, expected: 3 })
                    && found.contains(&Problem::WrongParent { inode: DIRECTORY, found: FILE, expected: InodeId::ROOT })
            },
        );
        assert_eq!(store.inode(DIRECTORY).unwrap().unwrap().parent, InodeId::ROOT);
    }

    #[test]
    fn unreachable_inodes_move_to_lost_and_found() {
        let store = damage(
            |rows| {
                let key = entry_key(rows, InodeId::ROOT, b"d");
                rows.writer.delete(&key).unwrap();
                let key = entry_key(rows, DIRECTORY, b"small");
                rows.writer.delete(&key).unwrap();
            },
            |found| {
                let lost = |inode| found.contains(&Problem::Unreachable { inode, through: None });
                lost(DIRECTORY) && lost(SMALL) && !lost(FILE)
            },
        );
        let lost = store.entry(InodeId::ROOT, b"lost+found").unwrap().unwrap().inode;
        assert_eq!(store.entry(lost, b"#16").unwrap().unwrap().inode, DIRECTORY);
        assert_eq!(store.entry(lost, b"#18").unwrap().unwrap().inode, SMALL);
        assert_eq!(store.inode(DIRECTORY).unwrap().unwrap().parent, lost);
        assert!(store.entry(DIRECTORY, b"file").unwrap().is_some());
    }

    #[test]
    fn directory_cycle_is_broken() {
        let store = damage(
            |rows| {
                // `/d` moves to `/e/d`, and `/e` to `/d/e`.
                for (from, name, to, id) in [(1, b"d", 19, 16u64), (1, b"e", 16, 19)] {
                    let key = entry_key(rows, InodeId(from), name);
                    let value = rows.writer.get(&key).unwrap().unwrap().to_vec();
                    rows.writer.delete(&key).unwrap();
                    let key = entry_key(rows, InodeId(to), name);
                    rows.writer.put(&key, &value).unwrap();
                    rows.change(InodeId(id), |inode| inode.parent = InodeId(to)).unwrap();
                }
            },
            |found| found.iter().any(|p| matches!(p, Problem::Unreachable { inode: DIRECTORY, through: Some(_) })),
        );
        let lost = store.entry(InodeId::ROOT, b"lost+found").unwrap().unwrap().inode;
        assert_eq!(store.entry(lost, b"#16").unwrap().unwrap().inode, DIRECTORY);
        assert_eq!(store.entry(DIRECTORY, b"e").unwrap().unwrap().inode, InodeId(19));
    }

    #[test]
    fn dangling_entries_are_dropped_and_wrong_ones_corrected() {
        let store = damage(
            |rows| {
                let put = |rows: &mut Remedy<'_>, key: &[u8], inode, kind| {
                    rows.writer.put(key, &rows::encode_entry(Entry { inode, kind })).unwrap();
                };
                let key = entry_key(rows, DIRECTORY, b"ghost");
                put(rows, &key, InodeId(500), FileKind::Regular);
                let key = entry_key(rows, DIRECTORY, b"file");
                put(rows, &key, FILE, FileKind::Fifo);
                let key = entry_key(rows, DIRECTORY, b"again");
                put(rows, &key, InodeId(19), FileKind::Directory);
                let key = EntryKey::new(19, 12345, b"strayed");
                put(rows, key.as_bytes(), SMALL, FileKind::Regular);
            },
            |found| {
                found.iter().any(|p| matches!(p, Problem::DanglingEntry { inode: InodeId(500), .. }))
                    && found.iter().any(|p| matches!(p, Problem::WrongKind { inode: FILE, .. }))
                    && found.iter().any(|p| matches!(p, Problem::SecondParent { inode: InodeId(19), .. }))
                    && found.iter().any(|p| matches!(p, Problem::MisplacedEntry { directory: InodeId(19), .. }))
            },
        );
        assert_eq!(store.entry(DIRECTORY, b"file").unwrap().unwrap().kind, FileKind::Regular);
        assert_eq!(store.entry(InodeId(19), b"strayed").unwrap().unwrap().inode, SMALL);
        assert_eq!(store.inode(SMALL).unwrap().unwrap().links, 2);
    }

    #[test]
    fn damaged_and_stray_rows_are_dropped() {
        let store = damage(
            |rows| {
                let writer = &mut rows.writer;
                writer.put(&rows::key1(kind::INODE, FILE.0), b"garbage").unwrap();
                writer.put(&rows::key1(kind::ORPHAN, 700), &[]).unwrap();
                writer.put(&rows::key1(kind::ORPHAN, SMALL.0), &[]).unwrap();
                writer.put(&rows::key1(kind::INLINE, 701), b"bytes").unwrap();
                writer.put(&rows::xattr_key(InodeId(702), b"user.x"), b"bytes").unwrap();
                writer.put(&rows::bitmap_key(9, 0), b"no such segment").unwrap();
                writer.put(&rows::key1(kind::SESSION, 8), b"?").unwrap();
            },
            |found| {
                let count = |test: fn(&Problem) -> bool| found.iter().filter(|p| test(p)).count();
                count(|p| matches!(p, Problem::DamagedRow { .. })) == 3
                    && count(|p| matches!(p, Problem::StrayRow { .. })) == 5
                    && count(|p| matches!(p, Problem::MarkedOrphan { inode: SMALL })) == 1
            },
        );
        assert_eq!(store.inode(FILE).unwrap(), None);
        assert_eq!(store.entry(DIRECTORY, b"file").unwrap(), None);
        assert_eq!(store.space().blocks_free, store.space().blocks_total);
    }

    #[test]
    fn bitmaps_reservations_and_extents_are_made_to_agree() {
        let store = damage(
            |rows| {
                let key = rows::bitmap_key(0, 0);
                let mut value = rows.writer.get(&key).unwrap().unwrap().to_vec();
                value[0] ^= 0b1001;
                rows.writer.put(&key, &value).unwrap();
                let key = rows::key2(kind::CHUNK, FILE.0, 0);
                let mut chunk = ExtentChunk::decode(rows.writer.get(&key).unwrap().unwrap()).unwrap();
                chunk.set(Run { start: 1, blocks: 1, address: Some(BlockAddress::new(NodeNumber::FIRST, 77, 5)) });
                chunk.set(Run { start: 60, blocks: 4, address: None });
                let mut value = Vec::new();
                chunk.encode(&mut value);
                rows.writer.put(&key, &value).unwrap();
                let counters = rows.counters().unwrap();
                rows.put_counters(StoredCounters { next_inode: 17, ..counters }).unwrap();
            },
            |found| {
                found.iter().any(|p| matches!(p, Problem::WrongBitmap { segment: 0, .. }))
                    && found.iter().any(|p| matches!(p, Problem::ExtentOutside { inode: FILE, block: 1, .. }))
                    && found.contains(&Problem::WrongReserved { found: 0, expected: 4 })
                    && found.contains(&Problem::WrongNextInode { found: 17, used: 19 })
            },
        );
        let space = store.space();
        assert_eq!((space.blocks_reserved, space.blocks_total - space.blocks_free), (4, 6));
        assert_eq!(store.inode(FILE).unwrap().unwrap().blocks, 6);
    }

    #[test]
    fn usage_is_recounted_and_limits_stay() {
        let limits = QuotaLimits { blocks: Some(100), inodes: None };
        let store = damage(
            |rows| {
                let wrong = rows::encode_quota(QuotaAmount { blocks: 9, inodes: 9 }, limits);
                rows.writer.put(&rows::quota_row_key(QuotaKey::User(0)), &wrong).unwrap();
                rows.writer.put(&rows::quota_row_key(QuotaKey::User(5)), &wrong).unwrap();
                rows.writer.delete(&rows::quota_row_key(QuotaKey::Group(0))).unwrap();
                rows.writer.put(&rows::key1(kind::QUOTA, 77), b"?").unwrap();
            },
            |found| {
                let wrong = |p: &&Problem| matches!(p, Problem::WrongQuota { .. });
                found.len() == 4 && found.iter().filter(wrong).count() == 3
            },
        );
        let used = QuotaAmount { blocks: 4, inodes: 5 };
        assert_eq!(store.quota(QuotaKey::User(0)), (used, limits));
        assert_eq!(store.quota(QuotaKey::User(5)), (QuotaAmount::default(), limits));
        assert_eq!(store.quota(QuotaKey::Group(0)), (used, QuotaLimits::default()));
    }

    #[test]
    fn lost_root_and_counters_are_recreated() {
        let mut store = damage(
            |rows| rows.writer.delete(&rows::key1(kind::INODE, InodeId::ROOT.0)).unwrap(),
            |found| found.contains(&Problem::NoRoot),
        );
        assert!(store.inode(InodeId::ROOT).unwrap().unwrap().is_directory());
        assert!(store.allocate_inodes(1).unwrap().start >= 20);
        let mut store = damage(
            |rows| rows.writer.put(&[kind::COUNTERS], b"?").unwrap(),
            |found| matches!(found, [Problem::DamagedRow { .. }]),
        );
        assert!(store.allocate_inodes(1).unwrap().start >= InodeId::COUNTER_END / 2);
    }

    fn a_shared_block_is_reported_and_left(medium: TestMedium) {
        let (arena, store) = sample(medium);
        let mut writer = store.database.write(1, 100).unwrap();
        let key = rows::key2(kind::CHUNK, FILE.0, 0);
        let value = writer.get(&key).unwrap().unwrap().to_vec();
        writer.put(&rows::key2(kind::CHUNK, FILE.0, 5), &value).unwrap();
        writer.commit().unwrap();
        drop(store);
        let mut store = arena.open();
        let is_shared = |p: &&Problem| matches!(p, Problem::SharedBlock { inode: FILE, block: 640 | 641, .. });
        let found = store.check(&mut |_| {}).unwrap().problems;
        // With it, the file's count and the usage of its owner and its group are wrong.
        assert_eq!((found.len(), found.iter().filter(is_shared).count()), (5, 2), "{found:#?}");
        let left = store.repair().unwrap().problems;
        assert_eq!((left.len(), left.iter().filter(is_shared).count()), (2, 2), "{left:#?}");
    }

    on_both_databases!(a_shared_block_is_reported_and_left);
}
