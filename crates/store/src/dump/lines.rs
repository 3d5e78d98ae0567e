//! The lines of a store's dump, made one by one as they are asked for.

use std::collections::{BTreeMap, VecDeque, btree_map};
use std::io::Write;
use std::iter::Peekable;
use std::vec;

use ashlar_types::{BLOCK_BYTES, FileKind, Inode, InodeId, blocks_for};
use sha2::{Digest, Sha256};

use crate::database::Row;
use crate::dump::error::DumpError;
use crate::dump::line::{DUMP_VERSION, DumpLine, DumpSubject, InodePart, NAME_KEY, SHA256, VERSION};
use crate::dump::reader::{DumpHash, DumpSummary, DumpTally};
use crate::metadata::chunk::CHUNK_BLOCKS;
use crate::metadata::rows::{self, kind};
use crate::{Store, StoreError};

/// Bytes of a file's contents that have one line, and that are in memory at a time.
const PIECE_BYTES: u64 = 1 << 20;
const PIECE_CHUNKS: u64 = PIECE_BYTES / BLOCK_BYTES / CHUNK_BLOCKS;
/// Entries of a directory that are in memory at a time.
const ENTRIES_AT_A_TIME: usize = 1024;
/// Bytes of the hash that stands for the key of the name hash, which a dump does not show.
const NAME_KEY_BYTES: usize = 8;

const _: () = assert!(PIECE_CHUNKS > 0 && PIECE_BYTES == PIECE_CHUNKS * CHUNK_BLOCKS * BLOCK_BYTES);

impl Store {
    /// Returns the lines of the canonical dump of the applied tree, without line feeds.
    ///
    /// They are made as they are asked for, from a piece of a file or a page of a directory at a time. After an error
    /// there is nothing more.
    ///
    /// # Errors
    /// As for [`Self::check_sound`]; [`StoreError::Database`]. The lines: [`StoreError::Checksum`] at a damaged block,
    /// [`StoreError::Corrupt`], [`StoreError::Database`].
    pub fn dump_lines(&self) -> Result<DumpLines<'_>, StoreError> {
        self.check_sound()?;
        Ok(DumpLines {
            store: self,
            inodes: InodeNumbers::of(self)?,
            stage: DumpStage::FileSystem,
            ready: VecDeque::new(),
            tally: DumpTally::default(),
            piece: Vec::new(),
        })
    }

    /// Writes the canonical dump of the applied tree.
    ///
    /// # Errors
    /// As for [`Self::dump_lines`], and those of `out`.
    pub fn dump(&self, out: &mut dyn Write) -> Result<DumpSummary, DumpError> {
        let mut lines = self.dump_lines()?;
        for line in &mut lines {
            writeln!(out, "{}", line?)?;
        }
        out.flush()?;
        Ok(lines.tally.summary())
    }
}

/// The part of the dump that is made next.
enum DumpStage {
    FileSystem,
    /// The next inode's attributes.
    Inode,
    /// A directory's entries behind a cookie.
    Entries(InodeId, u64),
    /// The remaining pieces of a file that may have bytes other than zero.
    Data(InodeId, vec::IntoIter<u64>),
    /// Quotas, orphans and sessions.
    Tables,
    End,
    Over,
}

/// The lines of a store's dump.
pub struct DumpLines<'a> {
    store: &'a Store,
    inodes: InodeNumbers<'a>,
    stage: DumpStage,
    ready: VecDeque<DumpLine>,
    tally: DumpTally,
    /// The piece of a file that is hashed.
    piece: Vec<u8>,
}

impl Iterator for DumpLines<'_> {
    type Item = Result<String, StoreError>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            if let Some(line) = self.ready.pop_front() {
                let text = line.to_string();
                if line.subject != DumpSubject::End {
                    self.tally.add(&line, &text);
                }
                return Some(Ok(text));
            }
            if matches!(self.stage, DumpStage::Over) {
                return None;
            }
            if let Err(error) = self.advance() {
                self.stage = DumpStage::Over;
                return Some(Err(error));
            }
        }
    }
}

