//! Patches libc: system calls that may concern files become jumps to the hook.
//!
//! libc calls the kernel from within itself (stdio, `opendir`, `posix_spawn`, …), past every symbol that could be
//! interposed. So the system calls themselves are caught. `syscall` has two bytes and a jump five: neighbouring
//! instructions make room, and move into the trampoline. A scan of the whole code finds the instructions that may move,
//! once for each build of libc ([`mod@scan`]). The result is kept as a [`Plan`] in a file named by the build id. Every
//! program compares the bytes that it patches with the plan ([`apply`]).
//!
//! Patching some two hundred pages in each program takes longer than most short programs run. So the patched code is
//! kept too, as an [`image`] that programs map in place of libc's own: they share its pages, and load only those that
//! they run.
//!
//! Other objects call the kernel themselves too: programs, and libraries (in Rust through rustix, in C through
//! `syscall` instructions of their own, liburing). Each is scanned before the first of its code runs ([`objects`]): at
//! the start, and when the dynamic linker has loaded it later ([`loader_watch`]). Its plan is kept as libc's is, so
//! that an object of a known build costs one read of a file.
//!
//! Calls that can't be patched, and those of code that is made at run time, go to the kernel, and through FUSE. They
//! are slower, and as correct, except those that change the meaning of later calls (the working directory, `umask`,
//! descriptors).

mod apply;
mod image;
mod kept_file;
mod loader_watch;
mod objects;
mod plan;
mod scan;
mod unwind_tables;

use std::ffi::{CStr, c_int, c_void};
use std::ops::Range;

pub(crate) use self::kept_file::KeptFile;
pub(crate) use self::loader_watch::watch_loader;
pub(crate) use self::objects::{catch_later_objects, catch_objects};
use self::plan::{PatchSite, Plan, WINDOW_MAX};
use self::scan::scan;
use crate::entry::arch::ashlar_entry;

/// A program or a library in memory.
#[derive(Debug, Default)]
pub(crate) struct Library {
    /// The address at which it was loaded.
    pub(crate) base: usize,
    /// Its code, as addresses. Writable segments are not code: they hold code that is made at run time.
    pub(crate) code: Vec<Range<usize>>,
    /// Its build id.
    pub(crate) build_id: Vec<u8>,
    /// The end of all its segments.
    end: usize,
    /// The Go compiler has made it.
    is_go: bool,
    /// The readable parts of its segments that come from the file.
    loaded: Vec<Range<usize>>,
    /// The address of the table of its functions.
    frames: Option<usize>,
}

impl Library {
    /// Returns the object that the dynamic linker describes.
    fn new(info: &libc::dl_phdr_info) -> Self {
        let base = info.dlpi_addr as usize;
        // SAFETY: the linker gives the number of headers.
        let headers = unsafe { std::slice::from_raw_parts(info.dlpi_phdr, info.dlpi_phnum.into()) };
        let mut library = Self { base, ..Self::default() };
        for header in headers {
            let start = base.wrapping_add(header.p_vaddr as usize);
            match header.p_type {
                libc::PT_LOAD => {
                    library.end = library.end.max(start + header.p_memsz as usize);
                    if header.p_flags & libc::PF_R != 0 {
                        library.loaded.push(start..start + header.p_filesz as usize);
                    }
                    if header.p_flags & (libc::PF_X | libc::PF_W) == libc::PF_X {
                        library.code.push(start..start + header.p_memsz as usize);
                    }
                }
                libc::PT_NOTE => {
                    // SAFETY: the segment is loaded and readable.
                    let notes = unsafe { std::slice::from_raw_parts(start as *const u8, header.p_memsz as usize) };
                    let (id, is_go) = build_id(notes);
                    library.build_id.extend(id);
                    library.is_go |= is_go;
                }
                libc::PT_GNU_EH_FRAME => library.frames = Some(start),
                _ => {}
            }
        }
        library
    }

