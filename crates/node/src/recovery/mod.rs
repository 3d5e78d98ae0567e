//! Recovery: what a start takes up.

mod logs;
pub mod state;

pub use logs::{RecoveryFailure, recover_logs, recover_logs_with};
