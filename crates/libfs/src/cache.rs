//! The session's cached inodes and the data structures that they consist of.

pub(crate) mod children;
pub(crate) mod dirty_list;
pub(crate) mod file_map;
pub(crate) mod intervals;
pub(crate) mod node;
pub(crate) mod pieces;
