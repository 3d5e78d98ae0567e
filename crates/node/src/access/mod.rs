//! Which inodes a session's user comes to, and what it may do with them.

pub mod open_rights;
pub mod ways;
