//! Sessions: what the node knows of each, and their ends.

pub mod admission;
pub mod ending;
pub mod identity;
pub mod kept_rights;
pub mod mapped_table;
pub mod mapping;
pub mod noted_locks;
pub mod session;
pub mod session_page;
pub mod session_table;
pub mod sharing;
