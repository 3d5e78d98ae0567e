//! Paths: decides whether one leads into a mount, and resolves it there.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use ashlar_libfs::{FoundInode, PathCache, PathContext};
use ashlar_types::{Access, Credentials, Errno, InodeId, MODE_STICKY};
use rustix_futex_sync::{Mutex, MutexGuard};

use crate::entry::arch::system_call;
use crate::files::descriptors;
use crate::files::unnamed_files;
use crate::memory::program_memory;
use crate::sessions::deferred_session;
use crate::sessions::session::{self, MOUNTS_MAX, MountSession};

pub(crate) use ashlar_libfs::{FinalLink, PathIntent, PathPurpose, ResolvedPath, WalkOutcome};

/// The permissions of a directory that others may write.
const SHARED_DIRECTORY: u32 = 0o022;

/// The working directory, if it lies in a mount: the mount's number and the inode.
static WORKING: Mutex<Option<(u32, InodeId)>> = Mutex::new(None);
/// Whether it lies in a mount.
static IS_WORKING_INSIDE: AtomicBool = AtomicBool::new(false);
/// Whether it lies in a mount, but has not been resolved there.
static IS_WORKING_UNKNOWN: AtomicBool = AtomicBool::new(false);

/// The route of relative paths into each mount (`MountRoute::encode`), or 0.
///
/// There is none into a mount that the working directory is in.
static ROUTES: [AtomicU32; MOUNTS_MAX] = [const { AtomicU32::new(0) }; MOUNTS_MAX];
/// Whether there is any such route.
static HAS_ROUTE: AtomicBool = AtomicBool::new(false);
/// Hash of the working directory's path at that time: it may be moved.
static WORKING_PATH_HASH: AtomicU64 = AtomicU64::new(0);

/// The bytes at a path's beginning that are checked.
const START_BYTES: usize = 256;

/// Returns whether the working directory lies in a mount.
pub(crate) fn is_working_inside() -> bool {
    IS_WORKING_INSIDE.load(Ordering::Relaxed)
}

/// Sets the working directory.
pub(crate) fn set_working(place: Option<(u32, InodeId)>) {
    let mut working = WORKING.lock();
    *working = place;
    IS_WORKING_UNKNOWN.store(false, Ordering::Relaxed);
    IS_WORKING_INSIDE.store(place.is_some(), Ordering::Relaxed);
}

/// Asks the kernel for the working directory.
///
/// Its path shows its position relative to the mounts.
pub(crate) fn update_working() {
    let mut working = WORKING.lock();
    let path = working_path();
    let is_inside = path.as_deref().is_some_and(|path| mount_of_absolute(path).is_some());
    *working = None;
    WORKING_PATH_HASH.store(hash_path(path.as_deref()), Ordering::Relaxed);
    let beside =
        |mount: &[u8]| path.as_deref().filter(|_| !is_inside).and_then(|path| MountRoute::between(path, mount));
    let mut is_beside = false;
    for (mount, place) in session::mounts().iter().zip(&ROUTES) {
        let code = beside(&mount.path).map_or(0, MountRoute::encode);
        place.store(code, Ordering::Relaxed);
        is_beside |= code != 0;
    }
    HAS_ROUTE.store(is_beside, Ordering::Relaxed);
    IS_WORKING_UNKNOWN.store(is_inside, Ordering::Relaxed);
    IS_WORKING_INSIDE.store(is_inside, Ordering::Relaxed);
}

fn hash_path(path: Option<&[u8]>) -> u64 {
    let mut hasher = DefaultHasher::new();
    path.hash(&mut hasher);
    hasher.finish()
}

/// The route into a mount from a working directory outside it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct MountRoute {
    /// So many directories up,
    up: u16,
    /// then down the mount's path from this byte on.
    from: u16,
}

impl MountRoute {
    fn between(working: &[u8], mount: &[u8]) -> Option<Self> {
        // An unreachable working directory has no route.
        let working = working.strip_prefix(b"/")?.split(|&byte| byte == b'/').filter(|name| !name.is_empty());
        let names = mount.strip_prefix(b"/")?.split(|&byte| byte == b'/');
        let common: Vec<_> = working.clone().zip(names).take_while(|(one, other)| one == other).collect();
        let from = 1 + common.iter().map(|(name, _)| name.len() + 1).sum::<usize>();
        let up = working.count() - common.len();
        let is_below = from < mount.len() && up < 1 << 15;
        is_below.then(|| Some(Self { up: up as u16, from: u16::try_from(from).ok()? }))?
    }

    /// Encodes the route as a number that is not 0.
    fn encode(self) -> u32 {
        u32::from(self.up) << 16 | u32::from(self.from)
    }

