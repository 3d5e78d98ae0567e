//! The check of a committed state from end to end.
//!
//! A checker has its own view of the last committed state, so it runs beside a store in use. While it lives, freed
//! blocks are not given out again, so that the blocks of its view keep their content.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::Arc;

use ashlar_types::{
    BlockAddress, FileKind, Inode, InodeId, Name, NameHashKey, NodeNumber, QuotaAmount, QuotaKey, entry_blocks,
    name_cookie, xattr_blocks,
};
use ashlar_update::Entry;
use ashlar_update::xattr_size::attribute_bytes;

use crate::blocks::allocator::{PIECE_BLOCKS, PIECE_BYTES};
use crate::blocks::readers::StateReader;
use crate::blocks::segment::{Block, StoreSegment};
use crate::checking::problem::{CheckProgress, CheckReport, Problem};
use crate::database::Snapshot;
use crate::metadata::batch::InodeMap;
use crate::metadata::chunk::{CHUNK_BLOCKS, ExtentChunk};
use crate::metadata::rows::{self, kind};
use crate::opening::read_counters;
use crate::{INLINE_BYTES_MAX, Store, StoreError};

/// Progress is reported after so many rows or blocks.
const PROGRESS_STEP: u64 = 4096;

/// A check that is ready to run.
pub struct Checker {
    snapshot: Snapshot,
    segments: BTreeMap<u32, Arc<StoreSegment>>,
    node: NodeNumber,
    hash_key: NameHashKey,
    _reader: StateReader,
}

impl Store {
    /// Makes a check of the last committed state. Later applied updates are not checked.
    ///
    /// # Errors
    /// [`StoreError::Database`].
    pub fn checker(&self) -> Result<Checker, StoreError> {
        let reader = self.readers.begin_read();
        Ok(Checker {
            snapshot: self.database.snapshot()?,
            segments: self.segments.clone(),
            node: self.node,
            hash_key: self.hash_key,
            _reader: reader,
        })
    }

    /// Commits and then checks, here and now.
    ///
    /// # Errors
    /// Those of a commit and of [`Checker::run`].
    pub fn check(&mut self, progress: &mut dyn FnMut(CheckProgress)) -> Result<CheckReport, StoreError> {
        self.commit()?;
        let report = self.checker()?.run(progress)?;
        // Blocks that were freed meanwhile have waited for the checker's end.
        self.allocator.reclaim_all(self.readers.bound());
        Ok(report)
    }
}

/// The known facts of one inode.
struct Facts {
    inode: Inode,
    /// Entries that lead to it.
    references: u64,
    /// The place of the first of them: the directory, and the row's key.
    referrer: Option<(InodeId, Vec<u8>)>,
    entries: u64,
    subdirectories: u32,
    blocks: u64,
    has_inline: bool,
    xattr_bytes: u64,
    is_marked: bool,
}

struct Scan<'a> {
    checker: &'a Checker,
    with_checksums: bool,
    report: CheckReport,
    inodes: InodeMap<Facts>,
    /// The blocks that extents use, by segment.
    used: BTreeMap<u32, Vec<u64>>,
    /// The blocks that the bitmap rows mark, by segment.
    marked: BTreeMap<u32, Vec<u64>>,
    reserved: u64,
    /// The use according to the quota rows.
    quotas: BTreeMap<QuotaKey, QuotaAmount>,
    progress: CheckProgress,
    tell: &'a mut dyn FnMut(CheckProgress),
}

impl Checker {
    /// Runs the check.
    ///
    /// # Errors
    /// [`StoreError::Database`]; faults of the state itself are in the report.
    pub fn run(self, progress: &mut dyn FnMut(CheckProgress)) -> Result<CheckReport, StoreError> {
        Ok(self.scan(true, progress)?.report)
    }

