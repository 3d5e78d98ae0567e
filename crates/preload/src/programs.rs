//! The start of programs: environment, profile, and runs without the library.

pub(crate) mod environment;
pub(crate) mod exec_files;
pub(crate) mod imports;
pub(crate) mod program_profile;
pub(crate) mod without_library;
