//! Errors with which SharedFS or its supervisor ends.

use std::io;
use std::path::PathBuf;

use ashlar_member::MemberError;
use ashlar_node::sessions::identity::SESSION_VERSIONS;
use ashlar_pmem::ArenaError;
use ashlar_replica::ReplicaError;
use ashlar_types::{SessionId, VersionRange};
use thiserror::Error;

/// Why SharedFS can't run.
#[derive(Debug, Error)]
pub enum DaemonError {
    /// The node's role in its cluster has changed: it must start again.
    #[error("the node's role in its cluster has changed")]
    RoleChanged,
    /// A signal asked for the end before the node could serve.
    #[error("a signal asked for the end")]
    Interrupted,
    /// The node can't take part in its cluster.
    #[error(transparent)]
    Member(#[from] MemberError),
    /// The arena can't be opened.
    #[error(transparent)]
    Arena(#[from] ArenaError),
    /// The shared area can't be opened.
    #[error(transparent)]
    Store(#[from] ashlar_store::StoreError),
    /// The shared area failed while SharedFS ran.
    ///
    /// Recovery may mend that, so the supervisor restarts SharedFS.
    #[error("the shared area failed: {0}")]
    Failed(ashlar_store::StoreError),
    /// The journal or the shadow can't be used.
    #[error(transparent)]
    Replica(#[from] ReplicaError),
    /// Another version of the program made the files of a session.
    #[error(
        "the files of session {session} have format {found}, this program reads {SESSION_VERSIONS}; start and end the \
         matching program once, so that it digests what they hold"
    )]
    WrongVersion {
        /// The session.
        session: SessionId,
        /// The versions that understand its files.
        found: VersionRange,
    },
    /// The socket can't be made.
    #[error("cannot listen at {path}: {error}; give another place with --socket")]
    Socket {
        /// The socket's path.
        path: PathBuf,
        /// The cause.
        error: io::Error,
    },
    /// The operating system refuses something that SharedFS needs.
    #[error("{what}: {error}")]
    System {
        /// The attempt that failed.
        what: &'static str,
        /// The cause.
        error: io::Error,
    },
}

impl DaemonError {
    /// Returns whether the process has run, and another start may mend what ended it.
    #[must_use]
    pub fn asks_for_restart(&self) -> bool {
        matches!(self, Self::Failed(_) | Self::Member(MemberError::Failed(_)))
    }

    /// Returns whether another start may succeed a while later.
    ///
    /// The system lacks something at the moment, or a SharedFS that was killed is not gone yet.
    #[must_use]
    pub fn is_temporary(&self) -> bool {
        let is_lack = |error: &io::Error| error.kind() != io::ErrorKind::NotFound;
        match self {
            Self::Arena(error) | Self::Replica(ReplicaError::Arena(error)) => match error {
                ArenaError::InUse { .. } => true,
                ArenaError::Io { source, .. } => is_lack(source),
                _ => false,
            },
            Self::Socket { error, .. }
            | Self::System { error, .. }
            | Self::Replica(ReplicaError::System { error, .. }) => is_lack(error),
            Self::Member(error) => error.is_temporary(),
            Self::RoleChanged | Self::Interrupted => false,
            Self::Store(_) | Self::Failed(_) | Self::Replica(_) | Self::WrongVersion { .. } => false,
        }
    }
}

/// Why the supervisor gave up.
#[derive(Debug, Error)]
pub enum SupervisorError {
    /// The program can't be started.
    #[error("cannot start {program}: {error}")]
    Start {
        /// The program.
        program: PathBuf,
        /// The cause.
        error: io::Error,
    },
    /// SharedFS ended by itself with an error: another start would end the same way.
    #[error("SharedFS gave up: {0}")]
    GaveUp(std::process::ExitStatus),
    /// Signals can't be watched.
    #[error("cannot watch signals: {0}")]
    Signals(io::Error),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replica_that_ran_asks_for_restart() {
        let full = || ReplicaError::System { what: "writing", error: io::Error::from(io::ErrorKind::StorageFull) };
        assert!(DaemonError::from(MemberError::Failed(full())).asks_for_restart());
        assert!(!DaemonError::from(MemberError::Replica(full())).asks_for_restart());
    }

    #[test]
    fn arena_or_shadow_in_use_is_temporary() {
        let in_use = || ArenaError::InUse { pid: 7 };
        assert!(DaemonError::from(in_use()).is_temporary());
        assert!(DaemonError::from(ReplicaError::from(in_use())).is_temporary());
        assert!(!DaemonError::from(ReplicaError::from(ArenaError::NotAnArena)).is_temporary());
    }
}
