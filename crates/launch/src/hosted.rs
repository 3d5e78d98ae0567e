//! The command as an ordinary program, if it can't begin without libc.

use std::ffi::OsString;
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

use ashlar_launch::{MAIN_COMMAND, exec_program, find_installed, plain_program, prepare_program};

pub fn serve() -> ExitCode {
    let typed: Vec<OsString> = std::env::args_os().skip(1).collect();
    let error = match plain_program(typed.iter().map(|word| word.as_bytes())) {
        Some(program) => match prepare_program(&typed[program..]) {
            Ok(prepared) => {
                prepared.warn_if_unmounted();
                return exec_program(prepared.command);
            }
            Err(error) => error,
        },
        None => match find_installed(MAIN_COMMAND) {
            Ok(main) => {
                let mut command = Command::new(main);
                command.arg0("ashlar").args(typed);
                return exec_program(command);
            }
            Err(error) => error,
        },
    };
    let _ = writeln!(std::io::stderr(), "ashlar: {error}");
    ExitCode::FAILURE
}
