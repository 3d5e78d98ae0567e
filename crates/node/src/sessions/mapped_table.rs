//! The table of the files that a session's process maps directly (DAX).
//!
//! A restarted SharedFS knows these mappings from tables. A process maps blocks of data segments after SharedFS has
//! promised that they stay in place. The process can't repeat that promise to a later SharedFS: it may sleep or be
//! stopped while SharedFS is killed and started again. So a session's mappings stand in a file of their own, which
//! SharedFS alone writes:
//!
//! ```text
//! record n, of 32 bytes, from byte 32 n on
//!   0  inode:8
//!   8  first block in the file:8
//!  16  address:8
//!  24  follows:1 number:31 blocks:32         0: no mapping; written last, and cleared first
//! ```
//!
//! A mapping ends with its session, unless it was unmapped: a process that ends its session and lives on has unmapped
//! all. A session that was fenced for a forged log keeps its mappings until SharedFS is restarted. From then on its
//! process may see other content there.

use ashlar_pmem::{OutOfBounds, Persistent, SharedMemory};
use ashlar_store::MappedRun;
use ashlar_types::{BlockAddress, InodeId};

const RECORD_BYTES: u64 = 32;
const WORD: u64 = 24;
const NUMBER_AT: u32 = 32;
/// The largest number under which blocks are mapped.
pub const NUMBER_MAX: u32 = u32::MAX >> 1;
const FOLLOWS: u64 = 1 << 63;
/// The most extents that a session may have mapped.
///
/// Beyond that, the kernel maps files for it.
pub const RECORDS_MAX: u64 = 4096;
/// Bytes of a table.
pub const TABLE_BYTES: u64 = RECORDS_MAX * RECORD_BYTES;

/// A session's mappings, as they stand in its file.
#[derive(Debug)]
pub struct MappedTable {
    memory: SharedMemory,
    /// The number of each record that is used.
    used: Vec<Option<u32>>,
}

impl MappedTable {
    /// Takes fresh memory of [`TABLE_BYTES`] bytes as an empty table.
    pub fn empty(memory: SharedMemory) -> Self {
        Self { memory, used: Vec::new() }
    }

    /// Takes memory of [`TABLE_BYTES`] bytes as a table, with the runs that it holds.
    ///
    /// # Errors
    /// [`OutOfBounds`] if the memory is too short.
    pub fn take_up(memory: SharedMemory) -> Result<(Self, Vec<MappedRun>), OutOfBounds> {
        let mut table = Self { memory, used: Vec::new() };
        let mut runs = Vec::new();
        for record in 0..RECORDS_MAX {
            let run = table.load(record)?;
            table.used.push(run.map(|run| run.number));
            runs.extend(run);
        }
        Ok((table, runs))
    }

    fn load(&self, record: u64) -> Result<Option<MappedRun>, OutOfBounds> {
        let at = |offset: u64| self.memory.load_u64(record * RECORD_BYTES + offset);
        let word = at(WORD)?;
        if word == 0 {
            return Ok(None);
        }
        Ok(Some(MappedRun {
            number: (word >> NUMBER_AT) as u32 & NUMBER_MAX,
            follows: word & FOLLOWS != 0,
            inode: InodeId(at(0)?),
            logical_block: at(8)?,
            blocks: word & u64::from(u32::MAX),
            address: BlockAddress(at(16)?),
        }))
    }

    fn store(&self, record: u64, run: &MappedRun) -> Result<(), OutOfBounds> {
        let put = |offset: u64, value: u64| self.memory.store_u64(record * RECORD_BYTES + offset, value);
        put(0, run.inode.0)?;
        put(8, run.logical_block)?;
        put(16, run.address.0)?;
        let follows = if run.follows { FOLLOWS } else { 0 };
        put(WORD, follows | u64::from(run.number) << NUMBER_AT | run.blocks)
    }

    /// Records the runs that are mapped under a number.
    ///
    /// It records all of them or, without room, none.
    pub fn record_runs(&mut self, runs: &[MappedRun]) -> bool {
        let free: Vec<u64> = (0..RECORDS_MAX)
            .filter(|&record| self.used.get(record as usize).is_none_or(Option::is_none))
            .take(runs.len())
            .collect();
        if free.len() < runs.len() {
            return false;
        }
        for (&record, run) in free.iter().zip(runs) {
            if self.store(record, run).is_err() {
                return false;
            }
            let index = record as usize;
            self.used.resize(self.used.len().max(index + 1), None);
            self.used[index] = Some(run.number);
        }
        true
    }

    /// Removes the runs that were mapped under a number.
    pub fn forget_number(&mut self, number: u32) {
        for (record, used) in (0..).zip(&mut self.used).filter(|(_, used)| **used == Some(number)) {
            // The table is mapped whole.
            let _ = self.memory.store_u64(record * RECORD_BYTES + WORD, 0);
            *used = None;
        }
    }
}
