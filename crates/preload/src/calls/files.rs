//! Opens files, and serves calls on a file as a whole.

use std::os::fd::AsRawFd;

use ashlar_libfs::{Allocation, AttributeChange, FoundInode, NewInode, OpenAction, access_of, allocation_of};
use ashlar_types::{Access, Credentials, Errno, FileKind, Inode, InodeId, QuotaId};

use super::{Served, descriptor};
use crate::entry::arch::system_call;
use crate::entry::hook;
use crate::files::descriptors::{self, OpenFileRef, TMPFILE};
use crate::files::materialise;
use crate::files::path::{self, FinalLink, PathIntent, PathPurpose, PathStart, ResolvedPath, WalkOutcome};
use crate::files::recycled_descriptor;
use crate::files::shared_file::SharedFile;
use crate::files::unnamed_files;
use crate::memory::program_memory::{self, PathBuffer};
use crate::memory::segment_mapping;
use crate::memory::snapshot_mapping;
use crate::sessions::deferred_session;
use crate::sessions::session::{self, MountSession};

/// Flags that an open file keeps and that `F_GETFL` shows.
///
/// The others say how to open, or nothing. `O_CREAT` is set if the opening has created the file.
const KEPT_FLAGS: i32 = libc::O_ACCMODE
    | libc::O_APPEND
    | libc::O_NONBLOCK
    | libc::O_SYNC
    | libc::O_ASYNC
    | libc::O_DIRECT
    | libc::O_LARGEFILE
    | libc::O_DIRECTORY
    | libc::O_NOFOLLOW
    | libc::O_NOATIME
    | libc::O_PATH
    | TMPFILE;

/// How often an opening is tried while others make and remove the file.
///
/// Then the kernel opens it.
const OPENING_TRIES: u32 = 8;

/// How often a path is tried again that the kernel finds stale, and the pause before that.
const STALE_TRIES: u32 = 30_000;
static STALE_PAUSE: libc::timespec = libc::timespec { tv_sec: 0, tv_nsec: 1_000_000 };

/// Returns whether a call opens a file by its path.
pub(super) fn is_opening(number: i64) -> bool {
    matches!(number, libc::SYS_open | libc::SYS_openat | libc::SYS_creat)
}

/// Flags of `open` that the fast path does not serve.
const SLOW_FLAGS: i32 =
    libc::O_CREAT | libc::O_EXCL | libc::O_TRUNC | libc::O_PATH | libc::O_NOATIME | libc::O_DIRECT | TMPFILE;

/// Opens an existing file or directory on the fast path (`open`, `openat`).
///
/// `None` otherwise, and then nothing has happened.
#[inline]
pub(super) fn open_fast(number: i64, a: &[u64; 6]) -> Option<i64> {
    let (directory, address, flags) = match number {
        libc::SYS_open => (libc::AT_FDCWD, a[0], a[1] as i32),
        _ => (a[0] as i32, a[1], a[2] as i32),
    };
    if flags & SLOW_FLAGS != 0 || flags & libc::O_ACCMODE == libc::O_ACCMODE {
        return None;
    }
    let mut buffer = PathBuffer::new();
    let start = path::find_known_start(directory, program_memory::copy_path(address, &mut buffer).ok()?)?;
    let session = start.session;
    let access = access_of(flags);
    let admits = |id: InodeId, inode: &Inode| {
        let is_kernels = access.0 & Access::WRITE.0 != 0 && may_be_running(inode)
            || materialise::is_mapped_shared(session.number, id);
        !is_kernels && (flags & libc::O_DIRECTORY == 0 || inode.is_directory())
    };
    let aim = PathIntent::of_open_flags(flags);
    let (way, kind) = session.fs.open_cached_path(session, (start.directory, start.rest), aim, access, admits)?;
    let cloexec = flags & libc::O_CLOEXEC != 0;
    let Ok(descriptor) = descriptors::reserve_number(0, cloexec) else {
        session.fs.close_open(way);
        return None;
    };
    let inode = way.id();
    match descriptors::open_known_inode(session, way, kind, flags & KEPT_FLAGS) {
        Ok(file) => {
            descriptors::enter_new(&file, descriptor, cloexec);
            Some(descriptor.into())
        }
        Err(_) => {
            session.fs.close(inode);
            descriptors::give_back_number(descriptor, cloexec);
            None
        }
    }
}

