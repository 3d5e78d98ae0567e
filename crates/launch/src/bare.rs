//! The command without libc.
//!
//! It serves only the case that happens by the thousand. A program is to be run as typed, and all files of the
//! installation are in their places. Each record of a mount is sound: the mount exists, whether or not its process was
//! killed. All other cases are for `ashlar-main`, which starts from the beginning: this code leaves no trace.
//!
//! Invariants: no call of libc, which has not begun. The standard library is linked, but only the parts without system
//! calls are used: paths, strings, lists. The parts with system calls or thread-local state would go through libc. So
//! would the closing of a descriptor; descriptors are left open, for `execve` to close.

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
    LIBRARY, MAIN_COMMAND, MountRecord, NOT_EXECUTABLE, NOT_FOUND, PRELOAD_VARIABLE, RECORDS_DIRECTORY,
    encode_mount_list, failure_message, install_directories, is_mount_process, is_of_root, is_record_name,
    missing_message, plain_program, plans_directory, preload_value, preload_without, sort_records, variable_value,
    with_variables,
};
use ashlar_wire::{MOUNTS_VARIABLE, PLANS_VARIABLE, can_load_library, socket_of};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use rustix::fs::{CWD, FileType, Mode, OFlags, RawDir};
use rustix::io::Errno;
use rustix::path::Arg;

use self::process::Environment;

/// The value of `PATH` if none is set: libc's.
const DEFAULT_PATH: &[u8] = b"/bin:/usr/bin";
/// The longest program name and the longest `PATH`, in bytes. libc treats longer ones in its own way.
const NAME_BYTES_MAX: usize = 255;
const PATH_BYTES_MAX: usize = 4095;
/// The buffer for a record or a command line, in bytes. One that fills it is none of the usual ones, which are two
/// paths and some words.
const TEXT_BYTES: usize = 4096;
/// Room for some names of records at a time, in bytes.
const NAMES_BYTES: usize = 1024;

/// Runs the command line, or lets `ashlar-main` run it. If both fail, returns the exit status.
fn serve() -> u8 {
    // `None` says only that the case is not the usual one.
    let None = run_program();
    exec_main()
}

