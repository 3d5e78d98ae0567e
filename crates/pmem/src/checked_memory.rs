//! Memory that is known to hold a whole page, and offsets that are known to lie in it: their accesses can't fail.
//!
//! The length is checked once, when [`CheckedMemory`] is made. Offsets are checked when they are made, which the
//! compiler does for constants. Offsets that are computed begin at such constants, and stay in their bounds.

use std::marker::PhantomData;

use crate::{OutOfBounds, Persistent};

/// Marks memory that the holder only reads.
#[derive(Clone, Copy, Debug)]
pub struct Readable;

/// Marks memory that the holder reads and writes.
#[derive(Clone, Copy, Debug)]
pub struct Writable;

/// The offset of an aligned word in a page of `BYTES` bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WordAt<const BYTES: u64>(u64);

impl<const BYTES: u64> WordAt<BYTES> {
    /// Makes an offset, for a constant.
    ///
    /// # Panics
    /// If the word is not aligned or leaves the page. In a constant, that is an error of compilation.
    #[must_use]
    pub const fn new(offset: u64) -> Self {
        assert!(offset % 8 == 0 && BYTES >= 8 && offset <= BYTES - 8, "an aligned word in the page");
        Self(offset)
    }

    /// Returns the bytes from the page's start.
    #[must_use]
    pub const fn offset(self) -> u64 {
        self.0
    }
}

/// The offset of an aligned part of `PART` bytes in a page of `BYTES` bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartAt<const BYTES: u64, const PART: u64>(u64);

impl<const BYTES: u64, const PART: u64> PartAt<BYTES, PART> {
    /// Makes an offset, for a constant.
    ///
    /// # Panics
    /// As [`WordAt::new`].
    #[must_use]
    pub const fn new(offset: u64) -> Self {
        assert!(offset % 8 == 0 && BYTES >= PART && offset <= BYTES - PART, "an aligned part in the page");
        Self(offset)
    }

    /// Returns the bytes from the page's start.
    #[must_use]
    pub const fn offset(self) -> u64 {
        self.0
    }

    /// Returns a word of the part.
    #[inline]
    #[must_use]
    pub const fn word(self, at: WordAt<PART>) -> WordAt<BYTES> {
        WordAt(self.0 + at.0)
    }

    /// Returns a smaller part of the part.
    #[inline]
    #[must_use]
    pub const fn part<const SMALL: u64>(self, at: PartAt<PART, SMALL>) -> PartAt<BYTES, SMALL> {
        PartAt(self.0 + at.0)
    }
}

/// The offset of a table in a page of `BYTES` bytes: adjacent rows of `ROW` bytes.
#[derive(Clone, Copy, Debug)]
pub struct RowsAt<const BYTES: u64, const ROW: u64> {
    first: u64,
    rows: u64,
}

impl<const BYTES: u64, const ROW: u64> RowsAt<BYTES, ROW> {
    /// Makes an offset, for a constant.
    ///
    /// # Panics
    /// If there are no rows, or as [`WordAt::new`].
    #[must_use]
    pub const fn new(first: u64, rows: u64) -> Self {
        assert!(first % 8 == 0 && ROW % 8 == 0 && ROW > 0 && rows > 0, "aligned rows");
        assert!(first <= BYTES && rows <= (BYTES - first) / ROW, "rows in the page");
        Self { first, rows }
    }

    /// Returns how many rows there are.
    #[must_use]
    pub const fn rows(self) -> u64 {
        self.rows
    }

    /// Returns a row. Numbers begin anew behind the last row.
    #[inline]
    #[must_use]
    pub const fn row(self, number: u64) -> PartAt<BYTES, ROW> {
        PartAt(self.first + number % self.rows * ROW)
    }
}

impl<const BYTES: u64> RowsAt<BYTES, 8> {
    /// Returns a row, which is one word.
    #[inline]
    #[must_use]
    pub const fn word(self, number: u64) -> WordAt<BYTES> {
        WordAt(self.row(number).0)
    }
}

/// Memory that holds a whole page of `BYTES` bytes from its beginning on.
///
/// Other processes may write it at any moment, as with all [`Persistent`] memory.
#[derive(Clone, Debug)]
pub struct CheckedMemory<M, const BYTES: u64, A = Writable> {
    memory: M,
    access: PhantomData<A>,
}

