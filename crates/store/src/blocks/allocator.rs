//! The allocator: the blocks in use, and the free ones.
//!
//! It keeps three bits per block:
//! - *live*: the applied state refers to it,
//! - *busy*: it must not be given out, since it is live or was freed too recently,
//! - *fresh*: it was given out since the last freeze, so no committed row refers to it, and it may be overwritten.
//!
//! A freed block stays busy until the commit of its freeing is done, since a crash before it brings the old row back.
//! If a record has replaced the block in part, it also stays busy until the session has released its log up to that
//! record. Until then the session's own log covers the change, and the session reads the other part by its older
//! extent.
//!
//! A block that a process has mapped stays busy in any case until it is unmapped ([`crate::blocks::held_blocks`]).

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};

use ashlar_types::{BlockAddress, LogPosition, NodeNumber, SessionId};

use crate::blocks::held_blocks::HeldBlocks;
use crate::metadata::rows;

/// Blocks in one bitmap row: 512 bytes, for 16 MiB of data.
pub const PIECE_BLOCKS: u32 = 4096;
const PIECE_WORDS: usize = PIECE_BLOCKS as usize / 64;
/// Bytes of a bitmap row.
pub const PIECE_BYTES: usize = PIECE_WORDS * 8;

/// Freed stretches of at least this many blocks are given out before blocks that were never used.
///
/// The memory of freed blocks exists already. Shorter stretches wait until the search reaches them, so that files do
/// not fragment.
const STRETCH_BLOCKS: u64 = 16;

/// The session that freed blocks wait for, beyond the commit: until it has released its log up to this position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Freer {
    /// The session.
    pub session: SessionId,
    /// The end of its record that frees.
    pub end: LogPosition,
}

impl Freer {
    /// The blocks wait for the commit only.
    pub const NOBODY: Self = Self { session: SessionId::SHARED_FS, end: LogPosition(0) };
}

#[derive(Debug)]
struct Pin {
    end: LogPosition,
    batch: u64,
    address: BlockAddress,
    blocks: u64,
}

#[derive(Debug, Default)]
struct Pins {
    released: LogPosition,
    queue: VecDeque<Pin>,
}

#[derive(Debug)]
struct SegmentMap {
    blocks: u32,
    live: Vec<u64>,
    busy: Vec<u64>,
    fresh: Vec<u64>,
    free: u64,
    cursor: u32,
    closed: bool,
    changed: BTreeSet<u32>,
    fresh_pieces: BTreeSet<u32>,
}

/// The result of a freeze: rows to write, and the blocks written since the freeze before, by segment.
#[derive(Debug, Default)]
pub struct FrozenBlocks {
    /// Bitmap rows; `None` deletes the row of a piece without live blocks.
    pub rows: Vec<([u8; 9], Option<Vec<u8>>)>,
    /// Runs of fresh blocks: segment, first block, count.
    pub written: Vec<(u32, u32, u32)>,
}

/// The allocator of all segments.
#[derive(Debug, Default)]
pub struct Allocator {
    node: NodeNumber,
    segments: BTreeMap<u32, SegmentMap>,
    current: u32,
    pins: HashMap<SessionId, Pins>,
    batch: u64,
    committed: u64,
    pinned: u64,
    /// Free blocks of all segments that are not closed.
    free: u64,
    held: HeldBlocks,
}

impl Allocator {
    /// Makes the allocator of a node's arena.
    pub fn new(node: NodeNumber) -> Self {
        Self { node, ..Self::default() }
    }

    /// Adds a segment without live blocks. A row that [`Self::load`] brings may mark some live.
    pub fn add_segment(&mut self, number: u32, blocks: u32) {
        let words = (blocks as usize).div_ceil(64);
        let mut busy = vec![0; words];
        if blocks % 64 != 0 {
            // The bits behind the end stay busy for ever, so that no search ever finds them.
            busy[words - 1] = u64::MAX << (blocks % 64);
        }
        let map = SegmentMap {
            blocks,
            live: vec![0; words],
            busy,
            fresh: vec![0; words],
            free: blocks.into(),
            cursor: 0,
            closed: false,
            changed: BTreeSet::new(),
            fresh_pieces: BTreeSet::new(),
        };
        self.free += u64::from(blocks);
        self.segments.insert(number, map);
    }

