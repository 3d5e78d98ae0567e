//! Read-only mappings of the data segments themselves (DAX).
//!
//! The kernel fills no page for them, and nothing is copied. SharedFS keeps the blocks in place until this process's
//! session ends. So no process has such a mapping without its session. Before this process forks, runs another program
//! or changes its user, the file's pages in the kernel replace the mapping. They also replace it before the program
//! changes the mapping other than by unmapping it. A shared mapping shows each write to the file, by any process, when
//! the write returns; a private one need not.
//!
//! The kernel maps the parts of a file that lie in no segment (holes, data stored with the metadata). It also maps
//! files that may be written or run through the mapping, since tools use the names of such mappings.

use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use ashlar_libfs::MappedFile;
use ashlar_types::{Errno, FileKind, InodeId};

use crate::entry::arch::system_call;
use crate::files::descriptors::OpenFileRef;
use crate::files::materialise;
use crate::sessions::session::MountSession;

const PAGE: u64 = 4096;
/// Flags that a program may set beside the kind of the mapping.
const FLAGS: i32 = libc::MAP_FIXED
    | libc::MAP_FIXED_NOREPLACE
    | libc::MAP_NORESERVE
    | libc::MAP_POPULATE
    | libc::MAP_NONBLOCK
    | libc::MAP_LOCKED
    | libc::MAP_DENYWRITE
    | libc::MAP_EXECUTABLE;
const PIECE_FLAGS: i32 = libc::MAP_NORESERVE | libc::MAP_POPULATE | libc::MAP_NONBLOCK | libc::MAP_LOCKED;
/// `shmat` replaces the mappings at its address.
pub(crate) const SHM_REMAP: u64 = 0o40000;

/// A mapping that one call has made.
#[derive(Debug)]
struct SegmentMapping {
    session: &'static MountSession,
    inode: InodeId,
    /// The session's number of the mapping.
    number: u32,
    kind: i32,
    /// Its start in memory, and in the file.
    address: u64,
    offset: u64,
    left: RemainingParts,
}

/// The parts of a mapping that are still mapped.
#[derive(Debug)]
struct RemainingParts(Vec<Range<u64>>);

impl RemainingParts {
    fn overlaps(&self, part: &Range<u64>) -> bool {
        self.0.iter().any(|left| left.start < part.end && left.end > part.start)
    }

    /// Removes a part that is no longer mapped.
    fn remove_part(&mut self, gone: &Range<u64>) {
        let parts = |left: &Range<u64>| {
            let before = left.start..left.end.min(gone.start);
            let behind = left.start.max(gone.end)..left.end;
            [before, behind]
        };
        self.0 = self.0.iter().flat_map(parts).filter(|part| part.start < part.end).collect();
    }
}

/// All such mappings. While it is held, no message is sent.
#[derive(Debug)]
pub(crate) struct MappingTable(Vec<SegmentMapping>);

static TABLE: Mutex<MappingTable> = Mutex::new(MappingTable(Vec::new()));
/// All such mappings lie between these addresses.
static LOWEST: AtomicU64 = AtomicU64::new(u64::MAX);
static HIGHEST: AtomicU64 = AtomicU64::new(0);

/// Returns whether such a mapping may lie in a part of the memory.
pub(crate) fn may_overlap(address: u64, length: u64) -> bool {
    address < HIGHEST.load(Ordering::Relaxed) && address.saturating_add(length) > LOWEST.load(Ordering::Relaxed)
}

/// Keeps other threads from changing these mappings, over a fork.
pub(crate) fn hold_mappings() -> MutexGuard<'static, MappingTable> {
    TABLE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Maps a part of a file, with the arguments of mmap(2); `None` if the kernel must.
