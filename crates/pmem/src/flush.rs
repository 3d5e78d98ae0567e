//! The processor's instructions for writing cache lines back to memory.

use std::sync::OnceLock;

/// Bytes in a cache line.
pub(crate) const LINE_BYTES: usize = 64;

/// Whether bytes are whole lines.
#[inline]
pub(crate) fn are_lines(start: *const u8, length: usize) -> bool {
    (start as usize | length).is_multiple_of(LINE_BYTES)
}

/// Orders stores past the cache before this thread's later stores.
#[inline]
pub(crate) fn order_stores() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: SSE is part of every 64-bit x86 processor.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

/// From this size on, bulk data goes past the cache: below it, the partial lines at both ends cost more than is saved.
const NON_TEMPORAL_BYTES: usize = 512;

/// How lines reach the medium, best first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlushMethod {
    /// No instruction is needed: the memory does not outlive power, or the page cache stands between.
    None,
    /// `clwb`: the line is written back and stays in the cache.
    Clwb,
    /// `clflushopt`: the line is written back and leaves the cache.
    ClflushOpt,
    /// `clflush`: like `clflushopt`, but ordered, hence slow.
    Clflush,
    /// `dc cvac`: clean to the point of coherency, on 64-bit Arm.
    DcCvac,
}

impl FlushMethod {
    /// The best method that this processor has.
    #[must_use]
    pub fn best() -> Self {
        static BEST: OnceLock<FlushMethod> = OnceLock::new();
        *BEST.get_or_init(Self::detect)
    }

    #[cfg(target_arch = "x86_64")]
    fn detect() -> Self {
        use crate::processor::cpuid;

        let features = cpuid(7, 0).ebx;
        if features & (1 << 24) != 0 {
            Self::Clwb
        } else if features & (1 << 23) != 0 {
            Self::ClflushOpt
        } else {
            Self::Clflush
        }
    }

    #[cfg(target_arch = "aarch64")]
    fn detect() -> Self {
        Self::DcCvac
    }

    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    fn detect() -> Self {
        Self::None
    }

    /// Begins the write-back of every line that holds one of `length` bytes at `start`.
    ///
    /// # Safety
    /// The bytes are mapped.
    pub(crate) unsafe fn flush(self, start: *const u8, length: usize) {
        if self == Self::None || length == 0 {
            return;
        }
        let first = start as usize & !(LINE_BYTES - 1);
        let last = (start as usize + length - 1) & !(LINE_BYTES - 1);
        let mut line = first;
        while line <= last {
            // SAFETY: the line holds a byte that the caller vouches for, and lines never span pages.
            unsafe { self.flush_line(line as *const u8) };
            line += LINE_BYTES;
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[inline]
    unsafe fn flush_line(self, line: *const u8) {
        use std::arch::asm;
        // SAFETY: the line is mapped (the caller's promise) and `detect` found the instruction; it changes no memory
        // that the compiler knows of.
        unsafe {
            match self {
                Self::Clwb => asm!("clwb [{}]", in(reg) line, options(nostack, preserves_flags)),
                Self::ClflushOpt => asm!("clflushopt [{}]", in(reg) line, options(nostack, preserves_flags)),
                _ => asm!("clflush [{}]", in(reg) line, options(nostack, preserves_flags)),
            }
        }
    }

    #[cfg(target_arch = "aarch64")]
    #[inline]
    unsafe fn flush_line(self, line: *const u8) {
        // SAFETY: the line is mapped, which is all that the instruction asks; user space may run it on Linux.
        unsafe { std::arch::asm!("dc cvac, {}", in(reg) line, options(nostack, preserves_flags)) }
    }

    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    unsafe fn flush_line(self, _line: *const u8) {}

    /// Waits for this thread's write-backs and non-temporal stores.
    #[inline]
    pub(crate) fn fence(self) {
        if self == Self::None {
            return;
        }
        order_stores();
        #[cfg(target_arch = "aarch64")]
        // SAFETY: a barrier touches no memory.
        unsafe {
            std::arch::asm!("dsb ish", options(nostack, preserves_flags));
        }
    }

    /// Copies `bytes` to `to` and begins their write-back; large middles go past the cache.
    ///
    /// # Safety
    /// `to` is valid for writes of `bytes.len()` bytes.
    pub(crate) unsafe fn copy_flushed(self, to: *mut u8, bytes: &[u8]) {
        let length = bytes.len();
        let head = to.align_offset(LINE_BYTES).min(length);
        // Whole lines only: a line that is half non-temporal and half cached costs a read of the medium.
        let middle =
            if self == Self::None || length < NON_TEMPORAL_BYTES { 0 } else { (length - head) & !(LINE_BYTES - 1) };
        if middle == 0 {
            // SAFETY: the caller vouches for the target; the source is a slice, so it cannot be the target's own bytes.
            unsafe {
                std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, length);
                self.flush(to, length);
            }
            return;
        }
        // SAFETY: head + middle <= length, so every pointer stays in the range the caller vouches for, and
        // `to + head` is aligned to a line as `copy_lines` asks.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, head);
            self.flush(to, head);
            copy_lines(to.add(head), &bytes[head..head + middle]);
            let done = head + middle;
            std::ptr::copy_nonoverlapping(bytes.as_ptr().add(done), to.add(done), length - done);
            self.flush(to.add(done), length - done);
        }
    }
}

/// Copies whole lines with non-temporal stores.
///
/// # Safety
/// `to` is valid for writes of `bytes.len()` bytes and aligned to a line; the length is a multiple of a line.
#[cfg(target_arch = "x86_64")]
unsafe fn copy_lines(to: *mut u8, bytes: &[u8]) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128};
    let mut done = 0;
    while done < bytes.len() {
        // SAFETY: done < length, and both are multiples of 16, so 16 bytes are there on both sides; the target is
        // aligned to 16 bytes since it is aligned to a line.
        unsafe {
            let value = _mm_loadu_si128(bytes.as_ptr().add(done).cast::<__m128i>());
            _mm_stream_si128(to.add(done).cast::<__m128i>(), value);
        }
        done += 16;
    }
}

#[cfg(not(target_arch = "x86_64"))]
unsafe fn copy_lines(to: *mut u8, bytes: &[u8]) {
    // SAFETY: the caller vouches for the target; where there are no non-temporal stores the lines are flushed at once.
    unsafe {
        std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len());
        FlushMethod::best().flush(to, bytes.len());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flushed_copies_are_exact_at_every_alignment() {
        let bytes: Vec<u8> = (0..2000u32).map(|i| (i * 7 + 1) as u8).collect();
        for offset in [0, 1, 8, 63, 64, 65] {
            for length in [0, 1, 63, 64, 511, 512, 513, 700, 1999] {
                for method in [FlushMethod::None, FlushMethod::best()] {
                    let mut target = vec![0u8; 2200];
                    // SAFETY: offset + length is at most 2064, below the target's length.
                    unsafe { method.copy_flushed(target.as_mut_ptr().add(offset), &bytes[..length]) };
                    method.fence();
                    assert_eq!(&target[offset..offset + length], &bytes[..length]);
                    assert!(target[..offset].iter().chain(&target[offset + length..]).all(|&b| b == 0));
                }
            }
        }
    }
}
