//! Errors of journals and replicas.

use std::io;
use std::path::PathBuf;

use ashlar_node::journal::ReplayError;
use thiserror::Error;

/// Why a journal or a replica can't be used.
#[derive(Debug, Error)]
pub enum ReplicaError {
    /// The arena can't be opened.
    #[error(transparent)]
    Arena(#[from] ashlar_pmem::ArenaError),
    /// The store can't be opened.
    #[error(transparent)]
    Store(#[from] ashlar_store::StoreError),
    /// The journal can't be opened, or its frames can't be applied.
    #[error("the journal can't be used: {0}")]
    Journal(#[from] ReplayError),
    /// A full copy can't go on.
    #[error(transparent)]
    Copy(#[from] ashlar_store::FullCopyError),
    /// The shadow can't follow.
    #[error("the shadow in {path} can't be used: {problem}; remove the directory, or leave out --shadow")]
    Shadow {
        /// The shadow's directory.
        path: PathBuf,
        /// The problem.
        problem: String,
    },
    /// The operating system refuses something.
    #[error("{what}: {error}")]
    System {
        /// The attempt that failed.
        what: &'static str,
        /// The cause.
        error: io::Error,
    },
}
