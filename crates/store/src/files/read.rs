//! Reading files, and moving their blocks out of a segment.

use std::ops::Range;

use ashlar_types::{BLOCK_BYTES, BlockAddress, Contents, Extent, InodeId};

use crate::blocks::allocator::Freer;
use crate::blocks::segment::Block;
use crate::metadata::chunk::{CHUNK_BLOCKS, ExtentChunk, Run};
use crate::metadata::rows::{self, kind};
use crate::{Store, StoreError};

impl Store {
    /// Returns a file's applied content, which is empty for a missing file.
    ///
    /// # Errors
    /// [`StoreError::Corrupt`], [`StoreError::Database`].
    pub fn contents(&self, inode: InodeId) -> Result<Contents, StoreError> {
        self.contents_range(inode, 0..u64::MAX)
    }

    /// A range of a file's content in blocks; a small file comes whole.
    ///
    /// # Errors
    /// [`StoreError::Corrupt`], [`StoreError::Database`].
    pub fn contents_range(&self, id: InodeId, blocks: Range<u64>) -> Result<Contents, StoreError> {
        let mut extents: Vec<Extent> = Vec::new();
        let Some(inode) = self.inode(id)?.filter(|inode| inode.blocks > 0) else {
            return Ok(Contents::Extents(extents));
        };
        if let Some(bytes) = self.inline_of(id, &inode)? {
            return Ok(Contents::Inline(bytes));
        }
        for number in self.chunk_numbers(id, blocks.start / CHUNK_BLOCKS..blocks.end.div_ceil(CHUNK_BLOCKS))? {
            let Some(chunk) = self.chunk(id, number)? else { continue };
            let base = number * CHUNK_BLOCKS;
            let (from, to) = (blocks.start.max(base) - base, blocks.end.clamp(base, base + CHUNK_BLOCKS) - base);
            for run in chunk.within(from, to) {
                let extent = Extent { logical_block: base + run.start, blocks: run.blocks, address: run.address };
                match extents.last_mut().filter(|last| last.continues(&extent)) {
                    Some(last) => last.blocks += extent.blocks,
                    None => extents.push(extent),
                }
            }
        }
        Ok(Contents::Extents(extents))
    }

    /// Reads up to `into.len()` bytes of a file from `offset` on; returns how many came before the file's end.
    ///
    /// # Errors
    /// [`StoreError::Checksum`] if a block is damaged; [`StoreError::Invalid`] if the inode does not exist.
    pub fn read(&self, id: InodeId, offset: u64, into: &mut [u8]) -> Result<usize, StoreError> {
        let inode = self.inode(id)?.ok_or(ashlar_update::Invalid::NoInode(id))?;
        let length = inode.size.saturating_sub(offset).min(into.len() as u64) as usize;
        let into = &mut into[..length];
        into.fill(0);
        if length == 0 || inode.blocks == 0 {
            return Ok(length);
        }
        if let Some(bytes) = self.inline_of(id, &inode)? {
            let start = bytes.len().min(offset as usize);
            let end = bytes.len().min(offset as usize + length);
            into[..end - start].copy_from_slice(&bytes[start..end]);
            return Ok(length);
        }
        let mut done = 0;
        let mut chunk: Option<(u64, Option<ExtentChunk>)> = None;
        while done < length {
            let at = offset + done as u64;
            let (block, within) = (at / BLOCK_BYTES, at % BLOCK_BYTES);
            let count = ((BLOCK_BYTES - within) as usize).min(length - done);
            let number = block / CHUNK_BLOCKS;
            if chunk.as_ref().is_none_or(|(loaded, _)| *loaded != number) {
                chunk = Some((number, self.chunk(id, number)?));
            }
            let map = chunk.as_ref().and_then(|(_, map)| map.as_ref());
            if let Some(address) = map.and_then(|map| map.block(block % CHUNK_BLOCKS)).flatten() {
                self.read_block(id, block, address, within, &mut into[done..done + count])?;
            }
            done += count;
        }
        Ok(length)
    }

