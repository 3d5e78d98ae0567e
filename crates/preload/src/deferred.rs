//! The time before a process has a session: the kernel serves it.
//!
//! A session costs as much as some hundred calls through FUSE. Most programs make fewer and end, or let other programs
//! do the work. So the kernel serves the first calls of a process, and the first ones after a fork. When the program
//! goes on, its session begins and adopts the files that it has opened meanwhile. Until then, a descriptor that the
//! kernel has returned is *adoptable*, and calls on it are watched. If others may share its open file (it was passed
//! on, or the process forked), it stays with the kernel. A program has adoptable descriptors from its start on if the
//! program before it has passed some on (`carried`).
//!
//! A program that went on in earlier runs has its session from the first call on (`program_profile`).
//!
//! Only a process with one thread has adoptable descriptors: before it makes another, they are adopted.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use crate::calls::{self, Verdict, files};
use crate::carried::Carried;
use crate::{descriptors, locks, program_profile, session};

/// Calls that the kernel serves first: about the cost of a session.
const CALLS: u32 = 64;
/// Bytes that cost as much as one more call.
const BYTES_OF_CALL: u64 = 16 << 10;
/// The most that a call counts for its bytes: programs ask for more bytes than there are.
const CALLS_FOR_BYTES: u64 = 8;

/// The number of calls at the beginning.
static GIVEN: AtomicU32 = AtomicU32::new(CALLS);
/// The number of calls left; from 0 on, the process has sessions.
static LEFT: AtomicU32 = AtomicU32::new(0);
/// Mounts that were used meanwhile, by bit.
static USED: AtomicU32 = AtomicU32::new(0);
/// Whether the program's profile is read and updated.
///
/// It is if no number of calls was set, and the process has not forked.
static HAS_PROFILE: AtomicBool = AtomicBool::new(false);
static IS_ANY_CANDIDATE: AtomicBool = AtomicBool::new(false);
/// Whether some descriptors were adoptable before the program began.
static IS_ANY_CARRIED: AtomicBool = AtomicBool::new(false);

/// Begins the count before the program does, with the files that the program before it has passed on.
pub(crate) fn begin(given: Option<u32>, carried: &Carried) {
    GIVEN.store(given.unwrap_or(CALLS), Ordering::Relaxed);
    HAS_PROFILE.store(given.is_none(), Ordering::Relaxed);
    begin_again();
    if carried.numbers.is_empty() {
        return;
    }
    carried.numbers.iter().for_each(|&(number, file)| descriptors::note_carried(number, file));
    USED.store(carried.mounts, Ordering::Relaxed);
    IS_ANY_CANDIDATE.store(true, Ordering::Relaxed);
    IS_ANY_CARRIED.store(true, Ordering::Relaxed);
    if LEFT.load(Ordering::Relaxed) == 0 {
        // They are adopted with the first call.
        LEFT.store(1, Ordering::Relaxed);
    }
}

/// Begins again, in a process that was forked and has no session of its own.
pub(crate) fn begin_again() {
    USED.store(0, Ordering::Relaxed);
    IS_ANY_CARRIED.store(false, Ordering::Relaxed);
    count_again();
}

fn count_again() {
    LEFT.store(GIVEN.load(Ordering::Relaxed), Ordering::Relaxed);
}

/// Records that the process makes another one.
///
/// Then all open files are the kernel's, and the child changes the state that a session knows. So a shell that does
/// little between the programs that it runs gets no session.
pub(crate) fn make_process() {
    program_profile::note_long();
    if is_on() {
        HAS_PROFILE.store(false, Ordering::Relaxed);
        count_again();
    }
}

/// Returns whether the kernel still serves the process.
pub(crate) fn is_on() -> bool {
    LEFT.load(Ordering::Relaxed) > 0
}

/// Returns whether some descriptors may be adoptable.
pub(crate) fn is_any_candidate() -> bool {
    is_on() && IS_ANY_CANDIDATE.load(Ordering::Relaxed)
}

/// Returns whether the process may hold locks on adoptable descriptors.
///
/// It may have set them before it ran this program.
pub(crate) fn is_any_carried() -> bool {
    IS_ANY_CARRIED.load(Ordering::Relaxed)
}

