//! The program's system calls: which concern the library, and what serves each.
//!
//! The kernel serves all others: paths as they are, and LibFS descriptors after they have been handed over to it
//! (`materialise`). So a call that this module doesn't know is slower, and never wrong.

mod attributes;
mod call_shape;
mod data;
mod descriptor;
mod directory;
pub(crate) mod files;
mod names;
mod passed_descriptors;
mod polling;
mod process;
mod real_file_calls;
mod watching;
mod xattrs;

pub(crate) use call_shape::{descriptors_of, ignores_free_numbers, is_caught_number};
pub(crate) use descriptor::is_terminal_request;
pub(crate) use process::{execute_lent, give_up_sessions};

use std::sync::atomic::Ordering;

use ashlar_types::Errno;

use self::call_shape::{INTERESTS, INTERESTS_COUNTED, Shape, paths_of, shape_of};
use crate::entry::arch::{ASHLAR_INTEREST, Frame, INTEREST_ALWAYS, INTEREST_NONE};
use crate::entry::{hook, single_thread};
use crate::files::descriptors::OpenFileRef;
use crate::files::record_locks::FcntlOutcome;
use crate::files::{descriptors, materialise, path, recycled_descriptor, shared_file};
use crate::memory::{program_memory, segment_mapping, snapshot_mapping};
use crate::programs::program_profile;
use crate::report;
use crate::sessions::{deferred_session, session, submounts, user_sessions};

/// The outcome of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CallVerdict {
    /// The call is done, with this result.
    Done(i64),
    /// The kernel serves the call.
    Kernel,
    /// The kernel serves the call, with this descriptor in place of the first argument.
    KernelInstead(i32),
    /// The kernel serves the call, and LibFS may adopt the descriptor that it opens.
    KernelOpen,
    /// The kernel serves the call with nothing of the library's on the stack.
    Native,
    /// As `Native`, for a process that borrows the caller's memory.
    Vfork,
    /// The call is made again, after the handlers of the signals that have interrupted it.
    Again,
}

/// A handler's answer: a result, an error, or `None` if the kernel must serve the call.
pub(crate) type Served = Result<Option<i64>, Errno>;

/// Commands of `fcntl` that libc has no names for yet.
const F_DUPFD_QUERY: i32 = 1027;
const F_CREATED_QUERY: i32 = 1028;

const READ_AND_WRITE: u64 = (libc::PROT_READ | libc::PROT_WRITE) as u64;

/// Makes the entry catch the calls that concern the library.
pub(crate) fn start_catching() {
    let interests = if report::page().is_none() { &INTERESTS } else { &INTERESTS_COUNTED };
    for (interest, wanted) in ASHLAR_INTEREST.iter().zip(interests) {
        interest.store(*wanted, Ordering::Relaxed);
    }
}

/// Makes the entry catch no more calls: from here on the kernel serves the process.
pub(crate) fn stop_catching() {
    for (number, interest) in (0..).zip(&ASHLAR_INTEREST) {
        let wanted = match number {
            // Handlers that the library has replaced stay replaced.
            libc::SYS_rt_sigaction => INTEREST_ALWAYS,
            // The process may run programs that can't load the library.
            libc::SYS_execve | libc::SYS_execveat => INTEREST_ALWAYS,
            // A thread that begins on a stack of its own, or a process that borrows this stack, can't return through
            // the entry.
            libc::SYS_clone | libc::SYS_clone3 | libc::SYS_vfork | libc::SYS_rt_sigreturn => INTEREST_ALWAYS,
            _ => INTEREST_NONE,
        };
        interest.store(wanted, Ordering::Relaxed);
    }
    recycled_descriptor::stop_recycling();
}

/// Returns whether the library must serve a call of a process that has borrowed memory.
///
/// That process may change its own descriptors and signals, which are not the lender's. But the library must see which
/// program it runs.
pub(crate) fn concerns_lent(call: &Frame) -> bool {
    matches!(call.rax as i64, libc::SYS_execve | libc::SYS_execveat)
}

