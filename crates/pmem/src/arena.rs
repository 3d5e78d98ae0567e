//! A node's arena: a directory of preallocated files.
//!
//! ```text
//! DIR/ARENA                   what the arena is, and of which file system (see `superblock.rs`)
//! DIR/lock                    held while the arena is open; holds the owner's process id
//! DIR/metadata/               the metadata store's directory; its owner is the store
//! DIR/segments/SSSSSS.data    data segments, numbered from 0 in decimal
//! DIR/sessions/N.log|.control|.leases   the files of session N, in decimal
//! ```
//! A segment file begins with one CRC32C (4 bytes, little-endian) for each of its blocks, rounded up to whole blocks;
//! then come the blocks. All of it is allocated when the segment is added. Files under construction end in `.new` and
//! are removed when the arena is opened. Directories have mode 0700, files 0600: processes of others get descriptors,
//! never paths. The directory is one that no other user can change ([`PrivateDirectory`]). Its files are opened in it,
//! by their names alone, and never through symbolic links.

use std::ffi::{OsStr, OsString};
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::ops::Range;
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ashlar_types::{
    ArenaId, BLOCK_BYTES, BlockAddress, FileSystemId, FileSystemIdentity, NameHashKey, NodeNumber, SessionId,
    VersionRange,
};
use parking_lot::Mutex;
use rustix::fs::{FallocateFlags, FileType, FlockOperation, OFlags, fallocate, flock, fstat, fstatvfs};
use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};
use thiserror::Error;

use crate::{ArenaSummary, DirectoryError, Medium, PrivateDirectory};

/// The smallest arena: below it, a segment and its reserves leave no room worth having.
pub const ARENA_BYTES_MIN: u64 = 16 << 20;
/// The most bytes of data in a segment: a terabyte takes 4096 descriptors, and a segment can still be moved.
pub const SEGMENT_BYTES_MAX: u64 = 256 << 20;
/// The fewest bytes of data in a segment. A smaller rest of the arena's size stays unused.
const SEGMENT_BYTES_MIN: u64 = 1 << 20;
/// How long a process that was killed may hold an arena.
const HANDOVER: Duration = Duration::from_secs(1);
/// Bytes of one block's checksum at a segment's start.
const CHECKSUM_BYTES: u64 = 4;

