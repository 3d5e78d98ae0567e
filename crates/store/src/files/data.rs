//! The effects of updates on the content of files.
//!
//! Invariants: a block that a committed row refers to is never overwritten; bytes behind a file's end read as zeros; an
//! update that needs blocks asks for all of them before it changes anything.

use std::collections::BTreeMap;
use std::ops::Range;

use ashlar_types::{BLOCK_BYTES, BlockAddress, FILE_SIZE_MAX, Inode, InodeId, blocks_for};
use ashlar_update::{Allocation, Invalid};

use crate::blocks::allocator::Freer;
use crate::blocks::segment::{Block, checksum};
use crate::metadata::chunk::{CHUNK_BLOCKS, ExtentChunk, Run};
use crate::{INLINE_BYTES_MAX, Store, StoreError};

const ZEROS: Block = [0; BLOCK_BYTES as usize];

/// The part of `data`, which lies at `offset` in a file, that falls into a block, and where in the block it begins.
fn part_in(block: u64, offset: u64, data: &[u8]) -> (u64, &[u8]) {
    let start = block * BLOCK_BYTES;
    let (from, to) = (start.max(offset), (start + BLOCK_BYTES).min(offset + data.len() as u64));
    (from - start, &data[(from - offset) as usize..(to - offset) as usize])
}

/// The blocks of a range that `data`, which lies at `offset` in a file, covers as a whole, and its bytes for them.
fn whole_in(blocks: Range<u64>, offset: u64, data: &[u8]) -> (Range<u64>, &[u8]) {
    let start = blocks.start.max(offset.div_ceil(BLOCK_BYTES));
    let end = blocks.end.min((offset + data.len() as u64) / BLOCK_BYTES);
    if start >= end {
        return (blocks.start..blocks.start, &[]);
    }
    (start..end, &data[(start * BLOCK_BYTES - offset) as usize..(end * BLOCK_BYTES - offset) as usize])
}

/// The chunks that hold a range of blocks.
fn chunks_of(blocks: &Range<u64>) -> Range<u64> {
    blocks.start / CHUNK_BLOCKS..blocks.end.div_ceil(CHUNK_BLOCKS)
}

/// The part of a range of blocks that falls into a chunk, from the chunk's start.
fn within_chunk(blocks: &Range<u64>, number: u64) -> Range<u64> {
    let base = number * CHUNK_BLOCKS;
    blocks.start.max(base) - base..blocks.end.clamp(base, base + CHUNK_BLOCKS) - base
}

/// The parts of a range of bytes that cover only a part of a block: at most two.
fn edges(bytes: &Range<u64>) -> Vec<Range<u64>> {
    let (first_whole, last_whole) = (bytes.start.div_ceil(BLOCK_BYTES), bytes.end / BLOCK_BYTES);
    let head = bytes.start..bytes.end.min(first_whole * BLOCK_BYTES);
    let tail = bytes.start.max(last_whole * BLOCK_BYTES)..bytes.end;
    let mut edges = vec![head, tail];
    edges.dedup();
    edges.retain(|edge| edge.start < edge.end && edge.end - edge.start < BLOCK_BYTES);
    edges
}

impl Store {
    /// See [`ashlar_update::Tree::write`].
    pub(crate) fn write_file(
        &mut self,
        id: InodeId,
        inode: &Inode,
        offset: u64,
        data: &[u8],
        size: u64,
    ) -> Result<u64, StoreError> {
        if data.is_empty() {
            return Ok(inode.blocks);
        }
        let inline = self.inline_of(id, inode)?;
        let stays = inline.as_ref().is_some_and(|bytes| size <= bytes.len() as u64);
        let begins = inline.is_some() || inode.blocks == 0;
        if size <= INLINE_BYTES_MAX && (stays || begins && self.may_inline()) {
            self.touched = true;
            let mut bytes = inline.unwrap_or_default();
            let (start, end) = (offset as usize, offset as usize + data.len());
            // Paid for with a block, and taken of the metadata.
            self.active.pay(end.saturating_sub(bytes.len()) as u64);
            bytes.resize(bytes.len().max(end), 0);
            bytes[start..end].copy_from_slice(data);
            self.active.set_inline(id, Some(bytes));
            return Ok(1);
        }
        if let Some(bytes) = inline {
            let beyond = u64::from(offset >= BLOCK_BYTES);
            self.check_space(beyond + blocks_for(data.len() as u64 + offset % BLOCK_BYTES), 0)?;
            self.spill(id, &bytes)?;
        }
        Ok(inode.blocks + self.write_blocks(id, offset, data)?)
    }

