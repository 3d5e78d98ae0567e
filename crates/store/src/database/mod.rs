//! The metadata database: rows of bytes, read views, and one write transaction at a time.
//!
//! Two databases keep the same rows: [`LmdbDatabase`] in files, and [`MemoryDatabase`], its twin in memory, whose
//! commits fail and crash as planned. The store works on [`Database`] and names neither.
//!
//! Invariants:
//! - A [`Snapshot`] shows one committed state, whatever is committed after it.
//! - A [`WriteTransaction`] commits all of its rows or none. After a crash in its middle, either the state before or
//!   the state after it is there.
//! - Rows come in the order of their keys, within each of the three tables: inodes, entries, and all others.

mod fault;
mod layout;
mod lmdb;
mod memory;

pub use fault::{CommitFault, DatabaseError};
pub use layout::Row;
pub use memory::{CommitObserver, MemoryDatabase};

use std::sync::Arc;

use ashlar_pmem::Arena;

use crate::StoreError;
use crate::metadata::rows;
use lmdb::{LmdbDatabase, LmdbSnapshot, LmdbTransaction};
use memory::{MemorySnapshot, MemoryTransaction};

/// The part of the map that accounted metadata may fill.
///
/// A commit that rewrites every page needs the tree three times: the live pages, the pages that the last commit freed
/// (not reusable yet), and the pages that it writes. The fourth part is for deletions and half-filled pages.
const BUDGET_DIVISOR: u64 = 4;

/// A metadata database.
#[derive(Debug)]
pub enum Database {
    /// LMDB, in the arena's files.
    Lmdb(LmdbDatabase),
    /// Its twin in memory.
    Memory(Arc<MemoryDatabase>),
}

impl Database {
    /// Opens the arena's LMDB database, and creates it if it is missing.
    pub fn open(arena: &Arena) -> Result<Self, StoreError> {
        LmdbDatabase::open(arena).map(Self::Lmdb)
    }

    /// Whether the arena has an LMDB database.
    pub fn exists(arena: &Arena) -> bool {
        LmdbDatabase::exists(arena)
    }

    /// Bytes of metadata that may be accounted.
    pub fn budget_bytes(&self) -> u64 {
        let map_bytes = match self {
            Self::Lmdb(database) => database.map_bytes(),
            Self::Memory(database) => database.map_bytes(),
        };
        map_bytes / BUDGET_DIVISOR
    }

    /// Returns a view of the committed state.
    pub fn snapshot(&self) -> Result<Snapshot, StoreError> {
        Ok(match self {
            Self::Lmdb(database) => Snapshot::Lmdb(database.snapshot()?),
            Self::Memory(database) => Snapshot::Memory(database.snapshot()?),
        })
    }

    /// Begins a transaction that is going to write `rows` rows of `bytes` bytes in all.
    ///
    /// It waits for another one under way.
    pub fn write(&self, rows: u64, bytes: u64) -> Result<WriteTransaction<'_>, StoreError> {
        let rows = match self {
            Self::Lmdb(database) => TransactionRows::Lmdb(database.write(rows, bytes)?),
            Self::Memory(database) => TransactionRows::Memory(database.write()?),
        };
        Ok(WriteTransaction { rows, value: Vec::new() })
    }
}

/// A view of the committed state at one moment.
pub enum Snapshot {
    /// LMDB's.
    Lmdb(LmdbSnapshot),
    /// The memory twin's.
    Memory(MemorySnapshot),
}

impl Snapshot {
    /// The row's value.
    #[inline]
    pub fn get(&self, key: &[u8]) -> Result<Option<&[u8]>, StoreError> {
        match self {
            Self::Lmdb(snapshot) => snapshot.get(key),
            Self::Memory(snapshot) => Ok(snapshot.get(key)),
        }
    }

    /// The rows from `from` on, in key order, to the end of `from`'s table.
    pub fn from<'a>(&'a self, from: &'a [u8]) -> Result<impl Iterator<Item = Row<'a>>, StoreError> {
        Ok(match self {
            Self::Lmdb(snapshot) => RowIterator::Lmdb(snapshot.from(from)?),
            Self::Memory(snapshot) => RowIterator::Memory(snapshot.from(from).map(Ok)),
        })
    }

    /// The rows whose keys begin with `prefix`, which is not empty, in key order.
    pub fn prefix<'a>(&'a self, prefix: &'a [u8]) -> Result<impl Iterator<Item = Row<'a>>, StoreError> {
        Ok(match self {
            Self::Lmdb(snapshot) => RowIterator::Lmdb(snapshot.prefix(prefix)?),
            Self::Memory(snapshot) => RowIterator::Memory(snapshot.prefix(prefix).map(Ok)),
        })
    }