impl<M: Persistent, const BYTES: u64> CheckedMemory<M, BYTES, Readable> {
    /// Takes memory that is only read.
    ///
    /// # Errors
    /// [`OutOfBounds`] if it is shorter than the page.
    pub fn read_only(memory: M) -> Result<Self, OutOfBounds> {
        let available = memory.len();
        let access = PhantomData;
        if available >= BYTES {
            Ok(Self { memory, access })
        } else {
            Err(OutOfBounds { offset: 0, length: BYTES, available })
        }
    }
}

impl<M: Persistent, const BYTES: u64> CheckedMemory<M, BYTES, Writable> {
    /// Takes memory that is read and written.
    ///
    /// # Errors
    /// [`OutOfBounds`] if it is shorter than the page, or mapped read-only.
    pub fn new(memory: M) -> Result<Self, OutOfBounds> {
        let available = memory.len();
        let access = PhantomData;
        if available >= BYTES && memory.is_writable() {
            Ok(Self { memory, access })
        } else {
            Err(OutOfBounds { offset: 0, length: BYTES, available })
        }
    }

    /// Stores a word, with release ordering.
    #[inline]
    pub fn store(&self, at: WordAt<BYTES>, value: u64) {
        self.memory.store_u64(at.0, value).unwrap_or_else(|error| outside(error));
    }

    /// Replaces a word if it holds `current`, sequentially consistent, and returns the result of the exchange.
    ///
    /// # Errors
    /// The word, if it holds something else.
    #[inline]
    pub fn exchange(&self, at: WordAt<BYTES>, current: u64, new: u64) -> Result<u64, u64> {
        self.memory.compare_exchange_u64(at.0, current, new).unwrap_or_else(|error| outside(error))
    }

    /// Adds to a word, wrapping at its end, and returns the former value. It is not ordered with other accesses.
    #[inline]
    pub fn add(&self, at: WordAt<BYTES>, amount: u64) -> u64 {
        self.memory.add_u64(at.0, amount).unwrap_or_else(|error| outside(error))
    }

    /// Copies bytes into the beginning of a part, no more than the part has.
    #[inline]
    pub fn store_bytes<const PART: u64>(&self, at: PartAt<BYTES, PART>, bytes: &[u8]) {
        let length = bytes.len().min(PART as usize);
        self.memory.store(at.0, &bytes[..length]).unwrap_or_else(|error| outside(error));
    }

    /// Sets the words of a part to zero. Pages that were never written stay untouched.
    pub fn clear<const PART: u64>(&self, at: PartAt<BYTES, PART>) {
        self.clear_words((at.0..at.0 + PART / 8 * 8).step_by(8).map(WordAt));
    }

    /// Sets the words of the first rows of a table to zero. Pages that were never written stay untouched.
    pub fn clear_rows<const ROW: u64>(&self, at: RowsAt<BYTES, ROW>, rows: u64) {
        self.clear_words((at.first..at.first + rows.min(at.rows) * ROW).step_by(8).map(WordAt));
    }

    fn clear_words(&self, words: impl Iterator<Item = WordAt<BYTES>>) {
        words.filter(|&at| self.load(at) != 0).for_each(|at| self.store(at, 0));
    }

    /// Begins the write-back of the lines that hold a word; nothing on memory and disk.
    pub fn flush_word(&self, at: WordAt<BYTES>) {
        self.memory.flush(at.0, 8).unwrap_or_else(|error| outside(error));
    }

    /// Begins the write-back of the lines that hold a part; nothing on memory and disk.
    pub fn flush<const PART: u64>(&self, at: PartAt<BYTES, PART>) {
        self.memory.flush(at.0, PART).unwrap_or_else(|error| outside(error));
    }

    /// Waits until everything this thread has flushed is durable; nothing on memory and disk.
    pub fn fence(&self) {
        self.memory.fence();
    }
}

impl<M: Persistent, const BYTES: u64, A> CheckedMemory<M, BYTES, A> {
    /// Returns the memory, which may be longer than the page.
    #[inline]
    pub fn memory(&self) -> &M {
        &self.memory
    }

