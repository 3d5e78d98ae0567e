//! The program's memory: checks addresses without a fault, copies from and to it.
//!
//! For a bad pointer the kernel gives `EFAULT`; the library would crash the program. So before it touches memory, it
//! asks about the pages by a system call that brings them in (`MADV_POPULATE_*`). It remembers them until the program
//! unmaps or protects them. So a program that uses its buffers again pays one look into a table.

use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use ashlar_types::Errno;

use crate::entry::arch::system_call;

const PAGE: u64 = 4096;
/// Addresses from here on are the kernel's.
const USER_END: u64 = 1 << 47;
/// Nothing is mapped below this address, where a program that uses a null pointer reads.
const USER_START: u64 = 0x1000;
/// Pages that are remembered, 64 MiB.
///
/// They hold the stack, and the buffers into which a database reads its blocks. The table takes memory only as it is
/// used.
const REMEMBERED: usize = 16384;
/// If more pages than these change, the whole table is discarded.
const FORGOTTEN_AT_ONCE: u64 = 4096;
/// More pages than these are checked each time: next to copying them, that costs nothing.
const REMEMBERED_AT_ONCE: u64 = 64;
/// Takes mapped pages away.
pub(crate) const MADV_GUARD_INSTALL: u64 = 102;
const MADV_POPULATE_READ: u64 = 22;
const MADV_POPULATE_WRITE: u64 = 23;
/// The longest path, with its end.
pub(crate) const PATH_MAX: usize = 4096;

/// The use of memory that is checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MemoryUse {
    Read = 0,
    Write = 1,
}

/// Remembered pages by a hash of their number: `epoch << 37 | page << 1 | use`.
///
/// A writable page is readable.
static PAGES: [AtomicU64; REMEMBERED] = [const { AtomicU64::new(0) }; REMEMBERED];
const PAGE_BITS: u64 = ((1 << 37) - 1) & !1;
/// Counts how often the whole table was discarded, modulo 2²⁷.
static EPOCH: AtomicU64 = AtomicU64::new(1);
const EPOCH_BITS: u64 = (1 << 27) - 1;
/// Counts how often some pages were removed: pages checked meanwhile are not remembered.
static FORGOTTEN: AtomicU64 = AtomicU64::new(0);

/// Discards the whole table: the program changes some mapping.
pub(crate) fn forget_all_pages() {
    EPOCH.fetch_add(1, Ordering::SeqCst);
}

/// Removes the pages of a part of the memory, whose mapping the program changes.
pub(crate) fn forget_pages(start: u64, bytes: u64) {
    let pages = start / PAGE..start.saturating_add(bytes).div_ceil(PAGE);
    if pages.end.saturating_sub(pages.start) > FORGOTTEN_AT_ONCE {
        return forget_all_pages();
    }
    FORGOTTEN.fetch_add(1, Ordering::SeqCst);
    pages.for_each(drop_page);
}

/// Removes a page from the table, if it is there.
fn drop_page(page: u64) {
    let known = entry_of(page).load(Ordering::SeqCst);
    if known & PAGE_BITS == page << 1 {
        // If another page takes the entry just now, it is checked once more.
        entry_of(page).store(0, Ordering::SeqCst);
    }
}

/// The end of the heap that the program last asked for.
///
/// Only a lower end takes memory away.
static BREAK: AtomicU64 = AtomicU64::new(u64::MAX);

/// Records that the program asks for an end of its heap.
///
/// 0 asks for the current end.
pub(crate) fn record_break(end: u64) {
    if end == 0 {
        return;
    }
    let before = BREAK.swap(end, Ordering::Relaxed);
    forget_pages(end, before.saturating_sub(end));
}

fn page_entry(epoch: u64, page: u64, what: MemoryUse) -> u64 {
    (epoch & EPOCH_BITS) << 37 | page << 1 | what as u64
}

fn entry_of(page: u64) -> &'static AtomicU64 {
    &PAGES[(page ^ page >> REMEMBERED.trailing_zeros()) as usize % REMEMBERED]
}

#[inline]
fn is_page_known(page: u64, what: MemoryUse) -> bool {
    let (known, epoch) = (entry_of(page).load(Ordering::Relaxed), EPOCH.load(Ordering::Relaxed));
    known == page_entry(epoch, page, MemoryUse::Write)
        || what == MemoryUse::Read && known == page_entry(epoch, page, MemoryUse::Read)
}

/// Checks that `length` bytes at an address may be used so.
///
/// # Errors
/// `EFAULT`.
#[inline]
pub(crate) fn check_access(address: u64, length: u64, what: MemoryUse) -> Result<(), Errno> {
    if are_pages_known(address, length as usize, what) { Ok(()) } else { check_by_kernel(address, length, what) }
}

