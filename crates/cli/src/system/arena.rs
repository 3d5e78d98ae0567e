//! Arenas on the command line: their location, creation and survival of failures.
//!
//! Root's arenas in memory stand in a tmpfs of their own, which no other user can change. It stays mounted: its arenas
//! outlive all processes. Directories that all users share, as `/dev/shm`, may hold files that another user has
//! prepared.

use std::fmt;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use ashlar_pmem::{
    ARENA_BYTES_MIN, Arena, ArenaError, ArenaOptions, ArenaSummary, DirectoryError, PrivateDirectory, UnsafeReason,
    resolve_directory,
};
use ashlar_store::{Store, StoreError};
use ashlar_types::{Timestamp, escape_controls};
use rustix::fs::{AtFlags, FlockOperation, OFlags, StatxAttributes, StatxFlags, flock, statx};
use rustix::mount::{MountFlags, mount};
use rustix::process::geteuid;

use crate::error::CliError;
use crate::output::progress;
use crate::output::size::Size;

/// The standard place on disk.
const DISK: &str = "/var/lib/ashlar/default";
/// The tmpfs that holds root's arenas in memory, and the standard place in it.
const MEMORY_OF_ROOT: &str = "/run/ashlar/memory";
const ARENA_OF_ROOT: &str = "/run/ashlar/memory/default";
/// The name of the standard place in memory.
const DEFAULT_NAME: &str = "default";
/// The source of that tmpfs, for lists of mounts.
const MEMORY_SOURCE: &str = "ashlar-memory";
/// The largest default size of a new arena: its space is allocated at once, and it can grow online.
const SIZE_DEFAULT_MAX: u64 = 4 << 30;
/// The longest path that a socket may have (`sockaddr_un`), its NUL included.
const SOCKET_PATH_MAX: usize = 108;
/// The log of a daemon, and that of the processes behind mounts, in the arena's directory.
pub const DAEMON_LOG: &str = "daemon.log";
pub const MOUNT_LOG: &str = "mount.log";
/// Marks, in the directory, that an arena is being made, so that an interrupted creation is resumed.
const UNFINISHED: &str = "unfinished";

/// The place of an arena, as the user names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ArenaChoice {
    /// The standard place on disk.
    Disk,
    /// The standard place in memory.
    Memory,
    /// A directory.
    Directory(PathBuf),
}

impl FromStr for ArenaChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "" => Err("name a place: disk, memory, or a directory".to_owned()),
            "disk" => Ok(Self::Disk),
            "memory" => Ok(Self::Memory),
            "pmem" => Err("for persistent memory, name a directory on a file system mounted with -o dax".to_owned()),
            directory => Ok(Self::Directory(directory.into())),
        }
    }
}

impl fmt::Display for ArenaChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Disk => f.write_str("disk"),
            Self::Memory => f.write_str("memory"),
            Self::Directory(directory) => directory.display().fmt(f),
        }
    }
}

/// The location of an arena.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArenaLocation {
    directory: PathBuf,
}

impl ArenaLocation {
    /// Returns the location that `choice` names. An existing directory is named by its real path, so that one arena has
    /// one name.
    pub fn new(choice: &ArenaChoice) -> Result<Self, CliError> {
        let directory = match choice {
            ArenaChoice::Disk => PathBuf::from(DISK),
            ArenaChoice::Memory => memory_directory(geteuid().as_raw(), DEFAULT_NAME),
            ArenaChoice::Directory(directory) => {
                std::path::absolute(directory).map_err(CliError::system("finding the current directory"))?
            }
        };
        Self::at(directory)
    }

    /// Returns the location that `choice` names for a verb that makes no arena. An ordinary user without an arena in
    /// memory means root's.
    pub fn find(choice: &ArenaChoice) -> Result<Self, CliError> {
        let own = Self::new(choice)?;
        if *choice == ArenaChoice::Memory && !own.exists() {
            return Self::of_root_in_memory();
        }
        Ok(own)
    }

    /// Returns root's standard place in memory.
    pub fn of_root_in_memory() -> Result<Self, CliError> {
        Self::at(PathBuf::from(ARENA_OF_ROOT))
    }

    /// Returns the place in memory with a name of its own.
    pub fn in_memory(name: &str) -> Result<Self, CliError> {
        Self::at(memory_directory(geteuid().as_raw(), name))
    }

