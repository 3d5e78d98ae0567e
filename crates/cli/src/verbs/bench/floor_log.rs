//! The floor of a write: memory of the update log's size, and nothing else.
//!
//! The same bytes are copied into it, checksummed and persisted.

use std::fs::File;
use std::hint::black_box;
use std::io;

use ashlar_pmem::{Crc32c, FetchedAhead, HugePages, Mapping, MappingAccess, Medium, Persistent, huge};
use rustix::fs::{MemfdFlags, memfd_create};

/// Memory that is written from its beginning to its end, again and again.
#[derive(Debug)]
pub struct FloorLog {
    memory: Mapping,
    at: u64,
    ahead: FetchedAhead,
}

impl FloorLog {
    /// Maps shared memory of `bytes`, and touches each page of it, in huge pages if there are any. Bytes are persisted
    /// as on a medium of this name.
    pub fn new(bytes: u64, medium: &str) -> io::Result<Self> {
        let file = File::from(memfd_create("ashlar-bench", MemfdFlags::CLOEXEC)?);
        file.set_len(bytes)?;
        // Memory replaces persistent memory: it is flushed by the same instructions.
        let medium = if medium.contains("pmem") { Medium::emulated_pmem() } else { Medium::MEMORY };
        let memory = Mapping::map(&file, bytes, MappingAccess::ReadWrite, medium).map_err(io::Error::other)?;
        for page in (0..bytes).step_by(4096) {
            memory.store_u64(page, 1).map_err(io::Error::other)?;
        }
        // The same as for a log.
        if huge::is_allowed() {
            let used = HugePages::new(bytes);
            used.record_used(0..bytes);
            // If the kernel makes none, a log has none either.
            while used.make_one(&memory).is_some() {}
        }
        Ok(Self { memory, at: 0, ahead: FetchedAhead::default() })
    }

    /// Returns the place of the next bytes.
    fn next(&mut self, length: usize) -> u64 {
        if self.at + length as u64 > self.memory.len() {
            self.at = 0;
            self.ahead = FetchedAhead::default();
        }
        let at = self.at;
        self.at += length as u64;
        at
    }

    /// Copies bytes in.
    pub fn copy(&mut self, bytes: &[u8]) -> io::Result<()> {
        let at = self.next(bytes.len());
        self.memory.store(at, black_box(bytes)).map_err(io::Error::other)
    }

    /// Copies bytes in, and persists them.
    pub fn persist(&mut self, bytes: &[u8]) -> io::Result<()> {
        let at = self.next(bytes.len());
        self.memory.store_flushed(at, black_box(bytes)).map_err(io::Error::other)?;
        self.memory.fence();
        Ok(())
    }

    /// Does all that a log must do with bytes: copies, checksums and persists them, in one go as a log does.
    pub fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        let (at, length) = (self.next(bytes.len()), bytes.len() as u64);
        let (mut sum, is_fetched) = (Crc32c::default(), self.ahead.covers(at + length));
        self.memory.store_summed(at, black_box(bytes), &mut sum, is_fetched).map_err(io::Error::other)?;
        black_box(sum.finish());
        let next = self.ahead.after(at + length, length);
        self.memory.expect_store(next.start, next.end - next.start);
        self.memory.fence();
        Ok(())
    }
}

/// Computes the checksum of a record.
pub fn checksum(bytes: &[u8]) {
    black_box(Crc32c::of(black_box(bytes)));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ring_goes_round_and_keeps_what_was_written_last() {
        for medium in ["memory", "pmem (emulated)"] {
            let mut ring = FloorLog::new(8192, medium).expect("made");
            ring.write(&[1; 5000]).expect("written");
            ring.persist(&[2; 5000]).expect("written");
            ring.copy(&[3; 3000]).expect("written");
            let mut found = [0; 8192];
            ring.memory.load(0, &mut found).expect("read");
            assert!(found[..5000].iter().all(|byte| *byte == 2), "the second began anew");
            assert!(found[5000..8000].iter().all(|byte| *byte == 3), "the third stands behind it");
        }
    }
}
