//! The metadata database in LMDB, in three tables.

use std::fs::File;
use std::ops::Bound;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use ashlar_pmem::{Arena, MediumKind};
use heed::types::Bytes;
use heed::{CommitOrAbort, EnvFlags, EnvOpenOptions, MdbError, PutFlags, RoTxn, RwTxn, WithoutTls};
use rustix::fs::{FallocateFlags, fallocate};

use crate::StoreError;
use crate::database::fault::DatabaseError;
use crate::database::layout::{MAP_BYTES_MIN, PAGE_BYTES, Row, TableName};

type Env = heed::Env<WithoutTls>;
type Table = heed::Database<'static, Bytes, Bytes>;

/// Pages that a commit may take beside those of its rows: the free list and the tables' upper levels.
const COMMIT_PAGES_SPARE: u64 = 1024;
#[derive(Clone, Copy, Debug)]
struct Tables {
    inodes: Table,
    entries: Table,
    rows: Table,
}

impl Tables {
    fn of(&self, key: &[u8]) -> Table {
        match TableName::of(key) {
            TableName::Inodes => self.inodes,
            TableName::Entries => self.entries,
            TableName::Rows => self.rows,
        }
    }
}

/// LMDB's environment in an arena.
#[derive(Debug)]
pub struct LmdbDatabase {
    env: Env,
    tables: Tables,
    map_bytes: u64,
    /// The database's file, where pages must be allocated before LMDB writes to them through its mapping: a full file
    /// system would be a fault there, not an error.
    reserve: Option<File>,
    /// Bytes of the file whose pages are allocated.
    reserved: AtomicU64,
}

impl From<heed::Error> for StoreError {
    fn from(error: heed::Error) -> Self {
        Self::Database(match error {
            heed::Error::Mdb(MdbError::MapFull) => DatabaseError::Full,
            other => DatabaseError::Lmdb(other),
        })
    }
}

impl LmdbDatabase {
    /// Opens the arena's metadata database, and creates it if it is missing.
    pub fn open(arena: &Arena) -> Result<Self, StoreError> {
        let directory = arena.metadata_dir();
        std::fs::create_dir_all(&directory).map_err(StoreError::io("cannot make the metadata directory"))?;
        let map_bytes = (arena.summary().size_bytes / 2).max(MAP_BYTES_MIN) / PAGE_BYTES * PAGE_BYTES;
        let kind = arena.medium().kind;
        let mut flags = EnvFlags::NO_READ_AHEAD | EnvFlags::NO_MEM_INIT;
        // Memory has nothing to sync to. On a disk LMDB writes with system calls, whose failures are errors.
        flags.set(EnvFlags::NO_SYNC, kind == MediumKind::Memory);
        flags.set(EnvFlags::WRITE_MAP, kind != MediumKind::Disk);
        let env = open_environment(&directory, map_bytes, flags)?;
        let tables = env
            .create_databases_and_commit(env.write_txn()?, |opener, txn| -> Result<_, heed::Error> {
                let inodes = opener.create_database(txn, Some("inodes"))?;
                let entries = opener.create_database(txn, Some("entries"))?;
                let rows = opener.create_database(txn, Some("rows"))?;
                Ok(CommitOrAbort::<_, StoreError>::Commit((inodes, entries, rows)))
            })?
            .commit()
            .map(|(inodes, entries, rows)| Tables { inodes, entries, rows })
            .ok_or(StoreError::NotFormatted)?;
        let reserve = match kind {
            MediumKind::Disk => None,
            MediumKind::Pmem | MediumKind::Memory => Some(
                File::options()
                    .write(true)
                    .open(directory.join("data.mdb"))
                    .map_err(StoreError::io("cannot open the metadata file"))?,
            ),
        };
        Ok(Self { env, tables, map_bytes, reserve, reserved: AtomicU64::new(0) })
    }

    /// Whether the arena has a metadata database.
    pub fn exists(arena: &Arena) -> bool {
        arena.metadata_dir().join("data.mdb").exists()
    }

    /// Bytes of address space for the pages.
    pub fn map_bytes(&self) -> u64 {
        self.map_bytes
    }

    /// Returns a view of the committed state.
    pub fn snapshot(&self) -> Result<LmdbSnapshot, StoreError> {
        Ok(LmdbSnapshot { txn: self.env.clone().static_read_txn()?, tables: self.tables })
    }

    /// Begins a transaction that is going to write `rows` rows of `bytes` bytes in all.
    pub fn write(&self, rows: u64, bytes: u64) -> Result<LmdbTransaction<'_>, StoreError> {
        let txn = self.env.write_txn()?;
        let mut writer = LmdbTransaction { txn, tables: self.tables, last_inode: None };
        if let Some(file) = &self.reserve {
            let (pages, depth) = writer.tree_pages()?;
            let fresh = (2 * bytes + 64 * rows).div_ceil(PAGE_BYTES);
            let growth = fresh + pages.min(rows * depth) + COMMIT_PAGES_SPARE;
            let end = ((self.env.info().last_page_number as u64 + 1 + growth) * PAGE_BYTES).min(self.map_bytes);
            // The transaction keeps other writers out, so no other thread changes the mark.
            let start = self.reserved.load(Ordering::Relaxed);
            if end > start {
                fallocate(file, FallocateFlags::empty(), start, end - start)
                    .map_err(|error| StoreError::Io { what: "no room for metadata", source: error.into() })?;
                self.reserved.store(end, Ordering::Relaxed);
            }
        }
        writer.last_inode = self.tables.inodes.last(&writer.txn)?.map(|(key, _)| key.to_vec());
        Ok(writer)
    }
}

