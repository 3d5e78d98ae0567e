//! Why a side closes the link.

use std::borrow::Cow;

use thiserror::Error;

/// Why there is no link between a writer and its replica, for people.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum LinkProblem {
    /// The documents of the two have another `min_replicas`. This text has the remedy.
    #[error(
        "min_replicas is {writer} at the writer and {replica} at the replica; write the same number into \
         cluster/cluster.toml of both arenas, and restart both daemons"
    )]
    MinReplicas {
        /// The writer's.
        writer: u8,
        /// The replica's.
        replica: u8,
    },
    /// Another cause.
    #[error("{0}")]
    Other(Cow<'static, str>),
}

impl From<&'static str> for LinkProblem {
    fn from(problem: &'static str) -> Self {
        Self::Other(problem.into())
    }
}

impl From<String> for LinkProblem {
    fn from(problem: String) -> Self {
        Self::Other(problem.into())
    }
}