/// Hands a call's descriptors that another user's session has opened over to the kernel.
///
/// LibFS would check calls on them with that other user's rights.
fn hand_over_other_users(call: &Frame) -> Result<(), Errno> {
    let numbers = descriptors_of(call.rax as i64).iter().map(|at| call.arguments[*at] as i32);
    let is_others = |number: &i32| descriptors::file(*number).is_some_and(|file| !file.is_in_current_session());
    numbers.filter(is_others).try_for_each(materialise::hand_over)
}

/// Returns whether the library must serve a call: the quick check, on the program's own stack.
pub(crate) fn concerns_library(call: &Frame) -> bool {
    let a = &call.arguments;
    match shape_of(call.rax as i64) {
        Shape::None | Shape::Maker => false,
        Shape::OtherKind => descriptors::is_ours(a[0] as i32),
        Shape::Address => {
            descriptors::is_ours(a[0] as i32) || passed_descriptors::passes_any(call, descriptors::is_ours)
        }
        Shape::Descriptor => report::page().is_none() || descriptors::has_entry(a[0] as i32),
        Shape::Always => concerns_shapeless(call),
        shape => paths_of(shape)
            .iter()
            .any(|&(from, path)| path::may_concern(from.map_or(libc::AT_FDCWD, |from| a[from] as i32), a[path])),
    }
}

/// Returns whether a recycled number may stay so while a call is checked.
pub(crate) fn keeps_recycled(call: &Frame, recycled: i32) -> bool {
    let number = call.rax as i64;
    let shape = shape_of(number);
    let is_it = |at: usize| call.arguments[at] as i32 == recycled;
    match shape {
        Shape::Always if !matches!(number, libc::SYS_fcntl | libc::SYS_ioctl) => ignores_free_numbers(number),
        _ => {
            !descriptors_of(number).iter().any(|&at| is_it(at))
                && !paths_of(shape).iter().any(|&(from, _)| from.is_some_and(is_it))
        }
    }
}

/// Returns whether a call is about something on an Ashlar, for the report.
///
/// `is_on_mount` answers this for a descriptor.
pub(crate) fn touches_mount(call: &Frame, is_on_mount: impl Fn(i32) -> bool) -> bool {
    let a = &call.arguments;
    let number = call.rax as i64;
    let leads_inside = |from: Option<usize>, address: u64| {
        report::leads_inside(from.map_or(libc::AT_FDCWD, |from| a[from] as i32), address, &is_on_mount)
    };
    match number {
        libc::SYS_execve | libc::SYS_chdir | libc::SYS_chroot => leads_inside(None, a[0]),
        libc::SYS_execveat => leads_inside(Some(0), a[1]),
        libc::SYS_fchdir => is_on_mount(a[0] as i32),
        libc::SYS_bind | libc::SYS_connect => {
            passed_descriptors::socket_path(a[1], a[2]).is_some_and(|path| leads_inside(None, path))
        }
        libc::SYS_mmap if a[3] & libc::MAP_ANONYMOUS as u64 != 0 => false,
        libc::SYS_close_range => descriptors::ours(a[0] as u32, a[1] as u32).next().is_some(),
        libc::SYS_sync => session::is_any_open(),
        _ => {
            paths_of(shape_of(number)).iter().any(|&(from, at)| leads_inside(from, a[at]))
                || descriptors_of(number).iter().any(|&at| is_on_mount(a[at] as i32))
        }
    }
}

/// Returns whether the kernel always serves a call, although it concerns the library.
pub(crate) fn is_always_kernels(number: i64) -> bool {
    matches!(number, libc::SYS_chdir | libc::SYS_fchdir | libc::SYS_mmap)
}

