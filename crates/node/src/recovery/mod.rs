//! Recovery: takes up sessions after a start, applies their logs, and decides which go on.

mod logs;
pub mod settling;
pub mod state;
pub mod take_up;

pub use logs::{RecoveryFailure, recover_logs};