impl DumpLines<'_> {
    /// Makes some lines, or none, and moves to the next part.
    fn advance(&mut self) -> Result<(), StoreError> {
        self.stage = match std::mem::replace(&mut self.stage, DumpStage::Over) {
            DumpStage::FileSystem => {
                let digest = hash_of(&self.store.hash_key().0);
                let key = digest.to_string()[..2 * NAME_KEY_BYTES].to_owned();
                let attributes = [(VERSION, DUMP_VERSION.to_string()), (NAME_KEY, key)];
                self.ready.push_back(DumpLine::new(DumpSubject::FileSystem, attributes));
                DumpStage::Inode
            }
            DumpStage::Inode => match self.inodes.next().transpose()? {
                Some(id) => self.add_inode(id)?,
                None => DumpStage::Tables,
            },
            DumpStage::Entries(directory, after) => self.add_entries(directory, after)?,
            DumpStage::Data(inode, mut pieces) => match pieces.next() {
                Some(number) => {
                    self.add_data(inode, number * PIECE_BYTES)?;
                    DumpStage::Data(inode, pieces)
                }
                None => DumpStage::Inode,
            },
            DumpStage::Tables => {
                self.add_tables()?;
                DumpStage::End
            }
            DumpStage::End => {
                self.ready.push_back(self.tally.end_line());
                DumpStage::Over
            }
            DumpStage::Over => DumpStage::Over,
        };
        Ok(())
    }

    fn add_inode(&mut self, id: InodeId) -> Result<DumpStage, StoreError> {
        let inode = self.store.inode(id)?.ok_or(StoreError::Corrupt("an inode's row is gone"))?;
        self.ready.push_back(DumpLine::of_inode(id, &inode));
        for (name, value) in self.store.xattrs(id)? {
            self.ready.push_back(DumpLine::of_xattr(id, name, &value));
        }
        Ok(match inode.kind {
            FileKind::Directory => DumpStage::Entries(id, 0),
            FileKind::Regular if inode.blocks > 0 => DumpStage::Data(id, self.pieces(id, &inode)?.into_iter()),
            _ => DumpStage::Inode,
        })
    }

    /// Returns the pieces of a file that are not all hole. The numbers of 1 TiB take some 100 MB for a moment.
    fn pieces(&self, id: InodeId, inode: &Inode) -> Result<Vec<u64>, StoreError> {
        let end = blocks_for(inode.size).div_ceil(CHUNK_BLOCKS);
        let mut pieces = self.store.chunk_numbers(id, 0..end)?;
        pieces.iter_mut().for_each(|number| *number /= PIECE_CHUNKS);
        pieces.dedup();
        // Bytes of a small file are in no chunk.
        if pieces.is_empty() && inode.size > 0 {
            pieces.push(0);
        }
        Ok(pieces)
    }

    fn add_data(&mut self, inode: InodeId, offset: u64) -> Result<(), StoreError> {
        self.piece.resize(PIECE_BYTES as usize, 0);
        let length = self.store.read(inode, offset, &mut self.piece)?;
        let bytes = &self.piece[..length];
        // A hole, a reservation and written zeros read alike.
        if bytes.iter().any(|&byte| byte != 0) {
            let attributes = [("length", length.to_string()), (SHA256, hash_of(bytes).to_string())];
            let subject = DumpSubject::Inode(inode, InodePart::Data(offset));
            self.ready.push_back(DumpLine::new(subject, attributes));
        }
        Ok(())
    }

    fn add_entries(&mut self, directory: InodeId, after: u64) -> Result<DumpStage, StoreError> {
        let page = self.store.entries(directory, after, ENTRIES_AT_A_TIME)?;
        let Some(&(last, ..)) = page.last() else { return Ok(DumpStage::Inode) };
        for (cookie, name, entry) in page {
            self.ready.push_back(DumpLine::of_entry(directory, cookie, name.as_bytes(), entry.inode, entry.kind));
        }
        Ok(DumpStage::Entries(directory, last))
    }

    fn add_tables(&mut self) -> Result<(), StoreError> {
        let quotas = self.store.quotas().into_iter();
        self.ready.extend(quotas.map(|(key, used, limits)| DumpLine::of_quota(key, used, limits)));
        let orphans = self.store.orphans()?.into_iter();
        self.ready.extend(orphans.map(|inode| DumpLine::new(DumpSubject::Orphan(inode), [])));
        let sessions = self.store.sessions().into_iter();
        self.ready.extend(sessions.map(|(id, state)| DumpLine::of_session(id, state.generation, state.applied)));
        Ok(())
    }
}

fn hash_of(bytes: &[u8]) -> DumpHash {
    DumpHash(Sha256::digest(bytes).into())
}

/// The numbers of all inodes as applied, in order.
struct InodeNumbers<'a> {
    committed: Peekable<Box<dyn Iterator<Item = Row<'a>> + 'a>>,
    /// Those that the batches above the database have changed, and whether they are still there.
    changed: Peekable<btree_map::IntoIter<u64, bool>>,
}

impl<'a> InodeNumbers<'a> {
    fn of(store: &'a Store) -> Result<Self, StoreError> {
        let mut changed = BTreeMap::new();
        for batch in store.frozen.iter().map(|frozen| &frozen.batch).chain([&store.active]) {
            changed.extend(batch.inodes().map(|id| (id.0, batch.inode(id).is_some_and(|value| value.is_some()))));
        }
        let rows: Box<dyn Iterator<Item = Row<'a>> + 'a> = Box::new(store.snapshot.prefix(&[kind::INODE])?);
        Ok(Self { committed: rows.peekable(), changed: changed.into_iter().peekable() })
    }

    /// Returns the number of the next committed inode, without taking it.
    fn peek_committed(&mut self) -> Option<Result<u64, StoreError>> {
        let number = match self.committed.peek()? {
            Ok((key, _)) => rows::split_key1(key).filter(|(_, rest)| rest.is_empty()).map(|(number, _)| number),
            Err(_) => return self.committed.next().map(|row| row.map(|_| 0)),
        };
        Some(number.ok_or(StoreError::Corrupt("an inode's key is damaged")))
    }
}

impl Iterator for InodeNumbers<'_> {
    type Item = Result<InodeId, StoreError>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            let committed = match self.peek_committed().transpose() {
                Ok(number) => number,
                Err(error) => return Some(Err(error)),
            };
            let changed = self.changed.peek().copied();
            let number = [committed, changed.map(|(number, _)| number)].into_iter().flatten().min()?;
            if committed == Some(number) {
                self.committed.next();
            }
            let is_there = match changed.filter(|(other, _)| *other == number) {
                Some((_, is_there)) => {
                    self.changed.next();
                    is_there
                }
                None => true,
            };
            if is_there {
                return Some(Ok(InodeId(number)));
            }
        }
    }
}
