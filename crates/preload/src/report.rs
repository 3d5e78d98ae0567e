//! Counts for `ashlar run --report`.
//!
//! They count how often LibFS and how often the kernel served each call on an Ashlar, and how long that took. The
//! counts are in a file that all processes of the run share (`ashlar_wire`, `report`), so nothing is lost with a
//! process that is killed. During a report, the library also catches calls on kernel descriptors, and asks for their
//! file system. Each thread marks when it is in a counted call: requests to a mount at other times went past the
//! library.
//!
//! Without a report, this costs the hook one check of a pointer.

use std::ffi::CStr;
use std::sync::atomic::{AtomicPtr, AtomicU8, AtomicU64, Ordering};

use ashlar_wire::{
    REPORT_BYTES, REPORT_CALLS, REPORT_COUNTS, REPORT_DEVICES, REPORT_DEVICES_MAX, REPORT_MAGIC, REPORT_PROGRAMS,
    REPORT_ROW, REPORT_THREADS, REPORT_THREADS_MAX, THREAD_COUNTED, THREAD_HAS_LIBRARY,
};

use crate::calls;
use crate::entry::arch::{After, Frame, system_call};
use crate::entry::hook;
use crate::files::{descriptors, path};
use crate::memory::program_memory;

/// The address of the mapped file.
static PAGE: AtomicPtr<u8> = AtomicPtr::new(std::ptr::null_mut());

/// A call to be counted: `its start << 9 | its number`; 0 for none.
pub(crate) type CountedCall = u64;
const NUMBER_BITS: u32 = 9;
const _: () = assert!(1 << NUMBER_BITS == REPORT_CALLS);

/// The counts.
#[derive(Clone, Copy)]
pub(crate) struct ReportPage(*mut u8);

/// Returns the counts, if there is a report.
#[inline(always)]
pub(crate) fn page() -> Option<ReportPage> {
    let start = PAGE.load(Ordering::Relaxed);
    (!start.is_null()).then_some(ReportPage(start))
}

/// Maps the file of counts; without it there is no report.
///
/// Until [`begin_program`], all calls of this thread are the library's.
pub(crate) fn map_counts(file: &CStr) {
    let flags = (libc::O_RDWR | libc::O_NOFOLLOW | libc::O_CLOEXEC) as u64;
    // SAFETY: the path is a string, the kernel chooses the address of the mapping, and the descriptor is closed here.
    let start = unsafe {
        let file = system_call(libc::SYS_open as u64, [file.as_ptr() as u64, flags, 0, 0, 0, 0]);
        if file < 0 {
            return;
        }
        let size = system_call(libc::SYS_lseek as u64, [file as u64, 0, libc::SEEK_END as u64, 0, 0, 0]);
        let protection = (libc::PROT_READ | libc::PROT_WRITE) as u64;
        let arguments = [0, REPORT_BYTES as u64, protection, libc::MAP_SHARED as u64, file as u64, 0];
        let is_whole = size == REPORT_BYTES as i64;
        let start = if is_whole { system_call(libc::SYS_mmap as u64, arguments) } else { -1 };
        system_call(libc::SYS_close as u64, [file as u64, 0, 0, 0, 0, 0]);
        start
    };
    let page = ReportPage(start as *mut u8);
    if start < 0 || page.word(0).load(Ordering::Relaxed) != REPORT_MAGIC {
        return;
    }
    page.word(REPORT_PROGRAMS).fetch_add(1, Ordering::Relaxed);
    page.process().store(THREAD_HAS_LIBRARY, Ordering::Relaxed);
    page.mark_counted();
    PAGE.store(page.0, Ordering::Relaxed);
}

/// Records that the program begins.
pub(crate) fn begin_program() {
    if let Some(page) = page() {
        page.unmark_counted();
    }
}

/// Records that this process is about to run another program, which may not load the library.
pub(crate) fn record_execution() {
    if let Some(page) = page() {
        page.unmark_counted();
        page.process().fetch_and(!THREAD_HAS_LIBRARY, Ordering::Relaxed);
    }
}

