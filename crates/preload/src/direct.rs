//! Mappings that are only read, of the data segments themselves (DAX): no page of the kernel's is filled, and nothing is copied.
//!
//! SharedFS keeps the blocks where they are until this process's session ends. So such a mapping stands in no process without its session:
//! before this one forks, runs another program, or becomes another user's, the file's pages in the kernel take its place, and so they do
//! before the program does anything to it but unmap it. A shared one shows what is written to the file, by whomever, when the write returns;
//! a private one need not.
//!
//! Parts of a file that are none of the segments' (holes, what stands with the metadata) are the kernel's to map, and so is what may be written or
//! run through the mapping, since tools go by the names of that.

use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use ashlar_libfs::MappedFile;
use ashlar_types::{Errno, FileKind, InodeId};

use crate::arch::system_call;
use crate::descriptors::File;
use crate::materialise;
use crate::session::Session;

const PAGE: u64 = 4096;
/// What a program may ask for beside the kind of the mapping.
const FLAGS: i32 = libc::MAP_FIXED
    | libc::MAP_FIXED_NOREPLACE
    | libc::MAP_NORESERVE
    | libc::MAP_POPULATE
    | libc::MAP_NONBLOCK
    | libc::MAP_LOCKED
    | libc::MAP_DENYWRITE
    | libc::MAP_EXECUTABLE;
const PIECE_FLAGS: i32 = libc::MAP_NORESERVE | libc::MAP_POPULATE | libc::MAP_NONBLOCK | libc::MAP_LOCKED;
/// `shmat` is to take the place of what is mapped there.
pub(crate) const SHM_REMAP: u64 = 0o40000;

/// What a call has mapped.
#[derive(Debug)]
struct Direct {
    session: &'static Session,
    inode: InodeId,
    /// What the session calls it.
    number: u32,
    kind: i32,
    /// Where it begins, in memory and in the file.
    address: u64,
    offset: u64,
    left: Left,
}

/// What is left of a mapping.
#[derive(Debug)]
struct Left(Vec<Range<u64>>);

impl Left {
    fn overlaps(&self, part: &Range<u64>) -> bool {
        self.0.iter().any(|left| left.start < part.end && left.end > part.start)
    }

    /// Takes out what is mapped no more.
    fn cut(&mut self, gone: &Range<u64>) {
        let parts = |left: &Range<u64>| {
            let before = left.start..left.end.min(gone.start);
            let behind = left.start.max(gone.end)..left.end;
            [before, behind]
        };
        self.0 = self.0.iter().flat_map(parts).filter(|part| part.start < part.end).collect();
    }
}

/// All that is mapped so. While it is held, nobody is asked anything.
#[derive(Debug)]
pub(crate) struct Table(Vec<Direct>);

static TABLE: Mutex<Table> = Mutex::new(Table(Vec::new()));
/// All that is mapped lies between these.
static LOWEST: AtomicU64 = AtomicU64::new(u64::MAX);
static HIGHEST: AtomicU64 = AtomicU64::new(0);

/// Whether anything may be mapped so in a part of the memory.
pub(crate) fn may_be_in(address: u64, length: u64) -> bool {
    address < HIGHEST.load(Ordering::Relaxed) && address.saturating_add(length) > LOWEST.load(Ordering::Relaxed)
}

/// Keeps other threads from all that, over a fork.
pub(crate) fn hold() -> MutexGuard<'static, Table> {
    TABLE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Maps a part of a file, with the arguments of mmap(2); `None` where the kernel must.
///
/// # Errors
/// Those of LibFS.
pub(crate) fn map(file: &File, a: [u64; 6]) -> Result<Option<i64>, Errno> {
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
    // Where it is mapped otherwise, the kernel's pages are what is seen first.
    if found.kind != FileKind::Regular || !is_there || materialise::is_mapped(session.number, inode) {
        return Ok(None);
    }
    let blocks = length.div_ceil(PAGE);
    // Whatever is wrong, the kernel finds it too.
    let Ok(Some(mapped)) = session.fs.map(inode, offset / PAGE, blocks, kind != libc::MAP_PRIVATE) else {
        return Ok(None);
    };
    let put = put_noted(session, &mapped, (inode, offset), (a[0], blocks * PAGE), flags);
    if put.is_none() && !session.is_over() {
        session.fs.unmap(inode, mapped.number);
    }
    Ok(put)
}

