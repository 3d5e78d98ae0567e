//! Finds mounts of Ashlar in the kernel's table, `/proc/self/mountinfo`.

use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use ashlar_types::topmost_mount;

const MOUNTINFO: &str = "/proc/self/mountinfo";
/// The most symbolic links that the last component of a path may lead through: the kernel's own limit.
const LINKS_MAX: usize = 40;

/// A mount of Ashlar.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MountEntry {
    /// The directory where it is mounted.
    pub(crate) mount_point: PathBuf,
    /// `MAJOR:MINOR` of the device number that its files show.
    pub(crate) device: String,
}

impl MountEntry {
    /// Returns the device number that its files show.
    pub(crate) fn device_number(&self) -> Option<u64> {
        let (major, minor) = self.device.split_once(':')?;
        Some(rustix::fs::makedev(major.parse().ok()?, minor.parse().ok()?))
    }
}

/// Whether `path` is a mount point of Ashlar. This reads the kernel's table and not the file system, so it also answers
/// if the mount's process is dead or stuck.
#[must_use]
pub fn is_ashlar_mount(path: &Path) -> bool {
    find_mount(path).is_some()
}

/// Returns the topmost mount at `path`, if it is one of Ashlar.
pub(crate) fn find_mount(path: &Path) -> Option<MountEntry> {
    let path = resolve_mount_point(path)?;
    let text = std::fs::read(MOUNTINFO).ok()?;
    find_in(&text, &path)
}

fn find_in(text: &[u8], path: &Path) -> Option<MountEntry> {
    let line = topmost_mount(text, path.as_os_str().as_bytes())?;
    let device = String::from_utf8_lossy(line.device).into_owned();
    line.is_ashlar().then(|| MountEntry { mount_point: path.to_owned(), device })
}

/// Returns `path` without symbolic links, as the table has it. The mount point itself is not read: a mount that no
/// process serves would not answer.
pub(crate) fn resolve_mount_point(path: &Path) -> Option<PathBuf> {
    let table = std::fs::read(MOUNTINFO).ok()?;
    let mut path = std::path::absolute(path).ok()?;
    for _ in 0..LINKS_MAX {
        let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else { return path.canonicalize().ok() };
        let resolved = parent.canonicalize().ok()?.join(name);
        if topmost_mount(&table, resolved.as_os_str().as_bytes()).is_some() {
            return Some(resolved);
        }
        match resolved.read_link() {
            Ok(target) => path = resolved.parent()?.join(target),
            Err(_) => return Some(resolved),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &[u8] = b"22 1 8:1 / / rw - ext4 /dev/sda1 rw\n\
        40 22 0:50 / /mnt/with\\040blank rw,relatime shared:5 - fuse.ashlar ashlar rw,user_id=0\n\
        41 22 0:51 / /mnt/a rw - fuse.ashlar ashlar rw\n\
        42 41 0:52 / /mnt/a rw - tmpfs tmpfs rw\n";

    #[test]
    fn finds_mounts_by_their_unescaped_path() {
        let found = find_in(TABLE, Path::new("/mnt/with blank")).unwrap();
        assert_eq!(found.device, "0:50");
        assert_eq!(found.device_number(), Some(rustix::fs::makedev(0, 50)));
        assert_eq!(find_in(TABLE, Path::new("/")), None);
        assert_eq!(find_in(TABLE, Path::new("/mnt")), None);
    }

    #[test]
    fn topmost_mount_hides_ashlar_mount() {
        assert_eq!(find_in(TABLE, Path::new("/mnt/a")), None);
    }

    #[test]
    fn resolves_links_before_the_last_component() {
        let directory = tempfile::tempdir().unwrap();
        let real = directory.path().canonicalize().unwrap().join("real");
        std::fs::create_dir(&real).unwrap();
        let link = directory.path().join("link");
        std::os::unix::fs::symlink(&real, &link).unwrap();
        assert_eq!(resolve_mount_point(&link.join("mnt")), Some(real.join("mnt")));
        assert_eq!(resolve_mount_point(&link), Some(real));
        let circle = directory.path().join("circle");
        std::os::unix::fs::symlink("circle", &circle).unwrap();
        assert_eq!(resolve_mount_point(&circle), None);
    }
}
