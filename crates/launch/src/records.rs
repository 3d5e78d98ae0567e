//! Records of mounts: the arena and the process behind each.
//!
//! The kernel's table (`/proc/self/mountinfo`) shows the mounts. The process that serves a mount writes its arena and
//! itself into `/run/ashlar/PROCESS.json`. If its process is gone, any process that finds the record removes it.

use std::fs::{self, DirBuilder, DirEntry, File};
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use ashlar_types::topmost_mount;
use rustix::fs::{AtFlags, CWD, Mode, OFlags, ResolveFlags, StatxAttributes, StatxFlags};
use serde::{Deserialize, Serialize};

/// The directory of records.
pub const RECORDS_DIRECTORY: &str = "/run/ashlar";

/// A mount, its arena and its process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MountRecord {
    /// The directory where it is mounted.
    pub directory: PathBuf,
    /// Its arena.
    pub arena: PathBuf,
    /// The process that serves it.
    pub pid: u32,
    /// The device number that its files show; 0 if an older release wrote the record.
    #[serde(default)]
    pub device: u64,
}

impl MountRecord {
    /// Writes the record, for `status` and `umount`.
    ///
    /// # Errors
    /// The system's.
    pub fn write(&self) -> io::Result<()> {
        DirBuilder::new().recursive(true).mode(0o755).create(RECORDS_DIRECTORY)?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let directory = rustix::fs::openat(CWD, RECORDS_DIRECTORY, flags, Mode::empty())?;
        if !is_of_root(directory.as_fd()) {
            return Err(io::Error::other(
                "other users can change the directory; make it root's alone: chown root, chmod 755",
            ));
        }
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mode = Mode::RUSR | Mode::WUSR | Mode::RGRP | Mode::ROTH;
        let file = rustix::fs::openat(&directory, format!("{}.json", self.pid), flags, mode)?;
        File::from(file).write_all(&serde_json::to_vec(self)?)
    }

    /// Removes the record.
    pub fn remove(&self) {
        // If this fails, the next process that finds this record without its process removes it.
        let _ = fs::remove_file(self.path());
    }

    /// Returns the path of the record's file.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        Path::new(RECORDS_DIRECTORY).join(format!("{}.json", self.pid))
    }

    /// Parses the content of a record's file; `None` if it is no record, or is being written.
    #[must_use]
    pub fn read(text: &[u8]) -> Option<Self> {
        serde_json::from_slice(text).ok()
    }

    fn is_alive(&self) -> bool {
        // The process may be gone and its number taken by another program.
        fs::read(format!("/proc/{}/cmdline", self.pid)).is_ok_and(|line| is_mount_process(&line))
    }

    /// Opens its directory, if the kernel has the whole path cached. A path within another file system may lead to one
    /// that is dead too.
    #[must_use]
    pub fn root(&self) -> Option<OwnedFd> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        rustix::fs::openat2(CWD, &self.directory, flags, Mode::empty(), ResolveFlags::CACHED).ok()
    }

    /// Whether its directory, of which `root` is a descriptor, is the root of a mount of its device; `None` if that is
    /// unknown.
    #[must_use]
    pub fn is_shown_by(&self, root: BorrowedFd) -> Option<bool> {
        let flags = AtFlags::EMPTY_PATH | AtFlags::NO_AUTOMOUNT | AtFlags::STATX_DONT_SYNC;
        let found = rustix::fs::statx(root, c"", flags, StatxFlags::empty()).ok()?;
        let is_known = self.device != 0 && found.stx_attributes_mask.contains(StatxAttributes::MOUNT_ROOT);
        let device = rustix::fs::makedev(found.stx_dev_major, found.stx_dev_minor);
        is_known.then(|| found.stx_attributes.contains(StatxAttributes::MOUNT_ROOT) && device == self.device)
    }
}

/// Whether only root can change a directory. Programs trust the servers that records name.
#[must_use]
pub fn is_of_root(directory: BorrowedFd) -> bool {
    rustix::fs::fstat(directory).is_ok_and(|found| found.st_uid == 0 && found.st_mode & 0o022 == 0)
}

