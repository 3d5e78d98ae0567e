//! Counts of a session's operations, and the sampled times of some, as in its control page.
//!
//! LibFS serves most operations without a message, so only LibFS knows how many they are and how long they take. It
//! counts each one, in one of a few lines of words so that threads do not share a line, and measures some.

use serde::{Deserialize, Serialize};

/// Kinds of operations that are counted separately.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum OperationKind {
    /// Reads of content.
    Read = 0,
    /// Writes of content, and reserving and punching.
    Write = 1,
    /// Operations on names and attributes: look up, create, remove, rename, list, `stat`, `chmod`.
    Name = 2,
    /// `fsync`.
    Sync = 3,
}

impl OperationKind {
    /// All kinds, in the order of their numbers.
    pub const ALL: [Self; 4] = [Self::Read, Self::Write, Self::Name, Self::Sync];
}

/// Buckets of times: two for each power of two nanoseconds. The last one holds times of more than 3 seconds.
pub const LATENCY_BUCKETS: usize = 64;

/// Returns the bucket of a time.
#[must_use]
pub fn latency_bucket(nanoseconds: u64) -> usize {
    let power = nanoseconds.max(1).ilog2() as usize;
    let is_upper_half = power > 0 && nanoseconds >> (power - 1) & 1 == 1;
    (2 * power + usize::from(is_upper_half)).min(LATENCY_BUCKETS - 1)
}

/// Returns the shortest time in a bucket, in nanoseconds.
#[must_use]
pub fn latency_from(bucket: usize) -> u64 {
    match bucket {
        0 => 0,
        1 | 2 => 2,
        _ => (2 + bucket as u64 % 2) << (bucket / 2 - 1).min(61),
    }
}

/// Operations of one kind since the session began.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OperationCounts {
    /// The number of operations.
    pub operations: u64,
    /// The number of sampled operations by bucket of time, without empty buckets at the end.
    pub sampled: Vec<u64>,
}

impl OperationCounts {
    /// Returns the counts since an earlier moment.
    ///
    /// A session can write any numbers, so a count may also have shrunk.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        let before = earlier.sampled.iter().copied().chain(std::iter::repeat(0));
        Self {
            operations: self.operations.saturating_sub(earlier.operations),
            sampled: self.sampled.iter().zip(before).map(|(now, before)| now.saturating_sub(before)).collect(),
        }
    }

    /// Adds the counts of another kind or session.
    pub fn add(&mut self, other: &Self) {
        self.operations = self.operations.saturating_add(other.operations);
        let length = self.sampled.len().max(other.sampled.len()).min(LATENCY_BUCKETS);
        self.sampled.resize(length, 0);
        for (sum, count) in self.sampled.iter_mut().zip(&other.sampled) {
            *sum = sum.saturating_add(*count);
        }
    }

    /// Returns the time, in nanoseconds, below which this share of the sample lies.
    ///
    /// Times within a bucket count as evenly spread. Returns `None` without a sample.
    #[must_use]
    pub fn percentile(&self, share: f64) -> Option<u64> {
        let all = self.sampled.iter().fold(0.0, |sum, &count| sum + count as f64);
        if all == 0.0 {
            return None;
        }
        let mut left = all * share.clamp(0.0, 1.0);
        for (bucket, &count) in self.sampled.iter().enumerate().filter(|(_, count)| **count > 0) {
            let (from, to) = (latency_from(bucket), latency_from(bucket + 1));
            if left <= count as f64 {
                return Some(from + ((to - from) as f64 * left / count as f64) as u64);
            }
            left -= count as f64;
        }
        // Sums of large numbers are not exact.
        self.sampled.iter().rposition(|&count| count > 0).map(|last| latency_from(last + 1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_falls_into_the_bucket_that_contains_it() {
        for nanoseconds in (0..10_000).chain((0..64).map(|power| 1 << power)).chain([u64::MAX, 3 << 29, (3 << 29) - 1])
        {
            let bucket = latency_bucket(nanoseconds);
            assert!(latency_from(bucket) <= nanoseconds.max(2) || nanoseconds == 1, "{nanoseconds} in {bucket}");
            assert!(
                bucket == LATENCY_BUCKETS - 1 || nanoseconds < latency_from(bucket + 1).max(2),
                "{nanoseconds} in {bucket}"
            );
        }
        assert!((1..100).all(|bucket| latency_from(bucket) <= latency_from(bucket + 1)));
        assert_eq!([latency_from(20), latency_from(21), latency_from(22)], [1024, 1536, 2048]);
    }

    #[test]
    fn percentiles_match_the_sampled_times() {
        let mut counts = OperationCounts::default();
        assert_eq!(counts.percentile(0.5), None);
        counts.sampled = vec![0; LATENCY_BUCKETS];
        for nanoseconds in 1..=10_000u64 {
            counts.sampled[latency_bucket(nanoseconds)] += 1;
        }
        for (share, expected) in [(0.5, 5_000.0), (0.99, 9_900.0), (1.0, 10_000.0)] {
            let found = counts.percentile(share).expect("a time") as f64;
            assert!((found / expected - 1.0).abs() < 0.25, "{found} instead of {expected}");
        }
    }

    #[test]
    fn forged_counts_stay_harmless() {
        let wild = OperationCounts { operations: u64::MAX, sampled: vec![u64::MAX; LATENCY_BUCKETS] };
        let mut sum = wild.clone();
        sum.add(&wild);
        assert_eq!(sum, wild);
        assert!(sum.percentile(0.99).is_some());
        let less = OperationCounts { operations: 1, sampled: vec![5] };
        assert_eq!(less.since(&wild), OperationCounts { operations: 0, sampled: vec![0] });
        assert_eq!(wild.since(&less).operations, u64::MAX - 1);
    }
}
