//! Programs that are run without the library, since they end before it is of use (`habits`), or have so little address space that the kernel serves
//! them in any case, or can't load it: the dynamic linker would complain of a library that has no room, is not there or
//! is not for it.
//!
//! What they were the times before they need not be this time, so it's looked at what they are to work on: a file that is large, or a directory with
//! all that may be in it, is worth the library. Where calls are counted for a report, every program has it that has room for it.

use std::io::Write;

use ashlar_types::Errno;
use ashlar_wire::loads_library;

use crate::arch::system_call;
use crate::environment::{self, PreloadText};
use crate::memory::{self, PathBuffer};
use crate::{descriptors, program_profile, report, session};

/// A file is large from so many bytes on: they take longer through the kernel than the library takes to load.
const LARGE_BYTES: i64 = 256 << 10;
/// More arguments than these are much work, and so are more names among them.
const ARGUMENTS_MAX: u64 = 64;
const NAMES_MAX: u64 = 16;

/// Room for the path of a script's interpreter, or of a descriptor.
const SCRIPT_PATH_BYTES: usize = 256;

/// Variables of an environment for which there is room without memory.
pub(crate) const VARIABLES: usize = 2048;

/// Whether programs may be run so at all.
pub(crate) fn is_possible() -> bool {
    program_profile::is_any() && report::page().is_none()
}

/// Runs a program without the library, if it may be (`execve`, `execveat`); `None` where it may not. Nothing is allocated: the memory may be lent.
pub(crate) fn execute(number: i64, a: [u64; 6]) -> Option<i64> {
    let is_short = || number == libc::SYS_execve && is_possible() && may_be(a[0], a[1]);
    if !is_short() && !session::has_little_room() {
        return execute_foreign(number, a);
    }
    let mut variables = [0; VARIABLES];
    // Where it can't be read, whoever hands it on says so.
    run(number, a, environment::bare(a[environment_at(number)], &mut variables, None).ok()??)
}

/// Runs a program that can't load the library without it: one of another libc or another word size, or where the
/// library is not there (`chroot`). `None` for all others.
pub(crate) fn execute_foreign(number: i64, a: [u64; 6]) -> Option<i64> {
    if is_library_there() && loads_library(|path, offset, buffer| read_program(number, a, path, offset, buffer)) {
        return None;
    }
    let (mut variables, mut others) = ([0; VARIABLES], PreloadText::new());
    run(number, a, environment::bare(a[environment_at(number)], &mut variables, Some(&mut others)).ok()??)
}

/// Whether the library stands where the dynamic linker will look for it, and can be read.
fn is_library_there() -> bool {
    let mut path = [0; libc::PATH_MAX as usize];
    // One that is not known is none that could be left out.
    let Some(library) = environment::library().filter(|library| library.len() < path.len()) else { return true };
    path[..library.len()].copy_from_slice(library);
    let file = open_to_look(libc::AT_FDCWD as u64, path.as_ptr() as u64);
    if file >= 0 {
        close(file);
    }
    // Where all numbers are taken, the program may have fewer.
    file >= 0 || file == -i64::from(libc::EMFILE)
}

/// Opens a file at the address of a path, as one who runs it must; a negative errno where it can't be.
fn open_to_look(directory: u64, path: u64) -> i64 {
    // A FIFO, which is no program, would wait.
    let how = (libc::O_RDONLY | libc::O_NONBLOCK | libc::O_NOCTTY | libc::O_CLOEXEC) as u64;
    // SAFETY: the kernel reads the path, of which it sees itself whether it can be read.
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
        None if a[4] & libc::AT_EMPTY_PATH as u64 == 0 || memory::load::<u8>(a[1]).ok()? != 0 => (a[0], a[1]),
        None => {
            // By its descriptor, which may be a path alone.
            let mut rest = &mut text[..];
            write!(rest, "/proc/self/fd/{}", a[0] as i32).ok()?;
            (libc::AT_FDCWD as u64, text.as_ptr() as u64)
        }
    };
    let file = open_to_look(directory, address);
    if file < 0 {
        return None;
    }
    let arguments = [file as u64, buffer.as_mut_ptr() as u64, buffer.len() as u64, offset, 0, 0];
    // SAFETY: the descriptor is new, and the buffer as long as said.
    let count = unsafe { system_call(libc::SYS_pread64 as u64, arguments) };
    close(file);
    usize::try_from(count).ok()
}

