//! Data segments: blocks and their checksums.

use std::io;

use ashlar_pmem::{Arena, Crc32c, HugePages, Mapping, MappingAccess, MediumKind, Persistent, SegmentInfo};
use ashlar_types::BLOCK_BYTES;

use crate::StoreError;

/// One block's bytes.
pub type Block = [u8; BLOCK_BYTES as usize];

/// The checksum of a block's bytes: CRC32C, in hardware.
#[inline]
pub fn checksum(bytes: &[u8]) -> u32 {
    Crc32c::of(bytes)
}

/// A mapped segment.
#[derive(Debug)]
pub struct StoreSegment {
    info: SegmentInfo,
    mapping: Mapping,
    used: HugePages,
}

impl StoreSegment {
    /// Maps a segment of the arena.
    pub fn open(arena: &Arena, info: SegmentInfo) -> Result<Self, StoreError> {
        let file = arena.segment_file(info.number, true)?;
        let mapping = Mapping::map(&file, info.file_bytes(), MappingAccess::ReadWrite, arena.medium())?;
        Ok(Self { info, mapping, used: HugePages::new(info.file_bytes()) })
    }

    /// Its number and size.
    pub fn info(&self) -> SegmentInfo {
        self.info
    }

    /// Copies bytes of a block out.
    #[inline]
    pub fn load(&self, block: u32, within: u64, into: &mut [u8]) -> Result<(), StoreError> {
        Ok(self.mapping.copy_out(self.place(block, within)?, into)?)
    }

    /// Copies bytes into a block. They are durable after [`Self::flush`] and [`Self::fence`], or [`Self::sync`].
    #[inline]
    pub fn store(&self, block: u32, within: u64, bytes: &[u8]) -> Result<(), StoreError> {
        let offset = self.place(block, within)?;
        self.used.record_used(offset..offset + bytes.len() as u64);
        Ok(self.mapping.copy_in(offset, bytes)?)
    }

    /// Writes whole blocks that follow each other, with their checksums. Durable as with [`Self::store`].
    pub fn store_blocks(&self, block: u32, bytes: &[u8]) -> Result<(), StoreError> {
        let count = bytes.len() / BLOCK_BYTES as usize;
        self.place(block.saturating_add(count.saturating_sub(1) as u32), 0)?;
        let offset = self.info.block_offset(block);
        let range = offset..offset + bytes.len() as u64;
        let set = |index: usize, sum: u32| {
            self.mapping.copy_in(self.info.checksum_offset(block + index as u32), &sum.to_le_bytes())
        };
        debug_assert_eq!(bytes.len() % BLOCK_BYTES as usize, 0, "whole blocks");
        // Where pages may have to be cleared or read first, a system call costs less than the faults.
        let is_there = self.mapping.medium().kind == MediumKind::Pmem || self.used.are_made(range.clone());
        self.used.record_used(range);
        if is_there {
            return Ok(self.mapping.copy_in_pieces(offset, bytes, BLOCK_BYTES as usize, set)?);
        }
        self.mapping.write(offset, bytes).map_err(StoreError::io("cannot write to a data segment"))?;
        let mut sums = bytes.chunks_exact(BLOCK_BYTES as usize).map(checksum).enumerate();
        Ok(sums.try_for_each(|(index, sum)| set(index, sum))?)
    }

    /// Puts a part of the written bytes into a huge page. `None` if nothing is to be done.
    pub fn make_huge_page(&self) -> Option<io::Result<()>> {
        self.used.make_one(&self.mapping)
    }

    /// How many times there is something to do for [`Self::make_huge_page`].
    pub fn huge_pages_waiting(&self) -> u64 {
        self.used.waiting()
    }

    /// The checksum that stands for a block.
    #[inline]
    pub fn checksum(&self, block: u32) -> Result<u32, StoreError> {
        let mut bytes = [0; 4];
        self.place(block, 0)?;
        self.mapping.copy_out(self.info.checksum_offset(block), &mut bytes)?;
        Ok(u32::from_le_bytes(bytes))
    }

    /// Sets the checksum of a block.
    #[inline]
    pub fn set_checksum(&self, block: u32, value: u32) -> Result<(), StoreError> {
        self.place(block, 0)?;
        Ok(self.mapping.copy_in(self.info.checksum_offset(block), &value.to_le_bytes())?)
    }

    /// Copies a whole block out and says whether it matches its checksum.
    #[inline]
    pub fn load_verified(&self, block: u32, into: &mut Block) -> Result<bool, StoreError> {
        self.load(block, 0, into)?;
        Ok(checksum(into) == self.checksum(block)?)
    }

    /// Begins to write blocks and their checksums back to persistent memory.
    pub fn flush(&self, block: u32, blocks: u32) -> Result<(), StoreError> {
        self.mapping.flush(self.info.block_offset(block), u64::from(blocks) * BLOCK_BYTES)?;
        Ok(self.mapping.flush(self.info.checksum_offset(block), u64::from(blocks) * 4)?)
    }

    /// Waits for everything that this thread has flushed, in any segment.
    pub fn fence(&self) {
        self.mapping.fence();
    }

    /// Makes all that was stored durable on a disk.
    pub fn sync(&self) -> Result<(), StoreError> {
        self.mapping.sync().map_err(StoreError::io("cannot sync a data segment"))
    }

    #[inline]
    fn place(&self, block: u32, within: u64) -> Result<u64, StoreError> {
        if block >= self.info.blocks {
            return Err(StoreError::Corrupt("an extent lies outside its segment"));
        }
        Ok(self.info.block_offset(block) + within)
    }
}
