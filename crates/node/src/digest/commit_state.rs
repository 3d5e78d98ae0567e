//! The bookkeeping of commits.

use std::time::Duration;

/// The commits that are wanted, under way and over.
#[derive(Debug, Default)]
pub struct CommitState {
    /// When the oldest update was applied that no commit has taken yet, since boot.
    pub oldest_uncommitted: Option<Duration>,
    /// A request waits for a commit.
    pub is_wanted: bool,
    /// The commit thread is writing a batch.
    pub is_running: bool,
    /// Commits begun.
    pub begun: u64,
    /// Commits that ended well; see [`Self::begun`].
    pub ended: u64,
}

impl CommitState {
    /// Records that an update is applied at this time since boot.
    pub fn record_applied(&mut self, now: Duration) {
        self.oldest_uncommitted.get_or_insert(now);
    }

    /// Records that a commit has begun with all updates that are applied.
    pub fn record_begin(&mut self) {
        self.oldest_uncommitted = None;
        self.begun += 1;
    }
}
