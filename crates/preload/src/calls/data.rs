//! Reads, writes, seeks, synchronises and copies.

use ashlar_libfs::{Seek, WriteAt, check_copied_range};
use ashlar_types::{Errno, FILE_SIZE_MAX, InodeId};

use super::Served;
use crate::entry::arch::system_call;
use crate::files::descriptors::{self, OpenFileRef, PlaceGuard};
use crate::files::materialise;
use crate::memory::program_memory;
use crate::sessions::session::{self, MountSession};
use crate::sessions::{deferred_session, user_sessions};

/// The most bytes that one call transfers, as in the kernel.
const TRANSFER_MAX: usize = 0x7fff_f000;
/// The most parts of one transfer (`IOV_MAX`).
const PARTS_MAX: usize = 1024;
/// The most bytes that one call writes from several parts: the caller goes on from there.
const JOINED_MAX: usize = 64 << 20;
/// Bytes that are copied at a time between descriptors.
const COPY_BYTES: usize = 256 << 10;
/// Flags of `preadv2` and `pwritev2`, as the kernel numbers them.
const RWF_APPEND: u64 = 0x10;
const RWF_SYNC: u64 = 0x2 | 0x4;
const RWF_HARMLESS: u64 = 0x1 | 0x8;
/// Flags that directories accept too.
const RWF_OF_ALL: u64 = 0x1;
/// Makes the call write at the offset, even if the open file appends.
const RWF_NOAPPEND: u64 = 0x20;
const SYNC_RANGE_FLAGS: u32 =
    libc::SYNC_FILE_RANGE_WAIT_BEFORE | libc::SYNC_FILE_RANGE_WRITE | libc::SYNC_FILE_RANGE_WAIT_AFTER;

/// The position of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TransferPosition {
    /// At the open file's offset, which moves.
    Place,
    /// At an offset that the call names.
    Offset(u64),
}

/// The program's memory of one transfer.
enum TransferParts {
    One([libc::iovec; 1]),
    Many(Vec<libc::iovec>),
}

impl TransferParts {
    /// The one buffer of `read` and its like.
    fn single(address: u64, length: u64) -> Self {
        let iov_len = (length as usize).min(TRANSFER_MAX);
        Self::One([libc::iovec { iov_base: address as *mut libc::c_void, iov_len }])
    }

    /// The list of `readv` and its like.
    fn read_list(address: u64, count: u64) -> Result<Self, Errno> {
        if count as usize > PARTS_MAX {
            return Err(Errno::EINVAL);
        }
        let mut parts = Vec::with_capacity(count as usize);
        for index in 0..count {
            let part: libc::iovec = program_memory::load(address + index * size_of::<libc::iovec>() as u64)?;
            if part.iov_len as isize <= -1 {
                return Err(Errno::EINVAL);
            }
            parts.push(part);
        }
        let mut left = TRANSFER_MAX;
        for part in &mut parts {
            // For a list of one part, the kernel limits the length before it checks the bounds.
            if count == 1 {
                part.iov_len = part.iov_len.min(left);
            }
            program_memory::check_bounds(part.iov_base as u64, part.iov_len as u64)?;
            part.iov_len = part.iov_len.min(left);
            left -= part.iov_len;
        }
        Ok(Self::Many(parts))
    }

    fn as_slice(&self) -> &[libc::iovec] {
        match self {
            Self::One(parts) => parts,
            Self::Many(parts) => parts,
        }
    }
}

/// Returns whether so many bytes fit from an offset on.
///
/// A range that ends beyond all offsets is invalid, as is one that begins before the first.
#[inline]
const fn is_valid_range(offset: u64, bytes: u64) -> bool {
    (offset | bytes | offset.wrapping_add(bytes)) as i64 >= 0
}

