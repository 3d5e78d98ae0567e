//! Blocks that processes have mapped.
//!
//! Such a block is *held*: it is not given out again, also where its file has freed it. It is *loose* from the commit of that on: no
//! committed row refers to it any more, nobody reads it but those who have mapped it, and it may be overwritten.

use std::collections::{BTreeMap, HashMap};

use ashlar_types::BlockAddress;

/// A block that its file has freed while it was held.
#[derive(Clone, Copy, Debug)]
struct Freed {
    /// The batch with which that is committed.
    batch: u64,
    /// Nobody else waits for anything: it's free when it is let go.
    is_reclaimed: bool,
}

/// All blocks that are held.
#[derive(Debug, Default)]
pub struct Held {
    /// First block and count of each hold, by segment. Holds overlap where several map a file.
    runs: BTreeMap<u32, Vec<(u32, u32)>>,
    freed: HashMap<BlockAddress, Freed>,
}

impl Held {
    /// Whether a block is held.
    fn contains(&self, block: BlockAddress) -> bool {
        let runs = self.runs.get(&block.segment());
        runs.is_some_and(|runs| runs.iter().any(|&(first, count)| (first..first + count).contains(&block.block())))
    }

    /// Whether any of these blocks is held.
    fn overlaps(&self, address: BlockAddress, blocks: u64) -> bool {
        let (start, end) = (u64::from(address.block()), u64::from(address.block()) + blocks);
        let is_in =
            |&(first, count): &(u32, u32)| u64::from(first) < end && u64::from(first) + u64::from(count) > start;
        self.runs.get(&address.segment()).is_some_and(|runs| runs.iter().any(is_in))
    }

    /// Adds a hold.
    pub fn add(&mut self, address: BlockAddress, blocks: u64) {
        self.runs.entry(address.segment()).or_default().push((address.block(), blocks as u32));
    }

    /// Takes a hold away; the blocks that are free by that.
    pub fn remove(&mut self, address: BlockAddress, blocks: u64) -> Vec<u32> {
        let Some(runs) = self.runs.get_mut(&address.segment()) else { return Vec::new() };
        let Some(at) = runs.iter().position(|run| *run == (address.block(), blocks as u32)) else { return Vec::new() };
        runs.swap_remove(at);
        if runs.is_empty() {
            self.runs.remove(&address.segment());
        }
        if self.freed.is_empty() {
            return Vec::new();
        }
        let unheld = (0..blocks).map(|step| address.plus(step)).filter(|block| !self.contains(*block));
        let unheld: Vec<BlockAddress> = unheld.collect();
        let freed = unheld.into_iter().filter_map(|block| Some((block, self.freed.remove(&block)?)));
        freed.filter(|(_, freed)| freed.is_reclaimed).map(|(block, _)| block.block()).collect()
    }

    /// Blocks are freed, in a batch.
    pub fn note_freed(&mut self, address: BlockAddress, blocks: u64, batch: u64) {
        if !self.overlaps(address, blocks) {
            return;
        }
        for block in (0..blocks).map(|step| address.plus(step)) {
            if self.contains(block) {
                self.freed.insert(block, Freed { batch, is_reclaimed: false });
            }
        }
    }

    /// A block that no file refers to is to be held.
    pub fn note_kept(&mut self, block: BlockAddress) {
        self.freed.insert(block, Freed { batch: 0, is_reclaimed: true });
    }

    /// Of freed blocks that nobody else waits for any more: those that are free now, as runs of first block and count.
    pub fn reclaim(&mut self, address: BlockAddress, blocks: u64) -> Vec<(u32, u32)> {
        if !self.overlaps(address, blocks) {
            return vec![(address.block(), blocks as u32)];
        }
        let mut free: Vec<(u32, u32)> = Vec::new();
        for block in (0..blocks).map(|step| address.plus(step)) {
            match self.freed.get_mut(&block) {
                Some(freed) => freed.is_reclaimed = true,
                None => match free.last_mut() {
                    Some(last) if last.0 + last.1 == block.block() => last.1 += 1,
                    _ => free.push((block.block(), 1)),
                },
            }
        }
        free
    }

    /// Whether a block is held and loose, where the batches before this one are committed.
    pub fn is_loose(&self, block: BlockAddress, committed: u64) -> bool {
        self.freed.get(&block).is_some_and(|freed| freed.is_reclaimed || freed.batch < committed)
    }

    /// Whether any block of a segment is held.
    pub fn is_any_in(&self, segment: u32) -> bool {
        self.runs.contains_key(&segment)
    }
}
