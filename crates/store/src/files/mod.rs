//! The content of files: reads, writes, and mappings.

pub(crate) mod data;
pub(crate) mod mapped;
pub(crate) mod read;
