//! Faults on mapped files whose pages are gone.
//!
//! A session may truncate the very log file that SharedFS has mapped. The next access then raises `SIGBUS`, which would
//! kill SharedFS for all sessions. The handler installed here maps an anonymous zero page at the fault, marks the
//! mapping as truncated, and lets the access continue. The reader sees zeros, which form no record. The previous
//! handler of `SIGBUS` gets every other fault.
//!
//! The table of mappings is static and lock-free, since a signal handler may neither lock nor allocate.

use std::cell::UnsafeCell;
use std::io;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering};

use parking_lot::Mutex;

/// The most mappings that one process may have. A node has a mapping for each data segment (256 MiB) and a few for each
/// session; this bound is 8 TiB in one process, at 24 bytes of table for each.
pub const MAPPINGS_MAX: usize = 32768;

const FREE: u8 = 0;
const CLAIMED: u8 = 1;
const READ_ONLY: u8 = 2;
const READ_WRITE: u8 = 3;

struct Range {
    // FREE, CLAIMED (start and end are not yet meaningful), or the access of the range.
    state: AtomicU8,
    torn: AtomicBool,
    start: AtomicUsize,
    end: AtomicUsize,
}

static RANGES: [Range; MAPPINGS_MAX] = [const {
    Range {
        state: AtomicU8::new(FREE),
        torn: AtomicBool::new(false),
        start: AtomicUsize::new(0),
        end: AtomicUsize::new(0),
    }
}; MAPPINGS_MAX];

/// One more than the highest index ever used, so that no search walks the whole table.
static USED: AtomicUsize = AtomicUsize::new(0);

/// A range in the table; dropping it takes the range out.
#[derive(Debug)]
pub(crate) struct Registration(usize);

impl Registration {
    pub(crate) fn is_torn(&self) -> bool {
        RANGES[self.0].torn.load(Ordering::Acquire)
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        RANGES[self.0].state.store(FREE, Ordering::Release);
    }
}

/// Puts a range into the table; none if the table is full.
pub(crate) fn register(start: usize, length: usize, writable: bool) -> Option<Registration> {
    let index = RANGES
        .iter()
        .position(|range| range.state.compare_exchange(FREE, CLAIMED, Ordering::AcqRel, Ordering::Relaxed).is_ok())?;
    USED.fetch_max(index + 1, Ordering::AcqRel);
    let range = &RANGES[index];
    range.torn.store(false, Ordering::Relaxed);
    range.start.store(start, Ordering::Relaxed);
    range.end.store(start + length, Ordering::Relaxed);
    range.state.store(if writable { READ_WRITE } else { READ_ONLY }, Ordering::Release);
    Some(Registration(index))
}

struct PreviousAction(UnsafeCell<MaybeUninit<libc::sigaction>>);

// SAFETY: it is written once, under the lock of `install` and before the handler that reads it is in place.
unsafe impl Sync for PreviousAction {}

static PREVIOUS: PreviousAction = PreviousAction(UnsafeCell::new(MaybeUninit::uninit()));
static INSTALLED: Mutex<bool> = Mutex::new(false);

