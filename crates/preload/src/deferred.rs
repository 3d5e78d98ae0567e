//! The time before a process has a session: the kernel serves it.
//!
//! A session costs as much as some hundred calls through FUSE, and most programs make fewer than that and end, or have others do the work.
//! So the first calls are the kernel's, and those that follow a fork. A program that goes on has a session opened, and what it has opened
//! meanwhile is taken over: a descriptor that the kernel has given out since is a *candidate*, and what is done with it is looked at. One
//! whose open file others may share (it was passed on, or there was a fork) stays the kernel's. A program has candidates from its beginning on
//! where the one that has run it has left it some (`carried`).
//!
//! A program that went on the times before has its session from the first call on (`habits`).
//!
//! There are candidates only while a process has one thread: when it makes another, they are taken over first.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use crate::calls::{self, Verdict, files};
use crate::carried::Carried;
use crate::{descriptors, locks, program_profile, session};

/// Calls that the kernel serves first: about what a session costs.
const CALLS: u32 = 64;
/// Bytes that cost as much as one more call.
const BYTES_OF_CALL: u64 = 16 << 10;
/// The most that a call counts for its bytes: programs ask for more than there is.
const CALLS_FOR_BYTES: u64 = 8;

/// How many calls there are at the beginning.
static GIVEN: AtomicU32 = AtomicU32::new(CALLS);
/// How many are left; 0: there are sessions from now on.
static LEFT: AtomicU32 = AtomicU32::new(0);
/// Mounts that were used meanwhile, by bit.
static USED: AtomicU32 = AtomicU32::new(0);
/// Whether it counts what the program did the times before, and will count what it does: the number of calls was not set, and no other process was
/// made.
static HAS_PROFILE: AtomicBool = AtomicBool::new(false);
static IS_ANY_CANDIDATE: AtomicBool = AtomicBool::new(false);
/// Whether candidates were there before the program began.
static IS_ANY_CARRIED: AtomicBool = AtomicBool::new(false);

/// Begins, before the program does, with what it has from the one that was there before.
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
        // With the first call they become ours.
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

/// The process makes another one. All that is open is the kernel's then, and what a session knows the other one changes: a shell that does
/// little between the programs that it runs gets none.
pub(crate) fn make_process() {
    program_profile::note_long();
    if is_on() {
        HAS_PROFILE.store(false, Ordering::Relaxed);
        count_again();
    }
}

/// Whether the kernel serves the process.
pub(crate) fn is_on() -> bool {
    LEFT.load(Ordering::Relaxed) > 0
}

/// Whether there may be candidates.
pub(crate) fn is_any_candidate() -> bool {
    is_on() && IS_ANY_CANDIDATE.load(Ordering::Relaxed)
}

/// Whether there may be candidates on which the process has locks: from before it ran this program.
pub(crate) fn is_any_carried() -> bool {
    IS_ANY_CARRIED.load(Ordering::Relaxed)
}

/// The mounts that there are of those with these bits.
fn mounts_of(bits: u32) -> impl Iterator<Item = u32> {
    (0..session::mounts().len() as u32).filter(move |mount| bits & 1 << mount != 0)
}

/// The mounts whose sessions were put off, by bit.
pub(crate) fn mounts() -> u32 {
    USED.load(Ordering::Relaxed)
}

/// Whether the session for a mount, which a path leads into, is put off.
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

/// Counts calls. With the last one there are sessions, and candidates become ours.
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

/// Opens the sessions that were put off, and takes over what was opened.
pub(crate) fn end() {
    if LEFT.swap(0, Ordering::Relaxed) == 0 {
        return;
    }
    program_profile::note_long();
    for mount in mounts_of(mounts()) {
        // Where there is none to be had, the kernel goes on.
        session::open(mount);
    }
    for descriptor in descriptors::candidates() {
        // What can't be taken over stays what it is.
        if locks::keep(descriptor) || files::adopt(descriptor).is_err() {
            descriptors::forget_candidate(descriptor);
        }
    }
    IS_ANY_CARRIED.store(false, Ordering::Relaxed);
}

/// The verdict on a call that opens a file, which the kernel serves.
pub(crate) fn opening() -> Verdict {
    IS_ANY_CANDIDATE.store(true, Ordering::Relaxed);
    Verdict::KernelOpen
}

/// Whether a call is one with a candidate that the kernel serves as it is; if so, it counts.
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
            // They go with the kernel's descriptor, and would be lost when that is closed.
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
