//! Files of certificates and private keys.

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use super::error::CredentialsError;

/// Bytes of a file, at most: the longest certificate here has less than 2 KiB.
const FILE_BYTES_MAX: u64 = 64 << 10;
const PRIVATE: u32 = 0o600;
const PUBLIC: u32 = 0o644;

/// Makes a key's file, which only its user may read.
pub(super) fn write_key(path: &Path, text: &str) -> Result<(), CredentialsError> {
    write(path, text, PRIVATE)
}

/// Makes a certificate's file.
pub(super) fn write_certificate(path: &Path, text: &str) -> Result<(), CredentialsError> {
    write(path, text, PUBLIC)
}

fn write(path: &Path, text: &str, mode: u32) -> Result<(), CredentialsError> {
    let file = OpenOptions::new().write(true).create_new(true).mode(mode).open(path);
    let written = file.and_then(|mut file| {
        file.write_all(text.as_bytes())?;
        file.sync_all()
    });
    written.map_err(|error| CredentialsError::Write { path: path.to_owned(), error })
}

/// Reads a key's file, unless other users may read it too.
pub(super) fn read_key(path: &Path) -> Result<String, CredentialsError> {
    read(path, true)
}

/// Reads a certificate's file.
pub(super) fn read_certificate(path: &Path) -> Result<String, CredentialsError> {
    read(path, false)
}

fn read(path: &Path, is_private: bool) -> Result<String, CredentialsError> {
    let failed = |error| CredentialsError::Read { path: path.to_owned(), error };
    let file = File::open(path).map_err(failed)?;
    let mode = file.metadata().map_err(failed)?.mode() & 0o7777;
    if is_private && mode & 0o077 != 0 {
        return Err(CredentialsError::Exposed { path: path.to_owned(), mode });
    }
    let mut text = String::new();
    file.take(FILE_BYTES_MAX).read_to_string(&mut text).map_err(failed)?;
    Ok(text)
}
