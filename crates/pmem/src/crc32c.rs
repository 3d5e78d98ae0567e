//! CRC32C: of bytes where they are, and of bytes while they are copied.
//!
//! A record's checksum is taken of what is stored, while the program's other threads may write to where it comes from. So each byte is read
//! once, and goes from one register into memory and into the checksum. That costs little more than the copy: the processor's instruction takes a word at a
//! time and has its result three cycles later, so three stretches are summed up side by side, and put together by a multiplication of polynomials.
//!
//! Source: V. Gopal et al., "Fast CRC Computation for iSCSI Polynomial Using CRC32 Instruction", Intel, 2011 (three stretches); the
//! polynomial and its bit order are those of RFC 3720, appendix B.4.

/// From so many bytes on whole lines go past the cache wherever they go: to fetch them first takes as long as to write them.
#[cfg(target_arch = "x86_64")]
const BULK_BYTES: usize = 2 << 10;

/// A checksum of bytes that come piece by piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Crc32c(u32);

impl Default for Crc32c {
    fn default() -> Self {
        Self(u32::MAX)
    }
}

impl Crc32c {
    /// Of bytes that are there all at once.
    #[must_use]
    #[inline]
    pub fn of(bytes: &[u8]) -> u32 {
        let mut sum = Self::default();
        sum.update(bytes);
        sum.finish()
    }

    /// Adds bytes.
    #[inline]
    pub fn update(&mut self, bytes: &[u8]) {
        #[cfg(target_arch = "x86_64")]
        if x86_64::is_there() {
            // SAFETY: the processor has the instructions; the bytes are a slice, and nothing is written.
            self.0 =
                unsafe { x86_64::run::<{ x86_64::SUM }>(self.0, bytes.as_ptr(), std::ptr::null_mut(), bytes.len()) };
            return;
        }
        let mut digest = crc_fast::Digest::new_with_init_state(crc_fast::CrcAlgorithm::Crc32Iscsi, self.0.into());
        digest.update(bytes);
        self.0 = digest.get_state() as u32;
    }

    /// The checksum of all that was added.
    #[must_use]
    #[inline]
    pub fn finish(self) -> u32 {
        !self.0
    }