/// Runs the program in place of this one.
fn run_program() -> Option<Infallible> {
    // The command's own name comes first.
    let first = 1 + plain_program(process::arguments().skip(1).map(CStr::to_bytes))?;
    let program = process::arguments().nth(first)?;
    let library = find_library()?;
    let mounts = usable_mounts()?;
    let set = if mounts.is_empty() {
        // On a terminal, `ashlar-main` warns that the program runs as it is.
        if is_kind(Path::new("/proc/self/fd/2"), FileType::CharacterDevice) {
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
    let path = variable_value(variables.iter().copied(), "PATH").map_or(DEFAULT_PATH, |path| path.as_bytes());
    let others = preload_without(&library, variable_value(process::environment(), PRELOAD_VARIABLE));
    let others = others.and_then(|others| variable(PRELOAD_VARIABLE, others.as_bytes()));
    let is_preload = |variable: &&CStr| variable_value([*variable], PRELOAD_VARIABLE).is_some();
    let without: Vec<_> =
        variables.iter().copied().filter(|variable| !is_preload(variable)).chain(others.as_deref()).collect();
    let (environment, without) = (Environment::new(&variables), Environment::new(&without));
    process::reset_sigpipe();
    search_path(program.to_bytes(), path, |file| {
        let is_foreign = set.is_some() && !takes_library(file);
        process::execute(file, first, if is_foreign { &without } else { &environment })
    })
}

/// Whether a program can load the library.
fn takes_library(program: &CStr) -> bool {
    can_load_library(|interpreter, offset, buffer| {
        let file = match interpreter {
            None => open(CWD, program, OFlags::RDONLY | OFlags::NONBLOCK),
            Some(path) => open(CWD, path, OFlags::RDONLY | OFlags::NONBLOCK),
        };
        rustix::io::pread(&*file.ok()?, buffer, offset).ok()
    })
}

/// Returns the variables from which the library learns of mounts, and the one that loads it into the program.
fn variables_for(library: &Path, mounts: &[(PathBuf, PathBuf)]) -> Option<[CString; 3]> {
    let mounts = encode_mount_list(mounts);
    let preload = preload_value(library, variable_value(process::environment(), PRELOAD_VARIABLE));
    let variables = [
        variable(MOUNTS_VARIABLE, mounts.as_bytes())?,
        variable(PRELOAD_VARIABLE, preload.as_bytes())?,
        variable(PLANS_VARIABLE, find_plans_directory()?.as_os_str().as_bytes())?,
    ];
    // A mount whose path can't be encoded is left out.
    (!mounts.is_empty()).then_some(variables)
}

/// Tries each place where libc would search for a program.
fn search_path(program: &[u8], path: &[u8], execute: impl Fn(&CStr) -> Errno) -> Option<Infallible> {
    if program.contains(&b'/') {
        execute(&CString::new(program).ok()?);
        return None;
    }
    if program.is_empty() || program.len() > NAME_BYTES_MAX || path.len() > PATH_BYTES_MAX {
        return None;
    }
    for directory in path.split(|&byte| byte == b':') {
        // An empty directory name means the working directory.
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

/// Returns the library's path, if it can be read.
fn find_library() -> Option<PathBuf> {
    for library in install_directories(&this_program().ok()?).iter().map(|directory| directory.join(LIBRARY)) {
        match open(CWD, &library, OFlags::RDONLY) {
            Ok(_) => return Some(library),
            Err(Errno::NOENT) => {}
            Err(_) => return None,
        }
    }
    None
}

/// Returns all mounts that can be used, with the sockets of their daemons; `None` if any record is unusual.
fn usable_mounts() -> Option<Vec<(PathBuf, PathBuf)>> {
    let directory = match open(CWD, RECORDS_DIRECTORY, OFlags::RDONLY | OFlags::DIRECTORY) {
        Ok(directory) => directory,
        Err(error) => return (error == Errno::NOENT).then(Vec::new),
    };
    if !is_of_root(directory.as_fd()) {
        return Some(Vec::new());
    }
    // Not on the stack, which may have next to no room: its limit is the program's own.
    let mut names = Vec::with_capacity(NAMES_BYTES);
    let mut buffer = vec![0; TEXT_BYTES];
    let mut files = RawDir::new(&*directory, names.spare_capacity_mut());
    let mut used = Vec::new();
    while let Some(file) = files.next() {
        let file = file.ok()?;
        if !is_record_name(file.file_name().to_bytes()) {
            continue;
        }
        let record = MountRecord::read(read_text(directory.as_fd(), file.file_name(), &mut buffer).ok()??)?;
        let is_alive = match read_text(CWD, format!("/proc/{}/cmdline", record.pid), &mut buffer) {
            Ok(line) => is_mount_process(line?),
            Err(Errno::NOENT) => false,
            Err(_) => return None,
        };
        let root = ManuallyDrop::new(record.root()?);
        let is_shown = record.is_shown_by(root.as_fd())?;
        match (is_alive, is_shown) {
            (true, true) => used.push(record),
            // The mount was detached from the tree; or it stays until it is unmounted, and no process answers.
            (true, false) | (false, true) => {}
            // `ashlar-main` removes it.
            (false, false) => return None,
        }
    }
    sort_records(&mut used);
    used.into_iter().map(|record| Some((record.directory, socket_of(&resolved(&record.arena)?)))).collect()
}

/// Returns a path without symbolic links.
fn resolved(path: &Path) -> Option<PathBuf> {
    let place = open(CWD, path, OFlags::PATH).ok()?;
    let resolved = link_target(format!("/proc/self/fd/{}", place.as_raw_fd())).ok()?;
    // The kernel appends this to a path that no longer exists.
    let is_there = resolved.is_absolute() && !resolved.as_os_str().as_bytes().ends_with(b" (deleted)");
    is_there.then_some(resolved)
}

/// Returns the directory for plans, if it exists.
fn find_plans_directory() -> Option<PathBuf> {
    let set_value = |name| variable_value(process::environment(), name);
    let is_root = rustix::process::geteuid().is_root();
    let directory = plans_directory(is_root, set_value("XDG_CACHE_HOME"), set_value("HOME"))?;
    is_kind(&directory, FileType::Directory).then_some(directory)
}

/// Replaces this process by `ashlar-main`. If that fails, returns the exit status.
fn exec_main() -> u8 {
    let program = match this_program() {
        Ok(program) => program,
        Err(Errno::NOENT) => {
            return report_failure(&"finding this program: no /proc/self/exe available. Is /proc mounted?");
        }
        Err(error) => return report_failure(&format_args!("finding this program: {}", LibcMessage(error))),
    };
    let directories = install_directories(&program);
    let Some(main) = directories
        .iter()
        .map(|directory| directory.join(MAIN_COMMAND))
        .find(|path| is_kind(path, FileType::RegularFile))
    else {
        return report_failure(&missing_message("program", &directories[0].join(MAIN_COMMAND)));
    };
    let Ok(file) = CString::new(main.as_os_str().as_bytes()) else { return NOT_FOUND };
    let error = process::execute_as_typed(&file, c"ashlar");
    process::write_error(&failure_message(&main, &LibcMessage(error)));
    if error == Errno::NOENT { NOT_FOUND } else { NOT_EXECUTABLE }
}

fn report_failure(why: &dyn Display) -> u8 {
    process::write_error(&format!("ashlar: {why}"));
    1
}

fn this_program() -> Result<PathBuf, Errno> {
    link_target(c"/proc/self/exe")
}

/// Returns the target of a symbolic link.
fn link_target(path: impl Arg) -> Result<PathBuf, Errno> {
    let target = rustix::fs::readlink(path, Vec::new())?;
    Ok(OsString::from_vec(target.into_bytes()).into())
}

fn is_kind(path: &Path, kind: FileType) -> bool {
    rustix::fs::stat(path).is_ok_and(|found| FileType::from_raw_mode(found.st_mode) == kind)
}

/// Returns a file's content, if that is short.
fn read_text<'a>(directory: BorrowedFd, path: impl Arg, buffer: &'a mut [u8]) -> Result<Option<&'a [u8]>, Errno> {
    let file = open(directory, path, OFlags::RDONLY)?;
    let count = rustix::io::read(&*file, &mut *buffer)?;
    // A file that fills the buffer may be longer.
    Ok(buffer.split_at_checked(count).filter(|(_, free)| !free.is_empty()).map(|(text, _)| text))
}

/// Opens a descriptor that `execve` closes.
fn open(directory: BorrowedFd, path: impl Arg, flags: OFlags) -> Result<ManuallyDrop<OwnedFd>, Errno> {
    let opened = ManuallyDrop::new(rustix::fs::openat(directory, path, flags | OFlags::CLOEXEC, Mode::empty())?);
    // If a process lacks one of the three standard descriptors, `ashlar-main` opens it.
    if opened.as_raw_fd() < 3 { Err(Errno::BADF) } else { Ok(opened) }
}

/// An error of the system in libc's words, as far as the command can meet it.
struct LibcMessage(Errno);

impl Display for LibcMessage {
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