/// Serves `open`, `openat`, `creat`.
pub(super) fn open(number: i64, a: &[u64; 6]) -> Served {
    let (directory, address, flags, mode) = match number {
        libc::SYS_open => (libc::AT_FDCWD, a[0], a[1] as i32, a[2] as u32),
        libc::SYS_creat => (libc::AT_FDCWD, a[0], libc::O_CREAT | libc::O_WRONLY | libc::O_TRUNC, a[1] as u32),
        _ => (a[0] as i32, a[1], a[2] as i32, a[3] as u32),
    };
    if needs_kernel(flags) {
        return Ok(None);
    }
    let mut buffer = PathBuffer::new();
    let text = program_memory::copy_path(address, &mut buffer)?;
    if let Some(descriptor) = path::descriptor_named(text) {
        return materialise::hand_over(descriptor).map(|()| None);
    }
    let Some(start) = path::find_start(directory, text)? else { return Ok(None) };
    let session = start.session;
    if flags & libc::O_PATH != 0 {
        return match open_o_path(&start, flags)? {
            Some(descriptor) => Ok(Some(descriptor.into())),
            None => open_by_kernel(number, directory, a).map(Some),
        };
    }
    let aim = PathIntent::of_open_flags(flags);
    let cloexec = flags & libc::O_CLOEXEC != 0;
    for _ in 0..OPENING_TRIES {
        let WalkOutcome::Inside(place) = path::resolve(session, start.directory, start.rest, aim)? else {
            return Ok(None);
        };
        // Reserve a number before the file is created or truncated: if no number is free, nothing happens.
        let descriptor = descriptors::reserve_number(0, cloexec)?;
        let opened = open_resolved(session, &place, flags, mode);
        if let Ok(Some(file)) = &opened {
            descriptors::enter_new(file, descriptor, cloexec);
            return Ok(Some(descriptor.into()));
        }
        descriptors::give_back_number(descriptor, cloexec);
        let is_mapped = |found: &FoundInode| materialise::is_mapped_shared(session.number, found.id);
        match opened {
            // Another process created, removed or replaced the file first: resolve the path again.
            Err(Errno::EEXIST) if flags & libc::O_EXCL == 0 => {}
            Err(Errno::ESTALE) => {}
            Err(errno) if errno != Errno::RESERVED => return Err(errno),
            // Closing the descriptor ends locks of the session, so the library must see it.
            Ok(_) if place.found.as_ref().is_some_and(is_mapped) => return open_inside_by_kernel(number, directory, a),
            _ if place.found.as_ref().is_some_and(is_plain) && !deferred_session::is_active() => {
                return open_inside_by_kernel(number, directory, a);
            }
            _ => return Ok(None),
        }
    }
    Ok(None)
}

/// Returns whether an opening waits for no other program: the file is no pipe or device.
fn is_plain(found: &FoundInode) -> bool {
    matches!(found.inode.kind, FileKind::Regular | FileKind::Directory)
}

/// Returns whether the kernel must check these flags.
///
/// Before it looks at the path, the kernel may refuse to make a directory, or a file without a name that can't be
/// written. It also opens files for requests alone, with both bits of the access mode, which are neither read nor
/// written.
const fn needs_kernel(flags: i32) -> bool {
    if flags & libc::O_PATH != 0 {
        return false;
    }
    if flags & libc::O_ACCMODE == libc::O_ACCMODE {
        return true;
    }
    if flags & TMPFILE == 0 {
        return flags & libc::O_CREAT != 0 && flags & libc::O_DIRECTORY != 0;
    }
    let is_whole = flags & libc::O_DIRECTORY != 0 && flags & libc::O_CREAT == 0;
    !is_whole || flags & libc::O_ACCMODE == libc::O_RDONLY
}

