//! Names: makes, removes, moves and links them, and symbolic links.

use ashlar_libfs::{FoundInode, NewInode, RenameFlags};
use ashlar_types::{Errno, FileKind};

use super::Served;
use crate::entry::arch::system_call;
use crate::files::path::{self, FinalLink, PathIntent, PathPurpose, ResolvedPath, WalkOutcome};
use crate::files::{descriptors, unnamed_files};
use crate::memory::program_memory::{self, PathBuffer};
use crate::sessions::session::{self, MountSession};

const RENAME_NOREPLACE: u64 = 1;
const RENAME_EXCHANGE: u64 = 2;
const RENAME_WHITEOUT: u64 = 4;

/// Serves any call on names.
pub(super) fn serve(number: i64, a: &[u64; 6]) -> Served {
    const HERE: u64 = libc::AT_FDCWD as u64;
    match number {
        libc::SYS_mkdir => make(HERE, a[0], FileKind::Directory, a[1]),
        libc::SYS_mkdirat => make(a[0], a[1], FileKind::Directory, a[2]),
        libc::SYS_mknod => make_node(HERE, a[0], a[1]),
        libc::SYS_mknodat => make_node(a[0], a[1], a[2]),
        libc::SYS_symlink => symlink(a[0], HERE, a[1]),
        libc::SYS_symlinkat => symlink(a[0], a[1], a[2]),
        libc::SYS_rmdir => remove(HERE, a[0], libc::AT_REMOVEDIR as u64),
        libc::SYS_unlink => remove(HERE, a[0], 0),
        libc::SYS_unlinkat => remove(a[0], a[1], a[2]),
        libc::SYS_readlink => read_link(HERE, a[0], a[1], a[2]),
        libc::SYS_readlinkat => read_link(a[0], a[1], a[2], a[3]),
        libc::SYS_rename => rename((HERE, a[0]), (HERE, a[1]), 0),
        libc::SYS_renameat => rename((a[0], a[1]), (a[2], a[3]), 0),
        libc::SYS_renameat2 => rename((a[0], a[1]), (a[2], a[3]), a[4]),
        libc::SYS_link => link((HERE, a[0]), (HERE, a[1]), 0),
        libc::SYS_linkat => link((a[0], a[1]), (a[2], a[3]), a[4]),
        _ => Ok(None),
    }
}

/// Resolves a path from a directory's descriptor on.
fn resolve_name(
    directory: u64,
    address: u64,
    aim: impl Into<PathIntent>,
) -> Result<Option<(&'static MountSession, ResolvedPath)>, Errno> {
    let mut buffer = PathBuffer::new();
    let text = program_memory::copy_path(address, &mut buffer)?;
    if let Some(descriptor) = path::descriptor_named(text) {
        return crate::files::materialise::hand_over(descriptor).map(|()| None);
    }
    let Some(start) = path::find_start(directory as i32, text)? else { return Ok(None) };
    match path::resolve(start.session, start.directory, start.rest, aim)? {
        WalkOutcome::Inside(place) => Ok(Some((start.session, place))),
        WalkOutcome::Outside => Ok(None),
    }
}

/// Resolves the path of a new name.
fn resolve_new(
    directory: u64,
    address: u64,
    makes_directory: bool,
) -> Result<Option<(&'static MountSession, ResolvedPath)>, Errno> {
    let Some((session, place)) = resolve_name(directory, address, FinalLink::Keep.to(PathPurpose::Look).making())?
    else {
        return Ok(None);
    };
    place.check_new(makes_directory)?;
    Ok(Some((session, place)))
}

fn umask() -> u32 {
    session::UMASK.load(std::sync::atomic::Ordering::Relaxed)
}

fn make(directory: u64, address: u64, kind: FileKind, mode: u64) -> Served {
    let Some((session, place)) = resolve_new(directory, address, kind == FileKind::Directory)? else {
        return Ok(None);
    };
    // A new directory takes its set-id bits from its parent.
    let allowed = if kind == FileKind::Directory { 0o1777 } else { 0o7777 };
    let make = NewInode { kind, mode: mode as u32 & allowed, umask: umask(), device: 0, target: &[] };
    session.fs.make(&session.user, place.directory, &place.name, &make)?;
    Ok(Some(0))
}

