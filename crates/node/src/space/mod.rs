//! Space: credit and quotas.

pub mod credit;
pub mod credit_account;
pub mod quota;
