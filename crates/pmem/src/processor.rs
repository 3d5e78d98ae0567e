//! What the processor says of itself.

use std::arch::x86_64::{__cpuid_count, CpuidResult};

/// Asks for one page of it, or a part of that. In a virtual machine it's the host that answers, which takes some microseconds.
#[allow(unused_unsafe, reason = "newer compilers call it a safe function, and Rust 1.89 does not")]
pub(crate) fn cpuid(leaf: u32, part: u32) -> CpuidResult {
    // SAFETY: each processor of 64 bits has the instruction.
    unsafe { __cpuid_count(leaf, part) }
}
