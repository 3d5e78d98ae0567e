//! The bodies of update records, and the transition function over them.
//!
//! Purpose: LibFS and SharedFS must agree to the bit on the meaning of an update: link counts, sizes, times, orphans.
//! So the meaning is written once, as [`apply()`] over the [`Tree`] trait. LibFS runs it on its cached objects when it
//! appends a record. SharedFS runs it on the shared area when it digests the same record. Tests run it on
//! `model::ModelTree`, which the feature `model` compiles.
//!
//! Invariants:
//! - `apply` is deterministic: no clock, no randomness; times stand in the record.
//! - `apply` changes nothing if it returns [`Invalid`]; every check comes before the first change.
//! - [`coalesce`] leaves out of a batch only records without effect on the state at the batch's end, and [`join`] none
//!   of it.
//! - The decoder accepts only the encoder's output, so a forged body is refused before it means anything.
//!
//! Non-goals: permissions of the caller and leases (`libfs` asks before it appends, `daemon` validates before it
//! applies; both use [`permission`]), and data blocks, which the tree keeps as it likes.
//!
//! Source: `docs/format-update-log.md`; Assise §3.3 (operation logging).
#![forbid(unsafe_code)]

pub mod acl;
mod apply;
mod body;
pub mod coalesce;
mod codec;
pub mod join;
#[cfg(any(test, feature = "model"))]
pub mod model;
pub mod permission;
#[cfg(test)]
mod test_updates;
mod tree;
pub mod xattr_size;

pub use apply::{Applied, apply, quota_allows, record_written, would_make_cycle, written_size};
pub use body::{Allocation, Cost, Create, Rename, SetAttributes, Update, UpdateKind, Whiteout};
pub use codec::{DecodeError, Encoded, write_fields};
pub use tree::{Entry, Invalid, Tree};

/// The extended attribute that holds an access ACL.
pub const XATTR_ACL_ACCESS: &[u8] = b"system.posix_acl_access";
/// The extended attribute that holds a directory's default ACL.
pub const XATTR_ACL_DEFAULT: &[u8] = b"system.posix_acl_default";
/// The extended attribute under which the super-user sees and sets against which subtree's quota an inode counts: the
/// number of the directory at the top, in decimal; 0 for none. It stands in the inode, and is listed nowhere.
pub const XATTR_QUOTA: &[u8] = b"trusted.ashlar.quota";
/// The name that stands, with a value of their size, for extended attributes of which a user may know nothing else.
///
/// A session that adds attributes must know how much room there is. No attribute can have this name.
pub const XATTR_HIDDEN: &[u8] = b"trusted.";
/// The extended attribute that holds a program's capabilities. A change of content or owner takes it away.
pub const XATTR_CAPABILITY: &[u8] = b"security.capability";
