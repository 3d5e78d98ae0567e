//! Shared mappings of arena files.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{_MM_HINT_T0, _MM_HINT_T1, _mm_prefetch};
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering, fence};

use rustix::fs::{fdatasync, fstat};
use rustix::io::pwrite;
use thiserror::Error;

use crate::arena::allocate;
use crate::flush::{LINE_BYTES, are_lines, order_stores};
use crate::huge::HUGE_PAGE_BYTES;
use crate::persistent::store_in_pieces;
use crate::sigbus::Registration;
use crate::{Crc32c, FlushMethod, Medium, MediumKind, OutOfBounds, Persistent, sigbus};

/// Says which signal comes when a lease on a file is to end.
const F_SETSIG: i32 = 10;

/// The kernel's pages are at least as long.
const PAGE_BYTES: usize = 4096;
/// Has the kernel gather small pages into a huge one.
const MADV_COLLAPSE: i32 = 25;
/// From this size on, whole lines that were not fetched before go past the cache.
///
/// To fetch them takes as long as to write them.
const BULK_BYTES: usize = 2 << 10;
/// From this size on, one pass that copies and sums takes less time than two passes.
const SUMMED_BYTES_MIN: usize = 256;
/// The most expected bytes that are fetched into the cache next to the processor.
///
/// More would keep the processor waiting for its few places for fetches under way.
#[cfg(target_arch = "x86_64")]
const NEAR_BYTES: u64 = 512;

/// The permitted use of a mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MappingAccess {
    /// Loads only; stores fail with [`OutOfBounds`].
    ReadOnly,
    /// Loads and stores.
    ReadWrite,
}

/// Why a file could not be mapped.
#[derive(Debug, Error)]
pub enum MapError {
    /// The mapping would be empty, or longer than the file.
    #[error("cannot map {asked} bytes of a file of {file_bytes} bytes")]
    WrongLength {
        /// Bytes asked for.
        asked: u64,
        /// Bytes in the file.
        file_bytes: u64,
    },
    /// The process has as many mappings as the table of guarded ranges holds.
    #[error("this process already has {} arena mappings, which is the limit", sigbus::MAPPINGS_MAX)]
    TooMany,
    /// The kernel refused.
    #[error("cannot map an arena file: {0}")]
    System(#[from] io::Error),
}

/// A shared mapping of the first bytes of a file.
///
/// Other processes may read and write the same bytes at any moment, so no reference into the mapping is ever given out:
/// bytes are copied, words are atomic.
#[derive(Debug)]
pub struct Mapping {
    start: *mut u8,
    length: usize,
    access: MappingAccess,
    medium: Medium,
    file: OwnedFd,
    // Dropped in `Drop` before the range is unmapped; `None` only in between.
    registration: Option<Registration>,
}

// SAFETY: the mapping is plain shared memory that is valid until drop, and every access goes through raw copies and
// atomics, which any thread may do.
unsafe impl Send for Mapping {}
// SAFETY: as above; there is no unsynchronised interior state beside the mapped bytes themselves.
unsafe impl Sync for Mapping {}

/// Whether no process has a file open or mapped by another open file description than this descriptor's. Only a
/// process that finds the file by a path can open it again.
///
/// # Errors
/// Those of `fcntl(2)`.
pub fn is_only_user(file: BorrowedFd<'_>) -> io::Result<bool> {
    // The kernel gives a write lease only if no other process has the file open, and keeps none here. If a process
    // opens the file in between, the kernel sends a signal that has no effect.
    let calls = [(F_SETSIG, libc::SIGURG), (libc::F_SETLEASE, libc::F_WRLCK), (libc::F_SETLEASE, libc::F_UNLCK)];
    for (command, value) in calls {
        // SAFETY: it takes two numbers, and the descriptor is valid.
        if unsafe { libc::fcntl(file.as_raw_fd(), command, value) } != 0 {
            let error = io::Error::last_os_error();
            return if error.raw_os_error() == Some(libc::EAGAIN) { Ok(false) } else { Err(error) };
        }
    }
    Ok(true)
}

impl Mapping {
    /// Maps the first `length` bytes of a file. The descriptor is duplicated, for [`Persistent::sync`].
    ///
    /// # Errors
    /// [`MapError`].
    pub fn map(fd: impl AsFd, length: u64, access: MappingAccess, medium: Medium) -> Result<Self, MapError> {
        Self::map_above(fd, length, access, medium, 0)
    }

