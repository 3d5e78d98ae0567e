//! The buffer in which a reply is put together.

use std::ops::Range;

use ashlar_types::{Errno, InodeId};
use zerocopy::{Immutable, IntoBytes};

use crate::proto::OutHeader;

const HEADER: usize = size_of::<OutHeader>();

/// A reply: a header, which is filled in last, and a body, in one piece of memory that is used again for the next
/// reply. One piece, so that one plain `write` sends it.
#[derive(Debug)]
pub(crate) struct ReplyBuffer {
    buffer: Vec<u8>,
    length: usize,
    cached: Vec<CachedItem>,
    /// The request has asked how long names may be kept.
    pub(crate) has_name_ttls: bool,
}

/// An item that the kernel caches from a reply, and that is checked again after the reply was sent. If its lease was
/// lost in between, SharedFS made the kernel forget an item that it didn't have yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum CachedItem {
    /// Attributes of an inode.
    Attributes(InodeId),
    /// Attributes and pages of an inode.
    Pages(InodeId),
    /// A name in a directory, at this place of the request's body.
    Name(InodeId, Range<usize>),
    /// A name in a directory, at this place of the reply's body, and attributes of the inode that it leads to.
    Listed(InodeId, InodeId, Range<usize>),
}

impl ReplyBuffer {
    /// Makes a buffer for bodies of at most `capacity` bytes.
    pub(crate) fn new(capacity: usize) -> Self {
        Self { buffer: vec![0; HEADER + capacity], length: HEADER, cached: Vec::new(), has_name_ttls: false }
    }

    /// Empties it for the next request.
    pub(crate) fn clear(&mut self) {
        self.length = HEADER;
        self.cached.clear();
    }

    /// Returns the number of bytes in the body so far.
    pub(crate) const fn body_length(&self) -> usize {
        self.length - HEADER
    }

    /// Returns the bytes of the body at this place.
    pub(crate) fn body(&self, range: Range<usize>) -> &[u8] {
        self.buffer.get(HEADER + range.start..HEADER + range.end).unwrap_or_default()
    }

    /// Returns the bytes of the body at this place, to be changed.
    pub(crate) fn body_mut(&mut self, range: Range<usize>) -> &mut [u8] {
        self.buffer.get_mut(HEADER + range.start..HEADER + range.end).unwrap_or_default()
    }

    /// Cuts the body off.
    pub(crate) fn truncate(&mut self, body_length: usize) {
        self.length = self.length.min(HEADER + body_length);
    }

    /// Appends bytes.
    pub(crate) fn bytes(&mut self, bytes: &[u8]) -> Result<(), Errno> {
        self.space(bytes.len())?.copy_from_slice(bytes);
        self.length += bytes.len();
        Ok(())
    }

    /// Appends a structure.
    pub(crate) fn structure<T: IntoBytes + Immutable>(&mut self, value: &T) -> Result<(), Errno> {
        self.bytes(value.as_bytes())
    }

    /// Returns the next `count` bytes of the buffer, to be filled in place. [`Self::fill`] then appends those that were
    /// filled.
    pub(crate) fn space(&mut self, count: usize) -> Result<&mut [u8], Errno> {
        self.buffer.get_mut(self.length..).and_then(|rest| rest.get_mut(..count)).ok_or(Errno::EIO)
    }

    /// Appends the first `count` bytes that were filled in place.
    pub(crate) fn fill(&mut self, count: usize) {
        self.length = self.buffer.len().min(self.length + count);
    }

    /// Records an item that the kernel caches from this reply.
    pub(crate) fn record_cached(&mut self, item: CachedItem) {
        self.cached.push(item);
    }

    /// Returns how many items are recorded so far.
    pub(crate) fn cached_count(&self) -> usize {
        self.cached.len()
    }

    /// Forgets the items after the first `count`.
    pub(crate) fn truncate_cached(&mut self, count: usize) {
        self.cached.truncate(count);
    }

    /// Whether the kernel keeps anything of it.
    pub(crate) fn is_cached(&self) -> bool {
        self.has_name_ttls || !self.cached.is_empty()
    }

    /// Returns the recorded items.
    pub(crate) fn cached_items(&self) -> &[CachedItem] {
        &self.cached
    }

    /// Fills in the header, and returns the whole reply.
    pub(crate) fn seal(&mut self, unique: u64, result: Result<(), Errno>) -> &[u8] {
        if result.is_err() {
            self.clear();
        }
        let error = result.err().map_or(0, |errno| errno.0.saturating_neg());
        let header = OutHeader { len: u32::try_from(self.length).unwrap_or(0), error, unique };
        if let Some(head) = self.buffer.get_mut(..HEADER) {
            head.copy_from_slice(header.as_bytes());
        }
        self.buffer.get(..self.length).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reply_begins_with_its_length_and_number() {
        let mut reply = ReplyBuffer::new(16);
        reply.bytes(b"abc").unwrap();
        reply.space(4).unwrap()[..2].copy_from_slice(b"de");
        reply.fill(2);
        let sent = reply.seal(9, Ok(())).to_vec();
        assert_eq!(sent[..4], 21_u32.to_ne_bytes());
        assert_eq!(sent[4..8], 0_i32.to_ne_bytes());
        assert_eq!(sent[8..16], 9_u64.to_ne_bytes());
        assert_eq!(&sent[16..], b"abcde");
    }

    #[test]
    fn error_reply_has_no_body_and_no_cached_items() {
        let mut reply = ReplyBuffer::new(16);
        reply.bytes(b"abc").unwrap();
        reply.record_cached(CachedItem::Attributes(InodeId(3)));
        let sent = reply.seal(9, Err(Errno::ENOENT)).to_vec();
        assert_eq!(sent.len(), 16);
        assert_eq!(sent[4..8], (-2_i32).to_ne_bytes());
        assert!(reply.cached_items().is_empty());
    }

    #[test]
    fn reply_that_does_not_fit_is_an_error() {
        let mut reply = ReplyBuffer::new(4);
        reply.bytes(b"abc").unwrap();
        assert_eq!(reply.bytes(b"de").unwrap_err(), Errno::EIO);
        assert_eq!(reply.body_length(), 3);
    }
}