/// Opens an `O_PATH` descriptor: its file is known, and neither read nor written.
///
/// Returns `None` if the path leaves the mount.
fn open_o_path(start: &PathStart<'_>, flags: i32) -> Result<Option<i32>, Errno> {
    let session = start.session;
    let last = if flags & libc::O_NOFOLLOW != 0 { FinalLink::Keep } else { FinalLink::Follow };
    let WalkOutcome::Inside(place) = path::resolve(session, start.directory, start.rest, last)? else {
        return Ok(None);
    };
    let found = place.found.ok_or(Errno::ENOENT)?;
    if flags & libc::O_DIRECTORY != 0 && !found.inode.is_directory() {
        return Err(Errno::ENOTDIR);
    }
    session.fs.open(found.id).map_err(stale_to_missing)?;
    let file = enter_opened(
        session,
        found.id,
        found.inode.kind,
        flags & (libc::O_PATH | libc::O_DIRECTORY | libc::O_NOFOLLOW),
    )?;
    descriptors::install(&file, 0, flags & libc::O_CLOEXEC != 0).map(Some)
}

/// Turns the error of a file that is gone by now into `ENOENT`.
fn stale_to_missing(errno: Errno) -> Errno {
    if errno == Errno::ESTALE { Errno::ENOENT } else { errno }
}

/// Lets the kernel open a path, and records the descriptor.
///
/// A LibFS directory that the path begins at stays with LibFS.
fn open_by_kernel(number: i64, directory: i32, a: &[u64; 6]) -> Result<i64, Errno> {
    recycled_descriptor::close_recycled();
    hook::record_kernel_served();
    let open = |arguments: [u64; 6]| {
        // SAFETY: the program's own call, but for the number of the directory.
        unsafe { system_call(number as u64, arguments) }
    };
    // The kernel resolves a descriptor that the path names.
    let address = if number == libc::SYS_openat { a[1] } else { a[0] };
    if let Some(descriptor) = path::descriptor_at_address(address) {
        materialise::hand_over(descriptor)?;
    }
    let opened = match descriptors::file(directory).filter(|_| number == libc::SYS_openat) {
        Some(file) => crate::files::record_locks::with_real_file(&file, false, |real| {
            Ok(open([real as u64, a[1], a[2], a[3], 0, 0]))
        })?,
        None => open(*a),
    };
    if opened >= 0 {
        descriptors::record_path_base(opened as i32);
    }
    Ok(opened)
}

/// Opens a file of a mount by the kernel, as [`open_by_kernel`].
///
/// This session may have moved a directory of the path. The kernel learns of it at its next look-up, and refuses that
/// with `ESTALE` while a rename through the mount is under way, which may wait for a replica. So this waits, too.
fn open_inside_by_kernel(number: i64, directory: i32, a: &[u64; 6]) -> Served {
    let mut tries = 0;
    loop {
        let opened = open_by_kernel(number, directory, a)?;
        if opened != -i64::from(libc::ESTALE) || tries == STALE_TRIES {
            return Ok(Some(opened));
        }
        tries += 1;
        if hook::has_pending_signal() && !hook::restarts_call() {
            return Err(Errno::EINTR);
        }
        // SAFETY: the time is a constant.
        unsafe { system_call(libc::SYS_nanosleep as u64, [(&raw const STALE_PAUSE) as u64, 0, 0, 0, 0, 0]) };
    }
}

/// Opens the file that a path leads to; `None` if the kernel must.
fn open_resolved(
    session: &'static MountSession,
    place: &ResolvedPath,
    flags: i32,
    mode: u32,
) -> Result<Option<OpenFileRef>, Errno> {
    let opening = match place.opening(flags) {
        // The kernel serves devices, pipes and sockets.
        Err(Errno::ENXIO) => return Ok(None),
        opening => opening?,
    };
    let (found, access) = match opening {
        OpenAction::Create => return make(session, place, flags, mode),
        OpenAction::CreateUnnamed(directory) => return make_unnamed(session, directory, flags, mode),
        OpenAction::Existing(found, access) => (found, access),
    };
    if flags & libc::O_CREAT != 0 && path::is_guarded(session, place.directory, found)? {
        return Ok(None);
    }
    if access.0 & Access::WRITE.0 != 0 && may_be_running(&found.inode)
        || materialise::is_mapped_shared(session.number, found.id)
    {
        return Ok(None);
    }
    if flags & libc::O_DIRECT != 0 && found.inode.is_directory() {
        path::check_access(session, found, access)?;
        return Err(Errno::EINVAL);
    }
    let found = session.fs.open_for(&session.user, found.id, access)?;
    if flags & libc::O_NOATIME != 0 && session.user.uid != 0 && session.user.uid != found.inode.uid {
        session.fs.close(found.id);
        return Err(Errno::EPERM);
    }
    let file = enter_opened(session, found.id, found.inode.kind, flags)?;
    if flags & libc::O_TRUNC != 0 && found.inode.kind == FileKind::Regular {
        let strip = session.strips_set_id();
        session.fs.set_attributes(
            &session.user,
            found.id,
            &AttributeChange { size: Some(0), strip, ..AttributeChange::default() },
        )?;
    }
    Ok(Some(file))
}

