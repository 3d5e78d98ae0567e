//! Why SharedFS or its supervisor gave up.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

/// Why SharedFS can't run.
#[derive(Debug, Error)]
pub enum DaemonError {
    /// The arena can't be opened.
    #[error(transparent)]
    Arena(#[from] ashlar_pmem::ArenaError),
    /// The shared area can't be opened.
    #[error(transparent)]
    Store(#[from] ashlar_store::StoreError),
    /// The shared area has failed at work. Recovery may mend that, so the supervisor starts SharedFS again.
    #[error("the shared area failed: {0}")]
    Failed(ashlar_store::StoreError),
    /// The socket can't be made.
    #[error("cannot listen at {path}: {error}; give another place with --socket")]
    Socket {
        /// Where.
        path: PathBuf,
        /// Why.
        error: io::Error,
    },
    /// Something of the operating system's that SharedFS needs is not to be had.
    #[error("{what}: {error}")]
    System {
        /// What was tried.
        what: &'static str,
        /// Why it failed.
        error: io::Error,
    },
}

/// Why the supervisor gave up.
#[derive(Debug, Error)]
pub enum SupervisorError {
    /// The program can't be started.
    #[error("cannot start {program}: {error}")]
    Start {
        /// Which.
        program: PathBuf,
        /// Why.
        error: io::Error,
    },
    /// It died again and again, each time within a second.
    #[error("SharedFS died {deaths} times, each time within a second of its start (last: {last}); its log says why")]
    KeepsDying {
        /// How often.
        deaths: u32,
        /// The last exit status.
        last: std::process::ExitStatus,
    },
    /// It ended by itself with an error: starting it again would end the same way.
    #[error("SharedFS gave up: {0}")]
    GaveUp(std::process::ExitStatus),
    /// Signals can't be watched.
    #[error("cannot watch signals: {0}")]
    Signals(io::Error),
}
