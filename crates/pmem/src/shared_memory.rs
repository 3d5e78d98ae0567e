//! Memory that SharedFS shares with a session: mapped from a file, or a twin for simulations.

use std::io;
use std::ops::Range;

use crate::{CrashTwin, Crc32c, Mapping, OutOfBounds, Persistent};

/// Memory that SharedFS shares with a session.
#[derive(Debug)]
pub enum SharedMemory {
    /// A file of the arena, which the session's process has mapped too.
    Mapped(Mapping),
    /// A twin in the heap, which a simulation can crash.
    Twin(CrashTwin),
}

impl SharedMemory {
    /// Returns the mapping; `None` if the memory is a twin.
    #[must_use]
    pub fn mapping(&self) -> Option<&Mapping> {
        match self {
            Self::Mapped(mapping) => Some(mapping),
            Self::Twin(_) => None,
        }
    }

    /// Returns the twin; `None` if the memory is mapped.
    #[must_use]
    pub fn twin(&self) -> Option<&CrashTwin> {
        match self {
            Self::Mapped(_) => None,
            Self::Twin(twin) => Some(twin),
        }
    }

    /// Returns whether the file was truncated under the mapping.
    #[must_use]
    pub fn is_torn(&self) -> bool {
        self.mapping().is_some_and(Mapping::is_torn)
    }

    /// Allocates room for bytes that have none; a twin has all of it.
    ///
    /// # Errors
    /// As [`Mapping::allocate`].
    pub fn allocate(&self, bytes: Range<u64>) -> io::Result<()> {
        self.mapping().map_or(Ok(()), |mapping| mapping.allocate(bytes))
    }

    /// Makes a range durable, or more than that.
    ///
    /// # Errors
    /// As [`Mapping::sync_range`].
    pub fn sync_range(&self, offset: u64, length: u64) -> io::Result<()> {
        match self {
            Self::Mapped(mapping) => mapping.sync_range(offset, length),
            Self::Twin(twin) => twin.sync(),
        }
    }

    /// Wakes all threads that sleep at `offset`, in every process. No thread sleeps at a twin.
    pub fn wake(&self, offset: u64) {
        if let Self::Mapped(mapping) = self {
            mapping.wake(offset);
        }
    }
}

/// Calls a method of the memory behind.
macro_rules! behind {
    ($self:ident.$method:ident($($argument:expr),*)) => {
        match $self {
            SharedMemory::Mapped(memory) => memory.$method($($argument),*),
            SharedMemory::Twin(memory) => memory.$method($($argument),*),
        }
    };
}

impl Persistent for SharedMemory {
    #[inline]
    fn len(&self) -> u64 {
        behind!(self.len())
    }

    fn is_writable(&self) -> bool {
        behind!(self.is_writable())
    }

    #[inline]
    fn load(&self, offset: u64, into: &mut [u8]) -> Result<(), OutOfBounds> {
        behind!(self.load(offset, into))
    }

    #[inline]
    fn load_summed(&self, offset: u64, into: &mut [u8], sum: &mut Crc32c) -> Result<(), OutOfBounds> {
        behind!(self.load_summed(offset, into, sum))
    }

    #[inline]
    fn store(&self, offset: u64, bytes: &[u8]) -> Result<(), OutOfBounds> {
        behind!(self.store(offset, bytes))
    }

    #[inline]
    fn store_flushed(&self, offset: u64, bytes: &[u8]) -> Result<(), OutOfBounds> {
        behind!(self.store_flushed(offset, bytes))
    }

    #[inline]
    fn store_summed(&self, offset: u64, bytes: &[u8], sum: &mut Crc32c, is_fetched: bool) -> Result<(), OutOfBounds> {
        behind!(self.store_summed(offset, bytes, sum, is_fetched))
    }

    #[inline]
    fn load_u64(&self, offset: u64) -> Result<u64, OutOfBounds> {
        behind!(self.load_u64(offset))
    }

    #[inline]
    fn store_u64(&self, offset: u64, value: u64) -> Result<(), OutOfBounds> {
        behind!(self.store_u64(offset, value))
    }

    #[inline]
    fn compare_exchange_u64(&self, offset: u64, current: u64, new: u64) -> Result<Result<u64, u64>, OutOfBounds> {
        behind!(self.compare_exchange_u64(offset, current, new))
    }

    #[inline]
    fn add_u64(&self, offset: u64, amount: u64) -> Result<u64, OutOfBounds> {
        behind!(self.add_u64(offset, amount))
    }

    #[inline]
    fn flush(&self, offset: u64, length: u64) -> Result<(), OutOfBounds> {
        behind!(self.flush(offset, length))
    }

    #[inline]
    fn expect_store(&self, offset: u64, length: u64) {
        behind!(self.expect_store(offset, length));
    }

    #[inline]
    fn fence(&self) {
        behind!(self.fence());
    }

    fn sync(&self) -> io::Result<()> {
        behind!(self.sync())
    }
}
