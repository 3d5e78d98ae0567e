//! The directories that are measured: one on Ashlar, and one to compare with.
//!
//! The first one is on a mounted Ashlar, or on a mount of the benchmark's own. Everything that the benchmark made is
//! removed at the end, whatever ends it.

use std::fs;
use std::io::ErrorKind;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ashlar_types::mount_lines;
use rustix::fs::{statfs, statvfs};

use super::digest_wait::wait_for_digest;
use crate::arguments::{ArenaArgument, BenchArguments, CreateArguments, MountArguments, UmountArguments};
use crate::error::CliError;
use crate::output::size::Size;
use crate::system::arena::{ArenaChoice, ArenaLocation};
use crate::system::background::daemon_status;
use crate::system::mounts;
use crate::verbs::mount;
use crate::verbs::umount;

/// The default directory to compare with.
pub const TMPFS: &str = "/dev/shm";
const TMPFS_MAGIC: u64 = 0x0102_1994;
/// The space that the cases take, without sustained ones.
const SPACE: u64 = 256 << 20;
/// How much room a mount of its own has: twice the need, since blocks are free only after the digest.
const SPACE_FACTOR: u64 = 2;
/// How long, and how often, an arena is tried again that is busy with programs that were just killed.
const PATIENCE: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(50);

/// A directory that is removed with its content when it is dropped.
#[derive(Debug)]
pub struct Scratch {
    path: PathBuf,
    is_kept: bool,
}

impl Scratch {
    /// Makes a new directory in `parent`, for `what`.
    pub fn make(parent: &Path, what: &str) -> Result<Self, CliError> {
        let path = parent.join(format!("ashlar-bench-{what}-{}", std::process::id()));
        fs::create_dir(&path).map_err(CliError::system(format!("making {}", path.display())))?;
        Ok(Self { path, is_kept: false })
    }

    /// Returns its path.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if self.is_kept {
            return;
        }
        // Programs that were just killed may have made something in it meanwhile.
        let deadline = Instant::now() + PATIENCE;
        while let Err(error) = fs::remove_dir_all(&self.path) {
            if error.kind() != ErrorKind::DirectoryNotEmpty || Instant::now() > deadline {
                let path = self.path.display();
                eprintln!("ashlar: {path} can't be removed: {error}; try 'rm -r {path}' later");
                return;
            }
            std::thread::sleep(PAUSE);
        }
    }
}

/// A file system of the benchmark's own: arena in memory, mount, and daemon.
#[derive(Debug)]
struct OwnMount {
    place: ArenaLocation,
    point: PathBuf,
    // They are removed after the mount has ended.
    scratches: [Scratch; 2],
}

impl OwnMount {
    fn new(bytes: u64) -> Result<Self, CliError> {
        let (memory, point) =
            (Scratch::make(Path::new(TMPFS), "arena")?, Scratch::make(&std::env::temp_dir(), "mount")?);
        let arena = memory.path().join("arena");
        let place = ArenaLocation::at(arena.clone())?;
        // The kernel's table has its real path.
        let own = Self { place, point: canonical(point.path())?, scratches: [memory, point] };
        mount::run(&MountArguments {
            directory: own.point.clone(),
            arena: ArenaArgument { arena: ArenaChoice::Directory(arena) },
            create: CreateArguments { size: Some(Size(bytes)), emulate_pmem: false },
            read_only: false,
            sessions: None,
            foreground: false,
            quiet: true,
        })?;
        Ok(own)
    }

    /// Unmounts. Processes that were killed in the middle of a call may be on the mount for a moment yet.
    fn end_mount(&self) -> Result<(), CliError> {
        let deadline = Instant::now() + PATIENCE;
        let arguments = UmountArguments { directory: self.point.clone(), lazy: false, quiet: true };
        while mounts::is_mounted(&self.point) {
            match umount::run(&arguments) {
                Err(CliError::Busy { .. }) if Instant::now() < deadline => {
                    std::thread::sleep(PAUSE);
                }
                result => return result.map(drop),
            }
        }
        // It was never mounted, and yet the daemon may have been started for it.
        umount::end_daemon(&self.place).map(drop)
    }
}

impl Drop for OwnMount {
    fn drop(&mut self) {
        if let Err(error) = self.end_mount() {
            eprintln!("ashlar: what was measured is still mounted: {error}");
            eprintln!("ashlar: 'ashlar umount {}' unmounts it", self.point.display());
            // A file system that is in use must keep its arena.
            self.scratches.iter_mut().for_each(|scratch| scratch.is_kept = true);
        }
    }
}

/// The directories of a benchmark.
#[derive(Debug)]
pub struct BenchDirectories {
    /// The one on Ashlar; removed before the mount is.
    pub ashlar: Scratch,
    /// The one to compare with.
    pub compared: Scratch,
    /// The type of its file system.
    pub kind: String,
    /// Ashlar's arena.
    pub place: ArenaLocation,
    /// The name of its medium.
    pub medium: String,
    /// The length of an update log.
    pub log_bytes: u64,
    _own: Option<OwnMount>,
}

