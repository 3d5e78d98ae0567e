//! Blocks that processes have mapped.
//!
//! Such a block is *held*: it is not given out again, even after its file has freed it. From the commit of the freeing
//! on, it is *loose*: no committed row refers to it any more. Then it may be overwritten by the bytes that its file has
//! in its place.

use std::collections::BTreeMap;

use ashlar_types::{BlockAddress, NodeNumber};

/// A block that its file has freed while it was held.
#[derive(Clone, Copy, Debug)]
struct Freed {
    /// The batch with which that is committed.
    batch: u64,
    /// Whether no other holder or reader waits for it: it is free when its hold is released.
    is_reclaimed: bool,
}

/// Consecutive blocks that are held equally often, by their first address.
#[derive(Clone, Copy, Debug)]
struct Stretch {
    blocks: u64,
    count: u32,
}

/// All held blocks. Addresses are one line of numbers: no stretch continues from one segment into another.
#[derive(Debug, Default)]
pub struct HeldBlocks {
    stretches: BTreeMap<u64, Stretch>,
    freed: BTreeMap<u64, Freed>,
    blocks: u64,
}

impl HeldBlocks {
    /// The stretches with any of these blocks, each as first address and end.
    fn within(&self, from: u64, to: u64) -> impl Iterator<Item = (u64, u64)> + '_ {
        let before = self.stretches.range(..from).next_back().filter(move |(at, one)| **at + one.blocks > from);
        let each = before.into_iter().chain(self.stretches.range(from..to));
        each.map(move |(&at, one)| (at.max(from), (at + one.blocks).min(to)))
    }

    /// Splits a stretch at an address, if one spans it.
    fn split(&mut self, at: u64) {
        if let Some((&start, one)) =
            self.stretches.range_mut(..at).next_back().filter(|(start, one)| **start + one.blocks > at)
        {
            let rest = Stretch { blocks: start + one.blocks - at, ..*one };
            one.blocks = at - start;
            self.stretches.insert(at, rest);
        }
    }

    /// Adds a hold.
    pub fn add(&mut self, address: BlockAddress, blocks: u64) {
        let (from, to) = (address.0, address.0 + blocks);
        self.split(from);
        self.split(to);
        let mut at = from;
        while at < to {
            let next = self.stretches.range_mut(at..to).next();
            match next {
                Some((&start, one)) if start == at => {
                    one.count += 1;
                    at += one.blocks;
                }
                next => {
                    let end = next.map_or(to, |(&start, _)| start);
                    self.blocks += end - at;
                    self.stretches.insert(at, Stretch { blocks: end - at, count: 1 });
                    at = end;
                }
            }
        }
    }

    /// Takes a hold away; the blocks that are free by that.
    pub fn remove(&mut self, address: BlockAddress, blocks: u64) -> Vec<u32> {
        let (from, to) = (address.0, address.0 + blocks);
        self.split(from);
        self.split(to);
        let mut unheld = Vec::new();
        for (&at, one) in self.stretches.range_mut(from..to) {
            one.count -= 1;
            if one.count == 0 {
                unheld.push((at, one.blocks));
            }
        }
        let mut free = Vec::new();
        for (at, blocks) in unheld {
            self.stretches.remove(&at);
            self.blocks -= blocks;
            if self.freed.is_empty() {
                continue;
            }
            let freed =
                (at..at + blocks).filter(|block| self.freed.remove(block).is_some_and(|freed| freed.is_reclaimed));
            free.extend(freed.map(|block| block as u32));
        }
        free
    }

    /// Blocks are freed, in a batch.
    pub fn record_freed(&mut self, address: BlockAddress, blocks: u64, batch: u64) {
        let held: Vec<_> = self.within(address.0, address.0 + blocks).collect();
        for block in held.into_iter().flat_map(|(from, to)| from..to) {
            self.freed.insert(block, Freed { batch, is_reclaimed: false });
        }
    }

    /// Records a held block to which no file refers.
    pub fn record_kept(&mut self, block: BlockAddress) {
        self.freed.insert(block.0, Freed { batch: 0, is_reclaimed: true });
    }

    /// Of freed blocks that wait for no session any more: those that are free now, as runs of first block and count.
    pub fn reclaim(&mut self, address: BlockAddress, blocks: u64) -> Vec<(u32, u32)> {
        let (start, end) = (address.0, address.0 + blocks);
        let held: Vec<_> = self.within(start, end).collect();
        for block in held.iter().flat_map(|&(from, to)| from..to) {
            if let Some(freed) = self.freed.get_mut(&block) {
                freed.is_reclaimed = true;
            }
        }
        let (mut free, mut at) = (Vec::with_capacity(1), start);
        for (from, to) in held.into_iter().chain([(end, end)]) {
            if at < from {
                free.push((at as u32, (from - at) as u32));
            }
            at = to;
        }
        free
    }

    /// Whether a block is held and loose, if the batches before this one are committed.
    pub fn is_loose(&self, block: BlockAddress, committed: u64) -> bool {
        self.freed.get(&block.0).is_some_and(|freed| freed.is_reclaimed || freed.batch < committed)
    }

    /// How many of these blocks are held and belong to no file any more.
    pub fn freed_blocks(&self, address: BlockAddress, blocks: u64) -> u64 {
        self.freed.range(address.0..address.0 + blocks).count() as u64
    }

    /// Whether any block of a segment is held.
    pub fn is_any_in(&self, node: NodeNumber, segment: u32) -> bool {
        let start = BlockAddress::new(node, segment, 0).0;
        self.within(start, start + (1 << 32)).next().is_some()
    }

    /// How many blocks are held.
    pub fn blocks(&self) -> u64 {
        self.blocks
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// As a count for each block.
        #[test]
        fn holds_are_counted_for_each_block(steps in prop::collection::vec((0u32..60, 1u64..30, 0usize..4), 1..60)) {
            let (mut held, mut all, mut counts) = (HeldBlocks::default(), Vec::new(), [0_u32; 100]);
            for (first, blocks, what) in steps {
                let range = |(first, blocks): (u32, u64)| first as usize..first as usize + blocks as usize;
                if what == 0 && !all.is_empty() {
                    let (first, blocks) = all.swap_remove(first as usize % all.len());
                    held.remove(BlockAddress::new(NodeNumber::FIRST, 3, first), blocks);
                    counts[range((first, blocks))].iter_mut().for_each(|count| *count -= 1);
                } else {
                    held.add(BlockAddress::new(NodeNumber::FIRST, 3, first), blocks);
                    all.push((first, blocks));
                    counts[range((first, blocks))].iter_mut().for_each(|count| *count += 1);
                }
                prop_assert_eq!(held.blocks(), counts.iter().filter(|count| **count > 0).count() as u64);
                prop_assert_eq!(held.is_any_in(NodeNumber::FIRST, 3), held.blocks() > 0);
                prop_assert!([2, 4].iter().all(|other| !held.is_any_in(NodeNumber::FIRST, *other)));
                let free = held.reclaim(BlockAddress::new(NodeNumber::FIRST, 3, 0), 100);
                let free: Vec<u32> = free.into_iter().flat_map(|(first, count)| first..first + count).collect();
                let expected: Vec<u32> = (0..100).filter(|block| counts[*block as usize] == 0).collect();
                prop_assert_eq!(free, expected);
            }
        }
    }
}
