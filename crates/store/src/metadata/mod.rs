//! The metadata: rows of the database, and their forms in memory.

pub(crate) mod batch;
pub(crate) mod chunk;
pub(crate) mod inode_cache;
pub(crate) mod rows;
