//! The search for the daemon of the file system that a program names.
//!
//! The kernel's table of mounts says to which arena a mount belongs.

use std::ffi::OsStr;
use std::fs;
use std::io::ErrorKind;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use ashlar_types::{Errno, InodeId, mount_lines, topmost_mount};
use ashlar_wire::socket_of;

const TABLE: &str = "/proc/self/mountinfo";

/// A file system, as a program has named it.
#[derive(Debug)]
pub(crate) struct NamedFileSystem {
    /// The socket on which its daemon listens.
    pub(crate) socket: PathBuf,
    /// Its mount point, without a slash at the end; `None` if the program named only the socket.
    pub(crate) point: Option<Vec<u8>>,
    /// The device number that its files show, or 0.
    pub(crate) device: u64,
}

/// An errno, and a sentence for people.
pub(crate) type OpenRefusal = (Errno, String);

impl NamedFileSystem {
    /// Finds the file system that is mounted on `place`, or whose daemon listens there.
    pub(crate) fn find(place: &[u8]) -> Result<Self, OpenRefusal> {
        let place = Path::new(OsStr::from_bytes(place));
        let metadata = fs::metadata(place).map_err(|error| unreachable(place, &error))?;
        if metadata.file_type().is_socket() {
            return Ok(Self { socket: place.to_owned(), point: None, device: 0 });
        }
        let real = fs::canonicalize(place).map_err(|error| unreachable(place, &error))?;
        let table = fs::read(TABLE).map_err(|error| {
            (error.into(), format!("the mounted file systems can't be read from {TABLE} (is /proc mounted?)"))
        })?;
        let point = real.into_os_string().into_vec();
        let arena = arena_on(&table, &point)?;
        if metadata.ino() != InodeId::ROOT.0 {
            let name = place.display();
            return Err((
                Errno::ENODEV,
                format!("{name} is a part of an Ashlar that is mounted elsewhere; name that mount"),
            ));
        }
        let point = if point == b"/" { Vec::new() } else { point };
        Ok(Self { socket: socket_of(Path::new(OsStr::from_bytes(&arena))), point: Some(point), device: metadata.dev() })
    }
}

fn unreachable(place: &Path, error: &std::io::Error) -> OpenRefusal {
    let name = place.display();
    let sentence = match error.kind() {
        ErrorKind::NotFound => {
            format!(
                "{name} does not exist; name the directory on which an Ashlar is mounted ('ashlar status' lists them)"
            )
        }
        _ if error.raw_os_error().is_some_and(|number| Errno(number).is_of_dead_mount()) => {
            format!("the process behind the mount on {name} is gone; mount it again with 'ashlar mount {name}'")
        }
        _ => format!("{name} can't be read: {error}"),
    };
    (Errno::from(std::io::Error::from_raw_os_error(error.raw_os_error().unwrap_or(libc::EIO))), sentence)
}

/// Returns the arena of the topmost mount on a path.
fn arena_on(table: &[u8], point: &[u8]) -> Result<Vec<u8>, OpenRefusal> {
    let name = point.escape_ascii();
    let Some(line) = topmost_mount(table, point) else {
        let contains = |outer: &[u8]| point.strip_prefix(outer).is_some_and(|rest| rest.first() == Some(&b'/'));
        let around = mount_lines(table).filter(|line| contains(&line.point)).max_by_key(|line| line.point.len());
        let sentence = match around.filter(|line| line.arena().is_some()) {
            Some(line) => format!("{name} lies in the Ashlar on {0}; name {0}", line.point.escape_ascii()),
            None => format!("no Ashlar is mounted on {name}; mount one with 'ashlar mount {name}'"),
        };
        return Err((Errno::ENODEV, sentence));
    };
    let Some(arena) = line.arena() else {
        return Err((
            Errno::ENODEV,
            format!("the file system on {name} is no Ashlar; 'ashlar status' lists the mounts"),
        ));
    };
    if line.is_read_only() {
        return Err((
            Errno::EROFS,
            format!("the Ashlar on {name} is mounted for reading only; use its files through the mount"),
        ));
    }
    Ok(arena.to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &[u8] = b"22 1 8:1 / / rw - ext4 /dev/sda1 rw\n\
        40 22 0:40 / /mnt/a rw,nosuid - fuse.ashlar ashlar@/var/lib/one rw\n\
        41 22 0:41 / /mnt/b ro - fuse.ashlar ashlar@/var/lib/two rw\n\
        42 22 0:42 / /mnt/c rw - fuse.ashlar ashlar@/var/lib/three rw\n\
        43 42 0:43 / /mnt/c rw - tmpfs none rw\n";

    #[test]
    fn arena_of_a_mount_point_is_found() {
        assert_eq!(arena_on(TABLE, b"/mnt/a").expect("an arena"), b"/var/lib/one");
    }

    #[test]
    fn refusals_say_what_to_do() {
        for (point, errno, words) in [
            ("/mnt/a/sub", Errno::ENODEV, "lies in the Ashlar on /mnt/a; name /mnt/a"),
            ("/mnt/ab", Errno::ENODEV, "ashlar mount /mnt/ab"),
            ("/mnt/c", Errno::ENODEV, "is no Ashlar"),
            ("/mnt/b", Errno::EROFS, "for reading only"),
        ] {
            let (found, sentence) = arena_on(TABLE, point.as_bytes()).expect_err("a refusal");
            assert!(found == errno && sentence.contains(words), "{point}: {found:?} {sentence}");
        }
        let (errno, sentence) = NamedFileSystem::find(b"/none/such").expect_err("a refusal");
        assert_eq!(errno, Errno::ENOENT);
        assert!(sentence.contains("/none/such does not exist"), "{sentence}");
        for gone in [libc::ENOTCONN, libc::ECONNABORTED, libc::ECANCELED] {
            let (errno, sentence) = unreachable(Path::new("/mnt/a"), &std::io::Error::from_raw_os_error(gone));
            assert!(errno == Errno(gone) && sentence.contains("'ashlar mount /mnt/a'"), "{gone}: {sentence}");
        }
    }
}
