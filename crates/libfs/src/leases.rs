//! Leases: requesting grants, reading published ones, reserving inodes.

pub(crate) mod grant_cache;
pub(crate) mod grants;
pub(crate) mod reserved_inodes;