/// Why an arena cannot be made, opened or changed.
#[derive(Debug, Error)]
pub enum ArenaError {
    /// There is already an arena in the directory.
    #[error("{0} already holds an arena; open it, or choose another directory")]
    AlreadyExists(PathBuf),
    /// The directory holds no arena.
    #[error("there is no arena here: the file ARENA is missing or is something else")]
    NotAnArena,
    /// The arena was made by another version of the program.
    #[error("the arena has format {found}, this program reads {supported}; use the matching program")]
    WrongVersion {
        /// The versions that understand the arena.
        found: VersionRange,
        /// The versions that this program reads.
        supported: VersionRange,
    },
    /// The superblock does not match its checksum.
    #[error("the arena's superblock is damaged (the file ARENA does not match its checksum)")]
    DamagedSuperblock,
    /// Another process has the arena open.
    #[error("the arena is in use by process {pid}; stop that process first")]
    InUse {
        /// The process that holds the lock; 0 if it could not be read.
        pid: u32,
    },
    /// The file system has no room for a file.
    #[error("no space left for {needed_bytes} bytes in {path}; free some, or ask for a smaller arena")]
    NoSpace {
        /// The file that did not fit.
        path: PathBuf,
        /// Its size.
        needed_bytes: u64,
    },
    /// The size asked for is below [`ARENA_BYTES_MIN`].
    #[error("an arena of {asked_bytes} bytes is too small; the smallest has {ARENA_BYTES_MIN}")]
    TooSmall {
        /// The size asked for.
        asked_bytes: u64,
    },
    /// The size asked for is more than block addresses reach.
    #[error("an arena of {asked_bytes} bytes is too large; the largest has {max_bytes}")]
    TooLarge {
        /// The size asked for.
        asked_bytes: u64,
        /// The largest size.
        max_bytes: u64,
    },
    /// The system gives no random numbers.
    #[error("the system gives no random numbers: {0}")]
    NoRandomNumbers(#[source] io::Error),
    /// Only the last segment can be removed.
    #[error("segment {0} is not the last one")]
    NotLast(u32),
    /// The segment does not exist.
    #[error("there is no segment {0}")]
    NoSegment(u32),
    /// Another user can change the arena's directory, or the system refused.
    #[error(transparent)]
    Directory(#[from] DirectoryError),
    /// The system refused; a session's file that is there already, or not at all, comes out so too.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

fn at(path: PathBuf) -> impl FnOnce(io::Error) -> ArenaError {
    move |source| ArenaError::Io { path, source }
}

/// Names a file in a directory, in an error.
fn at_file(directory: &PrivateDirectory, name: impl AsRef<OsStr>) -> impl FnOnce(io::Error) -> ArenaError {
    at(directory.path().join(name.as_ref()))
}

/// The name of the journal's file.
const JOURNAL: &str = "journal";

/// How to make an arena.
#[derive(Clone, Copy, Debug)]
pub struct ArenaOptions {
    /// Bytes of data that it shall hold.
    pub size_bytes: u64,
    /// Run the flush instructions of persistent memory on memory.
    pub emulate_pmem: bool,
    /// The arena's node. Numbers that the node gives out bear it.
    pub node: NodeNumber,
    /// The file system that the arena joins; `None` makes a new one.
    pub file_system: Option<FileSystemIdentity>,
    /// The arena's id, which a cluster has chosen; `None` draws one.
    pub id: Option<ArenaId>,
}

impl ArenaOptions {
    /// Returns the options of a new file system's first arena.
    #[must_use]
    pub const fn new(size_bytes: u64) -> Self {
        Self { size_bytes, emulate_pmem: false, node: NodeNumber::FIRST, file_system: None, id: None }
    }
}

/// A data segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentInfo {
    /// Its number.
    pub number: u32,
    /// How many blocks it has.
    pub blocks: u32,
}

impl SegmentInfo {
    /// Returns the offset of the blocks in the segment's file, in bytes; the checksums stand before.
    #[must_use]
    pub const fn data_offset(self) -> u64 {
        (self.blocks as u64 * CHECKSUM_BYTES).next_multiple_of(BLOCK_BYTES)
    }

    /// Where a block begins in the segment's file, in bytes.
    #[must_use]
    pub const fn block_offset(self, block: u32) -> u64 {
        self.data_offset() + block as u64 * BLOCK_BYTES
    }

    /// Where a block's checksum stands in the segment's file, in bytes.
    #[must_use]
    pub const fn checksum_offset(self, block: u32) -> u64 {
        block as u64 * CHECKSUM_BYTES
    }

    /// Bytes of the segment's file.
    #[must_use]
    pub const fn file_bytes(self) -> u64 {
        self.block_offset(self.blocks)
    }

    /// Returns the segment whose file has this many bytes, if one has.
    fn from_file(number: u32, file_bytes: u64) -> Option<Self> {
        // Blocks and their checksums share the file in a fixed ratio; rounding moves the answer by at most one page.
        let estimate = file_bytes / (BLOCK_BYTES + CHECKSUM_BYTES);
        (estimate.saturating_sub(1)..=estimate + 1)
            .filter_map(|blocks| Some(Self { number, blocks: u32::try_from(blocks).ok()? }))
            .find(|segment| segment.blocks > 0 && segment.file_bytes() == file_bytes)
    }
}

/// One of the files that a session has in the arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SessionFile {
    /// Its update log.
    Log,
    /// Its control page and the other memory that both sides share.
    Control,
    /// Its lease table.
    Leases,
    /// Holds on file blocks that its process has mapped; most sessions have none.
    Mapped,
}

impl SessionFile {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Log, Self::Control, Self::Leases, Self::Mapped];