/// Installs the handler, once for the process; further calls do nothing.
///
/// # Errors
/// Those of `sigaction(2)`.
pub fn install() -> io::Result<()> {
    let mut installed = INSTALLED.lock();
    if *installed {
        return Ok(());
    }
    // SAFETY: the structures are plain data for which all zeros are valid; the previous action is stored before the
    // handler can run, and the lock keeps other writers out.
    unsafe {
        let mut previous: libc::sigaction = std::mem::zeroed();
        if libc::sigaction(libc::SIGBUS, std::ptr::null(), &mut previous) != 0 {
            return Err(io::Error::last_os_error());
        }
        (*PREVIOUS.0.get()).write(previous);
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handle as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        libc::sigemptyset(&mut action.sa_mask);
        if libc::sigaction(libc::SIGBUS, &action, std::ptr::null_mut()) != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    *installed = true;
    Ok(())
}

extern "C" fn handle(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel hands a valid siginfo to an SA_SIGINFO handler, and for SIGBUS its address field is set.
    // `errno` is saved and restored because the interrupted code may be about to read it.
    unsafe {
        let errno = *libc::__errno_location();
        let address = (*info).si_addr() as usize;
        if !((*info).si_code > 0 && repair(address)) {
            forward(signal, info, context);
        }
        *libc::__errno_location() = errno;
    }
}

/// Puts a zero page under `address` if it lies in a registered range.
fn repair(address: usize) -> bool {
    const PAGE_BYTES: usize = 4096;
    let used = USED.load(Ordering::Acquire).min(MAPPINGS_MAX);
    let hit = RANGES[..used].iter().find(|range| {
        range.state.load(Ordering::Acquire) >= READ_ONLY
            && (range.start.load(Ordering::Relaxed)..range.end.load(Ordering::Relaxed)).contains(&address)
    });
    let Some(range) = hit else { return false };
    let writable = range.state.load(Ordering::Acquire) == READ_WRITE;
    let protection = if writable { libc::PROT_READ | libc::PROT_WRITE } else { libc::PROT_READ };
    range.torn.store(true, Ordering::Release);
    // SAFETY: the page lies in a mapping of this library, since a mapping leaves the table before it is unmapped. So
    // replacing the page takes no other memory. mmap is a bare system call, safe in a handler.
    let page = unsafe {
        libc::mmap(
            (address & !(PAGE_BYTES - 1)) as *mut libc::c_void,
            PAGE_BYTES,
            protection,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED,
            -1,
            0,
        )
    };
    page != libc::MAP_FAILED
}

/// Passes any other fault to the previous action.
///
/// # Safety
/// The arguments are those that the kernel gave to the handler.
unsafe fn forward(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: `install` wrote the previous action before it installed the handler, and nothing writes it again.
    let previous = unsafe { (*PREVIOUS.0.get()).assume_init_ref() };
    let action = previous.sa_sigaction;
    if action == libc::SIG_DFL || action == libc::SIG_IGN {
        // The faulting instruction runs again after the return and meets the default action, which ends the process
        // with the right signal. Ignoring a synchronous fault has the same end, as the kernel does it. SAFETY: a zeroed
        // action with SIG_DFL is a valid argument.
        unsafe {
            let mut default: libc::sigaction = std::mem::zeroed();
            default.sa_sigaction = libc::SIG_DFL;
            libc::sigaction(signal, &default, std::ptr::null_mut());
            if (*info).si_code <= 0 {
                // A signal that was sent, rather than raised by a fault, would not come again by itself.
                libc::raise(signal);
            }
        }
    } else if previous.sa_flags & libc::SA_SIGINFO != 0 {
        // SAFETY: the previous owner registered this address as a three-argument handler.
        let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) =
            unsafe { std::mem::transmute(action) };
        handler(signal, info, context);
    } else {
        // SAFETY: the previous owner registered this address as a one-argument handler.
        let handler: extern "C" fn(libc::c_int) = unsafe { std::mem::transmute(action) };
        handler(signal);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Mapping, MappingAccess, Medium, Persistent};

    #[test]
    fn a_truncated_mapping_reads_zeros_and_says_so() {
        install().unwrap();
        install().unwrap();
        let file = tempfile::tempfile().unwrap();
        file.set_len(16384).unwrap();
        for access in [MappingAccess::ReadWrite, MappingAccess::ReadOnly] {
            file.set_len(16384).unwrap();
            let mapping = Mapping::map(&file, 16384, access, Medium::DISK).unwrap();
            let other = Mapping::map(tempfile_of(4096), 4096, MappingAccess::ReadOnly, Medium::DISK).unwrap();
            std::os::unix::fs::FileExt::write_all_at(&file, &[5; 16384], 0).unwrap();
            file.set_len(4096).unwrap();
            let mut bytes = [1; 8192];
            mapping.load(2048, &mut bytes).unwrap();
            assert!(bytes[..2048].iter().all(|&b| b == 5));
            assert!(bytes[2048..].iter().all(|&b| b == 0));
            assert!(mapping.is_torn());
            assert!(!other.is_torn());
            if access == MappingAccess::ReadWrite {
                mapping.store_u64(12288, 3).unwrap();
            }
        }
    }

    fn tempfile_of(bytes: u64) -> std::fs::File {
        let file = tempfile::tempfile().unwrap();
        file.set_len(bytes).unwrap();
        file
    }

    #[test]
    fn a_fault_elsewhere_still_ends_the_process() {
        install().unwrap();
        let file = tempfile_of(4096);
        // SAFETY: the child only truncates, reads a mapping made for it and exits; it takes no lock and allocates
        // nothing.
        unsafe {
            use std::os::fd::AsRawFd;
            let page = libc::mmap(std::ptr::null_mut(), 4096, libc::PROT_READ, libc::MAP_SHARED, file.as_raw_fd(), 0);
            assert_ne!(page, libc::MAP_FAILED);
            let child = libc::fork();
            assert!(child >= 0);
            if child == 0 {
                libc::prctl(libc::PR_SET_DUMPABLE, 0);
                libc::ftruncate(file.as_raw_fd(), 0);
                let value = page.cast::<u8>().read_volatile();
                libc::_exit(i32::from(value));
            }
            let mut status = 0;
            assert_eq!(libc::waitpid(child, &mut status, 0), child);
            assert!(libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGBUS, "status {status:#x}");
            libc::munmap(page, 4096);
        }
    }
}
