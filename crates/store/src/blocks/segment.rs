//! Data segments: blocks and their checksums.

use std::io;
use std::sync::Arc;

use ashlar_pmem::{Arena, Crc32c, HugePages, Mapping, MappingAccess, MediumKind, OutOfBounds, Persistent, SegmentInfo};
use ashlar_types::BLOCK_BYTES;

use crate::StoreError;
use crate::medium::{MemoryArena, TwinMemory};

/// One block's bytes.
pub type Block = [u8; BLOCK_BYTES as usize];

/// The checksum of a block's bytes: CRC32C, in hardware.
#[inline]
pub fn checksum(bytes: &[u8]) -> u32 {
    Crc32c::of(bytes)
}

/// The memory that holds a segment.
#[derive(Debug)]
enum SegmentMemory {
    /// A file of an arena.
    Mapped { mapping: Mapping, used: HugePages },
    /// A segment of an arena in memory.
    Twin(TwinMemory),
}

impl SegmentMemory {
    #[inline]
    fn copy_out(&self, offset: u64, into: &mut [u8]) -> Result<(), OutOfBounds> {
        match self {
            Self::Mapped { mapping, .. } => mapping.copy_out(offset, into),
            Self::Twin(twin) => twin.load(offset, into),
        }
    }

    #[inline]
    fn copy_in(&self, offset: u64, bytes: &[u8]) -> Result<(), OutOfBounds> {
        match self {
            Self::Mapped { mapping, .. } => mapping.copy_in(offset, bytes),
            Self::Twin(twin) => twin.store(offset, bytes),
        }
    }

    /// Stores whole blocks, and gives `set_sum` the index and the checksum of each.
    fn store_blocks(
        &self,
        offset: u64,
        bytes: &[u8],
        mut set_sum: impl FnMut(usize, u32) -> Result<(), OutOfBounds>,
    ) -> Result<(), StoreError> {
        match self {
            Self::Mapped { mapping, used } => {
                let range = offset..offset + bytes.len() as u64;
                // Where pages may have to be cleared or read first, a system call costs less than the faults.
                let is_there = mapping.medium().kind == MediumKind::Pmem || used.are_made(range.clone());
                used.record_used(range);
                if is_there {
                    return Ok(mapping.copy_in_pieces(offset, bytes, BLOCK_BYTES as usize, set_sum)?);
                }
                mapping.write(offset, bytes).map_err(StoreError::io("cannot write to a data segment"))?;
            }
            Self::Twin(twin) => twin.store(offset, bytes)?,
        }
        let mut sums = bytes.chunks_exact(BLOCK_BYTES as usize).map(checksum).enumerate();
        Ok(sums.try_for_each(|(index, sum)| set_sum(index, sum))?)
    }

    fn persistent(&self) -> &dyn Persistent {
        match self {
            Self::Mapped { mapping, .. } => mapping,
            Self::Twin(twin) => twin,
        }
    }
}

/// A segment in use.
#[derive(Debug)]
pub struct StoreSegment {
    info: SegmentInfo,
    memory: SegmentMemory,
}

impl StoreSegment {
    /// Maps a segment of the arena.
    pub fn open(arena: &Arena, info: SegmentInfo) -> Result<Self, StoreError> {
        let file = arena.segment_file(info.number, true)?;
        let mapping = Mapping::map(&file, info.file_bytes(), MappingAccess::ReadWrite, arena.medium())?;
        let memory = SegmentMemory::Mapped { mapping, used: HugePages::new(info.file_bytes()) };
        Ok(Self { info, memory })
    }

    /// Opens a segment of an arena in memory.
    pub(crate) fn open_twin(arena: &Arc<MemoryArena>, info: SegmentInfo) -> Result<Self, StoreError> {
        let twin = TwinMemory::open(arena, info.number).ok_or(StoreError::Segment(info.number))?;
        Ok(Self { info, memory: SegmentMemory::Twin(twin) })
    }

    /// Its number and size.
    pub fn info(&self) -> SegmentInfo {
        self.info
    }

