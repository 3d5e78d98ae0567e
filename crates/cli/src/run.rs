//! `ashlar run PROGRAM…`: has the dynamic linker load LibFS into a program, and into all that it runs.

mod attend;
mod report;
mod system_calls;

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{ErrorKind, IsTerminal};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use ashlar_wire::{MOUNTS_VARIABLE, PLANS_VARIABLE, REPORT_VARIABLE, encode_mounts};

use crate::arena::Place;
use crate::arguments::RunArguments;
use crate::error::CliError;
use crate::mounts;
use crate::run::report::Counts;

/// The library that is loaded: beside the command where it was built, below `lib` where it was installed.
const LIBRARY: &str = "libashlar_preload.so";
const LIBRARY_INSTALLED: &str = "lib/ashlar/libashlar_preload.so";
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
    is_plain.then(|| RunArguments { command, ..RunArguments::default() })
}

/// Runs the program in place of this one; as its child, where there is to be a report. Where nothing is mounted there is nothing to be
/// done past the kernel: it runs as it is.
pub fn run(arguments: &RunArguments) -> Result<ExitCode, CliError> {
    let library = library()?;
    let mounts = used_mounts()?;
    let Some((program, rest)) = arguments.command.split_first() else { return Err(CliError::Misunderstood) };
    let mut command = Command::new(program);
    command.args(rest);
    let words = in_words(&mounts);
    if words.is_empty() {
        if std::io::stderr().is_terminal() {
            let name = Path::new(program).display();
            eprintln!(
                "ashlar: no Ashlar file system is mounted, so {name} runs as it is; 'sudo ashlar mount DIR' mounts one"
            );
        }
    } else {
        command.env(MOUNTS_VARIABLE, words).env("LD_PRELOAD", preload(&library));
        if let Some(plans) = plans() {
            command.env(PLANS_VARIABLE, plans);
        }
    }
    if arguments.wants_report() {
        return run_with_report(arguments, mounts, command);
    }
    Ok(not_run(program, &command.exec()))
}

fn run_with_report(
    arguments: &RunArguments,
    mounts: Vec<(PathBuf, PathBuf)>,
    mut command: Command,
) -> Result<ExitCode, CliError> {
    let counts = Counts::begin(mounts.into_iter().map(|(directory, _)| directory).collect())?;
    command.env(REPORT_VARIABLE, counts.path());
    let attended = match attend::start(&mut command) {
        Ok(attended) => attended,
        Err(error) => return Ok(not_run(command.get_program(), &error)),
    };
    let end = attended.wait()?;
    let words: Vec<_> = arguments.command.iter().map(|word| word.to_string_lossy()).collect();
    let written = counts
        .end(words.join(" "))
        .and_then(|report| report.write(arguments.report_to.as_deref(), arguments.report_json));
    if let Err(error) = written {
        // What the program has done counts for whoever runs it.
        eprintln!("ashlar: {error}");
    }
    Ok(end.follow())
}

/// Says that a program can't be run, and what a shell would say.
fn not_run(program: &OsStr, error: &std::io::Error) -> ExitCode {
    let missing = error.kind() == std::io::ErrorKind::NotFound;
    eprintln!("ashlar: {} can't be run: {error}", Path::new(program).display());
    ExitCode::from(if missing { NOT_FOUND } else { NOT_EXECUTABLE })
}

/// The library's path, which the dynamic linker finds from any directory.
fn library() -> Result<PathBuf, CliError> {
    let program = std::env::current_exe().map_err(CliError::system("finding this program"))?;
    let directory = program.parent().unwrap_or(Path::new("/"));
    let above = directory.parent().unwrap_or(directory);
    for library in [directory.join(LIBRARY), above.join(LIBRARY_INSTALLED)] {
        // The dynamic linker would say so for each program that is run, and run it without.
        match File::open(&library) {
            Ok(_) => return Ok(library),
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(CliError::UnreadableLibrary { library, error }),
        }
    }
    Err(CliError::NoLibrary(directory.join(LIBRARY)))
}

/// All mounts that can be used, with the sockets of their daemons.
fn used_mounts() -> Result<Vec<(PathBuf, PathBuf)>, CliError> {
    let mut used = Vec::new();
    for record in mounts::records().into_iter().filter(mounts::is_topmost) {
        used.push((record.directory, Place::at(record.arena)?.socket()));
    }
    Ok(used)
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
