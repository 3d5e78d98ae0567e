//! Who stands behind which mount.
//!
//! The kernel's table (`/proc/self/mountinfo`) says what is mounted. Which arena and which process stand behind a mount
//! is written down by that process in `/run/ashlar/PROCESS.json`; a record whose process is gone is removed by whoever
//! finds it.

use std::fs::{self, DirEntry};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use ashlar_types::topmost_mount;
use rustix::fs::{AtFlags, CWD, Mode, OFlags, ResolveFlags, StatxAttributes, StatxFlags};
use serde::{Deserialize, Serialize};

/// Where records are.
pub const RECORDS: &str = "/run/ashlar";

/// A mount and who stands behind it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MountRecord {
    /// Where it is mounted.
    pub directory: PathBuf,
    /// Its arena.
    pub arena: PathBuf,
    /// The process that serves it.
    pub pid: u32,
    /// The device number that its files show; 0 where it was written by a release that does not say.
    #[serde(default)]
    pub device: u64,
}

impl MountRecord {
    /// Writes it down for `status` and `umount`.
    ///
    /// # Errors
    /// The system's.
    pub fn write(&self) -> io::Result<()> {
        fs::create_dir_all(RECORDS)?;
        fs::write(self.path(), serde_json::to_vec(self)?)
    }

    /// Removes it.
    pub fn remove(&self) {
        // One that stays is removed by whoever finds its process gone.
        let _ = fs::remove_file(self.path());
    }

    /// Where it is written down.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        Path::new(RECORDS).join(format!("{}.json", self.pid))
    }

    /// The record that a file holds; `None` where that is no record, or one that is being written.
    #[must_use]
    pub fn read(text: &[u8]) -> Option<Self> {
        serde_json::from_slice(text).ok()
    }

    fn is_alive(&self) -> bool {
        // The process may be gone and its number taken by another program.
        fs::read(format!("/proc/{}/cmdline", self.pid)).is_ok_and(|line| is_mount_process(&line))
    }

    /// Its directory, as far as the kernel knows the way to it: a path that lies within another file system may lead to one that is dead too.
    #[must_use]
    pub fn root(&self) -> Option<OwnedFd> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        rustix::fs::openat2(CWD, &self.directory, flags, Mode::empty(), ResolveFlags::CACHED).ok()
    }

    /// Whether its directory, of which this is a descriptor, is the root of a mount of its device; `None` where that can't be told.
    #[must_use]
    pub fn is_shown_by(&self, root: BorrowedFd) -> Option<bool> {
        let flags = AtFlags::EMPTY_PATH | AtFlags::NO_AUTOMOUNT | AtFlags::STATX_DONT_SYNC;
        let found = rustix::fs::statx(root, c"", flags, StatxFlags::empty()).ok()?;
        let is_known = self.device != 0 && found.stx_attributes_mask.contains(StatxAttributes::MOUNT_ROOT);
        let device = rustix::fs::makedev(found.stx_dev_major, found.stx_dev_minor);
        is_known.then(|| found.stx_attributes.contains(StatxAttributes::MOUNT_ROOT) && device == self.device)
    }
}

/// Whether a file among the records is one, by its name.
#[must_use]
pub fn is_record(name: &[u8]) -> bool {
    name.ends_with(b".json")
}

/// Whether a process stands behind a mount, by its command line as the kernel shows it.
#[must_use]
pub fn is_mount_process(line: &[u8]) -> bool {
    line.split(|&byte| byte == 0).any(|word| word == b"mount-process" || word == b"mount")
}

/// Sorts records as all who use them have them.
pub fn in_order(records: &mut [MountRecord]) {
    records.sort_by(|a, b| a.directory.cmp(&b.directory));
}

/// All records of mounts whose processes live.
#[must_use]
pub fn records() -> Vec<MountRecord> {
    let (mut living, _) = living_and_dead();
    in_order(&mut living);
    living
}

/// The record of a mount on `directory` that is still there, and whose process is dead: who asks something of it may find nobody who answers.
#[must_use]
pub fn dead_record_of(directory: &Path) -> Option<MountRecord> {
    living_and_dead().1.into_iter().find(|record| record.directory == directory)
}

/// All records; those of mounts that are not there any more go.
fn living_and_dead() -> (Vec<MountRecord>, Vec<MountRecord>) {
    let files = fs::read_dir(RECORDS).into_iter().flatten().flatten();
    let is_record = |file: &DirEntry| is_record(file.file_name().as_bytes());
    let records = files.filter(is_record).filter_map(|file| MountRecord::read(&fs::read(file.path()).ok()?));
    let (living, dead): (_, Vec<MountRecord>) = records.partition(MountRecord::is_alive);
    let (dead, gone): (_, Vec<_>) = dead.into_iter().partition(is_topmost);
    gone.iter().for_each(MountRecord::remove);
    (living, dead)
}

/// Whether the topmost file system on a record's directory is the one that the record is about. One that was taken out of the tree
/// is served on for as long as programs use it.
///
/// What is topmost shows in the device, for which nobody is asked: it may be dead. The kernel's table takes longer to write, and to read.
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
    fn a_mount_is_told_by_the_device_that_it_shows() {
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