#[cold]
fn check_by_kernel(address: u64, length: u64, what: MemoryUse) -> Result<(), Errno> {
    if length == 0 {
        return Ok(());
    }
    let end = check_bounds(address, length)?;
    if address < USER_START {
        return Err(Errno::EFAULT);
    }
    let pages = address / PAGE..(end - 1) / PAGE + 1;
    let is_short = pages.end - pages.start <= REMEMBERED_AT_ONCE;
    let (epoch, forgotten) = (EPOCH.load(Ordering::SeqCst), FORGOTTEN.load(Ordering::SeqCst));
    ask_kernel(pages.start * PAGE, (pages.end - pages.start) * PAGE, what)?;
    if is_short {
        pages.clone().for_each(|page| entry_of(page).store(page_entry(epoch, page, what), Ordering::SeqCst));
        if FORGOTTEN.load(Ordering::SeqCst) != forgotten {
            pages.for_each(drop_page);
        }
    }
    Ok(())
}

/// Returns the program's memory as bytes to read, if the table says that it is readable.
#[inline]
pub(crate) fn known_bytes<'a>(address: u64, length: usize) -> Option<&'a [u8]> {
    are_pages_known(address, length, MemoryUse::Read).then_some(())?;
    // SAFETY: as in [`bytes`].
    Some(unsafe { std::slice::from_raw_parts(address as *const u8, length) })
}

/// Returns the program's memory as bytes to fill, if the table says that it is writable.
#[inline]
pub(crate) fn known_bytes_mut<'a>(address: u64, length: usize) -> Option<&'a mut [u8]> {
    are_pages_known(address, length, MemoryUse::Write).then_some(())?;
    // SAFETY: as in [`bytes_mut`].
    Some(unsafe { std::slice::from_raw_parts_mut(address as *mut u8, length) })
}

#[inline]
fn are_pages_known(address: u64, length: usize, what: MemoryUse) -> bool {
    let end = address.saturating_add(length as u64);
    let (first, last) = (address / PAGE, end.saturating_sub(1) / PAGE);
    // For a higher address, the table would answer as for the same address without its upper bits.
    address >= USER_START
        && end <= USER_END
        && length > 0
        && last - first < REMEMBERED_AT_ONCE
        && (first..=last).all(|page| is_page_known(page, what))
}

/// Asks the kernel.
fn ask_kernel(start: u64, bytes: u64, what: MemoryUse) -> Result<(), Errno> {
    let advice = if what == MemoryUse::Write { MADV_POPULATE_WRITE } else { MADV_POPULATE_READ };
    loop {
        // SAFETY: it changes no content; it brings in only pages that the use would bring in.
        let answer = unsafe { system_call(libc::SYS_madvise as u64, [start, bytes, advice, 0, 0, 0]) };
        return match -answer as i32 {
            0 => Ok(()),
            libc::EINTR | libc::EAGAIN => continue,
            // Readable memory that can't be written gets this error. So do a request that a kernel before 5.14 does not
            // know, and memory such as a device's, which the kernel can't check in this way.
            libc::EINVAL
                if what == MemoryUse::Write && has_populate() && ask_kernel(start, bytes, MemoryUse::Read).is_ok() =>
            {
                Err(Errno::EFAULT)
            }
            libc::EINVAL => probe_pages(start, bytes),
            _ => Err(Errno::EFAULT),
        };
    }
}

/// Returns whether the kernel knows the request: it then accepts an empty range.
fn has_populate() -> bool {
    // SAFETY: no memory is named.
    unsafe { system_call(libc::SYS_madvise as u64, [PAGE, 0, MADV_POPULATE_READ, 0, 0, 0]) == 0 }
}

/// Reads a byte of each page by a system call.
///
/// It can't check that they are writable.
fn probe_pages(start: u64, bytes: u64) -> Result<(), Errno> {
    // SAFETY: the call takes no arguments.
    let process = unsafe { system_call(libc::SYS_getpid as u64, [0; 6]) } as u64;
    for page in (start..start + bytes).step_by(PAGE as usize) {
        let mut byte = 0u8;
        let into = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
        let from = libc::iovec { iov_base: page as *mut libc::c_void, iov_len: 1 };
        let arguments = [process, (&raw const into) as u64, 1, (&raw const from) as u64, 1, 0];
        // SAFETY: it writes one byte into a local variable.
        if unsafe { system_call(libc::SYS_process_vm_readv as u64, arguments) } != 1 {
            return Err(Errno::EFAULT);
        }
    }
    Ok(())
}

