//! Calls on processes: forks, threads, programs, users, namespaces.

use std::sync::atomic::{AtomicBool, Ordering};

use ashlar_types::Errno;

use super::call_shape::changes_user;
use super::{CallVerdict, Served};
use crate::entry::arch::{Frame, system_call};
use crate::entry::{hook, single_thread};
use crate::files::shared_file::BorrowerFiles;
use crate::files::{descriptors, materialise, path, record_locks, recycled_descriptor, shared_file};
use crate::memory::program_memory;
use crate::memory::{memory_reserve, segment_mapping};
use crate::programs::environment::PreloadText;
use crate::programs::exec_files::{self, ExecFiles};
use crate::programs::{environment, program_profile, without_library};
use crate::report;
use crate::sessions::{deferred_session, session, user_sessions};

/// Namespaces in which paths or users have another meaning.
const NAMESPACES: u64 = (libc::CLONE_NEWNS | libc::CLONE_NEWUSER) as u64;
/// State that the library assumes to be shared by all threads.
///
/// After `unshare`, a thread has its own: the namespaces, the descriptors, the working directory with the file creation
/// mask.
const SEPARATED: u64 = NAMESPACES | (libc::CLONE_FILES | libc::CLONE_FS) as u64;
/// The flags of `unshare` that concern the library.
pub(super) const UNSHARED: u64 = SEPARATED | libc::CLONE_NEWPID as u64;
/// The new process shares the descriptors, and has no copies of them.
const SHARES_DESCRIPTORS: u64 = libc::CLONE_FILES as u64;
/// `struct clone_args` begins with the flags.
const CLONE_ARGUMENTS_MIN: u64 = 64;

/// Whether the kernel serves the process.
static IS_KERNELS: AtomicBool = AtomicBool::new(false);
/// Whether the process's children have process ids in another namespace.
static HAS_NEW_PID_NAMESPACE: AtomicBool = AtomicBool::new(false);
/// How often a fork also hands over what other threads open at that moment.
const FORK_TRIES: u32 = 16;

/// How a call makes a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ProcessMaking {
    /// A process with a copy of the memory.
    Fork,
    /// A thread.
    Thread,
    /// A process that uses the memory until it runs another program, while the caller stands still.
    Vfork,
    /// A process that shares one of memory and descriptors, and not the other.
    Mixed,
}

/// Returns the flags of a call that makes a process.
fn making_flags(call: &Frame) -> Result<Option<u64>, Errno> {
    let a = call.arguments;
    Ok(Some(match call.rax as i64 {
        libc::SYS_fork => 0,
        libc::SYS_vfork => (libc::CLONE_VM | libc::CLONE_VFORK) as u64,
        libc::SYS_clone => a[0],
        libc::SYS_clone3 if a[1] < CLONE_ARGUMENTS_MIN => return Err(Errno::EINVAL),
        libc::SYS_clone3 => program_memory::load(a[0])?,
        _ => return Ok(None),
    }))
}

fn making_of(flags: u64) -> ProcessMaking {
    let has = |flag: i32| flags & flag as u64 != 0;
    match (has(libc::CLONE_VM), has(libc::CLONE_VFORK), flags & SHARES_DESCRIPTORS != 0) {
        // Another process could change the working directory.
        _ if has(libc::CLONE_FS) && !has(libc::CLONE_THREAD) => ProcessMaking::Mixed,
        (false, _, false) => ProcessMaking::Fork,
        (true, true, false) => ProcessMaking::Vfork,
        (true, false, true) if has(libc::CLONE_THREAD) => ProcessMaking::Thread,
        _ => ProcessMaking::Mixed,
    }
}

/// Returns the way in which the kernel must serve a call that makes a process.
pub(super) fn making_verdict(call: &Frame) -> Option<CallVerdict> {
    Some(match making_of(making_flags(call).ok()??) {
        ProcessMaking::Vfork => CallVerdict::Vfork,
        _ => CallVerdict::Native,
    })
}