    /// Copies bytes and adds them, each read once. `false`, and nothing is done, where that can't be done at once: the bytes must go past the cache and are
    /// no whole lines of it, or the processor has no instructions for it.
    ///
    /// # Safety
    /// `to` is valid for writes of as many bytes. What is there may be read and written by others, as may the bytes. Where they must go past the
    /// cache, a fence must stand before anything that tells others of them.
    pub(crate) unsafe fn copy(&mut self, bytes: &[u8], to: *mut u8, past_cache: bool) -> bool {
        #[cfg(target_arch = "x86_64")]
        {
            let is_whole = (to as usize | bytes.len()).is_multiple_of(crate::flush::LINE_BYTES);
            if !x86_64::is_there() || past_cache && !is_whole {
                return false;
            }
            let (from, length) = (bytes.as_ptr(), bytes.len());
            // SAFETY: the processor has the instructions; the bytes are a slice, and the caller vouches for the target.
            self.0 = unsafe {
                if past_cache {
                    x86_64::run::<{ x86_64::STREAM }>(self.0, from, to, length)
                } else if is_whole && length >= BULK_BYTES {
                    let sum = x86_64::run::<{ x86_64::STREAM }>(self.0, from, to, length);
                    std::arch::x86_64::_mm_sfence();
                    sum
                } else {
                    x86_64::run::<{ x86_64::COPY }>(self.0, from, to, length)
                }
            };
            true
        }
        #[cfg(not(target_arch = "x86_64"))]
        {
            let _ = (bytes, to, past_cache);
            false
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86_64 {
    use std::arch::asm;
    use std::arch::x86_64::{
        _mm_clmulepi64_si128, _mm_crc32_u8, _mm_crc32_u64, _mm_cvtsi64_si128, _mm_cvtsi128_si64, _mm_xor_si128,
    };
    use std::sync::atomic::{AtomicU8, Ordering};

    use crate::processor::cpuid;

    /// What [`run`] does beside summing up: nothing,
    pub(super) const SUM: u8 = 0;
    /// copies,
    pub(super) const COPY: u8 = 1;
    /// copies past the cache.
    pub(super) const STREAM: u8 = 2;

    const WORD: usize = 8;
    /// The polynomial, its highest power left out, in reflected order: the lowest bit stands for the highest power.
    const POLYNOMIAL: u32 = 0x82f6_3b78;

    /// Stretches of so many bytes are taken three at a time: such that those of a page leave little, and each is whole lines.
    const STRETCHES: [Stretch; 3] = [Stretch::of(1344), Stretch::of(448), Stretch::of(128)];

    /// The length of a stretch, and what moves a checksum over one and over two of them.
    struct Stretch {
        bytes: usize,
        over_one: u32,
        over_two: u32,
    }

    impl Stretch {
        const fn of(bytes: usize) -> Self {
            Self { bytes, over_one: over(bytes), over_two: over(2 * bytes) }
        }
    }

    /// The factor that moves a checksum over so many bytes: x to the number of bits, less the 33 that the multiplication (one, as both
    /// factors are reflected) and the reduction by the instruction (32) add.
    const fn over(bytes: usize) -> u32 {
        let mut power = 1 << 31;
        let mut left = bytes * 8 - 33;
        while left > 0 {
            power = power >> 1 ^ if power & 1 == 1 { POLYNOMIAL } else { 0 };
            left -= 1;
        }
        power
    }

    /// What is known of the processor: nothing yet, or one of the other two. Without a lock, which a thread might hold while another one
    /// forks.
    static KNOWN: AtomicU8 = AtomicU8::new(UNKNOWN);
    const UNKNOWN: u8 = 0;
    const LACKS: u8 = 1;
    const HAS: u8 = 2;

    /// Whether the processor has the instructions.
    #[inline]
    pub(super) fn is_there() -> bool {
        match KNOWN.load(Ordering::Relaxed) {
            UNKNOWN => look(),
            known => known == HAS,
        }
    }

    /// Asks the processor once. `is_x86_feature_detected` asks it a dozen times, for whatever there may be, and in a virtual machine
    /// each time is the host's: 50 us, an eighth of a program's first call.
    #[cold]
    fn look() -> bool {
        const PCLMULQDQ: u32 = 1 << 1;
        const SSE4_2: u32 = 1 << 20;
        let has = cpuid(1, 0).ecx & (PCLMULQDQ | SSE4_2) == PCLMULQDQ | SSE4_2;
        KNOWN.store(if has { HAS } else { LACKS }, Ordering::Relaxed);
        has
    }

    /// Adds bytes to a checksum, and copies them if `MODE` says so. Each is read once.
    ///
    /// # Safety
    /// The processor has the instructions. `from` is valid for reads of `length` bytes, and `to` for writes unless nothing is copied; for
    /// [`STREAM`], a fence must stand before anything that tells others of them.
    #[target_feature(enable = "sse4.2,pclmulqdq")]
    pub(super) unsafe fn run<const MODE: u8>(sum: u32, from: *const u8, to: *mut u8, length: usize) -> u32 {
        let mut sum = u64::from(sum);
        let mut done = 0;
        if MODE != SUM {
            let head = to.align_offset(WORD).min(length);
            // SAFETY: the head is within the bytes.
            sum = unsafe { bytes::<MODE>(sum, from, to, head) };
            done = head;
        }
        for stretch in &STRETCHES {
            while length - done >= 3 * stretch.bytes {
                // SAFETY: three stretches are within the bytes.
                sum = unsafe { three::<MODE>(sum, from.wrapping_add(done), to.wrapping_add(done), stretch) };
                done += 3 * stretch.bytes;
            }
        }
        let words = (length - done) & !(WORD - 1);
        // SAFETY: the words and the bytes behind them are within the bytes.
        unsafe {
            sum = one::<MODE>(sum, from.wrapping_add(done), to.wrapping_add(done), words);
            done += words;
            bytes::<MODE>(sum, from.wrapping_add(done), to.wrapping_add(done), length - done) as u32
        }
    }

    /// Three stretches side by side.
    ///
    /// # Safety
    /// As for [`run`], of three stretches.
    #[inline]
    #[target_feature(enable = "sse4.2,pclmulqdq")]
    unsafe fn three<const MODE: u8>(sum: u64, from: *const u8, to: *mut u8, stretch: &Stretch) -> u64 {
        let (mut first, mut second, mut third) = (sum, 0_u64, 0_u64);
        macro_rules! sum_up {
            ($($store:literal),*) => {
                asm!(
                    "2:",
                    "mov {x}, [{from}]",
                    "mov {y}, [{from} + {bytes}]",
                    "mov {z}, [{from} + 2 * {bytes}]",
                    $($store,)*
                    "crc32 {first}, {x}",
                    "crc32 {second}, {y}",
                    "crc32 {third}, {z}",
                    "add {from}, 8",
                    "add {to}, 8",
                    "cmp {from}, {end}",
                    "jb 2b",
                    from = inout(reg) from => _,
                    to = inout(reg) to => _,
                    end = in(reg) from.wrapping_add(stretch.bytes),
                    bytes = in(reg) stretch.bytes,
                    first = inout(reg) first,
                    second = inout(reg) second,
                    third = inout(reg) third,
                    x = out(reg) _,
                    y = out(reg) _,
                    z = out(reg) _,
                    options(nostack),
                )
            };
        }
        // SAFETY: the caller vouches for three stretches on both sides, and the loop goes over one of them, and beside it over the two others.
        unsafe {
            match MODE {
                COPY => sum_up!("mov [{to}], {x}", "mov [{to} + {bytes}], {y}", "mov [{to} + 2 * {bytes}], {z}"),
                STREAM => {
                    sum_up!("movnti [{to}], {x}", "movnti [{to} + {bytes}], {y}", "movnti [{to} + 2 * {bytes}], {z}")
                }
                _ => sum_up!(),
            }
        }
        let times = |sum: u64, factor: u32| {
            _mm_clmulepi64_si128(_mm_cvtsi64_si128(sum as i64), _mm_cvtsi64_si128(i64::from(factor)), 0)
        };
        let moved = _mm_xor_si128(times(first, stretch.over_two), times(second, stretch.over_one));
        _mm_crc32_u64(0, _mm_cvtsi128_si64(moved) as u64) ^ third
    }

    /// Word by word.
    ///
    /// # Safety
    /// As for [`run`]; the length is a multiple of a word.
    #[inline]
    #[target_feature(enable = "sse4.2")]
    unsafe fn one<const MODE: u8>(mut sum: u64, from: *const u8, to: *mut u8, length: usize) -> u64 {
        macro_rules! sum_up {
            ($($store:literal),*) => {
                asm!(
                    "2:",
                    "mov {x}, [{from}]",
                    $($store,)*
                    "crc32 {sum}, {x}",
                    "add {from}, 8",
                    "add {to}, 8",
                    "cmp {from}, {end}",
                    "jb 2b",
                    from = inout(reg) from => _,
                    to = inout(reg) to => _,
                    end = in(reg) from.wrapping_add(length),
                    sum = inout(reg) sum,
                    x = out(reg) _,
                    options(nostack),
                )
            };
        }
        if length > 0 {
            // SAFETY: the caller vouches for so many bytes on both sides.
            unsafe {
                match MODE {
                    COPY => sum_up!("mov [{to}], {x}"),
                    STREAM => sum_up!("movnti [{to}], {x}"),
                    _ => sum_up!(),
                }
            }
        }
        sum
    }

    /// Byte by byte.
    ///
    /// # Safety
    /// As for [`run`].
    #[inline]
    #[target_feature(enable = "sse4.2")]
    unsafe fn bytes<const MODE: u8>(sum: u64, from: *const u8, to: *mut u8, length: usize) -> u64 {
        let mut sum = sum as u32;
        for at in 0..length {
            // SAFETY: the byte is within those that the caller vouches for.
            let byte = unsafe { from.add(at).read_volatile() };
            if MODE != SUM {
                // SAFETY: as above.
                unsafe { to.add(at).write(byte) };
            }
            sum = _mm_crc32_u8(sum, byte);
        }
        sum.into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(length: usize) -> Vec<u8> {
        let mut state = 0x2545_f491_4f6c_dd1d_u64;
        let mut byte = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state as u8
        };
        (0..length).map(|_| byte()).collect()
    }

    #[test]
    fn it_is_the_checksum_that_others_know() {
        assert_eq!(Crc32c::of(b"123456789"), 0xe306_9283);
        assert_eq!(Crc32c::of(b""), 0);
        // RFC 3720, B.4.
        assert_eq!(Crc32c::of(&[0; 32]), 0x8a91_36aa);
        assert_eq!(Crc32c::of(&[0xff; 32]), 0x62a8_ab43);
        let text = text(20_000);
        for length in (0..600).chain([1343, 1344, 4031, 4032, 4033, 4096, 5375, 8192, 12_345, 20_000]) {
            assert_eq!(Crc32c::of(&text[..length]), crc_fast::crc32_iscsi(&text[..length]), "{length} bytes");
        }
    }

    #[test]
    fn it_does_not_matter_in_which_pieces_bytes_come() {
        let text = text(10_000);
        let whole = Crc32c::of(&text);
        for piece in [1, 7, 64, 777, 4033] {
            let mut sum = Crc32c::default();
            text.chunks(piece).for_each(|piece| sum.update(piece));
            assert_eq!(sum.finish(), whole, "in pieces of {piece}");
        }
    }

    #[test]
    fn what_is_copied_is_what_is_summed_up_wherever_it_goes() {
        let text = text(40_000);
        for past_cache in [false, true] {
            for (from, to, length) in [
                (0, 0, 0),
                (3, 0, 64),
                (1, 5, 1),
                (5, 1, 700),
                (0, 64, 4096),
                (7, 63, 4096),
                (9, 128, 32_768),
                (1, 2, 32_769),
            ] {
                let bytes = &text[from..from + length];
                let mut target = vec![0_u8; 40_000];
                let start = target.as_mut_ptr().align_offset(64);
                let mut sum = Crc32c::default();
                sum.update(b"before");
                let mut expected = sum;
                // SAFETY: start + to + length is at most 64 + 128 + 32,769, below the target's length.
                let is_done = unsafe { sum.copy(bytes, target.as_mut_ptr().add(start + to), past_cache) };
                let is_whole = to % 64 == 0 && length % 64 == 0;
                if !is_done {
                    assert!(past_cache && !is_whole || !cfg!(target_arch = "x86_64"));
                    assert!(target.iter().all(|byte| *byte == 0) && sum == expected);
                    continue;
                }
                expected.update(bytes);
                assert_eq!(sum, expected, "{length} bytes from {from} to {to}");
                let end = start + to + length;
                assert_eq!(&target[start + to..end], bytes, "{length} bytes from {from} to {to}");
                assert!(
                    target[..start + to].iter().chain(&target[end..]).all(|byte| *byte == 0),
                    "nothing else is written"
                );
            }
        }
    }

    /// Whoever changes the source meanwhile: the checksum is that of the copy.
    #[test]
    fn a_source_that_changes_meanwhile_is_read_once() {
        use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
        let source: Vec<AtomicU64> = (0..512).map(|_| AtomicU64::new(0)).collect();
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut value = 0_u64;
                while !is_over.load(Ordering::Relaxed) {
                    value = value.wrapping_add(0x0101_0101_0101_0101);
                    source.iter().for_each(|word| word.store(value, Ordering::Relaxed));
                }
            });
            for _ in 0..2000 {
                let mut target = [0_u8; 4096];
                let mut sum = Crc32c::default();
                // SAFETY: the words are there; they are read as the program's memory is, which others may write to.
                let bytes = unsafe { std::slice::from_raw_parts(source.as_ptr().cast::<u8>(), 4096) };
                // SAFETY: the target is as long.
                if unsafe { sum.copy(bytes, target.as_mut_ptr(), false) } {
                    assert_eq!(sum.finish(), Crc32c::of(&target));
                }
            }
            is_over.store(true, Ordering::Relaxed);
        });
    }
}