    /// See [`ashlar_update::Tree::resize`].
    pub(crate) fn resize_file(&mut self, id: InodeId, inode: &Inode, size: u64) -> Result<u64, StoreError> {
        if let Some(mut bytes) = self.inline_of(id, inode)? {
            if size > INLINE_BYTES_MAX {
                self.spill(id, &bytes)?;
                return Ok(1);
            }
            self.touched = true;
            bytes.truncate(size as usize);
            self.active.set_inline(id, (size > 0).then_some(bytes));
            return Ok(u64::from(size > 0));
        }
        if size > inode.size || inode.blocks == 0 {
            return Ok(inode.blocks);
        }
        let keep = blocks_for(size);
        // Bytes that are cut off inside a block must not come back when the file grows again.
        self.zero_edge(id, size..inode.size.min(keep * BLOCK_BYTES))?;
        self.touched = true;
        Ok(inode.blocks - self.free_blocks(id, keep..u64::MAX)?)
    }

    /// See [`ashlar_update::Tree::allocate`].
    pub(crate) fn allocate_file(
        &mut self,
        id: InodeId,
        inode: &Inode,
        how: Allocation,
        bytes: Range<u64>,
        size: u64,
    ) -> Result<u64, StoreError> {
        if how == Allocation::Insert {
            self.check_shift(id, bytes.end - bytes.start)?;
        }
        let inline = self.inline_of(id, inode)?;
        let moves = matches!(how, Allocation::Collapse | Allocation::Insert);
        let fits = !moves && size <= INLINE_BYTES_MAX && (how == Allocation::Punch || bytes.end <= BLOCK_BYTES);
        let touched = bytes.start / BLOCK_BYTES..blocks_for(bytes.end);
        if let Some(content) = inline {
            if fits {
                return self.allocate_inline(id, content, how, bytes);
            }
            let more = if moves { 0 } else { touched.end - touched.start };
            self.check_space(1 + more, 0)?;
            self.spill(id, &content)?;
        }
        let blocks = inode.blocks;
        match how {
            Allocation::Reserve | Allocation::ReserveKeepSize => Ok(blocks + self.reserve(id, touched)?),
            Allocation::Zero | Allocation::ZeroKeepSize => Ok(blocks + self.zero(id, bytes)?),
            Allocation::Punch => Ok(blocks - self.punch(id, bytes)?),
            Allocation::Collapse => {
                self.touched = true;
                let freed = self.free_blocks(id, touched.clone())?;
                self.shift(id, touched.end, touched.start)?;
                Ok(blocks - freed)
            }
            Allocation::Insert => {
                self.touched = true;
                self.shift(id, touched.start, touched.end)?;
                Ok(blocks)
            }
        }
    }

    /// Changes a range of a small file that stays small.
    fn allocate_inline(
        &mut self,
        id: InodeId,
        mut content: Vec<u8>,
        how: Allocation,
        bytes: Range<u64>,
    ) -> Result<u64, StoreError> {
        if matches!(how, Allocation::Reserve | Allocation::ReserveKeepSize) {
            return Ok(1);
        }
        if bytes.start == 0 && bytes.end >= BLOCK_BYTES {
            // Nothing written is left: the block is a hole now, or a reservation.
            let stays = u64::from(how != Allocation::Punch);
            self.check_space(stays, 0)?;
            self.touched = true;
            self.active.set_inline(id, None);
            return if stays == 0 { Ok(0) } else { self.reserve(id, 0..1) };
        }
        self.touched = true;
        let end = bytes.end.min(content.len() as u64) as usize;
        let start = (bytes.start as usize).min(end);
        content[start..end].fill(0);
        self.active.set_inline(id, Some(content));
        Ok(1)
    }

