//! The hasher of maps by inode number.

use std::hash::Hasher;

/// A hasher for inode numbers and for numbers that are spread already.
///
/// Inode numbers are given out in order, so one multiplication spreads them well. No program can choose them: they come
/// from ranges that SharedFS grants.
#[derive(Clone, Copy, Debug, Default)]
pub struct InodeHasher(u64);

impl Hasher for InodeHasher {
    #[inline]
    fn finish(&self) -> u64 {
        self.0
    }
    #[inline]
    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(byte.into());
        }
    }
    #[inline]
    fn write_u32(&mut self, value: u32) {
        self.write_u64(value.into());
    }
    #[inline]
    fn write_u64(&mut self, value: u64) {
        self.0 = (self.0 ^ value).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
    }
}