    const fn extension(self) -> &'static str {
        match self {
            Self::Log => "log",
            Self::Control => "control",
            Self::Leases => "leases",
            Self::Mapped => "mapped",
        }
    }
}

/// The result of [`Arena::resize`], and its demands on the caller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resized {
    /// Segments added.
    pub added: Vec<SegmentInfo>,
    /// Segments beyond the new size, last first. They stay until the caller has emptied them and calls
    /// [`Arena::remove_segment`] for each, in this order.
    pub surplus: Vec<SegmentInfo>,
}

/// An open arena. While it is open, no other process can open it.
#[derive(Debug)]
pub struct Arena {
    directories: ArenaDirectories,
    medium: Medium,
    state: Mutex<State>,
    // Holds the advisory lock; closing it gives the arena free.
    lock: File,
}

/// The arena's directory, and those in it.
#[derive(Debug)]
struct ArenaDirectories {
    root: PrivateDirectory,
    metadata: PrivateDirectory,
    segments: PrivateDirectory,
    sessions: PrivateDirectory,
}

impl ArenaDirectories {
    /// Opens those in `root`, and makes missing ones.
    fn within(root: PrivateDirectory) -> Result<Self, ArenaError> {
        let [metadata, segments, sessions] = ["metadata", "segments", "sessions"].map(|name| root.subdirectory(name));
        let directories = Self { metadata: metadata?, segments: segments?, sessions: sessions?, root };
        // The store opens its files by their paths.
        for name in directories.metadata.names().map_err(at(directories.metadata.path().to_owned()))? {
            let found = directories.metadata.stat(&name).map_err(at_file(&directories.metadata, &name))?;
            if FileType::from_raw_mode(found.st_mode) == FileType::Symlink {
                return Err(at_file(&directories.metadata, &name)(Errno::LOOP.into()));
            }
        }
        Ok(directories)
    }
}

#[derive(Debug)]
struct State {
    summary: ArenaSummary,
    segments: Vec<SegmentInfo>,
}

impl Arena {
    /// Makes an arena in `dir`, which is created if it does not exist, and opens it.
    ///
    /// # Errors
    /// [`ArenaError`]; files made before the failure are removed again.
    pub fn create(dir: &Path, options: &ArenaOptions) -> Result<Self, ArenaError> {
        check_size(options.size_bytes)?;
        let root = PrivateDirectory::make(dir, 0o700)?;
        let lock = lock(&root)?;
        if root.stat("ARENA").is_ok() {
            return Err(ArenaError::AlreadyExists(root.path().to_owned()));
        }
        let directories = ArenaDirectories::within(root)?;
        let medium = find_medium(&directories.root, options.emulate_pmem)?;
        let summary = ArenaSummary {
            id: options.id.map_or_else(random_u64, |id| id.0),
            node: options.node,
            file_system: options.file_system.map_or_else(new_file_system, Ok)?,
            size_bytes: options.size_bytes,
            segment_bytes: SEGMENT_BYTES_MAX,
            emulated: options.emulate_pmem,
        };
        // Left-overs of a creation that was cut before it wrote the superblock belong to no arena.
        for segment in list_segments(&directories.segments)? {
            remove_file(&directories.segments, segment_name(segment.number))?;
        }
        let arena = Self { directories, medium, state: Mutex::new(State { summary, segments: Vec::new() }), lock };
        arena.add_segments(&mut arena.state.lock(), options.size_bytes)?;
        // The superblock comes last: a directory without it is no arena.
        arena.write_superblock(&summary)?;
        if let Some(parent) = arena.dir().parent() {
            File::open(parent).and_then(|parent| parent.sync_all()).map_err(at(parent.to_owned()))?;
        }
        Ok(arena)
    }

