//! Runs programs with LibFS in them.
//!
//! Purpose: everything that `ashlar run PROGRAM…` does before the program begins. It finds the mounts of Ashlar
//! ([`MountRecord`]) and the library that the dynamic linker loads into the program. It sets the environment by which
//! that library learns of the mounts.
//!
//! Invariants:
//! - If nothing is mounted, a program runs as it is.
//! - If the caller may not read the library, the caller gets an error. The dynamic linker would run each program
//!   without the library.
//!
//! Non-goals: reports, options, all other verbs (`crates/cli`).
//!
//! Source: `docs/interception.md`.
#![forbid(unsafe_code)]

mod environment;
mod records;

use std::ffi::{OsStr, OsString};
use std::fmt::Display;
use std::fs::{self, File};
use std::io::{self, ErrorKind, IsTerminal};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use ashlar_wire::{MOUNTS_VARIABLE, PLANS_VARIABLE, can_load_library, socket_of};
use thiserror::Error;

pub use environment::{
    PRELOAD_VARIABLE, encode_mount_list, install_directories, missing_message, plain_program, plans_directory,
    preload_value, preload_without, variable_value, with_variables,
};
pub use records::{
    MountRecord, RECORDS_DIRECTORY, dead_record_of, is_mount_process, is_of_root, is_record_name, is_topmost,
    live_records, sort_records,
};

/// The command that has all verbs.
pub const MAIN_COMMAND: &str = "ashlar-main";
/// The command that runs programs, and starts the other one.
pub const COMMAND: &str = "ashlar";
/// The library that is loaded into programs.
pub const LIBRARY: &str = "libashlar_preload.so";
/// The exit status, in shells, of a program that exists and can't be run.
pub const NOT_EXECUTABLE: u8 = 126;
/// The exit status, in shells, of a program that does not exist.
pub const NOT_FOUND: u8 = 127;

/// Why a program can't be run.
#[derive(Debug, Error)]
pub enum LaunchError {
    /// The installation is incomplete.
    #[error("{}", missing_message(kind, file))]
    Missing {
        /// The kind of the missing file.
        kind: &'static str,
        /// Its expected path.
        file: PathBuf,
    },
    /// The library exists, and the caller may not read it.
    #[error(
        "the library {library}, which programs are to load, can't be read ({error}); make it readable for all with \
         'chmod a+r {library}', or install it again with 'make install'",
        library = .library.display()
    )]
    UnreadableLibrary {
        /// Its path.
        library: PathBuf,
        /// The system's error.
        error: io::Error,
    },
    /// The kernel does not say which program this is.
    #[error("finding this program: {0}")]
    Unknown(io::Error),
}

/// A program that is ready to be run.
#[derive(Debug)]
pub struct PreparedProgram {
    /// The command, with its environment.
    pub command: Command,
    /// The mounts that it finds.
    pub mounts: Vec<PathBuf>,
}

impl PreparedProgram {
    /// Warns that a program runs as it is, if standard error is a terminal.
    pub fn warn_if_unmounted(&self) {
        if self.mounts.is_empty() && io::stderr().is_terminal() {
            let name = Path::new(self.command.get_program()).display();
            eprintln!(
                "ashlar: no Ashlar file system is mounted, so {name} runs as it is; 'sudo ashlar mount DIR' mounts one"
            );
        }
    }
}

/// Prepares a program, given with its arguments. If nothing is mounted, the program runs as it is.
///
/// # Errors
/// [`LaunchError`].
pub fn prepare_program(words: &[OsString]) -> Result<PreparedProgram, LaunchError> {
    let library = find_library()?;
    let mounts = usable_mounts();
    let mut command = Command::new(words.first().map_or(OsStr::new(""), OsString::as_os_str));
    command.args(words.get(1..).unwrap_or_default());
    let mount_list = encode_mount_list(&mounts);
    if !mount_list.is_empty() {
        let others = std::env::var_os(PRELOAD_VARIABLE);
        let preload = match find_program(command.get_program()) {
            Some(program) if !takes_library(&program) => preload_without(&library, others.as_deref()),
            _ => Some(preload_value(&library, others.as_deref())),
        };
        match preload {
            Some(preload) => command.env(PRELOAD_VARIABLE, preload),
            None => command.env_remove(PRELOAD_VARIABLE),
        };
        command.env(MOUNTS_VARIABLE, mount_list);
        if let Some(plans) = ensure_plans_directory() {
            command.env(PLANS_VARIABLE, plans);
        }
    }
    Ok(PreparedProgram { command, mounts: mounts.into_iter().map(|(directory, _)| directory).collect() })
}

