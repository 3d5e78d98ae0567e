//! Arenas, mounts and background processes of this machine.

pub mod admission;
pub mod arena;
pub mod background;
pub mod mounts;
pub mod names;
