//! Caught calls on their way in and out: entry code, hook, stacks, signals.

pub(crate) mod arch;
pub(crate) mod call_stack;
pub(crate) mod hook;
pub(crate) mod signals;
pub(crate) mod single_thread;