/// Serves `read`, `write`, `pread` and `pwrite` on the fast path.
///
/// `None` otherwise, and then nothing has happened.
#[inline]
pub(super) fn serve_fast(number: i64, a: &[u64; 6]) -> Option<i64> {
    let writes = matches!(number, libc::SYS_write | libc::SYS_pwrite64);
    let has_offset = matches!(number, libc::SYS_pread64 | libc::SYS_pwrite64);
    let file = descriptors::file(a[0] as i32)?;
    let (open, flags) = (file.opened()?, file.flags());
    let needed = if writes { libc::O_RDONLY } else { libc::O_WRONLY };
    if flags & libc::O_PATH != 0 || flags & libc::O_ACCMODE == needed || file.was_handed_over() {
        return None;
    }
    let session = file.session().ok()?;
    let mut place = if has_offset { None } else { Some(file.place()?) };
    let offset = place.as_ref().map_or(a[3], |place| place.offset);
    let length = (a[2] as usize).min(TRANSFER_MAX);
    let count = if writes {
        if flags & (libc::O_SYNC | libc::O_DSYNC) != 0 || !is_valid_range(offset, a[2]) {
            return None;
        }
        let at = if flags & libc::O_APPEND != 0 { WriteAt::End } else { WriteAt::Offset(offset) };
        let data = program_memory::known_bytes(a[1], length)?;
        // A process that reserves a part of a shared file must write it, but the fast path may find that it can't.
        if matches!(at, WriteAt::Offset(_)) && place.as_ref().is_some_and(PlaceGuard::is_shared) {
            return None;
        }
        let written = session.fs.write_open(open, at, data, session.strips_set_id(), session::file_limit())?;
        if let Some(place) = &mut place {
            place.offset = written.offset + written.bytes as u64;
        }
        written.bytes
    } else {
        if !is_valid_range(offset, a[2]) {
            return None;
        }
        program_memory::check_bounds(a[1], a[2]).ok()?;
        let count =
            session.fs.read_open(open, offset, length, |length| program_memory::known_bytes_mut(a[1], length))?;
        if let Some(place) = &mut place {
            place.offset += count as u64;
        }
        count
    };
    Some(count as i64)
}

/// Returns whether a transfer takes place at an offset that the call names.
const fn names_offset(number: i64, a: &[u64; 6]) -> bool {
    match number {
        libc::SYS_pread64 | libc::SYS_pwrite64 | libc::SYS_preadv | libc::SYS_pwritev => true,
        libc::SYS_preadv2 | libc::SYS_pwritev2 => a[3] != u64::MAX,
        _ => false,
    }
}

/// Returns whether a transfer is to take place before the first byte.
///
/// The kernel checks this before the descriptor.
pub(super) const fn is_before_start(number: i64, a: &[u64; 6]) -> bool {
    names_offset(number, a) && a[3] as i64 <= -1
}

/// Serves all forms of `read` and `write`.
pub(super) fn transfer(number: i64, a: &[u64; 6]) -> Served {
    if is_before_start(number, a) {
        return Err(Errno::EINVAL);
    }
    let Some(file) = descriptors::file(a[0] as i32) else { return Ok(None) };
    let writes = matches!(
        number,
        libc::SYS_write | libc::SYS_pwrite64 | libc::SYS_writev | libc::SYS_pwritev | libc::SYS_pwritev2
    );
    if !(if writes { file.may_write() } else { file.may_read() }) {
        return Err(Errno::EBADF);
    }
    let (parts, bytes) = match number {
        libc::SYS_read | libc::SYS_pread64 | libc::SYS_write | libc::SYS_pwrite64 => {
            program_memory::check_bounds(a[1], a[2])?;
            (TransferParts::single(a[1], a[2]), a[2])
        }
        _ => {
            let parts = TransferParts::read_list(a[1], a[2])?;
            let bytes = parts.as_slice().iter().map(|part| part.iov_len as u64).sum();
            if bytes == 0 {
                return Ok(Some(0));
            }
            (parts, bytes)
        }
    };
    let at = if names_offset(number, a) { TransferPosition::Offset(a[3]) } else { TransferPosition::Place };
    let start = match at {
        TransferPosition::Offset(offset) => offset,
        TransferPosition::Place => match file.place() {
            Some(place) => place.offset,
            None => return Ok(None),
        },
    };
    if !is_valid_range(start, bytes) {
        return Err(Errno::EINVAL);
    }
    let flags = if matches!(number, libc::SYS_preadv2 | libc::SYS_pwritev2) { a[5] } else { 0 };
    if file.is_directory() {
        return Err(if flags & !RWF_OF_ALL == 0 { Errno::EISDIR } else { Errno::EOPNOTSUPP });
    }
    if flags & !(RWF_APPEND | RWF_NOAPPEND | RWF_SYNC | RWF_HARMLESS) != 0 {
        return Err(Errno::EOPNOTSUPP);
    }
    if flags & (RWF_APPEND | RWF_NOAPPEND) == RWF_APPEND | RWF_NOAPPEND {
        return Err(Errno::EINVAL);
    }
    if writes { write(&file, at, parts.as_slice(), flags) } else { read(&file, at, parts.as_slice()) }
}

