//! Lines of the log about a link that is down.

use std::time::{Duration, Instant};

use ashlar_cluster::chain::LinkProblem;
use ashlar_fabric::ReasonFilter;

/// The end of a link that was up for so long is news, whatever the reason.
const SETTLED: Duration = Duration::from_secs(10);

/// Writes why a link is down: each reason once, and again after a minute.
#[derive(Default)]
pub struct LinkLog {
    filter: ReasonFilter,
    up_since: Option<Instant>,
}

impl LinkLog {
    /// Takes the news that the link is up.
    pub fn handle_up(&mut self) {
        self.up_since = Some(Instant::now());
    }

    /// Writes that the link is down. `is_orderly` says that nothing has failed.
    pub fn write_down(&mut self, problem: &LinkProblem, is_orderly: bool) {
        let now = Instant::now();
        if self.up_since.take().is_some_and(|since| now >= since + SETTLED) {
            self.filter.clear();
        }
        // The end of a process may have the same words as an orderly end.
        if !self.filter.admit(&format!("{problem}, orderly: {is_orderly}"), now) {
            return;
        }
        if is_orderly {
            tracing::info!(%problem, "the link to the other node is down");
        } else {
            tracing::warn!(%problem, "the link to the other node is down");
        }
    }

    /// Writes that the hard state can't be written.
    pub fn write_state_failure(&mut self, problem: &str) {
        if self.filter.admit(problem, Instant::now()) {
            tracing::error!(problem, "the hard state can't be written; this is tried again");
        }
    }
}