#[allow(unsafe_code)]
fn open_environment(directory: &Path, map_bytes: u64, flags: EnvFlags) -> Result<Env, heed::Error> {
    let mut options = EnvOpenOptions::new().read_txn_without_tls();
    options.map_size(map_bytes as usize).max_dbs(3).max_readers(126);
    // SAFETY: the arena's lock file, which `Arena` holds, keeps every other process out of the directory, so no process
    // changes the file under the mapping; the flags give up durability (on memory) and read-ahead, never the lock or
    // consistency.
    unsafe { options.flags(flags).open(directory) }
}

/// A view of the committed state at one moment.
pub struct LmdbSnapshot {
    txn: RoTxn<'static, WithoutTls>,
    tables: Tables,
}

impl LmdbSnapshot {
    /// The row's value.
    #[inline]
    pub fn get(&self, key: &[u8]) -> Result<Option<&[u8]>, StoreError> {
        Ok(self.tables.of(key).get(&self.txn, key)?)
    }

    /// The rows from `from` on, in key order, to the end of `from`'s table.
    pub fn from<'a>(&'a self, from: &'a [u8]) -> Result<impl Iterator<Item = Row<'a>>, StoreError> {
        let bounds = (Bound::Included(from), Bound::Unbounded);
        Ok(self.tables.of(from).range(&self.txn, &bounds)?.map(|row| row.map_err(StoreError::from)))
    }

    /// The rows whose keys begin with `prefix`, which is not empty, in key order.
    pub fn prefix<'a>(&'a self, prefix: &'a [u8]) -> Result<impl Iterator<Item = Row<'a>>, StoreError> {
        Ok(self.tables.of(prefix).prefix_iter(&self.txn, prefix)?.map(|row| row.map_err(StoreError::from)))
    }

    /// The key of the last inode's row.
    pub fn last_inode(&self) -> Result<Option<&[u8]>, StoreError> {
        Ok(self.tables.inodes.last(&self.txn)?.map(|(key, _)| key))
    }

    /// All rows.
    pub fn all(&self) -> Result<impl Iterator<Item = Row<'_>>, StoreError> {
        let tables = self.tables;
        let (inodes, entries) = (tables.inodes.iter(&self.txn)?, tables.entries.iter(&self.txn)?);
        Ok(inodes.chain(entries).chain(tables.rows.iter(&self.txn)?).map(|row| row.map_err(StoreError::from)))
    }

    /// How many rows there are.
    pub fn rows(&self) -> Result<u64, StoreError> {
        let Tables { inodes, entries, rows } = self.tables;
        Ok(inodes.len(&self.txn)? + entries.len(&self.txn)? + rows.len(&self.txn)?)
    }

    /// How many inodes and how many entries there are.
    pub fn inodes_and_entries(&self) -> Result<(u64, u64), StoreError> {
        Ok((self.tables.inodes.len(&self.txn)?, self.tables.entries.len(&self.txn)?))
    }

    /// Bytes of the pages that the tables take.
    pub fn used_bytes(&self) -> Result<u64, StoreError> {
        Ok(tree_pages(&self.tables, &self.txn)?.0 * PAGE_BYTES)
    }
}

fn tree_pages(tables: &Tables, txn: &RoTxn<'_>) -> Result<(u64, u64), StoreError> {
    let (mut pages, mut depth) = (0, 1);
    for table in [tables.inodes, tables.entries, tables.rows] {
        let stat = table.stat(txn)?;
        pages += (stat.branch_pages + stat.leaf_pages + stat.overflow_pages) as u64;
        depth = depth.max(u64::from(stat.depth));
    }
    Ok((pages, depth))
}

/// A transaction that writes. Dropped without [`Self::commit`], it has done nothing.
pub struct LmdbTransaction<'a> {
    txn: RwTxn<'a>,
    tables: Tables,
    /// The key of the last inode's row when the transaction began.
    last_inode: Option<Vec<u8>>,
}

impl LmdbTransaction<'_> {
    fn tree_pages(&self) -> Result<(u64, u64), StoreError> {
        tree_pages(&self.tables, &self.txn)
    }

    /// The row's value.
    pub fn get(&self, key: &[u8]) -> Result<Option<&[u8]>, StoreError> {
        Ok(self.tables.of(key).get(&self.txn, key)?)
    }

    /// Writes a row.
    pub fn put(&mut self, key: &[u8], value: &[u8]) -> Result<(), StoreError> {
        Ok(self.tables.of(key).put(&mut self.txn, key, value)?)
    }

    /// Writes an inode's row. Inodes must be written in order.
    pub fn put_inode(&mut self, key: &[u8], value: &[u8]) -> Result<(), StoreError> {
        let appends = self.last_inode.as_deref().is_none_or(|last| key > last);
        let flags = if appends { PutFlags::APPEND } else { PutFlags::empty() };
        Ok(self.tables.inodes.put_with_flags(&mut self.txn, flags, key, value)?)
    }

    /// Deletes all rows.
    pub fn clear(&mut self) -> Result<(), StoreError> {
        for table in [self.tables.inodes, self.tables.entries, self.tables.rows] {
            table.clear(&mut self.txn)?;
        }
        self.last_inode = None;
        Ok(())
    }

    /// Deletes a row; one that isn't there is no error.
    pub fn delete(&mut self, key: &[u8]) -> Result<(), StoreError> {
        self.tables.of(key).delete(&mut self.txn, key)?;
        Ok(())
    }

    /// Commits the transaction, as durably as the medium allows.
    pub fn commit(self) -> Result<(), StoreError> {
        Ok(self.txn.commit()?)
    }
}