    /// Opens the arena in `dir`.
    ///
    /// # Errors
    /// [`ArenaError`].
    pub fn open(dir: &Path) -> Result<Self, ArenaError> {
        // Probe first, so that a directory that is not an arena does not get a lock file.
        Self::probe(dir)?;
        let root = PrivateDirectory::open(dir)?;
        let lock = lock(&root)?;
        let summary = Self::probe(dir)?;
        let medium = find_medium(&root, summary.emulated)?;
        let directories = ArenaDirectories::within(root)?;
        for directory in [&directories.segments, &directories.sessions] {
            for name in list(directory)? {
                if Path::new(&name).extension() == Some(OsStr::new("new")) {
                    remove_file(directory, name)?;
                }
            }
        }
        let segments = list_segments(&directories.segments)?;
        Ok(Self { directories, medium, state: Mutex::new(State { summary, segments }), lock })
    }

    /// Opens the arena in `dir`, as soon as no other process holds it.
    ///
    /// A process that was killed holds it until all of the process is gone, and so do programs that it was just
    /// starting: a second at most. `may_wait` says whether it is worth to wait.
    ///
    /// # Errors
    /// [`ArenaError`].
    pub fn open_when_free(dir: &Path, may_wait: &dyn Fn() -> bool) -> Result<Self, ArenaError> {
        let deadline = Instant::now() + HANDOVER;
        loop {
            match Self::open(dir) {
                Err(ArenaError::InUse { .. }) if Instant::now() < deadline && may_wait() => {
                    std::thread::sleep(HANDOVER / 500);
                }
                result => return result,
            }
        }
    }

