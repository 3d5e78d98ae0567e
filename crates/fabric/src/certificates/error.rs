//! Why certificates or keys don't serve.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

/// Why certificates or keys don't serve.
#[derive(Debug, Error)]
pub enum CredentialsError {
    /// A file can't be read.
    #[error("cannot read {path}: {error}")]
    Read {
        /// The file.
        path: PathBuf,
        /// The cause.
        error: io::Error,
    },
    /// A file can't be written. A file that is there is never replaced.
    #[error("cannot write {path}: {error}; an existing file is kept, so move it away first if it is not needed")]
    Write {
        /// The file.
        path: PathBuf,
        /// The cause.
        error: io::Error,
    },
    /// Other users may read a private key.
    #[error("other users may read the private key {path} (mode {mode:04o}): run `chmod 600 {path}`, or renew the key")]
    Exposed {
        /// The file.
        path: PathBuf,
        /// Its mode.
        mode: u32,
    },
    /// The bytes are no certificate or key, or don't belong together.
    #[error("{subject} cannot be used: {cause}; issue it again with the cluster's authority")]
    Invalid {
        /// The certificate or key.
        subject: String,
        /// The cause.
        cause: String,
    },
    /// No certificate could be made.
    #[error("cannot make {subject}: {cause}")]
    Issue {
        /// The certificate or key.
        subject: String,
        /// The cause.
        cause: String,
    },
}
