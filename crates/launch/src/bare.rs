//! The command without libc.
//!
//! It serves the one case that happens by the thousand: a program is to be run as it's typed, all that belongs to the installation is in its place,
//! and each record of a mount is sound: the mount is there, whether or not its process was killed. Whatever is otherwise is for `ashlar-main`, which does
//! all of it anew: nothing that is done here leaves a trace.
//!
//! Invariants: no call of libc, which has not begun. The standard library is linked, and what asks nobody is used of it: paths, strings, lists. What asks
//! the system or has something for each thread would go through libc. So does the end of a descriptor; they are left open, for `execve` to close.

mod process;

use alloc::ffi::CString;
use alloc::format;
use alloc::vec;
use alloc::vec::Vec;
use core::convert::Infallible;
use core::ffi::CStr;
use core::fmt::{self, Display};
use core::mem::ManuallyDrop;
use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use ashlar_launch::{
    LIBRARY, MAIN, MountRecord, NOT_EXECUTABLE, NOT_FOUND, PRELOAD_VARIABLE, RECORDS, in_order, in_words,
    is_mount_process, is_record, missing, places, plain, plans_directory, preload, preload_without, said_of, value_in,
    with_variables,
};
use ashlar_wire::{MOUNTS_VARIABLE, PLANS_VARIABLE, loads_library, socket_of};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use rustix::fs::{CWD, FileType, Mode, OFlags, RawDir};
use rustix::io::Errno;
use rustix::path::Arg;

use self::process::Environment;

/// Where the program is looked for if nobody says where, which is what libc has for it.
const DEFAULT_PATH: &[u8] = b"/bin:/usr/bin";
/// Longer names of programs, in bytes, and longer lists of directories libc treats in its own way.
const NAME_BYTES_MAX: usize = 255;
const PATH_BYTES_MAX: usize = 4095;
/// A record, or a command line, that fills this, in bytes, is none of those that happen: it is two paths and some words.
const TEXT_BYTES: usize = 4096;
/// Room for some names of records at a time, in bytes.
const NAMES_BYTES: usize = 1024;

/// Does what was typed, or has `ashlar-main` do it. Returns, with the exit status, where that can't be.
fn serve() -> u8 {
    // What comes back says only that something is not as it is by the thousand.
    let None = run_program();
    go_on()
}

/// Runs the program in place of this one.
fn run_program() -> Option<Infallible> {
    // The command's own name comes first.
    let first = 1 + plain(process::arguments().skip(1).map(CStr::to_bytes))?;
    let program = process::arguments().nth(first)?;
    let library = library()?;
    let mounts = used_mounts()?;
    let set = if mounts.is_empty() {
        // `ashlar-main` says to a person that the program runs as it is.
        if is_a(Path::new("/proc/self/fd/2"), FileType::CharacterDevice) {
            return None;
        }
        None
    } else {
        Some(variables_for(&library, &mounts)?)
    };
    let variables = match &set {
        None => process::environment().collect(),
        Some([mounts, preload, plans]) => with_variables(process::environment(), &[mounts, preload, plans]),
    };
    let path = value_in(variables.iter().copied(), "PATH").map_or(DEFAULT_PATH, |path| path.as_bytes());
    let others = preload_without(&library, value_in(process::environment(), PRELOAD_VARIABLE));
    let others = others.and_then(|others| variable(PRELOAD_VARIABLE, others.as_bytes()));
    let is_preload = |variable: &&CStr| value_in([*variable], PRELOAD_VARIABLE).is_some();
    let without: Vec<_> =
        variables.iter().copied().filter(|variable| !is_preload(variable)).chain(others.as_deref()).collect();
    let (environment, without) = (Environment::new(&variables), Environment::new(&without));
    process::end_at_broken_pipes();
    search(program.to_bytes(), path, |file| {
        let is_foreign = set.is_some() && !takes_library(file);
        process::execute(file, first, if is_foreign { &without } else { &environment })
    })
}

/// Whether a program can load the library.
fn takes_library(program: &CStr) -> bool {
    loads_library(|interpreter, offset, buffer| {
        let file = match interpreter {
            None => open(CWD, program, OFlags::RDONLY | OFlags::NONBLOCK),
            Some(path) => open(CWD, path, OFlags::RDONLY | OFlags::NONBLOCK),
        };
        rustix::io::pread(&*file.ok()?, buffer, offset).ok()
    })
}

