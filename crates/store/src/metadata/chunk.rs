//! The extents of one chunk of a file.
//!
//! A file's map is cut into chunks of [`CHUNK_BLOCKS`] blocks, and each chunk is one row. So a change looks its chunk
//! up by an exact key and never searches for neighbours. However fragmented the file is, a row never outgrows a third
//! of an LMDB page's overflow limit.

use ashlar_types::BlockAddress;

/// Blocks in a chunk: 512 KiB of a file.
pub const CHUNK_BLOCKS: u64 = 128;
/// Bytes of one run in a row: first block, blocks − 1, address.
const RUN_BYTES: usize = 10;
/// The address of blocks that are reserved and not written.
const RESERVED: u64 = u64::MAX;

// A row of single-block runs must stay below LMDB's limit for values that share a page (about 2,000 bytes).
const _: () = assert!(RUN_BYTES * CHUNK_BLOCKS as usize <= 1536 && CHUNK_BLOCKS <= 256);

/// Blocks that follow each other in the file and in the arena, or that are all reserved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// The first block, from the chunk's start.
    pub start: u64,
    /// How many blocks.
    pub blocks: u64,
    /// The address of the first block; `None` if the blocks are reserved.
    pub address: Option<BlockAddress>,
}

impl Run {
    /// The first block behind the run.
    pub fn end(&self) -> u64 {
        self.start + self.blocks
    }

    /// The part of the run in `from..to`.
    fn clip(&self, from: u64, to: u64) -> Option<Self> {
        let (start, end) = (self.start.max(from), self.end().min(to));
        (start < end).then(|| Self {
            start,
            blocks: end - start,
            address: self.address.map(|address| address.plus(start - self.start)),
        })
    }

    fn continues(&self, next: &Self) -> bool {
        self.end() == next.start
            && match (self.address, next.address) {
                (None, None) => true,
                (Some(own), Some(other)) => own.plus(self.blocks) == other && own.segment() == other.segment(),
                _ => false,
            }
    }
}

/// A chunk's runs, in order, as few as can be.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExtentChunk {
    runs: Vec<Run>,
}

impl ExtentChunk {
    /// The runs.
    pub fn runs(&self) -> &[Run] {
        &self.runs
    }

    /// Whether the whole chunk is a hole.
    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// The index of the first run that ends behind `block`.
    fn first_behind(&self, block: u64) -> usize {
        self.runs.partition_point(|run| run.end() <= block)
    }