impl BenchDirectories {
    /// Prepares all directories. Sustained cases will fill the log `laps` times.
    pub fn prepare(arguments: &BenchArguments, laps: u64) -> Result<Self, CliError> {
        let (compared, kind) = compared(arguments.compare.as_deref())?;
        let log_bytes = ashlar_daemon::Config::new(PathBuf::new()).log_bytes;
        let (directory, own) = match &arguments.directory {
            Some(directory) => (canonical(directory)?, None),
            None => {
                let own = OwnMount::new(SPACE_FACTOR * (SPACE + laps * log_bytes))?;
                (own.point.clone(), Some(own))
            }
        };
        let record = mounts::mount_of(&directory)?;
        let place = ArenaLocation::at(record.arena)?;
        let status = daemon_status(&place)?.ok_or_else(|| CliError::NoDaemon(place.directory().to_owned()))?;
        let log_bytes = status.sessions.iter().map(|session| session.log_bytes).min().unwrap_or(log_bytes);
        let wanted = SPACE + laps * log_bytes;
        for place in [&directory, &compared] {
            check_space(place, wanted)?;
        }
        let (ashlar, compared) = (Scratch::make(&directory, "files")?, Scratch::make(&compared, "files")?);
        Ok(Self { ashlar, compared, kind, place, medium: status.medium, log_bytes, _own: own })
    }

    /// Waits until Ashlar's background work is done.
    pub fn wait_for_digest(&self) -> Result<(), CliError> {
        wait_for_digest(&self.place)
    }
}

fn canonical(directory: &Path) -> Result<PathBuf, CliError> {
    let path = fs::canonicalize(directory).map_err(|error| match error.kind() {
        ErrorKind::NotFound => CliError::NoDirectory(directory.to_owned()),
        _ => CliError::system(format!("looking at {}", directory.display()))(error),
    })?;
    if !path.is_dir() {
        return Err(CliError::NoBenchDirectory(path));
    }
    Ok(path)
}

/// Returns the directory to compare with, and the type of its file system.
fn compared(asked: Option<&Path>) -> Result<(PathBuf, String), CliError> {
    if let Some(directory) = asked {
        let path = canonical(directory)?;
        let kind = kind_of(&path);
        return Ok((path, kind));
    }
    let path = PathBuf::from(TMPFS);
    let is_tmpfs = statfs(&path).is_ok_and(|found| found.f_type as u64 & 0xffff_ffff == TMPFS_MAGIC);
    if is_tmpfs { Ok((path, "tmpfs".to_owned())) } else { Err(CliError::NoTmpfs(path)) }
}

/// Returns the type of the file system that a path is in, as the kernel's table has it.
fn kind_of(path: &Path) -> String {
    let table = fs::read("/proc/self/mountinfo").unwrap_or_default();
    let holds = |point: &[u8]| path.starts_with(Path::new(std::ffi::OsStr::from_bytes(point)));
    // Of several mounts on one directory the last one shows, and is first here.
    let mut nearest: Option<(usize, String)> = None;
    for line in mount_lines(&table).filter(|line| holds(&line.point)) {
        if nearest.as_ref().is_none_or(|(length, _)| line.point.len() > *length) {
            nearest = Some((line.point.len(), String::from_utf8_lossy(line.kind).into_owned()));
        }
    }
    nearest.map_or_else(|| "compared".to_owned(), |(_, kind)| kind)
}

fn check_space(directory: &Path, wanted: u64) -> Result<(), CliError> {
    let looking = CliError::system(format!("looking at the free space in {}", directory.display()));
    let numbers = statvfs(directory).map_err(looking)?;
    let free = numbers.f_bavail * numbers.f_frsize;
    if free < wanted {
        let directory = directory.to_owned();
        return Err(CliError::NoBenchSpace { directory, wanted: Size(wanted), free: Size(free) });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn compared_directory_is_named_by_its_type() {
        assert_eq!(kind_of(Path::new("/proc/self")), "proc");
        assert!(matches!(compared(Some(Path::new("/proc/none"))), Err(CliError::NoDirectory(_))));
        assert!(matches!(compared(Some(Path::new("/proc/version"))), Err(CliError::NoBenchDirectory(_))));
    }

    #[test]
    fn directory_without_room_is_refused() {
        let directory = tempfile::tempdir().expect("a directory");
        assert!(check_space(directory.path(), 1).is_ok());
        assert!(matches!(check_space(directory.path(), 1 << 60), Err(CliError::NoBenchSpace { .. })));
    }

    #[test]
    fn scratch_directory_is_removed_with_its_content() {
        let directory = tempfile::tempdir().expect("a directory");
        let scratch = Scratch::make(directory.path(), "test").expect("made");
        fs::write(scratch.path().join("file"), b"x").expect("written");
        drop(scratch);
        assert_eq!(fs::read_dir(directory.path()).expect("listed").count(), 0);
    }
}
