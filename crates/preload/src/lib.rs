//! LibFS inside unmodified programs: the library that `ashlar run` has the dynamic linker load into them.
//!
//! Purpose: file operations under a mount become calls of LibFS in the program's own process. libc's system calls are patched to come
//! here first (`patch`, `arch`); those that concern files of ours are served (`calls`), all others go on to the kernel.
//!
//! Invariants:
//! - FUSE stays the complete file system beneath. What is not served here is the kernel's: paths as they are, descriptors after they
//!   have become real ones (`materialise`). Whatever cannot be caught goes there by itself.
//! - A descriptor of ours is `O_PATH` in the kernel, or has an offset there at which nothing can be (`shared`): what slips by fails, and writes nowhere.
//! - The program notices nothing: no thread and no signal of ours, signals of its own come before or after a call (`signals`), its
//!   stack and its heap are not used (`hook`, `heap`), and nothing here exits, aborts or unwinds.
//! - Bad pointers give `EFAULT` (`memory`).
//!
//! Non-goals: static programs, Go's, and code that is made at run time and calls the kernel itself; they use FUSE.
//!
//! Source: `docs/interception.md`, `docs/design.md`.

mod arch;
mod bare;
mod calls;
mod carried;
mod deferred;
mod descriptors;
mod direct;
mod environment;
mod heap;
mod hook;
mod imports;
mod locks;
mod materialise;
mod memory;
mod patch;
mod path;
mod program_profile;
mod recycled;
mod report;
mod reserve;
mod session;
mod shared;
mod signals;
mod snapshot;
mod stack;
mod submounts;
mod threads;
mod unnamed;
mod users;

use std::ffi::{c_char, c_int};

#[global_allocator]
static HEAP: heap::Heap = heap::Heap::new();

type Initialise = unsafe extern "C" fn(c_int, *const *const c_char, *const *const c_char);

/// The dynamic linker calls it before the program begins, with the program's arguments and environment.
#[used]
#[unsafe(link_section = ".init_array")]
static INITIALISE: Initialise = initialise;

/// What AddressSanitizer asks for at its start: that another library comes before its own is no mistake, since this one replaces nothing that it does. A program
/// that gives its own answer has to say so too.
#[unsafe(no_mangle)]
pub extern "C" fn __asan_default_options() -> *const c_char {
    c"verify_asan_link_order=0".as_ptr()
}

unsafe extern "C" fn initialise(count: c_int, arguments: *const *const c_char, environment: *const *const c_char) {
    hook::inside(|| {
        // SAFETY: the linker hands the environment over as the kernel made it.
        let Some(told) = (unsafe { environment::find(environment) }) else { return };
        if !session::set_mounts(told.mounts, told.patience_ms) {
            return;
        }
        if let Some(file) = environment::report() {
            report::begin(file);
        }
        // What goes wrong here is an error of the call that it happens in, and not for the program's eyes.
        std::panic::set_hook(Box::new(|_| {}));
        session::find_umask();
        path::find_working();
        if !patch::catch_libc(told.plans, calls::is_wanted) {
            return;
        }
        patch::catch_objects(told.plans, calls::is_wanted);
        patch::watch_loader(hook::ashlar_objects_changed);
        if told.deferred.is_none() {
            // SAFETY: the linker hands the arguments over as the kernel made them.
            unsafe { program_profile::begin(told.plans, count, arguments) };
        }
        deferred::begin(told.deferred, &told.open.map(carried::taken).unwrap_or_default());
        threads::begin();
        calls::arm();
    });
    report::begun();
}