/// Returns where a program is found, by libc's search.
fn find_program(program: &OsStr) -> Option<PathBuf> {
    if program.as_bytes().contains(&b'/') {
        return Some(program.into()).filter(|file: &PathBuf| file.is_file());
    }
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|directory| directory.join(program)).find(|file| file.is_file())
}

/// Whether a program can load the library.
fn takes_library(program: &Path) -> bool {
    can_load_library(|interpreter, offset, buffer| {
        let path = interpreter.map_or(program, |path| Path::new(OsStr::from_bytes(path)));
        File::open(path).and_then(|file| file.read_at(buffer, offset)).ok()
    })
}

/// Runs a program in place of this one. If it fails, returns the exit status that a shell would have.
pub fn exec_program(mut command: Command) -> ExitCode {
    let error = command.exec();
    report_not_run(command.get_program(), &error)
}

/// Reports that a program can't be run; returns the exit status that a shell would have.
pub fn report_not_run(program: &OsStr, error: &io::Error) -> ExitCode {
    eprintln!("{}", failure_message(Path::new(program), error));
    ExitCode::from(if error.kind() == ErrorKind::NotFound { NOT_FOUND } else { NOT_EXECUTABLE })
}

/// Returns the report that a program can't be run.
pub fn failure_message(program: &Path, error: &impl Display) -> String {
    format!("ashlar: {} can't be run: {error}", program.display())
}

/// Returns the path of a program of this installation, by its name.
///
/// # Errors
/// [`LaunchError::Missing`], [`LaunchError::Unknown`].
pub fn find_installed(name: &str) -> Result<PathBuf, LaunchError> {
    let directories = own_directories()?;
    let missing = || LaunchError::Missing { kind: "program", file: directories[0].join(name) };
    directories.iter().map(|directory| directory.join(name)).find(|path| path.is_file()).ok_or_else(missing)
}

/// Returns the library's path, which the dynamic linker finds from any directory.
fn find_library() -> Result<PathBuf, LaunchError> {
    let directories = own_directories()?;
    for library in directories.iter().map(|directory| directory.join(LIBRARY)) {
        // If it can't be read, the dynamic linker would report that for each program, and run it without the library.
        match File::open(&library) {
            Ok(_) => return Ok(library),
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(LaunchError::UnreadableLibrary { library, error }),
        }
    }
    Err(LaunchError::Missing { kind: "library", file: directories[0].join(LIBRARY) })
}

/// Returns the directories in which this installation's files may be.
fn own_directories() -> Result<[PathBuf; 3], LaunchError> {
    Ok(install_directories(&std::env::current_exe().map_err(LaunchError::Unknown)?))
}

/// Returns all mounts that can be used, with the sockets of their daemons.
fn usable_mounts() -> Vec<(PathBuf, PathBuf)> {
    let used = live_records().into_iter().filter(is_topmost);
    used.map(|record| (record.directory, socket_of(&fs::canonicalize(&record.arena).unwrap_or(record.arena)))).collect()
}

/// Returns the directory for plans, and makes it if need be. Without one the library examines libc anew in each
/// program.
fn ensure_plans_directory() -> Option<PathBuf> {
    let (cache, home) = (std::env::var_os("XDG_CACHE_HOME"), std::env::var_os("HOME"));
    let directory = plans_directory(rustix::process::geteuid().is_root(), cache.as_deref(), home.as_deref())?;
    let is_there = directory.is_dir() || fs::create_dir_all(&directory).is_ok();
    is_there.then_some(directory)
}
