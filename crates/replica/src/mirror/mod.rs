//! The chain of two between machines: each side's thread, which carries out what `ashlar_cluster::chain` decides.

mod adoption;
mod cluster_files;
mod leader_service;
mod replica_service;

pub use adoption::adopt_copy;
pub use cluster_files::{ClusterFiles, ClusterFilesError, EmbeddedCoordinator};
pub use leader_service::{LeaderOptions, LeaderService, LeaderStatus, WriterNode};
pub use replica_service::{ReplicaService, ReplicaStatus};
