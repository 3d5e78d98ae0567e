//! Memory: the program's, the library's own, and mappings of files.

pub(crate) mod heap;
pub(crate) mod memory_reserve;
pub(crate) mod program_memory;
pub(crate) mod segment_mapping;
pub(crate) mod snapshot_mapping;