/// The quick check of calls that have no common shape.
fn concerns_shapeless(call: &Frame) -> bool {
    let a = &call.arguments;
    let is_ours = || descriptors_of(call.rax as i64).iter().any(|&index| descriptors::is_tracked(a[index] as i32));
    match call.rax as i64 {
        libc::SYS_munmap | libc::SYS_remap_file_pages => {
            program_memory::forget_pages(a[0], a[1]);
            segment_mapping::may_overlap(a[0], a[1])
        }
        libc::SYS_shmdt => {
            program_memory::forget_all_pages();
            false
        }
        libc::SYS_mprotect | libc::SYS_pkey_mprotect => {
            let grows = (libc::PROT_GROWSDOWN | libc::PROT_GROWSUP) as u64;
            // malloc makes a heap that grows readable and writable piece by piece. A protection key may take the access
            // away again.
            let is_safe = call.rax as i64 == libc::SYS_mprotect && a[2] & READ_AND_WRITE == READ_AND_WRITE;
            match a[2] & grows {
                0 if is_safe => {}
                0 => program_memory::forget_pages(a[0], a[1]),
                _ => program_memory::forget_all_pages(),
            }
            a[2] != libc::PROT_READ as u64 && segment_mapping::may_overlap(a[0], a[1])
        }
        libc::SYS_shmat => {
            program_memory::forget_all_pages();
            a[2] & segment_mapping::SHM_REMAP != 0 && segment_mapping::may_overlap(a[1], u64::MAX)
        }
        libc::SYS_mremap => {
            remapped_parts(a).iter().for_each(|&(address, length)| program_memory::forget_pages(address, length));
            snapshot_mapping::may_be_at(a[0])
                || remapped_parts(a).iter().any(|&(address, length)| segment_mapping::may_overlap(address, length))
        }
        libc::SYS_brk => {
            program_memory::record_break(a[0]);
            false
        }
        libc::SYS_madvise => {
            if a[2] == program_memory::MADV_GUARD_INSTALL {
                program_memory::forget_pages(a[0], a[1]);
            }
            false
        }
        libc::SYS_exit => {
            // The thread is on the program's stack here, and its own stack is free.
            hook::release_stack();
            false
        }
        libc::SYS_exit_group => {
            hook::run_inside(program_profile::record_end);
            false
        }
        libc::SYS_mmap => {
            // A mapping at an address that the kernel chooses replaces no other.
            let is_fixed = a[3] & libc::MAP_FIXED as u64 != 0;
            if is_fixed && a[3] & libc::MAP_HUGETLB as u64 != 0 {
                program_memory::forget_all_pages();
            } else if is_fixed {
                program_memory::forget_pages(a[0], a[1]);
            }
            is_fixed && segment_mapping::may_overlap(a[0], a[1]) || a[3] & libc::MAP_ANONYMOUS as u64 == 0 && is_ours()
        }
        libc::SYS_fcntl => is_ours() || descriptor::is_record_lock(a[1]) || a[1] as i32 == libc::F_SETLEASE,
        libc::SYS_ioctl => {
            let passes_ours = || passed_descriptors::passes_any(call, descriptors::is_tracked);
            // A request on a descriptor that is not open passes nothing.
            is_ours() || passes_ours() && descriptors::closes_on_exec(a[0] as i32).is_some()
        }
        libc::SYS_kcmp | libc::SYS_pidfd_getfd | libc::SYS_fsconfig | libc::SYS_kexec_file_load => {
            passed_descriptors::passes_any(call, descriptors::is_tracked)
        }
        libc::SYS_wait4 | libc::SYS_waitid => {
            // A child that has ended may have mounted something.
            submounts::suspect_change();
            false
        }
        libc::SYS_dup2 | libc::SYS_dup3 => is_ours() || descriptors::is_internal(a[1] as i32),
        libc::SYS_sendfile | libc::SYS_tee | libc::SYS_copy_file_range | libc::SYS_splice | libc::SYS_epoll_ctl => {
            is_ours()
        }
        libc::SYS_poll | libc::SYS_ppoll | libc::SYS_select | libc::SYS_pselect6 => descriptors::was_any_ours(),
        // With flags, each thread may have descriptors of its own from then on.
        libc::SYS_close_range if a[2] != 0 => true,
        libc::SYS_close_range | libc::SYS_sendmsg | libc::SYS_sendmmsg => {
            descriptors::was_any_ours() || deferred_session::may_have_adoptable()
        }
        libc::SYS_sync => session::is_any_open(),
        libc::SYS_unshare => a[0] & process::UNSHARED != 0,
        libc::SYS_prctl => a[0] == libc::PR_SET_SECCOMP as u64,
        libc::SYS_prlimit64 => a[2] != 0,
        _ => true,
    }
}

