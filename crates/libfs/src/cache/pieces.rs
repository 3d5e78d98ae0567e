//! The pieces of a file's map, by offset.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ashlar_types::{BLOCK_BYTES, BlockAddress, LogPosition};

/// Where a piece's bytes are.
#[derive(Clone, Debug)]
pub(crate) enum PieceSource {
    /// In the session's own log: the bytes from `body` on, in the record that begins at `record`.
    Log { record: LogPosition, body: LogPosition },
    /// In a data segment: `skip` bytes behind the start of a block.
    Segment { block: BlockAddress, skip: u64 },
    /// In memory, as they came with the grant, from this index on.
    Inline(Arc<[u8]>, usize),
    /// The session's user may not read them.
    Withheld,
}

impl PieceSource {
    pub(crate) fn advanced(&self, bytes: u64) -> Self {
        match self {
            Self::Log { record, body } => Self::Log { record: *record, body: body.plus(bytes) },
            Self::Segment { block, skip } => {
                let at = skip + bytes;
                Self::Segment { block: block.plus(at / BLOCK_BYTES), skip: at % BLOCK_BYTES }
            }
            Self::Inline(data, index) => Self::Inline(Arc::clone(data), index + bytes as usize),
            Self::Withheld => Self::Withheld,
        }
    }
}

#[derive(Debug)]
pub(crate) struct Piece {
    pub(crate) length: u64,
    pub(crate) source: PieceSource,
    /// Whether the piece's record in the log was found whole. Readers share the map, so any of them may set it.
    is_verified: AtomicBool,
}

impl Piece {
    pub(crate) fn new(length: u64, source: PieceSource) -> Self {
        Self { length, source, is_verified: AtomicBool::new(false) }
    }

    /// Cuts the piece after its first `length` bytes, and returns the rest.
    pub(crate) fn cut(&mut self, length: u64) -> Self {
        let rest = Self::new(self.length - length, self.source.advanced(length));
        self.length = length;
        rest
    }

    pub(crate) fn is_verified(&self) -> bool {
        self.is_verified.load(Ordering::Relaxed)
    }

    pub(crate) fn set_verified(&self) {
        self.is_verified.store(true, Ordering::Relaxed);
    }
}

/// Disjoint pieces in order, in a tree and a list behind it.
///
/// Pieces that were appended one after the other are in the list, where one more costs next to nothing. A file that is
/// only appended to is one list.
#[derive(Debug, Default)]
pub(crate) struct Pieces {
    tree: BTreeMap<u64, Piece>,
    /// Pieces behind all those in the tree.
    tail: Vec<(u64, Piece)>,
}

impl Pieces {
    /// Returns the end of the last piece.
    fn end(&self) -> u64 {
        let last = self.tail.last().map(|(at, piece)| (at, piece)).or_else(|| self.tree.last_key_value());
        last.map_or(0, |(at, piece)| at + piece.length)
    }

    /// Puts in a piece, in place of all bytes there.
    pub(crate) fn put(&mut self, at: u64, piece: Piece) {
        if at >= self.end() {
            self.tail.push((at, piece));
            return;
        }
        // Most overwrites cover exactly an earlier write.
        let place = match self.find_in_tail(at) {
            Some(index) => self.tail.get_mut(index).map(|(start, found)| (*start, found)),
            None => self.tree.range_mut(..=at).next_back().map(|(start, found)| (*start, found)),
        };
        match place.filter(|(start, found)| *start == at && found.length == piece.length) {
            Some((_, found)) => *found = piece,
            None => {
                self.clear(at, at + piece.length);
                self.tree.insert(at, piece);
            }
        }
    }

    /// Returns the last piece of the tail that begins at or before `at`.
    fn find_in_tail(&self, at: u64) -> Option<usize> {
        let first = self.tail.first().filter(|(first, _)| *first <= at)?.0;
        // Most appends have one length, so a division finds their piece without a search.
        let (last, length) = (self.tail.len() - 1, self.tail[0].1.length.max(1));
        let guess = ((at - first) / length).min(last as u64) as usize;
        let fits = |index: usize| self.tail[index].0 <= at && self.tail.get(index + 1).is_none_or(|next| next.0 > at);
        if fits(guess) { Some(guess) } else { Some(self.tail.partition_point(|(start, _)| *start <= at) - 1) }
    }

    /// Moves the tail to the tree, if the pieces end behind `at`.
    fn move_tail_to_tree(&mut self, at: u64) {
        if self.end() <= at || self.tail.is_empty() {
            return;
        }
        let tail = std::mem::take(&mut self.tail);
        if self.tree.is_empty() {
            self.tree = tail.into_iter().collect();
        } else {
            self.tree.extend(tail);
        }
    }

    /// Makes `at` a border between pieces.
    pub(crate) fn split(&mut self, at: u64) {
        self.move_tail_to_tree(at);
        self.split_in_tree(at);
    }

    fn split_in_tree(&mut self, at: u64) {
        if let Some((&start, piece)) = self.tree.range_mut(..at).next_back() {
            if start + piece.length > at {
                let rest = piece.cut(at - start);
                self.tree.insert(at, rest);
            }
        }
    }

    /// Removes all pieces from `start..end`.
    pub(crate) fn clear(&mut self, start: u64, end: u64) {
        if start >= self.end() {
            return;
        }
        if let Some(&(first, _)) = self.tail.first().filter(|(first, _)| *first < end) {
            if start <= first && end >= self.end() {
                self.tail.clear();
            } else {
                self.move_tail_to_tree(start);
            }
        }
        self.split_in_tree(start);
        if end != u64::MAX {
            self.split_in_tree(end);
        }
        while let Some((&at, _)) = self.tree.range(start..end).next() {
            self.tree.remove(&at);
        }
    }

    /// Moves all pieces from `from` on to other offsets, in the same order and behind those before.
    pub(crate) fn shift(&mut self, from: u64, moved: impl Fn(u64) -> u64) {
        self.move_tail_to_tree(from);
        let behind = self.tree.split_off(&from);
        self.tree.extend(behind.into_iter().map(|(at, piece)| (moved(at), piece)));
    }

    /// Returns the last piece that begins at or before `at`.
    pub(crate) fn at_or_before(&self, at: u64) -> Option<(u64, &Piece)> {
        match self.find_in_tail(at) {
            Some(index) => self.tail.get(index).map(|(start, piece)| (*start, piece)),
            None => self.tree.range(..=at).next_back().map(|(start, piece)| (*start, piece)),
        }
    }

    /// Returns the pieces that begin in `start..end`, in order.
    pub(crate) fn between(&self, start: u64, end: u64) -> impl Iterator<Item = (u64, &Piece)> {
        let first = self.tail.partition_point(|(at, _)| *at < start);
        let tail = self.tail[first..].iter().take_while(move |(at, _)| *at < end);
        self.tree.range(start..end).map(|(at, piece)| (*at, piece)).chain(tail.map(|(at, piece)| (*at, piece)))
    }
}
