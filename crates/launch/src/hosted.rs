//! The command as a program like any other, where it can't begin without libc.

use std::ffi::OsString;
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

use ashlar_launch::{MAIN, beside, exec, plain, prepare};

pub fn serve() -> ExitCode {
    let typed: Vec<OsString> = std::env::args_os().skip(1).collect();
    let error = match plain(typed.iter().map(|word| word.as_bytes())) {
        Some(program) => match prepare(&typed[program..]) {
            Ok(prepared) => {
                prepared.warn();
                return exec(prepared.command);
            }
            Err(error) => error,
        },
        None => match beside(MAIN) {
            Ok(main) => {
                let mut command = Command::new(main);
                command.arg0("ashlar").args(typed);
                return exec(command);
            }
            Err(error) => error,
        },
    };
    let _ = writeln!(std::io::stderr(), "ashlar: {error}");
    ExitCode::FAILURE
}
