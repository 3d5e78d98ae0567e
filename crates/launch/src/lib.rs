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

mod records;

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{self, ErrorKind, IsTerminal};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use ashlar_wire::{MOUNTS_VARIABLE, PLANS_VARIABLE, encode_mounts, socket_of};
use thiserror::Error;

pub use records::{MountRecord, dead_record_of, is_topmost, records};

/// The command that knows all verbs.
pub const MAIN: &str = "ashlar-main";
/// The command that runs programs, and finds the other one.
pub const COMMAND: &str = "ashlar";
/// The library that is loaded into programs.
const LIBRARY: &str = "libashlar_preload.so";
/// Where the library keeps what it has found out about a libc, and its patched code: where programs may be run from.
const PLANS_OF_ROOT: &str = "/var/cache/ashlar/plans";
/// Programs that can't be run have these exit statuses in shells.
const NOT_EXECUTABLE: u8 = 126;
const NOT_FOUND: u8 = 127;

/// Why a program can't be run.
#[derive(Debug, Error)]
pub enum LaunchError {
    /// The installation is not whole.
    #[error("there is no {kind} {file}; build it with 'make build', or install all of it with 'make install'")]
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
        command.env(MOUNTS_VARIABLE, told).env("LD_PRELOAD", preload(&library));
        if let Some(plans) = plans() {
            command.env(PLANS_VARIABLE, plans);
        }
    }
    Ok(Prepared { command, mounts: mounts.into_iter().map(|(directory, _)| directory).collect() })
}

/// Runs a program in place of this one. Returns, with what a shell would say, if that can't be.
pub fn exec(mut command: Command) -> ExitCode {
    let error = command.exec();
    not_run(command.get_program(), &error)
}

/// Says that a program can't be run, and what a shell would say.
pub fn not_run(program: &OsStr, error: &io::Error) -> ExitCode {
    eprintln!("ashlar: {} can't be run: {error}", Path::new(program).display());
    ExitCode::from(if error.kind() == ErrorKind::NotFound { NOT_FOUND } else { NOT_EXECUTABLE })
}

/// A program that belongs to this one, by its name.
///
/// # Errors
/// [`LaunchError::Missing`], [`LaunchError::Unknown`].
pub fn beside(name: &str) -> Result<PathBuf, LaunchError> {
    let places = places()?;
    let missing = || LaunchError::Missing { kind: "program", file: places[0].join(name) };
    places.iter().map(|place| place.join(name)).find(|path| path.is_file()).ok_or_else(missing)
}

/// The library's path, which the dynamic linker finds from any directory.
fn library() -> Result<PathBuf, LaunchError> {
    let places = places()?;
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

/// Where what belongs to this program may be: beside it where it was built; where it was installed, `ashlar` is in `bin`, all else in
/// `lib/ashlar`.
fn places() -> Result<[PathBuf; 3], LaunchError> {
    let program = std::env::current_exe().map_err(LaunchError::Unknown)?;
    let above = |levels| program.ancestors().nth(levels).unwrap_or(Path::new("/"));
    Ok([above(1).to_owned(), above(2).join("lib/ashlar"), above(3).join("bin")])
}

/// All mounts that can be used, with the sockets of their daemons.
fn used_mounts() -> Vec<(PathBuf, PathBuf)> {
    let used = records().into_iter().filter(is_topmost);
    used.map(|record| (record.directory, socket_of(&fs::canonicalize(&record.arena).unwrap_or(record.arena)))).collect()
}

fn in_words(mounts: &[(PathBuf, PathBuf)]) -> OsString {
    let bytes = mounts.iter().map(|(point, socket)| (point.as_os_str().as_bytes(), socket.as_os_str().as_bytes()));
    OsString::from_vec(encode_mounts(bytes))
}

/// Before what the caller has loaded already.
fn preload(library: &Path) -> OsString {
    let mut preload = library.as_os_str().to_owned();
    if let Some(others) = std::env::var_os("LD_PRELOAD").filter(|others| !others.is_empty()) {
        preload.push(":");
        preload.push(others);
    }
    preload
}

/// A directory that nobody else writes, made if need be; without one the library looks at libc anew in each program.
fn plans() -> Option<PathBuf> {
    let directory = if rustix::process::geteuid().is_root() {
        PathBuf::from(PLANS_OF_ROOT)
    } else {
        let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).filter(|path| path.is_absolute());
        cache.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache")))?.join("ashlar")
    };
    let is_there = directory.is_dir() || fs::create_dir_all(&directory).is_ok();
    is_there.then_some(directory)
}