/// Returns the parts of the memory that mremap(2) changes.
fn remapped_parts(a: &[u64; 6]) -> [(u64, u64); 2] {
    let to = if a[3] & libc::MREMAP_FIXED as u64 != 0 { (a[4], a[2]) } else { (0, 0) };
    [(a[0], a[1].max(1)), to]
}

/// Serves a call on the fast path.
///
/// Returns `None` for all other calls, and then nothing has happened.
#[inline]
pub(crate) fn serve_fast(call: &Frame) -> Option<i64> {
    let (number, a) = (call.rax as i64, &call.arguments);
    match number {
        libc::SYS_read | libc::SYS_write | libc::SYS_pread64 | libc::SYS_pwrite64 => data::serve_fast(number, a),
        // A shared open file, or a changed user, needs another check of each descriptor first.
        _ if user_sessions::has_changed_user() || shared_file::is_any_shared() => None,
        libc::SYS_lseek => data::seek_fast(a),
        libc::SYS_close => descriptor::close_fast(a[0] as i32),
        libc::SYS_open | libc::SYS_openat => files::open_fast(number, a),
        _ => attributes::serve_fast(number, a),
    }
}

/// Serves a call.
pub(crate) fn serve_call(call: &mut Frame) -> CallVerdict {
    // This thread uses no session yet.
    user_sessions::free_if_ended(call.rax as i64);
    if user_sessions::has_changed_user()
        && let Err(errno) = hand_over_other_users(call)
    {
        return fail_call(errno);
    }
    if shared_file::is_any_shared()
        && let Some(result) = prepare_shared(call)
    {
        return CallVerdict::Done(result);
    }
    if deferred_session::passes_to_kernel(call.rax as i64, &call.arguments) {
        return CallVerdict::Kernel;
    }
    let is_of_alone = |at: &usize| descriptors::is_o_path(call.arguments[*at] as i32);
    if descriptors::is_any_o_path() && !works_on_o_path(call) && descriptors_of(call.rax as i64).iter().any(is_of_alone)
    {
        // The kernel checks the other arguments of these first, and reads no descriptor if there are no bytes to move.
        // The placeholder is an `O_PATH` descriptor, too.
        let is_others_first =
            matches!(call.rax as i64, libc::SYS_splice | libc::SYS_tee | libc::SYS_vmsplice | libc::SYS_mmap);
        return if is_others_first { CallVerdict::Kernel } else { CallVerdict::Done(-i64::from(Errno::EBADF.0)) };
    }
    if call.rax as i64 == libc::SYS_fcntl {
        match descriptor::serve_record_lock(call.arguments) {
            Ok(FcntlOutcome::Done) => return CallVerdict::Done(0),
            Ok(FcntlOutcome::Instead(descriptor)) => return CallVerdict::KernelInstead(descriptor),
            Ok(FcntlOutcome::Again) => return CallVerdict::Again,
            // The kernel serves reserved inodes: see below.
            Ok(FcntlOutcome::Kernel) | Err(Errno::RESERVED) => {}
            Err(errno) => return fail_call(errno),
        }
    }
    let mut tries = 1;
    loop {
        let named = named_files(call);
        let served = dispatch_call(call)
            .and_then(|answer| if answer.is_none() { real_file_calls::answer_by_kernel(call) } else { Ok(answer) });
        // On a reserved inode, LibFS has neither read nor changed anything.
        let answered = match served {
            Err(Errno::RESERVED) => Ok(None),
            answered => answered,
        };
        return match answered {
            Ok(Some(result)) => CallVerdict::Done(result),
            Ok(None) if deferred_session::is_active() && files::is_opening(call.rax as i64) => {
                deferred_session::opening_verdict()
            }
            Ok(None) => match prepare_for_kernel(call, &named, tries == CALL_TRIES) {
                Ok(true) => CallVerdict::Kernel,
                Ok(false) => {
                    tries += 1;
                    continue;
                }
                Err(errno) => fail_call(errno),
            },
            // The file that a path led to is gone. Resolve the path again, as the kernel does.
            Err(Errno::ESTALE) if tries < CALL_TRIES && has_path(call) => {
                tries += 1;
                continue;
            }
            Err(errno) => fail_call(errno),
        }
        .or_special(process::making_verdict(call));
    }
}

