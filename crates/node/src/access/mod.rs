//! Which inodes a session's user comes to, and what it may do with them.

pub mod inode_names;
pub mod narrowing;
pub mod open_handles;
pub mod open_rights;
pub mod rights;
pub mod tree_view;
pub mod way_changes;
pub mod ways;