/// What the library is told in the environment, and what brings it into the program.
fn variables_for(library: &Path, mounts: &[(PathBuf, PathBuf)]) -> Option<[CString; 3]> {
    let mounts = in_words(mounts);
    let preload = preload(library, value_in(process::environment(), PRELOAD_VARIABLE));
    let variables = [
        variable(MOUNTS_VARIABLE, mounts.as_bytes())?,
        variable(PRELOAD_VARIABLE, preload.as_bytes())?,
        variable(PLANS_VARIABLE, plans()?.as_os_str().as_bytes())?,
    ];
    // One whose path can't be written down is told of by nobody.
    (!mounts.is_empty()).then_some(variables)
}

/// Tries each place at which libc would look for a program.
fn search(program: &[u8], path: &[u8], execute: impl Fn(&CStr) -> Errno) -> Option<Infallible> {
    if program.contains(&b'/') {
        execute(&CString::new(program).ok()?);
        return None;
    }
    if program.is_empty() || program.len() > NAME_BYTES_MAX || path.len() > PATH_BYTES_MAX {
        return None;
    }
    for directory in path.split(|&byte| byte == b':') {
        // One without a name is the working directory.
        let separator: &[u8] = if directory.is_empty() { b"" } else { b"/" };
        let file = CString::new([directory, separator, program].concat()).ok()?;
        let (Errno::NOENT | Errno::ACCESS | Errno::NOTDIR | Errno::STALE | Errno::NODEV | Errno::TIMEDOUT) =
            execute(&file)
        else {
            return None;
        };
    }
    None
}

fn variable(name: &str, value: &[u8]) -> Option<CString> {
    CString::new([name.as_bytes(), b"=", value].concat()).ok()
}

/// The library's path, if it can be read.
fn library() -> Option<PathBuf> {
    for library in places(&this_program().ok()?).iter().map(|place| place.join(LIBRARY)) {
        match open(CWD, &library, OFlags::RDONLY) {
            Ok(_) => return Some(library),
            Err(Errno::NOENT) => {}
            Err(_) => return None,
        }
    }
    None
}

/// All mounts that can be used, with the sockets of their daemons, if there is nothing wrong with any.
fn used_mounts() -> Option<Vec<(PathBuf, PathBuf)>> {
    let directory = match open(CWD, RECORDS, OFlags::RDONLY | OFlags::DIRECTORY) {
        Ok(directory) => directory,
        Err(error) => return (error == Errno::NOENT).then(Vec::new),
    };
    // Not on the stack, which may have next to no room: its limit is the program's own.
    let mut names = Vec::with_capacity(NAMES_BYTES);
    let mut buffer = vec![0; TEXT_BYTES];
    let mut files = RawDir::new(&*directory, names.spare_capacity_mut());
    let mut used = Vec::new();
    while let Some(file) = files.next() {
        let file = file.ok()?;
        if !is_record(file.file_name().to_bytes()) {
            continue;
        }
        let record = MountRecord::read(text(directory.as_fd(), file.file_name(), &mut buffer).ok()??)?;
        let lives = match text(CWD, format!("/proc/{}/cmdline", record.pid), &mut buffer) {
            Ok(line) => is_mount_process(line?),
            Err(Errno::NOENT) => false,
            Err(_) => return None,
        };
        let root = ManuallyDrop::new(record.root()?);
        let is_shown = record.is_shown_by(root.as_fd())?;
        match (lives, is_shown) {
            (true, true) => used.push(record),
            // It was taken out of the tree; or it's there for as long as nobody unmounts it, and nobody answers.
            (true, false) | (false, true) => {}
            // `ashlar-main` removes it.
            (false, false) => return None,
        }
    }
    in_order(&mut used);
    used.into_iter().map(|record| Some((record.directory, socket_of(&resolved(&record.arena)?)))).collect()
}

/// A path without symbolic links.
fn resolved(path: &Path) -> Option<PathBuf> {
    let place = open(CWD, path, OFlags::PATH).ok()?;
    let resolved = link(format!("/proc/self/fd/{}", place.as_raw_fd())).ok()?;
    // The kernel says so of one that has no path any more.
    let is_there = resolved.is_absolute() && !resolved.as_os_str().as_bytes().ends_with(b" (deleted)");
    is_there.then_some(resolved)
}