impl ReportPage {
    fn word(self, at: usize) -> &'static AtomicU64 {
        debug_assert!(at % 8 == 0 && at + 8 <= REPORT_BYTES);
        // SAFETY: the file is mapped with this length for as long as the process lives, and no process truncates it.
        unsafe { &*self.0.add(at).cast() }
    }

    fn row(self, number: usize, column: usize) -> &'static AtomicU64 {
        self.word(REPORT_COUNTS + number % REPORT_CALLS * REPORT_ROW + column * 8)
    }

    fn byte(self, thread: i64) -> &'static AtomicU8 {
        // SAFETY: as for `word`.
        unsafe { &*self.0.add(REPORT_THREADS + thread as usize % REPORT_THREADS_MAX).cast() }
    }

    /// Returns the mark of this thread. Its id is asked for each time: after a fork it is another one.
    fn thread(self) -> &'static AtomicU8 {
        // SAFETY: the call takes no arguments.
        self.byte(unsafe { system_call(libc::SYS_gettid as u64, [0; 6]) })
    }

    /// Returns the mark of this process.
    fn process(self) -> &'static AtomicU8 {
        // SAFETY: as above.
        self.byte(unsafe { system_call(libc::SYS_getpid as u64, [0; 6]) })
    }

    fn mark_counted(self) {
        self.thread().fetch_or(THREAD_COUNTED, Ordering::Relaxed);
    }

    fn unmark_counted(self) {
        self.thread().fetch_and(!THREAD_COUNTED, Ordering::Relaxed);
    }

    /// Begins a call that the library is to serve.
    #[cold]
    pub(crate) fn begin_call(self, call: &Frame) -> CountedCall {
        self.mark_counted();
        if is_execution(call) {
            // A successful one does not return.
            self.count_execution(call);
            return 0;
        }
        if calls::touches_mount(call, |descriptor| self.is_on_mount(descriptor)) {
            self.start_counting(call)
        } else {
            0
        }
    }

    /// Ends a call as far as the library serves it; returns how it goes on.
    #[cold]
    pub(crate) fn end_call(self, call: &Frame, number: u64, word: CountedCall, after: After) -> After {
        match after {
            After::Kernel if word != 0 => return After::KernelCounted,
            After::KernelInstead if word != 0 => return After::InsteadCounted,
            After::KernelOpen if word != 0 => return After::OpenCounted,
            After::Return | After::Unmask if word != 0 => {
                self.count(word, hook::take_kernel_served() || calls::is_always_kernels(number as i64));
            }
            // It has failed.
            After::Return | After::Unmask if is_execution_number(number) => self.record_library(),
            After::Return | After::Unmask if makes_process(number) && call.rax == 0 => self.record_library(),
            _ => {}
        }
        self.unmark_counted();
        after
    }

    /// Begins a call that the kernel serves without the library.
    #[cold]
    pub(crate) fn pass_call(self, call: &Frame) -> (After, CountedCall) {
        if is_execution(call) {
            self.count_execution(call);
        } else if calls::touches_mount(call, |descriptor| self.is_on_mount(descriptor)) {
            self.mark_counted();
            return (After::KernelCounted, self.start_counting(call));
        }
        (After::Kernel, 0)
    }

    fn start_counting(self, call: &Frame) -> CountedCall {
        (now_ns() << NUMBER_BITS) | (call.rax % REPORT_CALLS as u64)
    }

    /// Records that the process has the library: it was forked from one that has, or goes on running.
    fn record_library(self) {
        self.process().fetch_or(THREAD_HAS_LIBRARY, Ordering::Relaxed);
    }

    fn count_execution(self, call: &Frame) {
        if calls::touches_mount(call, |descriptor| self.is_on_mount(descriptor)) {
            self.row(call.rax as usize, 2).fetch_add(1, Ordering::Relaxed);
        }
    }

    fn count(self, word: CountedCall, is_delegated: bool) {
        let number = word as usize % REPORT_CALLS;
        let elapsed = (now_ns() << NUMBER_BITS).wrapping_sub(word) >> NUMBER_BITS;
        let column = if is_delegated { 2 } else { 0 };
        self.row(number, column).fetch_add(1, Ordering::Relaxed);
        self.row(number, column + 1).fetch_add(elapsed, Ordering::Relaxed);
    }

    /// Returns whether a descriptor is of a file on an Ashlar, LibFS's or the kernel's.
    fn is_on_mount(self, descriptor: i32) -> bool {
        if descriptor < 0 || descriptors::is_internal(descriptor) {
            return false;
        }
        descriptors::is_ours(descriptor)
            || crate::sessions::session::device_of(descriptor).is_some_and(|device| {
                let devices = (0..REPORT_DEVICES_MAX).map(|index| self.word(REPORT_DEVICES + index * 8));
                device != 0 && devices.into_iter().any(|known| known.load(Ordering::Relaxed) == device)
            })
    }
}

/// Counts a call that the kernel has served, for the entry.
pub(crate) extern "C" fn ashlar_after_kernel(word: CountedCall) {
    if let Some(page) = page() {
        page.count(word, true);
        page.unmark_counted();
    }
}

fn is_execution(call: &Frame) -> bool {
    is_execution_number(call.rax)
}

fn is_execution_number(number: u64) -> bool {
    matches!(number as i64, libc::SYS_execve | libc::SYS_execveat)
}

fn makes_process(number: u64) -> bool {
    matches!(number as i64, libc::SYS_fork | libc::SYS_vfork | libc::SYS_clone | libc::SYS_clone3)
}

/// Returns nanoseconds since some moment.
fn now_ns() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the time goes into a local variable. libc reads it from the kernel's memory without a system call.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    (time.tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(time.tv_nsec as u64)
}

/// Returns whether the path at an address leads into a mount as it is written.
///
/// `is_on_mount` answers this for the directory that the path begins from.
pub(crate) fn leads_inside(directory: i32, address: u64, is_on_mount: impl Fn(i32) -> bool) -> bool {
    let mut start = [0; 256];
    let length = program_memory::copy_start(address, &mut start);
    match &start[..length] {
        text @ [b'/', ..] => path::mount_of_absolute(text).is_some() || path::descriptor_at_address(address).is_some(),
        [] if directory == libc::AT_FDCWD => false,
        _ if directory == libc::AT_FDCWD => path::is_working_inside() || path::leads_in_from_outside(address),
        _ => is_on_mount(directory),
    }
}
