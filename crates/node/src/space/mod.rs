//! Space: credit and quotas.

pub mod credit;
pub mod credit_account;
pub mod credit_recall;
pub mod outstanding_quota;
pub mod quota;
pub mod quota_recall;
