//! Calls on files that several cases make.

use std::fs::{self, File};
use std::hint::black_box;
use std::io;
use std::path::Path;

use crate::error::CliError;

/// Bytes of a write that warms up the log.
pub const LARGE: usize = 1 << 20;

/// Makes a new file.
pub fn create(path: &Path) -> Result<File, CliError> {
    File::options().read(true).write(true).create_new(true).open(path).map_err(system("making", path))
}

/// Uses the attributes, so that the compiler keeps the call.
pub fn look(found: io::Result<fs::Metadata>) -> io::Result<()> {
    black_box(found?);
    Ok(())
}

/// Names the action that failed and its path.
pub fn system(what: &str, path: &Path) -> impl FnOnce(io::Error) -> CliError + use<> {
    CliError::system(format!("{what} {}", path.display()))
}
