//! LibFS inside unmodified programs: the library that `ashlar run` loads into them.
//!
//! Purpose: file operations under a mount become calls of LibFS in the program's own process. libc's system calls are
//! patched to jump here first (`patch`, `entry`). The library serves those on LibFS files (`calls`), and passes all
//! others to the kernel.
//!
//! Invariants:
//! - FUSE stays the complete file system beneath. The kernel serves all that LibFS doesn't: paths as they are,
//!   descriptors after they have become real ones (`materialise`). Calls that can't be caught reach the kernel by
//!   themselves.
//! - A LibFS descriptor is `O_PATH` in the kernel, or has an offset there at which there can be no data
//!   (`shared_file`). So a call that the library misses fails, and writes nowhere.
//! - The program notices nothing. The library has no thread and no signal, and uses neither the program's stack nor its
//!   heap (`hook`, `heap`). The program's signals arrive before or after a call (`signals`). Nothing here exits, aborts
//!   or unwinds.
//! - Bad pointers give `EFAULT` (`program_memory`).
//!
//! Non-goals: static programs, Go's, and code that is made at run time and calls the kernel itself; they use FUSE.
//!
//! Names: *ours* are the descriptors and files that LibFS serves, *kernels* those that the kernel serves. *Leave* and
//! *hand over* mean from LibFS to the kernel. Functions named *fast* serve a call on the fast path.
//!
//! Source: `docs/interception.md`, `docs/design.md`.

mod calls;
mod entry;
mod files;
mod memory;
mod patch;
mod programs;
mod report;
mod sessions;

use std::ffi::{c_char, c_int};

use crate::entry::{hook, single_thread};
use crate::files::path;
use crate::memory::heap;
use crate::programs::{environment, exec_files, program_profile};
use crate::sessions::{deferred_session, session};

#[global_allocator]
static HEAP: heap::Heap = heap::Heap::new();

type Initialise = unsafe extern "C" fn(c_int, *const *const c_char, *const *const c_char);

/// The dynamic linker calls it before the program begins, with the program's arguments and environment.
#[used]
#[unsafe(link_section = ".init_array")]
static INITIALISE: Initialise = initialise;

/// Returns the program's default options for AddressSanitizer, which it asks for at its start.
///
/// The sanitizer must accept that another library is loaded before its own: this one replaces nothing that it replaces.
/// A program with options of its own must set this one too.
#[unsafe(no_mangle)]
pub extern "C" fn __asan_default_options() -> *const c_char {
    c"verify_asan_link_order=0".as_ptr()
}

unsafe extern "C" fn initialise(count: c_int, arguments: *const *const c_char, environment: *const *const c_char) {
    hook::run_inside(|| {
        // SAFETY: the linker passes the environment as the kernel made it.
        let Some(settings) = (unsafe { environment::read_settings(environment) }) else { return };
        if !session::set_mounts(settings.mounts, settings.patience_ms) {
            return;
        }
        if let Some(file) = environment::report_file() {
            report::map_counts(file);
        }
        // A panic is an error of the call that it happens in; the program does not see its message.
        std::panic::set_hook(Box::new(|_| {}));
        session::read_umask();
        path::update_working();
        if !patch::catch_libc(settings.plans, calls::is_caught_number) {
            return;
        }
        patch::catch_objects(settings.plans, calls::is_caught_number);
        patch::watch_loader(hook::ashlar_objects_changed);
        if settings.deferred.is_none() {
            // SAFETY: the linker passes the arguments as the kernel made them.
            unsafe { program_profile::set_program(settings.plans, count, arguments) };
        }
        deferred_session::begin_count(
            settings.deferred,
            &settings.open.map(exec_files::read_variable).unwrap_or_default(),
        );
        single_thread::begin_detection();
        calls::start_catching();
    });
    report::begin_program();
}
