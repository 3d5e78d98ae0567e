//! The time before a process has a session: the kernel serves it.
//!
//! A session costs as much as some hundred calls through FUSE. Most programs make fewer and end, or let other programs
//! do the work. So the kernel serves the first calls of a process, and the first ones after a fork. When the program
//! goes on, its session begins and adopts the files that it has opened meanwhile. Until then, a descriptor that the
//! kernel has returned is *adoptable*, and calls on it are watched. If others may share its open file (it was passed
//! on, or the process forked), it stays with the kernel. A program has adoptable descriptors from its start on if the
//! program before it has passed some on (`exec_files`).
//!
//! A program that went on in earlier runs has its session from the first call on (`program_profile`).
//!
//! Only a process with one thread has adoptable descriptors: before it makes another, they are adopted.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use crate::calls::{self, CallVerdict, files};
use crate::files::{descriptors, record_locks};
use crate::programs::exec_files::ExecFiles;
use crate::programs::program_profile;
use crate::sessions::session;

/// Calls that the kernel serves first: about the cost of a session.
const CALLS_BY_KERNEL: u32 = 64;
/// Bytes that cost as much as one more call.
const BYTES_OF_CALL: u64 = 16 << 10;
/// The most that a call counts for its bytes: programs ask for more bytes than there are.
const CALLS_FOR_BYTES: u64 = 8;

/// The number of calls at the beginning.
static CALLS_AT_START: AtomicU32 = AtomicU32::new(CALLS_BY_KERNEL);
/// The number of calls left; from 0 on, the process has sessions.
static CALLS_LEFT: AtomicU32 = AtomicU32::new(0);
/// Mounts that were used meanwhile, by bit.
static USED_MOUNTS: AtomicU32 = AtomicU32::new(0);
/// Whether the program's profile is read and updated.
///
/// It is if no number of calls was set, and the process has not forked.
static HAS_PROFILE: AtomicBool = AtomicBool::new(false);
static HAS_ADOPTABLE: AtomicBool = AtomicBool::new(false);
/// Whether some descriptors were adoptable before the program began.
static HAS_EXEC_FILES: AtomicBool = AtomicBool::new(false);

/// Begins the count before the program does, with the files that the program before it has passed on.
pub(crate) fn begin_count(given: Option<u32>, exec_files: &ExecFiles) {
    CALLS_AT_START.store(given.unwrap_or(CALLS_BY_KERNEL), Ordering::Relaxed);
    HAS_PROFILE.store(given.is_none(), Ordering::Relaxed);
    restart_after_fork();
    if exec_files.numbers.is_empty() {
        return;
    }
    exec_files.numbers.iter().for_each(|&(number, file)| descriptors::record_exec_file(number, file));
    USED_MOUNTS.store(exec_files.mounts, Ordering::Relaxed);
    HAS_ADOPTABLE.store(true, Ordering::Relaxed);
    HAS_EXEC_FILES.store(true, Ordering::Relaxed);
    if CALLS_LEFT.load(Ordering::Relaxed) == 0 {
        // They are adopted with the first call.
        CALLS_LEFT.store(1, Ordering::Relaxed);
    }
}

/// Begins again, in a process that was forked and has no session of its own.
pub(crate) fn restart_after_fork() {
    USED_MOUNTS.store(0, Ordering::Relaxed);
    HAS_EXEC_FILES.store(false, Ordering::Relaxed);
    reset_count();
}

fn reset_count() {
    CALLS_LEFT.store(CALLS_AT_START.load(Ordering::Relaxed), Ordering::Relaxed);
}

/// Records that the process makes another one.
///
/// Then all open files are the kernel's, and the child changes the state that a session knows. So a shell that does
/// little between the programs that it runs gets no session.
pub(crate) fn record_fork() {
    program_profile::record_long();
    if is_active() {
        HAS_PROFILE.store(false, Ordering::Relaxed);
        reset_count();
    }
}

