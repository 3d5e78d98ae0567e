//! The pieces of a file's map, by offset.

use std::collections::BTreeMap;

use crate::content::Piece;

/// Disjoint pieces in order, in a tree and a list behind it.
///
/// Pieces that were appended one after the other stand in the list, where one more costs next to nothing. A file that
/// is only appended to is one list.
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

    /// Returns the last piece of the tail that begins at or before `at`.
    fn in_tail(&self, at: u64) -> Option<usize> {
        let first = self.tail.first().filter(|(first, _)| *first <= at)?.0;
        // Most appends have one length, so a division finds their piece without a search.
        let (last, length) = (self.tail.len() - 1, self.tail[0].1.length.max(1));
        let guess = ((at - first) / length).min(last as u64) as usize;
        let fits = |index: usize| self.tail[index].0 <= at && self.tail.get(index + 1).is_none_or(|next| next.0 > at);
        if fits(guess) { Some(guess) } else { Some(self.tail.partition_point(|(start, _)| *start <= at) - 1) }
    }

    /// Moves the tail to the tree, if the pieces end behind `at`.
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

    /// Removes all pieces from `start..end`.
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

    /// Moves all pieces from `from` on to other offsets, in the same order and behind those before.
    pub(crate) fn shift(&mut self, from: u64, moved: impl Fn(u64) -> u64) {
        self.settle(from);
        let behind = self.tree.split_off(&from);
        self.tree.extend(behind.into_iter().map(|(at, piece)| (moved(at), piece)));
    }

    /// Returns the last piece that begins at or before `at`.
    pub(crate) fn at_or_before(&self, at: u64) -> Option<(u64, &Piece)> {
        match self.in_tail(at) {
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