/// Adopts an open file of the kernel's.
///
/// LibFS's open file, with the same inode, flags and offset, takes its place at all its numbers.
///
/// # Errors
/// Those of LibFS, and `EOPNOTSUPP` for files that stay with the kernel.
pub(crate) fn adopt_descriptor(descriptor: i32) -> Result<(), Errno> {
    let flags = materialise::kernel_flags(descriptor);
    if flags < 0 {
        return Err(Errno(-flags));
    }
    let (number, id) = session::file_of(descriptor).ok_or(Errno::EOPNOTSUPP)?;
    let session = session::by_number(number).ok_or(Errno::EOPNOTSUPP)?;
    let inode = session.fs.attributes(id)?.inode;
    let is_alone = flags & libc::O_PATH != 0;
    let is_served = is_alone || matches!(inode.kind, FileKind::Regular | FileKind::Directory);
    let is_written = flags & libc::O_ACCMODE != libc::O_RDONLY;
    // The kernel knows whether a file that it has made without a name may get one.
    let is_unnamed = flags & TMPFILE != 0 && inode.links == 0;
    let is_for_requests = flags & libc::O_ACCMODE == libc::O_ACCMODE;
    if !is_served
        || is_unnamed
        || is_for_requests
        || is_written && may_be_running(&inode)
        || materialise::is_mapped_shared(number, id)
    {
        return Err(Errno::EOPNOTSUPP);
    }
    let is_made = descriptor::has_created_file(descriptor);
    let offset = if is_alone { 0 } else { materialise::kernel_offset(descriptor)? };
    let placeholder = session::placeholder()?;
    reopen_in_session(session, id, flags)?;
    let file = enter_opened(session, id, inode.kind, flags)?;
    if is_made {
        file.set_flags(libc::O_CREAT, libc::O_CREAT);
    }
    if let Some(mut place) = file.place() {
        place.offset = offset;
    }
    for number in descriptors::adoptable_alike(descriptor) {
        if descriptors::closes_on_exec(number).is_none() {
            // The program closed it past libc.
            descriptors::forget_kernel_entry(number);
            continue;
        }
        // The placeholder replaces the kernel's open file at this number.
        materialise::duplicate_at(placeholder, number)?;
        descriptors::enter(&file, number);
    }
    Ok(())
}

/// Adopts an open file inherited at a fork, if the process has a session.
///
/// LibFS then serves it together with the processes that share it.
///
/// # Errors
/// Those of LibFS, and `EOPNOTSUPP` for files that stay with the kernel.
pub(crate) fn adopt_inherited(descriptor: i32) -> Result<(), Errno> {
    let shared = descriptors::inherited_at(descriptor).filter(SharedFile::is_of_same_user).ok_or(Errno::EOPNOTSUPP)?;
    if shared.was_handed_over() {
        return Err(Errno::EOPNOTSUPP);
    }
    let (number, id) = session::file_of(descriptor).ok_or(Errno::EOPNOTSUPP)?;
    let session = session::by_number(number).ok_or(Errno::EOPNOTSUPP)?;
    let inode = session.fs.attributes(id)?.inode;
    if materialise::is_mapped_shared(number, id) {
        return Err(Errno::EOPNOTSUPP);
    }
    let flags = materialise::kernel_flags(descriptor).max(0);
    reopen_in_session(session, id, flags)?;
    let file = enter_opened(session, id, inode.kind, flags)?;
    file.join_sharing(shared.clone());
    descriptors::replace_inherited(&shared, Some(&file));
    Ok(())
}