    /// Reads the superblock in `dir`, without opening the arena.
    ///
    /// # Errors
    /// [`ArenaError::NotAnArena`], [`ArenaError::WrongVersion`], [`ArenaError::DamagedSuperblock`], [`ArenaError::Io`].
    pub fn probe(dir: &Path) -> Result<ArenaSummary, ArenaError> {
        let path = dir.join("ARENA");
        let mut bytes = Vec::new();
        // The directory may be any user's, and the file a pipe.
        let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
        match OpenOptions::new().read(true).custom_flags(flags.bits() as i32).open(&path) {
            // A superblock is far smaller than this bound; anything else under its name is not read into memory whole.
            Ok(file) => file.take(4096).read_to_end(&mut bytes).map_err(at(path))?,
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
                return Err(ArenaError::NotAnArena);
            }
            Err(error) => return Err(at(path)(error)),
        };
        ArenaSummary::decode(&bytes)
    }

    /// The arena's medium.
    #[must_use]
    pub fn medium(&self) -> Medium {
        self.medium
    }

    /// The superblock's content.
    #[must_use]
    pub fn summary(&self) -> ArenaSummary {
        self.state.lock().summary
    }

    /// The arena's directory.
    #[must_use]
    pub fn dir(&self) -> &Path {
        self.directories.root.path()
    }

    /// The directory of the metadata store.
    #[must_use]
    pub fn metadata_dir(&self) -> PathBuf {
        self.directories.metadata.path().to_owned()
    }

    /// The segments, in the order of their numbers.
    #[must_use]
    pub fn segments(&self) -> Vec<SegmentInfo> {
        self.state.lock().segments.clone()
    }

    /// Opens a segment's file, read-only unless `writable`: a descriptor that is handed to a session must not be
    /// writable.
    ///
    /// # Errors
    /// [`ArenaError::NoSegment`], [`ArenaError::Io`].
    pub fn segment_file(&self, number: u32, writable: bool) -> Result<File, ArenaError> {
        if !self.state.lock().segments.iter().any(|segment| segment.number == number) {
            return Err(ArenaError::NoSegment(number));
        }
        let (segments, name) = (&self.directories.segments, segment_name(number));
        let flags = if writable { OFlags::RDWR } else { OFlags::RDONLY };
        segments.open_file(&name, flags).map_err(at_file(segments, &name))
    }

    /// Changes the arena's size. Growing adds segments at once; shrinking names the segments that the caller must empty
    /// and remove.
    ///
    /// # Errors
    /// [`ArenaError::TooSmall`], [`ArenaError::NoSpace`], [`ArenaError::Io`]. The arena then has the size that it had.
    pub fn resize(&self, size_bytes: u64) -> Result<Resized, ArenaError> {
        check_size(size_bytes)?;
        let mut state = self.state.lock();
        let before = state.segments.len();
        let summary = ArenaSummary { size_bytes, ..state.summary };
        let grown = self.add_segments(&mut state, size_bytes).and_then(|()| self.write_superblock(&summary));
        if let Err(error) = grown {
            self.remove_segments_from(&mut state, before)?;
            return Err(error);
        }
        state.summary = summary;
        let mut surplus = Vec::new();
        let mut remaining = data_bytes(&state.segments);
        for segment in state.segments.iter().rev() {
            let bytes = u64::from(segment.blocks) * BLOCK_BYTES;
            // A segment that holds the new end stays whole: sizes are kept to the segment.
            if remaining - bytes < size_bytes {
                break;
            }
            remaining -= bytes;
            surplus.push(*segment);
        }
        Ok(Resized { added: state.segments[before..].to_vec(), surplus })
    }

    /// Removes the last segment, which the caller has emptied and to which nothing refers any more, durably.
    ///
    /// # Errors
    /// [`ArenaError::NotLast`], [`ArenaError::NoSegment`], [`ArenaError::Io`].
    pub fn remove_segment(&self, number: u32) -> Result<(), ArenaError> {
        let mut state = self.state.lock();
        if !state.segments.iter().any(|segment| segment.number == number) {
            return Err(ArenaError::NoSegment(number));
        }
        if state.segments.last().is_none_or(|last| last.number != number) {
            return Err(ArenaError::NotLast(number));
        }
        remove_file(&self.directories.segments, segment_name(number))?;
        state.segments.pop();
        sync_directory(&self.directories.segments)
    }

    /// Makes files of a session, one after the other, and opens them for reading and writing.
    ///
    /// Each has so many bytes, all zero, of which the first are allocated. The caller must allocate the others
    /// ([`allocate`]) before any process writes there. If the making is cut, each file is whole, empty or absent.
    ///
    /// # Errors
    /// [`ArenaError::NoSpace`]; [`ArenaError::Io`], of kind `AlreadyExists` if the session has one already. Those
    /// before it stay.
    pub fn session_files<const N: usize>(
        &self,
        session: SessionId,
        wanted: [(SessionFile, u64, u64); N],
    ) -> Result<[File; N], ArenaError> {
        let sessions = &self.directories.sessions;
        let make = |(file, length, allocated)| allocate_file(sessions, &session_name(session, file), length, allocated);
        let mut made = wanted.into_iter().map(make).collect::<Result<Vec<_>, _>>()?.into_iter();
        sync_directory(sessions)?;
        Ok(std::array::from_fn(|_| made.next().expect("one for each")))
    }

    /// Opens a file of a session for reading and writing.
    ///
    /// # Errors
    /// [`ArenaError::Io`], of kind `NotFound` if the session has no such file.
    pub fn open_session_file(&self, session: SessionId, file: SessionFile) -> Result<File, ArenaError> {
        let (sessions, name) = (&self.directories.sessions, session_name(session, file));
        sessions.open_file(&name, OFlags::RDWR).map_err(at_file(sessions, &name))
    }

    /// Removes a session's files, those that are there.
    ///
    /// # Errors
    /// [`ArenaError::Io`].
    pub fn remove_session(&self, session: SessionId) -> Result<(), ArenaError> {
        // An error with one file does not stop the others.
        let sessions = &self.directories.sessions;
        let removed = SessionFile::ALL.map(|file| remove_file(sessions, session_name(session, file)));
        let removed = removed.into_iter().collect::<Result<(), _>>();
        let removed = removed.and_then(|()| sync_directory(sessions));
        removed.or_else(|error| if self.is_gone() { Ok(()) } else { Err(error) })
    }

    /// Whether the whole arena was removed while it was in use, so that nothing of it will be found again. One that was
    /// moved will be.
    fn is_gone(&self) -> bool {
        fstat(&self.lock).is_ok_and(|found| found.st_nlink == 0) && self.directories.root.stat("ARENA").is_err()
    }

    /// The file of the node's journal; `None` if there is none.
    ///
    /// # Errors
    /// [`ArenaError::Io`].
    pub fn open_journal(&self) -> Result<Option<File>, ArenaError> {
        let root = &self.directories.root;
        match root.open_file(JOURNAL, OFlags::RDWR) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            opened => opened.map(Some).map_err(at_file(root, JOURNAL)),
        }
    }

    /// Makes the file of the node's journal, which is filled and then takes its name.
    ///
    /// `fill` gets the file, which has room for all of its zeros. So a journal is there whole or not at all.
    ///
    /// # Errors
    /// [`ArenaError`]; those of `fill`.
    pub fn make_journal<E: From<ArenaError>>(
        &self,
        bytes: u64,
        fill: impl FnOnce(&File) -> Result<(), E>,
    ) -> Result<File, E> {
        make_whole(&self.directories.root, JOURNAL, bytes, fill)
    }

    /// Removes the file of the node's journal.
    ///
    /// # Errors
    /// [`ArenaError::Io`].
    pub fn remove_journal(&self) -> Result<(), ArenaError> {
        remove_file(&self.directories.root, JOURNAL)?;
        sync_directory(&self.directories.root)
    }

    /// The sessions that have at least one file in the arena, in order.
    ///
    /// # Errors
    /// [`ArenaError::Io`].
    pub fn sessions(&self) -> Result<Vec<SessionId>, ArenaError> {
        let known = SessionFile::ALL.map(|file| Some(OsStr::new(file.extension())));
        let mut sessions: Vec<_> = list(&self.directories.sessions)?
            .iter()
            .map(Path::new)
            .filter(|path| known.contains(&path.extension()))
            .filter_map(|path| path.file_stem()?.to_str()?.parse().ok().map(SessionId))
            .collect();
        sessions.sort_unstable();
        sessions.dedup();
        Ok(sessions)
    }

    /// Adds segments until the arena holds `size_bytes`: all of them, or none. Half a growth would use up the host's
    /// file system, and leave the caller segments that it does not know.
    fn add_segments(&self, state: &mut State, size_bytes: u64) -> Result<(), ArenaError> {
        let before = state.segments.len();
        self.check_room(size_bytes.saturating_sub(data_bytes(&state.segments)))?;
        loop {
            let missing = size_bytes.saturating_sub(data_bytes(&state.segments));
            let bytes = missing.min(state.summary.segment_bytes) / BLOCK_BYTES * BLOCK_BYTES;
            if bytes < SEGMENT_BYTES_MIN {
                return Ok(());
            }
            let number = state.segments.last().map_or(0, |last| last.number + 1);
            let segment = SegmentInfo { number, blocks: (bytes / BLOCK_BYTES) as u32 };
            match make_whole(&self.directories.segments, &segment_name(number), segment.file_bytes(), |_| Ok(())) {
                Ok(_) => state.segments.push(segment),
                Err(error) => {
                    self.remove_segments_from(state, before)?;
                    return Err(error);
                }
            }
        }
    }

    /// Refuses a file that can't fit before any of it is allocated, since other programs need the host's file system
    /// meanwhile.
    fn check_room(&self, bytes: u64) -> Result<(), ArenaError> {
        let segments = &self.directories.segments;
        let host = fstatvfs(segments).map_err(|error| at(segments.path().to_owned())(error.into()))?;
        // A file system without a limit of its own (a tmpfs may be one) reports no blocks at all.
        if host.f_blocks > 0 && bytes > host.f_bavail.saturating_mul(host.f_frsize) {
            return Err(ArenaError::NoSpace { path: segments.path().to_owned(), needed_bytes: bytes });
        }
        Ok(())
    }

    /// Removes segments that no process knows of yet, last first: a crash leaves no gap in their numbers.
    fn remove_segments_from(&self, state: &mut State, first: usize) -> Result<(), ArenaError> {
        while let Some(segment) = state.segments.get(first..).and_then(<[_]>::last) {
            remove_file(&self.directories.segments, segment_name(segment.number))?;
            state.segments.pop();
        }
        Ok(())
    }

    fn write_superblock(&self, summary: &ArenaSummary) -> Result<(), ArenaError> {
        let root = &self.directories.root;
        let write = || {
            let mut file = root.open_file("ARENA.new", OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC)?;
            file.write_all(&summary.encode())?;
            file.sync_all()?;
            root.rename("ARENA.new", "ARENA")
        };
        write().map_err(|error| match error.raw_os_error().map(Errno::from_raw_os_error) {
            Some(Errno::NOSPC) => ArenaError::NoSpace { path: root.path().join("ARENA"), needed_bytes: BLOCK_BYTES },
            _ => at_file(root, "ARENA")(error),
        })?;
        sync_directory(root)
    }
}