    /// Loads a bitmap row; `false` if it does not fit its segment.
    pub fn load(&mut self, segment: u32, piece: u32, value: &[u8]) -> bool {
        let Some(map) = self.segments.get_mut(&segment) else { return false };
        let start = piece as usize * PIECE_WORDS;
        if value.len() != PIECE_BYTES || start >= map.live.len() {
            return false;
        }
        for (index, bytes) in value.chunks_exact(8).enumerate() {
            let word = u64::from_le_bytes(bytes.try_into().unwrap_or_default());
            let Some(live) = map.live.get_mut(start + index) else {
                if word == 0 {
                    continue;
                }
                return false;
            };
            let busy = &mut map.busy[start + index];
            if word & *busy != 0 {
                return false;
            }
            *live = word;
            *busy |= word;
            map.free -= u64::from(word.count_ones());
            self.free -= u64::from(word.count_ones());
        }
        true
    }

    /// Gives out up to `wanted` blocks that follow each other, from `near` on if it is free.
    pub fn allocate(&mut self, wanted: u64, near: Option<BlockAddress>) -> Option<(BlockAddress, u64)> {
        if let Some(near) = near {
            if let Some(map) = self.segments.get_mut(&near.segment()).filter(|map| !map.closed) {
                if near.block() < map.blocks && !bit(&map.busy, near.block()) {
                    let count = map.take(near.block(), wanted);
                    self.free -= count;
                    return Some((near, count));
                }
            }
        }
        let ahead = self.segments.range(self.current..).chain(self.segments.range(..self.current));
        let number = ahead.filter(|(_, map)| !map.closed && map.free > 0).map(|(number, _)| *number).next()?;
        self.current = number;
        let map = self.segments.get_mut(&number)?;
        let block = map.next_free()?;
        let count = map.take(block, wanted);
        self.free -= count;
        Some((BlockAddress::new(self.node, number, block), count))
    }

    /// Takes blocks out of the applied state.
    pub fn free(&mut self, address: BlockAddress, blocks: u64, freer: Freer) {
        let Some(map) = self.segments.get_mut(&address.segment()) else { return };
        let end = address.block().saturating_add(blocks as u32).min(map.blocks);
        clear_range(&mut map.live, address.block(), end);
        map.changed.extend(address.block() / PIECE_BLOCKS..end.div_ceil(PIECE_BLOCKS));
        self.pinned += blocks;
        self.held.record_freed(address, blocks, self.batch);
        let pins = self.pins.entry(freer.session).or_default();
        match pins.queue.back_mut() {
            Some(last)
                if last.end == freer.end && last.batch == self.batch && last.address.plus(last.blocks) == address =>
            {
                last.blocks += blocks;
            }
            _ => pins.queue.push_back(Pin { end: freer.end, batch: self.batch, address, blocks }),
        }
    }

    /// Whether no committed row can refer to the block.
    #[inline]
    pub fn is_fresh(&self, address: BlockAddress) -> bool {
        self.segments
            .get(&address.segment())
            .is_some_and(|map| address.block() < map.blocks && bit(&map.fresh, address.block()))
    }

    /// Returns the blocks that can be given out now.
    pub fn free_blocks(&self) -> u64 {
        self.free
    }

    /// Blocks in all segments.
    pub fn total_blocks(&self) -> u64 {
        self.segments.values().map(|map| u64::from(map.blocks)).sum()
    }

    /// Freed blocks that wait for a commit or a release.
    pub fn pinned_blocks(&self) -> u64 {
        self.pinned
    }

    /// Whether a freeze would yield anything.
    pub fn is_changed(&self) -> bool {
        self.segments.values().any(|map| !map.changed.is_empty())
    }

