//! `ashlar bench-worker TASK`: does one task of a case, once, on one contender.
//!
//! The process is started plainly or under `ashlar run`, and works on files as any program does: through libc, by the
//! standard library.

mod breakdown;
mod data;
mod files;
mod names;
mod programs;
mod task;
mod turns;

use std::process::ExitCode;

use super::case::{Case, Measurement};
use crate::arguments::BenchWorkerArguments;
use crate::error::CliError;

pub use names::{ONE_PROCESS, TWO_PROCESSES};
pub use task::WorkerTask;

/// Does a task, and prints its measurements, or its error, as JSON.
pub fn run(arguments: &BenchWorkerArguments) -> Result<ExitCode, CliError> {
    let task: WorkerTask = serde_json::from_str(&arguments.task).map_err(CliError::system("reading the task"))?;
    let outcome = perform(&task).map_err(|error| error.to_string());
    println!("{}", serde_json::to_string(&outcome).map_err(CliError::system("writing JSON"))?);
    Ok(ExitCode::SUCCESS)
}

fn perform(task: &WorkerTask) -> Result<Vec<Measurement>, CliError> {
    match task.case {
        Case::Append => data::append(task),
        Case::Overwrite => data::overwrite(task),
        Case::Processes => data::after_a_command(task),
        Case::Sustained => data::sustained(task),
        Case::Read => data::read(task),
        Case::Map => data::map(task),
        Case::Create => names::create(task),
        Case::CreateSustained => names::create_sustained(task),
        Case::Stat => names::stat(task),
        Case::Open => names::open(task),
        Case::Readdir => names::readdir(task),
        Case::Turns => turns::turns(task),
        Case::Start => programs::start(task),
        Case::Script => programs::script(task),
        Case::Breakdown => breakdown::breakdown(task),
    }
}