    /// Copies bytes of a block out.
    #[inline]
    pub fn load(&self, block: u32, within: u64, into: &mut [u8]) -> Result<(), StoreError> {
        Ok(self.memory.copy_out(self.place(block, within)?, into)?)
    }

    /// Copies bytes into a block. They are durable after [`Self::flush`] and [`Self::fence`], or [`Self::sync`].
    #[inline]
    pub fn store(&self, block: u32, within: u64, bytes: &[u8]) -> Result<(), StoreError> {
        let offset = self.place(block, within)?;
        if let SegmentMemory::Mapped { used, .. } = &self.memory {
            used.record_used(offset..offset + bytes.len() as u64);
        }
        Ok(self.memory.copy_in(offset, bytes)?)
    }

    /// Writes whole blocks that follow each other, with their checksums. Durable as with [`Self::store`].
    pub fn store_blocks(&self, block: u32, bytes: &[u8]) -> Result<(), StoreError> {
        let count = bytes.len() / BLOCK_BYTES as usize;
        self.place(block.saturating_add(count.saturating_sub(1) as u32), 0)?;
        debug_assert_eq!(bytes.len() % BLOCK_BYTES as usize, 0, "whole blocks");
        self.memory.store_blocks(self.info.block_offset(block), bytes, |index, sum| {
            self.memory.copy_in(self.info.checksum_offset(block + index as u32), &sum.to_le_bytes())
        })
    }

    /// Puts a part of the written bytes into a huge page. `None` if nothing is to be done.
    pub fn make_huge_page(&self) -> Option<io::Result<()>> {
        match &self.memory {
            SegmentMemory::Mapped { mapping, used } => used.make_one(mapping),
            SegmentMemory::Twin(_) => None,
        }
    }

    /// How many times there is something to do for [`Self::make_huge_page`].
    pub fn huge_pages_waiting(&self) -> u64 {
        match &self.memory {
            SegmentMemory::Mapped { used, .. } => used.waiting(),
            SegmentMemory::Twin(_) => 0,
        }
    }

    /// The checksum that stands for a block.
    #[inline]
    pub fn checksum(&self, block: u32) -> Result<u32, StoreError> {
        let mut bytes = [0; 4];
        self.place(block, 0)?;
        self.memory.copy_out(self.info.checksum_offset(block), &mut bytes)?;
        Ok(u32::from_le_bytes(bytes))
    }

    /// Sets the checksum of a block.
    #[inline]
    pub fn set_checksum(&self, block: u32, value: u32) -> Result<(), StoreError> {
        self.place(block, 0)?;
        Ok(self.memory.copy_in(self.info.checksum_offset(block), &value.to_le_bytes())?)
    }

    /// Copies a whole block out and says whether it matches its checksum.
    #[inline]
    pub fn load_verified(&self, block: u32, into: &mut Block) -> Result<bool, StoreError> {
        self.load(block, 0, into)?;
        Ok(checksum(into) == self.checksum(block)?)
    }

    /// Begins to write blocks and their checksums back to persistent memory.
    pub fn flush(&self, block: u32, blocks: u32) -> Result<(), StoreError> {
        let memory = self.memory.persistent();
        memory.flush(self.info.block_offset(block), u64::from(blocks) * BLOCK_BYTES)?;
        Ok(memory.flush(self.info.checksum_offset(block), u64::from(blocks) * 4)?)
    }

    /// Waits for everything that this thread has flushed, in any segment.
    pub fn fence(&self) {
        self.memory.persistent().fence();
    }

    /// Makes all that was stored durable on a disk.
    pub fn sync(&self) -> Result<(), StoreError> {
        self.memory.persistent().sync().map_err(StoreError::io("cannot sync a data segment"))
    }

    #[inline]
    fn place(&self, block: u32, within: u64) -> Result<u64, StoreError> {
        if block >= self.info.blocks {
            return Err(StoreError::Corrupt("an extent lies outside its segment"));
        }
        Ok(self.info.block_offset(block) + within)
    }
}
