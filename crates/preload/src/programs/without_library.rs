//! Runs programs without the library, where it is of no use or can't be loaded.
//!
//! Some programs end before the library is of use (`program_profile`). Some have so little address space that the
//! kernel serves them in any case. Some can't load the library: it has no room, is not there, or is made for another
//! libc, and the dynamic linker would complain.
//!
//! A program's earlier runs say nothing about the size of this one. So its arguments and input are checked: for a large
//! file, or for a directory with all that may be in it, the library pays. If calls are counted for a report, every
//! program that has room for the library loads it.

use std::io::Write;

use ashlar_types::Errno;
use ashlar_wire::can_load_library;

use crate::entry::arch::system_call;
use crate::files::descriptors;
use crate::memory::program_memory::{self, PathBuffer};
use crate::programs::environment::{self, PreloadText};
use crate::programs::program_profile;
use crate::report;
use crate::sessions::session;

/// Bytes from which on a file is large.
///
/// Reading it through the kernel takes longer than loading the library.
const LARGE_BYTES: i64 = 256 << 10;
/// More arguments than these are much work, and so are more names among them.
const ARGUMENTS_MAX: u64 = 64;
const NAMES_MAX: u64 = 16;

/// Room for the path of a script's interpreter, or of a descriptor.
const SCRIPT_PATH_BYTES: usize = 256;

/// Number of environment variables for which there is room without allocating.
pub(crate) const VARIABLES: usize = 2048;

/// Returns whether programs may be run without the library at all.
pub(crate) fn is_possible() -> bool {
    program_profile::is_available() && report::page().is_none()
}

/// Runs a program without the library (`execve`, `execveat`), or returns `None` if that is not allowed.
///
/// It allocates nothing: the memory may be lent.
pub(crate) fn execute(number: i64, a: [u64; 6]) -> Option<i64> {
    let is_short = || number == libc::SYS_execve && is_possible() && is_short_program(a[0], a[1]);
    if !is_short() && !session::has_little_address_space() {
        return execute_foreign(number, a);
    }
    let mut variables = [0; VARIABLES];
    // If the environment can't be read, the caller's own system call fails.
    run_program(number, a, environment::without_library(a[environment_index(number)], &mut variables, None).ok()??)
}

/// Runs a program that can't load the library without it, or returns `None` for all other programs.
///
/// Such a program has another libc or another word size, or the library is not there (`chroot`).
pub(crate) fn execute_foreign(number: i64, a: [u64; 6]) -> Option<i64> {
    if is_library_readable() && can_load_library(|path, offset, buffer| read_program(number, a, path, offset, buffer)) {
        return None;
    }
    let (mut variables, mut others) = ([0; VARIABLES], PreloadText::new());
    run_program(
        number,
        a,
        environment::without_library(a[environment_index(number)], &mut variables, Some(&mut others)).ok()??,
    )
}

/// Returns whether the library is where the dynamic linker will look for it, and can be read.
fn is_library_readable() -> bool {
    let mut path = [0; libc::PATH_MAX as usize];
    // A library whose path is unknown can't be left out of the environment.
    let Some(library) = environment::library_path().filter(|library| library.len() < path.len()) else { return true };
    path[..library.len()].copy_from_slice(library);
    let file = open_program(libc::AT_FDCWD as u64, path.as_ptr() as u64);
    if file >= 0 {
        close(file);
    }
    // If no descriptor number is free here, the program that runs may still have fewer.
    file >= 0 || file == -i64::from(libc::EMFILE)
}

/// Opens the file at the address of a path with the caller's rights.
///
/// Returns a negative errno if that fails.
fn open_program(directory: u64, path: u64) -> i64 {
    // A FIFO is no program, and opening it would wait.
    let how = (libc::O_RDONLY | libc::O_NONBLOCK | libc::O_NOCTTY | libc::O_CLOEXEC) as u64;
    // SAFETY: the kernel reads the path and checks whether it can be read.
    unsafe { system_call(libc::SYS_openat as u64, [directory, path, how, 0, 0, 0]) }
}

fn close(file: i64) {
    // SAFETY: it was opened here.
    unsafe { system_call(libc::SYS_close as u64, [file as u64, 0, 0, 0, 0, 0]) };
}

/// Reads a part of the program that a call runs, or of a script's interpreter.
fn read_program(number: i64, a: [u64; 6], path: Option<&[u8]>, offset: u64, buffer: &mut [u8]) -> Option<usize> {
    let mut text = [0; SCRIPT_PATH_BYTES];
    let (directory, address) = match path {
        Some(path) => {
            text.get_mut(..path.len()).filter(|_| path.len() < SCRIPT_PATH_BYTES)?.copy_from_slice(path);
            (libc::AT_FDCWD as u64, text.as_ptr() as u64)
        }
        None if number == libc::SYS_execve => (libc::AT_FDCWD as u64, a[0]),
        None if a[4] & libc::AT_EMPTY_PATH as u64 == 0 || program_memory::load::<u8>(a[1]).ok()? != 0 => (a[0], a[1]),
        None => {
            // The program is named by its descriptor, which may be an `O_PATH` one.
            let mut rest = &mut text[..];
            write!(rest, "/proc/self/fd/{}", a[0] as i32).ok()?;
            (libc::AT_FDCWD as u64, text.as_ptr() as u64)
        }
    };
    let file = open_program(directory, address);
    if file < 0 {
        return None;
    }
    let arguments = [file as u64, buffer.as_mut_ptr() as u64, buffer.len() as u64, offset, 0, 0];
    // SAFETY: the descriptor is new, and the buffer is as long as stated.
    let count = unsafe { system_call(libc::SYS_pread64 as u64, arguments) };
    close(file);
    usize::try_from(count).ok()
}

