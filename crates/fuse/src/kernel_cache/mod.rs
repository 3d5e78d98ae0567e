//! The items that the kernel caches, and how they stay coherent.
pub(crate) mod coherence;
pub(crate) mod dentry_ttl;
pub(crate) mod dirty_pages;
pub(crate) mod estale_retry;
pub(crate) mod invalidation;
pub(crate) mod mappable;
pub(crate) mod page_fills;
pub(crate) mod shown_directories;
