//! The chain of two between machines: each side's thread, which carries out what `ashlar_cluster::chain` decides.

mod adoption;
mod cluster_files;
mod copy_sender;
mod copy_service;
mod leader_service;
mod link_log;
mod replica_service;
mod writer_link;

pub use adoption::adopt_copy;
pub use cluster_files::{ClusterFiles, ClusterFilesError, EmbeddedCoordinator};
pub use copy_service::{CopyService, CopyStatus};
pub use leader_service::{LeaderOptions, LeaderService, LeaderStatus, WriterNode};
pub use replica_service::{ReplicaService, ReplicaStatus};
