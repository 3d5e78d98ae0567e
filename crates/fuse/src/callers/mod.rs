//! The processes behind requests, as `/proc` shows them: calls, reports, watches.
pub(crate) mod calling_thread;
pub(crate) mod report_runs;
pub(crate) mod watch_finder;
pub(crate) mod watches;