    /// No inode with this number or a higher one has a row.
    pub fn inode_end(&self) -> Result<u64, StoreError> {
        let last = match self {
            Self::Lmdb(snapshot) => snapshot.last_inode()?,
            Self::Memory(snapshot) => snapshot.last_inode(),
        };
        Ok(last.and_then(rows::split_key1).map_or(0, |(number, _)| number.saturating_add(1)))
    }

    /// All rows: the tables one after the other, each in key order.
    pub fn all(&self) -> Result<impl Iterator<Item = Row<'_>>, StoreError> {
        Ok(match self {
            Self::Lmdb(snapshot) => RowIterator::Lmdb(snapshot.all()?),
            Self::Memory(snapshot) => RowIterator::Memory(snapshot.all().map(Ok)),
        })
    }

    /// How many rows there are.
    pub fn rows(&self) -> Result<u64, StoreError> {
        match self {
            Self::Lmdb(snapshot) => snapshot.rows(),
            Self::Memory(snapshot) => Ok(snapshot.rows()),
        }
    }

    /// How many inodes and how many entries there are.
    pub fn inodes_and_entries(&self) -> Result<(u64, u64), StoreError> {
        match self {
            Self::Lmdb(snapshot) => snapshot.inodes_and_entries(),
            Self::Memory(snapshot) => Ok(snapshot.inodes_and_entries()),
        }
    }

    /// Bytes of the pages that the tables take.
    pub fn used_bytes(&self) -> Result<u64, StoreError> {
        match self {
            Self::Lmdb(snapshot) => snapshot.used_bytes(),
            Self::Memory(snapshot) => Ok(snapshot.used_bytes()),
        }
    }
}

/// Rows of either database.
enum RowIterator<L, M> {
    Lmdb(L),
    Memory(M),
}

impl<'a, L: Iterator<Item = Row<'a>>, M: Iterator<Item = Row<'a>>> Iterator for RowIterator<L, M> {
    type Item = Row<'a>;

    #[inline]
    fn next(&mut self) -> Option<Row<'a>> {
        match self {
            Self::Lmdb(rows) => rows.next(),
            Self::Memory(rows) => rows.next(),
        }
    }
}

/// A transaction that writes. Dropped without [`Self::commit`], it has done nothing.
pub struct WriteTransaction<'a> {
    rows: TransactionRows<'a>,
    /// A buffer for values.
    pub value: Vec<u8>,
}

enum TransactionRows<'a> {
    Lmdb(LmdbTransaction<'a>),
    Memory(MemoryTransaction<'a>),
}

impl WriteTransaction<'_> {
    /// The row's value.
    pub fn get(&self, key: &[u8]) -> Result<Option<&[u8]>, StoreError> {
        match &self.rows {
            TransactionRows::Lmdb(rows) => rows.get(key),
            TransactionRows::Memory(rows) => Ok(rows.get(key)),
        }
    }

    /// Writes a row.
    pub fn put(&mut self, key: &[u8], value: &[u8]) -> Result<(), StoreError> {
        match &mut self.rows {
            TransactionRows::Lmdb(rows) => rows.put(key, value),
            TransactionRows::Memory(rows) => {
                rows.put(key, value);
                Ok(())
            }
        }
    }

    /// Writes a row with the value in [`Self::value`], and empties that. Inodes must be written in order.
    pub fn put_inode(&mut self, key: &[u8]) -> Result<(), StoreError> {
        match &mut self.rows {
            TransactionRows::Lmdb(rows) => rows.put_inode(key, &self.value)?,
            TransactionRows::Memory(rows) => rows.put_inode(key, &self.value),
        }
        self.value.clear();
        Ok(())
    }

    /// Deletes all rows.
    pub fn clear(&mut self) -> Result<(), StoreError> {
        match &mut self.rows {
            TransactionRows::Lmdb(rows) => rows.clear(),
            TransactionRows::Memory(rows) => {
                rows.clear();
                Ok(())
            }
        }
    }

    /// Deletes a row; one that isn't there is no error.
    pub fn delete(&mut self, key: &[u8]) -> Result<(), StoreError> {
        match &mut self.rows {
            TransactionRows::Lmdb(rows) => rows.delete(key),
            TransactionRows::Memory(rows) => {
                rows.delete(key);
                Ok(())
            }
        }
    }

    /// Commits the transaction, as durably as the medium allows.
    pub fn commit(self) -> Result<(), StoreError> {
        match self.rows {
            TransactionRows::Lmdb(rows) => rows.commit(),
            TransactionRows::Memory(rows) => rows.commit(),
        }
    }
}

#[cfg(test)]
mod tests;