/// The directory for plans, if it's there.
fn plans() -> Option<PathBuf> {
    let said = |name| value_in(process::environment(), name);
    let is_root = rustix::process::geteuid().is_root();
    let directory = plans_directory(is_root, said("XDG_CACHE_HOME"), said("HOME"))?;
    is_a(&directory, FileType::Directory).then_some(directory)
}

/// Has `ashlar-main` take this process's place. Returns, with the exit status, where that can't be.
fn go_on() -> u8 {
    let program = match this_program() {
        Ok(program) => program,
        Err(Errno::NOENT) => return refused(&"finding this program: no /proc/self/exe available. Is /proc mounted?"),
        Err(error) => return refused(&format_args!("finding this program: {}", Told(error))),
    };
    let places = places(&program);
    let Some(main) = places.iter().map(|place| place.join(MAIN)).find(|path| is_a(path, FileType::RegularFile)) else {
        return refused(&missing("program", &places[0].join(MAIN)));
    };
    let Ok(file) = CString::new(main.as_os_str().as_bytes()) else { return NOT_FOUND };
    let error = process::execute_as_typed(&file, c"ashlar");
    process::complain(&said_of(&main, &Told(error)));
    if error == Errno::NOENT { NOT_FOUND } else { NOT_EXECUTABLE }
}

fn refused(why: &dyn Display) -> u8 {
    process::complain(&format!("ashlar: {why}"));
    1
}

fn this_program() -> Result<PathBuf, Errno> {
    link(c"/proc/self/exe")
}

/// Where a symbolic link leads.
fn link(path: impl Arg) -> Result<PathBuf, Errno> {
    let target = rustix::fs::readlink(path, Vec::new())?;
    Ok(OsString::from_vec(target.into_bytes()).into())
}

fn is_a(path: &Path, kind: FileType) -> bool {
    rustix::fs::stat(path).is_ok_and(|found| FileType::from_raw_mode(found.st_mode) == kind)
}

/// What a file holds, if that is short.
fn text<'a>(directory: BorrowedFd, path: impl Arg, buffer: &'a mut [u8]) -> Result<Option<&'a [u8]>, Errno> {
    let file = open(directory, path, OFlags::RDONLY)?;
    let count = rustix::io::read(&*file, &mut *buffer)?;
    // One that fills the buffer may be longer.
    Ok(buffer.split_at_checked(count).filter(|(_, free)| !free.is_empty()).map(|(text, _)| text))
}

/// A descriptor that `execve` closes.
fn open(directory: BorrowedFd, path: impl Arg, flags: OFlags) -> Result<ManuallyDrop<OwnedFd>, Errno> {
    let opened = ManuallyDrop::new(rustix::fs::openat(directory, path, flags | OFlags::CLOEXEC, Mode::empty())?);
    // Who lacks one of the three that every program has is given it by `ashlar-main`.
    if opened.as_raw_fd() < 3 { Err(Errno::BADF) } else { Ok(opened) }
}

/// An error of the system in libc's words, as far as the command can meet it.
struct Told(Errno);

impl Display for Told {
    fn fmt(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
        let words = match self.0 {
            Errno::PERM => "Operation not permitted",
            Errno::NOENT => "No such file or directory",
            Errno::IO => "Input/output error",
            Errno::TOOBIG => "Argument list too long",
            Errno::NOEXEC => "Exec format error",
            Errno::AGAIN => "Resource temporarily unavailable",
            Errno::NOMEM => "Cannot allocate memory",
            Errno::ACCESS => "Permission denied",
            Errno::NOTDIR => "Not a directory",
            Errno::INVAL => "Invalid argument",
            Errno::NFILE => "Too many open files in system",
            Errno::MFILE => "Too many open files",
            Errno::TXTBSY => "Text file busy",
            Errno::NAMETOOLONG => "File name too long",
            Errno::LOOP => "Too many levels of symbolic links",
            _ => "The system refuses it",
        };
        write!(formatter, "{words} (os error {})", self.0.raw_os_error())
    }
}