/// Loads a value from the program's memory.
///
/// # Errors
/// `EFAULT`.
pub(crate) fn load<T: Plain>(address: u64) -> Result<T, Errno> {
    check_access(address, size_of::<T>() as u64, MemoryUse::Read)?;
    // SAFETY: the memory is readable, and any bytes are a value.
    Ok(unsafe { (address as *const T).read_unaligned() })
}

/// Stores a value in the program's memory.
///
/// # Errors
/// `EFAULT`.
pub(crate) fn store<T: Plain>(address: u64, value: &T) -> Result<(), Errno> {
    check_access(address, size_of::<T>() as u64, MemoryUse::Write)?;
    // SAFETY: the memory is writable, and the program has asked for the value in it.
    unsafe {
        std::ptr::copy_nonoverlapping(std::ptr::from_ref(value).cast::<u8>(), address as *mut u8, size_of::<T>())
    };
    Ok(())
}

/// Stores bytes in the program's memory.
///
/// # Errors
/// `EFAULT`.
pub(crate) fn store_bytes(address: u64, bytes: &[u8]) -> Result<(), Errno> {
    check_access(address, bytes.len() as u64, MemoryUse::Write)?;
    // SAFETY: as for [`store`].
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), address as *mut u8, bytes.len()) };
    Ok(())
}

/// Returns the program's memory as bytes to read.
///
/// # Errors
/// `EFAULT`.
pub(crate) fn bytes<'a>(address: u64, length: usize) -> Result<&'a [u8], Errno> {
    check_access(address, length as u64, MemoryUse::Read)?;
    if length == 0 {
        return Ok(&[]);
    }
    // SAFETY: the memory stays for as long as the program leaves it mapped during its own call. It may change
    // meanwhile. The log expects that: it copies before it computes a checksum.
    Ok(unsafe { std::slice::from_raw_parts(address as *const u8, length) })
}

/// Returns the program's memory as bytes to fill.
///
/// # Errors
/// `EFAULT`.
pub(crate) fn bytes_mut<'a>(address: u64, length: usize) -> Result<&'a mut [u8], Errno> {
    check_access(address, length as u64, MemoryUse::Write)?;
    if length == 0 {
        return Ok(&mut []);
    }
    // SAFETY: as for [`bytes`]; the program has given the memory away for the time of the call.
    Ok(unsafe { std::slice::from_raw_parts_mut(address as *mut u8, length) })
}

/// Returns the end of so many bytes at an address, if a program may have memory there.
///
/// # Errors
/// `EFAULT`.
pub(crate) fn check_bounds(address: u64, length: u64) -> Result<u64, Errno> {
    address.checked_add(length).filter(|end| *end <= USER_END).ok_or(Errno::EFAULT)
}

/// As [`bytes`], up to the first byte that is not readable: a call transfers the bytes before it.
///
/// # Errors
/// `EFAULT` if the first byte is not readable.
pub(crate) fn first_bytes<'a>(address: u64, length: usize) -> Result<&'a [u8], Errno> {
    bytes(address, length).or_else(|errno| match reachable_bytes(address, length, MemoryUse::Read) {
        0 => Err(errno),
        length => bytes(address, length),
    })
}

/// As [`bytes_mut`], up to the first byte that is not writable.
///
/// # Errors
/// As [`first_bytes`].
pub(crate) fn first_bytes_mut<'a>(address: u64, length: usize) -> Result<&'a mut [u8], Errno> {
    bytes_mut(address, length).or_else(|errno| match reachable_bytes(address, length, MemoryUse::Write) {
        0 => Err(errno),
        length => bytes_mut(address, length),
    })
}

/// Returns how many bytes from an address on may be used so, up to a length, page by page.
fn reachable_bytes(address: u64, length: usize, what: MemoryUse) -> usize {
    let mut reached = 0;
    while reached < length {
        let at = address.wrapping_add(reached as u64);
        let part = ((PAGE - at % PAGE) as usize).min(length - reached);
        if check_access(at, part as u64, what).is_err() {
            break;
        }
        reached += part;
    }
    reached
}

/// Room for a path, which need not be cleared first.
pub(crate) struct PathBuffer(MaybeUninit<[u8; PATH_MAX]>);

impl PathBuffer {
    pub(crate) const fn new() -> Self {
        Self(MaybeUninit::uninit())
    }
}

