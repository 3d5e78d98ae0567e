//! Words in memory that several processes share.

use std::ops::Range;

use ashlar_pmem::Persistent;

/// Memory that is long enough for every word that is accessed, so that no access fails.
#[derive(Debug)]
pub(crate) struct Words<M>(pub(crate) M);

impl<M: Persistent> Words<M> {
    pub(crate) fn new(memory: M, bytes: u64) -> Option<Self> {
        (memory.len() >= bytes).then_some(Self(memory))
    }

    #[inline]
    pub(crate) fn load(&self, offset: u64) -> u64 {
        self.0.load_u64(offset).unwrap_or(0)
    }

    /// Stores a word, and does nothing if the memory is mapped read-only.
    ///
    /// Only the owner of a word writes it.
    #[inline]
    pub(crate) fn store(&self, offset: u64, value: u64) {
        let _ = self.0.store_u64(offset, value);
    }

    /// Sets words to zero. Pages that were never written stay untouched.
    pub(crate) fn clear(&self, bytes: Range<u64>) {
        bytes.step_by(8).filter(|&at| self.load(at) != 0).for_each(|at| self.store(at, 0));
    }

    /// Adds to a word. Memory that can't be written has nothing to count.
    #[inline]
    pub(crate) fn add(&self, offset: u64, amount: u64) -> u64 {
        self.0.add_u64(offset, amount).unwrap_or(1)
    }

    #[inline]
    pub(crate) fn exchange(&self, offset: u64, current: u64, new: u64) -> Result<u64, u64> {
        self.0.compare_exchange_u64(offset, current, new).unwrap_or(Ok(current))
    }
}