///
/// # Errors
/// Those of LibFS.
pub(crate) fn map_segments(file: &OpenFileRef, a: [u64; 6]) -> Result<Option<i64>, Errno> {
    let [_, length, protection, flags, _, offset] = a;
    let (flags, kind) = (flags as i32, flags as i32 & libc::MAP_TYPE);
    let is_known = matches!(kind, libc::MAP_PRIVATE | libc::MAP_SHARED | libc::MAP_SHARED_VALIDATE);
    let is_read = file.flags() & (libc::O_ACCMODE | libc::O_PATH | libc::O_DIRECT) == libc::O_RDONLY;
    if !is_known || !is_read || file.is_directory() || protection != libc::PROT_READ as u64 {
        return Ok(None);
    }
    if flags & !(FLAGS | libc::MAP_TYPE) != 0 || length == 0 || offset % PAGE != 0 {
        return Ok(None);
    }
    let (session, inode) = (file.session()?, file.inode());
    let found = session.fs.attributes(inode)?.inode;
    let is_there = offset.checked_add(length).is_some_and(|end| end <= found.size.next_multiple_of(PAGE));
    // If the file is also mapped in another way, that mapping's pages in the kernel are the first to change.
    if found.kind != FileKind::Regular || !is_there || materialise::is_mapped_shared(session.number, inode) {
        return Ok(None);
    }
    let blocks = length.div_ceil(PAGE);
    // The kernel finds any error too.
    let Ok(Some(mapped)) = session.fs.map(inode, offset / PAGE, blocks, kind != libc::MAP_PRIVATE) else {
        return Ok(None);
    };
    let put = map_recorded(session, &mapped, (inode, offset), (a[0], blocks * PAGE), flags);
    if put.is_none() && !session.is_over() {
        session.fs.unmap(inode, mapped.number);
    }
    Ok(put)
}

/// Maps the pieces that SharedFS keeps in place.
///
/// It maps nothing if the session has ended meanwhile, or the file was mapped in another way.
fn map_recorded(
    session: &'static MountSession,
    mapped: &MappedFile,
    (inode, offset): (InodeId, u64),
    (address, length): (u64, u64),
    flags: i32,
) -> Option<i64> {
    // Ask for all segments before the table is locked.
    mapped.pieces.iter().try_for_each(|piece| session.fs.with_segment_file(piece, |_, _| ())).ok()?;
    let mut table = hold_mappings();
    if !session.is_current() || materialise::is_mapped_shared(session.number, inode) {
        return None;
    }
    let address = map_pieces(session, mapped, (address, length), flags).ok()?;
    LOWEST.fetch_min(address, Ordering::Relaxed);
    HIGHEST.fetch_max(address + length, Ordering::Relaxed);
    let left = RemainingParts(std::iter::once(address..address + length).collect());
    let (number, kind) = (mapped.number, flags & libc::MAP_TYPE);
    table.0.push(SegmentMapping { session, inode, number, kind, address, offset, left });
    Some(address as i64)
}

/// Maps the pieces side by side, at an address that the program or the kernel chooses.
fn map_pieces(
    session: &MountSession,
    mapped: &MappedFile,
    (address, length): (u64, u64),
    flags: i32,
) -> Result<u64, Errno> {
    let place = flags & (libc::MAP_FIXED | libc::MAP_FIXED_NOREPLACE);
    let nothing = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | place;
    let room = mmap((address, length), libc::PROT_NONE, nothing, (-1, 0))?;
    let kind = if flags & libc::MAP_TYPE == libc::MAP_PRIVATE { libc::MAP_PRIVATE } else { libc::MAP_SHARED };
    let mut at = room;
    for piece in &mapped.pieces {
        let put = session.fs.with_segment_file(piece, |file, offset| {
            let flags = kind | libc::MAP_FIXED | flags & PIECE_FLAGS;
            mmap((at, piece.bytes), libc::PROT_READ, flags, (file.as_raw_fd(), offset))
        });
        if let Err(errno) = put.and_then(|put| put) {
            // At an address that the program chose, another mapping replaces this one.
            if flags & libc::MAP_FIXED == 0 {
                unmap_part(&(room..room + length));
            }
            return Err(errno);
        }
        at += piece.bytes;
    }
    Ok(room)
}

fn mmap((address, length): (u64, u64), protection: i32, flags: i32, (file, offset): (i32, u64)) -> Result<u64, Errno> {
    let arguments = [address, length, protection as u64, flags as u64, file as u64, offset];
    // SAFETY: the caller answers for the memory that it replaces.
    let mapped = unsafe { system_call(libc::SYS_mmap as u64, arguments) };
    if mapped < 0 { Err(Errno(-mapped as i32)) } else { Ok(mapped as u64) }
}