fn read(file: &OpenFileRef, at: TransferPosition, parts: &[libc::iovec]) -> Served {
    let session = file.session()?;
    if let TransferPosition::Offset(offset) = at {
        return read_parts(session, file.inode(), offset, parts).map(|count| Some(count as i64));
    }
    let Some(mut place) = file.place() else { return Ok(None) };
    let count = read_parts(session, file.inode(), place.offset, parts)?;
    place.offset += count as u64;
    Ok(Some(count as i64))
}

fn read_parts(session: &MountSession, inode: InodeId, offset: u64, parts: &[libc::iovec]) -> Result<usize, Errno> {
    let mut done = 0;
    for part in parts {
        let at = offset + done as u64;
        // The file fills no more of the buffer than this: the rest of the buffer need not be mapped.
        let length = session.fs.readable_bytes(inode, at, part.iov_len)?;
        let count = match program_memory::first_bytes_mut(part.iov_base as u64, length) {
            Ok(buffer) => session.fs.read(inode, at, buffer),
            Err(errno) => Err(errno),
        };
        match count {
            Ok(count) => {
                done += count;
                // The file or the buffer ends there.
                if count < part.iov_len {
                    break;
                }
            }
            Err(errno) if done == 0 => return Err(errno),
            Err(_) => break,
        }
    }
    Ok(done)
}

fn write(file: &OpenFileRef, at: TransferPosition, parts: &[libc::iovec], flags: u64) -> Served {
    let session = file.session()?;
    let appends = file.flags() & libc::O_APPEND != 0 && flags & RWF_NOAPPEND == 0 || flags & RWF_APPEND != 0;
    let is_synchronous = file.flags() & (libc::O_SYNC | libc::O_DSYNC) != 0 || flags & RWF_SYNC != 0;
    let length = parts.iter().map(|part| part.iov_len as u64).sum();
    let mut place = match at {
        TransferPosition::Offset(_) => None,
        TransferPosition::Place => loop {
            let Some(place) = file.place() else { return Ok(None) };
            // The place is held only while other processes wait for it.
            if appends || place.reserve(place.offset.saturating_add(length)) {
                break Some(place);
            }
        },
    };
    let offset = match (at, &place) {
        (TransferPosition::Offset(offset), _) => offset,
        (TransferPosition::Place, place) => place.as_ref().map_or(0, |place| place.offset),
    };
    let count = write_parts(session, file.inode(), if appends { None } else { Some(offset) }, parts, &mut place)?;
    if is_synchronous && count > 0 {
        session.fs.sync_inode(file.inode())?;
    }
    Ok(Some(count as i64))
}

/// Writes parts in a row, and moves the open file's offset past them.
///
/// Without an offset, they go to the file's end.
fn write_parts(
    session: &MountSession,
    inode: InodeId,
    offset: Option<u64>,
    parts: &[libc::iovec],
    place: &mut Option<PlaceGuard>,
) -> Result<usize, Errno> {
    let joined = if parts.len() > 1 { Some(join_parts(parts)?) } else { None };
    let data = match (&joined, parts.first()) {
        (Some(joined), _) => &joined[..],
        (None, Some(part)) => program_memory::first_bytes(part.iov_base as u64, part.iov_len)?,
        (None, None) => &[],
    };
    if data.is_empty() {
        return Ok(0);
    }
    write_bytes(session, inode, offset.map_or(WriteAt::End, WriteAt::Offset), data, place.as_mut())
}

