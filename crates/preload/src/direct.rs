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
use std::os::fd::{AsRawFd, IntoRawFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use ashlar_libfs::MappedFile;
use ashlar_types::{Errno, FileKind, InodeId};

use crate::arch::system_call;
use crate::descriptors::File;
use crate::session::{self, Session};
use crate::{locks, materialise};

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
    session: u32,
    inode: InodeId,
    /// What the session calls it.
    number: u32,
    kind: i32,
    /// Where it begins, in memory and in the file.
    address: u64,
    offset: u64,
    /// What is left of it.
    left: Vec<Range<u64>>,
}

/// All that is mapped so.
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

/// Keeps other threads from all that; for a fork, before anything else is kept from them.
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
    let mut table = hold();
    let blocks = length.div_ceil(PAGE);
    // Whatever is wrong, the kernel finds it too.
    let Ok(Some(mapped)) = session.fs.map(inode, offset / PAGE, blocks, kind != libc::MAP_PRIVATE) else {
        return Ok(None);
    };
    let Ok(address) = put(session, &mapped, (a[0], blocks * PAGE), flags) else {
        session.fs.unmap(inode, mapped.number);
        return Ok(None);
    };
    let left = address..address + blocks * PAGE;
    LOWEST.fetch_min(left.start, Ordering::Relaxed);
    HIGHEST.fetch_max(left.end, Ordering::Relaxed);
    let (session, number, left) = (session.number, mapped.number, vec![left]);
    table.0.push(Direct { session, inode, number, kind, address, offset, left });
    Ok(Some(address as i64))
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
            // SAFETY: the room was made here, and nobody else knows of it, unless the program wanted all that was there to go.
            unsafe { system_call(libc::SYS_munmap as u64, [room, length, 0, 0, 0, 0]) };
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

/// Unmaps a part of the memory, with the arguments of munmap(2).
pub(crate) fn unmap(a: [u64; 6]) -> i64 {
    let mut table = hold();
    // SAFETY: the program's own call.
    let done = unsafe { system_call(libc::SYS_munmap as u64, a) };
    if done == 0 {
        let gone = a[0]..a[0].saturating_add(a[1]).next_multiple_of(PAGE);
        table.0.iter_mut().for_each(|direct| direct.cut(&gone));
        table.drop_empty();
    }
    done
}

/// Has the kernel's pages take the place of what is mapped in a part of the memory, and of what was mapped together with it.
pub(crate) fn leave(address: u64, length: u64) {
    let part = address..address.saturating_add(length);
    leave_if(|direct| direct.left.iter().any(|left| left.start < part.end && left.end > part.start));
}

/// The same for a file that is about to be mapped by the kernel, and written through that.
pub(crate) fn leave_file(session: u32, inode: InodeId) {
    leave_if(|direct| (direct.session, direct.inode) == (session, inode));
}

/// The same for all: the sessions are about to end, or another process will have the same memory.
pub(crate) fn leave_all() {
    leave_if(|_| true);
}

/// The process was forked: what stands in its memory is the other's to keep.
pub(crate) fn forget_all() {
    hold().0.clear();
    LOWEST.store(u64::MAX, Ordering::Relaxed);
    HIGHEST.store(0, Ordering::Relaxed);
}

/// Whether nothing is mapped.
pub(crate) fn is_none(table: &Table) -> bool {
    table.0.is_empty()
}

fn leave_if(is_meant: impl Fn(&Direct) -> bool) {
    if HIGHEST.load(Ordering::Relaxed) == 0 {
        return;
    }
    let mut table = hold();
    for direct in table.0.iter_mut().filter(|direct| is_meant(direct)) {
        if direct.give_to_kernel().or_else(|_| direct.copy()).is_ok() {
            direct.left.clear();
        }
    }
    table.drop_empty();
}

impl Table {
    /// Lets go of what nothing is left of.
    fn drop_empty(&mut self) {
        self.0.retain(|direct| {
            let stays = !direct.left.is_empty();
            if let Some(session) = session::by_number(direct.session).filter(|_| !stays) {
                session.fs.unmap(direct.inode, direct.number);
            }
            stays
        });
        if self.0.is_empty() {
            LOWEST.store(u64::MAX, Ordering::Relaxed);
            HIGHEST.store(0, Ordering::Relaxed);
        }
    }
}

impl Direct {
    /// Takes out what is mapped no more.
    fn cut(&mut self, gone: &Range<u64>) {
        let parts = |left: &Range<u64>| {
            let before = left.start..left.end.min(gone.start);
            let behind = left.start.max(gone.end)..left.end;
            [before, behind]
        };
        self.left = self.left.iter().flat_map(parts).filter(|part| part.start < part.end).collect();
    }

    /// Has the file's pages in the kernel stand in its place.
    fn give_to_kernel(&self) -> Result<(), Errno> {
        let session = session::by_number(self.session).ok_or(Errno::EIO)?;
        if self.kind != libc::MAP_PRIVATE {
            materialise::share(self.session, self.inode)?;
        }
        session.fs.open(self.inode)?;
        let real = session.materialise(self.inode, libc::O_RDONLY);
        session.fs.close(self.inode);
        let real = real?;
        materialise::renew_size_of(real.as_raw_fd(), session, self.inode);
        let put = |left: &Range<u64>| {
            let from = (real.as_raw_fd(), self.offset + (left.start - self.address));
            mmap((left.start, left.end - left.start), libc::PROT_READ, self.kind | libc::MAP_FIXED, from).map(drop)
        };
        let done = self.left.iter().try_for_each(put);
        if locks::keep(real.as_raw_fd()) {
            // Its closing would end the process's locks on the file.
            let _ = real.into_raw_fd();
        }
        done
    }

    /// Has a copy stand in its place: of a file that is gone, or while SharedFS is away.
    fn copy(&self) -> Result<(), Errno> {
        for left in &self.left {
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
            call(libc::SYS_mprotect, [copy, length, libc::PROT_READ as u64, 0, 0, 0])?;
            let moves = (libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED) as u64;
            call(libc::SYS_mremap, [copy, length, length, moves, left.start, 0])?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_unmapped_is_cut_out() {
        let kind = libc::MAP_PRIVATE;
        let left = Vec::from([0x1000..0x9000]);
        let mut direct = Direct { session: 0, inode: InodeId(1), number: 0, kind, address: 0x1000, offset: 0, left };
        direct.cut(&(0x3000..0x5000));
        assert_eq!(direct.left, [0x1000..0x3000, 0x5000..0x9000]);
        direct.cut(&(0x0..0x2000));
        direct.cut(&(0x8000..0xa000));
        assert_eq!(direct.left, [0x2000..0x3000, 0x5000..0x8000]);
        direct.cut(&(0x3000..0x5000));
        assert_eq!(direct.left, [0x2000..0x3000, 0x5000..0x8000]);
        direct.cut(&(0x2000..0x8000));
        assert!(direct.left.is_empty());
    }
}
