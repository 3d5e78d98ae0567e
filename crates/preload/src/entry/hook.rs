//! The hook: runs caught calls on a stack of the library's, with signals held back.
//!
//! A system call uses none of the program's stack, and signal handlers and threads with small stacks rely on that:
//! hence the library's own stack. A signal handler must find the call done or not begun. It may use files itself, or
//! jump out and never return, while LibFS would hold locks. So a handler that is called in the middle (`signals`)
//! records its signal, and gets it again after the call.

use std::cell::{Cell, UnsafeCell};
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::calls::{self, CallVerdict};
use crate::entry::arch::{After, Frame, HookAnswer, THREAD_ALIGN, THREAD_BYTES, ashlar_on_stack, thread_memory};
use crate::entry::call_stack;
use crate::entry::signals::{self, PendingSignals};
use crate::files::recycled_descriptor;
use crate::files::shared_file::BorrowerFiles;
use crate::memory::memory_reserve;
use crate::{patch, report};

/// The library's state of one thread.
///
/// It has no destructor: libc would allocate to register one.
struct ThreadState {
    /// The number of library calls that it is in: 0 or 1, or more if LibFS itself calls libc.
    depth: Cell<u32>,
    /// The end of its stack for calls, or null.
    stack: Cell<*mut u8>,
    /// Whether it stands still while a process that it has made uses its memory, or is that process.
    has_lent: Cell<bool>,
    /// The state of open files that this process shares with others, or null.
    lent_files: Cell<*mut BorrowerFiles>,
    /// A call of that process is being checked: what this calls in libc is none of the program's calls.
    is_checking: Cell<bool>,
    /// Whether the kernel has served the call that it is in, for the report.
    is_kernel_served: Cell<bool>,
    /// Signals that came in the middle of a call.
    pending: UnsafeCell<PendingSignals>,
    after: Cell<After>,
}

/// Access to the library's state of this thread, in memory at a fixed distance from the thread pointer.
///
/// In a library, a variable of `thread_local!` takes a call of the dynamic linker's each time, and each of the
/// program's calls reads this state several times.
struct ThreadStateAccess;

const THREAD: ThreadStateAccess = ThreadStateAccess;
// It begins as zeros: the first `After` is to return, and no signal has come.
const _: () = assert!(
    size_of::<ThreadState>() <= THREAD_BYTES && align_of::<ThreadState>() <= THREAD_ALIGN && After::Return as u32 == 0
);

impl ThreadStateAccess {
    #[inline(always)]
    fn with<R>(&self, look: impl FnOnce(&ThreadState) -> R) -> R {
        // SAFETY: the memory is this thread's alone for as long as it runs. Before the first use it was zeros, which
        // are a `ThreadState`: numbers, null pointers, `false`, the first `After`, and no signals.
        look(unsafe { &*thread_memory().cast::<ThreadState>() })
    }
}

/// Returns whether this thread is in a call of the library.
///
/// If so, a handler must wait.
pub(crate) fn is_inside() -> bool {
    THREAD.with(|thread| thread.depth.get() > 0)
}

/// Records a signal for the time after the call.
pub(crate) fn record_signal(note: impl FnOnce(&mut PendingSignals)) {
    // SAFETY: only handlers that run in the middle of a call get here, with all signals blocked. The hook reads the
    // record only when it is out of the call.
    THREAD.with(|thread| note(unsafe { &mut *thread.pending.get() }));
}

/// Returns whether a signal came in the middle of this thread's call.
pub(crate) fn has_pending_signal() -> bool {
    // SAFETY: a handler that changes it meanwhile runs on this thread, and ends before this goes on.
    THREAD.with(|thread| unsafe { (*thread.pending.get()).is_any() })
}

/// Returns whether the kernel would restart the call that the first of them has interrupted.
pub(crate) fn restarts_call() -> bool {
    // SAFETY: as above.
    THREAD.with(|thread| unsafe { (*thread.pending.get()).restarts_call() })
}

/// Records that the memory is about to be lent to a process that shares open files.
pub(crate) fn lend_memory(files: BorrowerFiles) {
    THREAD.with(|thread| {
        thread.has_lent.set(true);
        if files.is_any() && !thread.stack.get().is_null() {
            thread.lent_files.set(Box::into_raw(Box::new(files)));
        }
    });
}

/// Records that the kernel has served the call.
pub(crate) fn record_kernel_served() {
    THREAD.with(|thread| thread.is_kernel_served.set(true));
}

/// Returns whether the thread has lent its memory: this is the process that has borrowed it.
pub(crate) fn has_lent_memory() -> bool {
    THREAD.with(|thread| thread.has_lent.get())
}