    /// Ends a batch: its commit contains the blocks that are live now, and no block is fresh any more.
    pub fn freeze(&mut self) -> FrozenBlocks {
        let mut frozen = FrozenBlocks::default();
        for (&number, map) in &mut self.segments {
            for piece in std::mem::take(&mut map.changed) {
                let start = piece as usize * PIECE_WORDS;
                let words = &map.live[start..(start + PIECE_WORDS).min(map.live.len())];
                let value = words.iter().any(|&word| word != 0).then(|| {
                    let mut value: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
                    value.resize(PIECE_BYTES, 0);
                    value
                });
                frozen.rows.push((rows::bitmap_key(number, piece), value));
            }
            for piece in std::mem::take(&mut map.fresh_pieces) {
                let start = piece as usize * PIECE_WORDS;
                let end = (start + PIECE_WORDS).min(map.fresh.len());
                for index in start..end {
                    for (first, count) in runs_of(std::mem::take(&mut map.fresh[index])) {
                        let first = index as u32 * 64 + first;
                        match frozen.written.last_mut() {
                            Some(last) if last.0 == number && last.1 + last.2 == first => last.2 += count,
                            _ => frozen.written.push((number, first, count)),
                        }
                    }
                }
            }
        }
        self.batch += 1;
        frozen
    }

    /// How many batches were frozen.
    pub fn frozen_batches(&self) -> u64 {
        self.batch
    }

    /// All batches that were frozen are committed now. Blocks that were freed in a batch from `bound` on must stay as
    /// they are for now.
    pub fn committed(&mut self, bound: u64) {
        self.committed = self.batch;
        self.reclaim_all(bound);
    }

    /// Releases blocks: the session no longer reads by extents from before its log position `upto`. `bound` as for
    /// [`Self::committed`].
    pub fn release(&mut self, session: SessionId, upto: LogPosition, bound: u64) {
        let pins = self.pins.entry(session).or_default();
        pins.released = pins.released.max(upto);
        self.reclaim(session, bound);
    }

    /// Whether blocks wait for this session to release its log further, but not beyond this position.
    pub fn has_unreleased(&self, session: SessionId, upto: LogPosition) -> bool {
        let waits = |pins: &Pins| pins.queue.iter().any(|pin| pins.released < pin.end && pin.end <= upto);
        self.pins.get(&session).is_some_and(waits)
    }

    /// Gives out again all freed blocks that wait for no session any more. `bound` as for [`Self::committed`].
    pub fn reclaim_all(&mut self, bound: u64) {
        let sessions: Vec<SessionId> = self.pins.keys().copied().collect();
        for session in sessions {
            self.reclaim(session, bound);
        }
    }

    fn reclaim(&mut self, session: SessionId, bound: u64) {
        let committed = self.committed.min(bound);
        let Some(pins) = self.pins.get_mut(&session) else { return };
        let released = if session == SessionId::SHARED_FS { LogPosition(u64::MAX) } else { pins.released };
        while pins.queue.front().is_some_and(|pin| pin.batch < committed && pin.end <= released) {
            let Some(pin) = pins.queue.pop_front() else { break };
            self.pinned -= pin.blocks;
            let Some(map) = self.segments.get_mut(&pin.address.segment()) else { continue };
            for (first, blocks) in self.held.reclaim(pin.address, pin.blocks) {
                self.free += map.give_back(first, blocks);
                if u64::from(blocks) >= STRETCH_BLOCKS && !map.closed {
                    map.cursor = map.cursor.min(first);
                    self.current = self.current.min(pin.address.segment());
                }
            }
        }
        if pins.queue.is_empty() && pins.released == LogPosition(u64::MAX) {
            self.pins.remove(&session);
        }
    }

    /// Keeps blocks from being given out until [`Self::release_hold`], even if they are freed.
    ///
    /// Free blocks, as after a start, count as used from here on. Returns `false`, and does nothing, if the blocks do
    /// not exist.
    pub fn hold(&mut self, address: BlockAddress, blocks: u64) -> bool {
        let Some(map) = self.segments.get_mut(&address.segment()) else { return false };
        if u64::from(address.block()) + blocks > u64::from(map.blocks) {
            return false;
        }
        for block in (0..blocks).map(|step| address.plus(step)).filter(|block| !bit(&map.live, block.block())) {
            if !bit(&map.busy, block.block()) {
                set_bit(&mut map.busy, block.block());
                map.free -= 1;
                self.free -= u64::from(!map.closed);
                self.held.record_kept(block);
            }
        }
        self.held.add(address, blocks);
        true
    }