    /// Takes all of a file's content away.
    pub(crate) fn remove_contents(&mut self, id: InodeId) -> Result<(), StoreError> {
        let Some(inode) = self.inode(id)?.filter(|inode| inode.blocks > 0) else { return Ok(()) };
        if self.inline_of(id, &inode)?.is_some() {
            self.active.set_inline(id, None);
        } else {
            self.free_blocks(id, 0..u64::MAX)?;
        }
        Ok(())
    }

    // ---- small files

    /// Returns the bytes of an inline file, which takes up one block and is at most [`INLINE_BYTES_MAX`] long.
    pub(crate) fn inline_of(&self, id: InodeId, inode: &Inode) -> Result<Option<Vec<u8>>, StoreError> {
        if inode.blocks == 1 && inode.size <= INLINE_BYTES_MAX { self.inline(id) } else { Ok(None) }
    }

    /// Whether a file may begin inline: the writer has paid for a block, so the bytes go there when metadata runs
    /// short.
    fn may_inline(&self) -> bool {
        self.metadata_bytes_used() < self.database.budget_bytes() / 2
    }

    /// Moves a small file's bytes into a block.
    fn spill(&mut self, id: InodeId, content: &[u8]) -> Result<(), StoreError> {
        self.check_space(1, 0)?;
        self.touched = true;
        self.active.set_inline(id, None);
        self.write_blocks(id, 0, content)?;
        Ok(())
    }

    // ---- blocks

    /// Fails where `needed` blocks can't be had, of which `reserved` are the file's own reservations.
    fn check_space(&self, needed: u64, reserved: u64) -> Result<(), StoreError> {
        let free = (self.allocator.free_blocks() + reserved).saturating_sub(self.counters.reserved_blocks);
        if needed > free { Err(StoreError::FullBlocks { needed, free }) } else { Ok(()) }
    }

    /// Writes into blocks, and says how many holes became blocks.
    pub(crate) fn write_blocks(&mut self, id: InodeId, offset: u64, data: &[u8]) -> Result<u64, StoreError> {
        if data.is_empty() {
            return Ok(0);
        }
        let blocks = offset / BLOCK_BYTES..blocks_for(offset + data.len() as u64);
        let mut chunks = Vec::new();
        let (mut needed, mut reserved, mut added) = (0, 0, 0);
        for number in chunks_of(&blocks) {
            let chunk = self.chunk(id, number)?.unwrap_or_default();
            let Range { start, end } = within_chunk(&blocks, number);
            for run in chunk.within(start, end) {
                match run.address {
                    None => reserved += run.blocks,
                    Some(address) => {
                        let fresh = (0..run.blocks).filter(|&step| self.allocator.is_fresh(address.plus(step)));
                        needed += run.blocks - fresh.count() as u64;
                    }
                }
            }
            added += end - start - chunk.allocated_blocks(start, end);
            chunks.push((number, chunk));
        }
        self.check_space(needed + reserved + added, reserved)?;
        self.touched = true;
        for (number, mut chunk) in chunks {
            self.write_chunk(id, number, &mut chunk, within_chunk(&blocks, number), (offset, data))?;
            self.active.put_chunk(id, number, chunk);
        }
        Ok(added)
    }

