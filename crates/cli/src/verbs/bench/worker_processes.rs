//! Starts workers, and reads their measurements.

use std::io::Read;
use std::process::{Child, ChildStdout, Command, Stdio};

use ashlar_wire::{DEFER_VARIABLE, MOUNTS_VARIABLE};
use rustix::process::{Pid, Signal, kill_process_group};

use super::case::{Contender, Measurement};
use super::interrupt::Interrupt;
use super::worker::WorkerTask;
use crate::error::CliError;
use crate::system::background::this_program;

/// A worker leads a process group, which includes the programs that it starts. Dropping it ends the whole group.
struct Worker {
    child: Child,
    output: Option<ChildStdout>,
    said: Vec<u8>,
}

impl Drop for Worker {
    fn drop(&mut self) {
        // No thread has waited for it yet, so its number is still its own. If it has ended, the signal has no effect.
        if let Some(group) = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw) {
            let _ = kill_process_group(group, Signal::KILL);
        }
        let _ = self.child.wait();
    }
}

impl Worker {
    fn start(task: &WorkerTask) -> Result<Self, CliError> {
        use std::os::unix::process::CommandExt;
        let program = this_program()?;
        let mut command = Command::new(&program);
        if task.contender == Contender::Run && !task.case.starts_programs() {
            // The beginning of a session is not a cost of its calls, nor are the first calls, which the kernel serves.
            command.env(DEFER_VARIABLE, "0").args(["run", "--"]).arg(&program);
        }
        let words = serde_json::to_string(task).map_err(CliError::system("writing the task"))?;
        command.arg("bench-worker").arg(words).current_dir("/").process_group(0);
        let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn();
        let mut child = child.map_err(CliError::system("starting a worker"))?;
        let output = child.stdout.take();
        Ok(Self { child, output, said: Vec::new() })
    }

    /// Reads the worker's output so far. Returns whether it is complete.
    fn read_output(&mut self) -> Result<bool, CliError> {
        let Some(output) = &mut self.output else { return Ok(true) };
        let mut bytes = [0; 4096];
        let count = output.read(&mut bytes).map_err(CliError::system("listening to a worker"))?;
        self.said.extend_from_slice(&bytes[..count]);
        Ok(count == 0)
    }

    /// Returns its measurements.
    fn outcome(&mut self, task: &WorkerTask) -> Result<Vec<Measurement>, CliError> {
        let failed = |words| CliError::Measuring { case: task.case.name(), contender: task.contender.name(), words };
        let status = self.child.wait().map_err(CliError::system("waiting for a worker"))?;
        match serde_json::from_slice::<Result<Vec<Measurement>, String>>(&self.said) {
            Ok(outcome) => outcome.map_err(failed),
            Err(_) => Err(failed(format!("the process that measures ended with {status}"))),
        }
    }
}

/// Whether all programs that this one starts are under `ashlar run`.
pub fn is_under_run() -> bool {
    std::env::var_os(MOUNTS_VARIABLE).is_some()
}

/// Lets workers do the tasks, all at once, and returns each worker's measurements. If one fails, or a signal comes, all
/// are ended.
pub fn run_workers(tasks: &[WorkerTask], interrupt: &Interrupt) -> Result<Vec<Vec<Measurement>>, CliError> {
    let mut workers = tasks.iter().map(Worker::start).collect::<Result<Vec<_>, _>>()?;
    let mut outcomes = vec![None; tasks.len()];
    while outcomes.contains(&None) {
        let open: Vec<_> = (0..tasks.len()).filter(|number| outcomes[*number].is_none()).collect();
        let outputs: Vec<_> = open.iter().filter_map(|number| workers[*number].output.as_ref()).collect();
        let ready = interrupt.wait_for(&outputs)?;
        for (number, _) in open.into_iter().zip(ready).filter(|(_, is_ready)| *is_ready) {
            if workers[number].read_output()? {
                outcomes[number] = Some(workers[number].outcome(&tasks[number])?);
            }
        }
    }
    Ok(outcomes.into_iter().flatten().collect())
}
