//! The session's update log: appending records, and paying for them.

pub(crate) mod append;
pub(crate) mod quota;
pub(crate) mod quota_balances;
pub(crate) mod update_log;
