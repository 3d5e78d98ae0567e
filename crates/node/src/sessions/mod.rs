//! Sessions: what the node knows of each, their beginnings and their ends.

pub mod admission;
pub mod beginning;
pub mod ending;
pub mod identity;
pub mod kept_rights;
pub mod mapped_table;
pub mod mapping;
pub mod noted_locks;
pub mod removal;
pub mod session;
pub mod session_page;
pub mod session_table;
pub mod sharing;
