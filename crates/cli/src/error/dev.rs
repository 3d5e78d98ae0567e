//! Why a cluster on this machine can't be made or changed.

use std::path::PathBuf;

use thiserror::Error;

/// Why a cluster on this machine can't be made or changed.
#[derive(Debug, Error)]
pub enum DevError {
    /// The name can't be part of other names.
    #[error("'{0}' can't name a cluster; use up to 24 of the characters a-z, 0-9 and '-'")]
    WrongName(String),
    /// Another number of nodes.
    #[error("a cluster has two nodes in this version, not {0}; run 'ashlar dev up 2'")]
    WrongCount(u16),
    /// The cluster exists.
    #[error(
        "cluster {0} is there already; see 'ashlar dev status --name {0}', or remove it: 'ashlar dev down --name {0}'"
    )]
    Exists(String),
    /// The cluster does not exist.
    #[error("there is no cluster {0} on this machine; make one with 'ashlar dev up 2 --name {0}'")]
    Missing(String),
    /// The record can't be read.
    #[error("{path}: {problem}; end its processes by hand, and remove the directory", path = .path.display())]
    BadRecord {
        /// The record.
        path: PathBuf,
        /// The problem.
        problem: String,
    },
    /// No such node.
    #[error("cluster {name} has no node {node}; its nodes are 0 and 1")]
    NoNode {
        /// The cluster.
        name: String,
        /// The node.
        node: u16,
    },
    /// The namespace is not the cluster's.
    #[error(
        "there is a network namespace {0} already; choose another name with --name, or remove it: 'ip netns delete {0}'"
    )]
    NamespaceExists(String),
    /// The directory is not empty.
    #[error("{0} is there already; choose another place with --directory, or remove it")]
    ArenaTaken(PathBuf),
    /// ip(8) is not there.
    #[error("can't run ip(8): {0}; install iproute2, or use --loopback")]
    NoIpCommand(std::io::Error),
    /// ip(8) failed.
    #[error("'ip {words}' failed: {problem}; without network namespaces: --loopback")]
    IpFailed {
        /// Its arguments.
        words: String,
        /// Its message.
        problem: String,
    },
    /// There is no link that could be cut.
    #[error(
        "the nodes of cluster {0} have no network namespaces, so no link can be cut; that takes root: \
         'ashlar dev down --name {0}', then 'sudo ashlar dev up 2 --name {0}' without --loopback"
    )]
    NoLink(String),
    /// The daemon runs.
    #[error("the daemon of node {0} runs already; 'ashlar dev status' shows it")]
    Runs(u16),
    /// The daemon does not run.
    #[error("the daemon of node {0} does not run; 'ashlar dev start {0}' starts it")]
    RunsNot(u16),
    /// Processes do not end or stop.
    #[error("process {pid} of node {node} did not {what}; look at it with 'ps -fp {pid}', and try again")]
    Stubborn {
        /// The process.
        pid: u32,
        /// The node.
        node: u16,
        /// The requested change.
        what: &'static str,
    },
    /// The nodes don't come into sync.
    #[error(
        "the replica is not in sync after {seconds} s: {problem}; 'ashlar dev status --name {name}' shows more, \
         'ashlar dev down --name {name}' removes the cluster"
    )]
    NotInSync {
        /// The cluster.
        name: String,
        /// How long it was waited for.
        seconds: u64,
        /// The problem that the writer names.
        problem: String,
    },
}