/// Opens a file in a session that was opened outside it.
///
/// If other sessions have narrowed the rights since, the file stays with the kernel. The kernel knows the rights that
/// it was opened with; SharedFS trusts no client's claim about them.
fn reopen_in_session(session: &MountSession, id: InodeId, flags: i32) -> Result<(), Errno> {
    let opened = match flags & libc::O_PATH {
        0 => session.fs.open_adopted(&session.user, id, access_of(flags & libc::O_ACCMODE)),
        _ => session.fs.open(id),
    };
    opened.map(drop)
}

/// Returns whether a file may be a running program, as far as its mode tells.
///
/// Such a file can't be written (`ETXTBSY`); only the kernel knows whether it runs.
fn may_be_running(inode: &Inode) -> bool {
    inode.kind == FileKind::Regular && inode.mode & 0o111 != 0
}

/// Creates the open file for an inode that the session has opened.
///
/// If that fails, the session closes the inode.
fn enter_opened(session: &'static MountSession, id: InodeId, kind: FileKind, flags: i32) -> Result<OpenFileRef, Errno> {
    descriptors::open_in_session(session, id, kind, flags & KEPT_FLAGS).inspect_err(|_| session.fs.close(id))
}

fn regular_make(mode: u32) -> NewInode<'static> {
    let umask = session::UMASK.load(std::sync::atomic::Ordering::Relaxed);
    NewInode { kind: FileKind::Regular, mode: mode & 0o7777, umask, device: 0, target: &[] }
}

fn make(
    session: &'static MountSession,
    place: &ResolvedPath,
    flags: i32,
    mode: u32,
) -> Result<Option<OpenFileRef>, Errno> {
    let made = session.fs.make_open(&session.user, place.directory, &place.name, &regular_make(mode))?;
    let file = enter_opened(session, made.id, FileKind::Regular, flags)?;
    file.set_flags(libc::O_CREAT, libc::O_CREAT);
    Ok(Some(file))
}

fn make_unnamed(
    session: &'static MountSession,
    directory: InodeId,
    flags: i32,
    mode: u32,
) -> Result<Option<OpenFileRef>, Errno> {
    // The kernel keeps track of whether the file may get a name later (`O_EXCL`: never).
    if flags & libc::O_EXCL != 0 {
        return Ok(None);
    }
    let made = session.fs.make_unnamed(&session.user, directory, &regular_make(mode))?;
    unnamed_files::record_unnamed(session, &made);
    enter_opened(session, made.id, FileKind::Regular, flags).map(Some)
}

/// Serves `truncate`, `ftruncate`.
pub(super) fn truncate(number: i64, a: &[u64; 6]) -> Served {
    let size = a[1] as i64;
    if number == libc::SYS_ftruncate {
        let Some(file) = descriptors::file(a[0] as i32) else { return Ok(None) };
        if size < 0 || !file.may_write() || file.is_directory() {
            return Err(Errno::EINVAL);
        }
        let session = file.session()?;
        if size as u64 > session::file_limit() {
            return Ok(None);
        }
        // The right to write was checked at the opening.
        return resize(session, &session.admitted, file.inode(), size as u64);
    }
    if size < 0 {
        return Err(Errno::EINVAL);
    }
    let mut buffer = PathBuffer::new();
    let text = program_memory::copy_path(a[0], &mut buffer)?;
    let Some(start) = path::find_start(libc::AT_FDCWD, text)? else { return Ok(None) };
    let session = start.session;
    let aim = FinalLink::Follow.to(PathPurpose::Write);
    let WalkOutcome::Inside(place) = path::resolve(session, start.directory, start.rest, aim)? else { return Ok(None) };
    let found = place.found.ok_or(Errno::ENOENT)?;
    if may_be_running(&found.inode)
        || size as u64 > session::file_limit()
        || !matches!(found.inode.kind, FileKind::Regular | FileKind::Directory)
    {
        return Ok(None);
    }
    resize(session, &session.user, found.id, size as u64)
}

fn resize(session: &MountSession, user: &Credentials, id: InodeId, size: u64) -> Served {
    let strip = session.strips_set_id();
    session.fs.set_attributes(user, id, &AttributeChange { size: Some(size), strip, ..AttributeChange::default() })?;
    Ok(Some(0))
}