/// Writes bytes in memory, and moves the open file's offset past them.
fn write_bytes(
    session: &MountSession,
    inode: InodeId,
    at: WriteAt,
    data: &[u8],
    place: Option<&mut PlaceGuard>,
) -> Result<usize, Errno> {
    let limit = session::file_limit();
    let written = session.fs.write_within(&session.admitted, inode, at, data, session.strips_set_id(), limit);
    let written = written.inspect_err(|errno| signal_limit(*errno, limit))?;
    if let Some(place) = place {
        place.offset = written.offset + written.bytes as u64;
    }
    Ok(written.bytes)
}

/// Joins the bytes of several parts: one call is one write, so no reader sees a part of it.
fn join_parts(parts: &[libc::iovec]) -> Result<Vec<u8>, Errno> {
    let mut joined = Vec::new();
    joined
        .try_reserve_exact(parts.iter().map(|part| part.iov_len).sum::<usize>().min(JOINED_MAX))
        .map_err(|_| Errno::ENOMEM)?;
    for part in parts {
        let length = part.iov_len.min(JOINED_MAX - joined.len());
        match program_memory::first_bytes(part.iov_base as u64, length) {
            Ok(bytes) => {
                joined.extend_from_slice(bytes);
                if bytes.len() < length {
                    break;
                }
            }
            Err(errno) if joined.is_empty() => return Err(errno),
            Err(_) => break,
        }
    }
    Ok(joined)
}

/// Sends `SIGXFSZ` to a process that writes at or beyond its limit.
///
/// A process that writes beyond the largest size of a file gets only the error.
fn signal_limit(errno: Errno, limit: u64) {
    if errno == Errno::EFBIG && limit <= FILE_SIZE_MAX {
        // SAFETY: the calls take only numbers.
        unsafe {
            let process = system_call(libc::SYS_getpid as u64, [0; 6]) as u64;
            let thread = system_call(libc::SYS_gettid as u64, [0; 6]) as u64;
            system_call(libc::SYS_tgkill as u64, [process, thread, libc::SIGXFSZ as u64, 0, 0, 0]);
        }
    }
}

/// Serves `lseek` on the fast path, if the new offset needs nothing but the current one.
#[inline]
pub(super) fn seek_fast(a: &[u64; 6]) -> Option<i64> {
    let file = descriptors::file(a[0] as i32).filter(|file| !file.is_o_path())?;
    file.session().ok()?;
    let mut place = file.place()?;
    let to = match a[2] as i32 {
        libc::SEEK_SET => a[1] as i64,
        libc::SEEK_CUR => (place.offset as i64).checked_add(a[1] as i64)?,
        _ => return None,
    };
    if to < 0 {
        return None;
    }
    place.offset = to as u64;
    Some(to)
}

/// Serves `lseek`.
pub(super) fn seek(a: &[u64; 6]) -> Served {
    let Some(file) = descriptors::file(a[0] as i32) else { return Ok(None) };
    let (offset, whence) = (a[1] as i64, a[2] as i32);
    let Some(mut place) = file.place() else { return Ok(None) };
    let session = file.session()?;
    let size = || session.fs.attributes(file.inode()).map(|found| found.inode.size as i64);
    let from = |base: i64| base.checked_add(offset).ok_or(Errno::EINVAL);
    let to = match whence {
        libc::SEEK_SET => offset,
        libc::SEEK_CUR => from(place.offset as i64)?,
        // The end of a directory's listing is unknown before it is read.
        libc::SEEK_END if file.is_directory() => return Err(Errno::EINVAL),
        libc::SEEK_END => from(size()?)?,
        libc::SEEK_DATA | libc::SEEK_HOLE if file.is_directory() => return Err(Errno::ENXIO),
        libc::SEEK_DATA | libc::SEEK_HOLE if offset < 0 => return Err(Errno::ENXIO),
        libc::SEEK_DATA => session.fs.seek(file.inode(), Seek::Data, offset as u64)? as i64,
        libc::SEEK_HOLE => session.fs.seek(file.inode(), Seek::Hole, offset as u64)? as i64,
        _ => return Err(Errno::EINVAL),
    };
    if to < 0 {
        return Err(Errno::EINVAL);
    }
    place.offset = to as u64;
    Ok(Some(to))
}