fn unmap_part(part: &Range<u64>) {
    // SAFETY: the caller answers for the memory that it unmaps.
    unsafe { system_call(libc::SYS_munmap as u64, [part.start, part.end - part.start, 0, 0, 0, 0]) };
}

/// Unmaps a part of the memory, with the arguments of munmap(2).
pub(crate) fn serve_unmap(a: [u64; 6]) -> i64 {
    let mut table = hold_mappings();
    // SAFETY: the program's own call.
    let done = unsafe { system_call(libc::SYS_munmap as u64, a) };
    let gone = a[0]..a[0].saturating_add(a[1]).checked_next_multiple_of(PAGE).unwrap_or(u64::MAX);
    if done == 0 && table.0.iter().any(|direct| direct.left.overlaps(&gone)) {
        table.0.iter_mut().for_each(|direct| direct.left.remove_part(&gone));
        let gone = table.take_unmapped();
        drop(table);
        release_mappings(gone);
    }
    done
}

/// Replaces all mappings in a part of the memory by the kernel's pages.
///
/// All parts that the same call has mapped are replaced too.
///
/// # Errors
/// `ENOMEM` if neither the kernel can have the file nor a copy fits there.
pub(crate) fn hand_over_part(address: u64, length: u64) -> Result<(), Errno> {
    let part = address..address.saturating_add(length);
    let is_in = |direct: &SegmentMapping| direct.left.overlaps(&part);
    hand_over_if(is_in);
    if hold_mappings().0.iter().any(is_in) { Err(Errno::ENOMEM) } else { Ok(()) }
}

/// Does the same for a file that the kernel is about to map, and that is written through that mapping.
pub(crate) fn hand_over_file(session: u32, inode: InodeId) {
    hand_over_if(|direct| (direct.session.number, direct.inode) == (session, inode));
}

/// Does the same for all mappings.
///
/// The sessions are about to end, or another process will have the same memory.
pub(crate) fn hand_over_all() {
    hand_over_if(|_| true);
}

/// Returns whether anything of a session is still mapped.
pub(crate) fn is_any_mapped(session: &MountSession) -> bool {
    hold_mappings().0.iter().any(|direct| std::ptr::eq(direct.session, session) && !direct.left.0.is_empty())
}

/// Discards all mappings in a forked process: the parent's session keeps the blocks.
pub(crate) fn forget_mappings() {
    let mut table = hold_mappings();
    table.0.clear();
    table.reset_bounds_if_empty();
}

/// Releases the blocks that [`MappingTable::copy_all`] has copied.
pub(crate) fn release_copied() {
    let gone = hold_mappings().take_unmapped();
    release_mappings(gone);
}

fn hand_over_if(is_meant: impl Fn(&SegmentMapping) -> bool) {
    let mut tried = Vec::new();
    loop {
        let is_next = |direct: &&SegmentMapping| {
            !direct.left.0.is_empty() && is_meant(direct) && !tried.iter().any(|other: &MappingId| other.is_of(direct))
        };
        let Some(next) = hold_mappings().0.iter().find(is_next).map(MappingId::of) else { return };
        let real = next.open_real_file();
        let mut table = hold_mappings();
        // Another thread may have unmapped it meanwhile.
        if let Some(direct) = table.0.iter_mut().find(|direct| next.is_of(direct)) {
            let given = real.as_ref().map_err(|errno| *errno).and_then(|real| direct.replace_by_kernel_pages(real));
            // If the file is gone, or SharedFS is away, copy the pages. If there is no memory for that either, the
            // mapping stays.
            let _ = given.or_else(|_| direct.replace_by_copy());
        }
        let gone = table.take_unmapped();
        drop(table);
        drop(real);
        release_mappings(gone);
        tried.push(next);
    }
}

/// Reports to SharedFS that these mappings are gone.
fn release_mappings(gone: Vec<SegmentMapping>) {
    for direct in gone.into_iter().filter(|direct| !direct.session.is_over()) {
        direct.session.fs.unmap(direct.inode, direct.number);
    }
}