    /// Returns whether an address lies in its code.
    fn holds(&self, address: usize) -> bool {
        self.code.iter().any(|code| code.contains(&address))
    }

    /// Returns the pages from the first of its code to the last.
    fn pages(&self) -> Option<Range<usize>> {
        let (first, last) = (self.code.first()?, self.code.last()?);
        Some(first.start / apply::PAGE * apply::PAGE..last.end.next_multiple_of(apply::PAGE))
    }
}

const NOTE_BUILD_ID: u32 = 3;

/// Returns the library in which an address lies.
pub(crate) fn library_of(address: usize) -> Option<Library> {
    let mut found = None;
    visit_objects(|info| {
        let library = Library::new(info);
        let is_it = library.holds(address);
        if is_it {
            found = Some(library);
        }
        !is_it
    });
    found
}

/// Calls `see` with each loaded object, until it returns `false`.
fn visit_objects(mut see: impl FnMut(&libc::dl_phdr_info) -> bool) {
    let mut see: &mut dyn FnMut(&libc::dl_phdr_info) -> bool = &mut see;
    // SAFETY: `visit_one` gets the function as its argument, and is called only until this returns.
    unsafe { libc::dl_iterate_phdr(Some(visit_one), (&raw mut see).cast()) };
}

unsafe extern "C" fn visit_one(info: *mut libc::dl_phdr_info, _size: usize, see: *mut c_void) -> c_int {
    // SAFETY: the dynamic linker describes a loaded object, and the function is `visit_objects`'s own.
    let (info, see) = unsafe { (&*info, &mut *see.cast::<&mut dyn FnMut(&libc::dl_phdr_info) -> bool>()) };
    c_int::from(!see(info))
}

/// Returns the build id in a segment of notes, and whether one of the notes is the Go compiler's.
///
/// A note has a name length, a length, a type, a name and content; name and content are padded to four bytes.
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

/// Makes libc's calls jump to the entry; returns whether they do.
///
/// No other thread may run yet.
pub(crate) fn catch_libc(plans: Option<&CStr>, wanted: impl Fn(i32) -> bool) -> bool {
    // Find libc by a function that no other library replaces, unlike `read`, and this library by its entry.
    let Some(library) = library_of(libc::gnu_get_libc_version as *const () as usize) else { return false };
    let read = libc::read as *const () as usize;
    if !library.code.iter().any(|code| code.contains(&read)) && is_sanitized() {
        return false;
    }
    let ours = library_of(ashlar_entry as *const () as usize).unwrap_or_default();
    let kept = plans.and_then(|plans| KeptFile::for_build(plans, &library.build_id, Some(&ours.build_id)));
    if kept.as_ref().is_some_and(|kept| image::map_image(&library, kept)) {
        return true;
    }
    let plan = match plans.and_then(|plans| KeptFile::for_build(plans, &library.build_id, None)) {
        Some(kept) => known_plan(&library, &kept),
        None => scan(&library),
    };
    let sites = apply::sites_to_patch(&library, &plan, wanted);
    let is_mapped = kept.is_some_and(|kept| {
        image::store_image(&library, &sites, &kept);
        image::map_image(&library, &kept)
    });
    is_mapped || apply::patch_in_place(&library, &sites).is_some()
}

/// Returns whether a sanitizer checks the process's accesses to memory.
///
/// It would also see the library's accesses, through libc's functions, and it doesn't know what orders them.
fn is_sanitized() -> bool {
    [c"__asan_init", c"__hwasan_init", c"__msan_init", c"__tsan_init"].iter().any(|name| {
        // SAFETY: it takes a string, and looks for its address among the symbols of the loaded objects.
        !unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) }.is_null()
    })
}

fn known_plan(library: &Library, kept: &KeptFile) -> Plan {
    Plan::load(kept, library).unwrap_or_else(|| {
        let plan = scan(library);
        plan.store(kept);
        plan
    })
}