/// Serves `fsync` and its like: commits the changes of all sessions to the file.
///
/// As the log has one order, it commits all changes of this session too.
pub(super) fn sync(a: &[u64; 6]) -> Served {
    let Some(file) = descriptors::file(a[0] as i32) else { return Ok(None) };
    file.session()?.fs.sync_inode(file.inode())?;
    Ok(Some(0))
}

/// Serves `syncfs`, even on a kernel descriptor: the kernel does not pass the call on to a mount.
pub(super) fn sync_file_system(a: &[u64; 6]) -> Served {
    let descriptor = a[0] as i32;
    if deferred_session::may_have_adoptable() && descriptors::is_adoptable(descriptor) {
        deferred_session::end_deferral();
    }
    let Some(file) = descriptors::file(descriptor) else {
        // SAFETY: the program's own call.
        let done = unsafe { system_call(libc::SYS_syncfs as u64, *a) };
        let device = if done == 0 { session::device_of(descriptor) } else { None };
        if let Some(session) = session::all().find(|session| Some(session.device) == device) {
            session.fs.sync_all()?;
        }
        return Ok(Some(done));
    };
    file.session()?.fs.sync_all()?;
    Ok(Some(0))
}

/// Serves `sync_file_range`; the kernel reports an invalid range.
pub(super) fn sync_range(a: &[u64; 6]) -> Served {
    let end = (a[1] as i64).checked_add(a[2] as i64);
    let is_right = a[1] as i64 >= 0 && a[2] as i64 >= 0 && end.is_some() && a[3] as u32 & !SYNC_RANGE_FLAGS == 0;
    if is_right { sync(a) } else { Ok(None) }
}

/// Serves `sync` for all file systems.
///
/// The kernel's come first: they give a mount the data written to its mapped files.
pub(super) fn sync_all() -> Served {
    // SAFETY: the call takes no arguments.
    unsafe { system_call(libc::SYS_sync as u64, [0; 6]) };
    for session in session::all().chain(user_sessions::sessions_aside()) {
        // `sync` has no way to fail.
        let _ = session.fs.sync_all();
    }
    Ok(Some(0))
}

/// Returns the offset at an address, or `None` if the call gave no address.
fn offset_at(address: u64) -> Result<Option<u64>, Errno> {
    if address == 0 {
        return Ok(None);
    }
    let offset: i64 = program_memory::load(address)?;
    if offset < 0 { Err(Errno::EINVAL) } else { Ok(Some(offset as u64)) }
}

/// Returns the access mode and flags of a kernel's open file.
///
/// Returns `None` if the descriptor is closed or an `O_PATH` one.
fn open_flags(descriptor: i32) -> Option<i32> {
    let flags = materialise::kernel_flags(descriptor);
    (flags >= 0 && flags & libc::O_PATH == 0).then_some(flags)
}

/// A kernel's open file beside one of LibFS's.
pub(super) struct KernelFile {
    /// It is on another mount.
    pub(super) is_apart: bool,
    /// It is a regular file.
    pub(super) is_regular: bool,
    flags: i32,
}

impl KernelFile {
    /// Returns the kernel's open file of two descriptors, if LibFS serves the other one.
    pub(super) fn beside_ours(one: i32, other: i32) -> Option<Self> {
        let (ours, kernels) = if descriptors::is_ours(one) { (one, other) } else { (other, one) };
        if descriptors::is_ours(kernels) {
            return None;
        }
        let flags = open_flags(kernels)?;
        let (device, is_regular) = session::device_and_kind_of(kernels)?;
        Some(Self { is_apart: device != descriptors::file(ours)?.session().ok()?.device, is_regular, flags })
    }

