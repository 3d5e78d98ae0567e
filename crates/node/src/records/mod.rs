//! Records of sessions' logs: validated and applied.

pub mod apply;
pub mod batch;
pub mod logs;
pub mod validate;
