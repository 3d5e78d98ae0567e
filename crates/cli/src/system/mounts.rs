//! The mounted Ashlar file systems, their processes and their users.

use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::RecvTimeoutError;
use std::time::Duration;

use ashlar_launch::{MountRecord, dead_record_of, live_records};
use ashlar_types::{MountLine, topmost_mount};
use rustix::fs::{AtFlags, CWD, StatxFlags};

use crate::error::CliError;

/// How long to wait for a mount whose process is dead. It answers at once, or never.
const PATIENCE: Duration = Duration::from_secs(1);

/// Returns the record of the process behind the mount on `directory`.
pub fn record_of(directory: &Path) -> Option<MountRecord> {
    live_records().into_iter().find(|record| record.directory == directory)
}

/// Returns whether any mount of an arena has a living process.
pub fn has_mounts(arena: &Path) -> bool {
    live_records().iter().any(|record| record.arena == arena)
}

/// Returns the mount that a path is in; the path must exist. The mount is the innermost one; another file system may
/// lie in between.
pub fn mount_of(path: &Path) -> Result<MountRecord, CliError> {
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

fn is_mounted_in(table: &[u8], directory: &Path) -> bool {
    topmost(table, directory).is_some_and(|line| line.is_ashlar())
}

fn topmost<'a>(table: &'a [u8], directory: &Path) -> Option<MountLine<'a>> {
    topmost_mount(table, directory.as_os_str().as_bytes())
}

/// Returns the path of `directory` as the kernel's table has it. The mount on it is not asked: it may be dead.
pub fn resolve_mount_point(directory: &Path) -> Result<PathBuf, CliError> {
    let absolute = std::path::absolute(directory).map_err(CliError::system("finding the current directory"))?;
    let (Some(parent), Some(name)) = (absolute.parent(), absolute.file_name()) else { return Ok(absolute) };
    let parent = fs::canonicalize(parent).map_err(|_| CliError::NoDirectory(directory.to_owned()))?;
    let path = parent.join(name);
    if is_mounted(&path) {
        return Ok(path);
    }
    // A symbolic link to a directory is followed. A path that does not answer stays as it is.
    Ok(match fs::symlink_metadata(&path) {
        Ok(metadata) if metadata.is_symlink() || name == ".." => fs::canonicalize(&path).unwrap_or(path),
        _ => path,
    })
}

/// Ends the connection of a mount whose process is dead, and that does not answer.
///
/// Most often the mount reports that it is dead. But a helper may wait for one of its requests, which no process
/// answers any more. Then every process that uses that mount waits as well.
pub fn end_dead_mount(directory: &Path) {
    let Some(record) = dead_record_of(directory) else { return };
    if !is_answering(directory)
        && let Err(errno) = ashlar_helper::end_connection(record.device)
    {
        eprintln!("ashlar: the dead mount on {} does not answer, and can't be ended: {errno}", directory.display());
    }
    // The next mount here may have its device number.
    record.remove();
}

/// Whether the mount on a directory answers within [`PATIENCE`], whatever the answer.
fn is_answering(directory: &Path) -> bool {
    let (answered, answer) = std::sync::mpsc::channel();
    let asked = directory.to_owned();
    let ask = move || {
        let how = AtFlags::STATX_FORCE_SYNC | AtFlags::NO_AUTOMOUNT;
        // The answer itself does not matter.
        let _ = rustix::fs::statx(CWD, &asked, how, StatxFlags::BASIC_STATS);
        let _ = answered.send(());
    };
    let asking = std::thread::Builder::new().name("ask".into()).spawn(ask);
    asking.is_err() || answer.recv_timeout(PATIENCE) != Err(RecvTimeoutError::Timeout)
}

/// Returns programs whose files, working directory or root lie under `directory`, a few of them, as part of a sentence.
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
            users.push(format!("{} (process {pid})", crate::system::arena::program_of(pid)));
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
    fn topmost_mount_counts_and_names_are_unescaped() {
        assert!(is_mounted_in(TABLE, Path::new("/mnt/a b")));
        assert!(!is_mounted_in(TABLE, Path::new("/mnt/c")), "a tmpfs lies on it");
        assert!(!is_mounted_in(TABLE, Path::new("/mnt")));
        assert!(!is_mounted_in(TABLE, Path::new("/")));
        assert!(!is_mounted_in(b"garbage\n\n1 2 3", Path::new("/")));
        assert_eq!(topmost(TABLE, Path::new("/mnt/a b")).map(|line| line.source), Some(b"ashlar".to_vec()));
    }

    #[test]
    fn paths_are_resolved_without_touching_the_mount() {
        let directory = tempfile::tempdir().expect("a directory");
        let real = fs::canonicalize(directory.path()).expect("its real path");
        std::os::unix::fs::symlink(&real, real.join("link")).expect("a link");
        assert_eq!(resolve_mount_point(&real.join("x")).expect("resolved"), real.join("x"));
        assert_eq!(resolve_mount_point(&real.join("link")).expect("resolved"), real);
        assert!(matches!(resolve_mount_point(&real.join("none/x")), Err(CliError::NoDirectory(_))));
    }
}