    /// Returns whether the flags of both files allow a copy; one of them is the kernel's.
    pub(super) fn may_be_copied(&self, from: Option<&OpenFileRef>, to: Option<&OpenFileRef>) -> bool {
        let flags = |file: Option<&OpenFileRef>| file.map_or(self.flags, |file| file.flags());
        may_be_copied(flags(from), flags(to))
    }
}

/// Returns whether a file may be copied over another, if they were opened with these flags.
pub(super) const fn may_be_copied(from: i32, to: i32) -> bool {
    (from | to) & libc::O_PATH == 0
        && from & libc::O_ACCMODE != libc::O_WRONLY
        && to & libc::O_ACCMODE != libc::O_RDONLY
        && to & libc::O_APPEND == 0
}

/// Serves `copy_file_range` between files of one session.
pub(super) fn copy_range(a: &[u64; 6]) -> Served {
    let is_open = |descriptor: i32| descriptors::is_ours(descriptor) || open_flags(descriptor).is_some();
    if !is_open(a[0] as i32) || !is_open(a[2] as i32) {
        return Err(Errno::EBADF);
    }
    let (from_given, to_given) = (given_offset(a[1])?, given_offset(a[3])?);
    if a[5] != 0 {
        return Err(Errno::EINVAL);
    }
    let (from, to) = (descriptors::file(a[0] as i32), descriptors::file(a[2] as i32));
    if [&from, &to].into_iter().flatten().any(OpenFileRef::is_directory) {
        return Err(Errno::EISDIR);
    }
    let (from, to) = match (from, to) {
        (Some(from), Some(to)) if from.session()?.number == to.session()?.number => (from, to),
        (from, to) => {
            // The kernel would report different mounts too, and the program then copies without this call. So there is
            // no reason to hand the LibFS file over.
            let other = KernelFile::beside_ours(a[0] as i32, a[2] as i32);
            let Some(other) = other.filter(|other| other.is_apart && other.is_regular) else { return Ok(None) };
            let may = other.may_be_copied(from.as_ref(), to.as_ref());
            return Err(if may { Errno::EXDEV } else { Errno::EBADF });
        }
    };
    if !may_be_copied(from.flags(), to.flags()) {
        return Err(Errno::EBADF);
    }
    let place = |file: &OpenFileRef| file.place().map(|place| place.offset);
    let (Some(from_start), Some(to_start)) = (from_given.or_else(|| place(&from)), to_given.or_else(|| place(&to)))
    else {
        return Ok(None);
    };
    check_copied_range(from_start, to_start, a[4])?;
    copy_bytes(&from, a[1], &to, a[3], a[4])
}

/// Returns the offset at the address that `copy_file_range` got; `None` if the address is null.
fn given_offset(address: u64) -> Result<Option<u64>, Errno> {
    if address == 0 {
        Ok(None)
    } else {
        program_memory::load::<i64>(address).map(|offset| Some(offset.cast_unsigned()))
    }
}