fn data_bytes(segments: &[SegmentInfo]) -> u64 {
    segments.iter().map(|segment| u64::from(segment.blocks) * BLOCK_BYTES).sum()
}

fn segment_name(number: u32) -> String {
    format!("{number:06}.data")
}

fn session_name(session: SessionId, file: SessionFile) -> String {
    format!("{session}.{}", file.extension())
}

fn find_medium(root: &PrivateDirectory, emulate: bool) -> Result<Medium, ArenaError> {
    Medium::of_directory(root, emulate).map_err(at(root.path().to_owned()))
}

fn list(directory: &PrivateDirectory) -> Result<Vec<OsString>, ArenaError> {
    directory.names().map_err(at(directory.path().to_owned()))
}

/// The segments in the directory. A gap in the numbers ends the list, since it means files that were removed by hand.
fn list_segments(directory: &PrivateDirectory) -> Result<Vec<SegmentInfo>, ArenaError> {
    let mut segments = Vec::new();
    for number in 0.. {
        let name = segment_name(number);
        let file_bytes = match directory.stat(&name) {
            Ok(found) if FileType::from_raw_mode(found.st_mode) == FileType::RegularFile => found.st_size as u64,
            Ok(_) => return Err(at_file(directory, &name)(io::Error::other("it is no regular file"))),
            Err(error) if error.kind() == io::ErrorKind::NotFound => break,
            Err(error) => return Err(at_file(directory, &name)(error)),
        };
        let segment = SegmentInfo::from_file(number, file_bytes)
            .ok_or_else(|| at_file(directory, &name)(io::Error::other("the file's size is no segment's size")))?;
        segments.push(segment);
    }
    Ok(segments)
}

