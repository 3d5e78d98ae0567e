//! Prefetching for a sequential writer.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

/// The least number of bytes that is fetched: after a long record a short one may follow.
const LEAST_BYTES: u64 = 256;
/// How many times the length of the last record is fetched ahead.
///
/// So the bytes of the next record were fetched before the last record, and have had time to arrive.
const TIMES: u64 = 2;
/// Longer ones go past the cache. To fetch them first takes as long as to write them.
const LARGE_BYTES: u64 = 8 << 10;

/// The end of the fetched memory, for a writer whose positions only grow, such as records to a log.
///
/// The writer starts the fetch by [`crate::Persistent::expect_store`].
#[derive(Debug, Default)]
pub struct FetchedAhead(AtomicU64);

impl FetchedAhead {
    /// Whether everything up to a position was fetched, as far as it was written to in order.
    #[must_use]
    #[inline]
    pub fn covers(&self, end: u64) -> bool {
        end <= self.0.load(Ordering::Relaxed)
    }

    /// The range to fetch now that `length` bytes were written, which ended at `end`.
    #[inline]
    pub fn after(&self, end: u64, length: u64) -> Range<u64> {
        let bytes = if length <= LARGE_BYTES { (TIMES * length).max(LEAST_BYTES) } else { LEAST_BYTES };
        let (fetched, upto) = (self.0.load(Ordering::Relaxed), end.saturating_add(bytes));
        if upto <= fetched {
            return upto..upto;
        }
        self.0.store(upto, Ordering::Relaxed);
        end.max(fetched)..upto
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_byte_is_fetched_once_before_its_record() {
        let ahead = FetchedAhead::default();
        assert_eq!(ahead.after(1000, 1000), 1000..3000);
        assert!(ahead.covers(2000), "the next one is there");
        assert_eq!(ahead.after(2000, 1000), 3000..4000, "and what comes after that is fetched meanwhile");
        assert_eq!(ahead.after(2100, 100), 2356..2356, "a short one needs nothing more");
        assert!(!ahead.covers(4001));
        assert_eq!(ahead.after(100_000, 64 << 10), 100_000..100_256, "who writes much needs the beginning alone");
        assert!(!ahead.covers(100_000 + (64 << 10)));
    }
}