    /// Returns the location in `directory`.
    pub fn at(directory: PathBuf) -> Result<Self, CliError> {
        let directory = match resolve_directory(&directory) {
            Ok(resolved) => resolved,
            // It does not exist, or the caller may not see it.
            Err(DirectoryError::Io { .. }) => directory,
            Err(error) => return Err(CliError::Arena { arena: directory, error: error.into() }),
        };
        let place = Self { directory };
        if place.socket().as_os_str().len() >= SOCKET_PATH_MAX {
            return Err(CliError::PathTooLong(place.directory));
        }
        Ok(place)
    }

    /// Returns the arena's directory.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Returns the socket on which its daemon listens.
    pub fn socket(&self) -> PathBuf {
        ashlar_wire::socket_of(&self.directory)
    }

    /// Returns the log of its daemon.
    pub fn daemon_log(&self) -> PathBuf {
        self.directory.join(DAEMON_LOG)
    }

    /// Reads the content of its superblock.
    pub fn probe(&self) -> Result<ArenaSummary, CliError> {
        Arena::probe(&self.directory).map_err(|error| self.error(error))
    }

    /// Whether an arena exists there, whatever its state.
    pub fn exists(&self) -> bool {
        !matches!(Arena::probe(&self.directory), Err(ArenaError::NotAnArena))
    }

    /// Makes its directory, for an arena that is made there next.
    pub fn make_directory(&self) -> Result<(), CliError> {
        if geteuid().is_root() && self.directory.starts_with(MEMORY_OF_ROOT) {
            mount_memory()?;
        }
        PrivateDirectory::make(&self.directory, 0o755).map(drop).map_err(|error| self.error(error.into()))
    }

    /// Opens the arena, which no other process may have open.
    pub fn open(&self) -> Result<Arena, CliError> {
        Arena::open(&self.directory).map_err(|error| self.error(error))
    }

    /// Makes the arena if none exists. The result says whether it was made.
    pub fn prepare(&self, size: Option<Size>, emulate_pmem: bool) -> Result<PreparedArena, CliError> {
        if geteuid().is_root() && self.directory.starts_with(MEMORY_OF_ROOT) {
            mount_memory()?;
        }
        if self.exists() {
            let (directory, summary) = (self.open_directory()?, self.probe()?);
            if directory.stat(UNFINISHED).is_ok() {
                self.format_store(&directory)?;
            }
            return Ok(PreparedArena { made: false, summary });
        }
        let options = ArenaOptions { emulate_pmem, ..ArenaOptions::new(self.size_for_new(size)?) };
        // Users that may open sessions reach the socket in it; all else in it is for its owner alone.
        let directory = PrivateDirectory::make(&self.directory, 0o755).map_err(|error| self.error(error.into()))?;
        directory
            .open_file(UNFINISHED, OFlags::WRONLY | OFlags::CREATE)
            .map_err(CliError::system(format!("writing to {}", self.directory.display())))?;
        let spinner = progress::spinner(&format!("making an arena of {}", Size(options.size_bytes)));
        let made = Arena::create(&self.directory, &options);
        spinner.finish_and_clear();
        drop(made.map_err(|error| {
            // Nothing was made, so nothing is left behind: neither the mark nor the new directory.
            let _ = directory.remove_file(UNFINISHED);
            let _ = directory.remove_file("lock");
            let _ = fs::remove_dir(&self.directory);
            self.creation_error(error, options.size_bytes)
        })?);
        self.format_store(&directory)?;
        Ok(PreparedArena { made: true, summary: self.probe()? })
    }

    /// Opens its directory, which no other user may be able to change.
    pub fn open_directory(&self) -> Result<PrivateDirectory, CliError> {
        PrivateDirectory::open(&self.directory).map_err(|error| self.error(error.into()))
    }

    fn format_store(&self, directory: &PrivateDirectory) -> Result<(), CliError> {
        let arena = Arc::new(self.open()?);
        match Store::open(Arc::clone(&arena)) {
            Ok(_) => {}
            Err(StoreError::NotFormatted) => Store::format(&arena, now()).map_err(|error| self.store_error(error))?,
            Err(error) => return Err(self.store_error(error)),
        }
        // Another process may have finished it at the same time.
        let removed = directory.remove_file(UNFINISHED);
        removed.map_err(CliError::system(format!("removing {}", self.directory.join(UNFINISHED).display())))
    }

