//! CRC32C: of bytes where they are, and of bytes while they are copied.
//!
//! A record's checksum must describe the stored bytes, while the program's other threads may write to their source. So
//! each byte is read once, and goes from one register into memory and into the checksum. The sum so far is a polynomial
//! of four registers' length. The next four registers are added after it was moved behind them, by a carry-less
//! multiplication in which no register waits for another. Whole registers go to memory in one stream: stores past the
//! cache are gathered line by line, and lines that are begun side by side are given up half full.
//!
//! Source: V. Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction", Intel, 2009;
//! the polynomial and its bit order are those of RFC 3720, appendix B.4.

#[cfg(target_arch = "x86_64")]
use crate::flush::are_lines;

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

    /// Copies bytes and adds them to the sum, each read once.
    ///
    /// Returns `false`, and does nothing, if that can't be done at once. The causes are bytes that must go past the
    /// cache and are not whole lines of it, and a processor without the instructions.
    ///
    /// # Safety
    /// `from` is valid for reads of `length` bytes, and `to` for writes. Other threads may read and write both
    /// meanwhile. If the bytes go past the cache, a fence must stand before any store that announces them to others.
    pub(crate) unsafe fn copy(&mut self, from: *const u8, to: *mut u8, length: usize, past_cache: bool) -> bool {
        #[cfg(target_arch = "x86_64")]
        {
            if !x86_64::is_there() || past_cache && !are_lines(to, length) {
                return false;
            }
            // SAFETY: the processor has the instructions, and the caller vouches for the bytes on both sides.
            self.0 = unsafe {
                if past_cache {
                    x86_64::run::<{ x86_64::STREAM }>(self.0, from, to, length)
                } else {
                    x86_64::run::<{ x86_64::COPY }>(self.0, from, to, length)
                }
            };
            true
        }
        #[cfg(not(target_arch = "x86_64"))]
        {
            let _ = (from, to, length, past_cache);
            false
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86_64 {
    use std::arch::asm;
    use std::arch::x86_64::{
        __m128i, __m256i, _mm_clmulepi64_si128, _mm_crc32_u8, _mm_crc32_u64, _mm_cvtsi32_si128, _mm_extract_epi64,
        _mm_set_epi64x, _mm_xor_si128, _mm256_broadcastsi128_si256, _mm256_castsi256_si128, _mm256_clmulepi64_epi128,
        _mm256_extracti128_si256, _mm256_xor_si256, _mm256_zextsi128_si256,
    };
    use std::sync::atomic::{AtomicU8, Ordering};

    use crate::processor::{cpuid, keeps_wide_registers};

    /// The other work of [`run`] beside the sum: nothing,
    pub(super) const SUM: u8 = 0;
    /// copies,
    pub(super) const COPY: u8 = 1;
    /// copies past the cache.
    pub(super) const STREAM: u8 = 2;

    const WORD: usize = 8;
    /// Registers that are summed up side by side: a multiplication takes as long as four take one after the other.
    const SIDE_BY_SIDE: usize = 4;
    const NARROW: usize = size_of::<__m128i>();
    const WIDE: usize = size_of::<__m256i>();
    /// The polynomial, its highest power left out, in reflected order: the lowest bit stands for the highest power.
    const POLYNOMIAL: u32 = 0x82f6_3b78;

    /// x to this power, reduced, in reflected order.
    const fn power(exponent: usize) -> u32 {
        let mut power = 1 << 31;
        let mut left = exponent;
        while left > 0 {
            power = power >> 1 ^ if power & 1 == 1 { POLYNOMIAL } else { 0 };
            left -= 1;
        }
        power
    }

    /// Returns the factors that move the first and the second word of 16 bytes over so many bytes.
    ///
    /// A product of reflected factors is one power too high.
    const fn over(bytes: usize) -> (i64, i64) {
        ((power(8 * bytes + 63) as i64) << 32, (power(8 * bytes - 1) as i64) << 32)
    }

    /// The processor's known abilities: a level, or a count on the way to [`HAS_WIDE`] or [`HAS_NARROW`]. Without a
    /// lock, which a thread might hold while another one forks.
    pub(super) static KNOWN: AtomicU8 = AtomicU8::new(UNKNOWN);
    const UNKNOWN: u8 = 0;
    /// It lacks the instructions.
    const LACKS: u8 = 1;
    /// It has those for registers of 16 bytes; from here on it's counted how often wider ones would have been of use.
    const HAS: u8 = 2;
    /// That often it's worth to ask whether there are wider ones.
    const WORTH: u8 = HAS + 32;
    /// It has the instructions for registers of 16 bytes, and no others.
    pub(super) const HAS_NARROW: u8 = u8::MAX - 1;
    /// It has those for registers of 32 bytes, too.
    pub(super) const HAS_WIDE: u8 = u8::MAX;

    /// Whether the processor has the instructions.
    #[inline]
    pub(super) fn is_there() -> bool {
        match KNOWN.load(Ordering::Relaxed) {
            UNKNOWN => look(),
            known => known != LACKS,
        }
    }

    /// Asks the processor once for its instructions.
    ///
    /// `is_x86_feature_detected` asks a dozen times, for all features. In a virtual machine the host answers each time:
    /// 6 us, while a program's first call takes 400.
    #[cold]
    fn look() -> bool {
        const PCLMULQDQ: u32 = 1 << 1;
        const SSE4_2: u32 = 1 << 20;
        let has = cpuid(1, 0).ecx & (PCLMULQDQ | SSE4_2) == PCLMULQDQ | SSE4_2;
        KNOWN.store(if has { HAS } else { LACKS }, Ordering::Relaxed);
        has
    }

    /// Whether the processor has wide registers, as far as that is known. A process that seldom asks does not query the
    /// processor.
    #[inline]
    fn is_wide() -> bool {
        match KNOWN.load(Ordering::Relaxed) {
            HAS_WIDE => true,
            HAS_NARROW => false,
            known => count_wide(known),
        }
    }

    #[cold]
    fn count_wide(known: u8) -> bool {
        if known < WORTH {
            KNOWN.store(known + 1, Ordering::Relaxed);
            return false;
        }
        let has = has_wide();
        KNOWN.store(if has { HAS_WIDE } else { HAS_NARROW }, Ordering::Relaxed);
        has
    }

    pub(super) fn has_wide() -> bool {
        const AVX2: u32 = 1 << 5;
        const VPCLMULQDQ: u32 = 1 << 10;
        let features = cpuid(7, 0);
        features.ebx & AVX2 != 0 && features.ecx & VPCLMULQDQ != 0 && keeps_wide_registers()
    }

    /// Adds bytes to a checksum, and copies them if `MODE` says so. Each is read once.
    ///
    /// # Safety
    /// The processor has the instructions. `from` is valid for reads of `length` bytes, and `to` for writes unless
    /// nothing is copied; for [`STREAM`], it begins a line, and a fence must stand before anything that tells others of
    /// them.
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
        let rest = length - done;
        // SAFETY: what is folded is within the bytes, and so are the words and the bytes behind it. There are wide
        // registers where it says so.
        unsafe {
            if rest >= 2 * SIDE_BY_SIDE * WIDE && is_wide() {
                let wide = rest / (SIDE_BY_SIDE * WIDE) * (SIDE_BY_SIDE * WIDE);
                sum = fold_wide::<MODE>(sum, from.wrapping_add(done), to.wrapping_add(done), wide);
                done += wide;
            } else if rest >= 2 * SIDE_BY_SIDE * NARROW {
                let narrow = rest / (SIDE_BY_SIDE * NARROW) * (SIDE_BY_SIDE * NARROW);
                sum = fold_narrow::<MODE>(sum, from.wrapping_add(done), to.wrapping_add(done), narrow);
                done += narrow;
            }
            let words = (length - done) & !(WORD - 1);
            sum = one::<MODE>(sum, from.wrapping_add(done), to.wrapping_add(done), words);
            done += words;
            bytes::<MODE>(sum, from.wrapping_add(done), to.wrapping_add(done), length - done) as u32
        }
    }

    /// Sums with four registers of 16 bytes side by side.
    ///
    /// # Safety
    /// As for [`run`]; the length is a multiple of four registers, and not zero.
    #[inline]
    #[target_feature(enable = "sse4.2,pclmulqdq")]
    unsafe fn fold_narrow<const MODE: u8>(sum: u64, from: *const u8, to: *mut u8, length: usize) -> u64 {
        let take = |at: usize| {
            let taken: __m128i;
            let (from, to) = (from.wrapping_add(at), to.wrapping_add(at));
            // SAFETY: the caller vouches for the bytes on both sides.
            unsafe {
                asm!("movdqu {}, [{}]", out(xmm_reg) taken, in(reg) from, options(nostack, preserves_flags, readonly));
                match MODE {
                    COPY => asm!("movdqu [{}], {}", in(reg) to, in(xmm_reg) taken, options(nostack, preserves_flags)),
                    STREAM => {
                        asm!("movntdq [{}], {}", in(reg) to, in(xmm_reg) taken, options(nostack, preserves_flags))
                    }
                    _ => {}
                }
            }
            taken
        };
        let mut sums: [__m128i; SIDE_BY_SIDE] = std::array::from_fn(|number| take(number * NARROW));
        sums[0] = _mm_xor_si128(sums[0], _mm_cvtsi32_si128(sum as i32));
        let factors = const { over(SIDE_BY_SIDE * NARROW) };
        for at in (SIDE_BY_SIDE * NARROW..length).step_by(SIDE_BY_SIDE * NARROW) {
            for (number, sum) in sums.iter_mut().enumerate() {
                *sum = moved(*sum, factors, take(at + number * NARROW));
            }
        }
        let factors = const { over(NARROW) };
        let [first, rest @ ..] = sums;
        reduced(rest.into_iter().fold(first, |sum, next| moved(sum, factors, next)))
    }

    /// Sums with four registers of 32 bytes side by side.
    ///
    /// # Safety
    /// As for [`run`], if the processor has such registers; the length is a multiple of four of them, and not zero.
    #[target_feature(enable = "sse4.2,pclmulqdq,avx2,vpclmulqdq")]
    unsafe fn fold_wide<const MODE: u8>(sum: u64, from: *const u8, to: *mut u8, length: usize) -> u64 {
        let take = |at: usize| {
            let taken: __m256i;
            let (from, to) = (from.wrapping_add(at), to.wrapping_add(at));
            // SAFETY: the caller vouches for the bytes on both sides.
            unsafe {
                asm!("vmovdqu {}, [{}]", out(ymm_reg) taken, in(reg) from, options(nostack, preserves_flags, readonly));
                match MODE {
                    COPY => asm!("vmovdqu [{}], {}", in(reg) to, in(ymm_reg) taken, options(nostack, preserves_flags)),
                    STREAM => {
                        asm!("vmovntdq [{}], {}", in(reg) to, in(ymm_reg) taken, options(nostack, preserves_flags))
                    }
                    _ => {}
                }
            }
            taken
        };
        let moved_wide = |sum: __m256i, (first, second): (i64, i64), next: __m256i| {
            let factors = _mm256_broadcastsi128_si256(_mm_set_epi64x(second, first));
            let (first, second) =
                (_mm256_clmulepi64_epi128(sum, factors, 0x00), _mm256_clmulepi64_epi128(sum, factors, 0x11));
            _mm256_xor_si256(_mm256_xor_si256(first, second), next)
        };
        let mut sums: [__m256i; SIDE_BY_SIDE] = std::array::from_fn(|number| take(number * WIDE));
        sums[0] = _mm256_xor_si256(sums[0], _mm256_zextsi128_si256(_mm_cvtsi32_si128(sum as i32)));
        let factors = const { over(SIDE_BY_SIDE * WIDE) };
        for at in (SIDE_BY_SIDE * WIDE..length).step_by(SIDE_BY_SIDE * WIDE) {
            for (number, sum) in sums.iter_mut().enumerate() {
                *sum = moved_wide(*sum, factors, take(at + number * WIDE));
            }
        }
        let factors = const { over(WIDE) };
        let [first, rest @ ..] = sums;
        let sum = rest.into_iter().fold(first, |sum, next| moved_wide(sum, factors, next));
        let (first, second) = (_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
        reduced(moved(first, const { over(NARROW) }, second))
    }

    /// Moves 16 bytes by these factors, and adds the bytes in place.
    #[inline]
    #[target_feature(enable = "pclmulqdq")]
    fn moved(sum: __m128i, (first, second): (i64, i64), next: __m128i) -> __m128i {
        let factors = _mm_set_epi64x(second, first);
        let (first, second) = (_mm_clmulepi64_si128(sum, factors, 0x00), _mm_clmulepi64_si128(sum, factors, 0x11));
        _mm_xor_si128(_mm_xor_si128(first, second), next)
    }

    /// Returns the checksum of 16 bytes, continued from that of nothing.
    #[inline]
    #[target_feature(enable = "sse4.2")]
    fn reduced(bytes: __m128i) -> u64 {
        let first = _mm_crc32_u64(0, _mm_extract_epi64(bytes, 0) as u64);
        _mm_crc32_u64(first, _mm_extract_epi64(bytes, 1) as u64)
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
    use std::sync::atomic::Ordering;

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
    fn checksum_equals_the_standard_crc32c() {
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

    /// Runs a test with narrow registers, and with wide ones if the processor has them.
    fn with_each_width(test: impl Fn()) {
        #[cfg(target_arch = "x86_64")]
        if x86_64::is_there() {
            // Tests that run at the same time change it, too.
            static TURN: std::sync::Mutex<()> = std::sync::Mutex::new(());
            let _turn = TURN.lock();
            x86_64::KNOWN.store(x86_64::HAS_NARROW, Ordering::Relaxed);
            test();
            if x86_64::has_wide() {
                x86_64::KNOWN.store(x86_64::HAS_WIDE, Ordering::Relaxed);
            }
        }
        test();
    }

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn registers_of_either_width_have_the_same_sum() {
        if !x86_64::is_there() {
            return;
        }
        let text = text(20_000);
        for (from, length) in (0..1200).map(|length| (length % 7, length)).chain([(1, 4032), (0, 4096), (3, 19_997)]) {
            let bytes = &text[from..from + length];
            let expected = crc_fast::crc32_iscsi(bytes);
            with_each_width(|| assert_eq!(Crc32c::of(bytes), expected, "{length} bytes"));
        }
    }

    #[test]
    fn checksum_is_independent_of_the_pieces() {
        let text = text(10_000);
        let whole = Crc32c::of(&text);
        for piece in [1, 7, 64, 777, 4033] {
            let mut sum = Crc32c::default();
            text.chunks(piece).for_each(|piece| sum.update(piece));
            assert_eq!(sum.finish(), whole, "in pieces of {piece}");
        }
    }

    #[test]
    fn copied_bytes_match_their_checksum_at_any_target() {
        with_each_width(copies);
    }

    fn copies() {
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
                let is_done =
                    unsafe { sum.copy(bytes.as_ptr(), target.as_mut_ptr().add(start + to), bytes.len(), past_cache) };
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

    /// Another thread may change the source meanwhile: the checksum is that of the copy.
    #[test]
    fn changing_source_is_read_once() {
        use std::sync::atomic::{AtomicBool, AtomicU64};
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
                if unsafe { sum.copy(bytes.as_ptr(), target.as_mut_ptr(), bytes.len(), false) } {
                    assert_eq!(sum.finish(), Crc32c::of(&target));
                }
            }
            is_over.store(true, Ordering::Relaxed);
        });
    }
}