/// Returns the error with which a call ends.
///
/// A reserved inode's call that can't be passed to the kernel gets `EIO`.
fn fail_call(errno: Errno) -> CallVerdict {
    CallVerdict::Done(-i64::from(if errno == Errno::RESERVED { Errno::EIO.0 } else { errno.0 }))
}

/// Prepares a call on descriptors whose open files other processes share.
///
/// Returns the result if the call is done.
///
/// Descriptors that another process has handed over to the kernel are handed over here too. An inherited open file that
/// LibFS can't serve here is handed over as well.
fn prepare_shared(call: &Frame) -> Option<i64> {
    let is_put_over = [libc::SYS_dup2, libc::SYS_dup3].contains(&(call.rax as i64));
    // `dup2` closes the descriptor at its target number.
    for &at in descriptors_of(call.rax as i64).iter().filter(|&&at| !(is_put_over && at == 1)) {
        let descriptor = call.arguments[at] as i32;
        if descriptors::is_inherited(descriptor)
            && let Some(shared) = descriptors::inherited_at(descriptor)
        {
            if shared_file::needs_no_offset(call) {
                if call.rax as i64 == libc::SYS_mmap {
                    shared_file::refresh_kernel_size(descriptor);
                }
                continue;
            }
            let is_transfer = shared_file::is_transfer(call.rax as i64);
            // A process that reads or writes will do so again, and has a session then. Until that session begins, lend
            // the kernel the offset.
            let is_put_off =
                is_transfer && session::of_mount(shared.file().mount).is_none() && deferred_session::is_active();
            // SAFETY: the program's own call.
            let kernel = || unsafe { crate::entry::arch::system_call(call.rax, call.arguments) };
            let writes = (call.rax as i64 == libc::SYS_write).then_some(call.arguments[2]);
            if is_put_off && let Some(result) = shared.lend_to_kernel(descriptor, writes, kernel) {
                hook::record_kernel_served();
                return Some(result);
            }
            if files::adopt_inherited(descriptor).is_err() {
                materialise::leave_inherited(descriptor);
            }
        } else if descriptors::file(descriptor).is_some_and(|file| file.was_handed_over()) {
            // If the hand-over fails, the kernel serves it all the same.
            let _ = materialise::hand_over(descriptor);
        }
    }
    None
}

/// Returns whether a call may be made on an `O_PATH` descriptor.
///
/// The kernel serves it, or may first find another error.
fn works_on_o_path(call: &Frame) -> bool {
    match call.rax as i64 {
        libc::SYS_close
        | libc::SYS_dup
        | libc::SYS_dup2
        | libc::SYS_dup3
        | libc::SYS_fstat
        | libc::SYS_fstatfs
        | libc::SYS_fgetxattr
        | libc::SYS_flistxattr
        | libc::SYS_fsetxattr
        | libc::SYS_fremovexattr
        | libc::SYS_quotactl_fd
        | libc::SYS_sendfile
        | libc::SYS_flock
        | libc::SYS_openat2 => true,
        // Such an offset or size is invalid.
        libc::SYS_pread64
        | libc::SYS_pwrite64
        | libc::SYS_preadv
        | libc::SYS_pwritev
        | libc::SYS_preadv2
        | libc::SYS_pwritev2 => data::is_before_start(call.rax as i64, &call.arguments),
        libc::SYS_ftruncate => call.arguments[1] as i64 <= -1,
        number if matches!(shape_of(number), Shape::OtherKind | Shape::Address) => true,
        libc::SYS_fcntl => matches!(
            call.arguments[1] as i32,
            libc::F_DUPFD
                | libc::F_DUPFD_CLOEXEC
                | libc::F_GETFD
                | libc::F_SETFD
                | libc::F_GETFL
                | F_DUPFD_QUERY
                | F_CREATED_QUERY
        ),
        _ => false,
    }
}

