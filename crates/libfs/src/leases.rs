//! Leases: requesting grants, reading published ones, reserving inodes.

pub(crate) mod claim;
pub(crate) mod first_reads;
pub(crate) mod grant_cache;
pub(crate) mod grant_cache_reader;
pub(crate) mod grants;
pub(crate) mod request_locks;
pub(crate) mod reserved_inodes;
