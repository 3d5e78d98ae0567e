//! Running programs with LibFS in them.
//!
//! Purpose: what stands between `ashlar run PROGRAM…` and the program: which Ashlars are mounted ([`MountRecord`]), where the library is
//! that the dynamic linker loads into it, and what the environment tells that library.
//!
//! Invariants:
//! - Where nothing is mounted, a program runs as it is.
//! - Who may not read the library is told so; the dynamic linker would run each program without it.
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

use ashlar_wire::{MOUNTS_VARIABLE, PLANS_VARIABLE, loads_library, socket_of};
use thiserror::Error;

pub use environment::{
    PRELOAD_VARIABLE, in_words, missing, places, plain, plans_directory, preload, preload_without, value_in,
    with_variables,
};
pub use records::{MountRecord, RECORDS, dead_record_of, in_order, is_mount_process, is_record, is_topmost, records};

/// The command that knows all verbs.
pub const MAIN: &str = "ashlar-main";
/// The command that runs programs, and finds the other one.
pub const COMMAND: &str = "ashlar";
/// The library that is loaded into programs.
pub const LIBRARY: &str = "libashlar_preload.so";
/// The exit status, in shells, of a program that is there and can't be run.
pub const NOT_EXECUTABLE: u8 = 126;
/// The exit status, in shells, of a program that is not there.
pub const NOT_FOUND: u8 = 127;

/// Why a program can't be run.
#[derive(Debug, Error)]
pub enum LaunchError {
    /// The installation is not whole.
    #[error("{}", missing(kind, file))]
    Missing {
        /// What it is.
        kind: &'static str,
        /// Where it should be.
        file: PathBuf,
    },
    /// The library is there, and not for the caller.
    #[error(
        "the library {library}, which programs are to load, can't be read ({error}); make it readable for all with \
         'chmod a+r {library}', or install it again with 'make install'",
        library = .library.display()
    )]
    UnreadableLibrary {
        /// Its path.
        library: PathBuf,
        /// Why.
        error: io::Error,
    },
    /// The kernel does not say which program this is.
    #[error("finding this program: {0}")]
    Unknown(io::Error),
}

/// A program that is ready to be run.
#[derive(Debug)]
pub struct Prepared {
    /// With its environment.
    pub command: Command,
    /// The mounts that it finds.
    pub mounts: Vec<PathBuf>,
}

impl Prepared {
    /// Says, where a person is looking, that a program runs as it is.
    pub fn warn(&self) {
        if self.mounts.is_empty() && io::stderr().is_terminal() {
            let name = Path::new(self.command.get_program()).display();
            eprintln!(
                "ashlar: no Ashlar file system is mounted, so {name} runs as it is; 'sudo ashlar mount DIR' mounts one"
            );
        }
    }
}

/// Prepares a program, given with its arguments. Where nothing is mounted there is nothing to be done past the kernel: it runs as it is.
///
/// # Errors
/// [`LaunchError`].
pub fn prepare(words: &[OsString]) -> Result<Prepared, LaunchError> {
    let library = library()?;
    let mounts = used_mounts();
    let mut command = Command::new(words.first().map_or(OsStr::new(""), OsString::as_os_str));
    command.args(words.get(1..).unwrap_or_default());
    let told = in_words(&mounts);
    if !told.is_empty() {
        let others = std::env::var_os(PRELOAD_VARIABLE);
        let preload = match found(command.get_program()) {
            Some(program) if !takes_library(&program) => preload_without(&library, others.as_deref()),
            _ => Some(preload(&library, others.as_deref())),
        };
        match preload {
            Some(preload) => command.env(PRELOAD_VARIABLE, preload),
            None => command.env_remove(PRELOAD_VARIABLE),
        };
        command.env(MOUNTS_VARIABLE, told);
        if let Some(plans) = plans() {
            command.env(PLANS_VARIABLE, plans);
        }
    }
    Ok(Prepared { command, mounts: mounts.into_iter().map(|(directory, _)| directory).collect() })
}

/// Where a program is found, as libc looks for it.
fn found(program: &OsStr) -> Option<PathBuf> {
    if program.as_bytes().contains(&b'/') {
        return Some(program.into()).filter(|file: &PathBuf| file.is_file());
    }
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|directory| directory.join(program)).find(|file| file.is_file())
}

/// Whether a program can load the library.
fn takes_library(program: &Path) -> bool {
    loads_library(|interpreter, offset, buffer| {
        let path = interpreter.map_or(program, |path| Path::new(OsStr::from_bytes(path)));
        File::open(path).and_then(|file| file.read_at(buffer, offset)).ok()
    })
}

/// Runs a program in place of this one. Returns, with what a shell would say, if that can't be.
pub fn exec(mut command: Command) -> ExitCode {
    let error = command.exec();
    not_run(command.get_program(), &error)
}

/// Says that a program can't be run, and what a shell would say.
pub fn not_run(program: &OsStr, error: &io::Error) -> ExitCode {
    eprintln!("{}", said_of(Path::new(program), error));
    ExitCode::from(if error.kind() == ErrorKind::NotFound { NOT_FOUND } else { NOT_EXECUTABLE })
}

/// What is said of a program that can't be run.
pub fn said_of(program: &Path, error: &impl Display) -> String {
    format!("ashlar: {} can't be run: {error}", program.display())
}

/// A program that belongs to this one, by its name.
///
/// # Errors
/// [`LaunchError::Missing`], [`LaunchError::Unknown`].
pub fn beside(name: &str) -> Result<PathBuf, LaunchError> {
    let places = own_places()?;
    let missing = || LaunchError::Missing { kind: "program", file: places[0].join(name) };
    places.iter().map(|place| place.join(name)).find(|path| path.is_file()).ok_or_else(missing)
}

/// The library's path, which the dynamic linker finds from any directory.
fn library() -> Result<PathBuf, LaunchError> {
    let places = own_places()?;
    for library in places.iter().map(|place| place.join(LIBRARY)) {
        // The dynamic linker would say so for each program that is run, and run it without.
        match File::open(&library) {
            Ok(_) => return Ok(library),
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(LaunchError::UnreadableLibrary { library, error }),
        }
    }
    Err(LaunchError::Missing { kind: "library", file: places[0].join(LIBRARY) })
}

/// Where what belongs to this program may be.
fn own_places() -> Result<[PathBuf; 3], LaunchError> {
    Ok(places(&std::env::current_exe().map_err(LaunchError::Unknown)?))
}

/// All mounts that can be used, with the sockets of their daemons.
fn used_mounts() -> Vec<(PathBuf, PathBuf)> {
    let used = records().into_iter().filter(is_topmost);
    used.map(|record| (record.directory, socket_of(&fs::canonicalize(&record.arena).unwrap_or(record.arena)))).collect()
}

/// The directory for plans, made if need be; without one the library looks at libc anew in each program.
fn plans() -> Option<PathBuf> {
    let (cache, home) = (std::env::var_os("XDG_CACHE_HOME"), std::env::var_os("HOME"));
    let directory = plans_directory(rustix::process::geteuid().is_root(), cache.as_deref(), home.as_deref())?;
    let is_there = directory.is_dir() || fs::create_dir_all(&directory).is_ok();
    is_there.then_some(directory)
}
