//! A file's map from offsets to bytes: in the log, a data segment, memory, or zeros.

use std::ops::Range;

use ashlar_types::{BLOCK_BYTES, Contents, ExtentVersion, LogPosition, blocks_for};
use ashlar_update::Allocation;

use crate::cache::intervals::Intervals;
use crate::cache::pieces::{Piece, PieceSource, Pieces};

/// A change of a file's content, as logged.
#[derive(Clone, Copy, Debug)]
pub(crate) enum DataChange {
    /// Bytes at `offset`; they lie in the log at `body`, in the record that begins at `record`.
    Write { offset: u64, length: u64, record: LogPosition, body: LogPosition },
    /// A new size.
    Resize { size: u64 },
    /// `fallocate`, with the size afterwards.
    Allocate { how: Allocation, offset: u64, length: u64, size: u64 },
}

/// A file's map: where its bytes lie, and which blocks it takes up. Bytes that no piece covers are zeros.
#[derive(Debug, Default)]
pub(crate) struct FileMap {
    pieces: Pieces,
    blocks: Intervals,
    size: u64,
    /// The extent version for which SharedFS sent the extents; `None` if it sent none.
    extent_version: Option<ExtentVersion>,
}

impl FileMap {
    /// Returns the map that SharedFS sent for a file of `size` bytes, valid for this extent version.
    pub(crate) fn from_grant(contents: &Contents, size: u64, version: ExtentVersion) -> Self {
        let mut content = Self { size, ..Self::default() };
        match contents {
            Contents::Inline(bytes) => {
                if !bytes.is_empty() {
                    let length = bytes.len() as u64;
                    let source = PieceSource::Inline(bytes.as_slice().into(), 0);
                    content.pieces.put(0, Piece::new(length, source));
                    content.blocks.insert(0, blocks_for(length));
                }
            }
            Contents::Extents(extents) => {
                content.extent_version = Some(version);
                for extent in extents {
                    content.blocks.insert(extent.logical_block, extent.logical_block + extent.blocks);
                    if let Some(block) = extent.address {
                        let piece = Piece::new(extent.blocks * BLOCK_BYTES, PieceSource::Segment { block, skip: 0 });
                        content.pieces.put(extent.logical_block * BLOCK_BYTES, piece);
                    }
                }
                // On media, a block's bytes behind the end of the file are zeros. They must not be in the map: a later
                // growth would take them for written data.
                content.pieces.clear(size, u64::MAX);
            }
            Contents::Withheld(extents) => {
                content.extent_version = Some(version);
                for extent in extents {
                    content.blocks.insert(extent.logical_block, extent.logical_block + extent.blocks);
                }
                if size > 0 {
                    content.pieces.put(0, Piece::new(size, PieceSource::Withheld));
                }
            }
        }
        content
    }

    /// Returns whether data blocks are still where the map says, at this extent version.
    pub(crate) fn is_current(&self, version: ExtentVersion) -> bool {
        self.extent_version.is_none_or(|extent_version| extent_version == version)
    }

    /// Returns how many blocks the file takes up.
    #[cfg(test)]
    fn block_count(&self) -> u64 {
        self.blocks.count()
    }

    /// Returns how many blocks of a range the file does not take up.
    pub(crate) fn blocks_missing(&self, range: Range<u64>) -> u64 {
        (range.end - range.start).saturating_sub(self.blocks.count_within(range.start, range.end))
    }

    /// Applies a change; returns how many blocks the file takes up afterwards.
    pub(crate) fn apply(&mut self, change: &DataChange) -> u64 {
        match *change {
            DataChange::Write { offset, length, record, body } => {
                self.write(offset, length, PieceSource::Log { record, body });
            }
            DataChange::Resize { size } => self.resize(size),
            DataChange::Allocate { how, offset, length, size } => self.allocate(how, offset, length, size),
        }
        self.blocks.count()
    }