/// Copies so many bytes between files of one session.
///
/// For each file the call gives the address of an offset, or null; then the open file's offset counts.
fn copy_bytes(from: &OpenFileRef, from_address: u64, to: &OpenFileRef, to_address: u64, bytes: u64) -> Served {
    let (from_given, to_given) = (offset_at(from_address)?, offset_at(to_address)?);
    let place = |file: &OpenFileRef| file.place().map(|place| place.offset);
    let (Some(from_offset), Some(to_offset)) = (from_given.or_else(|| place(from)), to_given.or_else(|| place(to)))
    else {
        return Ok(None);
    };
    let session = from.session()?;
    let size = session.fs.attributes(from.inode())?.inode.size;
    let length = (bytes as usize).min(TRANSFER_MAX) as u64;
    let length = length.min(size.saturating_sub(from_offset));
    if length == 0 {
        return Ok(Some(0));
    }
    let (user, strip, limit) = (&session.admitted, session.strips_set_id(), session::file_limit());
    let (input, output) = (from.inode(), to.inode());
    let copied = session.fs.copy_range_within(user, input, from_offset, output, to_offset, length, strip, limit);
    let copied = copied.inspect_err(|errno| signal_limit(*errno, limit))?;
    store_offset(from, from_address, from_given, from_offset + copied)?;
    store_offset(to, to_address, to_given, to_offset + copied)?;
    if to.flags() & (libc::O_SYNC | libc::O_DSYNC) != 0 && copied > 0 {
        session.fs.sync_inode(output)?;
    }
    Ok(Some(copied as i64))
}

/// Stores the offset after a copy: at the address that the call gave, or in the open file.
fn store_offset(file: &OpenFileRef, address: u64, given: Option<u64>, offset: u64) -> Result<(), Errno> {
    match given {
        Some(_) => program_memory::store(address, &(offset as i64)),
        None => {
            if let Some(mut place) = file.place() {
                place.offset = offset;
            }
            Ok(())
        }
    }
}

/// Serves `sendfile` from a LibFS file to any descriptor, and from any regular file to a LibFS file.
pub(super) fn send_file(a: &[u64; 6]) -> Served {
    if a[2] != 0 {
        program_memory::load::<i64>(a[2])?;
    }
    let sent = match (descriptors::file(a[1] as i32), descriptors::file(a[0] as i32)) {
        (Some(from), _) if from.is_o_path() => Err(Errno::EBADF),
        (Some(from), Some(to)) if !to.may_write() || to.is_o_path() => check_sent(&from, a).and(Err(Errno::EBADF)),
        (None, Some(to)) if to.is_o_path() => Ok(None),
        (Some(from), None) => send_out(&from, a),
        (from, Some(to)) => send_in(from.as_ref(), &to, a),
        (None, None) => Ok(None),
    };
    // The kernel stores the offset after each try, even after a failed one. If LibFS leaves the call to the kernel, the
    // kernel does so itself.
    if a[2] != 0 && !matches!(sent, Ok(None) | Err(Errno::RESERVED)) {
        program_memory::check_access(a[2], size_of::<i64>() as u64, program_memory::MemoryUse::Write)?;
    }
    sent
}

/// Fails if the file that `sendfile` reads or its offset is invalid.
///
/// The kernel checks these first.
fn check_sent(from: &OpenFileRef, a: &[u64; 6]) -> Result<(), Errno> {
    if !from.may_read() {
        return Err(Errno::EBADF);
    }
    let start = offset_at(a[2])?.or_else(|| from.place().map(|place| place.offset));
    if start.is_none_or(|start| is_valid_range(start, a[3])) { Ok(()) } else { Err(Errno::EINVAL) }
}

fn send_out(from: &OpenFileRef, a: &[u64; 6]) -> Served {
    // A descriptor that appends is an error, which the kernel reports.
    let appends = || materialise::kernel_flags(a[0] as i32) & libc::O_APPEND != 0;
    check_sent(from, a)?;
    if from.is_directory() || appends() {
        return Ok(None);
    }
    let given = offset_at(a[2])?;
    let session = from.session()?;
    // The place is not held while the other side is waited for, as in the kernel: the other side may need it.
    let Some(start) = given.or_else(|| from.place().map(|place| place.offset)) else { return Ok(None) };
    let mut buffer = vec![0; COPY_BYTES.min(a[3] as usize)];
    let count = session.fs.read(from.inode(), start, &mut buffer)?;
    // Bytes that the other side does not take are read again at the next call; a short count is no error.
    // SAFETY: the buffer is this function's, and has that many bytes.
    let sent = unsafe { system_call(libc::SYS_write as u64, [a[0], buffer.as_ptr() as u64, count as u64, 0, 0, 0]) };
    if sent > 0 {
        store_offset(from, a[2], given, start + sent as u64)?;
    }
    Ok(Some(sent))
}

