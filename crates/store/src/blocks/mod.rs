//! The data blocks: segments, the allocator, blocks that processes hold, and readers of committed states.

pub(crate) mod allocator;
pub(crate) mod held_blocks;
pub(crate) mod readers;
pub(crate) mod segment;
