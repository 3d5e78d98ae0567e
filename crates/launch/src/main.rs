//! The `ashlar` command: `ashlar run PROGRAM…`, and the way to all other verbs.
//!
//! Purpose: programs are run by the thousand, so what runs them is as small as it can be, and linked without the dynamic linker. Whatever
//! else was typed, an option of `run` too, is for `ashlar-main`, which takes this process's place.
//!
//! Invariants: says nothing that `ashlar-main` would not say.
//!
//! Non-goals: any verb or option that is not used by the thousand.
//!
//! Source: `docs/architecture.md`, section "Processes".
#![forbid(unsafe_code)]

use std::ffi::OsString;
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, ExitCode};

use ashlar_launch::{MAIN, beside, exec, plain, prepare};

fn main() -> ExitCode {
    let typed: Vec<_> = std::env::args_os().skip(1).collect();
    let program = plain(typed.iter().map(|word| word.as_bytes()));
    let error = match program.map(|program| prepare(&typed[program..])) {
        Some(Ok(prepared)) => {
            prepared.warn();
            return exec(prepared.command);
        }
        Some(Err(error)) => error,
        None => match beside(MAIN) {
            Ok(main) => return exec(with_name(main, typed)),
            Err(error) => error,
        },
    };
    let _ = writeln!(std::io::stderr(), "ashlar: {error}");
    ExitCode::FAILURE
}

fn with_name(main: PathBuf, typed: Vec<OsString>) -> Command {
    let mut command = Command::new(main);
    command.arg0("ashlar").args(typed);
    command
}