/// Serves `sendfile` into a LibFS file.
///
/// The source is a file of the same session, or a regular file of the kernel's.
fn send_in(from: Option<&OpenFileRef>, to: &OpenFileRef, a: &[u64; 6]) -> Served {
    // The kernel reports the errors. If other processes share the place, they would have to wait for the other side.
    let is_plain = to.may_write() && to.flags() & (libc::O_APPEND | libc::O_SYNC | libc::O_DSYNC) == 0;
    if !is_plain || to.is_directory() || to.place().is_none_or(|place| place.is_shared()) {
        return Ok(None);
    }
    let session = to.session()?;
    // The kernel cuts the length off before it looks where the bytes go.
    let takes = || to.place().is_none_or(|place| is_valid_range(place.offset, a[3].min(TRANSFER_MAX as u64)));
    if let Some(from) = from {
        // Within one file, the copy overwrites what it may read again.
        let is_other = from.session()?.number == session.number && from.inode() != to.inode();
        let is_plain = from.may_read() && !from.is_directory() && is_other;
        check_sent(from, a)?;
        if !takes() {
            return Err(Errno::EINVAL);
        }
        return if is_plain { copy_bytes(from, a[2], to, 0, a[3]) } else { Ok(None) };
    }
    let input = a[1] as i32;
    let is_fit = |other: KernelFile| {
        other.is_regular && other.flags & libc::O_ACCMODE != libc::O_WRONLY && other.flags & libc::O_DIRECT == 0
    };
    if !KernelFile::beside_ours(a[0] as i32, input).is_some_and(is_fit) {
        return Ok(None);
    }
    let given = offset_at(a[2])?;
    // SAFETY: it asks for the open file's offset.
    let stands = || unsafe { system_call(libc::SYS_lseek as u64, [a[1], 0, libc::SEEK_CUR as u64, 0, 0, 0]) } as u64;
    let start = given.unwrap_or_else(stands);
    if start as i64 <= -1 {
        return Ok(None);
    }
    if !is_valid_range(start, a[3]) || !takes() {
        return Err(Errno::EINVAL);
    }
    let wanted = (a[3] as usize).min(TRANSFER_MAX);
    let mut buffer = vec![0; COPY_BYTES.min(wanted)];
    let mut done = 0;
    while done < wanted {
        let step = buffer.len().min(wanted - done) as u64;
        let arguments = [a[1], buffer.as_mut_ptr() as u64, step, start + done as u64, 0, 0];
        // SAFETY: the buffer is this function's, and has that many bytes.
        let count = unsafe { system_call(libc::SYS_pread64 as u64, arguments) };
        let written = match count {
            0 => break,
            count if count < 0 => Err(Errno(-count as i32)),
            count => write_at_place(session, to, &buffer[..count as usize]),
        };
        if done == 0 && written == Err(Errno::ESTALE) {
            return Ok(None);
        }
        let written = match written {
            Err(errno) if done == 0 => return Err(errno),
            Err(_) => break,
            Ok(written) => written,
        };
        done += written;
        if written < count as usize {
            break;
        }
    }
    let end = start + done as u64;
    match given {
        Some(_) => program_memory::store(a[2], &(end as i64))?,
        // SAFETY: it moves the open file's offset.
        None => drop(unsafe { system_call(libc::SYS_lseek as u64, [a[1], end, libc::SEEK_SET as u64, 0, 0, 0]) }),
    }
    Ok(Some(done as i64))
}

/// Writes bytes at an open file's offset, which moves.
///
/// Fails with `ESTALE` if other processes share it by now.
fn write_at_place(session: &MountSession, to: &OpenFileRef, bytes: &[u8]) -> Result<usize, Errno> {
    let Some(mut place) = to.place().filter(|place| !place.is_shared()) else { return Err(Errno::ESTALE) };
    let at = WriteAt::Offset(place.offset);
    write_bytes(session, to.inode(), at, bytes, Some(&mut place))
}
