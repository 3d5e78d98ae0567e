//! Patching libc: each of its system calls that may concern files becomes a jump to the hook.
//!
//! libc calls the kernel from within itself (stdio, `opendir`, `posix_spawn`, …), past every symbol that could be interposed, so the
//! calls themselves are caught. `syscall` has two bytes and a jump five: instructions beside it make room, and are moved into
//! the trampoline. Which ones may be moved says a scan of the whole code, once for each build of libc ([`scan`]); what it found is kept as a
//! [`Plan`] in a file that is named by the build id. Every program checks the bytes that it patches against the plan ([`apply`]).
//!
//! To patch some two hundred pages in each program takes longer than most short programs do. So the patched code is kept too, as an
//! [`image`] that programs map in place of libc's own: they share its pages, and touch those that they run.
//!
//! A program may call the kernel itself (in Rust, through a crate that does). It is patched in the same way, where the call's number is
//! plain to see; a scan that finds nothing that looks like a call is short. So is a library that is known to do so ([`CALLERS`]).
//!
//! What can't be patched goes to the kernel, and through FUSE: slower, and as correct, but for what says how later calls are to be
//! understood (the working directory, `umask`, descriptors).

mod apply;
mod image;
mod kept;
mod plan;
mod scan;

use std::ffi::{CStr, c_int, c_void};
use std::ops::Range;

pub(crate) use self::kept::Kept;
use self::plan::{Plan, Site, WINDOW_MAX};
use self::scan::scan;
use crate::arch::{ashlar_entry, keep_wide_registers};

/// A library as it stands in memory.
#[derive(Debug, Default)]
pub(crate) struct Library {
    /// Where it was loaded.
    pub(crate) base: usize,
    /// Its code, as addresses.
    pub(crate) code: Vec<Range<usize>>,
    /// Its build id.
    pub(crate) build_id: Vec<u8>,
    /// The end of all of it.
    end: usize,
    /// The Go compiler has made it.
    is_go: bool,
}

impl Library {
    /// The pages from the first of its code to the last.
    fn pages(&self) -> Option<Range<usize>> {
        let (first, last) = (self.code.first()?, self.code.last()?);
        Some(first.start / apply::PAGE * apply::PAGE..last.end.next_multiple_of(apply::PAGE))
    }
}

/// What [`find`] looks for, and what it found.
struct Search {
    is_it: fn(&Library, &CStr, usize) -> bool,
    address: usize,
    found: Option<Library>,
}

const NOTE_BUILD_ID: u32 = 3;

/// How the names of libraries begin that call the kernel past libc for what must be seen: for an `io_uring` files must be the kernel's.
const CALLERS: [&[u8]; 2] = [b"liburing.so", b"liburing-ffi.so"];

/// The library in which an address lies.
pub(crate) fn library_of(address: usize) -> Option<Library> {
    search(address, |library, _, address| library.code.iter().any(|code| code.contains(&address)))
}

/// The library that was loaded of those that call the kernel themselves.
fn caller() -> Option<Library> {
    search(0, |_, path, _| {
        let name = path.to_bytes().rsplit(|&byte| byte == b'/').next().unwrap_or_default();
        CALLERS.iter().any(|caller| name.starts_with(caller))
    })
}

fn search(address: usize, is_it: fn(&Library, &CStr, usize) -> bool) -> Option<Library> {
    let mut search = Search { is_it, address, found: None };
    // SAFETY: `find` gets the search as its argument, and is called only until this returns.
    unsafe { libc::dl_iterate_phdr(Some(find), (&raw mut search).cast()) };
    search.found
}

unsafe extern "C" fn find(info: *mut libc::dl_phdr_info, _size: usize, search: *mut c_void) -> c_int {
    // SAFETY: the dynamic linker describes an object that is loaded, and the search is the caller's own.
    let (info, search) = unsafe { (&*info, &mut *search.cast::<Search>()) };
    let base = info.dlpi_addr as usize;
    // SAFETY: the linker says how many headers there are.
    let headers = unsafe { std::slice::from_raw_parts(info.dlpi_phdr, info.dlpi_phnum.into()) };
    let mut library = Library { base, ..Library::default() };
    for header in headers {
        let start = base.wrapping_add(header.p_vaddr as usize);
        match header.p_type {
            libc::PT_LOAD => {
                library.end = library.end.max(start + header.p_memsz as usize);
                if header.p_flags & libc::PF_X != 0 {
                    library.code.push(start..start + header.p_memsz as usize);
                }
            }
            libc::PT_NOTE => {
                // SAFETY: the segment is loaded, and may be read.
                let notes = unsafe { std::slice::from_raw_parts(start as *const u8, header.p_memsz as usize) };
                let (id, is_go) = build_id(notes);
                library.build_id.extend(id);
                library.is_go |= is_go;
            }
            _ => {}
        }
    }
    // SAFETY: the linker names what it has loaded, by a string, or not at all.
    let name = if info.dlpi_name.is_null() { c"" } else { unsafe { CStr::from_ptr(info.dlpi_name) } };
    let is_it = (search.is_it)(&library, name, search.address);
    if is_it {
        search.found = Some(library);
    }
    c_int::from(is_it)
}

