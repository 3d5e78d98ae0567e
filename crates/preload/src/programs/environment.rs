//! Environment variables that load the library into a program and its children.

use std::ffi::{CStr, c_char};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::OnceLock;

use ashlar_types::Errno;
use ashlar_wire::{DEFER_VARIABLE, MOUNTS_VARIABLE, PATIENCE_VARIABLE, PLANS_VARIABLE, REPORT_VARIABLE, patience_ms};

use crate::memory::program_memory;
use crate::programs::exec_files;

/// The libraries that the dynamic linker loads first.
const PRELOAD_VARIABLE: &str = "LD_PRELOAD";
const VARIABLE_NAMES: [&str; 6] =
    [MOUNTS_VARIABLE, PLANS_VARIABLE, PRELOAD_VARIABLE, DEFER_VARIABLE, REPORT_VARIABLE, PATIENCE_VARIABLE];
/// The most entries added to a list: the library's variables, the open files, and the end.
const ADDED_MAX: usize = VARIABLE_NAMES.len() + 2;
/// The most bytes of `LD_PRELOAD` with the library added: two paths' length.
const PRELOAD_BYTES: usize = 2 * libc::PATH_MAX as usize;
/// The kernel accepts fewer variables than these.
const VARIABLES_MAX: u64 = 1 << 20;

/// The variables at the program's start.
///
/// Programs that it runs inherit them, even if it changes its environment.
static FOUND_VARIABLES: OnceLock<[Option<&'static CStr>; 6]> = OnceLock::new();

/// Returns the value in `NAME=VALUE`, if it is of this name.
fn value_of<'a>(variable: &'a [u8], name: &str) -> Option<&'a [u8]> {
    variable.strip_prefix(name.as_bytes())?.strip_prefix(b"=")
}

/// The settings in the library's variables.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LaunchSettings {
    /// The mounts.
    pub(crate) mounts: &'static [u8],
    /// The directory of plans.
    pub(crate) plans: Option<&'static CStr>,
    /// How many calls the kernel serves before the session begins.
    pub(crate) deferred: Option<u32>,
    /// How long a call waits for SharedFS, in milliseconds.
    pub(crate) patience_ms: u64,
    /// The open files that only this program has.
    pub(crate) open: Option<&'static CStr>,
}

/// Returns whether a preloaded library is Valgrind's.
///
/// Valgrind runs a program's code as its own, on stacks that it must know, and checks all accesses to memory. So the
/// kernel serves programs under Valgrind.
fn is_valgrinds(library: &[u8]) -> bool {
    library.rsplit(|&byte| byte == b'/').next().is_some_and(|name| name.starts_with(b"vgpreload_"))
}

/// Reads the library's variables at the program's start.
///
/// Returns `None` if there are none, or the library must stay inactive.
///
/// It removes the variable of open files from the environment: that is for this program alone.
///
/// # Safety
/// The environment is a list of strings that ends with a null pointer, and no other thread uses it meanwhile.
pub(crate) unsafe fn read_settings(environment: *const *const c_char) -> Option<LaunchSettings> {
    let mut found = [None; 6];
    let mut open = None;
    let mut at = environment;
    let mut kept = environment.cast_mut();
    // SAFETY: as the caller says. The strings are copied, since programs overwrite them to change their title.
    unsafe {
        while !(*at).is_null() {
            let variable = CStr::from_ptr(*at);
            for (place, name) in found.iter_mut().zip(VARIABLE_NAMES) {
                if value_of(variable.to_bytes(), name).is_some() {
                    *place = Some(&*Box::leak(variable.to_owned().into_boxed_c_str()));
                }
            }
            match value_of(variable.to_bytes_with_nul(), exec_files::VARIABLE) {
                Some(value) => open = CStr::from_bytes_with_nul(value).ok().map(|value| &*Box::leak(value.into())),
                None => {
                    *kept = *at;
                    kept = kept.add(1);
                }
            }
            at = at.add(1);
        }
        if kept.cast_const() != at {
            *kept = std::ptr::null();
        }
    }
    let mounts = found[0].and_then(|variable| value_of(variable.to_bytes(), MOUNTS_VARIABLE));
    let plans = found[1].and_then(|variable| value_of(variable.to_bytes_with_nul(), PLANS_VARIABLE));
    let plans = plans.and_then(|plans| CStr::from_bytes_with_nul(plans).ok());
    let deferred = found[3].and_then(|variable| value_of(variable.to_bytes(), DEFER_VARIABLE));
    let deferred = deferred.and_then(|number| std::str::from_utf8(number).ok()?.parse().ok());
    let patience = found[5].and_then(|variable| value_of(variable.to_bytes(), PATIENCE_VARIABLE));
    // It is set once, before the program runs.
    let _ = FOUND_VARIABLES.set(found);
    if found[2].is_some_and(|variable| preloaded_libraries(variable.to_bytes()).any(is_valgrinds)) {
        return None;
    }
    Some(LaunchSettings { mounts: mounts?, plans, deferred, patience_ms: patience_ms(patience), open })
}