/// Puts what SharedFS keeps where it is into the memory, unless the session has ended meanwhile, or the file was mapped otherwise.
fn put_noted(
    session: &'static Session,
    mapped: &MappedFile,
    (inode, offset): (InodeId, u64),
    (address, length): (u64, u64),
    flags: i32,
) -> Option<i64> {
    // All segments are asked for beforehand.
    mapped.pieces.iter().try_for_each(|piece| session.fs.with_segment_file(piece, |_, _| ())).ok()?;
    let mut table = hold();
    if !session.is_current() || materialise::is_mapped(session.number, inode) {
        return None;
    }
    let address = put(session, mapped, (address, length), flags).ok()?;
    LOWEST.fetch_min(address, Ordering::Relaxed);
    HIGHEST.fetch_max(address + length, Ordering::Relaxed);
    let left = Left(std::iter::once(address..address + length).collect());
    let (number, kind) = (mapped.number, flags & libc::MAP_TYPE);
    table.0.push(Direct { session, inode, number, kind, address, offset, left });
    Some(address as i64)
}

/// Puts the pieces side by side where there is room for them, or where the program says.
fn put(session: &Session, mapped: &MappedFile, (address, length): (u64, u64), flags: i32) -> Result<u64, Errno> {
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
            // Where the program says, another mapping takes its place.
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
    // SAFETY: who calls says what it takes the place of.
    let mapped = unsafe { system_call(libc::SYS_mmap as u64, arguments) };
    if mapped < 0 { Err(Errno(-mapped as i32)) } else { Ok(mapped as u64) }
}

fn unmap_part(part: &Range<u64>) {
    // SAFETY: who calls says what goes.
    unsafe { system_call(libc::SYS_munmap as u64, [part.start, part.end - part.start, 0, 0, 0, 0]) };
}

/// Unmaps a part of the memory, with the arguments of munmap(2).
pub(crate) fn unmap(a: [u64; 6]) -> i64 {
    let mut table = hold();
    // SAFETY: the program's own call.
    let done = unsafe { system_call(libc::SYS_munmap as u64, a) };
    let gone = a[0]..a[0].saturating_add(a[1]).checked_next_multiple_of(PAGE).unwrap_or(u64::MAX);
    if done == 0 && table.0.iter().any(|direct| direct.left.overlaps(&gone)) {
        table.0.iter_mut().for_each(|direct| direct.left.cut(&gone));
        let gone = table.take_gone();
        drop(table);
        let_go(gone);
    }
    done
}

/// Has the kernel's pages take the place of what is mapped in a part of the memory, and of what was mapped together with it.
///
/// # Errors
/// `ENOMEM` where neither the kernel can have the file nor a copy there.
pub(crate) fn leave(address: u64, length: u64) -> Result<(), Errno> {
    let part = address..address.saturating_add(length);
    let is_in = |direct: &Direct| direct.left.overlaps(&part);
    leave_if(is_in);
    if hold().0.iter().any(is_in) { Err(Errno::ENOMEM) } else { Ok(()) }
}

/// The same for a file that is about to be mapped by the kernel, and written through that.
pub(crate) fn leave_file(session: u32, inode: InodeId) {
    leave_if(|direct| (direct.session.number, direct.inode) == (session, inode));
}

/// The same for all: the sessions are about to end, or another process will have the same memory.
pub(crate) fn leave_all() {
    leave_if(|_| true);
}

/// Whether anything of a session's is mapped yet.
pub(crate) fn is_any_of(session: &Session) -> bool {
    hold().0.iter().any(|direct| std::ptr::eq(direct.session, session) && !direct.left.0.is_empty())
}

/// The process was forked: what stands in its memory is the other's to keep.
pub(crate) fn forget_all() {
    let mut table = hold();
    table.0.clear();
    table.note_empty();
}

/// Lets go of what [`Table::copy_all`] has copied.
pub(crate) fn tidy() {
    let gone = hold().take_gone();
    let_go(gone);
}

