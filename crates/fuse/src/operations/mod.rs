//! The operations that requests ask for.
pub(crate) mod attributes;
pub(crate) mod directory_entries;
pub(crate) mod dispatch;
pub(crate) mod listing;
pub(crate) mod locks;
pub(crate) mod open_files;
pub(crate) mod request;
pub(crate) mod xattr;