/// Returns whether the kernel has served the call, and clears the record.
pub(crate) fn take_kernel_served() -> bool {
    THREAD.with(|thread| thread.is_kernel_served.replace(false))
}

/// Runs a function as a call of the library: the kernel serves the calls that it makes in libc.
pub(crate) fn run_inside<R>(run: impl FnOnce() -> R) -> R {
    let depth = |change: u32| THREAD.with(|thread| thread.depth.set(thread.depth.get().wrapping_add(change)));
    depth(1);
    let result = run();
    depth(u32::MAX);
    result
}

/// Handles a call that may concern the library.
///
/// # Safety
/// The entry calls it, with a frame on the stack.
pub(crate) unsafe extern "C" fn ashlar_hook(frame: *mut Frame) -> HookAnswer {
    // SAFETY: the frame is the entry's, which uses it no other way meanwhile.
    let call = unsafe { &mut *frame };
    THREAD.with(|thread| {
        if thread.has_lent.get() && !thread.is_checking.get() && !thread.stack.get().is_null() {
            // The process is in no call of the library: a signal is for the process itself, and arrives at once. Of the
            // lender's memory only the stack for calls is used.
            let on_stack = |function: unsafe extern "C" fn(*mut Frame)| {
                thread.is_checking.set(true);
                // SAFETY: the stack is this thread's alone, and empty: the lender stands still, and is out of its call.
                unsafe { ashlar_on_stack(frame, thread.stack.get(), function) };
                thread.is_checking.set(false);
            };
            if !thread.lent_files.get().is_null() {
                on_stack(check_borrower);
            }
            if calls::concerns_lent(call) {
                if let Some(page) = report::page() {
                    // Count the program here, as all calls that pass the library.
                    page.pass_call(call);
                }
                thread.after.set(After::Kernel);
                on_stack(serve_borrower);
                return HookAnswer::new(thread.after.get(), 0);
            }
        }
        let concerns = thread.depth.get() == 0 && !thread.has_lent.get() && calls::concerns_library(call);
        if !concerns
            && (thread.depth.get() > 0 || thread.has_lent.get() || !recycled_descriptor::must_close_before(call))
        {
            if !thread.has_lent.get() {
                recycled_descriptor::check_kernel_call(call);
            }
            let past = report::page().filter(|_| thread.depth.get() == 0).map(|page| page.pass_call(call));
            let (after, word) = past.unwrap_or((After::Kernel, 0));
            return HookAnswer::new(after, word);
        }
        let counted = report::page().map(|page| (page, call.rax, page.begin_call(call)));
        if thread.stack.get().is_null() {
            thread.stack.set(call_stack::take_stack());
        }
        thread.depth.set(1);
        thread.after.set(After::Return);
        let serve = if concerns { serve_on_stack } else { pass_after_closing };
        if thread.stack.get().is_null() {
            // SAFETY: the frame is valid. Without memory for a stack, use the program's.
            unsafe { serve(frame) };
        } else {
            // SAFETY: the stack is this thread's alone, and empty.
            unsafe { ashlar_on_stack(frame, thread.stack.get(), serve) };
        }
        thread.depth.set(0);
        // SAFETY: the thread is out of the call, so no handler records signals any more.
        let mask = unsafe { &mut *thread.pending.get() }.send_again();
        let after = match (thread.after.get(), mask) {
            // No signal has interrupted the call, so there is no handler after which to restart it.
            (After::Again, None) => {
                call.rax = -i64::from(libc::EINTR) as u64;
                After::Return
            }
            (after, None) => after,
            (After::Again, Some(mask)) => {
                call.extra = mask;
                After::Again
            }
            (After::Return, Some(mask)) => {
                call.extra = mask;
                After::Unmask
            }
            (after, Some(mask)) => {
                signals::set_mask(mask);
                after
            }
        };
        match counted {
            None => HookAnswer::new(after, 0),
            Some((page, number, word)) => HookAnswer::new(page.end_call(call, number, word, after), word),
        }
    })
}

/// Serves a call.
///
/// A defect of the library is an error of this one call: nothing unwinds into the program.
unsafe extern "C" fn serve_on_stack(frame: *mut Frame) {
    // SAFETY: as for the hook.
    let call = unsafe { &mut *frame };
    recycled_descriptor::prepare_call(call);
    if memory_reserve::is_memory_short() && !matches!(call.rax as i64, libc::SYS_execve | libc::SYS_execveat) {
        // This thread uses no session yet.
        let _ = catch_unwind(calls::give_up_sessions);
    }
    if catch_unwind(AssertUnwindSafe(|| serve_into_frame(call))).is_err() {
        call.rax = -i64::from(libc::EIO) as u64;
        THREAD.with(|thread| thread.after.set(After::Return));
    }
    if THREAD.with(|thread| thread.after.get()) != After::Return && recycled_descriptor::must_close_before(call) {
        recycled_descriptor::close_recycled();
    }
}