    /// Runs the check without reading data, for repair.
    pub(crate) fn run_metadata(&self) -> Result<(CheckReport, BTreeMap<u32, Vec<u64>>), StoreError> {
        let mut tell = |_: CheckProgress| {};
        let scan = self.scan(false, &mut tell)?;
        Ok((scan.report, scan.used))
    }

    fn scan<'a>(
        &'a self,
        with_checksums: bool,
        tell: &'a mut dyn FnMut(CheckProgress),
    ) -> Result<Scan<'a>, StoreError> {
        let words = |segment: &Arc<StoreSegment>| vec![0; (segment.info().blocks as usize).div_ceil(64)];
        let empty: BTreeMap<u32, Vec<u64>> = self.segments.iter().map(|(&n, segment)| (n, words(segment))).collect();
        let total = self.snapshot.rows()?;
        let mut scan = Scan {
            checker: self,
            with_checksums,
            report: CheckReport::default(),
            inodes: InodeMap::default(),
            used: empty.clone(),
            marked: empty,
            reserved: 0,
            quotas: BTreeMap::new(),
            progress: CheckProgress { done: 0, total },
            tell,
        };
        // Inodes come first, then entries, then all that belongs to inodes.
        for row in self.snapshot.all()? {
            let (key, value) = row?;
            scan.row(key, value)?;
            scan.step();
        }
        scan.check_inodes();
        scan.check_reachable();
        scan.check_space()?;
        scan.check_quotas();
        (scan.tell)(CheckProgress { done: scan.progress.total, ..scan.progress });
        Ok(scan)
    }
}

fn printable(key: &[u8]) -> String {
    let kind = key.first().map_or('?', |&kind| if kind.is_ascii_graphic() { kind.into() } else { '?' });
    key.iter().skip(1).fold(format!("{kind}:"), |text, byte| text + &format!("{byte:02x}"))
}

