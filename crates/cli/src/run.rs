//! `ashlar run PROGRAM…`: has the dynamic linker load LibFS into a program, and into all that it runs.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use ashlar_wire::{MOUNTS_VARIABLE, PLANS_VARIABLE, encode_mounts};

use crate::arena::Place;
use crate::arguments::RunArguments;
use crate::error::CliError;
use crate::mounts;

/// The library that is loaded: beside the command where it was built, below `lib` where it was installed.
const LIBRARY: &str = "libashlar_preload.so";
const PLACES: [&str; 2] = ["", "../lib/ashlar"];
/// Where it keeps what it has found out about a libc, and its patched code: where programs may be run from.
const PLANS_OF_ROOT: &str = "/var/cache/ashlar/plans";
/// Programs that can't be run have these exit statuses in shells.
const NOT_EXECUTABLE: u8 = 126;
const NOT_FOUND: u8 = 127;

/// `ashlar run PROGRAM…`, if it was typed without options: programs are run by the thousand, and what all verbs understand takes longer to
/// set up than all else.
pub fn plain(mut typed: impl Iterator<Item = OsString>) -> Option<RunArguments> {
    let is_run = typed.nth(1)? == "run";
    let command: Vec<_> = typed.collect();
    let is_plain = is_run && command.first().is_some_and(|program| !program.as_bytes().starts_with(b"-"));
    is_plain.then_some(RunArguments { command })
}

/// Runs the program in place of this one.
pub fn run(arguments: &RunArguments) -> Result<ExitCode, CliError> {
    let library = library()?;
    let mounts = mounts_in_words()?;
    let Some((program, rest)) = arguments.command.split_first() else { return Err(CliError::Misunderstood) };
    let mut command = Command::new(program);
    command.args(rest).env(MOUNTS_VARIABLE, OsStr::from_bytes(&mounts)).env("LD_PRELOAD", preload(&library));
    if let Some(plans) = plans() {
        command.env(PLANS_VARIABLE, plans);
    }
    let error = command.exec();
    let missing = error.kind() == std::io::ErrorKind::NotFound;
    eprintln!("ashlar: {} can't be run: {error}", Path::new(program).display());
    Ok(ExitCode::from(if missing { NOT_FOUND } else { NOT_EXECUTABLE }))
}

/// The library's path, which the dynamic linker finds from any directory.
fn library() -> Result<PathBuf, CliError> {
    let program = std::env::current_exe().map_err(CliError::system("finding this program"))?;
    let directory = program.parent().unwrap_or(Path::new("/"));
    let found = PLACES.iter().map(|place| directory.join(place).join(LIBRARY)).find(|path| path.exists());
    let found = found.ok_or_else(|| CliError::NoLibrary(directory.join(LIBRARY)))?;
    fs::canonicalize(&found).map_err(CliError::system(format!("finding {}", found.display())))
}

/// All mounts that can be used.
fn mounts_in_words() -> Result<Vec<u8>, CliError> {
    let mut used = Vec::new();
    for record in mounts::records().into_iter().filter(mounts::is_topmost) {
        used.push((record.directory, Place::at(record.arena)?.socket()));
    }
    let bytes = used.iter().map(|(point, socket)| (point.as_os_str().as_bytes(), socket.as_os_str().as_bytes()));
    let words = encode_mounts(bytes);
    if words.is_empty() { Err(CliError::NothingMounted) } else { Ok(words) }
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
    fs::create_dir_all(&directory).ok().map(|()| directory)
}
