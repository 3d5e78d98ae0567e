//! Bytes that are put together on the stack.

use std::mem::MaybeUninit;

/// Up to `N` bytes. Nothing clears those that are not used: for a record of a page, clearing a buffer costs as much as
/// copying to it.
pub(crate) struct StackBuffer<const N: usize> {
    bytes: [MaybeUninit<u8>; N],
    filled: usize,
}

impl<const N: usize> StackBuffer<N> {
    #[inline]
    pub(crate) fn new() -> Self {
        Self { bytes: [MaybeUninit::uninit(); N], filled: 0 }
    }

    /// How many bytes it holds.
    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.filled
    }

    /// Adds bytes. There must be room for them.
    #[inline]
    pub(crate) fn push(&mut self, bytes: &[u8]) {
        let place = &mut self.bytes[self.filled..self.filled + bytes.len()];
        // SAFETY: the place is as long as the source, and ours alone; a byte that may be uninitialised takes any byte.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), place.as_mut_ptr().cast::<u8>(), bytes.len()) };
        self.filled += bytes.len();
    }

    /// Its bytes.
    #[inline]
    pub(crate) fn bytes(&self) -> &[u8] {
        let filled = &self.bytes[..self.filled];
        // SAFETY: `push` alone moves `filled`, past bytes that it has written.
        unsafe { std::slice::from_raw_parts(filled.as_ptr().cast::<u8>(), filled.len()) }
    }

    /// Its bytes, for writing.
    #[inline]
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        let filled = &mut self.bytes[..self.filled];
        // SAFETY: as above, and the borrow is exclusive.
        unsafe { std::slice::from_raw_parts_mut(filled.as_mut_ptr().cast::<u8>(), filled.len()) }
    }

    /// Empties it.
    #[inline]
    pub(crate) fn clear(&mut self) {
        self.filled = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffer_holds_bytes_added_since_it_was_cleared() {
        let mut chunk = StackBuffer::<8>::new();
        chunk.push(b"abc");
        chunk.push(b"");
        chunk.push(b"defgh");
        assert_eq!((chunk.len(), chunk.bytes()), (8, &b"abcdefgh"[..]));
        chunk.clear();
        assert_eq!(chunk.bytes(), b"");
        chunk.push(b"xy");
        chunk.bytes_mut()[0] = b'z';
        assert_eq!(chunk.bytes(), b"zy");
    }
}