    /// Returns the size of a new arena: the requested one, or a modest part of the free space.
    fn size_for_new(&self, asked: Option<Size>) -> Result<u64, CliError> {
        let free = self.free()?;
        let size = asked.unwrap_or_else(|| default_size(free));
        if size.0 < ARENA_BYTES_MIN {
            let least = Size(ARENA_BYTES_MIN);
            return Err(match asked {
                Some(wanted) => CliError::TooSmall { wanted, least },
                None => CliError::NoSpace { arena: self.directory.clone(), wanted: least, free },
            });
        }
        if size > free {
            return Err(CliError::NoSpace { arena: self.directory.clone(), wanted: size, free });
        }
        Ok(size.0)
    }

    /// Returns the free space of the file system that holds the arena.
    pub fn free(&self) -> Result<Size, CliError> {
        // If the directory does not exist yet, the file system counts in which it will be made.
        let there = self.directory.ancestors().find(|directory| directory.is_dir()).unwrap_or(&self.directory);
        let numbers = rustix::fs::statvfs(there)
            .map_err(CliError::system(format!("looking at the free space in {}", self.directory.display())))?;
        Ok(Size(numbers.f_bavail * numbers.f_frsize))
    }

    /// Converts an arena's error to the command's.
    pub fn error(&self, error: ArenaError) -> CliError {
        let arena = self.directory.clone();
        match error {
            ArenaError::InUse { pid } => CliError::ArenaInUse { arena, pid, program: program_of(pid) },
            ArenaError::WrongVersion { found, supported } => CliError::WrongVersion { arena, found, supported },
            ArenaError::NotAnArena => CliError::NoArena(arena),
            ArenaError::Io { source, .. } | ArenaError::Directory(DirectoryError::Io { source, .. })
                if source.kind() == ErrorKind::PermissionDenied =>
            {
                CliError::NotReadable(arena)
            }
            // An ordinary user at root's arena.
            ArenaError::Directory(DirectoryError::Unsafe { reason: UnsafeReason::Owner(0), .. }) => {
                CliError::NotReadable(arena)
            }
            error => CliError::Arena { arena, error },
        }
    }

    fn creation_error(&self, error: ArenaError, size_bytes: u64) -> CliError {
        match (error, self.free()) {
            (ArenaError::NoSpace { .. }, Ok(free)) => {
                CliError::NoSpace { arena: self.directory.clone(), wanted: Size(size_bytes), free }
            }
            (error, _) => self.error(error),
        }
    }

    /// Converts the metadata store's error to the command's.
    pub fn store_error(&self, error: StoreError) -> CliError {
        CliError::Store { arena: self.directory.clone(), error }
    }
}

/// Returns the place in memory of a user's arena of this name.
///
/// An ordinary user can mount no tmpfs. In `/dev/shm`, the directory above the arena must be the user's own.
fn memory_directory(user: u32, name: &str) -> PathBuf {
    if user == 0 { Path::new(MEMORY_OF_ROOT).join(name) } else { format!("/dev/shm/ashlar-{user}/{name}").into() }
}

/// Mounts the tmpfs that holds root's arenas in memory, unless it is mounted. It is as large as `/dev/shm` is by
/// default: half of the machine's memory at most.
fn mount_memory() -> Result<(), CliError> {
    let failed = || CliError::system(format!("mounting a tmpfs on {MEMORY_OF_ROOT}"));
    let refused = |error: DirectoryError| CliError::Arena { arena: ARENA_OF_ROOT.into(), error: error.into() };
    let place = Path::new(MEMORY_OF_ROOT);
    PrivateDirectory::make(place, 0o755).map_err(refused)?;
    // Of two commands at once, one mounts.
    let above = place.parent().map(PrivateDirectory::open).transpose().map_err(refused)?;
    if let Some(above) = &above {
        flock(above, FlockOperation::LockExclusive).map_err(failed())?;
    }
    let how = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT;
    let found = statx(rustix::fs::CWD, place, how, StatxFlags::empty()).map_err(failed())?;
    if found.stx_attributes.contains(StatxAttributes::MOUNT_ROOT) {
        return Ok(());
    }
    let flags = MountFlags::NOSUID | MountFlags::NODEV;
    mount(MEMORY_SOURCE, place, "tmpfs", flags, c"mode=0755").map_err(failed())
}