    fn read_block(
        &self,
        inode: InodeId,
        block: u64,
        address: BlockAddress,
        within: u64,
        into: &mut [u8],
    ) -> Result<(), StoreError> {
        let mut content: Block = [0; BLOCK_BYTES as usize];
        if !self.segment(address)?.load_verified(address.block(), &mut content)? {
            return Err(StoreError::Checksum { inode, block, address });
        }
        into.copy_from_slice(&content[within as usize..within as usize + into.len()]);
        Ok(())
    }

    /// Moves all blocks out of a segment, and gives out none there any more, so that the arena can shrink.
    ///
    /// It commits all applied updates first. The old blocks keep their content until [`Self::remove_segment`]. Returns
    /// the files whose extents have moved: grants with their extents must be revoked.
    ///
    /// # Errors
    /// [`StoreError::Segment`]; [`StoreError::Mapped`]; [`StoreError::FullBlocks`] if the other segments can't take the
    /// blocks, and then nothing has moved; those of a commit.
    pub fn retire_segment(&mut self, number: u32) -> Result<Vec<InodeId>, StoreError> {
        if self.allocator.is_held_in(number) {
            return Err(StoreError::Mapped(number));
        }
        self.commit()?;
        let needed = self.allocator.live_blocks_in(number).ok_or(StoreError::Segment(number))?;
        self.allocator.close(number, true);
        let free = self.allocator.free_blocks().saturating_sub(self.counters.reserved_blocks);
        if needed > free {
            self.allocator.close(number, false);
            return Err(StoreError::FullBlocks { needed, free });
        }
        let mut moving = Vec::new();
        for row in self.snapshot.prefix(&[kind::CHUNK])? {
            let (key, value) = row?;
            let chunk = ExtentChunk::decode(value).ok_or(StoreError::Corrupt("a file's map is damaged"))?;
            let place = rows::split_key2(key).ok_or(StoreError::Corrupt("a file's map is damaged"))?;
            if chunk.runs().iter().any(|run| run.address.is_some_and(|address| address.segment() == number)) {
                moving.push((place.0, place.1, chunk));
            }
        }
        let mut moved = Vec::new();
        for (inode, index, mut chunk) in moving {
            for run in chunk.runs().to_vec() {
                if let Some(address) = run.address.filter(|address| address.segment() == number) {
                    self.move_run(&mut chunk, run, address)?;
                }
            }
            self.active.put_chunk(InodeId(inode), index, chunk);
            if moved.last() != Some(&InodeId(inode)) {
                moved.push(InodeId(inode));
            }
        }
        Ok(moved)
    }

    /// Copies a run with its checksums, right or wrong: damage is not this copy's to hide.
    fn move_run(&mut self, chunk: &mut ExtentChunk, run: Run, address: BlockAddress) -> Result<(), StoreError> {
        let mut done = 0;
        while done < run.blocks {
            let (to, count) = self.allocator.allocate(run.blocks - done, None).ok_or(StoreError::Poisoned)?;
            for step in 0..count {
                let (from, to) = (address.plus(done + step), to.plus(step));
                let mut content: Block = [0; BLOCK_BYTES as usize];
                let source = self.segment(from)?;
                source.load(from.block(), 0, &mut content)?;
                let sum = source.checksum(from.block())?;
                let target = self.segment(to)?;
                target.store(to.block(), 0, &content)?;
                target.set_checksum(to.block(), sum)?;
            }
            chunk.set(Run { start: run.start + done, blocks: count, address: Some(to) });
            done += count;
        }
        self.allocator.free(address, run.blocks, Freer::NOBODY);
        Ok(())
    }

    /// Gives out blocks of a segment again that [`Self::retire_segment`] was to empty.
    pub fn keep_segment(&mut self, number: u32) {
        self.allocator.close(number, false);
    }

    /// Commits, and forgets a segment that [`Self::retire_segment`] has emptied; its file may then be removed.
    ///
    /// # Errors
    /// [`StoreError::Segment`] where blocks in it are still in use; those of a commit.
    pub fn remove_segment(&mut self, number: u32) -> Result<(), StoreError> {
        self.commit()?;
        if self.allocator.live_blocks_in(number) != Some(0) {
            return Err(StoreError::Segment(number));
        }
        self.allocator.remove_segment(number);
        self.segments.remove(&number);
        Ok(())
    }
}