    /// Writes the part of `data`, which lies at an offset in the file, that falls into `blocks` of a chunk.
    fn write_chunk(
        &mut self,
        id: InodeId,
        number: u64,
        chunk: &mut ExtentChunk,
        blocks: Range<u64>,
        (offset, data): (u64, &[u8]),
    ) -> Result<(), StoreError> {
        let base = number * CHUNK_BLOCKS;
        let mut block = blocks.start;
        while block < blocks.end {
            if let Some(address) = self.fresh_block(chunk, block) {
                self.overwrite(address, part_in(base + block, offset, data))?;
                block += 1;
                continue;
            }
            let mut stretch = 1;
            while block + stretch < blocks.end && self.fresh_block(chunk, block + stretch).is_none() {
                stretch += 1;
            }
            let near = block.checked_sub(1).and_then(|before| chunk.block(before)).flatten().map(|a| a.plus(1));
            let free = self.allocator.free_blocks();
            let (address, got) =
                self.allocator.allocate(stretch, near).ok_or(StoreError::FullBlocks { needed: stretch, free })?;
            let first = base + block;
            let (whole, bytes) = whole_in(first..first + got, offset, data);
            if !whole.is_empty() {
                let start = address.plus(whole.start - first);
                self.segment(start)?.store_blocks(start.block(), bytes)?;
            }
            for logical in (first..whole.start).chain(whole.end..first + got) {
                let old = chunk.block(logical - base).flatten();
                let part = part_in(logical, offset, data);
                self.fill(id, logical, address.plus(logical - first), old, part)?;
            }
            // The session may still read the other part of a partly replaced block by its older extent.
            let whole = whole.start - base..whole.end - base;
            self.free_runs(chunk, block..whole.start, self.freer);
            self.free_runs(chunk, whole.clone(), Freer::NOBODY);
            self.free_runs(chunk, whole.end..block + got, self.freer);
            chunk.set(Run { start: block, blocks: got, address: Some(address) });
            block += got;
        }
        Ok(())
    }

    fn fresh_block(&self, chunk: &ExtentChunk, block: u64) -> Option<BlockAddress> {
        chunk.block(block).flatten().filter(|address| self.allocator.is_fresh(*address))
    }

    /// Writes a new block in part: `part` over the content of the old block, or over zeros.
    fn fill(
        &mut self,
        id: InodeId,
        logical: u64,
        address: BlockAddress,
        old: Option<BlockAddress>,
        (within, part): (u64, &[u8]),
    ) -> Result<(), StoreError> {
        let segment = self.segment(address)?;
        let mut content = ZEROS;
        let sound = match old {
            Some(old) => self.segment(old)?.load_verified(old.block(), &mut content)?,
            None => true,
        };
        content[within as usize..within as usize + part.len()].copy_from_slice(part);
        segment.store(address.block(), 0, &content)?;
        // A damaged block stays damaged for its readers: a right checksum would hide that.
        let sum = checksum(&content);
        segment.set_checksum(address.block(), if sound { sum } else { !sum })?;
        if !sound {
            self.damaged_blocks += 1;
            tracing::error!(inode = %id, block = logical, ?old, "a damaged block was partly overwritten");
        }
        Ok(())
    }

    /// Writes into a fresh block.
    fn overwrite(&mut self, address: BlockAddress, (within, part): (u64, &[u8])) -> Result<(), StoreError> {
        let segment = self.segment(address)?;
        if part.len() as u64 == BLOCK_BYTES {
            segment.store(address.block(), 0, part)?;
            return segment.set_checksum(address.block(), checksum(part));
        }
        let mut content = ZEROS;
        let sound = segment.load_verified(address.block(), &mut content)?;
        content[within as usize..within as usize + part.len()].copy_from_slice(part);
        segment.store(address.block(), within, part)?;
        let sum = checksum(&content);
        segment.set_checksum(address.block(), if sound { sum } else { !sum })
    }

    /// Makes a block that was just written a damaged one, which it is where its bytes come from.
    pub(crate) fn mark_damaged(&mut self, id: InodeId, block: u64) -> Result<(), StoreError> {
        let Some(address) = self.address(id, block)? else { return Ok(()) };
        let segment = self.segment(address)?;
        let mut content = ZEROS;
        segment.load(address.block(), 0, &mut content)?;
        segment.set_checksum(address.block(), !checksum(&content))
    }

    /// Frees the blocks in a range of a chunk; the chunk still names them.
    fn free_runs(&mut self, chunk: &ExtentChunk, range: Range<u64>, freer: Freer) -> u64 {
        let mut freed = 0;
        for run in chunk.within(range.start, range.end) {
            match run.address {
                Some(address) => self.allocator.free(address, run.blocks, freer),
                // The count may be damaged; a check sets it right.
                None => {
                    let left = self.counters.reserved_blocks.saturating_sub(run.blocks);
                    self.counters.reserved_blocks = left;
                }
            }
            freed += run.blocks;
        }
        freed
    }