fn make_node(directory: u64, address: u64, mode: u64) -> Served {
    match FileKind::from_mode(mode as u32) {
        Some(kind @ (FileKind::Regular | FileKind::Fifo | FileKind::Socket)) => make(directory, address, kind, mode),
        // The kernel checks the right to make a device, and its number.
        _ => Ok(None),
    }
}

fn symlink(target: u64, directory: u64, address: u64) -> Served {
    let mut buffer = PathBuffer::new();
    let target = program_memory::copy_path(target, &mut buffer)?;
    if target.is_empty() {
        return Err(Errno::ENOENT);
    }
    let Some((session, place)) = resolve_new(directory, address, false)? else { return Ok(None) };
    let make = NewInode { kind: FileKind::Symlink, mode: 0o777, umask: 0, device: 0, target };
    session.fs.make(&session.user, place.directory, &place.name, &make)?;
    Ok(Some(0))
}

fn remove(directory: u64, address: u64, flags: u64) -> Served {
    if flags & !(libc::AT_REMOVEDIR as u64) != 0 {
        return Err(Errno::EINVAL);
    }
    let Some((session, place)) = resolve_name(directory, address, FinalLink::Keep.to(PathPurpose::Name))? else {
        return Ok(None);
    };
    let removes_directory = flags != 0;
    if let Some(found) = &place.found {
        let is_root = removes_directory && found.id == ashlar_types::InodeId::ROOT;
        if is_root || found.inode.is_directory() && may_be_mount_point(session, found) {
            return Ok(None);
        }
    }
    session.fs.remove_at(&session.user, &place, removes_directory)?;
    Ok(Some(0))
}

/// Returns whether the kernel must remove or rename a directory.
///
/// Another file system may be mounted on it, in another namespace.
fn may_be_mount_point(session: &MountSession, found: &FoundInode) -> bool {
    session.refresh_submounts(true);
    session.submounts.contains(found.id)
}

fn read_link(directory: u64, address: u64, buffer: u64, length: u64) -> Served {
    if length as i32 <= 0 {
        return Err(Errno::EINVAL);
    }
    let mut text = PathBuffer::new();
    let text = program_memory::copy_path(address, &mut text)?;
    if let Some(descriptor) = path::descriptor_named(text) {
        // The kernel reads the link, once it has the open file.
        return crate::files::materialise::hand_over(descriptor).map(|()| None);
    }
    if text.is_empty() {
        return Ok(None);
    }
    let Some((_, place)) = resolve_name(directory, address, FinalLink::Keep)? else { return Ok(None) };
    let found = place.found.ok_or(Errno::ENOENT)?;
    if found.inode.kind != FileKind::Symlink {
        return Err(Errno::EINVAL);
    }
    let target = &found.inode.target;
    let count = target.len().min(length as u32 as usize);
    program_memory::store_bytes(buffer, &target[..count])?;
    Ok(Some(count as i64))
}

fn rename(from: (u64, u64), to: (u64, u64), flags: u64) -> Served {
    if flags & !(RENAME_NOREPLACE | RENAME_EXCHANGE | RENAME_WHITEOUT) != 0 {
        return Err(Errno::EINVAL);
    }
    let exchange = flags & RENAME_EXCHANGE != 0;
    if exchange && flags & (RENAME_NOREPLACE | RENAME_WHITEOUT) != 0 {
        return Err(Errno::EINVAL);
    }
    let aim = FinalLink::Keep.to(PathPurpose::Name);
    let Some((session, source)) = resolve_name(from.0, from.1, aim)? else { return Ok(None) };
    let Some((other, target)) = resolve_name(to.0, to.1, aim)? else { return Ok(None) };
    if session.number != other.number {
        return Err(Errno::EXDEV);
    }
    for found in [&source.found, &target.found].into_iter().flatten() {
        if found.inode.is_directory() && may_be_mount_point(session, found) {
            return Ok(None);
        }
    }
    let (no_replace, whiteout) = (flags & RENAME_NOREPLACE != 0, flags & RENAME_WHITEOUT != 0);
    let flags = RenameFlags { no_replace, exchange, whiteout, replaced: None };
    session.fs.rename_at(&session.user, &source, &target, flags)?;
    Ok(Some(0))
}

