//! Leases with the state that comes with them.

pub mod decisions;
pub mod grant;
pub mod grant_cache;
pub mod inode_state;
pub mod invalidation;
pub mod kernel_notifier;
pub mod lease_tables;
pub mod leasing;
pub mod read_ahead;
pub mod reserved;
pub mod scan_detection;
pub mod states;
pub mod tree_walks;
pub mod wants;
