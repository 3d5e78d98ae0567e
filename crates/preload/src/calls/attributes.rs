//! Attributes: `stat` and its forms, access checks, modes, owners, times.

use std::mem::zeroed;

use ashlar_libfs::{AttributeChange, FoundInode, SetTime, stat_of};
use ashlar_types::{Access, BLOCK_BYTES, Errno, FileKind, Inode, InodeId, Timestamp};

use super::Served;
use crate::files::descriptors;
use crate::files::path::{self, FinalLink, PathIntent, PathPurpose, WalkOutcome};
use crate::memory::program_memory::{self, MemoryUse, PathBuffer, Plain};
use crate::sessions::session::MountSession;
use crate::sessions::{deferred_session, user_sessions};

/// Flags that say how `statx` gets its answer, which is always up to date.
const STATX_SYNC_FLAGS: i32 = libc::AT_NO_AUTOMOUNT | libc::AT_STATX_FORCE_SYNC | libc::AT_STATX_DONT_SYNC;
/// `STATX_BASIC_STATS` and `STATX_BTIME`.
const STATX_MASK: u32 = 0x7ff | 0x800;

/// The file that a call is about.
pub(super) struct CallFile {
    pub(super) session: &'static MountSession,
    pub(super) found: FoundInode,
}

/// Serves `stat` and `access` on the fast path.
///
/// `None` otherwise, and then nothing has happened.
#[inline]
pub(super) fn serve_fast(number: i64, a: &[u64; 6]) -> Option<i64> {
    const HERE: u64 = libc::AT_FDCWD as u64;
    match number {
        libc::SYS_fstat => store_known(a[0], 0, libc::AT_EMPTY_PATH, a[1], stat_of),
        libc::SYS_stat => store_known(HERE, a[0], 0, a[1], stat_of),
        libc::SYS_lstat => store_known(HERE, a[0], libc::AT_SYMLINK_NOFOLLOW, a[1], stat_of),
        libc::SYS_newfstatat => store_known(a[0], a[1], a[3] as i32 & !libc::AT_NO_AUTOMOUNT, a[2], stat_of),
        libc::SYS_statx if !has_invalid_flags(a) => {
            store_known(a[0], a[1], a[2] as i32 & !STATX_SYNC_FLAGS, a[4], statx_of)
        }
        libc::SYS_access => access_fast(HERE, a[0], a[1]),
        libc::SYS_faccessat => access_fast(a[0], a[1], a[2]),
        libc::SYS_faccessat2 if a[3] == 0 => access_fast(a[0], a[1], a[2]),
        _ => None,
    }
}

/// Returns whether `statx` is called with an unknown mask bit, or with two ways of synchronising.
fn has_invalid_flags(a: &[u64; 6]) -> bool {
    const BOTH: i32 = libc::AT_STATX_FORCE_SYNC | libc::AT_STATX_DONT_SYNC;
    a[2] as i32 & BOTH == BOTH || a[3] as u32 & libc::STATX__RESERVED as u32 != 0
}

/// Stores the known attributes of a file in the form that `of` gives.
///
/// A directory, a path and flags name the file.
#[inline(always)]
fn store_known<T: Plain>(
    directory: u64,
    path: u64,
    flags: i32,
    to: u64,
    of: impl FnOnce(InodeId, &Inode, u64) -> T,
) -> Option<i64> {
    let last = match flags {
        0 => FinalLink::Follow,
        libc::AT_SYMLINK_NOFOLLOW => FinalLink::Keep,
        // libc's `fstat` is this call.
        libc::AT_EMPTY_PATH if path == 0 || program_memory::load::<u8>(path) == Ok(0) => {
            let file = descriptors::file(directory as i32)?;
            let session = file.session().ok()?;
            let found = session.fs.inspect_open(file.opened()?, |id, inode| of(id, inode, session.device))?;
            return program_memory::store(to, &found).ok().map(|()| 0);
        }
        _ => return None,
    };
    let found = with_known_start(directory, path, |session, start| {
        session.fs.inspect_cached_path(session, start, last, |id, inode| of(id, inode, session.device))
    })?;
    program_memory::store(to, &found).ok().map(|()| 0)
}