    fn decode(code: u32) -> Option<Self> {
        (code != 0).then_some(Self { up: (code >> 16) as u16, from: code as u16 })
    }

    /// Returns the rest of a relative path in the mount.
    fn follow<'a>(self, path: &'a [u8], mount: &[u8]) -> Option<&'a [u8]> {
        let up = (0..self.up).try_fold(path, |rest, _| rest_below(rest, b".."))?;
        rest_below(up, mount.get(usize::from(self.from)..)?)
    }
}

/// Returns the rest of a path after these names.
///
/// The path may have redundant parts (`//`, `/./`).
fn rest_below<'a>(path: &'a [u8], names: &[u8]) -> Option<&'a [u8]> {
    names.split(|&byte| byte == b'/').try_fold(path, |mut rest, name| {
        while let Some(next) = rest.strip_prefix(b"/").or_else(|| rest.strip_prefix(b"./")) {
            rest = next;
        }
        rest.strip_prefix(name).filter(|rest| ends_name(rest))
    })
}

/// Returns whether the rest of a path ends a name.
fn ends_name(rest: &[u8]) -> bool {
    matches!(rest, [] | [b'/', ..])
}

/// Keeps other threads from the working directory, over a fork.
pub(crate) fn hold_working() -> MutexGuard<'static, Option<(u32, InodeId)>> {
    WORKING.lock()
}

fn working_path() -> Option<Vec<u8>> {
    let mut path = [0u8; program_memory::PATH_MAX];
    // SAFETY: the buffer has that many bytes.
    let length =
        unsafe { system_call(libc::SYS_getcwd as u64, [path.as_mut_ptr() as u64, path.len() as u64, 0, 0, 0, 0]) };
    path.get(..usize::try_from(length - 1).ok()?).map(<[u8]>::to_vec)
}

fn working_directory() -> Option<(&'static MountSession, InodeId)> {
    if !is_working_inside() {
        return None;
    }
    if IS_WORKING_UNKNOWN.load(Ordering::Relaxed) {
        let path = working_path()?;
        let (number, rest) = mount_of_absolute(&path)?;
        let session = session::of_mount(number)?;
        let place = match resolve(session, InodeId::ROOT, rest, FinalLink::Follow).ok()? {
            WalkOutcome::Inside(place) => place.found.map(|found| (number, found.id)),
            WalkOutcome::Outside => None,
        };
        set_working(place);
    }
    let (number, inode) = (*WORKING.lock())?;
    Some((session::of_mount(number)?, inode))
}

/// Returns the mount that an absolute path leads into as it is written, and the rest of the path there.
pub(crate) fn mount_of_absolute(path: &[u8]) -> Option<(u32, &[u8])> {
    if path.first() != Some(&b'/') {
        return None;
    }
    let in_more_words = |mount: &[u8]| rest_below(path, mount.strip_prefix(b"/")?);
    mount_as_written(path).or_else(|| if has_redundant_parts(path) { first_mount(in_more_words) } else { None })
}

/// Returns the same for a path without redundant parts.
fn mount_as_written(path: &[u8]) -> Option<(u32, &[u8])> {
    first_mount(|mount| path.strip_prefix(mount).filter(|rest| ends_name(rest)))
}

/// Returns the first mount that a path leads into, and the rest of the path.
///
/// `rest` computes the rest.
fn first_mount<'a>(rest: impl Fn(&[u8]) -> Option<&'a [u8]>) -> Option<(u32, &'a [u8])> {
    session::mounts().iter().zip(0..).find_map(|(mount, number)| Some((number, rest(&mount.path)?)))
}

/// Returns whether a path has redundant parts.
fn has_redundant_parts(path: &[u8]) -> bool {
    path.windows(2).any(|two| two == b"//") || path.windows(3).any(|three| three == b"/./")
}

/// Returns the mount that a relative path leads into, and the rest of the path.
///
/// The working directory is outside of the mount.
pub(crate) fn mount_of_relative(path: &[u8]) -> Option<(u32, &[u8])> {
    if !HAS_ROUTE.load(Ordering::Relaxed) {
        return None;
    }
    route_of_relative(path).map(|(number, _, rest)| (number, rest))
}

/// As [`mount_of_relative`], with the route.
fn route_of_relative(path: &[u8]) -> Option<(u32, MountRoute, &[u8])> {
    session::mounts().iter().zip(&ROUTES).zip(0..).find_map(|((mount, code), number)| {
        let beside = MountRoute::decode(code.load(Ordering::Relaxed))?;
        Some((number, beside, beside.follow(path, &mount.path)?))
    })
}