    /// The parts of the runs in `from..to`.
    pub fn within(&self, from: u64, to: u64) -> impl Iterator<Item = Run> + '_ {
        self.runs[self.first_behind(from)..].iter().map_while(move |run| run.clip(from, to))
    }

    /// Blocks in `from..to` that are no holes.
    pub fn allocated_blocks(&self, from: u64, to: u64) -> u64 {
        self.within(from, to).map(|run| run.blocks).sum()
    }

    /// Returns the block's address: `None` for a hole, `Some(None)` for a reserved block.
    pub fn block(&self, block: u64) -> Option<Option<BlockAddress>> {
        let run = self.runs.get(self.first_behind(block)).filter(|run| run.start <= block)?;
        Some(run.address.map(|address| address.plus(block - run.start)))
    }

    /// Makes `from..to` a hole.
    pub fn clear(&mut self, from: u64, to: u64) {
        let first = self.first_behind(from);
        let last = first + self.runs[first..].partition_point(|run| run.start < to);
        if first == last {
            return;
        }
        let head = self.runs[first].clip(0, from);
        let tail = self.runs[last - 1].clip(to, CHUNK_BLOCKS);
        self.runs.splice(first..last, head.into_iter().chain(tail));
    }

    /// Puts a run in place of the content of its range.
    pub fn set(&mut self, run: Run) {
        debug_assert!(run.blocks > 0 && run.end() <= CHUNK_BLOCKS);
        self.clear(run.start, run.end());
        let mut at = self.first_behind(run.start);
        if at > 0 && self.runs[at - 1].continues(&run) {
            at -= 1;
            self.runs[at].blocks += run.blocks;
        } else {
            self.runs.insert(at, run);
        }
        if at + 1 < self.runs.len() && self.runs[at].continues(&self.runs[at + 1]) {
            self.runs[at].blocks += self.runs.remove(at + 1).blocks;
        }
    }

    /// The row's value.
    pub fn encode(&self, out: &mut Vec<u8>) {
        for run in &self.runs {
            out.extend_from_slice(&[run.start as u8, (run.blocks - 1) as u8]);
            out.extend_from_slice(&run.address.map_or(RESERVED, |address| address.0).to_le_bytes());
        }
    }

    /// Decodes a row's value; `None` if [`Self::encode`] can't have written it.
    pub fn decode(value: &[u8]) -> Option<Self> {
        let mut runs: Vec<Run> = Vec::with_capacity(value.len() / RUN_BYTES);
        if value.len() % RUN_BYTES != 0 || value.is_empty() {
            return None;
        }
        for bytes in value.chunks_exact(RUN_BYTES) {
            let address = u64::from_le_bytes(bytes[2..].try_into().ok()?);
            let address = (address != RESERVED).then_some(BlockAddress(address));
            let run = Run { start: bytes[0].into(), blocks: u64::from(bytes[1]) + 1, address };
            if run.start < runs.last().map_or(0, Run::end) || run.end() > CHUNK_BLOCKS {
                return None;
            }
            runs.push(run);
        }
        Some(Self { runs })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use ashlar_types::NodeNumber;

    use super::*;

    /// The chunk's entry for each block, one by one.
    fn expand(chunk: &ExtentChunk) -> Vec<Option<Option<BlockAddress>>> {
        (0..CHUNK_BLOCKS).map(|block| chunk.block(block)).collect()
    }

    proptest! {
        #[test]
        fn a_chunk_is_an_array_of_blocks(
            changes in prop::collection::vec((0..CHUNK_BLOCKS, 1..40u64, 0..4u64, 0..300u64), 1..60)
        ) {
            let mut chunk = ExtentChunk::default();
            let mut model = vec![None; CHUNK_BLOCKS as usize];
            for (start, blocks, what, address) in changes {
                let end = (start + blocks).min(CHUNK_BLOCKS);
                let address = BlockAddress::new(NodeNumber::FIRST, 1, address as u32);
                match what {
                    0 => chunk.clear(start, end),
                    1 => chunk.set(Run { start, blocks: end - start, address: None }),
                    _ => chunk.set(Run { start, blocks: end - start, address: Some(address) }),
                }
                for block in start..end {
                    model[block as usize] = match what {
                        0 => None,
                        1 => Some(None),
                        _ => Some(Some(address.plus(block - start))),
                    };
                }
                prop_assert_eq!(&expand(&chunk), &model);
                prop_assert!(chunk.runs.windows(2).all(|pair| !pair[0].continues(&pair[1])));
                prop_assert_eq!(chunk.allocated_blocks(0, CHUNK_BLOCKS) as usize, model.iter().flatten().count());
                let mut row = Vec::new();
                chunk.encode(&mut row);
                if !chunk.is_empty() {
                    prop_assert_eq!(ExtentChunk::decode(&row), Some(chunk.clone()));
                }
            }
        }

        #[test]
        fn any_bytes_decode_to_a_sound_chunk_or_none(bytes in prop::collection::vec(any::<u8>(), 0..60)) {
            if let Some(chunk) = ExtentChunk::decode(&bytes) {
                prop_assert!(chunk.runs.windows(2).all(|pair| pair[0].end() <= pair[1].start));
                prop_assert!(chunk.runs.last().unwrap().end() <= CHUNK_BLOCKS);
            }
        }
    }
}
