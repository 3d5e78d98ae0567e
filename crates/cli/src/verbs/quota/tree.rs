//! A tree of files with a quota of its own: finds it in a mount, and walks it.
//!
//! The walk goes from the top down. A new file counts as its directory does, so no file is left out behind the walk. A
//! name that moves within its directory meanwhile may be skipped. So the walk is repeated until it changes nothing.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use ashlar_libfs::XATTR_QUOTA;
use indicatif::ProgressBar;
use rustix::fs::{XattrFlags, lgetxattr, lsetxattr};
use rustix::io::Errno;

use crate::error::CliError;
use crate::output::progress;
use crate::system::mounts;

/// The most walks. A walk that changes something each time races with another process, and must end.
const WALKS_MAX: usize = 10;
/// After so many files the number on the terminal is updated.
const SHOWN_EVERY: u64 = 100;

/// The tree below a directory.
#[derive(Debug)]
pub struct Subtree {
    /// Its top, by its real path.
    pub directory: PathBuf,
    /// The top's inode number, which is the quota's.
    pub number: u64,
    /// The arena that it is in.
    pub arena: PathBuf,
    device: u64,
    is_root: bool,
}

fn system(what: &str, path: &Path) -> impl FnOnce(io::Error) -> CliError + use<> {
    CliError::system(format!("{what} {}", path.display()))
}

impl Subtree {
    /// Opens the tree below a directory, which must be in a mounted Ashlar.
    pub fn open(directory: &Path) -> Result<Self, CliError> {
        let path = fs::canonicalize(directory).map_err(system("looking at", directory))?;
        let metadata = fs::metadata(&path).map_err(system("looking at", &path))?;
        if !metadata.is_dir() {
            return Err(CliError::NoTree(path));
        }
        let record = mounts::mount_of(&path)?;
        let is_root = record.directory == path;
        Ok(Self { directory: path, number: metadata.ino(), arena: record.arena, device: metadata.dev(), is_root })
    }

    /// Returns the quota that the tree counts against without one of its own: its parent directory's.
    fn inherited(&self) -> Result<u64, CliError> {
        match self.directory.parent().filter(|_| !self.is_root) {
            None => Ok(0),
            Some(parent) => quota_of(parent).map_err(system("reading the quota of", parent)),
        }
    }

    /// Whether its top counts against its own quota.
    pub fn is_in_quota(&self) -> Result<bool, CliError> {
        let found = quota_of(&self.directory).map_err(system("reading the quota of", &self.directory))?;
        Ok(found == self.number)
    }

    /// Makes all of it count against its own quota, except trees in it that have quotas of their own.
    pub fn join_quota(&self) -> Result<(), CliError> {
        self.convert(self.inherited()?, self.number)
    }

    /// Makes all of it count as the directory above it does.
    pub fn leave_quota(&self) -> Result<(), CliError> {
        self.convert(self.number, self.inherited()?)
    }

    fn convert(&self, from: u64, to: u64) -> Result<(), CliError> {
        let bar = progress::spinner(&format!("counting the files in {}", self.directory.display()));
        let mut result = Ok(());
        for _ in 0..WALKS_MAX {
            match self.walk_once(from, to, &bar) {
                Ok(0) => break,
                Ok(_) => {}
                Err(error) => {
                    result = Err(error);
                    break;
                }
            }
        }
        bar.finish_and_clear();
        result
    }

    /// Walks the tree once; returns how many inodes changed.
    fn walk_once(&self, from: u64, to: u64, bar: &ProgressBar) -> Result<u64, CliError> {
        let (mut changed, mut seen) = (0, 0);
        let mut waiting = vec![self.directory.clone()];
        changed += u64::from(self.convert_inode(&self.directory, from, to)? == Conversion::Changed);
        while let Some(directory) = waiting.pop() {
            let entries = match fs::read_dir(&directory) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                entries => entries.map_err(system("reading", &directory))?,
            };
            for entry in entries {
                let path = entry.map_err(system("reading", &directory))?.path();
                let visit = self.convert_inode(&path, from, to)?;
                changed += u64::from(visit == Conversion::Changed);
                seen += 1;
                if seen % SHOWN_EVERY == 0 {
                    bar.set_message(format!("counting the files in {}: {seen} files", self.directory.display()));
                }
                if visit != Conversion::Foreign && self.is_directory_here(&path) {
                    waiting.push(path);
                }
            }
        }
        Ok(changed)
    }

    /// Changes the quota of one inode from `from` to `to`, if it counts against `from`.
    fn convert_inode(&self, path: &Path, from: u64, to: u64) -> Result<Conversion, CliError> {
        let found = match quota_of(path) {
            // The file is gone, or a file system of another kind is mounted there.
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::Unsupported) => {
                return Ok(Conversion::Foreign);
            }
            found => found.map_err(system("reading the quota of", path))?,
        };
        if found == to {
            return Ok(Conversion::Unchanged);
        }
        if found != from || self.is_elsewhere(path) {
            return Ok(Conversion::Foreign);
        }
        match lsetxattr(path, XATTR_QUOTA, to.to_string().as_bytes(), XattrFlags::empty()) {
            Ok(()) => Ok(Conversion::Changed),
            Err(Errno::NOENT) => Ok(Conversion::Foreign),
            Err(error) => Err(system("setting the quota of", path)(error.into())),
        }
    }

    fn is_elsewhere(&self, path: &Path) -> bool {
        fs::symlink_metadata(path).is_ok_and(|found| found.dev() != self.device)
    }

    fn is_directory_here(&self, path: &Path) -> bool {
        fs::symlink_metadata(path).is_ok_and(|found| found.is_dir() && found.dev() == self.device)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Conversion {
    Changed,
    Unchanged,
    /// It counts against another quota, and so does all in it.
    Foreign,
}

/// Returns the quota that an inode counts against; 0 for none.
fn quota_of(path: &Path) -> Result<u64, io::Error> {
    let mut value = [0; 32];
    match lgetxattr(path, XATTR_QUOTA, &mut value[..]) {
        Ok(length) => {
            let number = std::str::from_utf8(&value[..length]).ok().and_then(|text| text.parse().ok());
            number.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))
        }
        Err(Errno::NODATA) => Ok(0),
        Err(error) => Err(error.into()),
    }
}
