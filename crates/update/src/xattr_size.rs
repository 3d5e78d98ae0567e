//! The limit to the extended attributes of one inode.
//!
//! SharedFS sends them all with each grant of the inode, and a user could otherwise fill the metadata with them, beside
//! all quotas. LibFS asks before it logs an attribute, and SharedFS validates the record by the same functions.

use ashlar_types::XATTRS_BYTES_MAX;

use crate::{XATTR_ACL_ACCESS, XATTR_ACL_DEFAULT};

/// The bytes that an attribute counts beside its name and value.
///
/// It bounds the number of attributes, and keeps their names shorter than the 64 KiB that `listxattr(2)` can return.
const ATTRIBUTE_BYTES: usize = 64;

/// Returns how much an attribute counts, in bytes.
#[must_use]
pub const fn attribute_bytes(name: &[u8], value: &[u8]) -> usize {
    ATTRIBUTE_BYTES + name.len() + value.len()
}

/// Whether an inode with attributes of `present` bytes may have one more, which replaces one of `replaced` bytes.
///
/// An attribute that becomes no larger always fits: an inode may have too many from an earlier version.
#[must_use]
pub const fn attribute_fits(present: usize, replaced: usize, new: usize) -> bool {
    new <= replaced || present - replaced + new <= XATTRS_BYTES_MAX
}

/// Whether a new inode may have these access lists; empty ones are none.
#[must_use]
pub fn lists_fit(access: &[u8], default: &[u8]) -> bool {
    let lists = [(XATTR_ACL_ACCESS, access), (XATTR_ACL_DEFAULT, default)];
    let bytes = lists.iter().filter(|(_, list)| !list.is_empty()).map(|(name, list)| attribute_bytes(name, list));
    bytes.sum::<usize>() <= XATTRS_BYTES_MAX
}

#[cfg(test)]
mod tests {
    use ashlar_types::{XATTR_NAME_MAX, XATTR_VALUE_MAX};

    use super::*;

    #[test]
    fn largest_attribute_fits_alone() {
        let largest = attribute_bytes(&[b'n'; XATTR_NAME_MAX], &vec![0; XATTR_VALUE_MAX]);
        assert!(attribute_fits(0, 0, largest));
        assert!(!attribute_fits(largest, 0, largest));
        assert!(attribute_fits(largest, largest, largest));
    }

    #[test]
    fn excess_of_an_earlier_version_may_shrink_only() {
        assert!(attribute_fits(XATTRS_BYTES_MAX * 9, 100, 100));
        assert!(!attribute_fits(XATTRS_BYTES_MAX * 9, 100, 101));
    }

    #[test]
    fn names_of_all_attributes_can_be_listed() {
        let each = attribute_bytes(&[b'n'; XATTR_NAME_MAX], &[]);
        assert!(XATTRS_BYTES_MAX / each * (XATTR_NAME_MAX + 1) < 64 << 10);
    }

    #[test]
    fn two_large_lists_do_not_fit_a_new_directory() {
        let large = vec![0; XATTR_VALUE_MAX / 8 * 5];
        assert!(lists_fit(&large, &[]) && lists_fit(&[], &large) && lists_fit(&[], &[]));
        assert!(!lists_fit(&large, &large));
    }
}
