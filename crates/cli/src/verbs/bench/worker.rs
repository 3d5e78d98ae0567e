//! `ashlar bench-worker TASK`: does one task of a case, once, on one contender.
//!
//! The process is started plainly or under `ashlar run`, and works on files as any program does: through libc, by the
//! standard library.

mod breakdown;
mod data;
mod names;
mod programs;
mod turns;

use std::fs::{self, File};
use std::hint::black_box;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::ExitCode;

use super::case::{Case, Contender, Measurement, WorkerTask};
use super::digest_wait::wait_for_digest;
use crate::arguments::BenchWorkerArguments;
use crate::error::CliError;
use crate::system::arena::ArenaLocation;

pub use names::{ONE_PROCESS, TWO_PROCESSES};

/// The name of the page that a pair of workers shares, in the directory `aside`.
pub const PAGE: &str = "page";
/// Bytes of a write that warms up the log.
const LARGE: usize = 1 << 20;

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

impl WorkerTask {
    fn is_floor(&self) -> bool {
        self.contender == Contender::Floor
    }

    /// Waits until the update logs are empty, if there are any.
    fn wait_for_digest(&self) -> Result<(), CliError> {
        match &self.arena {
            Some(arena) => wait_for_digest(&ArenaLocation::at(arena.clone())?),
            None => Ok(()),
        }
    }

    /// Fills the update log once, so that all its pages are in the page table of its writer, and empties it.
    fn warm_log(&self) -> Result<(), CliError> {
        if self.arena.is_none() {
            return Ok(());
        }
        let path = self.directory.join(format!("warm-{}", self.worker));
        let file = create(&path)?;
        let data = vec![3; LARGE];
        for _ in 0..=self.log_bytes / LARGE as u64 * 5 / 4 {
            file.write_all_at(&data, 0).map_err(system("writing", &path))?;
        }
        drop(file);
        fs::remove_file(&path).map_err(system("removing", &path))?;
        self.wait_for_digest()
    }
}

fn create(path: &Path) -> Result<File, CliError> {
    File::options().read(true).write(true).create_new(true).open(path).map_err(system("making", path))
}

/// Uses the attributes, so that the compiler keeps the call.
fn look(found: io::Result<fs::Metadata>) -> io::Result<()> {
    black_box(found?);
    Ok(())
}

fn system(what: &str, path: &Path) -> impl FnOnce(io::Error) -> CliError + use<> {
    CliError::system(format!("{what} {}", path.display()))
}
