//! File locks.

pub mod locking;