/// Runs a program in a process that has borrowed the memory: without the library where it may be, and otherwise with what brings it into the program, also
/// where that is given another environment, unless the kernel serves the process. `None` where the kernel does so as it
/// is. Nothing is allocated.
pub(crate) fn execute_lent(number: i64, a: [u64; 6], is_kernels: bool) -> Option<i64> {
    // Where there is no program, the kernel says so.
    if number == libc::SYS_execve && missing(a[0]).is_some() {
        return None;
    }
    if is_kernels {
        return execute_foreign(number, a);
    }
    if let Some(result) = execute(number, a) {
        return Some(result);
    }
    let (mut variables, mut preload) = ([0; VARIABLES], PreloadText::new());
    // Where it can't be read, the kernel says so, and where there are too many variables it has them as they are.
    run(number, a, environment::completed(a[environment_at(number)], None, &mut variables, &mut preload).ok()??)
}

/// Where the environment stands in the arguments of `execve` and `execveat`.
pub(crate) fn environment_at(number: i64) -> usize {
    if number == libc::SYS_execve { 2 } else { 3 }
}

fn run(number: i64, mut arguments: [u64; 6], environment: u64) -> Option<i64> {
    arguments[environment_at(number)] = environment;
    // SAFETY: the program's own call, but for its environment, which lives until this returns.
    Some(unsafe { system_call(number as u64, arguments) })
}

/// What the kernel says where a path leads to nothing: a program is looked for in one directory after the other, and there is nothing to be thought of
/// where there is none.
pub(crate) fn missing(path: u64) -> Option<Errno> {
    // SAFETY: the kernel reads the path, of which it sees itself whether it can be read.
    let there = unsafe { system_call(libc::SYS_access as u64, [path, libc::F_OK as u64, 0, 0, 0, 0]) };
    [Errno::ENOENT, Errno::ENOTDIR].into_iter().find(|errno| there == -i64::from(errno.0))
}

/// Whether the program at the address of a path is one that ends soon, on these arguments.
fn may_be(path: u64, arguments: u64) -> bool {
    let (mut buffer, mut first, mut second) = (PathBuffer::new(), PathBuffer::new(), PathBuffer::new());
    // What can't be read the kernel refuses.
    let Ok(path) = memory::path(path, &mut buffer) else { return false };
    let (first, second) = (argument(arguments, 1, &mut first), argument(arguments, 2, &mut second));
    let reads_much = || descriptors::is_ours(0) || is_much(0, c"".as_ptr() as u64, libc::AT_EMPTY_PATH);
    program_profile::is_short(path, first, second) && !reads_much() && works_on_little(arguments).unwrap_or(false)
}

/// The text of an argument, if there is one, and it's no longer than a path.
fn argument(arguments: u64, index: u64, buffer: &mut PathBuffer) -> Option<&[u8]> {
    let before = (0..index).all(|before| memory::load::<u64>(arguments + before * 8).is_ok_and(|address| address != 0));
    let address: u64 = if before { memory::load(arguments + index * 8).ok()? } else { 0 };
    if address == 0 { None } else { memory::path(address, buffer).ok() }
}

fn works_on_little(arguments: u64) -> Result<bool, Errno> {
    let (mut names, mut is_searched) = (0, false);
    for index in 1..=ARGUMENTS_MAX {
        let argument: u64 = memory::load(arguments + index * 8)?;
        if argument == 0 {
            return Ok(true);
        }
        let mut start = [0; 3];
        let length = memory::start_of(argument, &mut start);
        let start = &start[..length];
        if !start.starts_with(b"-") && !is_searched {
            names += 1;
            if names > NAMES_MAX || is_much(libc::AT_FDCWD, argument, 0) {
                return Ok(false);
            }
        }
        // Of a directory in which headers are looked for, little is looked at.
        is_searched = start == b"-I";
    }
    Ok(false)
}

/// Whether an argument that leads somewhere, or the input, is a directory or a large file.
fn is_much(directory: i32, path: u64, flags: i32) -> bool {
    // SAFETY: all bits 0 are a value of the structure.
    let mut found: libc::stat = unsafe { std::mem::zeroed() };
    let flags = flags | libc::AT_NO_AUTOMOUNT;
    let arguments = [directory as u64, path, &raw mut found as u64, flags as u64, 0, 0];
    // SAFETY: the kernel reads the path, of which it sees itself whether it can be read, and writes the structure.
    let is_there = unsafe { system_call(libc::SYS_newfstatat as u64, arguments) } == 0;
    let kind = found.st_mode & libc::S_IFMT;
    is_there && (kind == libc::S_IFDIR || kind == libc::S_IFREG && found.st_size >= LARGE_BYTES)
}
