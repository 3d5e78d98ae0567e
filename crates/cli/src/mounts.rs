//! Which Ashlar file systems are mounted, and on whose behalf.
//!
//! The kernel's table (`/proc/self/mountinfo`) says what is mounted. Which arena and which process stand behind a mount
//! is written down by that process in `/run/ashlar/PROCESS.json`; a record whose process is gone is removed by whoever
//! finds it.

use std::fs::{self, DirEntry};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use ashlar_types::{MountLine, topmost_mount};
use rustix::fs::{AtFlags, CWD, Mode, OFlags, ResolveFlags, StatxAttributes, StatxFlags};
use serde::{Deserialize, Serialize};

use crate::error::CliError;

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
    pub fn write(&self) -> Result<(), CliError> {
        let path = self.path();
        fs::create_dir_all(RECORDS).map_err(CliError::system(format!("making {RECORDS}")))?;
        let text = serde_json::to_vec(self).map_err(CliError::system(format!("writing {}", path.display())))?;
        fs::write(&path, text).map_err(CliError::system(format!("writing {}", path.display())))
    }

    /// Removes it.
    pub fn remove(&self) {
        // One that stays is removed by whoever finds its process gone.
        let _ = fs::remove_file(self.path());
    }

    fn path(&self) -> PathBuf {
        Path::new(RECORDS).join(format!("{}.json", self.pid))
    }

    fn is_alive(&self) -> bool {
        // The process may be gone and its number taken by another program.
        fs::read(format!("/proc/{}/cmdline", self.pid))
            .is_ok_and(|line| line.split(|&byte| byte == 0).any(|word| word == b"mount-process" || word == b"mount"))
    }
}

/// All records of mounts whose processes live.
pub fn records() -> Vec<MountRecord> {
    let Ok(files) = fs::read_dir(RECORDS) else { return Vec::new() };
    let mut records = Vec::new();
    let is_record = |file: &DirEntry| file.file_name().as_bytes().ends_with(b".json");
    for file in files.flatten().filter(is_record) {
        let Some(record) =
            fs::read(file.path()).ok().and_then(|text| serde_json::from_slice::<MountRecord>(&text).ok())
        else {
            continue;
        };
        if record.is_alive() {
            records.push(record);
        } else {
            record.remove();
        }
    }
    records.sort_by(|a, b| a.directory.cmp(&b.directory));
    records
}

/// Who stands behind the mount on `directory`.
pub fn record_of(directory: &Path) -> Option<MountRecord> {
    records().into_iter().find(|record| record.directory == directory)
}

/// The Ashlar that a path is in, which must be there. The mount is the innermost one; another file system may lie in between.
pub fn of(path: &Path) -> Result<MountRecord, CliError> {
    let metadata = fs::metadata(path).map_err(CliError::system(format!("looking at {}", path.display())))?;
    let is_there = |record: &MountRecord| {
        is_mounted(&record.directory) && fs::metadata(&record.directory).is_ok_and(|root| root.dev() == metadata.dev())
    };
    let record = path.ancestors().find_map(record_of).filter(is_there);
    record.ok_or_else(|| CliError::NotInMount(path.to_owned()))
}

/// Whether the topmost file system on `directory` is an Ashlar.
pub fn is_mounted(directory: &Path) -> bool {
    fs::read(format!("/proc/{}/mountinfo", std::process::id())).is_ok_and(|table| is_mounted_in(&table, directory))
}

