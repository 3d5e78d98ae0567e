//! What the kernel says is mounted: `/proc/self/mountinfo`.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use crate::mount::FILE_SYSTEM_TYPE;

const MOUNTINFO: &str = "/proc/self/mountinfo";
/// The most symbolic links that the last component of a path may lead through: the kernel's own limit.
const LINKS_MAX: usize = 40;

/// A mount of Ashlar.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    /// Where.
    pub(crate) mount_point: PathBuf,
    /// `MAJOR:MINOR` of the device number that its files show.
    pub(crate) device: String,
}

impl Entry {
    /// The device number that its files show.
    pub(crate) fn device_number(&self) -> Option<u64> {
        let (major, minor) = self.device.split_once(':')?;
        Some(rustix::fs::makedev(major.parse().ok()?, minor.parse().ok()?))
    }
}

/// Whether `path` is a mount point of Ashlar. It asks the kernel's table and not the file system, so the answer also comes where
/// the mount's process is dead or stuck.
#[must_use]
pub fn is_ashlar_mount(path: &Path) -> bool {
    find(path).is_some()
}

/// The topmost mount at `path`, if it's one of Ashlar.
pub(crate) fn find(path: &Path) -> Option<Entry> {
    let path = resolve(path)?;
    let text = std::fs::read(MOUNTINFO).ok()?;
    find_in(&text, &path)
}

fn find_in(text: &[u8], path: &Path) -> Option<Entry> {
    // Later lines lie over earlier ones.
    let line = text.split(|&byte| byte == b'\n').rfind(|line| mount_point(line).is_some_and(|point| point == path))?;
    let mut fields = line.split(|&byte| byte == b' ');
    let device = String::from_utf8_lossy(fields.nth(2)?).into_owned();
    // Optional fields end with a hyphen; the type follows it.
    let kind = fields.skip_while(|field| *field != b"-").nth(1)?;
    (kind == FILE_SYSTEM_TYPE.as_bytes()).then(|| Entry { mount_point: path.to_owned(), device })
}

fn mount_point(line: &[u8]) -> Option<PathBuf> {
    line.split(|&byte| byte == b' ').nth(4).map(|field| PathBuf::from(OsString::from_vec(unescape(field))))
}

/// Undoes `\040` and the like.
fn unescape(field: &[u8]) -> Vec<u8> {
    let mut plain = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&first, behind)) = rest.split_first() {
        let escaped = behind.get(..3).filter(|_| first == b'\\').and_then(|digits| std::str::from_utf8(digits).ok());
        if let Some(byte) = escaped.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            plain.push(byte);
            rest = behind.get(3..).unwrap_or_default();
        } else {
            plain.push(first);
            rest = behind;
        }
    }
    plain
}

/// `path` without symbolic links, as the table has it. A mount point is not looked at itself: a mount that nobody serves
/// would not answer.
pub(crate) fn resolve(path: &Path) -> Option<PathBuf> {
    let table = std::fs::read(MOUNTINFO).ok()?;
    let mut path = std::path::absolute(path).ok()?;
    for _ in 0..LINKS_MAX {
        let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else { return path.canonicalize().ok() };
        let resolved = parent.canonicalize().ok()?.join(name);
        if is_mount_point(&table, &resolved) {
            return Some(resolved);
        }
        match resolved.read_link() {
            Ok(target) => path = resolved.parent()?.join(target),
            Err(_) => return Some(resolved),
        }
    }
    None
}

fn is_mount_point(table: &[u8], path: &Path) -> bool {
    table.split(|&byte| byte == b'\n').any(|line| mount_point(line).is_some_and(|point| point == path))
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
    fn what_lies_on_top_counts() {
        assert_eq!(find_in(TABLE, Path::new("/mnt/a")), None);
    }

    #[test]
    fn resolves_links_before_the_last_component() {
        let directory = tempfile::tempdir().unwrap();
        let real = directory.path().canonicalize().unwrap().join("real");
        std::fs::create_dir(&real).unwrap();
        let link = directory.path().join("link");
        std::os::unix::fs::symlink(&real, &link).unwrap();
        assert_eq!(resolve(&link.join("mnt")), Some(real.join("mnt")));
        assert_eq!(resolve(&link), Some(real));
        let circle = directory.path().join("circle");
        std::os::unix::fs::symlink("circle", &circle).unwrap();
        assert_eq!(resolve(&circle), None);
    }
}