    /// Makes a range of blocks a hole, and says how many blocks that took out of use.
    pub(crate) fn free_blocks(&mut self, id: InodeId, blocks: Range<u64>) -> Result<u64, StoreError> {
        let mut freed = 0;
        for number in self.chunk_numbers(id, chunks_of(&blocks))? {
            let Some(mut chunk) = self.chunk(id, number)? else { continue };
            let Range { start, end } = within_chunk(&blocks, number);
            freed += self.free_runs(&chunk, start..end, Freer::NOBODY);
            chunk.clear(start, end);
            self.active.put_chunk(id, number, chunk);
        }
        Ok(freed)
    }

    /// Reserves the holes in a range of blocks, and says how many there were.
    pub(crate) fn reserve(&mut self, id: InodeId, blocks: Range<u64>) -> Result<u64, StoreError> {
        let mut holes = blocks.end - blocks.start;
        for number in self.chunk_numbers(id, chunks_of(&blocks))? {
            let Range { start, end } = within_chunk(&blocks, number);
            holes -= self.chunk(id, number)?.map_or(0, |chunk| chunk.allocated_blocks(start, end));
        }
        self.check_space(holes, 0)?;
        self.touched = true;
        self.counters.reserved_blocks += holes;
        for number in chunks_of(&blocks) {
            let mut chunk = self.chunk(id, number)?.unwrap_or_default();
            let Range { mut start, end } = within_chunk(&blocks, number);
            let taken: Vec<Run> = chunk.within(start, end).collect();
            for (from, to) in taken.iter().map(|run| (run.start, run.end())).chain([(end, end)]) {
                if start < from {
                    chunk.set(Run { start, blocks: from - start, address: None });
                }
                start = to;
            }
            self.active.put_chunk(id, number, chunk);
        }
        Ok(holes)
    }

    /// Makes a range of bytes read as zeros and its blocks reserved, and says how many holes there were.
    fn zero(&mut self, id: InodeId, bytes: Range<u64>) -> Result<u64, StoreError> {
        let touched = bytes.start / BLOCK_BYTES..blocks_for(bytes.end);
        // Freed blocks are pinned for a while, so each block that becomes a reservation needs another one.
        self.check_space(touched.end - touched.start, 0)?;
        for edge in edges(&bytes) {
            self.zero_edge(id, edge)?;
        }
        let whole = bytes.start.div_ceil(BLOCK_BYTES)..bytes.end / BLOCK_BYTES;
        self.touched = true;
        let freed = if whole.start < whole.end { self.free_blocks(id, whole)? } else { 0 };
        Ok(self.reserve(id, touched)? - freed)
    }

    /// Makes whole blocks in a range holes and zeroes the rest of the range, and says how many blocks that freed.
    fn punch(&mut self, id: InodeId, bytes: Range<u64>) -> Result<u64, StoreError> {
        let edges = edges(&bytes);
        self.check_edges(id, &edges)?;
        for edge in edges {
            self.zero_edge(id, edge)?;
        }
        let whole = bytes.start.div_ceil(BLOCK_BYTES)..bytes.end / BLOCK_BYTES;
        self.touched = true;
        if whole.start < whole.end { self.free_blocks(id, whole) } else { Ok(0) }
    }

    fn check_edges(&self, id: InodeId, edges: &[Range<u64>]) -> Result<(), StoreError> {
        let mut needed = 0;
        for edge in edges {
            needed += u64::from(self.copied_on_write(id, edge.start / BLOCK_BYTES)?);
        }
        self.check_space(needed, 0)
    }

    /// Whether the block must be copied before it is changed.
    fn copied_on_write(&self, id: InodeId, block: u64) -> Result<bool, StoreError> {
        let address = self.address(id, block)?;
        Ok(address.is_some_and(|address| !self.allocator.is_fresh(address)))
    }