    /// Maps like [`Self::map`], and keeps a descriptor whose number is at least `least`, if one is available.
    ///
    /// # Errors
    /// As [`Self::map`].
    pub fn map_above(
        fd: impl AsFd,
        length: u64,
        access: MappingAccess,
        medium: Medium,
        least: i32,
    ) -> Result<Self, MapError> {
        let moved = rustix::io::fcntl_dupfd_cloexec(&fd, least);
        let file = moved.or_else(|_| rustix::io::fcntl_dupfd_cloexec(&fd, 0)).map_err(io::Error::from)?;
        let file_bytes = fstat(&file).map_err(io::Error::from)?.st_size as u64;
        let bytes = usize::try_from(length).unwrap_or(usize::MAX);
        if length == 0 || length > file_bytes || bytes > isize::MAX as usize {
            return Err(MapError::WrongLength { asked: length, file_bytes });
        }
        let protection = match access {
            MappingAccess::ReadOnly => libc::PROT_READ,
            MappingAccess::ReadWrite => libc::PROT_READ | libc::PROT_WRITE,
        };
        let flags = match medium.kind {
            MediumKind::Pmem => libc::MAP_SHARED_VALIDATE | libc::MAP_SYNC,
            MediumKind::Memory | MediumKind::Disk => libc::MAP_SHARED,
        };
        let address = map_file(&file, bytes, protection, flags)?;
        let mut mapping = Self { start: address, length: bytes, access, medium, file, registration: None };
        let registration = sigbus::register(mapping.start as usize, bytes, access == MappingAccess::ReadWrite);
        mapping.registration = Some(registration.ok_or(MapError::TooMany)?);
        Ok(mapping)
    }

    /// Whether this mapping and the descriptor that it was made from are the file's only users, in any process. Only a
    /// process that finds the file by a path can open it again.
    ///
    /// # Errors
    /// Those of `fcntl(2)`.
    pub fn is_alone(&self) -> io::Result<bool> {
        is_only_user(self.file())
    }

