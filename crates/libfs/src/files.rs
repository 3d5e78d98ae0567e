//! Operations on a file's content, its handles, its locks and its mappings.

pub(crate) mod dax;
pub(crate) mod file_io;
pub(crate) mod file_locks;
pub(crate) mod handles;
pub(crate) mod held_locks;
pub(crate) mod mapping_numbers;
pub(crate) mod materialise;
pub(crate) mod open_file;
pub(crate) mod record_lock_state;
pub(crate) mod record_locks;
pub(crate) mod segments;
