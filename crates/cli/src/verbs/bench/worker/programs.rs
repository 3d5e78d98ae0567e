//! Measures starting programs.

use std::fs;
use std::io;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use crate::error::CliError;
use crate::verbs::bench::case::{Contender, Measurement};
use crate::verbs::bench::timing::Summary;
use crate::verbs::bench::worker::files::system;
use crate::verbs::bench::worker::task::WorkerTask;

/// How often a program is started, and how often before its time counts.
const STARTS: usize = 40;
const WARM_UP: usize = 3;
/// Rounds of the script, five commands each.
const ROUNDS: usize = 200;

/// Returns the command by which the contender starts a program.
fn command(task: &WorkerTask, program: &str, directory: &Path) -> Result<Command, CliError> {
    let mut command = if task.contender == Contender::Run {
        let mut command = Command::new(ashlar_launch::find_installed(ashlar_launch::COMMAND)?);
        command.args(["run", "--", program]);
        command
    } else {
        Command::new(program)
    };
    command.current_dir(directory).stdin(Stdio::null()).stdout(Stdio::null());
    Ok(command)
}

/// Runs it to its end, and returns how long that took.
fn time(command: &mut Command) -> Result<f64, CliError> {
    let start = Instant::now();
    let name = command.get_program().to_string_lossy().into_owned();
    let status = command.status().map_err(CliError::system(format!("starting {name}")))?;
    let elapsed = start.elapsed().as_nanos() as f64;
    if status.success() {
        return Ok(elapsed);
    }
    Err(CliError::system(name)(io::Error::other(format!("it ended with {status}"))))
}

/// Measures `true`, outside the file system and in the measured directory.
pub fn start(task: &WorkerTask) -> Result<Vec<Measurement>, CliError> {
    let mut measured = Vec::new();
    for (what, directory) in [("start 'true', elsewhere", Path::new("/")), ("start 'true', there", &task.directory)] {
        let mut command = command(task, "true", directory)?;
        let mut times = Vec::new();
        for _ in 0..WARM_UP + STARTS {
            times.push(time(&mut command)?);
        }
        measured.push(Measurement::median(what, Summary::of(&mut times[WARM_UP..])));
    }
    Ok(measured)
}

/// Measures a shell script: the shell runs two of five commands itself, the others are programs.
pub fn script(task: &WorkerTask) -> Result<Vec<Measurement>, CliError> {
    let path = task.aside.join("script");
    let round =
        |number: usize| format!("echo {number} > a{number}\ncat a{number} > b\ntest -s b\ncp b c\nmv c d{number}\n");
    let text = format!("set -e\n{}", (0..ROUNDS).map(round).collect::<String>());
    fs::write(&path, text).map_err(system("writing", &path))?;
    let mut times = [time(command(task, "sh", &task.directory)?.arg(&path))?];
    let last = task.directory.join(format!("d{}", ROUNDS - 1));
    let found = fs::read_to_string(&last).map_err(system("reading", &last))?;
    if found.trim() != (ROUNDS - 1).to_string() {
        return Err(CliError::system("running the script")(io::Error::other(format!("the last file holds '{found}'"))));
    }
    Ok(vec![Measurement::median("shell script of 1,000 commands", Summary::of(&mut times))])
}