/// Returns the files behind a call's descriptors, if other threads may put others there.
///
/// While these references are held, no other open file gets their numbers.
fn named_files(call: &Frame) -> [Option<OpenFileRef>; 2] {
    let mut files = [None, None];
    if !single_thread::is_known_single() {
        for (file, &at) in files.iter_mut().zip(descriptors_of(call.rax as i64)) {
            *file = descriptors::file(call.arguments[at] as i32);
        }
    }
    files
}

/// How often a call is retried when its path or descriptor leads elsewhere by now.
///
/// Each time another thread or process was faster.
const CALL_TRIES: u32 = 16;

/// Returns whether a call names a path, so that it did nothing if it fails with `ESTALE`.
fn has_path(call: &Frame) -> bool {
    !paths_of(shape_of(call.rax as i64)).is_empty()
}

impl CallVerdict {
    /// Returns the special way in which the kernel must serve the call, if it serves it.
    fn or_special(self, other: Option<Self>) -> Self {
        if self == Self::Kernel { other.unwrap_or(self) } else { self }
    }
}

/// Prepares a call for the kernel: hands the LibFS descriptors that it names over first.
///
/// Returns `false` if another thread has opened a file at the number of one that the call named. The call then counts
/// as made now, and that file need not be handed over, unless `takes_any_file`.
///
/// # Errors
/// Those of SharedFS.
fn prepare_for_kernel(call: &Frame, files: &[Option<OpenFileRef>; 2], takes_any_file: bool) -> Result<bool, Errno> {
    let a = &call.arguments;
    let paths = paths_of(shape_of(call.rax as i64));
    for (&at, known) in descriptors_of(call.rax as i64).iter().zip(files) {
        let descriptor = a[at] as i32;
        if descriptors::is_inherited(descriptor) && shared_file::needs_no_offset(call) {
            continue;
        }
        let file = descriptors::file(descriptor);
        let is_other = |file: &OpenFileRef| !known.as_ref().is_some_and(|known| known.is_same(file));
        if !single_thread::is_known_single() && !takes_any_file && file.as_ref().is_some_and(is_other) {
            return Ok(false);
        }
        materialise::hand_over_found(descriptor, file)?;
    }
    // A path may begin at a directory that the kernel serves for the time being.
    let begun_at = paths.iter().filter_map(|(from, _)| from.map(|index| a[index] as i32));
    let begun_at = begun_at.filter(|&descriptor| descriptors::is_ours(descriptor));
    let in_paths = paths.iter().filter_map(|&(_, path)| path::descriptor_at_address(a[path]));
    begun_at.chain(in_paths).try_for_each(materialise::hand_over)?;
    match passed_descriptors::for_each_passed(call, &mut materialise::hand_over) {
        // If a part of the call can't be read, the kernel reports the error.
        Ok(()) | Err(Errno::EFAULT) => Ok(true),
        Err(errno) => Err(errno),
    }
}

