//! The place where the document stands.

use thiserror::Error;

use crate::document::{ClusterDocument, DocumentError};

/// The version of a document at its coordinator, for compare-and-swap.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct DocumentVersion(pub u64);

/// Why a coordinator can't do something.
#[derive(Debug, Error)]
pub enum CoordinatorError {
    /// The document has changed meanwhile.
    #[error("the cluster's document has changed meanwhile; read it again")]
    Conflict,
    /// The proposed document's epoch is not newer.
    #[error("the proposed epoch is not newer than the one in force")]
    OldEpoch,
    /// The document is none that a cluster can have.
    #[error(transparent)]
    Document(#[from] DocumentError),
    /// The coordinator can't be reached, or its file can't be read or written.
    #[error("{what}: {problem}")]
    Unavailable {
        /// The attempt that failed.
        what: String,
        /// The cause.
        problem: String,
    },
}

/// Keeps a cluster's document. It changes by compare-and-swap only.
///
/// `embedded` keeps it in a file of each node, for clusters whose membership is fixed. Coordinators that all nodes
/// share come later.
pub trait Coordinator {
    /// Returns the document and its version.
    ///
    /// # Errors
    /// [`CoordinatorError::Unavailable`], [`CoordinatorError::Document`].
    fn read(&self) -> Result<(ClusterDocument, DocumentVersion), CoordinatorError>;

    /// Replaces the document if it still has this version, durably; returns the new version.
    ///
    /// # Errors
    /// [`CoordinatorError`].
    fn compare_and_swap(
        &self,
        expected: DocumentVersion,
        document: &ClusterDocument,
    ) -> Result<DocumentVersion, CoordinatorError>;
}