/// Returns the size of a new arena without `--size`: at most half of the free space, since metadata and logs need room
/// too.
fn default_size(free: Size) -> Size {
    Size((free.0 / 2).min(SIZE_DEFAULT_MAX) / ARENA_BYTES_MIN * ARENA_BYTES_MIN)
}

/// The outcome of [`ArenaLocation::prepare`].
#[derive(Debug)]
pub struct PreparedArena {
    /// Whether it was made now.
    pub made: bool,
    /// Its description.
    pub summary: ArenaSummary,
}

/// Returns which failures an arena on a medium of this name survives, as `status` and `mount` print them.
pub fn survives(medium: &str) -> &'static str {
    if medium.contains("emulated") {
        return "runs the flush instructions of persistent memory on memory; does not survive a restart of the machine";
    }
    match medium {
        "pmem" => "survives crashes of programs and of the daemon, and power loss, at once",
        "memory" => "survives crashes of programs and of the daemon, not a restart of the machine",
        "disk" => {
            "survives crashes of programs and of the daemon at once, power loss from fsync on (always as a prefix)"
        }
        _ => "of a kind that this ashlar does not know",
    }
}

/// Returns the name of the program that runs as `pid`.
pub fn program_of(pid: u32) -> String {
    fs::read(format!("/proc/{pid}/comm")).map_or_else(
        |_| "unknown".to_owned(),
        |name| escape_controls(String::from_utf8_lossy(&name).trim()).into_owned(),
    )
}

/// Returns the present time.
fn now() -> Timestamp {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    Timestamp { seconds: now.as_secs() as i64, nanoseconds: now.subsec_nanos() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn standard_arenas_have_names_others_are_directories() {
        assert_eq!("disk".parse(), Ok(ArenaChoice::Disk));
        assert_eq!("memory".parse(), Ok(ArenaChoice::Memory));
        assert_eq!("./memory".parse(), Ok(ArenaChoice::Directory("./memory".into())));
        assert!("".parse::<ArenaChoice>().is_err());
        let place = ArenaLocation::new(&ArenaChoice::Directory("/nowhere/arena".into())).expect("a place");
        assert_eq!(place.socket(), Path::new("/nowhere/arena/socket"));
    }

    #[test]
    fn memory_of_users_is_apart() {
        assert_eq!(memory_directory(0, DEFAULT_NAME), Path::new("/run/ashlar/memory/default"));
        assert_eq!(memory_directory(1000, DEFAULT_NAME), Path::new("/dev/shm/ashlar-1000/default"));
    }

    #[test]
    fn directory_that_others_may_write_takes_no_arena() {
        use std::os::unix::fs::PermissionsExt;
        let directory = tempfile::tempdir().expect("a directory");
        let arena = directory.path().join("arena");
        fs::create_dir(&arena).expect("made");
        fs::set_permissions(&arena, fs::Permissions::from_mode(0o777)).expect("open to all");
        let place = ArenaLocation::at(arena.clone()).expect("a place");
        let error = place.prepare(Some(Size(16 << 20)), false).expect_err("refused").to_string();
        assert!(error.contains("can be written by other users (mode 777)"), "{error}");
        assert_eq!(fs::read_dir(&arena).expect("listed").count(), 0);
    }

    #[test]
    fn path_too_long_for_a_socket_is_refused_first() {
        let directory = PathBuf::from("/").join("x".repeat(120));
        assert!(matches!(ArenaLocation::at(directory), Err(CliError::PathTooLong(_))));
    }

    #[test]
    fn new_arena_takes_half_of_free_space_within_its_bound() {
        assert_eq!(default_size(Size(1 << 40)), Size(4 << 30));
        assert_eq!(default_size(Size(1 << 30)), Size(512 << 20));
        assert_eq!(default_size(Size(20 << 20)), Size(0));
    }

    #[test]
    fn directory_without_an_arena_is_named_in_the_error() {
        let directory = tempfile::tempdir().expect("a directory");
        let place = ArenaLocation::at(directory.path().to_owned()).expect("a place");
        assert!(!place.exists());
        assert!(matches!(place.probe(), Err(CliError::NoArena(_))));
        let small = place.prepare(Some(Size(4096)), false);
        assert!(matches!(small, Err(CliError::TooSmall { wanted: Size(4096), .. })));
        let large = place.prepare(Some(Size(1 << 60)), false);
        assert!(matches!(large, Err(CliError::NoSpace { .. })));
        assert!(!directory.path().join("ARENA").exists());
    }
}
