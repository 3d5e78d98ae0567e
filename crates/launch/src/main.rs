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

use ashlar_launch::{MAIN, beside, exec, prepare};

fn main() -> ExitCode {
    let typed: Vec<_> = std::env::args_os().skip(1).collect();
    let error = match plain(&typed).map(prepare) {
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

/// The program of `ashlar run PROGRAM…` and its arguments, if that was typed without options.
fn plain(typed: &[OsString]) -> Option<&[OsString]> {
    let (verb, command) = typed.split_first()?;
    let command = if command.first()? == "--" { &command[1..] } else { command };
    let is_plain = verb == "run" && !command.first()?.as_bytes().starts_with(b"-");
    is_plain.then_some(command)
}

fn with_name(main: PathBuf, typed: Vec<OsString>) -> Command {
    let mut command = Command::new(main);
    command.arg0("ashlar").args(typed);
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_has_no_options_is_run_here() {
        let is_plain = |words: &[&str]| {
            let typed: Vec<OsString> = words.iter().map(OsString::from).collect();
            plain(&typed).map(|command| command.iter().map(|word| word.to_string_lossy().into_owned()).collect())
        };
        let expected = |words: &[&str]| Some(words.iter().map(|&word| word.to_owned()).collect::<Vec<_>>());
        assert_eq!(is_plain(&["run", "ls", "-l"]), expected(&["ls", "-l"]));
        assert_eq!(is_plain(&["run", "--", "ls", "--", "-l"]), expected(&["ls", "--", "-l"]));
        for words in
            [&[][..], &["run"], &["run", "--"], &["run", "--report", "ls"], &["run", "--", "-x"], &["mount", "/mnt"]]
        {
            assert_eq!(is_plain(words), None::<Vec<String>>, "{words:?}");
        }
    }
}
