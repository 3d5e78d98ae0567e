//! Operations of every kind of persistent memory.

use std::io;
use std::sync::Arc;

use thiserror::Error;

use crate::Crc32c;

/// An access that leaves the memory, or a word access that is not aligned to 8 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("{length} bytes at offset {offset} are outside the memory of {available} bytes, misaligned, or not writable")]
pub struct OutOfBounds {
    /// The beginning of the access, in bytes from the memory's start.
    pub offset: u64,
    /// How many bytes it asked for.
    pub length: u64,
    /// How many bytes there are.
    pub available: u64,
}

/// Memory that outlives the process, and that other processes may write at any moment. The crash model is stated at the
/// top of this crate.
///
/// # Errors
/// Every access fails with [`OutOfBounds`] if it leaves the memory or writes to read-only memory. A word access also
/// fails if it is not aligned to 8 bytes.
#[allow(clippy::missing_errors_doc)]
pub trait Persistent: Send + Sync {
    /// Bytes of memory.
    fn len(&self) -> u64;

    /// Whether there are no bytes at all.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether the bytes may be stored to. Length and answer stay the same as long as the memory is there.
    fn is_writable(&self) -> bool {
        true
    }

    /// Copies bytes out. Bytes that others write meanwhile may come out torn, at any byte.
    fn load(&self, offset: u64, into: &mut [u8]) -> Result<(), OutOfBounds>;

    /// As [`Self::load`], and adds the bytes to a checksum as they came out, even if another process changes them
    /// meanwhile.
    fn load_summed(&self, offset: u64, into: &mut [u8], sum: &mut Crc32c) -> Result<(), OutOfBounds> {
        self.load(offset, into)?;
        sum.update(into);
        Ok(())
    }

    /// Copies bytes in. They are dirty after it, even where a non-temporal path was taken.
    fn store(&self, offset: u64, bytes: &[u8]) -> Result<(), OutOfBounds>;

    /// Copies bytes in and begins their write-back: [`Self::store`] and [`Self::flush`] in one, for bulk data. It may
    /// take non-temporal stores, so a [`Self::fence`] must stand before anything that tells others of the data.
    fn store_flushed(&self, offset: u64, bytes: &[u8]) -> Result<(), OutOfBounds> {
        self.store(offset, bytes)?;
        self.flush(offset, bytes.len() as u64)
    }

    /// Stores like [`Self::store_flushed`], and adds the bytes to a checksum as they were stored.
    ///
    /// The checksum is right even if another thread changes the source meanwhile. `is_fetched` says that
    /// [`Self::expect_store`] announced the bytes. Then they are stored in the cache, if the medium allows it.
    fn store_summed(&self, offset: u64, bytes: &[u8], sum: &mut Crc32c, _is_fetched: bool) -> Result<(), OutOfBounds> {
        store_in_pieces(self, offset, bytes, sum)
    }

    /// Loads an aligned word, with acquire ordering.
    fn load_u64(&self, offset: u64) -> Result<u64, OutOfBounds>;

    /// Stores an aligned word, with release ordering.
    fn store_u64(&self, offset: u64, value: u64) -> Result<(), OutOfBounds>;

    /// Replaces an aligned word if it holds `current`, sequentially consistent: the inner result is that of
    /// [`std::sync::atomic::AtomicU64::compare_exchange`].
    fn compare_exchange_u64(&self, offset: u64, current: u64, new: u64) -> Result<Result<u64, u64>, OutOfBounds>;

    /// Adds to an aligned word, wrapping at its end, and returns the former value. It is not ordered with other
    /// accesses.
    fn add_u64(&self, offset: u64, amount: u64) -> Result<u64, OutOfBounds> {
        let mut current = self.load_u64(offset)?;
        loop {
            match self.compare_exchange_u64(offset, current, current.wrapping_add(amount))? {
                Ok(before) => return Ok(before),
                Err(found) => current = found,
            }
        }
    }

