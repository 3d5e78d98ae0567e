//! Operations on names, paths and attributes.

pub(crate) mod attributes;
pub(crate) mod cached_path;
pub(crate) mod directory_versions;
pub(crate) mod entries;
pub(crate) mod path_cache;
pub(crate) mod path_walk;
pub(crate) mod rename;
pub(crate) mod stat;