/// Finds the file that is to get another name.
///
/// That is the file of a path, or an open file, which may have no name.
fn link_source(from: (u64, u64), flags: u64) -> Result<Option<(&'static MountSession, FoundInode)>, Errno> {
    let mut buffer = PathBuffer::new();
    let text = program_memory::copy_path(from.1, &mut buffer)?;
    let last = if flags & libc::AT_SYMLINK_FOLLOW as u64 != 0 { FinalLink::Follow } else { FinalLink::Keep };
    if text.is_empty() && flags & libc::AT_EMPTY_PATH as u64 != 0 {
        return match open_source(from.0 as i32)? {
            // The super-user may name any file in this way; others may name only what they have opened.
            Some((session, found))
                if session.user.uid != 0
                    && (!names_own_files() || unnamed_files::is_of_another_process(session, &found)) =>
            {
                Err(Errno::ENOENT)
            }
            source => Ok(source),
        };
    }
    if let Some(descriptor) = path::number_named(text).filter(|_| last == FinalLink::Follow)
        && let Some(source) = open_source(descriptor)?
    {
        return Ok(Some(source));
    }
    let Some((session, source)) = resolve_name(from.0, from.1, last.to(PathPurpose::SetAttributes))? else {
        return Ok(None);
    };
    Ok(Some((session, source.found.ok_or(Errno::ENOENT)?)))
}

/// Returns the open file of a descriptor that is to get a name.
///
/// It is a LibFS descriptor, or a kernel descriptor whose file may get a name without the kernel knowing it.
fn open_source(descriptor: i32) -> Result<Option<(&'static MountSession, FoundInode)>, Errno> {
    let (session, inode) = match descriptors::file(descriptor) {
        Some(file) if file.is_in_current_session() => (file.session()?, file.inode()),
        Some(_) => return Ok(None),
        None => match unnamed_files::session_of_unnamed(descriptor) {
            Some(known) => known,
            None => return Ok(None),
        },
    };
    Ok(Some((session, session.fs.attributes(inode)?)))
}

/// Returns whether the kernel lets users name their own open files.
///
/// Since Linux 6.10 this takes no right to read everything.
fn names_own_files() -> bool {
    // SAFETY: zeros are a `utsname`, which the call fills.
    let release = unsafe {
        let mut name: libc::utsname = std::mem::zeroed();
        system_call(libc::SYS_uname as u64, [(&raw mut name) as u64, 0, 0, 0, 0, 0]);
        name.release.map(|byte| byte as u8)
    };
    let mut numbers = release
        .split(|byte| !byte.is_ascii_digit())
        .map(|digits| std::str::from_utf8(digits).ok()?.parse::<u32>().ok());
    matches!((numbers.next().flatten(), numbers.next().flatten()), (Some(major), Some(minor)) if (major, minor) >= (6, 10))
}

fn link(from: (u64, u64), to: (u64, u64), flags: u64) -> Served {
    if flags & !(libc::AT_SYMLINK_FOLLOW | libc::AT_EMPTY_PATH) as u64 != 0 {
        return Err(Errno::EINVAL);
    }
    let Some((session, found)) = link_source(from, flags)? else { return Ok(None) };
    let Some((other, place)) = resolve_new(to.0, to.1, false)? else { return Ok(None) };
    if session.number != other.number {
        return Err(Errno::EXDEV);
    }
    // The kernel checks which files of other users may be linked to (`fs.protected_hardlinks`).
    if session.user.uid != 0 && session.user.uid != found.inode.uid {
        return Ok(None);
    }
    session.fs.link(&session.user, found.id, place.directory, &place.name)?;
    Ok(Some(0))
}
