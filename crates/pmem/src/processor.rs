//! The processor's own description of itself.

use std::arch::x86_64::{__cpuid_count, CpuidResult};

/// Asks for one page of the processor's features, or a part of it; nothing if the page does not exist.
///
/// In a virtual machine the host answers, which takes some microseconds.
#[allow(unused_unsafe, reason = "newer compilers call it a safe function, and Rust 1.89 does not")]
pub(crate) fn cpuid(leaf: u32, part: u32) -> CpuidResult {
    // SAFETY: each processor of 64 bits has the instruction.
    unsafe {
        // For a missing page, some processors return the content of another. The first two pages always exist.
        if leaf > 1 && __cpuid_count(0, 0).eax < leaf {
            return CpuidResult { eax: 0, ebx: 0, ecx: 0, edx: 0 };
        }
        __cpuid_count(leaf, part)
    }
}

/// Whether the processor has registers of 32 bytes, and the kernel keeps them for each thread.
#[must_use]
pub fn keeps_wide_registers() -> bool {
    const ASKS_KERNEL: u32 = 1 << 27;
    const AVX: u32 = 1 << 28;
    const KEPT: u32 = 0b110;
    if cpuid(1, 0).ecx & (ASKS_KERNEL | AVX) != ASKS_KERNEL | AVX {
        return false;
    }
    let kept: u32;
    // SAFETY: the instruction is there, and only reads a register that says what the kernel keeps.
    unsafe { std::arch::asm!("xgetbv", in("ecx") 0, out("eax") kept, out("edx") _, options(nomem, nostack)) };
    kept & KEPT == KEPT
}

/// Whether a program can ask which of its registers are in use (`XGETBV` of 1).
#[must_use]
pub fn tells_registers_in_use() -> bool {
    const TELLS: u32 = 1 << 2;
    cpuid(13, 1).eax & TELLS != 0
}
