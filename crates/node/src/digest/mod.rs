//! Commits, syncs and the release of what is no longer used.

pub mod commit;
pub mod commit_state;
pub mod durability;
pub mod freed_blocks;
pub mod orphans;
