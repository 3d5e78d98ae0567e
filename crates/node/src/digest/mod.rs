//! Commits, syncs and the release of what is no longer used.

pub mod commit;
pub mod durability;
pub mod orphans;