/// Calls `look` with the start of a path, if it is known.
#[inline(always)]
fn with_known_start<R>(
    directory: u64,
    address: u64,
    look: impl FnOnce(&'static MountSession, (InodeId, &[u8])) -> Option<R>,
) -> Option<R> {
    let mut buffer = PathBuffer::new();
    let start = path::find_known_start(directory as i32, program_memory::copy_path(address, &mut buffer).ok()?)?;
    look(start.session, (start.directory, start.rest))
}

/// Serves `access` on the fast path.
#[inline]
fn access_fast(directory: u64, path: u64, mode: u64) -> Option<i64> {
    if mode & !7 != 0 || !user_sessions::is_real_user() {
        return None;
    }
    let access = Access(mode as u32);
    let may = with_known_start(directory, path, |session, start| {
        session.fs.check_cached_access(session, start, FinalLink::Follow, access)
    })?;
    Some(may.map_or_else(|errno| -i64::from(errno.0), |()| 0))
}

/// Serves any call on attributes.
pub(super) fn serve(number: i64, a: &[u64; 6]) -> Served {
    match number {
        libc::SYS_fstat => with_file(a[0], |subject| store_stat(subject, a[1])),
        libc::SYS_stat => with_path(libc::AT_FDCWD, a[0], FinalLink::Follow, |subject| store_stat(subject, a[1])),
        libc::SYS_lstat => with_path(libc::AT_FDCWD, a[0], FinalLink::Keep, |subject| store_stat(subject, a[1])),
        libc::SYS_newfstatat => {
            let allowed = libc::AT_SYMLINK_NOFOLLOW | libc::AT_EMPTY_PATH | libc::AT_NO_AUTOMOUNT;
            with_named(a[0], a[1], a[3], allowed, PathPurpose::Look, |subject| store_stat(subject, a[2]))
        }
        libc::SYS_statx if has_invalid_flags(a) => Err(Errno::EINVAL),
        libc::SYS_statx => {
            let allowed = libc::AT_SYMLINK_NOFOLLOW | libc::AT_EMPTY_PATH | STATX_SYNC_FLAGS;
            with_named(a[0], a[1], a[2], allowed, PathPurpose::Look, |subject| store_statx(subject, a[4]))
        }
        // The kernel checks the mode before it looks at the path.
        libc::SYS_access if a[1] as i32 & !7 != 0 => Err(Errno::EINVAL),
        libc::SYS_faccessat | libc::SYS_faccessat2 if a[2] as i32 & !7 != 0 => Err(Errno::EINVAL),
        libc::SYS_access => {
            with_path(libc::AT_FDCWD, a[0], FinalLink::Follow, |subject| check_real_access(subject, a[1], 0))
        }
        libc::SYS_faccessat => {
            with_path(a[0] as i32, a[1], FinalLink::Follow, |subject| check_real_access(subject, a[2], 0))
        }
        libc::SYS_faccessat2 => {
            let allowed = libc::AT_SYMLINK_NOFOLLOW | libc::AT_EMPTY_PATH | libc::AT_EACCESS;
            if a[1] == 0 && a[3] as i32 & !allowed == 0 {
                return Err(Errno::EFAULT);
            }
            with_named(a[0], a[1], a[3], allowed, PathPurpose::Look, |subject| {
                check_real_access(subject, a[2], a[3] as i32)
            })
        }
        libc::SYS_fchmod => with_file(a[0], |subject| set_mode(subject, a[1])),
        libc::SYS_chmod => {
            with_path(libc::AT_FDCWD, a[0], FinalLink::Follow.to(PathPurpose::SetAttributes), |subject| {
                set_mode(subject, a[1])
            })
        }
        libc::SYS_fchmodat => {
            with_path(a[0] as i32, a[1], FinalLink::Follow.to(PathPurpose::SetAttributes), |subject| {
                set_mode(subject, a[2])
            })
        }
        libc::SYS_fchmodat2 => {
            let allowed = libc::AT_SYMLINK_NOFOLLOW | libc::AT_EMPTY_PATH;
            with_named(a[0], a[1], a[3], allowed, PathPurpose::SetAttributes, |subject| set_mode(subject, a[2]))
        }
        libc::SYS_fchown => with_file(a[0], |subject| set_owner(subject, a[1], a[2])),
        libc::SYS_chown => {
            with_path(libc::AT_FDCWD, a[0], FinalLink::Follow.to(PathPurpose::SetAttributes), |subject| {
                set_owner(subject, a[1], a[2])
            })
        }
        libc::SYS_lchown => {
            with_path(libc::AT_FDCWD, a[0], FinalLink::Keep.to(PathPurpose::SetAttributes), |subject| {
                set_owner(subject, a[1], a[2])
            })
        }
        libc::SYS_fchownat => {
            let allowed = libc::AT_SYMLINK_NOFOLLOW | libc::AT_EMPTY_PATH;
            with_named(a[0], a[1], a[4], allowed, PathPurpose::SetAttributes, |subject| set_owner(subject, a[2], a[3]))
        }
        // If there is nothing to change, the kernel checks nothing.
        libc::SYS_utimensat if a[2] != 0 && changes_no_time(a[2])? => Ok(Some(0)),
        libc::SYS_utimensat if a[1] == 0 && a[0] as i32 == libc::AT_FDCWD => Ok(None),
        libc::SYS_utimensat if a[1] == 0 && a[3] != 0 => Err(Errno::EINVAL),
        libc::SYS_utimensat if a[1] == 0 && descriptors::is_o_path(a[0] as i32) => Err(Errno::EBADF),
        libc::SYS_utimensat if a[1] == 0 => with_file(a[0], |subject| set_times(subject, a[2])),
        libc::SYS_utimensat => {
            let allowed = libc::AT_SYMLINK_NOFOLLOW | libc::AT_EMPTY_PATH;
            with_named(a[0], a[1], a[3], allowed, PathPurpose::SetAttributes, |subject| set_times(subject, a[2]))
        }
        _ => Ok(None),
    }
}

/// Calls `then` with the file of a LibFS descriptor.
pub(super) fn with_file(descriptor: u64, then: impl FnOnce(&CallFile) -> Served) -> Served {
    // LibFS may adopt the descriptor with this call.
    if deferred_session::may_have_adoptable() && descriptors::is_adoptable(descriptor as i32) {
        deferred_session::count_calls(1);
    }
    let Some(file) = descriptors::file(descriptor as i32) else { return Ok(None) };
    let session = file.session()?;
    let at_hand = file.opened().and_then(|open| session.fs.attributes_open(open));
    let found = at_hand.map_or_else(|| session.fs.attributes(file.inode()), Ok)?;
    then(&CallFile { session, found })
}

/// Calls `then` with the file that a path leads to.
pub(super) fn with_path(
    directory: i32,
    address: u64,
    aim: impl Into<PathIntent>,
    then: impl FnOnce(&CallFile) -> Served,
) -> Served {
    let aim = aim.into();
    let mut buffer = PathBuffer::new();
    let text = program_memory::copy_path(address, &mut buffer)?;
    if let Some(descriptor) = path::descriptor_named(text) {
        return if aim.follows() { with_file(descriptor as u64, then) } else { Ok(None) };
    }
    let Some(start) = path::find_start(directory, text)? else { return Ok(None) };
    let session = start.session;
    let WalkOutcome::Inside(place) = path::resolve(session, start.directory, start.rest, aim)? else { return Ok(None) };
    then(&CallFile { session, found: place.found.ok_or(Errno::ENOENT)? })
}

/// Calls `then` with the file that a directory, a path and flags name.
fn with_named(
    directory: u64,
    address: u64,
    flags: u64,
    allowed: i32,
    purpose: PathPurpose,
    then: impl FnOnce(&CallFile) -> Served,
) -> Served {
    let flags = flags as i32;
    if flags & !allowed != 0 {
        return Ok(None);
    }
    // Only calls that look at a file take a null pointer for an empty path.
    let is_null = address == 0 && purpose == PathPurpose::Look;
    let is_empty = is_null || program_memory::load::<u8>(address)? == 0;
    if flags & libc::AT_EMPTY_PATH != 0 && is_empty {
        // Only the kernel knows the working directory.
        return if directory as i32 == libc::AT_FDCWD { Ok(None) } else { with_file(directory, then) };
    }
    let last = if flags & libc::AT_SYMLINK_NOFOLLOW != 0 { FinalLink::Keep } else { FinalLink::Follow };
    with_path(directory as i32, address, last.to(purpose), then)
}

fn store_stat(subject: &CallFile, address: u64) -> Served {
    program_memory::store(address, &subject.found.stat(subject.session.device))?;
    Ok(Some(0))
}

fn store_statx(subject: &CallFile, address: u64) -> Served {
    let FoundInode { id, inode } = &subject.found;
    program_memory::store(address, &statx_of(*id, inode, subject.session.device))?;
    Ok(Some(0))
}

/// Returns `statx`'s answer about an inode, on a mount whose files show `device`.
fn statx_of(id: InodeId, inode: &Inode, device: u64) -> libc::statx {
    let time = |time: Timestamp| {
        // SAFETY: zeros are a `statx_timestamp`.
        let mut value: libc::statx_timestamp = unsafe { zeroed() };
        (value.tv_sec, value.tv_nsec) = (time.seconds, time.nanoseconds);
        value
    };
    // SAFETY: zeros are a `statx`.
    let mut stat: libc::statx = unsafe { zeroed() };
    stat.stx_mask = STATX_MASK;
    stat.stx_blksize = BLOCK_BYTES as u32;
    stat.stx_nlink = inode.links;
    stat.stx_uid = inode.uid;
    stat.stx_gid = inode.gid;
    stat.stx_mode = inode.st_mode() as u16;
    stat.stx_ino = id.0;
    stat.stx_size = inode.size;
    stat.stx_blocks = inode.st_blocks();
    stat.stx_atime = time(inode.accessed);
    stat.stx_btime = time(inode.born);
    stat.stx_ctime = time(inode.changed);
    stat.stx_mtime = time(inode.modified);
    stat.stx_rdev_major = libc::major(inode.st_rdev().into());
    stat.stx_rdev_minor = libc::minor(inode.st_rdev().into());
    stat.stx_dev_major = libc::major(device);
    stat.stx_dev_minor = libc::minor(device);
    stat
}

/// Serves `access`, which checks the rights of the real user.
fn check_real_access(subject: &CallFile, mode: u64, flags: i32) -> Served {
    if mode as i32 == 0 {
        return Ok(Some(0));
    }
    if !user_sessions::is_real_user() && flags & libc::AT_EACCESS == 0 {
        return Ok(None);
    }
    path::check_access(subject.session, &subject.found, Access(mode as u32))?;
    Ok(Some(0))
}

fn apply_change(subject: &CallFile, change: &AttributeChange) -> Served {
    subject.session.fs.set_attributes(&subject.session.user, subject.found.id, change)?;
    Ok(Some(0))
}

fn set_mode(subject: &CallFile, mode: u64) -> Served {
    if subject.found.inode.kind == FileKind::Symlink {
        return Ok(None);
    }
    let mode = mode as u32 & ashlar_types::MODE_PERMISSIONS;
    apply_change(subject, &AttributeChange { mode: Some(mode), ..AttributeChange::default() })
}

fn set_owner(subject: &CallFile, uid: u64, gid: u64) -> Served {
    let given = |id: u64| Some(id as u32).filter(|id| *id != u32::MAX);
    // A call that changes neither owner nor group still updates the change time.
    apply_change(
        subject,
        &AttributeChange { uid: given(uid), gid: given(gid), strip: true, ..AttributeChange::default() },
    )
}

fn set_times(subject: &CallFile, address: u64) -> Served {
    let (accessed, modified) = if address == 0 {
        (Some(SetTime::Now), Some(SetTime::Now))
    } else {
        program_memory::check_access(address, 2 * size_of::<libc::timespec>() as u64, MemoryUse::Read)?;
        (time_at(address)?, time_at(address + size_of::<libc::timespec>() as u64)?)
    };
    if accessed.is_none() && modified.is_none() {
        return Ok(Some(0));
    }
    apply_change(subject, &AttributeChange { accessed, modified, ..AttributeChange::default() })
}

/// Returns whether a call leaves both times as they are.
fn changes_no_time(address: u64) -> Result<bool, Errno> {
    let times: [libc::timespec; 2] =
        [program_memory::load(address)?, program_memory::load(address + size_of::<libc::timespec>() as u64)?];
    Ok(times.iter().all(|time| time.tv_nsec == libc::UTIME_OMIT))
}

fn time_at(address: u64) -> Result<Option<SetTime>, Errno> {
    SetTime::from_timespec(&program_memory::load(address)?)
}