impl MappingTable {
    /// Returns whether nothing is mapped.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.iter().all(|direct| direct.left.0.is_empty())
    }

    /// Replaces all mappings by copies; returns whether there was memory for them.
    pub(crate) fn copy_all(&mut self) -> bool {
        self.0.iter_mut().all(|direct| direct.replace_by_copy().is_ok())
    }

    /// Removes and returns the mappings of which no part is left.
    fn take_unmapped(&mut self) -> Vec<SegmentMapping> {
        let (gone, left): (Vec<_>, Vec<_>) = self.0.drain(..).partition(|direct| direct.left.0.is_empty());
        self.0 = left;
        self.reset_bounds_if_empty();
        gone
    }

    fn reset_bounds_if_empty(&self) {
        if self.0.is_empty() {
            LOWEST.store(u64::MAX, Ordering::Relaxed);
            HIGHEST.store(0, Ordering::Relaxed);
        }
    }
}

/// The identity of a mapping, without the table.
#[derive(Debug)]
struct MappingId {
    session: &'static MountSession,
    inode: InodeId,
    number: u32,
    kind: i32,
}

impl MappingId {
    fn of(direct: &SegmentMapping) -> Self {
        Self { session: direct.session, inode: direct.inode, number: direct.number, kind: direct.kind }
    }

    fn is_of(&self, direct: &SegmentMapping) -> bool {
        std::ptr::eq(self.session, direct.session) && self.number == direct.number
    }

    /// Opens a kernel descriptor on the file.
    fn open_real_file(&self) -> Result<OwnedFd, Errno> {
        if self.kind != libc::MAP_PRIVATE {
            materialise::hand_over_inode(self.session.number, self.inode)?;
        }
        materialise::open_to_read(self.session, self.inode)
    }
}

impl SegmentMapping {
    /// Replaces the mapping by the file's pages in the kernel.
    fn replace_by_kernel_pages(&mut self, real: &OwnedFd) -> Result<(), Errno> {
        while let Some(left) = self.left.0.last() {
            let from = (real.as_raw_fd(), self.offset + (left.start - self.address));
            mmap((left.start, left.end - left.start), libc::PROT_READ, self.kind | libc::MAP_FIXED, from)?;
            self.left.0.pop();
        }
        Ok(())
    }

    /// Replaces the mapping by a copy. It needs only memory from the kernel.
    fn replace_by_copy(&mut self) -> Result<(), Errno> {
        while let Some(left) = self.left.0.last() {
            let length = left.end - left.start;
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            let copy = mmap((0, length), libc::PROT_READ | libc::PROT_WRITE, flags, (-1, 0))?;
            // SAFETY: the copy is new and as long, and its source is mapped and readable.
            unsafe { std::ptr::copy_nonoverlapping(left.start as *const u8, copy as *mut u8, length as usize) };
            let call = |number: i64, arguments: [u64; 6]| {
                // SAFETY: the copy replaces its own source.
                let done = unsafe { system_call(number as u64, arguments) };
                if done < 0 { Err(Errno(-done as i32)) } else { Ok(()) }
            };
            let moves = (libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED) as u64;
            call(libc::SYS_mprotect, [copy, length, libc::PROT_READ as u64, 0, 0, 0])
                .and_then(|()| call(libc::SYS_mremap, [copy, length, length, moves, left.start, 0]))
                .inspect_err(|_| unmap_part(&(copy..copy + length)))?;
            self.left.0.pop();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unmapped_part_is_removed_from_mapping() {
        let mut left = RemainingParts(std::iter::once(0x1000..0x9000).collect());
        left.remove_part(&(0x3000..0x5000));
        assert_eq!(left.0, [0x1000..0x3000, 0x5000..0x9000]);
        left.remove_part(&(0x0..0x2000));
        left.remove_part(&(0x8000..0xa000));
        assert_eq!(left.0, [0x2000..0x3000, 0x5000..0x8000]);
        left.remove_part(&(0x3000..0x5000));
        assert_eq!(left.0, [0x2000..0x3000, 0x5000..0x8000]);
        left.remove_part(&(0x2000..0x8000));
        assert!(left.0.is_empty());
    }
}