/// Whether a file among the records is one, by its name.
#[must_use]
pub fn is_record_name(name: &[u8]) -> bool {
    name.ends_with(b".json")
}

/// Whether a process serves a mount, by its command line as the kernel shows it.
#[must_use]
pub fn is_mount_process(line: &[u8]) -> bool {
    line.split(|&byte| byte == 0).any(|word| word == b"mount-process" || word == b"mount")
}

/// Sorts records in the order that all their users expect.
pub fn sort_records(records: &mut [MountRecord]) {
    records.sort_by(|a, b| a.directory.cmp(&b.directory));
}

/// Returns all records of mounts whose processes live.
#[must_use]
pub fn live_records() -> Vec<MountRecord> {
    let (mut living, _) = living_and_dead();
    sort_records(&mut living);
    living
}

/// Returns the record of a mount on `directory` that still exists and whose process is dead: a process that uses it may
/// wait for an answer in vain.
#[must_use]
pub fn dead_record_of(directory: &Path) -> Option<MountRecord> {
    living_and_dead().1.into_iter().find(|record| record.directory == directory)
}

/// Returns all records, and removes those of mounts that no longer exist.
fn living_and_dead() -> (Vec<MountRecord>, Vec<MountRecord>) {
    let is_of_root = File::open(RECORDS_DIRECTORY).is_ok_and(|directory| is_of_root(directory.as_fd()));
    let listed = if is_of_root { fs::read_dir(RECORDS_DIRECTORY).ok() } else { None };
    let files = listed.into_iter().flatten().flatten();
    let is_record_file = |file: &DirEntry| is_record_name(file.file_name().as_bytes());
    let records = files.filter(is_record_file).filter_map(|file| MountRecord::read(&fs::read(file.path()).ok()?));
    let (living, dead): (_, Vec<MountRecord>) = records.partition(MountRecord::is_alive);
    let (dead, gone): (_, Vec<_>) = dead.into_iter().partition(is_topmost);
    gone.iter().for_each(MountRecord::remove);
    (living, dead)
}

/// Whether the topmost file system on a record's directory is the record's. A mount that was detached from the tree is
/// served for as long as programs use it.
///
/// The device number shows which file system is topmost, without a request to a mount, which may be dead. The kernel's
/// table takes longer to write, and to read.
#[must_use]
pub fn is_topmost(record: &MountRecord) -> bool {
    if let Some(is_topmost) = record.root().and_then(|root| record.is_shown_by(root.as_fd())) {
        return is_topmost;
    }
    let Ok(table) = fs::read(format!("/proc/{}/mountinfo", std::process::id())) else { return false };
    let arena = record.arena.as_os_str().as_bytes();
    topmost_mount(&table, record.directory.as_os_str().as_bytes()).is_some_and(|line| line.arena() == Some(arena))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    #[test]
    fn directory_that_others_can_change_is_not_of_root() {
        let is_of_root = |path: &str| is_of_root(File::open(path).expect("opened").as_fd());
        assert!(is_of_root("/proc"));
        assert!(!is_of_root("/tmp"), "others may write there");
    }

    #[test]
    fn topmost_mount_is_recognised_by_its_device() {
        let device = fs::metadata("/proc").expect("mounted").dev();
        let record = |directory: &str, device: u64| MountRecord {
            directory: directory.into(),
            arena: "/none".into(),
            pid: std::process::id(),
            device,
        };
        assert!(is_topmost(&record("/proc", device)));
        assert!(!is_topmost(&record("/proc", device + 1)), "something else lies on it");
        assert!(!is_topmost(&record("/proc/sys", device)), "it is taken out of the tree");
        assert!(!is_topmost(&record("/proc/none", device)));
        assert!(!is_topmost(&record("/proc", 0)), "the table says that it is no Ashlar");
        let old = MountRecord::read(br#"{"directory":"/a","arena":"/b","pid":7}"#).expect("read");
        assert_eq!(old, MountRecord { directory: "/a".into(), arena: "/b".into(), pid: 7, device: 0 });
    }
}
