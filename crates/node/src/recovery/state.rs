//! The bookkeeping of recovery: its phase, and the logs that wait.

use std::collections::{BTreeMap, BTreeSet};

use ashlar_types::{LogPosition, SessionId};

/// How far SharedFS has come since its start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecoveryPhase {
    /// SharedFS applies the logs of sessions from before the start.
    ///
    /// Each is applied as far as its dependencies are.
    Recovering,
    /// Some dependencies are lost, and no log waits for them any more.
    Salvaging,
    /// All of these logs are applied.
    Running,
}

/// A condition without which a log can't be applied further.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnmetDependency {
    /// Another session's log must be applied first.
    ///
    /// It must be applied up to this position.
    Session(SessionId, LogPosition),
    /// Room, which other logs may give back, or a commit.
    Room,
}

/// How far the recovery of logs has come.
#[derive(Debug)]
pub struct RecoveryState {
    /// Its phase.
    pub phase: RecoveryPhase,
    /// The condition that each session's log waits for.
    pub unmet: BTreeMap<SessionId, UnmetDependency>,
    /// Sessions whose logs could not be read.
    pub lost: BTreeSet<SessionId>,
}

impl Default for RecoveryState {
    /// Returns the state of a node that has no logs to recover.
    fn default() -> Self {
        Self { phase: RecoveryPhase::Running, unmet: BTreeMap::new(), lost: BTreeSet::new() }
    }
}

impl RecoveryState {
    /// Returns whether all logs from before the start are applied.
    pub fn is_over(&self) -> bool {
        self.phase == RecoveryPhase::Running
    }
}