/// Runs a program in a process that has borrowed its memory.
///
/// Returns `None` if the kernel serves the call as it is.
///
/// The program runs without the library if that is allowed. Otherwise it gets the variables that load the library, even
/// if the caller gives it another environment, unless the kernel serves the process. It allocates nothing.
pub(crate) fn execute_lent(number: i64, a: [u64; 6], is_kernels: bool) -> Option<i64> {
    // If there is no such program, the kernel reports it.
    if number == libc::SYS_execve && missing_error(a[0]).is_some() {
        return None;
    }
    if is_kernels {
        return execute_foreign(number, a);
    }
    if let Some(result) = execute(number, a) {
        return Some(result);
    }
    let (mut variables, mut preload) = ([0; VARIABLES], PreloadText::new());
    // If the environment can't be read, the kernel reports it. If it has too many variables, it is passed on unchanged.
    run_program(
        number,
        a,
        environment::with_library(a[environment_index(number)], None, &mut variables, &mut preload).ok()??,
    )
}

/// Returns the index of the environment in the arguments of `execve` and `execveat`.
pub(crate) fn environment_index(number: i64) -> usize {
    if number == libc::SYS_execve { 2 } else { 3 }
}

fn run_program(number: i64, mut arguments: [u64; 6], environment: u64) -> Option<i64> {
    arguments[environment_index(number)] = environment;
    // SAFETY: this is the program's own call, but for its environment, which lives until this returns.
    Some(unsafe { system_call(number as u64, arguments) })
}

/// Returns the kernel's error for a path that leads to nothing.
///
/// A shell looks for a program in one directory after the other, so a missing program must cost nothing more.
pub(crate) fn missing_error(path: u64) -> Option<Errno> {
    // SAFETY: the kernel reads the path and checks whether it can be read.
    let there = unsafe { system_call(libc::SYS_access as u64, [path, libc::F_OK as u64, 0, 0, 0, 0]) };
    [Errno::ENOENT, Errno::ENOTDIR].into_iter().find(|errno| there == -i64::from(errno.0))
}

/// Returns whether the program at the address of a path usually ends soon, with these arguments.
fn is_short_program(path: u64, arguments: u64) -> bool {
    let (mut buffer, mut first, mut second) = (PathBuffer::new(), PathBuffer::new(), PathBuffer::new());
    // The kernel refuses a path that can't be read.
    let Ok(path) = program_memory::copy_path(path, &mut buffer) else { return false };
    let (first, second) = (argument_text(arguments, 1, &mut first), argument_text(arguments, 2, &mut second));
    let reads_much = || descriptors::is_ours(0) || is_large_input(0, c"".as_ptr() as u64, libc::AT_EMPTY_PATH);
    program_profile::is_short(path, first, second) && !reads_much() && has_little_input(arguments).unwrap_or(false)
}

/// Returns the text of an argument, if there is one that is no longer than a path.
fn argument_text(arguments: u64, index: u64, buffer: &mut PathBuffer) -> Option<&[u8]> {
    let before =
        (0..index).all(|before| program_memory::load::<u64>(arguments + before * 8).is_ok_and(|address| address != 0));
    let address: u64 = if before { program_memory::load(arguments + index * 8).ok()? } else { 0 };
    if address == 0 { None } else { program_memory::copy_path(address, buffer).ok() }
}

fn has_little_input(arguments: u64) -> Result<bool, Errno> {
    let (mut names, mut is_searched) = (0, false);
    for index in 1..=ARGUMENTS_MAX {
        let argument: u64 = program_memory::load(arguments + index * 8)?;
        if argument == 0 {
            return Ok(true);
        }
        let mut start = [0; 3];
        let length = program_memory::copy_start(argument, &mut start);
        let start = &start[..length];
        if !start.starts_with(b"-") && !is_searched {
            names += 1;
            if names > NAMES_MAX || is_large_input(libc::AT_FDCWD, argument, 0) {
                return Ok(false);
            }
        }
        // A directory in which a compiler looks for headers adds little work.
        is_searched = start == b"-I";
    }
    Ok(false)
}

/// Returns whether an argument's path, or the input, leads to a directory or a large file.
fn is_large_input(directory: i32, path: u64, flags: i32) -> bool {
    // SAFETY: all bits 0 are a value of the structure.
    let mut found: libc::stat = unsafe { std::mem::zeroed() };
    let flags = flags | libc::AT_NO_AUTOMOUNT;
    let arguments = [directory as u64, path, &raw mut found as u64, flags as u64, 0, 0];
    // SAFETY: the kernel reads the path, checks whether it can be read, and writes the structure.
    let is_there = unsafe { system_call(libc::SYS_newfstatat as u64, arguments) } == 0;
    let kind = found.st_mode & libc::S_IFMT;
    is_there && (kind == libc::S_IFDIR || kind == libc::S_IFREG && found.st_size >= LARGE_BYTES)
}