fn dispatch_call(call: &mut Frame) -> Served {
    // By reference: the entry has stored the arguments word by word, and a copy by larger pieces would wait for those
    // stores.
    let a = &call.arguments;
    match call.rax as i64 {
        libc::SYS_open | libc::SYS_openat | libc::SYS_creat => files::open(call.rax as i64, a),
        libc::SYS_read
        | libc::SYS_pread64
        | libc::SYS_readv
        | libc::SYS_preadv
        | libc::SYS_preadv2
        | libc::SYS_write
        | libc::SYS_pwrite64
        | libc::SYS_writev
        | libc::SYS_pwritev
        | libc::SYS_pwritev2 => data::transfer(call.rax as i64, a),
        libc::SYS_lseek => data::seek(a),
        libc::SYS_sendfile => data::send_file(a),
        libc::SYS_copy_file_range => data::copy_range(a),
        libc::SYS_fsync | libc::SYS_fdatasync => data::sync(a),
        libc::SYS_sync_file_range => data::sync_range(a),
        libc::SYS_syncfs => data::sync_file_system(a),
        libc::SYS_sync => data::sync_all(),
        libc::SYS_truncate | libc::SYS_ftruncate => files::truncate(call.rax as i64, a),
        libc::SYS_fallocate => files::allocate(a),
        libc::SYS_fadvise64 | libc::SYS_readahead => files::advise_access(call.rax as i64, a),
        libc::SYS_fstatfs => files::stat_file_system(a[0] as i32, a[1]),
        libc::SYS_statfs => match path::descriptor_named_at(a[0]) {
            Some(descriptor) => files::stat_file_system(descriptor, a[1]),
            None => Ok(None),
        },
        libc::SYS_fstat
        | libc::SYS_stat
        | libc::SYS_lstat
        | libc::SYS_newfstatat
        | libc::SYS_statx
        | libc::SYS_access
        | libc::SYS_faccessat
        | libc::SYS_faccessat2
        | libc::SYS_fchmod
        | libc::SYS_chmod
        | libc::SYS_fchmodat
        | libc::SYS_fchmodat2
        | libc::SYS_fchown
        | libc::SYS_chown
        | libc::SYS_lchown
        | libc::SYS_fchownat
        | libc::SYS_utimensat => attributes::serve(call.rax as i64, a),
        libc::SYS_getxattr
        | libc::SYS_lgetxattr
        | libc::SYS_fgetxattr
        | libc::SYS_listxattr
        | libc::SYS_llistxattr
        | libc::SYS_flistxattr
        | libc::SYS_setxattr
        | libc::SYS_lsetxattr
        | libc::SYS_fsetxattr
        | libc::SYS_removexattr
        | libc::SYS_lremovexattr
        | libc::SYS_fremovexattr => xattrs::serve(call.rax as i64, a),
        libc::SYS_getdents64 => directory::list(a),
        libc::SYS_mkdir
        | libc::SYS_mkdirat
        | libc::SYS_mknod
        | libc::SYS_mknodat
        | libc::SYS_symlink
        | libc::SYS_symlinkat
        | libc::SYS_rmdir
        | libc::SYS_unlink
        | libc::SYS_unlinkat
        | libc::SYS_readlink
        | libc::SYS_readlinkat
        | libc::SYS_rename
        | libc::SYS_renameat
        | libc::SYS_renameat2
        | libc::SYS_link
        | libc::SYS_linkat => names::serve(call.rax as i64, a),
        libc::SYS_close
        | libc::SYS_dup
        | libc::SYS_dup2
        | libc::SYS_dup3
        | libc::SYS_fcntl
        | libc::SYS_flock
        | libc::SYS_ioctl
        | libc::SYS_close_range => descriptor::serve(call.rax as i64, a),
        libc::SYS_poll | libc::SYS_ppoll | libc::SYS_select | libc::SYS_pselect6 | libc::SYS_epoll_ctl => {
            polling::serve(call.rax as i64, a)
        }
        libc::SYS_inotify_add_watch | libc::SYS_fanotify_mark => watching::serve(call.rax as i64, a),
        libc::SYS_mmap => files::map_file(a),
        libc::SYS_munmap => Ok(Some(segment_mapping::serve_unmap(*a))),
        libc::SYS_mprotect | libc::SYS_pkey_mprotect | libc::SYS_remap_file_pages => {
            segment_mapping::hand_over_part(a[0], a[1])?;
            Ok(None)
        }
        libc::SYS_shmat => {
            segment_mapping::hand_over_part(a[1], u64::MAX)?;
            Ok(None)
        }
        libc::SYS_mremap => {
            remapped_parts(a)
                .into_iter()
                .try_for_each(|(address, length)| segment_mapping::hand_over_part(address, length))?;
            if snapshot_mapping::may_be_at(a[0]) { Ok(Some(snapshot_mapping::serve_remap(*a))) } else { Ok(None) }
        }
        libc::SYS_rt_sigaction => crate::entry::signals::serve_sigaction(*a).map(Some),
        _ => process::serve(call),
    }
}
