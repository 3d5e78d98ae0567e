//! Files that are kept for all programs with a library of one build.
//!
//! A user that can write them decides what programs do. So a program trusts a file only if it belongs to the super-user
//! or to the program's user, and no other user may write it.

use std::ffi::{CStr, OsString};
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::PathBuf;

/// A longer id is not a build id.
pub(super) const BUILD_ID_MAX: usize = 32;

const PAGE: usize = 4096;
const PERMISSIONS: u32 = 0o644;
const OTHERS_MAY_WRITE: u32 = 0o022;

/// Returns the hexadecimal digits of some bytes.
///
/// Each program names two files, and formatting each byte would take longer than opening them.
fn hex(bytes: &[u8]) -> impl Iterator<Item = u8> {
    let digits = bytes.iter().flat_map(|byte| [byte >> 4, byte & 15]);
    digits.map(|digit| b"0123456789abcdef"[usize::from(digit)])
}

/// One such file, which may not exist yet.
#[derive(Debug)]
pub(crate) struct KeptFile {
    path: PathBuf,
}

impl KeptFile {
    /// Returns the file for a build, in a directory; the content also depends on the build `also`.
    pub(super) fn for_build(directory: &CStr, build_id: &[u8], also: Option<&[u8]>) -> Option<Self> {
        let is_one = |id: &[u8]| !id.is_empty() && id.len() <= BUILD_ID_MAX;
        if !is_one(build_id) || !also.is_none_or(is_one) {
            return None;
        }
        let mut path = Vec::with_capacity(directory.count_bytes() + 2 + 4 * BUILD_ID_MAX);
        path.extend(directory.to_bytes());
        path.push(b'/');
        path.extend(hex(build_id));
        if let Some(also) = also {
            path.push(b'-');
            path.extend(hex(also));
        }
        Some(Self { path: OsString::from_vec(path).into() })
    }

    /// Returns a file with another name.
    pub(crate) fn named(directory: &CStr, name: &str) -> Self {
        Self { path: PathBuf::from(OsString::from_vec(directory.to_bytes().to_vec())).join(name) }
    }

    /// Opens the file, if it exists and is trusted; returns it with its length.
    pub(crate) fn open(&self) -> Option<(File, u64)> {
        let file = OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW).open(&self.path).ok()?;
        trust_file(file)
    }

    /// Opens the file to change it in place, and creates it if need be; if that fails, opens it to read.
    pub(crate) fn open_to_change(&self) -> Option<File> {
        let mut how = OpenOptions::new();
        how.read(true).write(true).create(true).mode(PERMISSIONS).custom_flags(libc::O_NOFOLLOW);
        let file = how.open(&self.path).ok().and_then(trust_file).or_else(|| self.open());
        file.map(|(file, _)| file)
    }

    /// Writes the file, under another name first: others may read it, or the machine may stop, at any moment.
    ///
    /// A file that fits a page is then there as a whole, or recognised as empty: it need not wait for the disk.
    pub(super) fn store(&self, bytes: &[u8]) {
        let sync = |file: &File| if bytes.len() > PAGE { file.sync_data() } else { Ok(()) };
        let mut draft = self.path.clone().into_os_string();
        draft.push(format!(".{}", std::process::id()));
        let written = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(PERMISSIONS)
            .open(&draft)
            .and_then(|mut file| file.write_all(bytes).and_then(|()| sync(&file)))
            .and_then(|()| std::fs::rename(&draft, &self.path));
        if written.is_err() {
            // A later process makes the file again.
            let _ = std::fs::remove_file(&draft);
        }
    }

    /// Removes the files for the same build and another second one.
    pub(super) fn remove_others(&self) {
        let (Some(directory), Some(name)) = (self.path.parent(), self.path.file_name()) else { return };
        let Some(same) = name.as_bytes().split_inclusive(|&byte| byte == b'-').next() else { return };
        for other in std::fs::read_dir(directory).into_iter().flatten().flatten().map(|other| other.file_name()) {
            if other.as_bytes().starts_with(same) && other != name {
                // A program that still needs it makes it again.
                let _ = std::fs::remove_file(directory.join(other));
            }
        }
    }
}

/// Returns a file with its length, if the program may trust its owner and permissions.
fn trust_file(file: File) -> Option<(File, u64)> {
    let metadata = file.metadata().ok()?;
    // SAFETY: the call takes no arguments, and can't fail.
    let user = unsafe { libc::geteuid() };
    let is_owned = metadata.uid() == 0 || metadata.uid() == user;
    (is_owned && metadata.mode() & OTHERS_MAY_WRITE == 0).then_some((file, metadata.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kept_file_is_named_by_build_ids() {
        let name = |also: Option<&[u8]>| KeptFile::for_build(c"/plans", &[0x0a, 0xff], also).map(|kept| kept.path);
        assert_eq!(name(None), Some("/plans/0aff".into()));
        assert_eq!(name(Some(&[0x10])), Some("/plans/0aff-10".into()));
        assert_eq!(name(Some(&[])), None);
        assert!(KeptFile::for_build(c"/plans", &[0; BUILD_ID_MAX + 1], None).is_none());
    }
}