    fn write(&mut self, offset: u64, length: u64, source: PieceSource) {
        if length == 0 {
            return;
        }
        self.pieces.put(offset, Piece::new(length, source));
        self.blocks.insert(offset / BLOCK_BYTES, blocks_for(offset + length));
        self.size = self.size.max(offset + length);
    }

    fn resize(&mut self, size: u64) {
        if size <= self.size {
            self.pieces.clear(size, u64::MAX);
            self.blocks.remove(blocks_for(size), u64::MAX);
        }
        self.size = size;
    }

    fn allocate(&mut self, how: Allocation, offset: u64, length: u64, size: u64) {
        let end = offset + length;
        let (first, last) = (offset / BLOCK_BYTES, blocks_for(end));
        match how {
            Allocation::Reserve | Allocation::ReserveKeepSize => self.blocks.insert(first, last),
            Allocation::Zero | Allocation::ZeroKeepSize => {
                self.pieces.clear(offset, end);
                self.blocks.insert(first, last);
            }
            Allocation::Punch => {
                self.pieces.clear(offset, end);
                self.blocks.remove(blocks_for(offset), end / BLOCK_BYTES);
            }
            Allocation::Collapse => {
                self.pieces.clear(offset, end);
                self.pieces.shift(end, |at| at - length);
                self.blocks.collapse(first, last);
            }
            Allocation::Insert => {
                self.pieces.split(offset);
                self.pieces.shift(offset, |at| at + length);
                self.blocks.open_gap(first, length / BLOCK_BYTES);
            }
        }
        self.size = size;
    }

    /// Returns the block behind the last one that is taken up, which may be reserved behind the file's end.
    pub(crate) fn end_block(&self) -> u64 {
        self.blocks.end()
    }

    /// Calls `each` with the parts of `start..end` in order; stops at the first error.
    ///
    /// Each call gets the part's offset, its length, its piece, and the part's offset in the piece. A part without a
    /// piece (`None`) is zeros.
    pub(crate) fn walk_parts<E>(
        &self,
        start: u64,
        end: u64,
        mut each: impl FnMut(u64, u64, Option<(&Piece, u64)>) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut at = start;
        let before = self.pieces.at_or_before(start);
        if let Some((piece_start, piece)) = before.filter(|(at, piece)| at + piece.length >= end) {
            // Most reads lie in one piece.
            return if start < end { each(start, end - start, Some((piece, start - piece_start))) } else { Ok(()) };
        }
        let first = before.map_or(start, |(at, _)| at);
        for (piece_start, piece) in self.pieces.between(first, end) {
            let piece_end = piece_start + piece.length;
            if piece_end <= at {
                continue;
            }
            if piece_start > at {
                each(at, piece_start - at, None)?;
                at = piece_start;
            }
            let stop = piece_end.min(end);
            each(at, stop - at, Some((piece, at - piece_start)))?;
            at = stop;
        }
        if at < end {
            each(at, end - at, None)?;
        }
        Ok(())
    }