impl Scan<'_> {
    fn step(&mut self) {
        self.progress.done += 1;
        if self.progress.done % PROGRESS_STEP == 0 {
            (self.tell)(self.progress);
        }
    }

    fn damaged(&mut self, key: &[u8]) {
        self.report.add(Problem::DamagedRow { key: printable(key), bytes: key.to_vec() });
    }

    fn row(&mut self, key: &[u8], value: &[u8]) -> Result<(), StoreError> {
        let place = rows::split_key1(key);
        match (key.first().copied().unwrap_or_default(), place) {
            (kind::INODE, Some((number, []))) => match rows::decode_inode(value) {
                Some(inode) => self.inode(InodeId(number), inode),
                None => self.damaged(key),
            },
            (kind::ENTRY, _) => match (rows::split_key2(key), rows::decode_entry(value)) {
                (Some((directory, cookie, name)), Some(entry)) if Name::check(name).is_ok() => {
                    self.entry(key, InodeId(directory), cookie, name, entry);
                }
                _ => self.damaged(key),
            },
            (kind::CHUNK, _) => match (rows::split_key2(key), ExtentChunk::decode(value)) {
                (Some((inode, number, [])), Some(chunk)) if number < u64::MAX / CHUNK_BLOCKS => {
                    self.chunk(key, InodeId(inode), number, &chunk)?;
                }
                _ => self.damaged(key),
            },
            (kind::INLINE, Some((number, []))) => {
                let fits = !value.is_empty() && value.len() as u64 <= INLINE_BYTES_MAX;
                match self.inodes.get_mut(&number).filter(|facts| facts.inode.kind == FileKind::Regular && fits) {
                    Some(facts) => facts.has_inline = true,
                    None => self.stray(number, key),
                }
            }
            (kind::XATTR, Some((number, name @ [_, ..]))) => match self.inodes.get_mut(&number) {
                Some(facts) => facts.xattr_bytes += attribute_bytes(name, value) as u64,
                None => self.stray(number, key),
            },
            (kind::ORPHAN, Some((number, []))) => match self.inodes.get_mut(&number) {
                Some(facts) => facts.is_marked = true,
                None => self.stray(number, key),
            },
            (kind::BITMAP, Some((place, []))) => self.bitmap(key, (place >> 32) as u32, place as u32, value),
            (kind::SESSION, _) => {
                if rows::decode_session(key, value).is_none() {
                    self.damaged(key);
                }
            }
            (kind::JOURNAL, _) => {
                if rows::decode_journal_mark(key, value).is_none() {
                    self.damaged(key);
                }
            }
            (kind::SUPERBLOCK | kind::COUNTERS, _) if key.len() == 1 => {}
            (kind::QUOTA, _) => match rows::decode_quota(key, value) {
                Some((key, used, _)) => drop(self.quotas.insert(key, used)),
                None => self.damaged(key),
            },
            (kind::INODE | kind::INLINE | kind::XATTR | kind::ORPHAN | kind::BITMAP, _) => self.damaged(key),
            _ => self.report.add(Problem::UnknownRow { key: printable(key) }),
        }
        Ok(())
    }

    fn stray(&mut self, inode: u64, key: &[u8]) {
        self.report.add(Problem::StrayRow { inode: InodeId(inode), key: printable(key), bytes: key.to_vec() });
    }

    fn inode(&mut self, id: InodeId, inode: Inode) {
        let counts = &mut self.report.counts;
        counts.inodes += 1;
        counts.directories += u64::from(inode.is_directory());
        counts.orphans += u64::from(inode.links == 0);
        counts.bytes = counts.bytes.saturating_add(if inode.kind == FileKind::Regular { inode.size } else { 0 });
        if self.with_checksums {
            self.progress.total += inode.blocks;
        }
        let facts = Facts {
            inode,
            references: 0,
            referrer: None,
            entries: 0,
            subdirectories: 0,
            blocks: 0,
            has_inline: false,
            xattr_bytes: 0,
            is_marked: false,
        };
        self.inodes.insert(id.0, facts);
    }

    fn entry(&mut self, key: &[u8], directory: InodeId, cookie: u64, name: &[u8], entry: Entry) {
        let text = || String::from_utf8_lossy(name).into_owned();
        self.report.counts.entries += 1;
        if !self.inodes.get(&directory.0).is_some_and(|facts| facts.inode.is_directory()) {
            return self.stray(directory.0, key);
        }
        if name_cookie(&self.checker.hash_key, name) != cookie {
            let problem = Problem::MisplacedEntry { directory, name: text(), bytes: key.to_vec() };
            return self.report.add(problem);
        }
        let Some(target) = self.inodes.get_mut(&entry.inode.0) else {
            let (inode, bytes) = (entry.inode, key.to_vec());
            return self.report.add(Problem::DanglingEntry { directory, name: text(), inode, bytes });
        };
        let is_directory = target.inode.is_directory();
        if is_directory && target.references > 0 {
            let (inode, bytes) = (entry.inode, key.to_vec());
            return self.report.add(Problem::SecondParent { inode, directory, name: text(), bytes });
        }
        target.references += 1;
        target.referrer.get_or_insert_with(|| (directory, key.to_vec()));
        if target.inode.kind != entry.kind {
            let (inode, bytes) = (entry.inode, key.to_vec());
            self.report.add(Problem::WrongKind { directory, name: text(), inode, bytes });
        }
        if let Some(facts) = self.inodes.get_mut(&directory.0) {
            facts.entries += 1;
            facts.subdirectories += u32::from(is_directory);
        }
    }

    fn chunk(&mut self, key: &[u8], id: InodeId, number: u64, chunk: &ExtentChunk) -> Result<(), StoreError> {
        let Some(facts) = self.inodes.get_mut(&id.0).filter(|facts| facts.inode.kind == FileKind::Regular) else {
            self.stray(id.0, key);
            return Ok(());
        };
        facts.blocks += chunk.allocated_blocks(0, CHUNK_BLOCKS);
        for run in chunk.runs() {
            let Some(address) = run.address else {
                self.reserved += run.blocks;
                continue;
            };
            for step in 0..run.blocks {
                self.block(key, id, number * CHUNK_BLOCKS + run.start + step, address.plus(step))?;
                if self.with_checksums {
                    self.step();
                }
            }
        }
        Ok(())
    }

    fn block(&mut self, key: &[u8], inode: InodeId, block: u64, address: BlockAddress) -> Result<(), StoreError> {
        let checker = self.checker;
        let segment = checker.segments.get(&address.segment());
        let segment = segment.filter(|s| address.node() == checker.node && address.block() < s.info().blocks);
        let (Some(segment), Some(used)) = (segment, self.used.get_mut(&address.segment())) else {
            self.report.add(Problem::ExtentOutside { inode, block, address, bytes: key.to_vec() });
            return Ok(());
        };
        let (word, mask) = (&mut used[address.block() as usize / 64], 1 << (address.block() % 64));
        if *word & mask != 0 {
            self.report.add(Problem::SharedBlock { inode, block, address });
        }
        *word |= mask;
        self.report.counts.blocks += 1;
        let mut content: Block = [0; ashlar_types::BLOCK_BYTES as usize];
        if self.with_checksums && !segment.load_verified(address.block(), &mut content)? {
            self.report.add(Problem::DamagedBlock { inode, block, address });
        }
        Ok(())
    }

    fn bitmap(&mut self, key: &[u8], segment: u32, piece: u32, value: &[u8]) {
        let start = (piece as usize).saturating_mul(PIECE_BLOCKS as usize / 64);
        match self.marked.get_mut(&segment).filter(|marked| start < marked.len() && value.len() == PIECE_BYTES) {
            Some(marked) => {
                for (word, bytes) in marked[start..].iter_mut().zip(value.chunks_exact(8)) {
                    *word = u64::from_le_bytes(bytes.try_into().unwrap_or_default());
                }
            }
            None => self.damaged(key),
        }
    }

    fn check_inodes(&mut self) {
        let mut numbers: Vec<u64> = self.inodes.keys().copied().collect();
        numbers.sort_unstable();
        for number in numbers {
            let id = InodeId(number);
            let Some(facts) = self.inodes.get(&number) else { continue };
            let inode = &facts.inode;
            let is_root = id == InodeId::ROOT;
            let expected = match (inode.is_directory(), facts.references > 0 || is_root) {
                (true, true) => 2 + facts.subdirectories,
                (true, false) => 0,
                (false, _) => u32::try_from(facts.references).unwrap_or(u32::MAX),
            };
            // One that should have links and has no entry is unreachable; that is another problem.
            if inode.links != expected && (facts.references > 0 || is_root) {
                self.report.add(Problem::WrongLinks { inode: id, found: inode.links, expected });
            } else if inode.links == 0 && !facts.is_marked {
                self.report.add(Problem::UnmarkedOrphan { inode: id });
            }
            if facts.is_marked && (inode.links > 0 || facts.references > 0) {
                self.report.add(Problem::MarkedOrphan { inode: id });
            }
            if inode.entries != facts.entries {
                let (found, expected) = (inode.entries, facts.entries);
                self.report.add(Problem::WrongEntries { inode: id, found, expected });
            }
            if facts.has_inline && facts.blocks > 0 {
                self.report.add(Problem::InlineAndBlocks { inode: id });
            } else {
                let expected = facts.blocks + u64::from(facts.has_inline);
                if inode.blocks != expected {
                    self.report.add(Problem::WrongBlocks { inode: id, found: inode.blocks, expected });
                }
            }
            let parent = if is_root { Some(id) } else { facts.referrer.as_ref().map(|(directory, _)| *directory) };
            if let Some(expected) = parent.filter(|&parent| inode.is_directory() && inode.parent != parent) {
                self.report.add(Problem::WrongParent { inode: id, found: inode.parent, expected });
            }
        }
    }

    /// Finds unreachable inodes: those without entries, and circles of directories.
    fn check_reachable(&mut self) {
        if !self.inodes.get(&InodeId::ROOT.0).is_some_and(|root| root.inode.is_directory()) {
            return self.report.add(Problem::NoRoot);
        }
        let mut seen: HashSet<u64> = HashSet::from([InodeId::ROOT.0]);
        let mut found = Vec::new();
        let mut numbers: Vec<u64> = self.inodes.keys().copied().collect();
        numbers.sort_unstable();
        for &number in &numbers {
            let Some(facts) = self.inodes.get(&number) else { continue };
            if number != InodeId::ROOT.0 && facts.references == 0 && facts.inode.links > 0 {
                found.push(Problem::Unreachable { inode: InodeId(number), through: None });
            }
            if !facts.inode.is_directory() {
                continue;
            }
            // Up from here until something known, without entry, or on this very way.
            let (mut way, mut at) = (Vec::new(), number);
            let mut on_way = HashSet::new();
            while !seen.contains(&at) {
                if !on_way.insert(at) {
                    let first = way.iter().position(|&(step, _)| step == at).unwrap_or(0);
                    let lowest = way[first..].iter().min_by_key(|(step, _): &&(u64, &Vec<u8>)| *step);
                    if let Some(&(inode, key)) = lowest {
                        found.push(Problem::Unreachable { inode: InodeId(inode), through: Some(key.clone()) });
                    }
                    break;
                }
                match self.inodes.get(&at).and_then(|facts| facts.referrer.as_ref()) {
                    Some((directory, key)) => {
                        way.push((at, key));
                        at = directory.0;
                    }
                    None => break,
                }
            }
            // The directories on the way need no second check, whatever the result.
            seen.extend(on_way);
        }
        for problem in found {
            self.report.add(problem);
        }
    }

    /// Compares the recorded usage with the sum over the inodes.
    fn check_quotas(&mut self) {
        let mut counted = BTreeMap::<QuotaKey, QuotaAmount>::new();
        for facts in self.inodes.values() {
            for key in facts.inode.quota_keys() {
                let used = counted.entry(key).or_default();
                used.blocks += facts.blocks + u64::from(facts.has_inline && facts.blocks == 0);
                used.blocks += entry_blocks(facts.entries) + xattr_blocks(facts.xattr_bytes);
                used.inodes += 1;
            }
        }
        let recorded = std::mem::take(&mut self.quotas);
        let keys: BTreeSet<QuotaKey> = recorded.keys().chain(counted.keys()).copied().collect();
        for key in keys {
            let of = |amounts: &BTreeMap<QuotaKey, QuotaAmount>| amounts.get(&key).copied().unwrap_or_default();
            let (found, expected) = (of(&recorded), of(&counted));
            if found != expected {
                self.report.add(Problem::WrongQuota { key, found, expected });
            }
        }
    }

    fn check_space(&mut self) -> Result<(), StoreError> {
        for (&segment, used) in &self.used {
            let marked = &self.marked[&segment];
            let differs = used.iter().zip(marked).map(|(a, b)| u64::from((a ^ b).count_ones())).sum();
            if differs > 0 {
                self.report.add(Problem::WrongBitmap { segment, blocks: differs });
            }
        }
        let counters = match read_counters(&self.checker.snapshot, self.checker.node) {
            Ok(counters) => counters,
            Err(StoreError::Corrupt(_)) => {
                self.damaged(&[kind::COUNTERS]);
                return Ok(());
            }
            Err(error) => return Err(error),
        };
        if counters.reserved_blocks != self.reserved {
            let (found, expected) = (counters.reserved_blocks, self.reserved);
            self.report.add(Problem::WrongReserved { found, expected });
        }
        // Other nodes give out their own numbers.
        let own = self.inodes.keys().filter(|&&number| InodeId(number).is_of(self.checker.node));
        if let Some(&used) = own.max().filter(|&&used| used >= counters.next_inode) {
            self.report.add(Problem::WrongNextInode { found: counters.next_inode, used });
        }
        Ok(())
    }
}