    /// Begins the write-back of the lines that hold these bytes; nothing on memory and disk.
    fn flush(&self, offset: u64, length: u64) -> Result<(), OutOfBounds>;

    /// Prefetches bytes that will soon be stored to; bytes outside are left out. No content changes.
    fn expect_store(&self, _offset: u64, _length: u64) {}

    /// Waits until everything this thread has flushed is durable; nothing on memory and disk.
    fn fence(&self);

    /// Makes all that was stored before durable, as far as the medium can: `fdatasync` on disk, nothing on memory. On
    /// persistent memory it does nothing that [`Self::flush`] and [`Self::fence`] have not done.
    fn sync(&self) -> io::Result<()>;
}

/// [`Persistent::store_summed`] by way of a private copy.
pub(crate) fn store_in_pieces<M: Persistent + ?Sized>(
    memory: &M,
    offset: u64,
    bytes: &[u8],
    sum: &mut Crc32c,
) -> Result<(), OutOfBounds> {
    const PIECE: usize = 4096;
    let mut copy = [0; PIECE];
    for (index, piece) in bytes.chunks(PIECE).enumerate() {
        let copy = &mut copy[..piece.len()];
        copy.copy_from_slice(piece);
        sum.update(copy);
        memory.store_flushed(offset + (index * PIECE) as u64, copy)?;
    }
    Ok(())
}

macro_rules! forward {
    ($($pointer:ty),*) => {$(
        impl<T: Persistent + ?Sized> Persistent for $pointer {
            #[inline]
            fn len(&self) -> u64 {
                (**self).len()
            }
            fn is_writable(&self) -> bool {
                (**self).is_writable()
            }
            #[inline]
            fn load(&self, offset: u64, into: &mut [u8]) -> Result<(), OutOfBounds> {
                (**self).load(offset, into)
            }
            #[inline]
            fn load_summed(&self, offset: u64, into: &mut [u8], sum: &mut Crc32c) -> Result<(), OutOfBounds> {
                (**self).load_summed(offset, into, sum)
            }
            #[inline]
            fn store(&self, offset: u64, bytes: &[u8]) -> Result<(), OutOfBounds> {
                (**self).store(offset, bytes)
            }
            #[inline]
            fn store_flushed(&self, offset: u64, bytes: &[u8]) -> Result<(), OutOfBounds> {
                (**self).store_flushed(offset, bytes)
            }
            #[inline]
            fn store_summed(
                &self,
                offset: u64,
                bytes: &[u8],
                sum: &mut Crc32c,
                is_fetched: bool,
            ) -> Result<(), OutOfBounds> {
                (**self).store_summed(offset, bytes, sum, is_fetched)
            }
            #[inline]
            fn load_u64(&self, offset: u64) -> Result<u64, OutOfBounds> {
                (**self).load_u64(offset)
            }
            #[inline]
            fn store_u64(&self, offset: u64, value: u64) -> Result<(), OutOfBounds> {
                (**self).store_u64(offset, value)
            }
            #[inline]
            fn compare_exchange_u64(&self, offset: u64, current: u64, new: u64) -> Result<Result<u64, u64>, OutOfBounds> {
                (**self).compare_exchange_u64(offset, current, new)
            }
            #[inline]
            fn add_u64(&self, offset: u64, amount: u64) -> Result<u64, OutOfBounds> {
                (**self).add_u64(offset, amount)
            }
            #[inline]
            fn flush(&self, offset: u64, length: u64) -> Result<(), OutOfBounds> {
                (**self).flush(offset, length)
            }
            #[inline]
            fn expect_store(&self, offset: u64, length: u64) {
                (**self).expect_store(offset, length);
            }
            #[inline]
            fn fence(&self) {
                (**self).fence();
            }
            fn sync(&self) -> io::Result<()> {
                (**self).sync()
            }
        }
    )*};
}

forward!(&T, Arc<T>, Box<T>);