/// As [`mount_of_relative`], after checking that the working directory was not moved, if the route leads up.
fn mount_of_relative_now(path: &[u8]) -> Option<(u32, &[u8])> {
    let is_up = HAS_ROUTE.load(Ordering::Relaxed) && route_of_relative(path)?.1.up > 0;
    if is_up && hash_path(working_path().as_deref()) != WORKING_PATH_HASH.load(Ordering::Relaxed) {
        update_working();
    }
    mount_of_relative(path)
}

/// Returns whether a path may concern the library.
///
/// Such a path leads into a mount as it is written, or names a descriptor.
pub(crate) fn may_concern(directory: i32, address: u64) -> bool {
    if session::mounts().iter().any(|mount| leads_into_mount_at(address, &mount.path)) {
        return true;
    }
    let mut start = [0u8; START_BYTES];
    let length = program_memory::copy_start(address, &mut start[..1]);
    match start.first() {
        _ if length == 0 => {
            directory != libc::AT_FDCWD && (descriptors::is_tracked(directory) || unnamed_files::is_any_known())
        }
        Some(b'/') => {
            let wanted = session::mounts().iter().map(|mount| mount.path.len() + 1).max().unwrap_or(0);
            let wanted = wanted.max(DESCRIPTOR_PATHS[0].len() + 1).min(start.len());
            let length = program_memory::copy_start(address, &mut start[..wanted]);
            let leads = |start: &[u8]| {
                mount_of_absolute(start).is_some() || DESCRIPTOR_PATHS.iter().any(|prefix| start.starts_with(prefix))
            };
            leads(&start[..length])
                || has_redundant_parts(&start[..length]) && {
                    let length = program_memory::copy_start(address, &mut start);
                    leads(&start[..length])
                }
        }
        _ if directory == libc::AT_FDCWD => is_working_inside() || leads_in_from_outside(address),
        _ => descriptors::is_tracked(directory),
    }
}

/// Returns whether the path at an address leads into a mount as it is written.
///
/// Returns `false` if that does not show without a copy.
#[inline]
fn leads_into_mount_at(address: u64, mount: &[u8]) -> bool {
    program_memory::known_beginning(address, mount.len() + 1).is_some_and(|path| {
        let at = |index: usize| path[index].load(Ordering::Relaxed);
        // Most paths that lead elsewhere differ in the last byte.
        matches!(at(mount.len()), 0 | b'/') && (0..mount.len()).rev().all(|index| at(index) == mount[index])
    })
}

/// Returns whether the relative path at an address leads into a mount from a working directory outside.
pub(crate) fn leads_in_from_outside(address: u64) -> bool {
    let mut start = [0; START_BYTES];
    HAS_ROUTE.load(Ordering::Relaxed) && {
        let length = program_memory::copy_start(address, &mut start);
        mount_of_relative(&start[..length]).is_some()
    }
}

/// The prefixes of paths that name descriptors.
const DESCRIPTOR_PATHS: [&[u8]; 3] = [b"/proc/self/fd/", b"/dev/fd/", b"/dev/std"];

/// Returns the descriptor that a path's beginning names, and the rest of the path.
fn number_at_start(path: &[u8]) -> Option<(i32, &[u8])> {
    // Most paths begin otherwise.
    if !matches!(path, [b'/', b'd' | b'p', ..]) {
        return None;
    }
    let (number, rest) = match path {
        b"/dev/stdin" => (0, &path[path.len()..]),
        b"/dev/stdout" => (1, &path[path.len()..]),
        b"/dev/stderr" => (2, &path[path.len()..]),
        _ => {
            let name = DESCRIPTOR_PATHS.iter().find_map(|prefix| path.strip_prefix(*prefix))?;
            let (digits, rest) = name.split_at(name.iter().position(|&byte| byte == b'/').unwrap_or(name.len()));
            (std::str::from_utf8(digits).ok()?.parse().ok()?, rest)
        }
    };
    Some((number, rest))
}

/// Returns the LibFS descriptor that a path's beginning names, and the rest of the path.
fn descriptor_at_start(path: &[u8]) -> Option<(i32, &[u8])> {
    number_at_start(path).filter(|&(number, _)| descriptors::is_ours(number))
}

/// Returns the descriptor that a path names.
pub(crate) fn number_named(path: &[u8]) -> Option<i32> {
    number_at_start(path).filter(|(_, rest)| rest.is_empty()).map(|(number, _)| number)
}

/// Returns the LibFS descriptor that a path names.
pub(crate) fn descriptor_named(path: &[u8]) -> Option<i32> {
    descriptor_at_start(path).filter(|(_, rest)| rest.is_empty()).map(|(number, _)| number)
}

