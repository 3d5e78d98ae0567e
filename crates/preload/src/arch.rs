//! What depends on the processor: how a call is made, how one is caught, and how its stack is changed. x86-64 for now; another
//! processor brings a module with the same names.

#[cfg(target_arch = "x86_64")]
mod x86_64;

#[cfg(target_arch = "x86_64")]
pub(crate) use x86_64::*;