    /// Keeps the mapping from processes that this one forks, however it makes them.
    ///
    /// There, other memory may stand at its addresses. So they must neither use nor drop it.
    ///
    /// # Errors
    /// Those of `madvise(2)`.
    pub fn keep_from_children(&self) -> io::Result<()> {
        // SAFETY: the pages are this mapping's, and it changes nothing that a load or store could see.
        match unsafe { libc::madvise(self.start.cast(), self.length, libc::MADV_DONTFORK) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Gives up the file, for good: zeros of this process take the place of its bytes, and `instead` that of its
    /// descriptor.
    ///
    /// Other threads may use the mapping meanwhile. They find it as if its file were truncated.
    ///
    /// # Errors
    /// Those of `mmap(2)` and `dup3(2)`.
    pub fn give_up_file(&self, instead: BorrowedFd<'_>) -> io::Result<()> {
        let protection = match self.access {
            MappingAccess::ReadOnly => libc::PROT_READ,
            MappingAccess::ReadWrite => libc::PROT_READ | libc::PROT_WRITE,
        };
        // Private memory would count as the process's data, which may be limited.
        let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
        // SAFETY: the range is this mapping's, so no other memory is replaced.
        if unsafe { libc::mmap(self.start.cast(), self.length, protection, flags, -1, 0) } == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        replace_descriptor(self.file.as_fd(), instead)
    }

    /// The permitted use of the mapping.
    #[must_use]
    pub fn access(&self) -> MappingAccess {
        self.access
    }

    /// The file that is mapped.
    #[must_use]
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// The medium that it was mapped with.
    #[must_use]
    pub fn medium(&self) -> Medium {
        self.medium
    }

    /// Returns the address of the mapping, for system calls that take one.
    ///
    /// A caller that dereferences it must expect other processes to write the same bytes.
    #[must_use]
    pub fn as_ptr(&self) -> *mut u8 {
        self.start
    }

    /// Whether a page of the file was found missing (a process truncated it) and was replaced by zeros that only this
    /// process sees. Nothing written to a torn mapping can be relied on. Needs [`sigbus::install`].
    #[must_use]
    pub fn is_torn(&self) -> bool {
        self.registration.as_ref().is_some_and(Registration::is_torn)
    }

    /// Copies bytes out: [`Persistent::load`].
    ///
    /// # Errors
    /// [`OutOfBounds`].
    #[inline]
    pub fn copy_out(&self, offset: u64, into: &mut [u8]) -> Result<(), OutOfBounds> {
        let from = self.at(offset, into.len() as u64)?;
        // SAFETY: `at` found the whole range inside the mapping. Others may write it meanwhile; the copy may then be
        // torn, which the callers expect, and `into` is ours alone.
        unsafe { std::ptr::copy_nonoverlapping(from, into.as_mut_ptr(), into.len()) };
        // Optimistic readers check a word after the copy; that load must not move before it.
        fence(Ordering::Acquire);
        Ok(())
    }

    /// Prefetches bytes that will soon be copied out; bytes outside the mapping are left out.
    #[inline]
    pub fn expect_copy_out(&self, offset: u64, length: u64) {
        #[cfg(target_arch = "x86_64")]
        if let Ok(start) = self.at(offset, 0) {
            let length = length.min(self.len() - offset);
            for line in (0..length as usize).step_by(LINE_BYTES) {
                // SAFETY: the line holds a byte of the mapping, and a hint to the processor changes nothing.
                unsafe { _mm_prefetch::<_MM_HINT_T0>(start.add(line).cast()) }
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = (offset, length);
    }

    /// Copies bytes in: [`Persistent::store`].
    ///
    /// # Errors
    /// [`OutOfBounds`].
    #[inline]
    pub fn copy_in(&self, offset: u64, bytes: &[u8]) -> Result<(), OutOfBounds> {
        let to = self.at_writable(offset, bytes.len() as u64)?;
        // SAFETY: `at_writable` found the whole range inside a writable mapping, and the source is a slice of other
        // memory.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
        Ok(())
    }

    /// Copies pieces of `piece_bytes` in, and reports the checksum of each stored piece by its number.
    ///
    /// Pieces that are whole cache lines are stored past the cache. As after [`Persistent::store`], they are dirty.
    ///
    /// # Errors
    /// [`OutOfBounds`].
    pub fn copy_in_pieces(
        &self,
        offset: u64,
        bytes: &[u8],
        piece_bytes: usize,
        mut tell_sum: impl FnMut(usize, u32) -> Result<(), OutOfBounds>,
    ) -> Result<(), OutOfBounds> {
        let mut to = self.at_writable(offset, bytes.len() as u64)?;
        for (number, piece) in bytes.chunks(piece_bytes).enumerate() {
            let mut sum = Crc32c::default();
            // SAFETY: `at_writable` found all pieces inside a writable mapping, and the source is a slice of other
            // memory.
            unsafe {
                if !sum.copy(piece.as_ptr(), to, piece.len(), true) {
                    std::ptr::copy_nonoverlapping(piece.as_ptr(), to, piece.len());
                    sum.update(piece);
                }
                to = to.add(piece.len());
            }
            tell_sum(number, sum.finish())?;
        }
        order_stores();
        Ok(())
    }

    /// Asks the kernel to enter these bytes' pages in the page table at once.
    ///
    /// That takes a fraction of the time of one fault for each page. The bytes are about to be written. If the kernel
    /// can't, the faults occur.
    pub fn prepare(&self, offset: u64, length: u64) {
        let Ok(start) = self.at_writable(offset, length) else { return };
        if length == 0 {
            return;
        }
        let first = start as usize / PAGE_BYTES * PAGE_BYTES;
        // SAFETY: the pages are this mapping's, and it changes nothing that a load or store could see.
        unsafe { libc::madvise(first as *mut _, start as usize + length as usize - first, libc::MADV_POPULATE_WRITE) };
    }

    /// Makes the kernel gather the pages from `offset` on, a multiple of [`HUGE_PAGE_BYTES`], into a huge one, for all
    /// mappings of the file. All of the pages must exist.
    ///
    /// # Errors
    /// `EINVAL` if the kernel never can; others if it can't now.
    pub fn collapse(&self, offset: u64) -> io::Result<()> {
        let start = self.at(offset, HUGE_PAGE_BYTES).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))?;
        if start as usize % HUGE_PAGE_BYTES as usize != 0 {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        // SAFETY: the pages are this mapping's, and what they hold stays as it is.
        match unsafe { libc::madvise(start.cast(), HUGE_PAGE_BYTES as usize, MADV_COLLAPSE) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Sets whether the kernel reads ahead of a page that is touched for the first time; by default it does. A new file
    /// has nothing to read ahead but zeros: megabytes of them on machines whose disks are read far ahead. Other media
    /// are not read ahead.
    pub fn set_read_ahead(&self, does: bool) {
        if self.medium.kind != MediumKind::Disk {
            return;
        }
        let advice = if does { libc::MADV_NORMAL } else { libc::MADV_RANDOM };
        // SAFETY: the pages are this mapping's, and it changes nothing that a load or store could see.
        unsafe { libc::madvise(self.start.cast(), self.length, advice) };
    }

    /// Allocates room for bytes of the file that have none.
    ///
    /// A store to bytes without room would end the process if the file system is full.
    ///
    /// # Errors
    /// Those of `fallocate(2)`.
    pub fn allocate(&self, bytes: Range<u64>) -> io::Result<()> {
        allocate(&self.file, bytes)
    }

    /// Sleeps while the four bytes at `offset` are `value`, until a thread wakes the sleepers there ([`Self::wake`]).
    /// It may return sooner.
    pub fn wait(&self, offset: u64, value: u32) {
        self.futex(offset, libc::FUTEX_WAIT, value);
    }

    /// Wakes all threads that sleep at `offset`, in every process.
    pub fn wake(&self, offset: u64) {
        self.futex(offset, libc::FUTEX_WAKE, i32::MAX as u32);
    }

    fn futex(&self, offset: u64, what: i32, value: u32) {
        let Ok(word) = self.at(offset, 4) else { return };
        // SAFETY: the word lies in the mapping, and the kernel only looks at it. Where it is not aligned, that is an
        // error.
        unsafe { libc::syscall(libc::SYS_futex, word, what, value, std::ptr::null::<libc::timespec>()) };
    }

    /// Writes bytes like [`Self::copy_in`], by a system call.
    ///
    /// The kernel then need not clear or read untouched pages that are overwritten as a whole.
    ///
    /// # Errors
    /// Those of `pwrite(2)`; `InvalidInput` if the bytes leave the mapping.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let outside = |error: OutOfBounds| io::Error::new(io::ErrorKind::InvalidInput, error.to_string());
        self.at_writable(offset, bytes.len() as u64).map_err(outside)?;
        let mut written = 0;
        while written < bytes.len() {
            match pwrite(&self.file, &bytes[written..], offset + written as u64) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => written += count,
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Makes these bytes durable as far as the medium can: `fdatasync` of the file on disk, nothing elsewhere.
    ///
    /// The kernel has no ranged form that also waits for the file's own metadata, so the whole file is synced.
    ///
    /// # Errors
    /// Those of `fdatasync(2)`.
    pub fn sync_range(&self, _offset: u64, _length: u64) -> io::Result<()> {
        match self.medium.kind {
            MediumKind::Disk => Ok(fdatasync(&self.file)?),
            MediumKind::Pmem | MediumKind::Memory => Ok(()),
        }
    }

    #[inline]
    fn at(&self, offset: u64, length: u64) -> Result<*mut u8, OutOfBounds> {
        let available = self.length as u64;
        if offset > available || length > available - offset {
            return Err(self.outside(offset, length));
        }
        // SAFETY: offset <= length of the mapping, so the pointer stays in it or one past its end.
        Ok(unsafe { self.start.add(offset as usize) })
    }

    #[inline]
    fn at_writable(&self, offset: u64, length: u64) -> Result<*mut u8, OutOfBounds> {
        if self.access != MappingAccess::ReadWrite {
            return Err(self.outside(offset, length));
        }
        self.at(offset, length)
    }

    #[cold]
    fn outside(&self, offset: u64, length: u64) -> OutOfBounds {
        OutOfBounds { offset, length, available: self.length as u64 }
    }

    #[inline]
    fn word(&self, offset: u64, writable: bool) -> Result<&AtomicU64, OutOfBounds> {
        let address = if writable { self.at_writable(offset, 8)? } else { self.at(offset, 8)? };
        if offset % 8 != 0 {
            return Err(self.outside(offset, 8));
        }
        // SAFETY: the word is inside the mapping, aligned (mappings begin at pages), and valid as long as `self` is. It
        // is only ever used as an atomic here; read-only mappings only load it.
        Ok(unsafe { AtomicU64::from_ptr(address.cast()) })
    }
}

/// Makes a descriptor's number lead to another open file, and closes the one that was there.
///
/// # Errors
/// Those of `dup3(2)`.
pub fn replace_descriptor(number: BorrowedFd<'_>, by: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: it takes numbers. The owner of `number` expects errors of its file.
    match unsafe { libc::dup3(by.as_raw_fd(), number.as_raw_fd(), libc::O_CLOEXEC) } {
        0.. => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Maps a file at an address of the kernel's choice, where huge pages may begin if the address space allows it.
fn map_file(file: &OwnedFd, bytes: usize, protection: i32, flags: i32) -> io::Result<*mut u8> {
    let map = |at: *mut libc::c_void, more: i32| {
        // SAFETY: the address is the kernel's choice, or lies with all the bytes in a reservation of this call alone.
        let address = unsafe { libc::mmap(at, bytes, protection, flags | more, file.as_raw_fd(), 0) };
        if address == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(address.cast::<u8>()) }
    };
    let huge = HUGE_PAGE_BYTES as usize;
    if bytes < huge {
        return map(std::ptr::null_mut(), 0);
    }
    let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    let length = bytes.next_multiple_of(PAGE_BYTES) + huge;
    // SAFETY: a reservation at an address of the kernel's choice touches no memory of ours.
    let reserved = unsafe { libc::mmap(std::ptr::null_mut(), length, libc::PROT_NONE, kind, -1, 0) };
    if reserved == libc::MAP_FAILED {
        return map(std::ptr::null_mut(), 0);
    }
    let before = (reserved as usize).next_multiple_of(huge) - reserved as usize;
    let behind = before + bytes.next_multiple_of(PAGE_BYTES);
    // SAFETY: `before` is less than the reservation is longer than what is mapped.
    let address = map(unsafe { reserved.add(before) }, libc::MAP_FIXED);
    let rest = match address {
        Ok(_) => [(0, before), (behind, length - behind)],
        Err(_) => [(0, length), (0, 0)],
    };
    for (offset, bytes) in rest.into_iter().filter(|(_, bytes)| *bytes > 0) {
        // SAFETY: these bytes of the reservation are not mapped to the file, and nothing uses them.
        unsafe { libc::munmap(reserved.add(offset), bytes) };
    }
    address
}

impl Persistent for Mapping {
    #[inline]
    fn len(&self) -> u64 {
        self.length as u64
    }

    fn is_writable(&self) -> bool {
        self.access == MappingAccess::ReadWrite
    }

    #[inline]
    fn load(&self, offset: u64, into: &mut [u8]) -> Result<(), OutOfBounds> {
        self.copy_out(offset, into)
    }

    #[inline]
    fn load_summed(&self, offset: u64, into: &mut [u8], sum: &mut Crc32c) -> Result<(), OutOfBounds> {
        if into.len() >= SUMMED_BYTES_MIN {
            let from = self.at(offset, into.len() as u64)?;
            // SAFETY: `at` found the whole range inside the mapping, and `into` is ours alone.
            if unsafe { sum.copy(from, into.as_mut_ptr(), into.len(), false) } {
                fence(Ordering::Acquire);
                return Ok(());
            }
        }
        self.copy_out(offset, into)?;
        sum.update(into);
        Ok(())
    }

    #[inline]
    fn store(&self, offset: u64, bytes: &[u8]) -> Result<(), OutOfBounds> {
        self.copy_in(offset, bytes)
    }

    #[inline]
    fn store_flushed(&self, offset: u64, bytes: &[u8]) -> Result<(), OutOfBounds> {
        let to = self.at_writable(offset, bytes.len() as u64)?;
        // SAFETY: `at_writable` found the whole range inside a writable mapping.
        unsafe { self.medium.flush.copy_flushed(to, bytes) };
        Ok(())
    }

    #[inline]
    fn store_summed(&self, offset: u64, bytes: &[u8], sum: &mut Crc32c, is_fetched: bool) -> Result<(), OutOfBounds> {
        let to = self.at_writable(offset, bytes.len() as u64)?;
        let is_flushed = self.medium.flush != FlushMethod::None;
        let past_cache = is_flushed || !is_fetched && bytes.len() >= BULK_BYTES && are_lines(to, bytes.len());
        // SAFETY: `at_writable` found the whole range inside a writable mapping.
        if unsafe { sum.copy(bytes.as_ptr(), to, bytes.len(), past_cache) } {
            if past_cache && !is_flushed {
                order_stores();
            }
            return Ok(());
        }
        store_in_pieces(self, offset, bytes, sum)
    }

    #[inline]
    fn load_u64(&self, offset: u64) -> Result<u64, OutOfBounds> {
        Ok(self.word(offset, false)?.load(Ordering::Acquire))
    }

    #[inline]
    fn store_u64(&self, offset: u64, value: u64) -> Result<(), OutOfBounds> {
        self.word(offset, true)?.store(value, Ordering::Release);
        Ok(())
    }

    #[inline]
    fn compare_exchange_u64(&self, offset: u64, current: u64, new: u64) -> Result<Result<u64, u64>, OutOfBounds> {
        let exchanged = self.word(offset, true)?.compare_exchange(current, new, Ordering::SeqCst, Ordering::SeqCst);
        Ok(exchanged)
    }

    #[inline]
    fn add_u64(&self, offset: u64, amount: u64) -> Result<u64, OutOfBounds> {
        Ok(self.word(offset, true)?.fetch_add(amount, Ordering::Relaxed))
    }

    #[inline]
    fn flush(&self, offset: u64, length: u64) -> Result<(), OutOfBounds> {
        let start = self.at(offset, length)?;
        // SAFETY: `at` found the whole range inside the mapping.
        unsafe { self.medium.flush.flush(start, length as usize) };
        Ok(())
    }

    #[inline]
    fn expect_store(&self, offset: u64, length: u64) {
        #[cfg(target_arch = "x86_64")]
        if let Ok(start) = self.at_writable(offset, 0) {
            // Flushed bytes go past the cache, except at the ends.
            let is_flushed = self.medium.flush != FlushMethod::None;
            let most = if is_flushed { NEAR_BYTES } else { u64::MAX };
            let length = length.min(self.len() - offset).min(most) as usize;
            for line in (0..length).step_by(LINE_BYTES) {
                // SAFETY: the line holds a byte of the mapping, and a hint to the processor changes nothing; one that
                // does not know it does nothing.
                unsafe {
                    let line = start.add(line);
                    if length as u64 <= NEAR_BYTES {
                        std::arch::asm!("prefetchw [{}]", in(reg) line, options(nostack, preserves_flags));
                    } else {
                        _mm_prefetch::<_MM_HINT_T1>(line.cast());
                    }
                }
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = (offset, length);
    }

    #[inline]
    fn fence(&self) {
        self.medium.flush.fence();
    }

    fn sync(&self) -> io::Result<()> {
        self.sync_range(0, self.length as u64)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // The range leaves the table first: once unmapped, its addresses may be given to memory that is none of ours.
        self.registration = None;
        // SAFETY: the mapping was made by `map` with this length, and no reference into it outlives `self`.
        unsafe { libc::munmap(self.start.cast(), self.length) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(bytes: u64) -> std::fs::File {
        let file = tempfile::tempfile().unwrap();
        file.set_len(bytes).unwrap();
        file
    }

    #[test]
    fn write_is_complete_or_refused_past_the_end() {
        let file = file(64 << 10);
        for (round, medium) in [Medium::MEMORY, Medium::DISK, Medium::emulated_pmem()].into_iter().enumerate() {
            let mapping = Mapping::map(&file, 64 << 10, MappingAccess::ReadWrite, medium).unwrap();
            for length in [4096, 32 << 10] {
                let bytes = vec![1 + round as u8; length];
                mapping.write(8192, &bytes).unwrap();
                let mut found = vec![0; length];
                mapping.copy_out(8192, &mut found).unwrap();
                assert_eq!(found, bytes);
                let error = mapping.write((64 << 10) - 4000, &bytes).unwrap_err();
                assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
            }
            let reader = Mapping::map(&file, 64 << 10, MappingAccess::ReadOnly, medium).unwrap();
            assert!(reader.write(0, &[0; 32 << 10]).is_err());
        }
    }

    #[test]
    fn a_long_mapping_begins_where_a_huge_page_may() {
        let file = tempfile::tempfile_in("/dev/shm").unwrap();
        file.set_len(HUGE_PAGE_BYTES + 4096).unwrap();
        let bytes = HUGE_PAGE_BYTES + 4096;
        crate::allocate(&file, 0..bytes).unwrap();
        let [one, two] =
            [(); 2].map(|()| Mapping::map(&file, bytes, MappingAccess::ReadWrite, Medium::MEMORY).unwrap());
        for mapping in [&one, &two] {
            assert_eq!(mapping.start as usize % HUGE_PAGE_BYTES as usize, 0);
        }
        one.copy_in(0, b"kept").unwrap();
        if let Err(error) = one.collapse(0) {
            println!("skipped: this kernel gathers no pages ({error})");
            return;
        }
        let mut found = [0; 4];
        two.copy_out(0, &mut found).unwrap();
        assert_eq!(&found, b"kept");
        assert_eq!(one.collapse(HUGE_PAGE_BYTES).unwrap_err().raw_os_error(), Some(libc::EINVAL), "it is not whole");
        assert!(one.collapse(4096).is_err());
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let begins = format!("{:x}-", two.start as usize);
        let of_two = maps.lines().skip_while(|line| !line.starts_with(&begins));
        let huge = of_two.skip(1).find(|line| line.starts_with("ShmemPmdMapped")).unwrap();
        assert!(!huge.contains(" 0 kB"), "{huge}");
    }

    #[test]
    fn mapping_without_read_ahead_reads_only_the_touched_page() {
        const BYTES: u64 = 1 << 20;
        let file = file(BYTES);
        let mapping = Mapping::map(&file, BYTES, MappingAccess::ReadWrite, Medium::DISK).unwrap();
        mapping.set_read_ahead(false);
        mapping.store_u64(0, 1).unwrap();
        let mut resident = vec![0_u8; BYTES as usize / PAGE_BYTES];
        // SAFETY: there is a byte for each page of the mapping.
        let asked = unsafe { libc::mincore(mapping.start.cast(), mapping.length, resident.as_mut_ptr()) };
        assert_eq!((asked, resident.iter().filter(|page| **page & 1 != 0).count()), (0, 1));
    }

    #[test]
    fn bytes_and_words_are_shared_between_mappings_of_one_file() {
        let file = file(8192);
        for medium in [Medium::MEMORY, Medium::DISK, Medium::emulated_pmem()] {
            let writer = Mapping::map(&file, 8192, MappingAccess::ReadWrite, medium).unwrap();
            let reader = Mapping::map(&file, 8192, MappingAccess::ReadOnly, medium).unwrap();
            writer.store(4090, b"across a page").unwrap();
            writer.store_flushed(100, &[7; 1000]).unwrap();
            writer.store_u64(16, 99).unwrap();
            assert_eq!(writer.compare_exchange_u64(16, 98, 1).unwrap(), Err(99));
            assert_eq!(writer.compare_exchange_u64(16, 99, 100).unwrap(), Ok(99));
            assert_eq!(writer.add_u64(16, u64::MAX).unwrap(), 100);
            assert_eq!(writer.add_u64(16, 1).unwrap(), 99);
            writer.flush(0, 8192).unwrap();
            writer.fence();
            writer.sync().unwrap();
            let mut bytes = [0; 13];
            reader.load(4090, &mut bytes).unwrap();
            assert_eq!(&bytes, b"across a page");
            assert_eq!(reader.load_u64(16).unwrap(), 100);
            let mut bulk = [0; 1002];
            reader.load(99, &mut bulk).unwrap();
            assert!(bulk[0] == 0 && bulk[1..1001].iter().all(|&b| b == 7) && bulk[1001] == 0);
        }
    }

    #[test]
    fn copied_bytes_match_their_checksum() {
        const BYTES: u64 = 64 << 10;
        let file = file(BYTES);
        let bytes: Vec<u8> = (0..BYTES as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
        for medium in [Medium::MEMORY, Medium::emulated_pmem()] {
            let mapping = Mapping::map(&file, BYTES, MappingAccess::ReadWrite, medium).unwrap();
            for (offset, length, piece) in [(0, 16 << 10, 4096), (4096, 4096, 4096), (64, 1000, 64), (3, 9000, 4096)] {
                let source = &bytes[..length];
                let mut sums = Vec::new();
                let note = |number: usize, sum| {
                    assert_eq!(number, sums.len());
                    sums.push(sum);
                    Ok(())
                };
                mapping.copy_in_pieces(offset, source, piece, note).unwrap();
                assert_eq!(sums, source.chunks(piece).map(Crc32c::of).collect::<Vec<_>>());
                let (mut found, mut sum) = (vec![0; length], Crc32c::default());
                mapping.load_summed(offset, &mut found, &mut sum).unwrap();
                assert!(found == source && sum.finish() == Crc32c::of(source), "{offset}, {length}");
            }
            mapping.copy_in(0, &bytes).unwrap();
            for (offset, length) in [(0, 0), (5, 1), (8, 255), (9, 256), (63, 257), (4090, 5000), (1, 60_000)] {
                let source = &bytes[offset..offset + length];
                let (mut found, mut sum) = (vec![0; length + 1], Crc32c::default());
                sum.update(b"before");
                mapping.load_summed(offset as u64, &mut found[1..], &mut sum).unwrap();
                assert_eq!(&found[1..], source);
                assert_eq!(sum.finish(), Crc32c::of(&[b"before", source].concat()));
            }
            assert!(mapping.load_summed(BYTES - 400, &mut [0; 401], &mut Crc32c::default()).is_err());
            let none = |_, _| panic!("nothing is stored");
            assert!(mapping.copy_in_pieces(BYTES - 4096, &bytes[..8192], 4096, none).is_err());
            let reader = Mapping::map(&file, BYTES, MappingAccess::ReadOnly, medium).unwrap();
            assert!(reader.copy_in_pieces(0, &bytes[..4096], 4096, none).is_err());
        }
    }

    #[test]
    fn accesses_outside_misaligned_or_forbidden_fail() {
        let file = file(4096);
        let mapping = Mapping::map(&file, 4096, MappingAccess::ReadWrite, Medium::MEMORY).unwrap();
        let error = OutOfBounds { offset: 4090, length: 7, available: 4096 };
        assert_eq!(mapping.load(4090, &mut [0; 7]), Err(error));
        assert_eq!(mapping.store(4090, &[0; 7]), Err(error));
        assert!(mapping.load(u64::MAX, &mut [0; 7]).is_err());
        assert!(mapping.flush(1, u64::MAX).is_err());
        assert!(mapping.load_u64(4).is_err());
        assert!(mapping.load_u64(4096).is_err());
        assert!(mapping.store_u64(4092, 0).is_err());
        assert!(mapping.load(4096, &mut []).is_ok());
        let reader = Mapping::map(&file, 4096, MappingAccess::ReadOnly, Medium::MEMORY).unwrap();
        assert!(reader.store(0, b"x").is_err());
        assert!(reader.store_u64(0, 1).is_err());
        assert!(reader.compare_exchange_u64(0, 0, 1).is_err());
        assert!(reader.add_u64(0, 1).is_err());
        assert!(reader.store_flushed(0, b"x").is_err());
    }

    #[test]
    fn a_mapping_never_exceeds_its_file() {
        let file = file(4096);
        let error = Mapping::map(&file, 4097, MappingAccess::ReadWrite, Medium::MEMORY).unwrap_err();
        assert!(matches!(error, MapError::WrongLength { asked: 4097, file_bytes: 4096 }));
        assert!(Mapping::map(&file, 0, MappingAccess::ReadWrite, Medium::MEMORY).is_err());
    }
}