fn remove_file(directory: &PrivateDirectory, name: impl AsRef<OsStr>) -> Result<(), ArenaError> {
    directory.remove_file(&name).map_err(at_file(directory, name))
}

fn sync_directory(directory: &PrivateDirectory) -> Result<(), ArenaError> {
    directory.sync().map_err(at(directory.path().to_owned()))
}

/// Gives bytes of a file room, as far as they have none.
///
/// # Errors
/// Those of `fallocate(2)`.
pub fn allocate(file: impl AsFd, bytes: Range<u64>) -> io::Result<()> {
    match fallocate(file, FallocateFlags::KEEP_SIZE, bytes.start, bytes.end - bytes.start) {
        // Such file systems promise no space for anything, so a hole is no worse.
        Err(Errno::OPNOTSUPP) => Ok(()),
        other => Ok(other?),
    }
}

/// Makes a file of `length` bytes, of which the first `allocated` have room. After a failure no file exists.
fn allocate_file(directory: &PrivateDirectory, name: &str, length: u64, allocated: u64) -> Result<File, ArenaError> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL;
    let file = directory.open_file(name, flags).map_err(full(directory, name, allocated))?;
    let made = file.set_len(length).and_then(|()| allocate(&file, 0..allocated)).and_then(|()| file.sync_all());
    made.map(|()| file).map_err(|error| {
        // The failure that counts is the first one.
        let _ = directory.remove_file(name);
        full(directory, name, allocated)(error)
    })
}