/// Serves calls on the process as a whole.
pub(super) fn serve(call: &mut Frame) -> Served {
    let a = call.arguments;
    match call.rax as i64 {
        libc::SYS_clone | libc::SYS_clone3 | libc::SYS_fork | libc::SYS_vfork => make_process(call),
        libc::SYS_execve => execute_program(call.rax, a),
        libc::SYS_execveat => {
            materialise::hand_over(a[0] as i32)?;
            execute_program(call.rax, a)
        }
        libc::SYS_chdir | libc::SYS_fchdir => change_directory(call),
        libc::SYS_umask => {
            let result = call_kernel(call);
            session::UMASK.store(a[0] as u32 & 0o777, Ordering::Relaxed);
            Ok(Some(result))
        }
        libc::SYS_setrlimit | libc::SYS_prlimit64 => {
            let is_less = lowers_address_space(call);
            // The next session takes as little memory as possible, or none begins. A session that other threads may use
            // stays.
            if is_less && single_thread::is_single_thread() && user_sessions::is_any_session() && hand_over_files() {
                user_sessions::end_and_free();
            }
            let result = call_kernel(call);
            if is_less {
                session::resize_reserve();
            }
            session::forget_limits();
            Ok(Some(result))
        }
        number if changes_user(number) => {
            // Open files stay open for the new user.
            hand_over_files();
            let result = call_kernel(call);
            shared_file::record_user_change();
            user_sessions::record_user_change();
            Ok(Some(result))
        }
        libc::SYS_unshare if a[0] & SEPARATED == 0 || a[0] & NAMESPACES == 0 && single_thread::is_single_thread() => {
            HAS_NEW_PID_NAMESPACE.fetch_or(a[0] & libc::CLONE_NEWPID as u64 != 0, Ordering::Relaxed);
            Ok(None)
        }
        libc::SYS_chroot
        | libc::SYS_pivot_root
        | libc::SYS_mount
        | libc::SYS_umount2
        | libc::SYS_unshare
        | libc::SYS_setns
        | libc::SYS_seccomp
        | libc::SYS_prctl
        | libc::SYS_io_uring_setup
        | libc::SYS_io_setup => {
            leave_to_kernel();
            Ok(None)
        }
        _ => Ok(None),
    }
}

/// Makes the call here, with the program's arguments.
fn call_kernel(call: &Frame) -> i64 {
    // SAFETY: the program's own call.
    unsafe { system_call(call.rax, call.arguments) }
}

/// Returns whether the process sets itself a lower limit of its address space.
///
/// It would lack the memory that a session has mapped.
fn lowers_address_space(call: &Frame) -> bool {
    let a = &call.arguments;
    let (process, resource, limits) =
        if call.rax as i64 == libc::SYS_setrlimit { (0, a[0], a[1]) } else { (a[0] as u32, a[1], a[2]) };
    let is_meant = (process == 0 || process == std::process::id()) && resource as u32 == libc::RLIMIT_AS;
    // The kernel refuses limits that can't be read.
    is_meant && program_memory::load(limits).is_ok_and(|limit: u64| limit < session::address_space())
}

/// Leaves the process to the kernel, as the library's memory is used up.
///
/// The programs that it runs have the library again.
#[cold]
pub(crate) fn give_up_sessions() {
    memory_reserve::record_hand_over();
    user_sessions::stop_beginning();
    if user_sessions::is_any_session() {
        let are_left = hand_over_files();
        hand_over_inherited(|_| true);
        // Files that could not be handed over still need the sessions.
        if are_left {
            user_sessions::end_and_free();
        }
        session::resize_reserve();
    }
}

/// Leaves all of this process to the kernel.
///
/// From here on paths may have another meaning, calls may be forbidden, or descriptors may be used unseen or differ
/// between threads.
pub(super) fn leave_to_kernel() {
    let is_single_thread = single_thread::is_single_thread();
    // From here on the library doesn't see when another thread is made.
    single_thread::end_detection();
    hand_over_files();
    hand_over_inherited(|_| true);
    user_sessions::end_all_sessions(is_single_thread);
    IS_KERNELS.store(true, Ordering::Relaxed);
    super::stop_catching();
}

/// Hands all descriptors, locks and mappings over to the kernel.
///
/// The sessions are about to end. Returns whether it could.
fn hand_over_files() -> bool {
    segment_mapping::hand_over_all();
    let are_all = materialise::hand_over_all();
    record_locks::move_all_to_kernel();
    are_all
}

/// Hands all mappings over to the kernel, and all descriptors unless the new process `shares` them.
///
/// It then keeps other threads from opening and mapping more.
///
/// # Errors
/// `ENOMEM` if a mapping could be neither handed over nor copied.
fn hand_over_and_hold(shares: bool) -> Result<session::AllHeld, Errno> {
    let mut tries = 1;
    loop {
        segment_mapping::hand_over_all();
        let is_done = if shares { materialise::share_all() } else { materialise::hand_over_all() };
        let mut held = session::hold_all();
        let is_none = held.mapped().is_empty()
            && (shares && materialise::is_all_shared() || descriptors::ours(0, u32::MAX).next().is_none());
        if !is_done || tries == FORK_TRIES || is_none {
            return if held.mapped().copy_all() { Ok(held) } else { Err(Errno::ENOMEM) };
        }
        tries += 1;
    }
}