    /// Ends a hold.
    pub fn release_hold(&mut self, address: BlockAddress, blocks: u64) {
        let Some(map) = self.segments.get_mut(&address.segment()) else { return };
        for block in self.held.remove(address, blocks) {
            self.free += map.give_back(block, 1);
        }
    }

    /// Whether a block that is held belongs to no file any more, as committed: it may change. `bound` as for
    /// [`Self::committed`].
    pub fn is_loose(&self, address: BlockAddress, bound: u64) -> bool {
        self.held.is_loose(address, self.committed.min(bound))
    }

    /// Whether the applied state refers to a block.
    pub fn is_live(&self, address: BlockAddress) -> bool {
        let map = self.segments.get(&address.segment()).filter(|map| address.block() < map.blocks);
        map.is_some_and(|map| bit(&map.live, address.block()))
    }

    /// Whether a segment is being emptied, or does not exist.
    pub fn is_closed(&self, segment: u32) -> bool {
        self.segments.get(&segment).is_none_or(|map| map.closed)
    }

    /// How many of these blocks are held and belong to no file any more.
    pub fn freed_blocks(&self, address: BlockAddress, blocks: u64) -> u64 {
        self.held.freed_blocks(address, blocks)
    }

    /// How many blocks are held.
    pub fn held_blocks(&self) -> u64 {
        self.held.blocks()
    }

    /// Whether any block of a segment is held.
    pub fn is_held_in(&self, segment: u32) -> bool {
        self.held.is_any_in(self.node, segment)
    }

    /// Stops giving out blocks of a segment, or resumes it.
    pub fn close(&mut self, segment: u32, closed: bool) {
        if let Some(map) = self.segments.get_mut(&segment).filter(|map| map.closed != closed) {
            map.closed = closed;
            self.free = if closed { self.free - map.free } else { self.free + map.free };
        }
    }

    /// Returns the blocks of the segment to which the applied state refers; `None` if the segment does not exist.
    pub fn live_blocks_in(&self, segment: u32) -> Option<u64> {
        let map = self.segments.get(&segment)?;
        Some(map.live.iter().map(|word| u64::from(word.count_ones())).sum())
    }

    /// Forgets a segment, and its pinned blocks.
    pub fn remove_segment(&mut self, segment: u32) {
        self.close(segment, true);
        self.segments.remove(&segment);
        for pins in self.pins.values_mut() {
            pins.queue.retain(|pin| {
                let stays = pin.address.segment() != segment;
                self.pinned -= if stays { 0 } else { pin.blocks };
                stays
            });
        }
    }
}

impl SegmentMap {
    /// Marks blocks as free again; returns how many more may be given out.
    fn give_back(&mut self, first: u32, blocks: u32) -> u64 {
        clear_range(&mut self.busy, first, first + blocks);
        self.free += u64::from(blocks);
        if self.closed { 0 } else { blocks.into() }
    }

    /// Takes up to `wanted` free blocks from `start`, which is free, on.
    fn take(&mut self, start: u32, wanted: u64) -> u64 {
        let end = u64::from(start).saturating_add(wanted).min(self.blocks.into()) as u32;
        let mut block = start;
        while block < end && !bit(&self.busy, block) {
            let (word, mask) = (block as usize / 64, 1 << (block % 64));
            self.busy[word] |= mask;
            self.live[word] |= mask;
            self.fresh[word] |= mask;
            block += 1;
        }
        for piece in start / PIECE_BLOCKS..=(block - 1) / PIECE_BLOCKS {
            self.changed.insert(piece);
            self.fresh_pieces.insert(piece);
        }
        self.cursor = if block < self.blocks { block } else { 0 };
        self.free -= u64::from(block - start);
        (block - start).into()
    }

    /// The first free block at or behind the cursor, from the start again at the end.
    fn next_free(&self) -> Option<u32> {
        let words = self.busy.len();
        let first = self.cursor as usize / 64;
        let ahead = !self.busy[first] & (u64::MAX << (self.cursor % 64));
        if ahead != 0 {
            return Some(first as u32 * 64 + ahead.trailing_zeros());
        }
        (1..=words)
            .map(|step| (first + step) % words)
            .find(|&index| self.busy[index] != u64::MAX)
            .map(|index| index as u32 * 64 + (!self.busy[index]).trailing_zeros())
    }
}

