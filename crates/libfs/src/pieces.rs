//! The pieces of a file, by where they begin.

use std::collections::BTreeMap;

use crate::content::Piece;

/// Disjoint pieces in order. Those that were appended since anything else happened behind them stand in a list, where one more
/// costs next to nothing; all others in a tree. A file to which only is appended is one list.
#[derive(Debug, Default)]
pub(crate) struct Pieces {
    tree: BTreeMap<u64, Piece>,
    /// All behind those in the tree.
    tail: Vec<(u64, Piece)>,
}

impl Pieces {
    /// The end of the last piece.
    fn end(&self) -> u64 {
        let last = self.tail.last().map(|(at, piece)| (at, piece)).or_else(|| self.tree.last_key_value());
        last.map_or(0, |(at, piece)| at + piece.length)
    }

    /// Puts in a piece in place of all that is there.
    pub(crate) fn put(&mut self, at: u64, piece: Piece) {
        if at >= self.end() {
            self.tail.push((at, piece));
            return;
        }
        // The common overwrite takes the very place of an earlier write.
        let place = match self.in_tail(at) {
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

    /// The last piece of the tail that begins at or before `at`.
    fn in_tail(&self, at: u64) -> Option<usize> {
        let first = self.tail.first().filter(|(first, _)| *first <= at)?.0;
        // Pieces of one length, as most appends are, need no search.
        let (last, length) = (self.tail.len() - 1, self.tail[0].1.length.max(1));
        let guess = ((at - first) / length).min(last as u64) as usize;
        let fits = |index: usize| self.tail[index].0 <= at && self.tail.get(index + 1).is_none_or(|next| next.0 > at);
        if fits(guess) { Some(guess) } else { Some(self.tail.partition_point(|(start, _)| *start <= at) - 1) }
    }

    /// Moves the tail to the tree, if it goes on behind `at`.
    fn settle(&mut self, at: u64) {
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
        self.settle(at);
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

    /// Takes all pieces out of `start..end`.
    pub(crate) fn clear(&mut self, start: u64, end: u64) {
        if start >= self.end() {
            return;
        }
        if let Some(&(first, _)) = self.tail.first().filter(|(first, _)| *first < end) {
            if start <= first && end >= self.end() {
                self.tail.clear();
            } else {
                self.settle(start);
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

    /// Has all pieces from `from` on begin elsewhere, in the same order and behind those before.
    pub(crate) fn shift(&mut self, from: u64, moved: impl Fn(u64) -> u64) {
        self.settle(from);
        let behind = self.tree.split_off(&from);
        self.tree.extend(behind.into_iter().map(|(at, piece)| (moved(at), piece)));
    }

    /// The last piece that begins at or before `at`.
    pub(crate) fn at_or_before(&self, at: u64) -> Option<(u64, &Piece)> {
        match self.in_tail(at) {
            Some(index) => self.tail.get(index).map(|(start, piece)| (*start, piece)),
            None => self.tree.range(..=at).next_back().map(|(start, piece)| (*start, piece)),
        }
    }

    /// The pieces that begin in `start..end`, in order.
    pub(crate) fn between(&self, start: u64, end: u64) -> impl Iterator<Item = (u64, &Piece)> {
        let first = self.tail.partition_point(|(at, _)| *at < start);
        let tail = self.tail[first..].iter().take_while(move |(at, _)| *at < end);
        self.tree.range(start..end).map(|(at, piece)| (*at, piece)).chain(tail.map(|(at, piece)| (*at, piece)))
    }
}
