//! The program's signal handlers, held back while a call of the library runs.
//!
//! Handlers are set through libc, so the library sees them: it gives the kernel [`deliver`] in their place, with the
//! same flags. Outside of the library's calls, `deliver` passes each signal on. Inside, it records the signal and
//! blocks all others until the call is done; then the hook makes the kernel send the recorded ones again. Signals that
//! the program's own faults raise are passed on at once.

use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use ashlar_libfs::WakeReason;
use ashlar_types::Errno;

use crate::entry::arch::system_call;
use crate::entry::hook;
use crate::files::recycled_descriptor;
use crate::memory::program_memory::{self, MemoryUse};

/// Signals are numbered from 1.
const SIGNALS: usize = 65;
/// A handler below this one is `SIG_DFL`, `SIG_IGN` or an error.
const HANDLER_MIN: u64 = 2;
/// The most signals recorded at a time.
///
/// After the first, all are blocked, and only signals that this thread sends to itself could follow.
const NOTED_MAX: usize = 4;

/// `struct sigaction`, as the kernel defines it.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct SignalAction {
    handler: u64,
    flags: u64,
    restorer: u64,
    mask: u64,
}

// SAFETY: numbers.
unsafe impl program_memory::Plain for SignalAction {}

/// The program's handlers and flags.
static HANDLERS: [AtomicU64; SIGNALS] = [const { AtomicU64::new(0) }; SIGNALS];
static FLAGS: [AtomicU64; SIGNALS] = [const { AtomicU64::new(0) }; SIGNALS];

/// Signals that came in the middle of a call.
pub(crate) struct PendingSignals {
    noted: [MaybeUninit<libc::siginfo_t>; NOTED_MAX],
    count: usize,
    /// The mask before the first one came.
    mask: u64,
}

impl PendingSignals {
    fn record(&mut self, info: &libc::siginfo_t, mask: u64) {
        if self.count == 0 {
            self.mask = mask;
        }
        if let Some(place) = self.noted.get_mut(self.count) {
            place.write(*info);
            self.count += 1;
        }
    }

    /// Returns whether there is one.
    pub(crate) fn is_any(&self) -> bool {
        self.count > 0
    }

    /// Returns whether the handler of the first one allows calls to be restarted.
    pub(crate) fn restarts_call(&self) -> bool {
        self.count > 0 && {
            // SAFETY: as many were written as are counted.
            let signal = unsafe { self.noted[0].assume_init_ref() }.si_signo;
            FLAGS[signal as usize % SIGNALS].load(Ordering::Acquire) & libc::SA_RESTART as u64 != 0
        }
    }

    /// Sets the mask, after signals that came while the kernel had another one than the program's.
    fn set_old_mask(&mut self, mask: u64) {
        self.mask = mask;
    }

    /// Makes the kernel send them again, while they are blocked; returns the mask that lets them in.
    #[inline]
    pub(crate) fn send_again(&mut self) -> Option<u64> {
        if self.count == 0 {
            return None;
        }
        // SAFETY: the calls take no arguments.
        let (process, thread) = unsafe {
            (system_call(libc::SYS_getpid as u64, [0; 6]) as u64, system_call(libc::SYS_gettid as u64, [0; 6]) as u64)
        };
        for info in &self.noted[..self.count] {
            // SAFETY: as many were written as are counted.
            let signal = unsafe { info.assume_init_ref() }.si_signo as u64;
            let arguments = [process, thread, signal, info.as_ptr() as u64, 0, 0];
            // SAFETY: a signal to this thread, which it has had before.
            unsafe { system_call(libc::SYS_rt_tgsigqueueinfo as u64, arguments) };
        }
        self.count = 0;
        Some(self.mask)
    }
}

/// Blocks all signals; returns the mask before.
pub(crate) fn block_all() -> u64 {
    let (all, mut before) = (u64::MAX, 0_u64);
    let arguments = [libc::SIG_SETMASK as u64, (&raw const all) as u64, (&raw mut before) as u64, 8, 0, 0];
    // SAFETY: both masks are local variables.
    unsafe { system_call(libc::SYS_rt_sigprocmask as u64, arguments) };
    before
}

/// Sets the signal mask.
pub(crate) fn set_mask(mask: u64) {
    let arguments = [libc::SIG_SETMASK as u64, (&raw const mask) as u64, 0, 8, 0, 0];
    // SAFETY: the mask is a local variable.
    unsafe { system_call(libc::SYS_rt_sigprocmask as u64, arguments) };
}