/// Returns a hash of the program's variable of mounts.
///
/// Two programs with the same hash number their mounts alike.
pub(crate) fn mounts_key() -> u64 {
    let mut hasher = DefaultHasher::new();
    FOUND_VARIABLES.get().map(|found| found[0]).hash(&mut hasher);
    hasher.finish()
}

/// Returns the file of counts, if there is to be a report.
pub(crate) fn report_file() -> Option<&'static CStr> {
    let variable = FOUND_VARIABLES.get()?[4]?;
    CStr::from_bytes_with_nul(value_of(variable.to_bytes_with_nul(), REPORT_VARIABLE)?).ok()
}

/// Returns the library's path, as `LD_PRELOAD` names it.
pub(crate) fn library_path() -> Option<&'static [u8]> {
    preloaded_libraries(FOUND_VARIABLES.get()?[2]?.to_bytes()).next()
}

/// Returns an environment without the library, in the caller's list.
///
/// Returns `None` if the list is too short.
///
/// If other libraries are preloaded too, the variable for them is in `others`. If `others` is `None`, the result is
/// `None` then. It allocates nothing.
///
/// # Errors
/// `EFAULT`, `E2BIG`.
pub(crate) fn without_library(
    environment: u64,
    list: &mut [u64],
    mut others: Option<&mut PreloadText>,
) -> Result<Option<u64>, Errno> {
    let Some(own) = library_path() else { return Ok(None) };
    let mut text = program_memory::PathBuffer::new();
    let mut length = 0;
    for variable in variables(environment) {
        let variable = variable?;
        let mut start = [0; 16];
        let begin = program_memory::copy_start(variable, &mut start);
        let is_one = |name| value_of(&start[..begin], name).is_some();
        if is_one(exec_files::VARIABLE) {
            continue;
        }
        let mut variable = variable;
        if is_one(PRELOAD_VARIABLE) {
            let theirs = program_memory::copy_path(variable, &mut text)?;
            if names_only_library(theirs, own) {
                continue;
            }
            // The program gets the other libraries in any case, and this one with them.
            let Some(kept) = others.as_mut().and_then(|others| others.without(own, theirs)) else { return Ok(None) };
            variable = kept;
        }
        let Some(place) = list.get_mut(length) else { return Ok(None) };
        *place = variable;
        length += 1;
    }
    let Some(end) = list.get_mut(length) else { return Ok(None) };
    *end = 0;
    Ok(Some(list.as_ptr() as u64))
}

/// Returns the libraries that `LD_PRELOAD=…` names.
///
/// This library comes first if `ashlar run` has set it.
fn preloaded_libraries(variable: &[u8]) -> impl Iterator<Item = &[u8]> {
    let names = value_of(variable, PRELOAD_VARIABLE).unwrap_or_default().split(|byte| b": ".contains(byte));
    names.filter(|name| !name.is_empty())
}

fn names_only_library(variable: &[u8], own: &[u8]) -> bool {
    preloaded_libraries(variable).all(|name| name == own)
}

/// Returns the addresses of an environment's variables.
fn variables(environment: u64) -> impl Iterator<Item = Result<u64, Errno>> {
    let places = (0..=VARIABLES_MAX).take_while(move |_| environment != 0);
    places.map_while(move |index| match program_memory::load(environment.wrapping_add(index * 8)) {
        Ok(0) => None,
        Ok(_) if index == VARIABLES_MAX => Some(Err(Errno::E2BIG)),
        variable => Some(variable),
    })
}

