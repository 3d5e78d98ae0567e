//! Names of directory entries.

use std::fmt;
use std::sync::Arc;

use thiserror::Error;

use crate::NameHashKey;

/// The longest name of a directory entry, in bytes.
pub const NAME_MAX: usize = 255;
/// The longest path that one call may name, in bytes, its final NUL included.
pub const PATH_MAX: usize = 4096;
/// The longest target of a symbolic link, in bytes.
pub const SYMLINK_MAX: usize = 4095;
/// The most directories on the way from the root to a directory, itself included.
///
/// Directories that lie deeper, since one above was moved, can be moved up and removed, and get no further ones.
pub const DEPTH_MAX: u32 = 1024;
/// The longest name of an extended attribute, in bytes.
pub const XATTR_NAME_MAX: usize = 255;
/// The longest value of an extended attribute, in bytes.
pub const XATTR_VALUE_MAX: usize = 65536;
/// The most that all extended attributes of an inode may count, in bytes: one of the longest value, and a page.
pub const XATTRS_BYTES_MAX: usize = XATTR_VALUE_MAX + 4096;

/// The place of `.` in a directory's order. All front ends have the same: a listing may begin through one and continue
/// through another.
pub const COOKIE_SELF: u64 = 1;
/// The place of `..`.
pub const COOKIE_PARENT: u64 = 2;

/// Returns the place of a name in its directory's order: from 3 to 2^63 − 1, so that it fits `d_off` beside `.` and
/// `..`.
///
/// Two names may share one, which is why the order is by cookie and then by name. The hash has a key, so that no user
/// can make names that collide. Media depend on the key and the function for ever.
#[must_use]
pub fn name_cookie(key: &NameHashKey, name: &[u8]) -> u64 {
    (siphasher::sip::SipHasher13::new_with_key(&key.0).hash(name) >> 1).max(3)
}

/// Why bytes are no name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum NameError {
    /// The name is empty, `.` or `..`, or it holds `/` or NUL.
    #[error("a name must not be empty, '.' or '..', or hold '/' or NUL")]
    Invalid,
    /// The name is longer than [`NAME_MAX`].
    #[error("a name has at most 255 bytes")]
    TooLong,
}

/// A name of a directory entry: 1 to 255 bytes of anything but `/` and NUL, and neither `.` nor `..`.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Name(Arc<[u8]>);

impl Name {
    /// Takes `bytes` as a name.
    ///
    /// # Errors
    /// [`NameError`] if they are none.
    pub fn new(bytes: &[u8]) -> Result<Self, NameError> {
        Self::check(bytes)?;
        Ok(Self(bytes.into()))
    }

    /// Checks that `bytes` are a name, without keeping them.
    ///
    /// # Errors
    /// [`NameError`] if they are none.
    pub fn check(bytes: &[u8]) -> Result<(), NameError> {
        if bytes.len() > NAME_MAX {
            return Err(NameError::TooLong);
        }
        if bytes.is_empty() || bytes == b"." || bytes == b".." || bytes.iter().any(|&b| b == b'/' || b == 0) {
            return Err(NameError::Invalid);
        }
        Ok(())
    }

    /// Returns the name's bytes.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

impl std::borrow::Borrow<[u8]> for Name {
    fn borrow(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", String::from_utf8_lossy(&self.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_any_bytes_but_slash_and_nul() {
        assert!(Name::new(b"\xff\n ").is_ok());
        assert!(Name::new(&[b'x'; 255]).is_ok());
        assert_eq!(Name::new(&[b'x'; 256]), Err(NameError::TooLong));
        for bad in [&b""[..], b".", b"..", b"a/b", b"a\0b"] {
            assert_eq!(Name::new(bad), Err(NameError::Invalid));
        }
    }
}
