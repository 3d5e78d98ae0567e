//! Which reasons are worth a line in the log.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// A reason that lasts is written again after this time.
const REPEAT: Duration = Duration::from_secs(60);
/// Reasons that are remembered, at most: an attacker can invent more.
const REASONS_MAX: usize = 16;

/// Admits each reason once, and again after a minute.
///
/// A node that is refused tries again several times a second, for as long as the reason lasts.
#[derive(Debug, Default)]
pub struct ReasonFilter {
    written: VecDeque<(String, Instant)>,
}

impl ReasonFilter {
    /// Returns whether a reason is to be written now. If so, it counts as written.
    pub fn admit(&mut self, reason: &str, now: Instant) -> bool {
        self.written.retain(|(_, at)| now < *at + REPEAT);
        if self.written.iter().any(|(written, _)| written == reason) {
            return false;
        }
        if self.written.len() == REASONS_MAX {
            self.written.pop_front();
        }
        self.written.push_back((reason.to_owned(), now));
        true
    }

    /// Forgets all reasons: the next one is news.
    pub fn clear(&mut self) {
        self.written.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_reason_is_admitted_once_a_minute() {
        let (mut filter, begin) = (ReasonFilter::default(), Instant::now());
        let mut admitted = Vec::new();
        for tenths in 0..1300 {
            let now = begin + Duration::from_millis(100 * tenths);
            admitted.extend(["a", "b"].into_iter().filter(|reason| filter.admit(reason, now)).map(|it| (it, tenths)));
        }
        assert_eq!(admitted, [("a", 0), ("b", 0), ("a", 600), ("b", 600), ("a", 1200), ("b", 1200)]);
        filter.clear();
        assert!(filter.admit("a", begin));
    }

    #[test]
    fn invented_reasons_take_bounded_memory() {
        let (mut filter, now) = (ReasonFilter::default(), Instant::now());
        assert!((0..1000).all(|number| filter.admit(&number.to_string(), now)));
        assert_eq!(filter.written.len(), REASONS_MAX);
    }
}
