//! The metadata: rows of LMDB, their forms in memory, and the database.

pub(crate) mod batch;
pub(crate) mod chunk;
pub(crate) mod database;
pub(crate) mod inode_cache;
pub(crate) mod rows;
