//! Records of sessions' logs: validated and applied.

pub mod apply;
pub mod batch;
pub mod log_check;
pub mod logs;
pub mod sealed_logs;
pub mod validate;