/// The build id among a segment of notes (name length, length, type, name and content, each padded to four bytes), and whether one of
/// them is the Go compiler's.
fn build_id(mut notes: &[u8]) -> (Vec<u8>, bool) {
    let (mut id, mut is_go) = (Vec::new(), false);
    let word = |at: usize, notes: &[u8]| notes.get(at..at + 4).and_then(|b| b.try_into().ok()).map(u32::from_le_bytes);
    while let (Some(name), Some(length), Some(kind)) = (word(0, notes), word(4, notes), word(8, notes)) {
        let content = 12 + (name as usize).next_multiple_of(4);
        let Some(found) = notes.get(content..content + length as usize) else { break };
        match notes.get(12..16) {
            Some(b"GNU\0") if kind == NOTE_BUILD_ID => id = found.to_vec(),
            Some(b"Go\0\0") => is_go = true,
            _ => {}
        }
        notes = notes.get(content + (length as usize).next_multiple_of(4)..).unwrap_or_default();
    }
    (id, is_go)
}

/// Has libc's calls come to the entry. Returns whether they do. No other thread may run yet.
pub(crate) fn catch_libc(plans: Option<&CStr>, wanted: impl Fn(i32) -> bool) -> bool {
    // libc by a function that nobody puts another in the place of, as is done with `read`; and we are the one that holds the entry.
    let Some(library) = library_of(libc::gnu_get_libc_version as *const () as usize) else { return false };
    let read = libc::read as *const () as usize;
    if !library.code.iter().any(|code| code.contains(&read)) && is_sanitized() {
        return false;
    }
    let ours = library_of(ashlar_entry as *const () as usize).unwrap_or_default();
    let kept = plans.and_then(|plans| Kept::at(plans, &library.build_id, Some(&ours.build_id)));
    if kept.as_ref().is_some_and(|kept| image::map(&library, kept)) {
        return true;
    }
    let plan = match plans.and_then(|plans| Kept::at(plans, &library.build_id, None)) {
        Some(kept) => known_plan(&library, &kept),
        None => scan(&library),
    };
    let sites = apply::sites(&library, &plan, wanted);
    let is_mapped = kept.is_some_and(|kept| {
        image::store(&library, &sites, &kept);
        image::map(&library, &kept)
    });
    is_mapped || apply::apply(&library, &sites)
}

/// Whether the process looks at its own accesses to memory: it would see ours through libc's functions too, of which it doesn't know what orders them.
fn is_sanitized() -> bool {
    [c"__asan_init", c"__hwasan_init", c"__msan_init", c"__tsan_init"].iter().any(|name| {
        // SAFETY: it takes a string, and looks for its address among the symbols of what is loaded.
        !unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) }.is_null()
    })
}

/// Has the program's own calls come to the entry, and those of a library that is known to make some, where they are plain to see and a plan can be
/// kept: there are too many programs to scan each whenever it runs. One whose runtime calls the kernel on stacks that have no room for us goes
/// without.
pub(crate) fn catch_program(plans: Option<&CStr>, wanted: impl Fn(i32) -> bool) {
    // SAFETY: it takes a number, and reads what the kernel has told the process at its start.
    let entry = unsafe { libc::getauxval(libc::AT_ENTRY) };
    let program = library_of(entry as usize).filter(|program| !program.is_go && !scan::is_plainly_without(program));
    for object in [program, caller()].into_iter().flatten() {
        let Some(kept) = plans.and_then(|plans| Kept::at(plans, &object.build_id, None)) else { continue };
        let plan = known_plan(&object, &kept);
        let sites = apply::sites(&object, &plan, |number| number >= 0 && wanted(number));
        if !sites.is_empty() {
            keep_wide_registers();
            apply::apply(&object, &sites);
        }
    }
}

fn known_plan(library: &Library, kept: &Kept) -> Plan {
    Plan::load(kept, library).unwrap_or_else(|| {
        let plan = scan(library);
        plan.store(kept);
        plan
    })
}
