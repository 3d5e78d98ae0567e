//! The data blocks: segments, the allocator, and blocks that processes hold.

pub(crate) mod allocator;
pub(crate) mod held_blocks;
pub(crate) mod segment;
