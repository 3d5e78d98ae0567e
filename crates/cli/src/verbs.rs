//! The verbs of the command, one file or folder each.

pub mod bench;
pub mod cluster;
pub mod cluster_status;
pub mod daemon;
pub mod dev;
pub mod fsck;
pub mod mount;
pub mod mount_process;
pub mod quota;
pub mod resize;
pub mod run;
pub mod status;
pub mod top;
pub mod umount;