fn make_process(call: &Frame) -> Served {
    let Some(flags) = making_flags(call)? else { return Ok(None) };
    let making = making_of(flags);
    if IS_KERNELS.load(Ordering::Relaxed) {
        if making == ProcessMaking::Vfork {
            hook::lend_memory(BorrowerFiles::default());
        }
        return Ok(None);
    }
    // Processes that share open files know each other by their process ids.
    let shares = flags & libc::CLONE_NEWPID as u64 == 0 && !HAS_NEW_PID_NAMESPACE.load(Ordering::Relaxed);
    if !shares {
        hand_over_inherited(|_| true);
    }
    match making {
        ProcessMaking::Fork => {
            deferred_session::record_fork();
            let locks = hand_over_and_hold(shares)?;
            let closing = recycled_descriptor::hold_closing();
            let result = call_kernel(call);
            drop((closing, locks));
            if result == 0 {
                session::forget_sessions();
                // The parent may have kept some of its memory (`MADV_DONTFORK`).
                program_memory::forget_all_pages();
            } else {
                segment_mapping::release_copied();
            }
            Ok(Some(result))
        }
        ProcessMaking::Vfork => {
            if shares {
                materialise::share_all();
            } else {
                materialise::hand_over_all();
            }
            deferred_session::record_fork();
            hook::lend_memory(BorrowerFiles::collect());
            Ok(None)
        }
        ProcessMaking::Mixed => {
            leave_to_kernel();
            Ok(None)
        }
        ProcessMaking::Thread => {
            // Files adopted while other threads use them could be lost to those threads. A process with threads runs
            // for long.
            deferred_session::end_deferral();
            single_thread::end_detection();
            Ok(None)
        }
    }
}

/// Hands the inherited open files that are meant over to the kernel.
fn hand_over_inherited(is_meant: impl Fn(i32) -> bool) {
    descriptors::inherited().filter(|&number| is_meant(number)).for_each(materialise::leave_inherited);
}

/// Runs a program in a process that has borrowed the memory, if the kernel needs help with that.
pub(crate) fn execute_lent(call: &Frame) -> Option<i64> {
    without_library::execute_lent(call.rax as i64, call.arguments, IS_KERNELS.load(Ordering::Relaxed))
}

/// Runs another program.
///
/// It hands the program's inherited files over to the kernel, and adds the library to its environment.
fn execute_program(number: u64, a: [u64; 6]) -> Served {
    let mut arguments = a;
    if IS_KERNELS.load(Ordering::Relaxed) {
        return Ok(without_library::execute_foreign(number as i64, a));
    }
    let (is_by_path, environment_at) =
        (number as i64 == libc::SYS_execve, without_library::environment_index(number as i64));
    // If there is no such program, hand nothing over.
    if is_by_path && let Some(errno) = without_library::missing_error(a[0]) {
        return Err(errno);
    }
    // If a descriptor is a part of the path, the new program gets another path than the one named here. And with
    // several threads, others may change descriptors meanwhile.
    let carried =
        if is_by_path && single_thread::is_single_thread() { exec_files::collect_own() } else { ExecFiles::default() };
    let open = exec_files::encode_variable(&carried, a[0]);
    // By now the process may have too little memory left to allocate: most environments need none.
    let (mut some, mut more, mut preload) = ([0; without_library::VARIABLES], Vec::new(), PreloadText::new());
    let list = environment::list_with_room(a[environment_at], &mut some, &mut more)?;
    if let Some(completed) = environment::with_library(a[environment_at], open.as_deref(), list, &mut preload)? {
        arguments[environment_at] = completed;
    }
    hand_over_files();
    hand_over_inherited(|number| descriptors::closes_on_exec(number) != Some(true));
    user_sessions::end_all_sessions(false);
    program_profile::record_long();
    report::record_execution();
    if let Some(result) = without_library::execute(number as i64, a) {
        return Ok(Some(result));
    }
    // SAFETY: the program's own call, but for the additions to its environment, which live until this returns.
    Ok(Some(unsafe { system_call(number, arguments) }))
}

fn change_directory(call: &Frame) -> Served {
    let named = match call.rax as i64 {
        libc::SYS_fchdir => Some(call.arguments[0] as i32),
        _ => path::descriptor_at_address(call.arguments[0]),
    };
    if let Some((descriptor, file)) = named.and_then(|descriptor| Some((descriptor, descriptors::file(descriptor)?))) {
        if call.rax as i64 == libc::SYS_fchdir && !file.is_directory() {
            return Err(Errno::ENOTDIR);
        }
        materialise::hand_over(descriptor)?;
    }
    let result = call_kernel(call);
    if result == 0 {
        path::update_working();
    }
    Ok(Some(result))
}
