//! The hash that orders the entries of a directory.
//!
//! SipHash-1-3 (Aumasson and Bernstein, 2012) under a key of 128 random bits that the superblock row keeps: nobody
//! outside can choose names that collide, and an entry's place is the same as long as the file system lives. It is written
//! out here since the standard library's hasher may change with any release, and these values stand on media.

/// The smallest cookie: 0 to 2 stand for the start of a directory, `.` and `..`.
pub const COOKIE_FIRST: u64 = 3;

/// The cookie of `name` under `key`: from [`COOKIE_FIRST`] to 2^63 − 1, the same in all directories and for ever.
#[must_use]
pub fn name_cookie(key: &[u8; 16], name: &[u8]) -> u64 {
    (sip_hash_1_3(key, name) >> 1).max(COOKIE_FIRST)
}

struct State([u64; 4]);

impl State {
    #[inline]
    fn round(&mut self) {
        let [a, b, c, d] = &mut self.0;
        *a = a.wrapping_add(*b);
        *b = b.rotate_left(13) ^ *a;
        *a = a.rotate_left(32);
        *c = c.wrapping_add(*d);
        *d = d.rotate_left(16) ^ *c;
        *a = a.wrapping_add(*d);
        *d = d.rotate_left(21) ^ *a;
        *c = c.wrapping_add(*b);
        *b = b.rotate_left(17) ^ *c;
        *c = c.rotate_left(32);
    }

    #[inline]
    fn absorb(&mut self, word: u64) {
        self.0[3] ^= word;
        self.round();
        self.0[0] ^= word;
    }
}

fn sip_hash_1_3(key: &[u8; 16], bytes: &[u8]) -> u64 {
    let (first, second) = key.split_at(8);
    let word = |bytes: &[u8]| bytes.iter().rev().fold(0u64, |word, &byte| word << 8 | u64::from(byte));
    let (k0, k1) = (word(first), word(second));
    let mut state = State([
        k0 ^ 0x736f_6d65_7073_6575,
        k1 ^ 0x646f_7261_6e64_6f6d,
        k0 ^ 0x6c79_6765_6e65_7261,
        k1 ^ 0x7465_6462_7974_6573,
    ]);
    let mut chunks = bytes.chunks_exact(8);
    for chunk in &mut chunks {
        state.absorb(word(chunk));
    }
    state.absorb((bytes.len() as u64) << 56 | word(chunks.remainder()));
    state.0[2] ^= 0xff;
    for _ in 0..3 {
        state.round();
    }
    state.0.iter().fold(0, |hash, word| hash ^ word)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first values of the reference implementation's SipHash-1-3 for key 00 01 … 0f and message 00 01 … (n − 1).
    #[test]
    fn values_never_change() {
        let key: [u8; 16] = std::array::from_fn(|i| i as u8);
        let message: Vec<u8> = (0..16).collect();
        #[allow(deprecated)]
        for length in 0..16 {
            // The standard library's SipHash is 1-3 today, which checks all lengths; the constants below pin two for ever.
            use std::hash::Hasher;
            let mut hasher = std::hash::DefaultHasher::new();
            hasher.write(&message[..length]);
            assert_eq!(sip_hash_1_3(&[0; 16], &message[..length]), hasher.finish());
        }
        assert_eq!(sip_hash_1_3(&key, b""), 0xabac_0158_050f_c4dc);
        assert_eq!(sip_hash_1_3(&key, &[0]), 0xc9f4_9bf3_7d57_ca93);
    }

    #[test]
    fn cookies_leave_room_for_the_dots_and_the_sign() {
        for name in 0..1000u32 {
            let cookie = name_cookie(&[7; 16], &name.to_le_bytes());
            assert!((COOKIE_FIRST..1 << 63).contains(&cookie));
        }
    }
}
