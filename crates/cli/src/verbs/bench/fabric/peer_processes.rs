//! Starts the other processes of `ashlar bench fabric`, and ends them.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use super::peer::{PeerAddresses, PeerTask};
use crate::error::CliError;
use crate::system::background::this_program;

/// A process that serves a [`PeerTask`]. Dropping it ends the process.
pub struct PeerProcess {
    child: Child,
    /// Its end tells the process that the command has ended.
    input: Option<ChildStdin>,
    output: Option<BufReader<ChildStdout>>,
}

impl Drop for PeerProcess {
    fn drop(&mut self) {
        // If it has ended, no thread has waited for it yet, so its number is still its own.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl PeerProcess {
    /// Starts a process, and waits until it serves.
    pub fn start(task: &PeerTask) -> Result<(Self, PeerAddresses), CliError> {
        let failed = || CliError::system("starting the peer of the benchmark");
        let mut command = Command::new(this_program()?);
        // A group of its own: Ctrl-C reaches the command alone, which ends the process in order.
        command.arg("bench-peer").current_dir("/").process_group(0).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().map_err(failed())?;
        let (input, output) = (child.stdin.take(), child.stdout.take().map(BufReader::new));
        let mut process = Self { child, input, output };
        let addresses = process.assign_task(task).map_err(failed())?;
        Ok((process, addresses))
    }

    fn assign_task(&mut self, task: &PeerTask) -> io::Result<PeerAddresses> {
        let (Some(input), Some(output)) = (&mut self.input, &mut self.output) else {
            return Err(io::ErrorKind::BrokenPipe.into());
        };
        let line = serde_json::to_string(task)? + "\n";
        input.write_all(line.as_bytes())?;
        let mut said = String::new();
        if output.read_line(&mut said)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        serde_json::from_str::<Result<PeerAddresses, String>>(&said)?.map_err(io::Error::other)
    }

    /// Runs something when the process has ended, in a thread of its own.
    pub fn watch_end(&mut self, run: impl FnOnce() + Send + 'static) {
        let Some(mut output) = self.output.take() else { return };
        std::thread::spawn(move || {
            // It says nothing more.
            let _ = output.read_to_end(&mut Vec::new());
            run();
        });
    }
}
