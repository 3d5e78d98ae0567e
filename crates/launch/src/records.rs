//! Who stands behind which mount.
//!
//! The kernel's table (`/proc/self/mountinfo`) says what is mounted. Which arena and which process stand behind a mount
//! is written down by that process in `/run/ashlar/PROCESS.json`; a record whose process is gone is removed by whoever
//! finds it.

use std::fs::{self, DirEntry};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use ashlar_types::topmost_mount;
use rustix::fs::{AtFlags, CWD, Mode, OFlags, ResolveFlags, StatxAttributes, StatxFlags};
use serde::{Deserialize, Serialize};

const RECORDS: &str = "/run/ashlar";

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

    fn is_alive(&self) -> bool {
        // The process may be gone and its number taken by another program.
        fs::read(format!("/proc/{}/cmdline", self.pid))
            .is_ok_and(|line| line.split(|&byte| byte == 0).any(|word| word == b"mount-process" || word == b"mount"))
    }
}

/// All records of mounts whose processes live.
#[must_use]
pub fn records() -> Vec<MountRecord> {
    let (mut living, _) = living_and_dead();
    living.sort_by(|a, b| a.directory.cmp(&b.directory));
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
    let is_record = |file: &DirEntry| file.file_name().as_bytes().ends_with(b".json");
    let records = files.filter(is_record).filter_map(|file| serde_json::from_slice(&fs::read(file.path()).ok()?).ok());
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
    if let Some(is_topmost) = shows_device(record) {
        return is_topmost;
    }
    let Ok(table) = fs::read(format!("/proc/{}/mountinfo", std::process::id())) else { return false };
    let arena = record.arena.as_os_str().as_bytes();
    topmost_mount(&table, record.directory.as_os_str().as_bytes()).is_some_and(|line| line.arena() == Some(arena))
}

/// Whether a record's directory is the root of a mount of the record's device; `None` where that can't be told.
fn shows_device(record: &MountRecord) -> Option<bool> {
    // A path that lies within another file system is followed only as far as the kernel knows it: that one may be dead too.
    let root = rustix::fs::openat2(
        CWD,
        &record.directory,
        OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC,
        Mode::empty(),
        ResolveFlags::CACHED,
    );
    let root = root.ok().filter(|_| record.device != 0)?;
    let flags = AtFlags::EMPTY_PATH | AtFlags::NO_AUTOMOUNT | AtFlags::STATX_DONT_SYNC;
    let found = rustix::fs::statx(&root, "", flags, StatxFlags::empty()).ok()?;
    let is_known = found.stx_attributes_mask.contains(StatxAttributes::MOUNT_ROOT);
    let device = rustix::fs::makedev(found.stx_dev_major, found.stx_dev_minor);
    is_known.then(|| found.stx_attributes.contains(StatxAttributes::MOUNT_ROOT) && device == record.device)
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
        let old: MountRecord = serde_json::from_str(r#"{"directory":"/a","arena":"/b","pid":7}"#).expect("read");
        assert_eq!(old, MountRecord { directory: "/a".into(), arena: "/b".into(), pid: 7, device: 0 });
    }
}