/// Waits for a readable socket, a signal, or the end of a time.
///
/// Only signals with a handler of the program's count.
pub(crate) fn wait_for_socket(socket: BorrowedFd<'_>, most: Duration) -> WakeReason {
    // Block signals before the check, so that none comes between it and the wait.
    let (blocked, mut mask) = (u64::MAX, 0u64);
    let arguments = [libc::SIG_SETMASK as u64, (&raw const blocked) as u64, (&raw mut mask) as u64, 8, 0, 0];
    // SAFETY: both masks are local variables.
    unsafe { system_call(libc::SYS_rt_sigprocmask as u64, arguments) };
    if hook::has_pending_signal() {
        // `deliver` has blocked all others, and recorded the program's mask.
        return WakeReason::Interrupted;
    }
    let mut poll = libc::pollfd { fd: socket.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    let mut time = libc::timespec { tv_sec: most.as_secs() as i64, tv_nsec: i64::from(most.subsec_nanos()) };
    let arguments = [(&raw mut poll) as u64, 1, (&raw mut time) as u64, (&raw const mask) as u64, 8, 0];
    // SAFETY: all of them are local variables.
    let ready = unsafe { system_call(libc::SYS_ppoll as u64, arguments) };
    if hook::has_pending_signal() {
        hook::record_signal(|pending| pending.set_old_mask(mask));
        return WakeReason::Interrupted;
    }
    set_mask(mask);
    if ready > 0 { WakeReason::Ready } else { WakeReason::Silent }
}

/// The handler that the kernel knows.
unsafe extern "C" fn deliver(signal: i32, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel gives a valid pointer.
    let code = unsafe { (*info).si_code };
    if hook::is_inside() && !is_fault(signal, code) {
        let context: *mut libc::ucontext_t = context.cast();
        // SAFETY: the kernel takes the mask from there when the handler returns. Only its first 8 bytes are the
        // kernel's.
        unsafe {
            let mask: *mut u64 = (&raw mut (*context).uc_sigmask).cast();
            hook::record_signal(|pending| pending.record(&*info, *mask));
            *mask = u64::MAX;
        }
        return;
    }
    let place = signal as usize % SIGNALS;
    let handler = if FLAGS[place].load(Ordering::Acquire) & libc::SA_RESETHAND as u64 != 0 {
        let handler = HANDLERS[place].swap(0, Ordering::AcqRel);
        let default = SignalAction { handler: 0, flags: 0, restorer: 0, mask: 0 };
        // SAFETY: the default action replaces the handler, as the program has asked.
        unsafe { set_action(signal as u64, &raw const default, std::ptr::null_mut()) };
        handler
    } else {
        HANDLERS[place].load(Ordering::Acquire)
    };
    if handler >= HANDLER_MIN {
        // SAFETY: the program has set this function as its handler. One that takes only the number ignores the rest.
        unsafe {
            let handler: unsafe extern "C" fn(i32, *mut libc::siginfo_t, *mut c_void) =
                std::mem::transmute(handler as usize);
            handler(signal, info, context);
        }
        recycled_descriptor::reset_after_handler();
    }
}

/// Returns whether an instruction has raised the signal, which would only raise it again.
fn is_fault(signal: i32, code: i32) -> bool {
    code > 0 && matches!(signal, libc::SIGSEGV | libc::SIGBUS | libc::SIGFPE | libc::SIGILL | libc::SIGTRAP)
}

/// Makes the kernel's `rt_sigaction`.
unsafe fn set_action(signal: u64, new: *const SignalAction, old: *mut SignalAction) -> i64 {
    // SAFETY: the caller gives valid actions.
    unsafe { system_call(libc::SYS_rt_sigaction as u64, [signal, new as u64, old as u64, 8, 0, 0]) }
}

/// Serves the program's `rt_sigaction`.
pub(crate) fn serve_sigaction(arguments: [u64; 6]) -> Result<i64, Errno> {
    let [signal, new, old, size, ..] = arguments;
    let place = signal as usize;
    if !(1..SIGNALS).contains(&place) || size != 8 {
        return Err(Errno::EINVAL);
    }
    let asked = if new == 0 { None } else { Some(program_memory::load::<SignalAction>(new)?) };
    if old != 0 {
        program_memory::check_access(old, size_of::<SignalAction>() as u64, MemoryUse::Write)?;
    }
    let mut before = SignalAction { handler: 0, flags: 0, restorer: 0, mask: 0 };
    let (handler, flags) = (HANDLERS[place].load(Ordering::Acquire), FLAGS[place].load(Ordering::Acquire));
    let result = match asked {
        None => {
            // SAFETY: the action is a local variable.
            unsafe { set_action(signal, std::ptr::null(), &raw mut before) }
        }
        Some(asked) => {
            let mut given = asked;
            if asked.handler >= HANDLER_MIN {
                // A signal may find the old or the new handler meanwhile: each is one of the program's.
                HANDLERS[place].store(asked.handler, Ordering::Release);
                FLAGS[place].store(asked.flags, Ordering::Release);
                given.handler = deliver as *const () as u64;
                given.flags = asked.flags & !(libc::SA_RESETHAND as u64) | libc::SA_SIGINFO as u64;
            }
            // SAFETY: both are local variables.
            unsafe { set_action(signal, &raw const given, &raw mut before) }
        }
    };
    if result < 0 {
        HANDLERS[place].store(handler, Ordering::Release);
        FLAGS[place].store(flags, Ordering::Release);
        return Ok(result);
    }
    if before.handler == deliver as *const () as u64 {
        (before.handler, before.flags) = (handler, flags);
    }
    if old != 0 {
        program_memory::store(old, &before)?;
    }
    Ok(result)
}