/// Checks a call of a process that has borrowed the memory, and shares open files.
unsafe extern "C" fn check_borrower(frame: *mut Frame) {
    // SAFETY: as for the hook.
    let call = unsafe { &*frame };
    // SAFETY: the borrowing process has them for itself, until its lender goes on.
    let Some(files) = (unsafe { THREAD.with(|thread| thread.lent_files.get()).as_mut() }) else { return };
    // A signal handler might use the same open file.
    let mask = signals::block_all();
    let _ = catch_unwind(AssertUnwindSafe(|| files.check_call(call)));
    signals::set_mask(mask);
}

/// Serves a call of a process that has borrowed the memory.
unsafe extern "C" fn serve_borrower(frame: *mut Frame) {
    // SAFETY: as for the hook.
    let call = unsafe { &mut *frame };
    if let Ok(Some(result)) = catch_unwind(AssertUnwindSafe(|| calls::execute_lent(call))) {
        call.rax = result as u64;
        THREAD.with(|thread| thread.after.set(After::Return));
    }
}

/// Passes on a call that does not concern the library, after closing the recycled number.
unsafe extern "C" fn pass_after_closing(frame: *mut Frame) {
    // SAFETY: as for the hook.
    recycled_descriptor::check_kernel_call(unsafe { &*frame });
    recycled_descriptor::close_recycled();
    THREAD.with(|thread| thread.after.set(After::Kernel));
}

fn serve_into_frame(call: &mut Frame) {
    // The thread's `After` is to return, unless it is set below.
    if let Some(result) = calls::serve_fast(call) {
        call.rax = result as u64;
        return;
    }
    let after = match calls::serve_call(call) {
        CallVerdict::Done(result) => {
            call.rax = result as u64;
            After::Return
        }
        CallVerdict::Kernel => After::Kernel,
        CallVerdict::KernelInstead(descriptor) => {
            call.extra = descriptor as u64;
            After::KernelInstead
        }
        CallVerdict::KernelOpen => After::KernelOpen,
        CallVerdict::Native => After::Native,
        CallVerdict::Vfork => After::Vfork,
        CallVerdict::Again => After::Again,
    };
    THREAD.with(|thread| thread.after.set(after));
}

/// Called when the process that borrowed the memory has its own, or has ended.
pub(crate) extern "C" fn ashlar_after_vfork() {
    THREAD.with(|thread| {
        thread.has_lent.set(false);
        // The process may have become another program in the middle of a check.
        thread.is_checking.set(false);
        let files = thread.lent_files.replace(std::ptr::null_mut());
        if !files.is_null() {
            // This is no call of the library, so a handler could come in the middle and find the heap's lock held.
            let mask = signals::block_all();
            // SAFETY: it was made as a box. The process that has used it has its own memory by now, or has ended.
            run_inside(|| drop(unsafe { Box::from_raw(files) }));
            signals::set_mask(mask);
        }
    });
}

/// Called when the dynamic linker has loaded or unloaded objects.
///
/// It replaces a function of the linker's that does nothing.
pub(crate) extern "C" fn ashlar_objects_changed() {
    THREAD.with(|thread| {
        if thread.has_lent.get() {
            return;
        }
        if thread.depth.get() > 0 {
            // A call of the library makes libc load an object.
            patch::catch_later_objects();
            return;
        }
        // A handler that comes in the middle must find none of the library's locks held.
        let mask = signals::block_all();
        run_inside(|| {
            if thread.stack.get().is_null() {
                thread.stack.set(call_stack::take_stack());
            }
            let frame = std::ptr::null_mut();
            // SAFETY: the function uses no frame; the stack is this thread's alone, and empty.
            unsafe {
                match thread.stack.get() {
                    stack if stack.is_null() => catch_later_objects(frame),
                    stack => ashlar_on_stack(frame, stack, catch_later_objects),
                }
            }
        });
        signals::set_mask(mask);
    });
}

/// Patches newly loaded objects.
///
/// A defect of the library leaves one object unpatched.
unsafe extern "C" fn catch_later_objects(_frame: *mut Frame) {
    let _ = catch_unwind(patch::catch_later_objects);
}

/// Gives this thread's stack to another thread: this one ends.
pub(crate) fn release_stack() {
    THREAD.with(|thread| call_stack::give_back_stack(thread.stack.replace(std::ptr::null_mut())));
}
