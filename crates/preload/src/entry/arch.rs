//! Processor-specific code: making and catching system calls, changing stacks.
//!
//! So far this is x86-64. Another processor needs a module with the same names.

#[cfg(target_arch = "x86_64")]
mod x86_64;

#[cfg(target_arch = "x86_64")]
pub(crate) use x86_64::*;