/// Returns the LibFS descriptor that the beginning of the path at an address names.
pub(crate) fn descriptor_at_address(address: u64) -> Option<i32> {
    with_start(address, |start| descriptor_at_start(start).map(|(number, _)| number))
}

/// Returns the LibFS descriptor that the path at an address names.
pub(crate) fn descriptor_named_at(address: u64) -> Option<i32> {
    with_start(address, descriptor_named)
}

fn with_start<R>(address: u64, look: impl FnOnce(&[u8]) -> R) -> R {
    let mut start = [0; 64];
    let length = program_memory::copy_start(address, &mut start);
    look(&start[..length])
}

/// The start of a path.
pub(crate) struct PathStart<'a> {
    /// The session.
    pub(crate) session: &'static MountSession,
    /// The directory.
    pub(crate) directory: InodeId,
    /// The path from there on.
    pub(crate) rest: &'a [u8],
}

/// Returns the start of a path; `None` if the kernel must resolve it.
///
/// # Errors
/// `ENOENT` for an empty path, `ENOTDIR` if it begins at a file.
pub(crate) fn find_start(directory: i32, path: &[u8]) -> Result<Option<PathStart<'_>>, Errno> {
    if let Some((number, rest)) = mount_of_absolute(path) {
        let session = session::of_mount(number);
        return Ok(session.map(|session| PathStart { session, directory: InodeId::ROOT, rest }));
    }
    if let Some((file, rest)) =
        descriptor_at_start(path).and_then(|(number, rest)| Some((descriptors::file(number)?, rest)))
        && file.is_in_current_session()
    {
        let session = file.session()?;
        return Ok(file.is_directory().then_some(PathStart { session, directory: file.inode(), rest }));
    }
    if path.first() == Some(&b'/') {
        return Ok(None);
    }
    let at = if directory == libc::AT_FDCWD {
        if let Some((number, rest)) = mount_of_relative_now(path) {
            let session = session::of_mount(number);
            return Ok(session.map(|session| PathStart { session, directory: InodeId::ROOT, rest }));
        }
        working_directory()
    } else {
        if deferred_session::may_have_adoptable()
            && (descriptors::is_adoptable(directory) || descriptors::is_path_base(directory))
        {
            deferred_session::count_calls(1);
        }
        match descriptors::file(directory) {
            None if descriptors::is_path_base(directory) && !path.is_empty() => {
                let known = session::file_of(directory);
                let known = known.and_then(|(number, inode)| Some((session::by_number(number)?, inode)));
                match known.map(|(session, inode)| session.fs.attributes(inode)) {
                    Some(Ok(found)) if !found.inode.is_directory() => return Err(Errno::ENOTDIR),
                    Some(Ok(_)) => known,
                    // The kernel resolves paths from a directory that is gone.
                    Some(Err(_)) | None => None,
                }
            }
            // Checked before the call's other descriptors are handed over.
            None if !path.is_empty() && is_closed(directory) => return Err(Errno::EBADF),
            None => None,
            Some(file) if !path.is_empty() && !file.is_directory() => return Err(Errno::ENOTDIR),
            Some(file) => Some((file.session()?, file.inode())),
        }
    };
    let Some((session, directory)) = at else { return Ok(None) };
    if path.is_empty() { Err(Errno::ENOENT) } else { Ok(Some(PathStart { session, directory, rest: path })) }
}

/// Returns whether a number without a record here is no open descriptor.
fn is_closed(descriptor: i32) -> bool {
    !descriptors::is_tracked(descriptor) && descriptors::closes_on_exec(descriptor).is_none()
}

/// As [`find_start`], for a path whose start is known without a message.
///
/// Returns `None` for all others.
///
/// The path leads into a mount as it is written, or begins from a LibFS directory, or from a working directory that has
/// been resolved.
#[inline]
pub(crate) fn find_known_start(directory: i32, path: &[u8]) -> Option<PathStart<'_>> {
    let (session, directory, rest) = match path.first()? {
        b'/' => {
            if descriptor_at_start(path).is_some() {
                return None;
            }
            let (number, rest) = mount_as_written(path)?;
            (session::by_number(number)?, InodeId::ROOT, rest)
        }
        _ if directory == libc::AT_FDCWD => {
            if !is_working_inside() || IS_WORKING_UNKNOWN.load(Ordering::Relaxed) {
                return None;
            }
            let (number, inode) = (*WORKING.lock())?;
            (session::by_number(number)?, inode, path)
        }
        _ => {
            let file = descriptors::file(directory).filter(|file| file.is_directory() && !file.was_handed_over())?;
            (file.session().ok()?, file.inode(), path)
        }
    };
    session.refresh_submounts(false);
    (session.is_current() && !session.submounts.is_unreachable()).then_some(PathStart { session, directory, rest })
}

