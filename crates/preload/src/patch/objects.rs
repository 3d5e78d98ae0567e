//! Patches the program and its libraries, other than libc.
//!
//! An object is patched before the first of its code runs, so no thread is in the middle of the patched code: when the
//! process begins, and when the dynamic linker has loaded it. Libraries of other namespaces (`dlmopen`) are missed.

use std::ffi::CStr;
use std::ops::Range;
use std::sync::{Mutex, OnceLock};

use super::kept_file::KeptFile;
use super::{Library, apply, known_plan, loader_watch, scan, visit_objects};
use crate::entry::arch::{ashlar_entry, keep_wide_registers};

/// A loaded object.
#[derive(Debug)]
struct KnownObject {
    /// The address of its program headers, which is unique.
    headers: usize,
    /// The address range of its trampolines, if it has any.
    room: Option<Range<usize>>,
    is_loaded: bool,
}

/// All objects that were checked, in the order of their headers.
#[derive(Debug)]
struct KnownObjects {
    all: Vec<KnownObject>,
    /// The numbers of objects that the dynamic linker has ever loaded and unloaded.
    changes: Option<(u64, u64)>,
}

/// The settings for patching objects.
#[derive(Clone, Copy, Debug)]
struct PatchSettings {
    plans: Option<&'static CStr>,
    is_wanted: fn(i32) -> bool,
}

static OBJECTS: Mutex<KnownObjects> = Mutex::new(KnownObjects { all: Vec::new(), changes: None });
static SETTINGS: OnceLock<PatchSettings> = OnceLock::new();

/// Makes the calls of all loaded objects jump to the entry, if `is_wanted` accepts their numbers.
///
/// No other thread may run yet.
pub(crate) fn catch_objects(plans: Option<&'static CStr>, is_wanted: fn(i32) -> bool) {
    // It is set once.
    let _ = SETTINGS.set(PatchSettings { plans, is_wanted });
    catch_later_objects();
}

/// Patches objects that were loaded since, whose code has not run yet.
pub(crate) fn catch_later_objects() {
    let Some(manner) = SETTINGS.get() else { return };
    // The dynamic linker's own lock lets one thread through at a time. In a process that was forked meanwhile, this
    // lock may stay held forever.
    let Ok(mut objects) = OBJECTS.try_lock() else { return };
    let new = objects.refresh();
    let linker = if new.is_empty() { None } else { loader_watch::loader_function() };
    for (headers, library) in new {
        let room = if must_stay_unpatched(&library, linker) { None } else { patch_object(&library, manner) };
        objects.insert(KnownObject { headers, room, is_loaded: true });
    }
}

impl KnownObjects {
    /// Finds which objects are loaded: returns new ones, and removes the records of unloaded ones.
    fn refresh(&mut self) -> Vec<(usize, Library)> {
        let mut found = Vec::new();
        let mut is_first = true;
        visit_objects(|info| {
            let changes = Some((info.dlpi_adds, info.dlpi_subs));
            if std::mem::take(&mut is_first) {
                if self.changes == changes {
                    return false;
                }
                self.changes = changes;
                self.all.iter_mut().for_each(|object| object.is_loaded = false);
            }
            let headers = info.dlpi_phdr.addr();
            match self.place_of(headers) {
                Ok(place) => self.all[place].is_loaded = true,
                Err(_) => found.push((headers, Library::new(info))),
            }
            true
        });
        self.all.retain(|object| {
            if !object.is_loaded {
                object.room.iter().for_each(apply::release_room);
            }
            object.is_loaded
        });
        found
    }

    fn place_of(&self, headers: usize) -> Result<usize, usize> {
        self.all.binary_search_by_key(&headers, |object| object.headers)
    }

    fn insert(&mut self, object: KnownObject) {
        if let Err(place) = self.place_of(object.headers) {
            self.all.insert(place, object);
        }
    }
}

/// Returns whether an object must not be patched here.
///
/// `linker` is an address in the dynamic linker.
///
/// libc is patched already. The dynamic linker and this library use descriptors of their own. The kernel's object
/// (vDSO) stays the kernel's. Code of the Go compiler calls the kernel on stacks that have no room for the entry.
fn must_stay_unpatched(library: &Library, linker: Option<usize>) -> bool {
    // SAFETY: it takes a number, and reads the kernel's data from the process's start.
    let kernels = unsafe { libc::getauxval(libc::AT_SYSINFO_EHDR) } as usize;
    let others = [libc::gnu_get_libc_version as *const () as usize, ashlar_entry as *const () as usize];
    library.is_go
        || library.base == kernels
        || others.into_iter().chain(linker).any(|address| library.holds(address))
        || scan::is_small_without_calls(library)
}

/// Patches an object; returns the address range of its trampolines, if it has any.
fn patch_object(library: &Library, manner: &PatchSettings) -> Option<Range<usize>> {
    let kept = manner.plans.and_then(|plans| KeptFile::for_build(plans, &library.build_id, None));
    // Without a build id, no later process could recognise it.
    let plan = kept.map_or_else(|| scan(library), |kept| known_plan(library, &kept));
    let sites = apply::sites_to_patch(library, &plan, manner.is_wanted);
    let room = apply::patch_in_place(library, &sites)?;
    keep_wide_registers();
    Some(room)
}
