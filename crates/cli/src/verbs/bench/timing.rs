//! Summarises the times of many operations in four numbers.

use std::hint::black_box;
use std::io;
use std::time::Instant;

use serde::{Deserialize, Serialize};

/// The time below which an operation is timed in batches: reading the clock would be a good part of the result.
const CLOCK_SHARE_NS: f64 = 1000.0;
/// How many operations make such a batch.
const BATCH: usize = 32;
/// The part of the operations by which this is decided, and the most of them. They count for the mean alone.
const TRIAL_PART: usize = 8;
const TRIAL_MAX: usize = 256;

/// The times of some operations, in nanoseconds for each.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// The number of operations.
    pub count: u64,
    /// How many were timed at once. If it is more than one, percentiles are those of the batches' means.
    pub batch: u64,
    /// The median.
    pub p50_ns: f64,
    /// The 99th percentile.
    pub p99_ns: f64,
    /// The longest.
    pub max_ns: f64,
    /// The mean of all of them, from the first to the last.
    pub mean_ns: f64,
}

impl Summary {
    /// Summarises times that were taken one by one.
    pub fn of(times: &mut [f64]) -> Self {
        let mean = times.iter().sum::<f64>() / times.len().max(1) as f64;
        Self::new(times, 1, times.len(), mean)
    }

    fn new(times: &mut [f64], batch: usize, count: usize, mean_ns: f64) -> Self {
        times.sort_by(f64::total_cmp);
        let at = |part: f64| {
            let last = times.len().saturating_sub(1);
            times.get((last as f64 * part).round() as usize).copied().unwrap_or(mean_ns)
        };
        let (p50_ns, p99_ns, max_ns) = (at(0.5), at(0.99), at(1.0));
        Self { count: count as u64, batch: batch as u64, p50_ns, p99_ns, max_ns, mean_ns }
    }
}

/// Runs an operation `count` times, with its number.
///
/// # Errors
/// The operation's first.
pub fn measure(count: usize, mut operation: impl FnMut(usize) -> io::Result<()>) -> io::Result<Summary> {
    let trial = (count / TRIAL_PART).clamp(1, TRIAL_MAX);
    // The memory is written to beforehand, so that it causes no page faults in between.
    let mut times = vec![1.0; count];
    let start = Instant::now();
    let mut last = start;
    for (number, time) in times[..trial.min(count)].iter_mut().enumerate() {
        operation(number)?;
        let now = Instant::now();
        *time = (now - last).as_nanos() as f64;
        last = now;
    }
    let is_short = median(times[..trial.min(count)].iter().copied()).is_some_and(|time| time < CLOCK_SHARE_NS);
    let batch = if is_short && count - trial >= BATCH { BATCH } else { 1 };
    let (mut number, mut taken) = (trial, 0);
    while number < count {
        let end = (number + batch).min(count);
        (number..end).try_for_each(&mut operation)?;
        let now = Instant::now();
        times[taken] = (now - last).as_nanos() as f64 / (end - number) as f64;
        (last, number, taken) = (now, end, taken + 1);
    }
    let mean = (last - start).as_nanos() as f64 / count as f64;
    Ok(Summary::new(&mut times[..taken], batch, count, mean))
}

/// Returns the time of one reading of the clock, which is part of each single time.
pub fn clock_ns() -> f64 {
    const READINGS: u32 = 10_000;
    let start = Instant::now();
    for _ in 0..READINGS {
        black_box(Instant::now());
    }
    start.elapsed().as_nanos() as f64 / f64::from(READINGS)
}

/// Returns the median of some values.
pub fn median(values: impl Iterator<Item = f64>) -> Option<f64> {
    let mut values: Vec<_> = values.collect();
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => None,
        length if length % 2 == 1 => Some(values[middle]),
        _ => Some(f64::midpoint(values[middle - 1], values[middle])),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn percentiles_are_times_that_were_taken() {
        let mut times: Vec<f64> = (1..=101).rev().map(f64::from).collect();
        let summary = Summary::of(&mut times);
        assert_eq!((summary.p50_ns, summary.p99_ns, summary.max_ns), (51.0, 100.0, 101.0));
        assert_eq!((summary.count, summary.batch, summary.mean_ns), (101, 1, 51.0));
    }

    #[test]
    fn short_operations_are_timed_in_batches_and_long_ones_are_not() {
        let mut done = Vec::new();
        let short = measure(1000, |number| {
            done.push(number);
            Ok(())
        });
        let short = short.expect("measured");
        assert_eq!((short.batch, short.count), (BATCH as u64, 1000));
        assert!(done.iter().copied().eq(0..1000), "each is done once, in order");
        let long = measure(10, |_| {
            std::thread::sleep(Duration::from_micros(200));
            Ok(())
        });
        let long = long.expect("measured");
        assert_eq!(long.batch, 1);
        assert!(long.p50_ns >= 200_000.0 && long.max_ns >= long.p99_ns && long.p99_ns >= long.p50_ns, "{long:?}");
    }

    #[test]
    fn an_operation_that_fails_ends_it() {
        let mut count = 0;
        let result = measure(100, |_| {
            count += 1;
            if count == 50 { Err(io::ErrorKind::Other.into()) } else { Ok(()) }
        });
        assert!(result.is_err() && count == 50);
    }

    #[test]
    fn a_median_lies_in_the_middle() {
        assert_eq!(median([3.0, 1.0, 2.0].into_iter()), Some(2.0));
        assert_eq!(median([4.0, 1.0, 2.0, 3.0].into_iter()), Some(2.5));
        assert_eq!(median(std::iter::empty()), None);
    }
}
