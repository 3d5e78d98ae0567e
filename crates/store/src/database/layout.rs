//! The layout that both databases share.

use crate::StoreError;
use crate::metadata::rows::kind;

/// Bytes of a page: LMDB's own on the machines we run on.
pub const PAGE_BYTES: u64 = 4096;
/// Bytes of address space for the smallest arena's metadata.
pub const MAP_BYTES_MIN: u64 = 256 << 20;
/// The longest key that LMDB takes.
pub const KEY_BYTES_MAX: usize = 511;

/// A row's key and value, as an iterator yields them.
pub type Row<'a> = Result<(&'a [u8], &'a [u8]), StoreError>;

/// Where a row is kept.
///
/// Inodes and entries have tables of their own and everything else shares one: measured, two tables take creations a
/// third faster than one, since new inodes are appended at their table's end (docs/decisions/store-and-digest.md).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TableName {
    /// Inodes.
    Inodes,
    /// Directory entries.
    Entries,
    /// All others.
    Rows,
}

impl TableName {
    /// Returns the table of a key, or of a key's first bytes.
    #[inline]
    pub fn of(key: &[u8]) -> Self {
        match key.first() {
            Some(&kind::INODE) => Self::Inodes,
            Some(&kind::ENTRY) => Self::Entries,
            _ => Self::Rows,
        }
    }
}