    /// Loads a word, with acquire ordering.
    #[inline]
    pub fn load(&self, at: WordAt<BYTES>) -> u64 {
        self.memory.load_u64(at.0).unwrap_or_else(|error| outside(error))
    }

    /// Copies the beginning of a part out, no more than the part has.
    ///
    /// Bytes that others write meanwhile may come out torn, at any byte.
    #[inline]
    pub fn load_bytes<const PART: u64>(&self, at: PartAt<BYTES, PART>, into: &mut [u8]) {
        let length = into.len().min(PART as usize);
        self.memory.load(at.0, &mut into[..length]).unwrap_or_else(|error| outside(error));
    }
}

/// Ends the thread: the memory is not what it was when it was checked.
#[cold]
fn outside(error: OutOfBounds) -> ! {
    unreachable!("the memory was checked to hold its page: {error}")
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::{CrashMedium, CrashTwin, Mapping, MappingAccess, Medium};

    const PAGE: u64 = 4096;
    const LAST: WordAt<PAGE> = WordAt::new(PAGE - 8);
    const TABLE: RowsAt<PAGE, 16> = RowsAt::new(1024, 192);

    fn twin(bytes: u64) -> Arc<CrashTwin> {
        Arc::new(CrashTwin::new(CrashMedium::Pages, bytes as usize))
    }

    #[test]
    fn memory_shorter_than_its_page_is_refused() {
        let short = OutOfBounds { offset: 0, length: PAGE, available: PAGE - 8 };
        assert_eq!(CheckedMemory::<_, PAGE>::new(twin(PAGE - 8)).err(), Some(short));
        assert_eq!(CheckedMemory::<_, PAGE, _>::read_only(twin(PAGE - 8)).err(), Some(short));
        assert!(CheckedMemory::<_, PAGE>::new(twin(PAGE)).is_ok());
    }

    #[test]
    fn memory_mapped_read_only_is_only_read() {
        let file = tempfile::tempfile().expect("a file");
        file.set_len(PAGE).expect("a length");
        let map = |access| Arc::new(Mapping::map(&file, PAGE, access, Medium::MEMORY).expect("mapped"));
        let (reader, writer) = (map(MappingAccess::ReadOnly), map(MappingAccess::ReadWrite));
        assert!(CheckedMemory::<_, PAGE>::new(Arc::clone(&reader)).is_err());
        let reader = CheckedMemory::<_, PAGE, _>::read_only(reader).expect("long enough");
        let writer = CheckedMemory::<_, PAGE>::new(writer).expect("writable");
        writer.store(LAST, 7);
        assert_eq!(reader.load(LAST), 7);
    }

    #[test]
    fn computed_offsets_stay_in_their_bounds() {
        assert_eq!(TABLE.row(0).offset(), 1024);
        assert_eq!(TABLE.row(191).word(WordAt::new(8)), LAST);
        assert_eq!(TABLE.row(192), TABLE.row(0));
        assert!(TABLE.row(u64::MAX).offset() < PAGE);
        let second: PartAt<PAGE, 8> = TABLE.row(3).part(PartAt::new(8));
        assert_eq!(second.offset(), 1024 + 3 * 16 + 8);
    }

    #[test]
    fn bytes_past_a_part_stay_untouched() {
        let memory = CheckedMemory::<_, PAGE>::new(twin(PAGE)).expect("long enough");
        memory.store_bytes(TABLE.row(1), &[0xff; 64]);
        let mut bytes = [1; 24];
        memory.load_bytes(TABLE.row(1), &mut bytes);
        assert!(bytes[..16].iter().all(|byte| *byte == 0xff) && bytes[16..] == [1; 8]);
        let word = |row: u64| memory.load(TABLE.row(row).word(WordAt::new(0)));
        assert_eq!((word(0), word(1), word(2)), (0, u64::MAX, 0));
        memory.store_bytes(TABLE.row(2), &[0xff; 16]);
        memory.clear_rows(TABLE, 2);
        assert_eq!((word(1), word(2)), (0, u64::MAX));
        memory.clear(TABLE.row(2));
        assert_eq!(word(2), 0);
    }
}