fn leave_if(is_meant: impl Fn(&Direct) -> bool) {
    let mut tried = Vec::new();
    loop {
        let is_next = |direct: &&Direct| {
            !direct.left.0.is_empty() && is_meant(direct) && !tried.iter().any(|other: &Name| other.is_of(direct))
        };
        let Some(next) = hold().0.iter().find(is_next).map(Name::of) else { return };
        let real = next.open();
        let mut table = hold();
        // Others may have unmapped it meanwhile.
        if let Some(direct) = table.0.iter_mut().find(|direct| next.is_of(direct)) {
            let given = real.as_ref().map_err(|errno| *errno).and_then(|real| direct.give_to_kernel(real));
            // Of a file that is gone, or while SharedFS is away. Where there is no memory for that either, it stays.
            let _ = given.or_else(|_| direct.copy());
        }
        let gone = table.take_gone();
        drop(table);
        drop(real);
        let_go(gone);
        tried.push(next);
    }
}

/// Tells SharedFS what is mapped no more.
fn let_go(gone: Vec<Direct>) {
    for direct in gone.into_iter().filter(|direct| !direct.session.is_over()) {
        direct.session.fs.unmap(direct.inode, direct.number);
    }
}

impl Table {
    /// Whether nothing is mapped.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.iter().all(|direct| direct.left.0.is_empty())
    }

    /// Has copies stand in the place of all; says whether there was memory for that.
    pub(crate) fn copy_all(&mut self) -> bool {
        self.0.iter_mut().all(|direct| direct.copy().is_ok())
    }

    /// Takes out what nothing is left of.
    fn take_gone(&mut self) -> Vec<Direct> {
        let (gone, left): (Vec<_>, Vec<_>) = self.0.drain(..).partition(|direct| direct.left.0.is_empty());
        self.0 = left;
        self.note_empty();
        gone
    }

    fn note_empty(&self) {
        if self.0.is_empty() {
            LOWEST.store(u64::MAX, Ordering::Relaxed);
            HIGHEST.store(0, Ordering::Relaxed);
        }
    }
}

/// What is mapped, without the table.
#[derive(Debug)]
struct Name {
    session: &'static Session,
    inode: InodeId,
    number: u32,
    kind: i32,
}

impl Name {
    fn of(direct: &Direct) -> Self {
        Self { session: direct.session, inode: direct.inode, number: direct.number, kind: direct.kind }
    }

    fn is_of(&self, direct: &Direct) -> bool {
        std::ptr::eq(self.session, direct.session) && self.number == direct.number
    }

    /// A kernel's descriptor on the file.
    fn open(&self) -> Result<OwnedFd, Errno> {
        if self.kind != libc::MAP_PRIVATE {
            materialise::share(self.session.number, self.inode)?;
        }
        materialise::to_read(self.session, self.inode)
    }
}

impl Direct {
    /// Has the file's pages in the kernel stand in its place.
    fn give_to_kernel(&mut self, real: &OwnedFd) -> Result<(), Errno> {
        while let Some(left) = self.left.0.last() {
            let from = (real.as_raw_fd(), self.offset + (left.start - self.address));
            mmap((left.start, left.end - left.start), libc::PROT_READ, self.kind | libc::MAP_FIXED, from)?;
            self.left.0.pop();
        }
        Ok(())
    }

    /// Has a copy stand in its place. Nothing is asked for but memory of the kernel's.
    fn copy(&mut self) -> Result<(), Errno> {
        while let Some(left) = self.left.0.last() {
            let length = left.end - left.start;
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            let copy = mmap((0, length), libc::PROT_READ | libc::PROT_WRITE, flags, (-1, 0))?;
            // SAFETY: the copy is new and as long, and what is copied is mapped, to be read.
            unsafe { std::ptr::copy_nonoverlapping(left.start as *const u8, copy as *mut u8, length as usize) };
            let call = |number: i64, arguments: [u64; 6]| {
                // SAFETY: the copy takes the place of what it is a copy of.
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
    fn what_is_unmapped_is_cut_out() {
        let mut left = Left(std::iter::once(0x1000..0x9000).collect());
        left.cut(&(0x3000..0x5000));
        assert_eq!(left.0, [0x1000..0x3000, 0x5000..0x9000]);
        left.cut(&(0x0..0x2000));
        left.cut(&(0x8000..0xa000));
        assert_eq!(left.0, [0x2000..0x3000, 0x5000..0x8000]);
        left.cut(&(0x3000..0x5000));
        assert_eq!(left.0, [0x2000..0x3000, 0x5000..0x8000]);
        left.cut(&(0x2000..0x8000));
        assert!(left.0.is_empty());
    }
}
