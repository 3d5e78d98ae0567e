//! The check of a store, and its repair.

pub(crate) mod checker;
pub(crate) mod problem;
pub(crate) mod repair;