    fn address(&self, id: InodeId, block: u64) -> Result<Option<BlockAddress>, StoreError> {
        let chunk = self.chunk(id, block / CHUNK_BLOCKS)?;
        Ok(chunk.and_then(|chunk| chunk.block(block % CHUNK_BLOCKS)).flatten())
    }

    /// Zeroes a range of bytes in one block, if the block holds any data.
    fn zero_edge(&mut self, id: InodeId, bytes: Range<u64>) -> Result<(), StoreError> {
        if bytes.start < bytes.end && self.address(id, bytes.start / BLOCK_BYTES)?.is_some() {
            self.write_blocks(id, bytes.start, &ZEROS[..(bytes.end - bytes.start) as usize])?;
        }
        Ok(())
    }

    /// Fails if a file's last block, which may lie behind its end, would come to lie behind the largest file's end.
    fn check_shift(&self, id: InodeId, length: u64) -> Result<(), StoreError> {
        let Some(last) = self.chunk_numbers(id, 0..u64::MAX)?.pop() else { return Ok(()) };
        let runs = self.chunk(id, last)?;
        let end = runs.iter().flat_map(|chunk| chunk.runs()).last().map_or(0, |run| last * CHUNK_BLOCKS + run.end());
        let fits = end.checked_add(length / BLOCK_BYTES).is_some_and(|end| end <= blocks_for(FILE_SIZE_MAX));
        if fits { Ok(()) } else { Err(Invalid::OutOfRange.into()) }
    }

    /// Moves all blocks from block `from` on so that they begin at block `to`.
    fn shift(&mut self, id: InodeId, from: u64, to: u64) -> Result<(), StoreError> {
        let mut moved = Vec::new();
        let mut changed: BTreeMap<u64, ExtentChunk> = BTreeMap::new();
        for number in self.chunk_numbers(id, chunks_of(&(from..u64::MAX)))? {
            let Some(mut chunk) = self.chunk(id, number)? else { continue };
            let Range { start, end } = within_chunk(&(from..u64::MAX), number);
            moved.extend(chunk.within(start, end).map(|run| (number * CHUNK_BLOCKS + run.start - from + to, run)));
            chunk.clear(start, end);
            changed.insert(number, chunk);
        }
        // They are in order, so each chunk is complete once a run lies behind it.
        let mut filled: Option<(u64, ExtentChunk)> = None;
        for (mut block, mut run) in moved {
            while run.blocks > 0 {
                let (number, start) = (block / CHUNK_BLOCKS, block % CHUNK_BLOCKS);
                let blocks = run.blocks.min(CHUNK_BLOCKS - start);
                if filled.as_ref().is_none_or(|(filled, _)| *filled != number) {
                    let chunk = match changed.remove(&number) {
                        Some(chunk) => chunk,
                        None => self.chunk(id, number)?.unwrap_or_default(),
                    };
                    changed.extend(filled.replace((number, chunk)));
                }
                if let Some((_, chunk)) = &mut filled {
                    chunk.set(Run { start, blocks, address: run.address });
                }
                run.blocks -= blocks;
                run.address = run.address.map(|address| address.plus(blocks));
                block += blocks;
            }
        }
        changed.extend(filled);
        for (number, chunk) in changed {
            self.active.put_chunk(id, number, chunk);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn edges_are_the_parts_beside_whole_blocks() {
        const KIB: u64 = 1024;
        let found = |from: u64, to: u64| {
            edges(&(from * KIB..to * KIB)).iter().map(|edge| (edge.start / KIB, edge.end / KIB)).collect::<Vec<_>>()
        };
        assert_eq!(found(0, 8), []);
        assert_eq!(found(1, 2), [(1, 2)]);
        assert_eq!(found(1, 8), [(1, 4)]);
        assert_eq!(found(1, 5), [(1, 4), (4, 5)]);
        assert_eq!(found(4, 9), [(8, 9)]);
        assert_eq!(found(3, 13), [(3, 4), (12, 13)]);
    }
}