    /// Returns the first offset from `offset` on in a block that is taken up (`data`) or isn't. It lies before the
    /// file's end.
    pub(crate) fn seek(&self, offset: u64, data: bool) -> Option<u64> {
        let block = self.blocks.next(offset / BLOCK_BYTES, data)?;
        let found = (block.checked_mul(BLOCK_BYTES)?).max(offset);
        (found < self.size).then_some(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SPACE: usize = 20 * 4096;

    /// A file as an array of bytes: each is the log position that it came from (0: zero).
    #[derive(Clone)]
    struct Model {
        bytes: Vec<u64>,
        blocks: Vec<bool>,
        size: u64,
    }

    fn change() -> impl Strategy<Value = (u8, u64, u64)> {
        (0u8..9, 0u64..40_000, 1u64..9_000)
    }

    fn apply(model: &mut Model, content: &mut FileMap, (what, offset, length): (u8, u64, u64), clock: &mut u64) {
        let block = BLOCK_BYTES as usize;
        // Appends, one behind the other.
        let offset = if what == 0 && model.size + length < 60_000 { model.size } else { offset };
        let (o, l) = (offset as usize, length as usize);
        let change = match what {
            0..=2 => {
                let body = LogPosition(*clock);
                for i in 0..l {
                    model.bytes[o + i] = *clock + i as u64;
                }
                model.blocks[o / block..(o + l).div_ceil(block)].fill(true);
                model.size = model.size.max(offset + length);
                *clock += 10_000;
                DataChange::Write { offset, length, record: body, body }
            }
            3 => {
                if offset <= model.size {
                    model.blocks[o.div_ceil(block)..].fill(false);
                }
                model.bytes[o..].fill(0);
                model.size = offset;
                DataChange::Resize { size: offset }
            }
            4 => {
                model.blocks[o / block..(o + l).div_ceil(block)].fill(true);
                model.size = model.size.max(offset + length);
                DataChange::Allocate { how: Allocation::Reserve, offset, length, size: model.size }
            }
            5 => {
                model.bytes[o..o + l].fill(0);
                if o.div_ceil(block) < (o + l) / block {
                    model.blocks[o.div_ceil(block)..(o + l) / block].fill(false);
                }
                DataChange::Allocate { how: Allocation::Punch, offset, length, size: model.size }
            }
            6 => {
                model.bytes[o..o + l].fill(0);
                model.blocks[o / block..(o + l).div_ceil(block)].fill(true);
                DataChange::Allocate { how: Allocation::ZeroKeepSize, offset, length, size: model.size }
            }
            7 => {
                let (o, l) = (o / block * block, l.div_ceil(block) * block);
                if (o + l) as u64 >= model.size {
                    return;
                }
                model.bytes.drain(o..o + l);
                model.bytes.resize(SPACE, 0);
                model.blocks.drain(o / block..(o + l) / block);
                model.blocks.resize(SPACE / block, false);
                model.size -= l as u64;
                DataChange::Allocate { how: Allocation::Collapse, offset: o as u64, length: l as u64, size: model.size }
            }
            _ => {
                let (o, l) = (o / block * block, l.div_ceil(block) * block);
                if o as u64 >= model.size || model.size + l as u64 > 50_000 {
                    return;
                }
                model.bytes.splice(o..o, std::iter::repeat_n(0, l));
                model.bytes.truncate(SPACE);
                model.blocks.splice(o / block..o / block, std::iter::repeat_n(false, l / block));
                model.blocks.truncate(SPACE / block);
                model.size += l as u64;
                DataChange::Allocate { how: Allocation::Insert, offset: o as u64, length: l as u64, size: model.size }
            }
        };
        if let DataChange::Write { offset, length, .. } = change {
            let range = offset / BLOCK_BYTES..blocks_for(offset + length);
            let missing = content.blocks_missing(range.clone());
            let before = content.block_count();
            content.apply(&change);
            assert_eq!(missing, content.block_count() - before);
            return;
        }
        content.apply(&change);
    }

    proptest! {
        #[test]
        fn random_changes_map_bytes_like_an_array(changes in prop::collection::vec(change(), 1..40)) {
            let mut model = Model { bytes: vec![0; SPACE], blocks: vec![false; SPACE / 4096], size: 0 };
            let (mut content, mut clock) = (FileMap::default(), 1_000_000);
            for change in changes {
                apply(&mut model, &mut content, change, &mut clock);
                prop_assert_eq!(content.block_count(), model.blocks.iter().filter(|b| **b).count() as u64);
                let mut seen = Vec::new();
                content.walk_parts::<()>(0, model.size, |at, length, found| {
                    let source = found.map(|(piece, skip)| piece.source.advanced(skip));
                    assert_eq!(at, seen.len() as u64);
                    for i in 0..length {
                        seen.push(match &source { Some(PieceSource::Log { body, .. }) => body.0 + i, _ => 0 });
                    }
                    Ok(())
                }).expect("nothing fails");
                prop_assert_eq!(&seen[..], &model.bytes[..model.size as usize]);
            }
        }
    }
}