/// Copies a string that ends with a zero, and returns it without the zero.
///
/// # Errors
/// `EFAULT`; `ENAMETOOLONG`.
pub(crate) fn copy_path(address: u64, buffer: &mut PathBuffer) -> Result<&[u8], Errno> {
    let into = buffer.0.as_mut_ptr().cast::<u8>();
    let mut length = 0;
    while length < PATH_MAX {
        let at = address.wrapping_add(length as u64);
        let part = ((PAGE - at % PAGE) as usize).min(PATH_MAX - length);
        check_access(at, part as u64, MemoryUse::Read)?;
        // SAFETY: the page is readable, and the buffer has room for the part.
        let (copied, is_end) = unsafe { copy_text(at as *const u8, into.add(length), part) };
        length += copied;
        if is_end {
            // SAFETY: so many bytes were written.
            return Ok(unsafe { std::slice::from_raw_parts(into, length) });
        }
    }
    Err(Errno::ENAMETOOLONG)
}

/// Returns the first bytes at an address without a copy, if the table says that they are readable.
///
/// The program may change them meanwhile. They may extend beyond the end of a shorter string.
#[inline]
pub(crate) fn known_beginning<'a>(address: u64, length: usize) -> Option<&'a [AtomicU8]> {
    are_pages_known(address, length, MemoryUse::Read).then_some(())?;
    // SAFETY: the memory stays for as long as the program leaves it mapped during its own call. Atomic reads allow for
    // concurrent changes.
    Some(unsafe { std::slice::from_raw_parts(address as *const AtomicU8, length) })
}

/// Copies the first bytes of a string, up to the buffer's length.
///
/// Returns none if they can't be read.
pub(crate) fn copy_start(address: u64, buffer: &mut [u8]) -> usize {
    let mut length = 0;
    while length < buffer.len() {
        let at = address.wrapping_add(length as u64);
        let part = ((PAGE - at % PAGE) as usize).min(buffer.len() - length);
        if check_access(at, 1, MemoryUse::Read).is_err() {
            return 0;
        }
        // SAFETY: as in [`copy_path`].
        let (copied, is_end) = unsafe { copy_text(at as *const u8, buffer.as_mut_ptr().add(length), part) };
        length += copied;
        if is_end {
            break;
        }
    }
    length
}

/// Copies bytes up to a zero; returns how many, and whether there was a zero.
///
/// A byte that the program changes meanwhile is copied with its old or its new value.
///
/// # Safety
/// `most` bytes can be read and written.
unsafe fn copy_text(from: *const u8, to: *mut u8, most: usize) -> (usize, bool) {
    const WORD: usize = size_of::<u64>();
    const ONES: u64 = u64::MAX / 0xff;
    let mut copied = 0;
    while copied + WORD <= most {
        // SAFETY: the word is within the bytes.
        let word = unsafe { from.add(copied).cast::<u64>().read_unaligned() };
        // SAFETY: as above.
        unsafe { to.add(copied).cast::<u64>().write_unaligned(word) };
        // The lowest bit that is set belongs to the first zero byte.
        let zeros = word.wrapping_sub(ONES) & !word & ONES << 7;
        if zeros != 0 {
            return (copied + zeros.trailing_zeros() as usize / 8, true);
        }
        copied += WORD;
    }
    while copied < most {
        // SAFETY: the byte is within the bytes.
        let byte = unsafe { from.add(copied).read_volatile() };
        if byte == 0 {
            return (copied, true);
        }
        // SAFETY: as above.
        unsafe { to.add(copied).write(byte) };
        copied += 1;
    }
    (copied, false)
}

/// Types for which any bytes are a value.
///
/// # Safety
/// No pattern of bits is invalid, and no bytes lie outside the fields.
pub(crate) unsafe trait Plain: Copy {}

// SAFETY: numbers.
unsafe impl Plain for u8 {}
// SAFETY: numbers.
unsafe impl Plain for u32 {}
// SAFETY: any bytes are a number.
unsafe impl Plain for u16 {}
// SAFETY: numbers.
unsafe impl Plain for i32 {}
// SAFETY: numbers.
unsafe impl Plain for u64 {}
// SAFETY: numbers.
unsafe impl Plain for i64 {}
// SAFETY: numbers throughout; its padding is written as it was made, with zeros.
unsafe impl Plain for libc::stat {}
// SAFETY: as above.
unsafe impl Plain for libc::statx {}
// SAFETY: a pointer is checked before it is followed.
unsafe impl Plain for libc::iovec {}
// SAFETY: numbers.
unsafe impl Plain for libc::timespec {}
// SAFETY: numbers.
unsafe impl Plain for libc::timeval {}
// SAFETY: numbers.
unsafe impl Plain for libc::flock {}
// SAFETY: numbers.
unsafe impl Plain for libc::pollfd {}
// SAFETY: numbers, and pointers that are checked before they are followed.
unsafe impl Plain for libc::msghdr {}