#[inline]
fn bit(words: &[u64], block: u32) -> bool {
    words[block as usize / 64] >> (block % 64) & 1 != 0
}

#[inline]
fn set_bit(words: &mut [u64], block: u32) {
    words[block as usize / 64] |= 1 << (block % 64);
}

fn clear_range(words: &mut [u64], from: u32, to: u32) {
    for index in from / 64..to.div_ceil(64) {
        let mut mask = u64::MAX;
        if index == from / 64 {
            mask &= u64::MAX << (from % 64);
        }
        if index == to / 64 {
            mask &= (1 << (to % 64)) - 1;
        }
        words[index as usize] &= !mask;
    }
}

/// The runs of ones in a word: first bit and count.
fn runs_of(mut word: u64) -> impl Iterator<Item = (u32, u32)> {
    std::iter::from_fn(move || {
        if word == 0 {
            return None;
        }
        let first = word.trailing_zeros();
        let count = (word >> first).trailing_ones();
        word &= if first + count == 64 { 0 } else { u64::MAX << (first + count) };
        Some((first, count))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const SESSION: SessionId = SessionId(1);

    fn at(segment: u32, block: u32) -> BlockAddress {
        BlockAddress::new(NodeNumber::FIRST, segment, block)
    }

    fn freer(end: u64) -> Freer {
        Freer { session: SESSION, end: LogPosition(end) }
    }

    fn small() -> Allocator {
        let mut allocator = Allocator::default();
        allocator.add_segment(0, 100);
        allocator.add_segment(1, 70);
        allocator
    }

    #[test]
    fn every_block_is_given_out_once() {
        let mut allocator = small();
        let mut seen = BTreeSet::new();
        while let Some((address, count)) = allocator.allocate(7, None) {
            assert!(count > 0 && count <= 7);
            for step in 0..count {
                assert!(seen.insert(address.plus(step)));
            }
        }
        assert_eq!(seen.len(), 170);
        assert_eq!(allocator.free_blocks(), 0);
    }

    #[test]
    fn a_freed_block_waits_for_commit_and_release() {
        for release_first in [false, true] {
            let mut allocator = small();
            while allocator.allocate(1000, None).is_some() {}
            allocator.freeze();
            allocator.committed(u64::MAX);
            allocator.free(at(0, 5), 3, freer(50));
            assert_eq!((allocator.free_blocks(), allocator.pinned_blocks()), (0, 3));
            if release_first {
                allocator.release(SESSION, LogPosition(50), u64::MAX);
            }
            assert_eq!(allocator.allocate(1, None), None);
            allocator.freeze();
            assert_eq!(allocator.allocate(1, None), None);
            allocator.committed(u64::MAX);
            if !release_first {
                allocator.release(SESSION, LogPosition(49), u64::MAX);
                assert_eq!(allocator.allocate(1, None), None);
                allocator.release(SESSION, LogPosition(50), u64::MAX);
            }
            assert_eq!((allocator.free_blocks(), allocator.pinned_blocks()), (3, 0));
            assert_eq!(allocator.allocate(9, None), Some((at(0, 5), 3)));
        }
    }

    #[test]
    fn blocks_freed_after_a_freeze_wait_for_the_next_commit() {
        let mut allocator = small();
        while allocator.allocate(1000, None).is_some() {}
        allocator.freeze();
        allocator.free(at(1, 0), 1, freer(1));
        allocator.release(SESSION, LogPosition(9), u64::MAX);
        allocator.committed(u64::MAX);
        // The commit that has just ended knows nothing of the freeing, unless it was frozen with it.
        assert_eq!(allocator.free_blocks(), 0);
        allocator.freeze();
        allocator.committed(u64::MAX);
        assert_eq!(allocator.free_blocks(), 1);
    }

    #[test]
    fn rows_bring_the_live_blocks_back() {
        let mut allocator = small();
        allocator.allocate(30, None);
        allocator.allocate(20, Some(at(1, 50)));
        let frozen = allocator.freeze();
        assert_eq!(frozen.written, [(0, 0, 30), (1, 50, 20)]);
        assert!(!allocator.is_fresh(at(0, 0)));
        let mut again = small();
        for (key, value) in frozen.rows {
            let (number, _) = rows::split_key1(&key).unwrap();
            assert!(again.load((number >> 32) as u32, number as u32, &value.unwrap()));
        }
        assert_eq!(again.free_blocks(), 120);
        assert_eq!((again.live_blocks_in(0), again.live_blocks_in(1)), (Some(30), Some(20)));
        assert_eq!(again.allocate(99, Some(at(1, 49))), Some((at(1, 49), 1)));
        assert!(!again.load(1, 0, &[0xff; PIECE_BYTES]), "bits behind the segment's end");
    }

    /// The remaining free blocks, one by one.
    fn rest(allocator: &mut Allocator) -> Vec<u32> {
        std::iter::from_fn(|| allocator.allocate(1, None)).map(|(address, _)| address.block()).collect()
    }

    fn full() -> Allocator {
        let mut allocator = Allocator::default();
        allocator.add_segment(0, 100);
        while allocator.allocate(1000, None).is_some() {}
        allocator.freeze();
        allocator.committed(u64::MAX);
        allocator
    }

    #[test]
    fn a_freed_block_that_is_held_waits_for_all_holders() {
        let mut allocator = full();
        assert!(allocator.hold(at(0, 10), 4) && allocator.hold(at(0, 12), 4));
        assert!(!allocator.hold(at(0, 98), 4) && !allocator.hold(at(1, 0), 1), "no such blocks");
        allocator.free(at(0, 8), 8, Freer::NOBODY);
        assert!(!allocator.is_loose(at(0, 10), u64::MAX), "the commit of the freeing is not done");
        allocator.freeze();
        allocator.committed(u64::MAX);
        assert!(allocator.is_loose(at(0, 10), u64::MAX) && !allocator.is_loose(at(0, 8), u64::MAX));
        assert_eq!(rest(&mut allocator), [8, 9]);
        allocator.release_hold(at(0, 10), 4);
        assert_eq!((allocator.free_blocks(), rest(&mut allocator)), (2, vec![10, 11]));
        allocator.release_hold(at(0, 12), 4);
        assert_eq!(rest(&mut allocator), [12, 13, 14, 15]);
        assert!(!allocator.is_held_in(0));
    }

    #[test]
    fn hold_released_before_the_commit_changes_nothing() {
        let mut allocator = full();
        assert!(allocator.hold(at(0, 10), 4));
        allocator.free(at(0, 10), 2, Freer::NOBODY);
        allocator.release_hold(at(0, 10), 4);
        assert_eq!(rest(&mut allocator), [0; 0]);
        allocator.freeze();
        allocator.committed(u64::MAX);
        assert_eq!(rest(&mut allocator), [10, 11]);
    }

    #[test]
    fn blocks_that_were_mapped_before_a_start_are_used_until_let_go() {
        let mut allocator = Allocator::default();
        allocator.add_segment(0, 100);
        assert!(allocator.hold(at(0, 10), 4));
        assert_eq!(allocator.free_blocks(), 96);
        assert!(allocator.is_loose(at(0, 10), u64::MAX));
        assert!(!rest(&mut allocator).contains(&10));
        allocator.release_hold(at(0, 10), 4);
        assert_eq!(rest(&mut allocator), [10, 11, 12, 13]);
    }

    #[test]
    fn block_freed_after_a_reader_began_waits_for_it() {
        let mut allocator = full();
        allocator.free(at(0, 3), 1, Freer::NOBODY);
        allocator.freeze();
        let bound = allocator.frozen_batches();
        allocator.committed(bound);
        assert_eq!(allocator.free_blocks(), 1, "the reader sees the block freed");
        allocator.free(at(0, 4), 1, Freer::NOBODY);
        allocator.freeze();
        allocator.committed(bound);
        assert_eq!(allocator.free_blocks(), 1, "the reader may see the block in use");
        allocator.reclaim_all(u64::MAX);
        assert_eq!(allocator.free_blocks(), 2);
    }

    #[test]
    fn a_closed_segment_gives_nothing() {
        let mut allocator = small();
        allocator.close(0, true);
        assert_eq!(allocator.allocate(5, Some(at(0, 0))), Some((at(1, 0), 5)));
        assert_eq!(allocator.free_blocks(), 65);
    }
}