/// Returns the existing mounts of these bits.
fn mounts_of(bits: u32) -> impl Iterator<Item = u32> {
    (0..session::mounts().len() as u32).filter(move |mount| bits & 1 << mount != 0)
}

/// Returns the mounts whose sessions are deferred, by bit.
pub(crate) fn mounts() -> u32 {
    USED.load(Ordering::Relaxed)
}

/// Returns whether the session for a mount, which a path leads into, is deferred.
pub(crate) fn puts_off(mount: u32) -> bool {
    if !is_on() {
        return false;
    }
    let used = USED.fetch_or(1 << mount, Ordering::Relaxed);
    if used == 0 && HAS_PROFILE.load(Ordering::Relaxed) && program_profile::will_go_on() {
        HAS_PROFILE.store(false, Ordering::Relaxed);
        end();
        return false;
    }
    count(1);
    is_on()
}

/// Counts calls.
///
/// After the last one sessions begin, and adoptable descriptors are adopted.
pub(crate) fn count(calls: u32) {
    let left = LEFT.load(Ordering::Relaxed);
    if left > calls {
        LEFT.store(left - calls, Ordering::Relaxed);
    } else {
        if HAS_PROFILE.swap(false, Ordering::Relaxed) {
            program_profile::note_going_on();
        }
        end();
    }
}

/// Opens the deferred sessions, and adopts the files opened meanwhile.
pub(crate) fn end() {
    if LEFT.swap(0, Ordering::Relaxed) == 0 {
        return;
    }
    program_profile::note_long();
    for mount in mounts_of(mounts()) {
        // If no session can begin, the kernel goes on serving the mount.
        session::open(mount);
    }
    for descriptor in descriptors::candidates() {
        // A descriptor that can't be adopted stays the kernel's.
        if locks::keep(descriptor) || files::adopt(descriptor).is_err() {
            descriptors::forget_candidate(descriptor);
        }
    }
    IS_ANY_CARRIED.store(false, Ordering::Relaxed);
}

/// Returns the verdict on a call that opens a file and that the kernel serves.
pub(crate) fn opening() -> Verdict {
    IS_ANY_CANDIDATE.store(true, Ordering::Relaxed);
    Verdict::KernelOpen
}

/// Returns whether the kernel serves a call on an adoptable descriptor.
///
/// If so, the call is counted.
pub(crate) fn is_kernels(number: i64, a: &[u64; 6]) -> bool {
    if !is_any_candidate() || !descriptors::is_candidate(a[0] as i32) {
        return false;
    }
    let bytes = match number {
        libc::SYS_read | libc::SYS_write | libc::SYS_pread64 | libc::SYS_pwrite64 => a[2],
        libc::SYS_sendfile => a[3],
        libc::SYS_copy_file_range => a[4],
        libc::SYS_readv
        | libc::SYS_writev
        | libc::SYS_preadv
        | libc::SYS_pwritev
        | libc::SYS_preadv2
        | libc::SYS_pwritev2
        | libc::SYS_lseek
        | libc::SYS_fstat
        | libc::SYS_fsync
        | libc::SYS_fdatasync
        | libc::SYS_ftruncate
        | libc::SYS_fallocate
        | libc::SYS_fadvise64
        | libc::SYS_getdents64
        | libc::SYS_fchmod
        | libc::SYS_fchown
        | libc::SYS_fgetxattr
        | libc::SYS_fsetxattr
        | libc::SYS_flistxattr
        | libc::SYS_fremovexattr => 0,
        libc::SYS_ioctl if calls::is_for_terminals(a[1]) => 0,
        libc::SYS_fcntl => match a[1] as i32 {
            libc::F_GETFD | libc::F_SETFD | libc::F_GETFL | libc::F_SETFL => 0,
            // The locks would end with the kernel's descriptor when the adoption closes it.
            libc::F_SETLK | libc::F_SETLKW | libc::F_GETLK => {
                end();
                return false;
            }
            _ => return false,
        },
        _ => return false,
    };
    count(1 + (bytes / BYTES_OF_CALL).min(CALLS_FOR_BYTES) as u32);
    is_on()
}