/// Returns whether the kernel still serves the process.
pub(crate) fn is_active() -> bool {
    CALLS_LEFT.load(Ordering::Relaxed) > 0
}

/// Returns whether some descriptors may be adoptable.
pub(crate) fn may_have_adoptable() -> bool {
    is_active() && HAS_ADOPTABLE.load(Ordering::Relaxed)
}

/// Returns whether the process may hold locks on adoptable descriptors.
///
/// It may have set them before it ran this program.
pub(crate) fn has_exec_files() -> bool {
    HAS_EXEC_FILES.load(Ordering::Relaxed)
}

/// Returns the existing mounts of these bits.
fn mounts_of(bits: u32) -> impl Iterator<Item = u32> {
    (0..session::mounts().len() as u32).filter(move |mount| bits & 1 << mount != 0)
}

/// Returns the mounts whose sessions are deferred, by bit.
pub(crate) fn deferred_mounts() -> u32 {
    USED_MOUNTS.load(Ordering::Relaxed)
}

/// Returns whether the session for a mount, which a path leads into, is deferred.
pub(crate) fn defers_session(mount: u32) -> bool {
    if !is_active() {
        return false;
    }
    let used = USED_MOUNTS.fetch_or(1 << mount, Ordering::Relaxed);
    if used == 0 && HAS_PROFILE.load(Ordering::Relaxed) && program_profile::will_go_on() {
        HAS_PROFILE.store(false, Ordering::Relaxed);
        end_deferral();
        return false;
    }
    count_calls(1);
    is_active()
}

/// Counts calls.
///
/// After the last one sessions begin, and adoptable descriptors are adopted.
pub(crate) fn count_calls(calls: u32) {
    let left = CALLS_LEFT.load(Ordering::Relaxed);
    if left > calls {
        CALLS_LEFT.store(left - calls, Ordering::Relaxed);
    } else {
        if HAS_PROFILE.swap(false, Ordering::Relaxed) {
            program_profile::record_going_on();
        }
        end_deferral();
    }
}

/// Opens the deferred sessions, and adopts the files opened meanwhile.
pub(crate) fn end_deferral() {
    if CALLS_LEFT.swap(0, Ordering::Relaxed) == 0 {
        return;
    }
    program_profile::record_long();
    for mount in mounts_of(deferred_mounts()) {
        // If no session can begin, the kernel goes on serving the mount.
        session::open_session(mount);
    }
    for descriptor in descriptors::adoptable() {
        // A descriptor that can't be adopted stays the kernel's.
        if record_locks::closing_ends_locks(descriptor) || files::adopt_descriptor(descriptor).is_err() {
            descriptors::leave_adoptable(descriptor);
        }
    }
    HAS_EXEC_FILES.store(false, Ordering::Relaxed);
}

/// Returns the verdict on a call that opens a file and that the kernel serves.
pub(crate) fn opening_verdict() -> CallVerdict {
    HAS_ADOPTABLE.store(true, Ordering::Relaxed);
    CallVerdict::KernelOpen
}

/// Returns whether the kernel serves a call on an adoptable descriptor.
///
/// If so, the call is counted.
pub(crate) fn passes_to_kernel(number: i64, a: &[u64; 6]) -> bool {
    if !may_have_adoptable() || !descriptors::is_adoptable(a[0] as i32) {
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
        libc::SYS_ioctl if calls::is_terminal_request(a[1]) => 0,
        libc::SYS_fcntl => match a[1] as i32 {
            libc::F_GETFD | libc::F_SETFD | libc::F_GETFL | libc::F_SETFL => 0,
            // The locks would end with the kernel's descriptor when the adoption closes it.
            libc::F_SETLK | libc::F_SETLKW | libc::F_GETLK => {
                end_deferral();
                return false;
            }
            _ => return false,
        },
        _ => return false,
    };
    count_calls(1 + (bytes / BYTES_OF_CALL).min(CALLS_FOR_BYTES) as u32);
    is_active()
}