/// Names the failure to make a file of this size.
fn full(directory: &PrivateDirectory, name: &str, needed_bytes: u64) -> impl Fn(io::Error) -> ArenaError {
    let path = directory.path().join(name);
    move |error| match error.raw_os_error().map(Errno::from_raw_os_error) {
        Some(Errno::NOSPC | Errno::DQUOT) => ArenaError::NoSpace { path: path.clone(), needed_bytes },
        _ => at(path.clone())(error),
    }
}

/// Makes a file of allocated zeros, fills it, and names it: it is there whole or not at all, after a crash too.
fn make_whole<E: From<ArenaError>>(
    directory: &PrivateDirectory,
    name: &str,
    bytes: u64,
    fill: impl FnOnce(&File) -> Result<(), E>,
) -> Result<File, E> {
    let temporary = format!("{name}.new");
    remove_file(directory, &temporary)?;
    let file = allocate_file(directory, &temporary, bytes, bytes)?;
    let named = || directory.rename(&temporary, name).map_err(full(directory, name, bytes));
    fill(&file).and_then(|()| Ok(named()?)).inspect_err(|_| _ = directory.remove_file(&temporary))?;
    sync_directory(directory)?;
    Ok(file)
}

fn lock(directory: &PrivateDirectory) -> Result<File, ArenaError> {
    let mut file = directory.open_file("lock", OFlags::RDWR | OFlags::CREATE).map_err(at_file(directory, "lock"))?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => {}
        Err(Errno::WOULDBLOCK) => {
            let mut text = String::new();
            // Only the lock counts; a process id that can't be read only makes a poorer message.
            let _ = file.read_to_string(&mut text);
            return Err(ArenaError::InUse { pid: text.trim().parse().unwrap_or(0) });
        }
        Err(error) => return Err(at_file(directory, "lock")(error.into())),
    }
    let write = |file: &mut File| {
        file.set_len(0)?;
        writeln!(file, "{}", std::process::id())
    };
    write(&mut file).map_err(at_file(directory, "lock"))?;
    Ok(file)
}

fn check_size(asked_bytes: u64) -> Result<(), ArenaError> {
    // A segment may take a rest that is smaller than the others.
    let max_bytes = (u64::from(BlockAddress::SEGMENTS_MAX) - 1) * SEGMENT_BYTES_MAX;
    match asked_bytes {
        ..ARENA_BYTES_MIN => Err(ArenaError::TooSmall { asked_bytes }),
        _ if asked_bytes > max_bytes => Err(ArenaError::TooLarge { asked_bytes, max_bytes }),
        _ => Ok(()),
    }
}

/// Draws the id and the name hash's key of a new file system.
fn new_file_system() -> Result<FileSystemIdentity, ArenaError> {
    let (mut id, mut hash_key) = ([0; 16], [0; 16]);
    for random in [&mut id, &mut hash_key] {
        getrandom(random, GetRandomFlags::empty()).map_err(|error| ArenaError::NoRandomNumbers(error.into()))?;
    }
    Ok(FileSystemIdentity { id: FileSystemId(u128::from_le_bytes(id)), hash_key: NameHashKey(hash_key) })
}

/// A random number: the standard library seeds its hashers from the system's generator.
fn random_u64() -> u64 {
    use std::hash::{BuildHasher, Hasher, RandomState};
    RandomState::new().build_hasher().finish()
}

#[cfg(test)]
mod tests;
