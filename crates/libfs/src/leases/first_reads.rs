//! Which inodes' attributes the session has read once.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use ashlar_types::InodeId;

/// Words of bits; several inodes share a bit.
const WORDS: usize = 1024;

/// The inodes whose attributes were read once.
#[derive(Debug)]
pub(crate) struct FirstReads {
    bits: Box<[AtomicU64]>,
    /// How many bits are set.
    count: AtomicU32,
}

impl FirstReads {
    pub(crate) fn new() -> Self {
        Self { bits: (0..WORDS).map(|_| AtomicU64::new(0)).collect(), count: AtomicU32::new(0) }
    }

    /// Returns whether an inode is read for the first time. It may wrongly return `false` for one that shares a bit.
    pub(crate) fn is_first_read(&self, id: InodeId) -> bool {
        let (word, bit) = (&self.bits[id.0 as usize / 64 % WORDS], 1 << (id.0 % 64));
        if word.load(Ordering::Relaxed) & bit != 0 {
            return false;
        }
        word.fetch_or(bit, Ordering::Relaxed);
        // With too many bits set, wrong answers would be the rule.
        if self.count.fetch_add(1, Ordering::Relaxed) as usize == WORDS * 64 / 2 {
            self.bits.iter().for_each(|word| word.store(0, Ordering::Relaxed));
            self.count.store(0, Ordering::Relaxed);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_read_is_recorded_until_half_the_bits_are_set() {
        let first_reads = FirstReads::new();
        let most = WORDS as u64 * 32;
        assert!((0..most).all(|id| first_reads.is_first_read(InodeId(id))));
        assert!((0..most).all(|id| !first_reads.is_first_read(InodeId(id))));
        assert!(
            first_reads.is_first_read(InodeId(most)) && first_reads.is_first_read(InodeId(0)),
            "the bits are cleared"
        );
    }
}