/// Returns a list with room for a completed environment.
///
/// That is the first one if it is long enough, else the grown second one.
///
/// # Errors
/// `EFAULT`, `E2BIG`; `ENOMEM` if the second one can't grow.
pub(crate) fn list_with_room<'a>(
    environment: u64,
    some: &'a mut [u64],
    more: &'a mut Vec<u64>,
) -> Result<&'a mut [u64], Errno> {
    let length = variables(environment).try_fold(ADDED_MAX, |count, variable| variable.map(|_| count + 1))?;
    if length <= some.len() {
        return Ok(some);
    }
    more.try_reserve_exact(length).map_err(|_| Errno::ENOMEM)?;
    more.resize(length, 0);
    Ok(more)
}

/// Adds the library's missing variables to an environment.
///
/// Its variable of open files is replaced by `open`.
///
/// Returns the list's address, if anything is to be changed. The caller has room for the list and the text. It
/// allocates nothing.
///
/// # Errors
/// `EFAULT`; `E2BIG` also if the list is too short.
pub(crate) fn with_library(
    environment: u64,
    open: Option<&CStr>,
    list: &mut [u64],
    preload: &mut PreloadText,
) -> Result<Option<u64>, Errno> {
    let Some(ours) = FOUND_VARIABLES.get() else { return Ok(None) };
    let mut length = 0;
    let mut add = |variable: u64| {
        let place = list.get_mut(length).ok_or(Errno::E2BIG)?;
        *place = variable;
        length += 1;
        Ok::<usize, Errno>(length - 1)
    };
    let mut missing = *ours;
    let mut preloaded = None;
    let mut is_changed = open.is_some();
    for variable in variables(environment) {
        let variable = variable?;
        let mut start = [0; 16];
        let begin = program_memory::copy_start(variable, &mut start);
        if value_of(&start[..begin], exec_files::VARIABLE).is_some() {
            // The variable is from this program's own start.
            is_changed = true;
            continue;
        }
        let place = add(variable)?;
        for (missing, name) in missing.iter_mut().zip(VARIABLE_NAMES) {
            if value_of(&start[..begin], name).is_some() {
                *missing = None;
                if name == PRELOAD_VARIABLE {
                    // Of several, the dynamic linker takes the last.
                    preloaded = Some((place, variable));
                }
            }
        }
    }
    for variable in missing.iter().flatten().copied().chain(open) {
        is_changed = true;
        add(variable.as_ptr() as u64)?;
    }
    add(0)?;
    // A program that preloads other libraries keeps them, after this one.
    if let (Some((place, theirs)), Some(wanted)) = (preloaded, ours[2])
        && let Some(joined) = preload.join(wanted.to_bytes(), theirs)?
    {
        list[place] = joined;
        is_changed = true;
    }
    Ok(is_changed.then_some(list.as_ptr() as u64))
}

/// Room for the text of `LD_PRELOAD`: this library, and after it those of the program.
pub(crate) struct PreloadText([u8; PRELOAD_BYTES]);

impl PreloadText {
    pub(crate) const fn new() -> Self {
        Self([0; PRELOAD_BYTES])
    }

    /// Joins the variable in the environment to the library's; `None` if it names the library, or both are too long.
    fn join(&mut self, wanted: &[u8], theirs: u64) -> Result<Option<u64>, Errno> {
        let mut text = program_memory::PathBuffer::new();
        let theirs = match program_memory::copy_path(theirs, &mut text) {
            Err(Errno::ENAMETOOLONG) => return Ok(None),
            theirs => theirs?,
        };
        let own = preloaded_libraries(wanted).next();
        if preloaded_libraries(theirs).any(|name| Some(name) == own) {
            return Ok(None);
        }
        Ok(self.write_parts([wanted, b":", value_of(theirs, PRELOAD_VARIABLE).unwrap_or_default(), b"\0"].into_iter()))
    }

    /// Returns the variable in the environment without the library; `None` if it is too long.
    fn without(&mut self, own: &[u8], theirs: &[u8]) -> Option<u64> {
        let others = preloaded_libraries(theirs).filter(|name| *name != own).flat_map(|name| [&b":"[..], name]).skip(1);
        self.write_parts([PRELOAD_VARIABLE.as_bytes(), b"="].into_iter().chain(others).chain([&b"\0"[..]]))
    }

    /// Writes a text in parts; `None` if it is too long.
    fn write_parts<'a>(&mut self, parts: impl Iterator<Item = &'a [u8]>) -> Option<u64> {
        let mut length = 0;
        for part in parts {
            self.0.get_mut(length..length + part.len())?.copy_from_slice(part);
            length += part.len();
        }
        Some(self.0.as_ptr() as u64)
    }
}
