//! The content of a file in the model.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use ashlar_types::{BLOCK_BYTES, blocks_for};

type BlockContent = [u8; BLOCK_BYTES as usize];

const ZEROS: BlockContent = [0; BLOCK_BYTES as usize];

/// A file's blocks: absent ones are holes, `None` is reserved and not written.
#[derive(Clone, Debug, Default)]
pub struct ModelFile(BTreeMap<u64, Option<Arc<BlockContent>>>);

impl ModelFile {
    fn contents(&self) -> impl Iterator<Item = (u64, &BlockContent)> {
        self.0.iter().map(|(&block, content)| (block, content.as_deref().unwrap_or(&ZEROS)))
    }

    /// How many blocks the file takes up.
    pub fn count(&self) -> u64 {
        self.0.len() as u64
    }

    /// The blocks, and whether each was written.
    pub fn blocks(&self) -> Vec<(u64, bool)> {
        self.0.iter().map(|(&block, content)| (block, content.is_some())).collect()
    }

    /// Whether all bytes from `offset` on are zeros.
    pub fn is_zero_from(&self, offset: u64) -> bool {
        self.contents().all(|(block, content)| {
            let from = offset.saturating_sub(block * BLOCK_BYTES).min(BLOCK_BYTES);
            content[from as usize..].iter().all(|byte| *byte == 0)
        })
    }

    /// Copies the written bytes of a range out. All other bytes stay as they are.
    pub fn read(&self, offset: u64, into: &mut [u8]) {
        let end = offset + into.len() as u64;
        for (&block, content) in self.0.range(offset / BLOCK_BYTES..blocks_for(end)) {
            let Some(content) = content else { continue };
            let start = block * BLOCK_BYTES;
            let (from, to) = (offset.max(start), end.min(start + BLOCK_BYTES));
            into[(from - offset) as usize..(to - offset) as usize]
                .copy_from_slice(&content[(from - start) as usize..(to - start) as usize]);
        }
    }

    /// Writes bytes.
    pub fn write(&mut self, offset: u64, data: &[u8]) {
        let (mut at, mut rest) = (offset, data);
        while !rest.is_empty() {
            let within = (at % BLOCK_BYTES) as usize;
            let (piece, others) = rest.split_at(rest.len().min(BLOCK_BYTES as usize - within));
            let content = self.0.entry(at / BLOCK_BYTES).or_default().get_or_insert_with(|| Arc::new(ZEROS));
            Arc::make_mut(content)[within..within + piece.len()].copy_from_slice(piece);
            at += piece.len() as u64;
            rest = others;
        }
    }

    /// Cuts off all that lies behind a size.
    pub fn cut(&mut self, size: u64) {
        self.0.split_off(&blocks_for(size));
        self.zero_bytes(size, blocks_for(size) * BLOCK_BYTES);
    }

    /// Reserves the holes among these blocks.
    pub fn reserve(&mut self, blocks: Range<u64>) {
        for block in blocks {
            self.0.entry(block).or_default();
        }
    }

    /// Makes a range of bytes zeros, whole blocks of it reserved.
    pub fn zero(&mut self, offset: u64, end: u64) {
        self.zero_bytes(offset, end);
        (blocks_for(offset)..end / BLOCK_BYTES).for_each(|block| drop(self.0.insert(block, None)));
        self.reserve(offset / BLOCK_BYTES..blocks_for(end));
    }

    /// Makes a range of bytes zeros, whole blocks of it holes.
    pub fn punch(&mut self, offset: u64, end: u64) {
        self.zero_bytes(offset, end);
        let whole = blocks_for(offset)..end / BLOCK_BYTES;
        self.0.retain(|block, _| !whole.contains(block));
    }

    /// Removes blocks, and moves those behind them to their place.
    pub fn collapse(&mut self, blocks: Range<u64>) {
        self.0.retain(|block, _| !blocks.contains(block));
        self.shift(blocks.end, blocks.start);
    }

    /// Inserts holes.
    pub fn insert(&mut self, blocks: Range<u64>) {
        self.shift(blocks.start, blocks.end);
    }

    fn shift(&mut self, from: u64, to: u64) {
        let moved = self.0.split_off(&from);
        self.0.extend(moved.into_iter().map(|(block, content)| (block - from + to, content)));
    }

    /// Zeroes the written bytes of a range.
    fn zero_bytes(&mut self, from: u64, to: u64) {
        if from >= to {
            return;
        }
        for (&block, content) in self.0.range_mut(from / BLOCK_BYTES..blocks_for(to)) {
            let Some(content) = content else { continue };
            let start = block * BLOCK_BYTES;
            let (first, end) = (from.max(start) - start, to.min(start + BLOCK_BYTES) - start);
            Arc::make_mut(content)[first as usize..end as usize].fill(0);
        }
    }
}

impl PartialEq for ModelFile {
    /// Compares the blocks and all bytes. A reserved block equals one of zeros.
    fn eq(&self, other: &Self) -> bool {
        self.contents().eq(other.contents())
    }
}

impl Eq for ModelFile {}
