//! File locks.

pub mod lock_checks;
pub mod locking;