/// Serves `fallocate`.
pub(super) fn allocate(a: &[u64; 6]) -> Served {
    let Some(file) = descriptors::file(a[0] as i32) else { return Ok(None) };
    let how = match allocation_of(a[1] as i32) {
        // The kernel refuses these before FUSE sees them, so LibFS refuses them too.
        None | Some(Allocation::Collapse | Allocation::Insert) => return Ok(None),
        Some(how) => how,
    };
    let (offset, length) = (a[2] as i64, a[3] as i64);
    if offset < 0 || length <= 0 {
        return Err(Errno::EINVAL);
    }
    if !file.may_write() {
        return Err(Errno::EBADF);
    }
    if file.is_directory() || (offset as u64).saturating_add(length as u64) > session::file_limit() {
        return Ok(None);
    }
    let session = file.session()?;
    let strip = session.strips_set_id();
    session.fs.allocate(&session.user, file.inode(), how, offset as u64, length as u64, strip)?;
    Ok(Some(0))
}

/// Serves `fstatfs`: the answer is the same for all files, except in a tree that has a quota.
pub(super) fn stat_file_system(descriptor: i32, to: u64) -> Served {
    let Some(file) = descriptors::file(descriptor) else { return Ok(None) };
    let session = file.session()?;
    let ask = |descriptor: i32| {
        let arguments = [descriptor as u64, to, 0, 0, 0, 0];
        // SAFETY: the program's own call, but for the number of the descriptor.
        Ok(Some(unsafe { system_call(libc::SYS_fstatfs as u64, arguments) }))
    };
    if session.fs.attributes(file.inode())?.inode.quota == QuotaId::NONE {
        return ask(session.root().as_raw_fd());
    }
    crate::files::record_locks::with_real_file(&file, false, ask)
}

/// Serves `posix_fadvise`, `readahead`: all data is in memory, and the kernel reports errors.
pub(super) fn advise_access(number: i64, a: &[u64; 6]) -> Served {
    let Some(file) = descriptors::file(a[0] as i32) else { return Ok(None) };
    let is_right = match number {
        libc::SYS_readahead => file.may_read() && !file.is_directory() && a[2] as i64 >= 0,
        _ => a[2] as i64 >= 0 && (libc::POSIX_FADV_NORMAL..=libc::POSIX_FADV_NOREUSE).contains(&(a[3] as i32)),
    };
    Ok(is_right.then_some(0))
}

/// Serves `mmap` of a LibFS file.
///
/// It maps a copy, the data segments, or a kernel descriptor on the same file, which lives as long as the mapping.
pub(super) fn map_file(a: &[u64; 6]) -> Served {
    if a[3] & libc::MAP_FIXED as u64 != 0 {
        segment_mapping::hand_over_part(a[0], a[1])?;
    }
    if a[3] & libc::MAP_ANONYMOUS as u64 != 0 {
        // SAFETY: the program's own call, which names no file.
        return Ok(Some(unsafe { system_call(libc::SYS_mmap as u64, *a) }));
    }
    let Some(file) = descriptors::file(a[4] as i32) else { return Ok(None) };
    if a[3] & libc::MAP_TYPE as u64 == libc::MAP_PRIVATE as u64
        && let Some(mapped) = snapshot_mapping::map_copy(&file, *a)?
    {
        return Ok(Some(mapped));
    }
    if let Some(mapped) = segment_mapping::map_segments(&file, *a)? {
        return Ok(Some(mapped));
    }
    if a[3] & libc::MAP_TYPE as u64 != libc::MAP_PRIVATE as u64 {
        materialise::hand_over_mapped(&file)?;
        // SAFETY: the program's own call.
        let mapped = unsafe { system_call(libc::SYS_mmap as u64, *a) };
        materialise::refresh_size(a[4] as i32, &file);
        return Ok(Some(mapped));
    }
    crate::files::record_locks::with_real_file(&file, false, |real| {
        let arguments = [a[0], a[1], a[2], a[3], real as u64, a[5]];
        // SAFETY: the program's own call, but for the number of the descriptor.
        Ok(Some(unsafe { system_call(libc::SYS_mmap as u64, arguments) }))
    })
}