/// Whether the topmost file system on a record's directory is the one that the record is about. One that was taken out of the tree
/// is served on for as long as programs use it.
///
/// What is topmost shows in the device, for which nobody is asked: it may be dead. The kernel's table takes longer to write, and to read.
pub fn is_topmost(record: &MountRecord) -> bool {
    if let Some(is_topmost) = shows_device(record) {
        return is_topmost;
    }
    let Ok(table) = fs::read(format!("/proc/{}/mountinfo", std::process::id())) else { return false };
    let arena = record.arena.as_os_str().as_bytes();
    topmost(&table, &record.directory).is_some_and(|line| line.arena() == Some(arena))
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

fn is_mounted_in(table: &[u8], directory: &Path) -> bool {
    topmost(table, directory).is_some_and(|line| line.is_ashlar())
}

fn topmost<'a>(table: &'a [u8], directory: &Path) -> Option<MountLine<'a>> {
    topmost_mount(table, directory.as_os_str().as_bytes())
}

/// The path of `directory` as the kernel's table has it, without a look at what is mounted on it, which may be dead.
pub fn resolve(directory: &Path) -> Result<PathBuf, CliError> {
    let absolute = std::path::absolute(directory).map_err(CliError::system("finding the current directory"))?;
    let (Some(parent), Some(name)) = (absolute.parent(), absolute.file_name()) else { return Ok(absolute) };
    let parent = fs::canonicalize(parent).map_err(|_| CliError::NoDirectory(directory.to_owned()))?;
    let path = parent.join(name);
    // A symbolic link to a directory is followed; what does not answer is taken as it stands.
    Ok(match fs::symlink_metadata(&path) {
        Ok(metadata) if metadata.is_symlink() || name == ".." => fs::canonicalize(&path).unwrap_or(path),
        _ => path,
    })
}

/// Programs whose files, working directory or root lie under `directory`, a few of them, as part of a sentence.
pub fn users_of(directory: &Path) -> String {
    const SHOWN: usize = 5;
    let mut users = Vec::new();
    let Ok(processes) = fs::read_dir("/proc") else { return String::new() };
    for process in processes.flatten() {
        let name = process.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
        let links = ["cwd", "root", "exe"].map(|link| process.path().join(link)).into_iter();
        let descriptors = fs::read_dir(process.path().join("fd")).into_iter().flatten().flatten().map(|fd| fd.path());
        if links.chain(descriptors).any(|link| fs::read_link(link).is_ok_and(|path| path.starts_with(directory))) {
            users.push(format!("{} (process {pid})", crate::arena::program_of(pid)));
        }
        if users.len() == SHOWN {
            break;
        }
    }
    if users.is_empty() { String::new() } else { format!(": used by {}", users.join(", ")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &[u8] = b"22 1 8:1 / / rw - ext4 /dev/sda1 rw\n\
        40 22 0:40 / /mnt/a\\040b rw,nosuid - fuse.ashlar ashlar rw\n\
        41 22 0:41 / /mnt/c rw shared:1 master:2 - fuse.ashlar ashlar rw\n\
        42 22 0:42 / /mnt/c rw - tmpfs none rw\n";

    #[test]
    fn the_topmost_mount_counts_and_names_are_unescaped() {
        assert!(is_mounted_in(TABLE, Path::new("/mnt/a b")));
        assert!(!is_mounted_in(TABLE, Path::new("/mnt/c")), "a tmpfs lies on it");
        assert!(!is_mounted_in(TABLE, Path::new("/mnt")));
        assert!(!is_mounted_in(TABLE, Path::new("/")));
        assert!(!is_mounted_in(b"garbage\n\n1 2 3", Path::new("/")));
        assert_eq!(topmost(TABLE, Path::new("/mnt/a b")).map(|line| line.source), Some(b"ashlar".to_vec()));
    }

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

    #[test]
    fn names_are_made_whole_without_touching_the_mount() {
        let directory = tempfile::tempdir().expect("a directory");
        let real = fs::canonicalize(directory.path()).expect("its real path");
        std::os::unix::fs::symlink(&real, real.join("link")).expect("a link");
        assert_eq!(resolve(&real.join("x")).expect("resolved"), real.join("x"));
        assert_eq!(resolve(&real.join("link")).expect("resolved"), real);
        assert!(matches!(resolve(&real.join("none/x")), Err(CliError::NoDirectory(_))));
    }
}
