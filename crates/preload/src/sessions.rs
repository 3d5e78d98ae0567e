//! Sessions with SharedFS: when they begin, for which user, on which mount.

pub(crate) mod deferred_session;
pub(crate) mod session;
pub(crate) mod submounts;
pub(crate) mod user_sessions;