/// Resolves a path as the kernel does.
///
/// # Errors
/// `ENOENT`, `ENOTDIR`, `EACCES`, `ELOOP`, `ENAMETOOLONG`.
pub(crate) fn resolve(
    session: &MountSession,
    from: InodeId,
    path: &[u8],
    aim: impl Into<PathIntent>,
) -> Result<WalkOutcome, Errno> {
    session.refresh_submounts(false);
    session.fs.walk(session, from, path, aim)
}

impl PathContext for MountSession {
    fn user(&self) -> &Credentials {
        &self.user
    }

    fn inside<'a>(&self, path: &'a [u8]) -> Option<&'a [u8]> {
        mount_of_absolute(path).filter(|(number, _)| *number == self.number).map(|(_, rest)| rest)
    }

    fn is_covered(&self, directory: InodeId) -> bool {
        self.submounts.contains(directory)
    }

    fn submount_version(&self) -> u64 {
        self.submounts.version()
    }

    fn paths(&self) -> &PathCache {
        &self.paths
    }

    fn may_follow(&self, directory: InodeId, link: &FoundInode) -> Result<bool, Errno> {
        is_guarded(self, directory, link).map(|is_guarded| !is_guarded)
    }
}

/// Returns whether the kernel may guard a file in a directory of many writers.
///
/// The settings are `fs.protected_symlinks` and `protected_regular`.
pub(crate) fn is_guarded(session: &MountSession, directory: InodeId, found: &FoundInode) -> Result<bool, Errno> {
    let directory = session.fs.attributes(directory)?.inode;
    let is_shared = directory.mode & MODE_STICKY != 0 && directory.mode & SHARED_DIRECTORY != 0;
    Ok(is_shared && found.inode.uid != session.user.uid)
}

/// Fails with `EACCES` if the session's user lacks the access.
pub(crate) fn check_access(session: &MountSession, found: &FoundInode, access: Access) -> Result<(), Errno> {
    session.fs.check_access(&session.user, found.id, access)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn relative_path_leads_into_mount_from_outside() {
        const MOUNT: &[u8] = b"/home/ann/work/mnt";
        for (working, path, rest) in [
            ("/home/ann", "work/mnt", Some("")),
            ("/home/ann", "./work//./mnt/a/b", Some("/a/b")),
            ("/home/ann/work", "mnt/", Some("/")),
            ("/home/ann/work", "mnt2/a", None),
            ("/home/ann/work", "mn", None),
            ("/home/ann/work", ".mnt/a", None),
            ("/home/ann/work", "../work/mnt/a", None),
            ("/home/ann/work/other", "../mnt/../mnt", Some("/../mnt")),
            ("/home/ann/work/other", "mnt/a", None),
            ("/home/ann/work/mnt2", "../mnt", Some("")),
            ("/home/bob", "../ann/work/mnt/a", Some("/a")),
            ("/home/bob", "..ann/work/mnt/a", None),
            ("/", "home/ann/work/mnt", Some("")),
            ("/var/lib", "../../home/ann/work/mnt/a", Some("/a")),
            ("(unreachable)/ann", "work/mnt/a", None),
            ("/home/ann/work/mnt", "a", None),
        ] {
            let beside = MountRoute::between(working.as_bytes(), MOUNT);
            assert_eq!(beside, beside.and_then(|beside| MountRoute::decode(beside.encode())));
            let found = beside.and_then(|beside| beside.follow(path.as_bytes(), MOUNT));
            assert_eq!(found, rest.map(str::as_bytes), "{path} from {working}");
        }
    }

    #[test]
    fn relative_path_is_never_absolute() {
        for path in ["", "a", "a//b", "./a/./b", "home/ann/work/mnt"] {
            assert_eq!(mount_of_absolute(path.as_bytes()), None, "{path}");
        }
    }

    #[test]
    fn redundant_path_parts_are_skipped() {
        for (path, rest) in [
            ("//mnt/./a//b", Some("//b")),
            ("/mnt//a", Some("")),
            ("/./mnt/a/", Some("/")),
            ("/mnt/a", Some("")),
            ("/mnt/.a", None),
            ("/mnt/a.", None),
            ("/mnt/../mnt/a", None),
        ] {
            assert_eq!(rest_below(path.as_bytes(), b"mnt/a"), rest.map(str::as_bytes), "{path}");
        }
    }
}
