//! Records of sessions' logs: validated and applied.

pub mod apply;
pub mod logs;
pub mod sealed_logs;
pub mod validate;
