//! Open files and names: descriptors, shared and unnamed files, locks, paths.

pub(crate) mod descriptors;
pub(crate) mod materialise;
pub(crate) mod path;
pub(crate) mod record_locks;
pub(crate) mod recycled_descriptor;
pub(crate) mod shared_file;
pub(crate) mod unnamed_files;
